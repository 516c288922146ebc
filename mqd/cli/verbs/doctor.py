"""`mqd doctor`: the problems of a broker and its cluster, the most harmful first, and how to fix
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from mqd.base.clock import now_ms
from mqd.base.cluster_config import format_address
from mqd.base.paths import default_data_dir, layout
from mqd.cli.common import DEFAULT_BOOTSTRAP, CliError, Settings, covers_local_broker, emit_json, options
from mqd.cli.inspection import diagnosis, metrics_page
from mqd.cli.inspection.diagnosis import TITLES, Finding, Harm
from mqd.cli.machine.settings import has_swap

LAST_ERRORS_MAX = 3
LOG_BYTES_MAX = 1 << 20
NOTHING_WRONG_IN_CLUSTER = (
    "nothing is wrong that clients can see; mqd doctor --data-dir DIRECTORY on each broker's host also examines its"
    " processes, disks and metrics"
)


def host_facts(acceptor_pid: int | None) -> dict[str, Any]:
    """Settings of this host's kernel and limits of the acceptor, for diagnosis.host_findings()."""
    facts: dict[str, Any] = {}

    def add(name: str, read: Callable[[], Any]) -> None:
        try:
            facts[name] = read()
        except (OSError, ValueError, IndexError):
            return  # not in this kernel, or not readable by this user

    def free_fraction(path: str) -> float:
        file_system = os.statvfs(path)
        return file_system.f_bavail / file_system.f_blocks if file_system.f_blocks else 1.0

    add("shm_free", lambda: free_fraction("/dev/shm"))
    if has_swap(Path("/")):
        add("swappiness", lambda: int(Path("/proc/sys/vm/swappiness").read_text()))
    add(
        "transparent_hugepages",
        lambda: Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().split("[")[1].split("]")[0],
    )
    if acceptor_pid:
        add(
            "open_files",
            lambda: int(
                next(
                    line.split()[3]
                    for line in Path(f"/proc/{acceptor_pid}/limits").read_text().splitlines()
                    if line.startswith("Max open files")
                )
            ),
        )
    return facts


def _last_errors(logs: Path) -> list[Finding]:
    """The last error lines in the most recently written logs of a broker that is not running."""
    texts = []
    for path in logs.glob("*.log"):
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                file.seek(max(0, status.st_size - LOG_BYTES_MAX))
                texts.append((status.st_mtime_ns, path, file.read().decode(errors="replace")))
        except OSError:
            continue
    lines = []
    for _, path, text in sorted(texts):
        lines += [f"{path.name}: {line}" for line in text.splitlines() if " ERROR " in line or '"error"' in line]
    return [
        Finding(Harm.OUTAGE, f"the broker logged: {line[:300]}", f"see the lines around it in {logs}")
        for line in lines[-LAST_ERRORS_MAX:]
    ]


def _metric_findings(url: str, data_dir: Path, settings: Settings) -> list[Finding]:
    """Examines the broker's metrics page. Reads it a second time if one sample cannot distinguish
    slow from stuck. Raises OSError, ValueError.
    """
    from mqd.cli.cluster_view import PartitionHealth

    samples = metrics_page.read(url, data_dir)
    findings = diagnosis.metric_findings(samples, now_ms() / 1000, str(data_dir))
    try:
        with_one_replica = PartitionHealth(settings).with_one_replica
    except CliError:  # _cluster_findings() reports it
        with_one_replica = frozenset()
    if diagnosis.watermarks_waiting_for_flush(samples, with_one_replica):
        time.sleep(diagnosis.FLUSH_SAMPLE_GAP_S)
        findings += diagnosis.flush_findings(samples, metrics_page.read(url, data_dir), with_one_replica)
    if diagnosis.stalled_partitions(samples):
        time.sleep(diagnosis.COMMIT_INTERVAL_S)
        findings += diagnosis.consumer_findings(samples, metrics_page.read(url, data_dir))
    return findings


def _cluster_findings(settings: Settings) -> list[Finding]:
    from mqd.cli import offline_replicas
    from mqd.cli.broker_lookup import Cluster
    from mqd.cli.cluster_view import ClusterState, PartitionHealth
    from mqd.cli.group_listing import all_groups

    findings: list[Finding] = []
    try:
        state, partitions = ClusterState(settings), PartitionHealth(settings)
    except CliError as error:
        return [
            Finding(
                Harm.OUTAGE,
                f"the cluster cannot be queried: {error}",
                "run mqd cluster status against another broker (-b HOST:PORT); check whether most controllers are down",
            )
        ]
    in_service = {
        broker.broker_id: format_address(broker.host, broker.port) for broker in state.brokers if not broker.is_fenced
    }
    offline = offline_replicas.offline_replicas(partitions.leaderless, in_service)
    findings += diagnosis.cluster_findings(state, partitions, offline, now_ms())
    try:
        with Cluster(settings.bootstrap) as cluster:
            findings += diagnosis.group_findings(all_groups(cluster))
    except CliError as error:
        findings.append(
            Finding(Harm.OUTAGE, f"groups cannot be described: {error}", "run mqd cluster status and mqd group list")
        )
    return findings


def examine(settings: Settings, data_dir: Path | None) -> list[Finding]:
    """Returns the findings, the worst first. `data_dir` None: examines only the cluster."""
    findings: list[Finding] = []
    is_running = True
    if data_dir is not None:
        from mqd.cli.verbs.status import broker_status

        status = broker_status(data_dir)
        is_running = "reason" not in status
        if is_running and settings.bootstrap == DEFAULT_BOOTSTRAP:
            settings = msgspec.structs.replace(settings, bootstrap=format_address(status["host"], status["port"]))
        findings += diagnosis.process_findings(status)
        if not is_running:
            findings += _last_errors(data_dir / "logs")
        elif status.get("metrics_url"):
            try:
                findings += _metric_findings(status["metrics_url"], data_dir, settings)
            except (OSError, ValueError) as error:
                findings.append(
                    Finding(
                        Harm.NUISANCE,
                        f"the metrics page {status['metrics_url']} cannot be read: {error}",
                        "check the token of metrics.token.file and the certificate of metrics.listener",
                    )
                )
        acceptor_pid = next(
            (process["pid"] for process in status["processes"] if process["name"] == "mqd-acceptor"), None
        )
        findings += diagnosis.host_findings(host_facts(acceptor_pid))
    if is_running:
        findings += _cluster_findings(settings)
    return sorted(dict.fromkeys(findings), key=lambda finding: finding.harm)


@click.command(short_help="List problems, the most harmful first, and how to fix them.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Also examine this broker's processes, disks and host, even if it is not running.  [env: MQD_DATA_DIR]",
)
@options
def command(settings: Settings, data_dir: Path | None) -> int:
    """List the problems of a broker and its cluster, the most harmful first, and how to fix them.

    On a broker's host, --data-dir names its data directory. Without it and without --bootstrap, the
    default data directory is used, if it exists. Nothing is changed.

    Exit status: 0 if no problem was found, 1 otherwise.
    """
    if data_dir is None and covers_local_broker(settings):
        data_dir = default_data_dir()
    findings = examine(settings, layout(data_dir).data_dir if data_dir is not None else None)
    if settings.json:
        emit_json(
            [{"harm": finding.harm.name.lower(), "what": finding.what, "cure": finding.cure} for finding in findings]
        )
    else:
        for number, finding in enumerate(findings, 1):
            click.echo(f"{number}. {TITLES[finding.harm]}: {finding.what}\n   {finding.cure}")
        if not findings:
            click.echo("nothing is wrong" if data_dir is not None else NOTHING_WRONG_IN_CLUSTER)
    return 1 if findings else 0
