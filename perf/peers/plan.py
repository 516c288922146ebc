"""The plan of the comparison: a base point and one factor varied at a time (a star), or every
combination (--full).

A step is measured for every peer that can do it before the next step begins, and the order of peers
is reversed in every round: A-B, then B-A. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from perf.peers.driving import KAFKA_TOOLS, LEAN, NEUTRAL
from perf.peers.peer import Load

BASE = Load()
SMALL_TOPICS = Load(record_bytes=100, partitions=100)
REPLICATED = Load(replicas=3)
ONE_PARTITION = Load(partitions=1, replicas=3)
RECORD_BYTES = (100, 1024, 16384)
ACKS = ("0", "1", "all")
COMPRESSIONS = ("none", "lz4", "zstd")
PARTITIONS = (1, 6, 100)
SHARE = 0.5  # of each peer's own maximum rate, which is more work for a faster peer
RATES = (10_000, 100_000, 300_000)  # records/s, the same for all peers
MIXED_RATE = 10_000

THROUGHPUT = "throughput"  # produce, then read it all
PRODUCE = "produce"  # produce only
ALONG = "along"  # produce with a concurrent consumer: `share` is a share of this maximum
LATENCY = "latency"  # open loop, produced and read concurrently
START = "start"  # from the command to the first response
FAILOVER = "failover"  # latency while the leader is killed
READERS = "read by ten"
CATCH_UP = "beside a reader from the beginning"
NEIGHBOUR = "beside a producer at full speed"


@dataclasses.dataclass(frozen=True)
class Step:
    """The rate of a latency step is `rate` records/s, or `share` of the peer's own maximum in ALONG.
    `beside`: what else the broker does meanwhile: READERS, CATCH_UP, NEIGHBOUR, or "" for nothing.
    """

    kind: str
    load: Load = BASE
    driver: str = NEUTRAL
    share: float | None = None
    rate: int | None = None
    beside: str = ""
    everyone: bool = False  # peers that do not speak Kafka's protocol too

    def label(self) -> str:
        what = {
            THROUGHPUT: "throughput",
            PRODUCE: "producing",
            ALONG: "produced and read concurrently",
            LATENCY: "latency",
            START: "start-up",
            FAILOVER: "failover",
        }[self.kind]
        if self.kind == START:
            return what
        rate = f" at {self.rate:,} records/s" if self.rate is not None else ""
        rate = f" at {self.share:.0%} of the broker's maximum rate" if self.share is not None else rate
        driver = {KAFKA_TOOLS: " by Kafka's tools", LEAN: " by the leanest client"}.get(self.driver, "")
        beside = f" {self.beside}" if self.beside else ""
        return f"{what}{rate}{beside}{driver}: {self.load.label()}"


def vary(base: Load) -> list[Load]:
    """The base and its neighbours, which differ in one factor. acks=0 and 1 cannot wait for the disk, so
    acks is not varied for a durable base.
    """
    found = [base]
    found += [dataclasses.replace(base, record_bytes=size) for size in RECORD_BYTES if size != base.record_bytes]
    found += [dataclasses.replace(base, acks=acks) for acks in ACKS if acks != base.acks and not base.durable]
    found += [dataclasses.replace(base, compression=codec) for codec in COMPRESSIONS if codec != base.compression]
    found += [dataclasses.replace(base, partitions=count) for count in PARTITIONS if count != base.partitions]
    return found


def all_combinations() -> list[Load]:
    """All combinations, except meaningless ones (fsync before an acknowledgement that does not wait)."""
    points = itertools.product(RECORD_BYTES, ACKS, COMPRESSIONS, PARTITIONS, (False, True))
    return [
        Load(size, acks, codec, count, durable)
        for size, acks, codec, count, durable in points
        if not durable or acks == "all"
    ]


def _latencies(load: Load, everyone: bool = True) -> list[Step]:
    found = [Step(ALONG, load, everyone=everyone), Step(LATENCY, load, share=SHARE, everyone=everyone)]
    return found + [Step(LATENCY, load, rate=rate, everyone=everyone) for rate in RATES]


def mixed() -> list[Step]:
    """Latencies of a broker that has other work. SMALL_TOPICS is the load of a hundred topics of one
    partition each; for the broker the partitions are what counts.
    """
    beside = [(BASE, READERS), (BASE, CATCH_UP), (BASE, NEIGHBOUR), (SMALL_TOPICS, NEIGHBOUR)]
    return [Step(LATENCY, load, rate=MIXED_RATE, beside=kind, everyone=True) for load, kind in beside]


def replicated_steps(quick: bool = False) -> list[Step]:
    """The steps of the peers that are clusters of three brokers."""
    found = [Step(THROUGHPUT, REPLICATED), Step(FAILOVER, ONE_PARTITION)]
    return found if quick else [found[0], *_latencies(REPLICATED, everyone=False), found[1]]


def steps(full: bool = False, quick: bool = False) -> list[Step]:
    """The steps in the order of a round: the most important first, since the time bound may end a round
    early.
    """
    durable = dataclasses.replace(BASE, durable=True)
    if quick:
        return [
            Step(START, everyone=True),
            Step(THROUGHPUT, everyone=True),
            Step(ALONG, everyone=True),
            Step(LATENCY, share=SHARE, everyone=True),
            *mixed(),
            Step(PRODUCE, driver=LEAN, everyone=True),
            Step(THROUGHPUT, driver=KAFKA_TOOLS),
        ]
    found = [Step(START, everyone=True)]
    for load in (BASE, durable):
        found += [Step(THROUGHPUT, load, everyone=True), Step(PRODUCE, load, LEAN, everyone=True)]
        found += _latencies(load)
        found += [Step(THROUGHPUT, load, KAFKA_TOOLS), Step(LATENCY, load, KAFKA_TOOLS)]
    found += mixed()
    others = all_combinations() if full else vary(BASE)[1:]
    return found + [
        Step(THROUGHPUT, load, everyone=_everyone_can(load)) for load in others if load not in (BASE, durable)
    ]


def _everyone_can(load: Load) -> bool:
    """Whether all peers can run this load: codecs, acks and many partitions are Kafka's notions, so other
    peers are compared by record size only.
    """
    return dataclasses.replace(load, record_bytes=BASE.record_bytes) in (BASE, dataclasses.replace(BASE, durable=True))


def order(names: Sequence[str], round_number: int) -> list[str]:
    """A-B-C, then C-B-A: over the rounds the first has no advantage."""
    return list(names) if round_number % 2 == 0 else list(reversed(names))


def count_of(found: Iterable[Step], kind: str) -> int:
    return sum(step.kind == kind for step in found)
