"""`mqd status`: the status of the broker of a data directory, from its keeper."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqd.base.clock import now_ms
from mqd.base.paths import default_data_dir, layout
from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE, CliError, emit_json, emit_table

if TYPE_CHECKING:
    from mqd.shm.keeper_messages import Status


def _describe(status: Status) -> dict[str, Any]:
    now = now_ms()
    return {
        "ready": status.ready,
        "host": status.host,
        "port": status.port,
        "metrics_port": status.metrics_port or None,
        "metrics_url": status.metrics_url or None,
        "client_socket": status.client_socket or None,
        "data_dir": status.data_dir,
        "started_ms": status.started_ms,
        "uptime_s": max(0, now - status.started_ms) // 1000,
        "log_level": status.log_level,
        "processes": [
            {
                "name": one.name,
                "role": one.role,
                "pid": one.pid or None,
                "state": one.state,
                "started_ms": one.started_ms,
                "uptime_s": max(0, now - one.started_ms) // 1000 if one.pid else None,
                "restart_count": one.restart_count,
                "confinement": one.confinement or None,
            }
            for one in status.processes
        ],
        "workers": [
            {
                "index": index,
                "connections": connections,
                "partitions": partitions,
                "local_clients": local_clients,
                "local_bytes": local_bytes,
            }
            for index, (connections, partitions, local_clients, local_bytes) in enumerate(
                zip(status.connections, status.partitions, status.local_clients, status.local_bytes, strict=True)
            )
        ],
    }


def broker_status(data_dir: Path) -> dict[str, Any]:
    """The output of `mqd status --format json`; if no broker runs there, few fields, with "reason".
    Raises CliError when this user lacks the permission.
    """
    from mqd.shm.attach import KeeperDenied, KeeperError
    from mqd.shm.tools import KeeperTool

    try:
        with KeeperTool(data_dir) as tool:
            return _describe(tool.status())
    except KeeperDenied as error:
        raise CliError(str(error), EXIT_FAILED) from error
    except KeeperError as error:
        return {"ready": False, "port": None, "data_dir": str(data_dir), "processes": [], "reason": str(error)}


def duration(seconds: int) -> str:
    """ "3 d 4 h", "5 min 2 s": the two largest units."""
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def _confinements(processes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Confinement -> the names of the processes that have it."""
    found: dict[str, list[str]] = {}
    for one in processes:
        if one["confinement"]:
            found.setdefault(one["confinement"], []).append(one["name"])
    return found


def _show(about: dict[str, Any]) -> None:
    state = "ready" if about["ready"] else "not ready (starting, restarting a process, or stopping)"
    click.echo(
        f"{state} on {about['host']}:{about['port']}, up {duration(about['uptime_s'])}, data in {about['data_dir']}"
    )
    metrics = f"metrics on {about['metrics_url']}, " if about["metrics_url"] else ""
    click.echo(f"{metrics}log level {about['log_level']}")
    if about["client_socket"]:
        mebibytes = sum(worker["local_bytes"] for worker in about["workers"]) / (1 << 20)
        click.echo(f"local clients attach at {about['client_socket']}, {mebibytes:.0f} MiB of shared memory in use")
    for confinement, names in _confinements(about["processes"]).items():
        click.echo(f"sandbox of {', '.join(names)}: {confinement}")
    click.echo()
    workers = {f"mqd-worker-{worker['index']}": worker for worker in about["workers"]}
    rows = []
    for one in about["processes"]:
        worker = workers.get(one["name"])
        load = (worker["partitions"], worker["connections"], worker["local_clients"]) if worker else ("", "", "")
        up = "-" if one["uptime_s"] is None else duration(one["uptime_s"])
        rows.append((one["name"], one["pid"] or "-", one["state"], up, one["restart_count"], *load))
    emit_table(("PROCESS", "PID", "STATE", "UP", "RESTARTS", "PARTITIONS", "CONNECTIONS", "LOCAL"), rows)
    for one in about.get("not_served", ()):
        click.echo(one["text"])


@click.command(short_help="Show a broker's processes, ports and partitions.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The broker's data directory.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
)
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output.  [default: text]"
)
@click.pass_context
def command(ctx: click.Context, data_dir: Path | None, output_format: str | None) -> int:
    """Show the broker of a data directory: its uptime, processes and ports, and each worker's
    partitions, connections and local clients (through shared memory).

    Exit status: 0 it is ready, 1 it runs but is not ready, or this user may not query it, 3 it does not
    run.
    """
    as_json = (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json"
    places = layout(data_dir or default_data_dir())
    about = broker_status(places.data_dir)
    if about["ready"]:
        from mqd.cli import offline_replicas as offline

        about["not_served"] = [
            {"partition": one.partition, "directories": list(one.directories), "text": one.text()}
            for one in offline.offline_replicas_of(about["host"], about["port"])
        ]
    if as_json:
        emit_json(about)
    elif "reason" in about:
        click.echo(f"no broker runs in {places.data_dir}")
    else:
        _show(about)
    return EXIT_UNREACHABLE if "reason" in about else 0 if about["ready"] else EXIT_FAILED
