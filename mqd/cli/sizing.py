"""The requirements of a load: disk, bandwidth, cores, memory, hosts. Arithmetic only; the figures
per core were measured and are in sizing.json, with their source and date.

Sums are over all hosts. Each sum is stored with its formula, so that users can check it. Sizes are
in bytes (1 KB = 1000 bytes), rates per second, times in seconds.

1. CPU work is the sum of three costs: for each batch appended, for each batch forwarded to its
   owner, and for each batch fetched. Each cost is piecewise linear in the batch's bytes between the
   measured sizes. Below the smallest size, the cost is that of the smallest; beyond the largest, the
   last slope continues.
2. Several workers of a host scale less than linearly: n / (1 + contention (n - 1) +
   coherency n (n - 1)), the Universal Scalability Law.
3. Headroom is the part of disk, bandwidth, cores and memory that stays free at the given rate.
4. Brokers never decompress a batch: compression costs the clients, and saves work for brokers,
   network and disks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

SHIPPED_FIGURES = Path(__file__).with_name("sizing.json")
BATCH_HEADER_BYTES = 61
RECORD_FRAMING_BYTES = 10  # lengths, deltas and counts around key and value, as varints
INDEX_ENTRY_BYTES = 20  # 8 by offset, 12 by time
INDEX_INTERVAL_BYTES = 4096  # index.interval.bytes
SEGMENT_S = 7 * 86400  # segment.ms
WIRE_FACTOR = 1.05  # Ethernet, IP and TCP around 1448 bytes
DAY_S = 86400
ROUNDING = 1e-9  # by how much a sum of floats may exceed a whole number


class Unsizable(ValueError):
    """No number of such hosts can carry the load; the message names the limit."""


class Figures(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The contents of sizing.json, measured on the machine that `source` names. The costs are those
    on one core: size of the batch or response in bytes -> CPU time in µs.
    """

    source: str
    date: str
    append_cpu_us: dict[int, float]
    forward_cpu_us: dict[int, float]
    fetch_cpu_us: dict[int, float]
    broker_memory_bytes: int
    worker_memory_bytes: int
    contention: float
    coherency: float
    workers_measured: int


class Load(msgspec.Struct, kw_only=True):
    """The requirements. `compression`: compressed size ÷ original size. `consumers`: groups (or
    readers) that each read everything; `cold_consumers` of them read records that are no longer in
    memory. `lag_s`: how far the others may lag and still be served from memory.
    """

    rate: float
    record_bytes: float
    retention_s: float
    replication: int = 1
    compression: float = 1.0
    consumers: int = 1
    cold_consumers: int = 0
    batch_bytes: int = 16384
    fetch_bytes: int = 65536
    partitions: int = 12
    segment_bytes: int = 1 << 30
    lag_s: float = 60.0
    headroom: float = 0.3
    failures: int | None = None  # hosts that may be lost; None: one when there are replicas


class Host(msgspec.Struct, kw_only=True):
    """The resources of one host. `network_bytes_per_s`: in each direction."""

    cores: int = 16
    memory_bytes: float = 64e9
    disk_bytes: float = 20e12
    disk_bytes_per_s: float = 1e9
    network_bytes_per_s: float = 1.25e9


class Line(msgspec.Struct):
    name: str
    value: float
    unit: str
    formula: str


class Plan(msgspec.Struct):
    """`lines`: each is computed from the load and earlier lines. `hosts_by_resource`: resource -> the
    number of hosts that it requires. `decided_by`: the resource that requires the most.
    """

    lines: list[Line]
    hosts_by_resource: dict[str, int]
    decided_by: str
    notes: list[str]

    def __getitem__(self, name: str) -> float:
        return _value_of(self.lines, name)


def _value_of(lines: list[Line], name: str) -> float:
    return next(line.value for line in lines if line.name == name)


def shipped_figures() -> Figures:
    return figures_from(SHIPPED_FIGURES.read_bytes())


def figures_from(data: bytes) -> Figures:
    """Raises ValueError for an invalid file, naming the field."""
    try:
        figures = msgspec.json.decode(data, type=Figures)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    for name in ("append_cpu_us", "forward_cpu_us", "fetch_cpu_us"):
        points = getattr(figures, name)
        if not points or min(points) <= 0 or min(points.values()) < 0:
            raise ValueError(f"{name} needs costs of at least 0 for sizes above 0")
    return figures


def cost(points: dict[int, float], size: float) -> float:
    """The CPU-µs for `size` bytes (rule 1)."""
    sizes = sorted(points)
    if size <= sizes[0] or len(sizes) == 1:
        return points[sizes[0]]
    upper = next((index for index, known_size in enumerate(sizes) if size <= known_size), len(sizes) - 1)
    low, high = sizes[upper - 1], sizes[upper]
    return max(0.0, points[low] + (points[high] - points[low]) * (size - low) / (high - low))


def speedup(figures: Figures, workers: int) -> float:
    """The work that `workers` workers do on one host, as a multiple of one worker's (rule 2)."""
    return workers / (1 + figures.contention * (workers - 1) + figures.coherency * workers * (workers - 1))


def fewest_workers(figures: Figures, needed_speedup: float, cores: int) -> int | None:
    """The fewest workers with a speedup of at least `needed_speedup`; None: the cores do not
    suffice.
    """
    return next((count for count in range(1, cores + 1) if speedup(figures, count) >= needed_speedup - ROUNDING), None)


class _Sheet:
    def __init__(self) -> None:
        self.lines: list[Line] = []

    def put(self, name: str, value: float, unit: str, formula: str) -> float:
        self.lines.append(Line(name, value, unit, formula))
        return value

    def __getitem__(self, name: str) -> float:
        return _value_of(self.lines, name)


def plan(load: Load, host: Host, figures: Figures) -> Plan:
    """Raises Unsizable."""
    _check(load, host)
    sheet = _Sheet()
    _add_bytes(sheet, load)
    _add_cores(sheet, load, figures)
    hosts_by_resource = _add_hosts(sheet, load, host, figures)
    decided_by = max(hosts_by_resource, key=lambda name: hosts_by_resource[name])
    return Plan(sheet.lines, hosts_by_resource, decided_by, _notes(sheet, load, host, figures))


_POSITIVE = {  # the load's field -> its option
    "rate": "--rate",
    "record_bytes": "--record-size",
    "retention_s": "--retention",
    "compression": "--compression",
    "batch_bytes": "--batch-size",
    "fetch_bytes": "--fetch-size",
    "partitions": "--partitions",
    "segment_bytes": "--segment-size",
    "replication": "--replication",
}
_POSITIVE_OF_HOST = {
    "cores": "--host-cores",
    "memory_bytes": "--host-memory",
    "disk_bytes": "--host-disk",
    "disk_bytes_per_s": "--host-disk-bandwidth",
    "network_bytes_per_s": "--host-network",
}


def _check(load: Load, host: Host) -> None:
    for requirements, options in ((load, _POSITIVE), (host, _POSITIVE_OF_HOST)):
        for name, option in options.items():
            if not getattr(requirements, name) > 0:
                raise Unsizable(f"{option} must be above 0, not {getattr(requirements, name)}")
    if not 0 <= load.headroom < 1:
        raise Unsizable(f"--headroom must be at least 0% and below 100%, not {load.headroom:.0%}")
    if not 0 <= load.cold_consumers <= load.consumers:
        raise Unsizable(f"--cold-consumers must be at most --consumers ({load.consumers}), not {load.cold_consumers}")


def _add_bytes(sheet: _Sheet, load: Load) -> None:
    put, copies = sheet.put, load.replication
    put("produced", load.rate * load.record_bytes, "B/s", "rate × record size")
    day = put(
        "stored_per_day",
        load.rate * load.record_bytes * load.compression * DAY_S,
        "B",
        "rate × record size × compression × 86,400 s",
    )
    stored = put("stored", day * load.retention_s / DAY_S, "B", "stored per day × retention in days")
    put("stored_replicated", stored * copies, "B", "stored × replication")
    count = put(
        "records_per_batch", max(1, load.batch_bytes // load.record_bytes), "", "max(1, batch size ÷ record size)"
    )
    batches = put("batches", load.rate / count, "/s", "rate ÷ records per batch")
    put(
        "batch_fill",
        count * load.partitions / load.rate,
        "s",
        "records per batch × partitions ÷ rate, if one producer writes all",
    )
    size = put(
        "batch",
        BATCH_HEADER_BYTES + count * (load.record_bytes + RECORD_FRAMING_BYTES) * load.compression,
        "B",
        f"{BATCH_HEADER_BYTES} + records per batch × (record size + {RECORD_FRAMING_BYTES}) × compression",
    )
    log = put("log", batches * size, "B/s", "batches × batch, one copy")
    index = put(
        "index",
        log * INDEX_ENTRY_BYTES / max(INDEX_INTERVAL_BYTES, size),
        "B/s",
        f"log × {INDEX_ENTRY_BYTES} ÷ max({INDEX_INTERVAL_BYTES:,}, batch)",
    )
    expiring = put(
        "expiring_segments",
        load.partitions * min(load.segment_bytes, log * SEGMENT_S / load.partitions),
        "B",
        "partitions × min(segment.bytes, log × 7 days ÷ partitions): whole segments expire, so one segment of"
        " each partition is kept longer",
    )
    disk = put(
        "disk_used",
        copies * ((log + index) * load.retention_s + expiring),
        "B",
        "replication × ((log + index) × retention + expiring segments)",
    )
    free = 1 - load.headroom
    put("disk", disk / free, "B", "disk used ÷ (1 - headroom)")
    put("disk_write", copies * (log + index), "B/s", "replication × (log + index)")
    put(
        "disk_read",
        load.cold_consumers * log,
        "B/s",
        "consumers of old records × log; the others are served from memory",
    )
    put(
        "network_in",
        WIRE_FACTOR * log * copies,
        "B/s",
        f"{WIRE_FACTOR} × log × (1 from producers + replication - 1 from leaders)",
    )
    put(
        "network_out",
        WIRE_FACTOR * log * (load.consumers + copies - 1),
        "B/s",
        f"{WIRE_FACTOR} × log × (consumers + replication - 1 to followers)",
    )


def _add_cores(sheet: _Sheet, load: Load, figures: Figures) -> None:
    put = sheet.put
    batches, size, log, copies = sheet["batches"], sheet["batch"], sheet["log"], load.replication
    append, forward, fetch = (
        cost(figures.append_cpu_us, size),
        cost(figures.forward_cpu_us, size),
        cost(figures.fetch_cpu_us, load.fetch_bytes),
    )
    appending = put(
        "cores_appending", batches * append * copies / 1e6, "cores", f"batches × {append:.3g} µs × replication"
    )
    forwarding = put(
        "cores_forwarding",
        batches * forward / 1e6,
        "cores",
        f"batches × {forward:.3g} µs: each arrives at a worker that does not own its partition, at worst",
    )
    fetches = log * (load.consumers + copies - 1) / load.fetch_bytes
    fetching = put(
        "cores_fetching",
        fetches * fetch / 1e6,
        "cores",
        f"log × (consumers + replication - 1) ÷ fetch size × {fetch:.3g} µs",
    )
    busy = put("cores_busy", appending + forwarding + fetching, "cores", "appending + forwarding + fetching")
    put(
        "cores", busy / (1 - load.headroom), "cores", "cores busy ÷ (1 - headroom), before workers slow each other down"
    )


def _add_hosts(sheet: _Sheet, load: Load, host: Host, figures: Figures) -> dict[str, int]:
    """Adds the lines for the number of hosts and for the load of each host. Returns the number of
    hosts that each resource requires.
    """
    put, free = sheet.put, 1 - load.headroom
    copies, log = load.replication, sheet["log"]
    speedup_max = max(speedup(figures, count) for count in range(1, host.cores + 1))
    cached = put(
        "memory_cached",
        copies * log * load.lag_s,
        "B",
        "replication × log × lag: records that consumers this far behind still find in memory",
    )
    broker_memory = figures.broker_memory_bytes + host.cores * figures.worker_memory_bytes
    cache_room = host.memory_bytes * free - broker_memory
    if cache_room <= 0:
        raise Unsizable(
            f"a broker with {host.cores} workers takes {broker_memory / 1e9:.2g} GB, more than a host with"
            f" {host.memory_bytes / 1e9:.2g} GB has if {load.headroom:.0%} stay free: increase --host-memory"
        )
    needs = {
        "disk": sheet["disk"] / host.disk_bytes,
        "disk bandwidth": (sheet["disk_write"] + sheet["disk_read"]) / free / host.disk_bytes_per_s,
        "network in": sheet["network_in"] / free / host.network_bytes_per_s,
        "network out": sheet["network_out"] / free / host.network_bytes_per_s,
        "cores": sheet["cores"] / speedup_max,
        "memory": cached / cache_room,
        "replication": float(copies),
    }
    spare = load.failures if load.failures is not None else int(copies > 1)
    hosts_by_resource = {
        name: max(1, math.ceil(need - ROUNDING)) + (spare if name != "replication" else 0)
        for name, need in needs.items()
    }
    hosts = put(
        "hosts",
        max(hosts_by_resource.values()),
        "",
        f"max(replication, what each resource requires + {spare} that may be lost)",
    )
    loaded_hosts = max(1, int(hosts) - spare)
    cores_per_host = sheet["cores"] / loaded_hosts
    workers = fewest_workers(figures, cores_per_host, host.cores)
    if workers is None:
        raise Unsizable(
            f"{host.cores} workers on one host do the work of {speedup_max:.3g} independent ones, but the work"
            f" of {cores_per_host:.3g} is needed: use more hosts, or larger batches"
        )
    per_host = f" ÷ {loaded_hosts} hosts" if loaded_hosts > 1 else ""
    put(
        "workers_per_host",
        workers,
        "",
        f"fewest n with n ÷ (1 + {figures.contention:g} (n - 1) + {figures.coherency:g} n (n - 1)) ≥ cores{per_host}",
    )
    put(
        "memory_per_host",
        (figures.broker_memory_bytes + workers * figures.worker_memory_bytes + cached / loaded_hosts) / free,
        "B",
        f"(broker + workers + memory cached{per_host}) ÷ (1 - headroom)",
    )
    for name in ("disk", "disk_write", "disk_read", "network_in", "network_out"):
        put(
            f"{name}_per_host",
            sheet[name] / loaded_hosts,
            "B" if name == "disk" else "B/s",
            f"{name.replace('_', ' ')}{per_host}",
        )
    put(
        "partitions_min_required",
        max(hosts * workers, math.ceil(sheet["cores_appending"] / copies / free)),
        "",
        "max(hosts × workers, cores to append one copy ÷ (1 - headroom)): each partition has one owner",
    )
    return hosts_by_resource


def _notes(sheet: _Sheet, load: Load, host: Host, figures: Figures) -> list[str]:
    notes = [f"figures per core: {figures.source} ({figures.date}); over loopback, without a network card's interrupts"]
    workers, partitions_min = sheet["workers_per_host"], sheet["partitions_min_required"]
    if workers > figures.workers_measured:
        notes.append(
            f"the figures for {workers:.0f} workers on a host are extrapolated from at most"
            f" {figures.workers_measured}; to measure on such a host: python -m perf scaling"
        )
    fill_ms = sheet["batch_fill"] * 1000
    notes.append(
        f"a batch of {sheet['records_per_batch']:.0f} records fills in {fill_ms:.3g} ms times the number of producers;"
        " with a shorter linger.ms, batches are smaller and cost more per record (--batch-size)"
    )
    if load.partitions < partitions_min:
        notes.append(f"{load.partitions} partitions leave workers without work: use {partitions_min:.0f} or more")
    if load.replication > 1:
        notes.append(
            "a follower is assumed to cost an append, and its leader a fetch; a measured cluster spent"
            " somewhat less (docs/scale.md)"
        )
    if load.compression < 1:
        notes.append("compressing and decompressing is the clients' work, and not included here")
    return notes


def to_json(load: Load, host: Host, figures: Figures, result: Plan) -> dict[str, Any]:
    return {
        "load": json.loads(msgspec.json.encode(load)),
        "host": json.loads(msgspec.json.encode(host)),
        "figures": json.loads(msgspec.json.encode(figures)),
        "result": {line.name: line.value for line in result.lines},
        "units": {line.name: line.unit for line in result.lines},
        "hosts_by_resource": result.hosts_by_resource,
        "decided_by": result.decided_by,
        "notes": result.notes,
    }
