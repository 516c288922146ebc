"""`mqd monitoring`: writes configuration files for Prometheus and Grafana."""

import json
from pathlib import Path

import click

from mqd.monitoring import alerts, dashboards

RULES_FILE, CONFIG_FILE = "mqd.rules.yml", "prometheus.yml"


def prometheus_config(
    targets: tuple[str, ...], ca: Path | None, token_file: Path | None, cluster: str | None = None
) -> str:
    """The configuration of a Prometheus that scrapes `targets`. `ca`: set if the brokers' pages use
    TLS. `cluster`: a name that distinguishes this cluster's metrics from those of others.
    """
    labels = f", labels: {{{alerts.CLUSTER_LABEL}: {json.dumps(cluster)}}}" if cluster else ""
    lines = [
        "global:",
        "  scrape_interval: 15s",
        f"rule_files: [{json.dumps(RULES_FILE)}]",
        "scrape_configs:",
        f"  - job_name: {alerts.JOB_NAME}",
        f"    static_configs: [{{targets: {json.dumps(list(targets))}{labels}}}]",
    ]
    if ca is not None:
        lines += ["    scheme: https", f"    tls_config: {{ca_file: {json.dumps(str(ca.resolve()))}}}"]
    if token_file is not None:
        lines.append(f"    authorization: {{credentials_file: {json.dumps(str(token_file.resolve()))}}}")
    return "\n".join(lines) + "\n"


@click.command(short_help="Write alerts for Prometheus and dashboards for Grafana.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--target",
    "targets",
    multiple=True,
    default=("127.0.0.1:9644",),
    show_default=True,
    metavar="HOST:PORT",
    help="A broker's metrics page, as mqd status shows it; repeat the option for each broker.",
)
@click.option(
    "--ca",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The CA's PEM file, if the pages use TLS.",
)
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The brokers' metrics.token.file.",
)
@click.option("--cluster", metavar="NAME", help="The cluster's name, if this Prometheus scrapes several clusters.")
@click.option(
    "--runbook", default="docs/monitoring.md", show_default=True, help="Address of the page that alerts link to."
)
def command(
    directory: Path,
    targets: tuple[str, ...],
    ca: Path | None,
    token_file: Path | None,
    cluster: str | None,
    runbook: str,
) -> None:
    """Write alerts for Prometheus and dashboards for Grafana.

    \b
    DIRECTORY/prometheus.yml    scrapes the brokers, and loads the rules
    DIRECTORY/mqd.rules.yml     alerts
    DIRECTORY/grafana/*.json    dashboards: the cluster, a topic, a group, inside a broker
    """
    (directory / "grafana").mkdir(parents=True, exist_ok=True)
    files = {
        CONFIG_FILE: prometheus_config(targets, ca, token_file, cluster),
        RULES_FILE: alerts.render_rules(runbook),
        **{f"grafana/{board.uid}.json": dashboards.render_dashboard(board) + "\n" for board in dashboards.DASHBOARDS},
    }
    for name, text in files.items():
        (directory / name).write_text(text)
        click.echo(directory / name)
