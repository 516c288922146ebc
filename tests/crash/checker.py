"""Invariants after any crash, as a pure function: clients' records in, violations out.

Promises
    C1  lost        an acknowledged record is at its acknowledged offset, unless that is below the
                    log start offset. One that was acknowledged without an offset, as a duplicate
                    of a batch that the broker no longer remembers, is anywhere in its partition
    C2  duplicate   a record of an idempotent producer is in the log at most once
    C3  reordered   the records of an idempotent producer are in its partition in the order in which
                    they were sent
    C4  changed     (partition, offset) has one value for every observer, at all times:
                    acknowledgements, consumers, the final log
    C5  vanished    a record that a consumer read is in the final log
    C6  corrupt     each value is one that a producer created, byte for byte
    C7  gap         a log without compaction has each offset from log start to log end exactly once,
                    in order
    C8  disordered  one consumer reads each partition's offsets ascending without a gap
    C9  unsent      no record is read that was never sent

A topic in `volatile_topics` (flush.on.ack=false after a power cut) may lose its end: C1, C4 and C5
do not apply to it.
"""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterable, Iterator

TopicPartition = tuple[str, int]
Identity = tuple[str, int]  # producer, counter


@dataclasses.dataclass(frozen=True, slots=True)
class Violation:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclasses.dataclass(frozen=True, slots=True)
class Acknowledged:
    producer: str
    counter: int
    topic: str
    partition: int
    offset: int | None
    at_ns: int  # CLOCK_MONOTONIC, when the client got the acknowledgement


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    observer: str
    topic: str
    partition: int
    offset: int
    value: bytes
    at_ns: int


@dataclasses.dataclass(slots=True)
class FinalLog:
    log_start_offset: int
    log_end_offset: int
    records: list[tuple[int, bytes]]  # as returned to a reader


@dataclasses.dataclass(slots=True)
class History:
    acknowledged: list[Acknowledged] = dataclasses.field(default_factory=list)
    seen: list[Seen] = dataclasses.field(default_factory=list)
    sent: dict[str, int] = dataclasses.field(default_factory=dict)  # producer -> how many were passed to it
    idempotent: set[str] = dataclasses.field(default_factory=set)

    def until(self, at_ns: int) -> History:
        """The clients' records up to that time."""
        return History(
            [one for one in self.acknowledged if one.at_ns < at_ns],
            [one for one in self.seen if one.at_ns < at_ns],
            self.sent,
            self.idempotent,
        )


def make_value(producer: str, counter: int) -> bytes:
    """Unique, with a length and content derived from its name, and a checksum."""
    body = b"%s:%d:" % (producer.encode(), counter)
    body += random.Random(zlib.crc32(body)).randbytes(zlib.adler32(body) % 400)
    return body + zlib.crc32(body).to_bytes(4, "big")


def identity_of(value: bytes | None) -> Identity:
    """Raises ValueError when no producer created this value."""
    if not value or value.count(b":") < 2 or zlib.crc32(value[:-4]) != int.from_bytes(value[-4:], "big"):
        raise ValueError(f"a value that no producer made: {(value or b'')[:60]!r}")
    producer, counter, _ = value.split(b":", 2)
    return producer.decode(), int(counter)


class _Checker:
    def __init__(
        self, history: History, final: dict[TopicPartition, FinalLog], volatile_topics: frozenset[str]
    ) -> None:
        self.history = history
        self.final = final
        self.volatile_topics = volatile_topics
        self.found: list[Violation] = []
        self.identities: dict[bytes, Identity | None] = {}
        # (partition, offset) -> (identity, source)
        self.reported: dict[tuple[str, int, int], tuple[Identity, str]] = {}

    def add(self, kind: str, text: str) -> None:
        self.found.append(Violation(kind, text))

    def identity(self, value: bytes, where: Callable[[], str]) -> Identity | None:
        if value not in self.identities:
            try:
                found: Identity | None = identity_of(value)
            except ValueError as error:
                self.add("corrupt", f"{where()}: {error}")
                found = None
            if found and found[1] >= self.history.sent.get(found[0], 0):
                self.add("unsent", f"{where()}: {found} was never sent")
            self.identities[value] = found
        return self.identities[value]

    def report(self, topic: str, partition: int, offset: int, identity: Identity, who: str) -> None:
        if topic in self.volatile_topics:
            return
        before = self.reported.setdefault((topic, partition, offset), (identity, who))
        if before[0] != identity:
            self.add(
                "changed", f"{topic}-{partition} offset {offset}: {before[1]} says {before[0]}, {who} says {identity}"
            )

    def check_final(self) -> None:
        positions: dict[tuple[str, Identity], tuple[int, int]] = {}
        for (topic, partition), log in self.final.items():
            name, due = f"{topic}-{partition}", log.log_start_offset
            latest: dict[str, int] = {}
            for offset, value in log.records:
                if offset != due:
                    self.add("gap", f"{name}: offset {offset} where {due} is due")
                due = offset + 1
                identity = self.identity(value, lambda: f"{name} offset {offset} in the final log")  # noqa: B023 - called at once
                if identity is None:
                    continue
                self.report(topic, partition, offset, identity, "the final log")
                if identity[0] in self.history.idempotent:
                    first = positions.setdefault((topic, identity), (partition, offset))
                    if first != (partition, offset):
                        self.add("duplicate", f"{identity} is in {topic} at {first} and at {(partition, offset)}")
                    elif latest.get(identity[0], -1) > identity[1]:
                        self.add("reordered", f"{name} offset {offset}: {identity} after counter {latest[identity[0]]}")
                    latest[identity[0]] = max(latest.get(identity[0], -1), identity[1])
            if due != log.log_end_offset:
                self.add("gap", f"{name}: the reader ended at {due}, the log end offset is {log.log_end_offset}")

    def check_seen(self) -> None:
        due: dict[tuple[str, str, int], int] = {}
        for one in self.history.seen:
            key = (one.observer, one.topic, one.partition)
            if one.topic not in self.volatile_topics and one.offset != due.get(key, one.offset):
                self.add(
                    "disordered",
                    f"{one.observer} got {one.topic}-{one.partition} offset {one.offset} where {due[key]} was due",
                )
            due[key] = one.offset + 1
            identity = self.identity(
                one.value, lambda: f"{one.topic}-{one.partition} offset {one.offset} at {one.observer}"
            )  # noqa: B023
            if identity is not None:
                self.report(one.topic, one.partition, one.offset, identity, one.observer)

    def check_survival(self) -> None:
        offsets = {key: {offset for offset, _ in log.records} for key, log in self.final.items()}
        starts = {key: log.log_start_offset for key, log in self.final.items()}

        def missing(topic: str, partition: int, offset: int) -> bool:
            key = (topic, partition)
            return (
                topic not in self.volatile_topics
                and offset >= starts.get(key, 0)
                and offset not in offsets.get(key, ())
            )

        for ack in self.history.acknowledged:
            if ack.offset is None:
                if not starts.get((ack.topic, ack.partition)) and self.is_absent(ack):
                    self.add("lost", f"{(ack.producer, ack.counter)} was acknowledged in {ack.topic}-{ack.partition}")
                continue
            self.report(ack.topic, ack.partition, ack.offset, (ack.producer, ack.counter), "its acknowledgement")
            if missing(ack.topic, ack.partition, ack.offset):
                self.add(
                    "lost",
                    f"{(ack.producer, ack.counter)} was acknowledged at {ack.topic}-{ack.partition} offset"
                    f" {ack.offset}",
                )
        for one in self.history.seen:
            if missing(one.topic, one.partition, one.offset):
                self.add("vanished", f"{one.observer} saw {one.topic}-{one.partition} offset {one.offset}")

    def is_absent(self, ack: Acknowledged) -> bool:
        log = self.final.get((ack.topic, ack.partition))
        value = make_value(ack.producer, ack.counter)
        return ack.topic not in self.volatile_topics and (log is None or value not in (one for _, one in log.records))


def check(
    history: History, final: dict[TopicPartition, FinalLog], volatile_topics: Iterable[str] = ()
) -> list[Violation]:
    checker = _Checker(history, final, frozenset(volatile_topics))
    checker.check_final()
    checker.check_seen()
    checker.check_survival()
    return checker.found


def summary(violations: list[Violation], lines: int = 8) -> str:
    """How many of each kind, and the first of each."""
    kinds: dict[str, list[Violation]] = {}
    for one in violations:
        kinds.setdefault(one.kind, []).append(one)

    def report() -> Iterator[str]:
        for kind, ones in kinds.items():
            yield f"{kind} x {len(ones)}"
            yield from (f"    {one}" for one in ones[:lines])

    return "\n".join(report())
