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


def _as_json(status: Status) -> dict[str, Any]:
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
                "name": process.name,
                "role": process.role,
                "pid": process.pid or None,
                "state": process.state,
                "started_ms": process.started_ms,
                "uptime_s": max(0, now - process.started_ms) // 1000 if process.pid else None,
                "restart_count": process.restart_count,
                "confinement": process.confinement or None,
            }
            for process in status.processes
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
    """The output of `mqd status --format json`. If no broker is running there, it has only a few
    fields; "reason" is one of them. Raises CliError if this user may not query the broker.
    """
    from mqd.shm.attach import KeeperDenied, KeeperError
    from mqd.shm.tools import KeeperConnection

    try:
        with KeeperConnection(data_dir) as tool:
            return _as_json(tool.status())
    except KeeperDenied as error:
        raise CliError(str(error), EXIT_FAILED) from error
    except KeeperError as error:
        return {"ready": False, "port": None, "data_dir": str(data_dir), "processes": [], "reason": str(error)}


def duration(seconds: int) -> str:
    """Text such as "3 d 4 h" or "5 min 2 s", in the two largest units."""
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])


def _confinements(processes: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Confinement -> the names of the processes that have it."""
    names_by_confinement: dict[str, list[str]] = {}
    for process in processes:
        if process["confinement"]:
            names_by_confinement.setdefault(process["confinement"], []).append(process["name"])
    return names_by_confinement


def _show(status: dict[str, Any]) -> None:
    state = "ready" if status["ready"] else "not ready (starting, restarting a process, or stopping)"
    click.echo(
        f"{state} on {status['host']}:{status['port']}, up {duration(status['uptime_s'])}, data in {status['data_dir']}"
    )
    metrics = f"metrics on {status['metrics_url']}, " if status["metrics_url"] else ""
    click.echo(f"{metrics}log level {status['log_level']}")
    if status["client_socket"]:
        mebibytes = sum(worker["local_bytes"] for worker in status["workers"]) / (1 << 20)
        click.echo(f"local clients attach at {status['client_socket']}, {mebibytes:.0f} MiB of shared memory in use")
    for confinement, names in _confinements(status["processes"]).items():
        click.echo(f"sandbox of {', '.join(names)}: {confinement}")
    click.echo()
    workers = {f"mqd-worker-{worker['index']}": worker for worker in status["workers"]}
    rows = []
    for process in status["processes"]:
        worker = workers.get(process["name"])
        load = (worker["partitions"], worker["connections"], worker["local_clients"]) if worker else ("", "", "")
        up = "-" if process["uptime_s"] is None else duration(process["uptime_s"])
        rows.append((process["name"], process["pid"] or "-", process["state"], up, process["restart_count"], *load))
    emit_table(("PROCESS", "PID", "STATE", "UP", "RESTARTS", "PARTITIONS", "CONNECTIONS", "LOCAL"), rows)
    for replica in status.get("not_served", ()):
        click.echo(replica["text"])


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

    Exit status: 0 if the broker is ready; 1 if it is running but not ready, or if this user may not
    query it; 3 if it is not running.
    """
    as_json = (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json"
    paths = layout(data_dir or default_data_dir())
    status = broker_status(paths.data_dir)
    if status["ready"]:
        from mqd.cli import offline_replicas as offline

        status["not_served"] = [
            {"partition": replica.partition, "directories": list(replica.directories), "text": replica.text()}
            for replica in offline.offline_replicas_of(status["host"], status["port"])
        ]
    if as_json:
        emit_json(status)
    elif "reason" in status:
        click.echo(f"no broker is running in {paths.data_dir}")
    else:
        _show(status)
    return EXIT_UNREACHABLE if "reason" in status else 0 if status["ready"] else EXIT_FAILED
