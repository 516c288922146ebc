"""What a coordinator's core says to its shell, and the one event that every core knows.

A core is the state of one group or one transactional id: pure, one at a time,
`handle(event, now_ms) -> list[Action]` its only mutator. It changes at once; the shell
(mqd/coordinator/runtime.py) writes what it persists and holds every later Reply of the same core
back until that is below the high watermark. When a write fails, the shell throws the cores of that
partition away and loads them anew from the log: no core rolls back by itself.

Order within one list counts: a Reply that rests on a Persist comes after it.
"""

from typing import Protocol

import msgspec

KeyValue = tuple[bytes, bytes | None]  # None: a tombstone


class Persist(msgspec.Struct, frozen=True):
    """Key/value pairs for the coordinator's partition, one atomic batch. With a producer id they
    are part of that producer's transaction: in force, for whoever loads the log, when its commit
    marker is there. Persists keep their order, lazy or not.
    """

    records: tuple[KeyValue, ...]
    producer_id: int = -1
    producer_epoch: int = -1
    # decides nothing (what was persisted before says all that counts): no Reply waits for it, and
    # it waits for company, but not long
    is_lazy: bool = False


PERSIST_BYTES = 1 << 20  # of one of persists()


def persists(records: list[KeyValue]) -> list["Persist"]:
    """Many records that need not be written together: in Persists of at most PERSIST_BYTES, or one
    record, each. What is written in part must be a state that can be loaded.
    """
    found: list[Persist] = []
    first = size = 0
    for number, (key, value) in enumerate(records):
        more = len(key) + len(value or b"") + 32
        if number > first and size + more > PERSIST_BYTES:
            found.append(Persist(tuple(records[first:number])))
            first, size = number, 0
        size += more
    return [*found, Persist(tuple(records[first:]))] if records else []


class Reply(msgspec.Struct, frozen=True):
    """Answers the request of that number; each exactly once. A number that nobody waits for any
    more is ignored by the shell.
    """

    request: int
    response: object


class Timer(msgspec.Struct, frozen=True):
    """(Re)arms the timer of that name of this core; None disarms it. It fires once, as TimerFired,
    not before `at_ms`.
    """

    name: str
    at_ms: int | None


class Effect(msgspec.Struct, frozen=True):
    """Base of what a kind of core wants carried out besides (a transaction's WriteMarkers). Held
    back like a Reply; then the shell hands it, once, to the function that kind of coordinator was
    made with: `carry_out(name, effect, leader_epoch)`. What comes of it returns as an event to the
    same core, unless that has been loaded anew since: on_loaded gives the effects again that its
    log says are still to be carried out.
    """


Action = Persist | Reply | Timer | Effect


class TimerFired(msgspec.Struct, frozen=True):
    name: str


class TransactionEnded(msgspec.Struct, frozen=True):
    """The marker of a transaction; comes to every core that persisted something with that producer
    id since the last one. What it changes needs no Persist: the marker itself is the record.
    """

    producer_id: int
    producer_epoch: int
    committed: bool


class Core(Protocol):
    """One group or one transactional id."""

    def handle(self, event: object, now_ms: int) -> list[Action]: ...

    def replay(self, key: bytes, value: bytes | None) -> None:
        """One record of the log, in order. Raises ValueError for bytes it cannot read: named in the
        broker's log and skipped.
        """

    def on_loaded(self, now_ms: int) -> list[Action]:
        """After the last record: arms timers. May Persist."""

    @property
    def is_empty(self) -> bool:
        """Nothing in it that the next request could not make anew: the shell drops it."""


class TransactionalCore(Core, Protocol):
    """A core whose records may lie in transactions of producers (committed offsets)."""

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        """A record of a transaction whose marker is not in the log yet, after everything that
        counts already; None: it was overtaken and will not count.
        """


class Cores(Protocol):
    """Makes the cores of one kind of coordinator."""

    def core_of(self, key: bytes) -> str | None:
        """The name of the core that a record of the log belongs to; None: a record of a newer
        version, or of nobody. Raises ValueError for bytes that are no key.
        """

    def make(self, name: str) -> Core: ...
