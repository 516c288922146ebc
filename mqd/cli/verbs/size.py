"""`mqd size`: computes the disk, network, cores, memory and hosts that a load needs. Contacts no
broker.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import CliError, emit_json

if TYPE_CHECKING:
    from mqd.cli.sizing import Figures, Plan

_MULTIPLIERS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "p": 10**15,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
    "pi": 1 << 50,
}
_SECONDS_PER_UNIT = {"ms": 0.001, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400, "y": 365 * 86400}


class _Quantity(click.ParamType):
    """A number with a unit. `read` converts a match of `pattern` to the base unit, or returns None."""

    def __init__(self, name: str, pattern: str, read: Any, example: str):
        self.name, self._pattern, self._read, self._example = name, re.compile(pattern, re.IGNORECASE), read, example

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = self._pattern.fullmatch(str(value).strip().replace(",", "").replace("_", ""))
        quantity = self._read(match) if match else None
        if quantity is None:
            self.fail(f"{value!r} is not {self._example}", param, ctx)
        return quantity


_NUMBER = r"(\d+(?:\.\d+)?)\s*"
RATE = _Quantity(
    "RATE",
    _NUMBER + r"([kmg])?(?:/s)?",
    lambda m: float(m[1]) * _MULTIPLIERS[(m[2] or "").lower()],
    "a rate such as 5000, 100k or 1.5M",
)
BYTES = _Quantity(
    "BYTES",
    _NUMBER + r"([kmgtp]i?)?b?(?:/s)?",
    lambda m: float(m[1]) * _MULTIPLIERS[(m[2] or "").lower()],
    "a size such as 100, 1KB (1000), 1KiB (1024) or 20TB",
)
TIME = _Quantity(
    "TIME",
    _NUMBER + r"(ms|s|min|m|h|d|w|y)",
    lambda m: float(m[1]) * _SECONDS_PER_UNIT[m[2].lower()],
    "a time such as 90s, 12h, 7d or 2w",
)
NETWORK = _Quantity(
    "BANDWIDTH",
    _NUMBER + r"([kmgt]i?)?(bit|b)(?:/s|ps)?",
    lambda m: float(m[1]) * _MULTIPLIERS[(m[2] or "").lower()] / (8 if m[3].lower() == "bit" else 1),
    "a bandwidth such as 10Gbit or 1.25GB",
)
SHARE = _Quantity(
    "SHARE", _NUMBER + r"(%)?", lambda m: float(m[1]) / (100 if m[2] else 1), "a share such as 0.3 or 30%"
)
RATIO = _Quantity(
    "RATIO",
    _NUMBER + r"(%|x)?",
    lambda m: (
        None
        if not float(m[1])
        else 1 / float(m[1])
        if (m[2] or "").lower() == "x"
        else float(m[1]) / (100 if m[2] else 1)
    ),
    "a ratio such as 0.5 or 50% (of the original size) or 2x (smaller)",
)


def scaled(value: float, unit: str) -> str:
    """The value for display: four digits and a power of 1000."""
    if not unit.startswith("B"):
        return f"{value:,.0f}{unit}" if unit in ("/s", "") else f"{value:.4g} {unit}"
    for prefix in ("", "K", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.4g} {prefix}{unit}"


def _figures(path: Path | None, overrides: dict[str, float | None]) -> Figures:
    from mqd.cli.sizing import figures_from, shipped_figures

    try:
        figures = figures_from(path.read_bytes()) if path else shipped_figures()
    except ValueError as error:
        raise CliError(f"{path}: {error}") from None
    overridden = {name: value for name, value in overrides.items() if value is not None}
    for name in ("append_cpu_us", "forward_cpu_us", "fetch_cpu_us"):
        if name in overridden:  # the same cost for every size
            setattr(figures, name, {1: overridden.pop(name)})
    for name, value in overridden.items():
        setattr(figures, name, value)
    return figures


def _print_table(plan: Plan, hosts: int) -> None:
    def value_text(name: str) -> str:
        line = next(line for line in plan.lines if line.name == name)
        return scaled(line.value, line.unit)

    def row(title: str, *parts: str) -> None:
        click.echo(f"{title:<18}" + "".join(f"{part:<26}" for part in parts).rstrip())

    row("", "ALL HOSTS", "EACH HOST AT MOST" if hosts > 1 else "")
    row("produced", value_text("produced"))
    row("stored a day", value_text("stored_per_day"))
    row("stored", value_text("stored"))
    row("  with replicas", value_text("stored_replicated"))
    for title, name in (
        ("disk", "disk"),
        ("disk writes", "disk_write"),
        ("disk reads", "disk_read"),
        ("network in", "network_in"),
        ("network out", "network_out"),
    ):
        row(title, value_text(name), value_text(f"{name}_per_host") if hosts > 1 else "")
    row(
        "cores",
        value_text("cores"),
        f"{value_text('workers_per_host')} worker{'s' if plan['workers_per_host'] > 1 else ''}",
    )
    row("memory", "", value_text("memory_per_host")) if hosts > 1 else row("memory", value_text("memory_per_host"))
    reasons = ", ".join(f"{name} {count}" for name, count in plan.hosts_by_resource.items())
    row("hosts", f"{hosts}, for {plan.decided_by} ({reasons})")
    row("partitions", f"at least {value_text('partitions_min_required')}")


def _print_formulas(plan: Plan) -> None:
    click.echo()
    for line in plan.lines:
        click.echo(f"{line.name.replace('_', ' '):<23} {scaled(line.value, line.unit):>16}  = {line.formula}")


@click.command(
    help="Compute the disk, network, cores, memory and hosts that a load needs. Sizes: 1KB = 1000, 1KiB = 1024."
)
@click.option("--rate", type=RATE, required=True, help="Records per second, at the peak.")
@click.option("--record-size", type=BYTES, required=True, help="Key, value and headers of a record.")
@click.option("--retention", type=TIME, required=True, help="How long records are kept.")
@click.option("--replication", type=click.IntRange(1, 16), default=1, show_default=True, help="Copies of each record.")
@click.option(
    "--compression",
    type=RATIO,
    default="1",
    show_default=True,
    help="Compressed size divided by uncompressed size: 0.5, 50% or 2x.",
)
@click.option(
    "--consumers",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Groups that each read everything (fan-out).",
)
@click.option(
    "--cold-consumers",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="How many of the consumers read from the disk.",
)
@click.option(
    "--lag",
    type=TIME,
    default="60s",
    show_default=True,
    help="Lag up to which the other consumers are served from memory.",
)
@click.option(
    "--headroom", type=SHARE, default="30%", show_default=True, help="The part of each resource that stays free."
)
@click.option("--failures", type=click.IntRange(0), help="Hosts that may be lost.  [default: 1 with replicas, else 0]")
@click.option(
    "--batch-size", type=BYTES, default="16KiB", show_default=True, help="batch.size of the producers, uncompressed."
)
@click.option(
    "--fetch-size", type=BYTES, default="64KiB", show_default=True, help="Bytes that a consumer gets in one fetch."
)
@click.option("--partitions", type=click.IntRange(1), default=12, show_default=True, help="Partitions of all topics.")
@click.option("--segment-size", type=BYTES, default="1GiB", show_default=True, help="segment.bytes.")
@click.option("--host-cores", type=click.IntRange(1, 1024), default=16, show_default=True)
@click.option("--host-memory", type=BYTES, default="64GB", show_default=True)
@click.option("--host-disk", type=BYTES, default="20TB", show_default=True)
@click.option("--host-disk-bandwidth", type=BYTES, default="1GB", show_default=True, help="Per second, sequential.")
@click.option("--host-network", type=NETWORK, default="10Gbit", show_default=True, help="Per second, each way.")
@click.option(
    "--figures",
    "figures_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with CPU costs measured on another machine, in the format of the shipped sizing.json.",
)
@click.option(
    "--append-cost",
    type=click.FloatRange(0),
    help="CPU time of appending a batch, in µs.  [default: measured, by size]",
)
@click.option(
    "--forward-cost", type=click.FloatRange(0), help="Additional CPU time if another worker owns the partition, in µs."
)
@click.option("--fetch-cost", type=click.FloatRange(0), help="CPU time of one fetch, in µs.")
@click.option(
    "--contention",
    type=click.FloatRange(0, 1),
    help="Contention between workers of a host (Universal Scalability Law).",
)
@click.option("--coherency", type=click.FloatRange(0, 1), help="Coherency between workers of a host, in the same law.")
@click.option("--formulas", is_flag=True, help="Show the formula of each number.")
@click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), help="Form of the output.  [default: text]"
)
@click.pass_context
def command(
    ctx: click.Context,
    rate: float,
    record_size: float,
    retention: float,
    replication: int,
    compression: float,
    consumers: int,
    cold_consumers: int,
    lag: float,
    headroom: float,
    failures: int | None,
    batch_size: float,
    fetch_size: float,
    partitions: int,
    segment_size: float,
    host_cores: int,
    host_memory: float,
    host_disk: float,
    host_disk_bandwidth: float,
    host_network: float,
    figures_path: Path | None,
    append_cost: float | None,
    forward_cost: float | None,
    fetch_cost: float | None,
    contention: float | None,
    coherency: float | None,
    formulas: bool,
    output_format: str | None,
) -> None:
    from mqd.cli.sizing import Host, Load, Unsizable, plan, to_json

    overrides = {
        "append_cpu_us": append_cost,
        "forward_cpu_us": forward_cost,
        "fetch_cpu_us": fetch_cost,
        "contention": contention,
        "coherency": coherency,
    }
    figures = _figures(figures_path, overrides)
    load = Load(
        rate=rate,
        record_bytes=record_size,
        retention_s=retention,
        replication=replication,
        compression=compression,
        consumers=consumers,
        cold_consumers=cold_consumers,
        batch_bytes=int(batch_size),
        fetch_bytes=int(fetch_size),
        partitions=partitions,
        segment_bytes=int(segment_size),
        lag_s=lag,
        headroom=headroom,
        failures=failures,
    )
    host = Host(
        cores=host_cores,
        memory_bytes=host_memory,
        disk_bytes=host_disk,
        disk_bytes_per_s=host_disk_bandwidth,
        network_bytes_per_s=host_network,
    )
    try:
        sizing = plan(load, host, figures)
    except Unsizable as error:
        raise CliError(str(error)) from None
    if (output_format or (ctx.find_root().obj or {}).get("output_format")) == "json":
        emit_json(to_json(load, host, figures, sizing))
        return
    _print_table(sizing, int(sizing["hosts"]))
    if formulas:
        _print_formulas(sizing)
    click.echo()
    for note in sizing.notes:
        click.echo(f"* {note}")
