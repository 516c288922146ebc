"""The actions that a coordinator's core returns to the runtime, and the one event that every core
handles.

A core is the state of one group or one transactional id. It is pure and handles one event at a
time; `handle(event, now_ms) -> list[Action]` is its only mutator. A core changes its state
immediately. The runtime (mqd/coordinator/runtime.py) writes the core's Persists and holds back
every later Reply of that core until they are below the high watermark. When a write fails, the
runtime discards the cores of that partition and loads them again from the log: no core rolls itself
back.

Order within one list matters: a Reply that depends on a Persist comes after it.
"""

from typing import Any, Protocol

import msgspec

KeyValue = tuple[bytes, bytes | None]  # None: a tombstone


class Persist(msgspec.Struct, frozen=True):
    """Key/value pairs for the coordinator's partition, written as one atomic batch. With a producer
    id they belong to that producer's transaction: a reader of the log applies them when it reaches
    the commit marker. Persists keep their order, lazy ones included.
    """

    records: tuple[KeyValue, ...]
    producer_id: int = -1
    producer_epoch: int = -1
    # No decision depends on a lazy Persist: earlier Persists contain everything that must not be lost.
    # No Reply waits for it. The runtime delays it briefly to batch it with others.
    is_lazy: bool = False


PERSIST_BYTES_MAX = 1 << 20  # limit of each Persist that as_persists() returns


def as_persists(records: list[KeyValue]) -> list["Action"]:
    """Splits records that need not be written together into Persists of at most PERSIST_BYTES_MAX
    (more only if a single record is larger). The log must be loadable after each of them.
    """
    persists: list[Action] = []
    first = size = 0
    for number, (key, value) in enumerate(records):
        record_bytes = len(key) + len(value or b"") + 32
        if number > first and size + record_bytes > PERSIST_BYTES_MAX:
            persists.append(Persist(tuple(records[first:number])))
            first, size = number, 0
        size += record_bytes
    return [*persists, Persist(tuple(records[first:]))] if records else []


class Reply(msgspec.Struct, frozen=True):
    """The response to the request with the number `request`. Each request is answered exactly once.
    The runtime ignores the Reply if the request no longer waits.
    """

    request: int
    response: Any


class Timer(msgspec.Struct, frozen=True):
    """Arms this core's timer `name`. If it is already armed, `at_ms` replaces its time; None
    disarms it. The timer fires once, as TimerFired, not before `at_ms`.
    """

    name: str
    at_ms: int | None


class Effect(msgspec.Struct, frozen=True):
    """Base of the effects that only one kind of core requests (such as a transaction's
    WriteMarkers). The runtime holds an effect back like a Reply, then passes it once to the
    coordinator's function `carry_out(name, effect, leader_epoch)`. The result is passed to the same
    core as an event, unless the core has been reloaded in the meantime: its on_loaded() then
    requests again every effect that the log shows as unfinished.
    """


Action = Persist | Reply | Timer | Effect


class TimerFired(msgspec.Struct, frozen=True):
    name: str


class TransactionEnded(msgspec.Struct, frozen=True):
    """The marker of a transaction was written. The event goes to every core that has persisted
    records with this producer id since the producer's previous marker. The changes that a core then
    makes need no Persist: the marker already records them.
    """

    producer_id: int
    producer_epoch: int
    committed: bool


class Core(Protocol):
    """One group or one transactional id."""

    def handle(self, event: object, now_ms: int) -> list[Action]: ...

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Applies one record of the log; records come in order. Raises ValueError if the record
        cannot be decoded: the broker logs that and skips the record.
        """

    def on_loaded(self, now_ms: int) -> list[Action]:
        """Called after the last record: arms timers. May return Persists."""

    @property
    def is_empty(self) -> bool:
        """True if the next request could recreate everything that the core holds. The runtime then
        drops the core.
        """


class MeasuredCore(Core, Protocol):
    """A core of a coordinator that has a budget (budget.py)."""

    @property
    def size_bytes(self) -> int:
        """Its approximate size in memory. O(1)."""


class TransactionalCore(Core, Protocol):
    """A core whose records may be part of producers' transactions (committed offsets)."""

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        """Applies a record of a transaction whose marker is not in the log yet. Called after all
        replay() calls. A None value means that the record was superseded and will never be applied.
        """


class CoreFactory(Protocol):
    """Makes the cores of one kind of coordinator."""

    def core_name_of(self, key: bytes) -> str | None:
        """The name of the core to which the record with this key belongs; None if it belongs to
        none, or if the key's format is newer than this broker knows. Raises ValueError for bytes
        that are not a key.
        """

    def make(self, name: str) -> Core: ...
