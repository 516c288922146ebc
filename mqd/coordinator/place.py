"""One partition of a coordinator's internal topic: its shard while it is loaded, and the state kept
about it while it is not.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mqd.coordinator.internal_topic import CoordinatorError, Source
from mqd.coordinator.shard import Shard
from mqd.protocol.errors import ErrorCode


class Missed(NamedTuple):
    """An event that cores may have to receive once more: the partition was not loaded when it was
    posted, or its effects are not written yet.
    """

    # the shard that received the event has written its effects when its count reaches this; a later
    # shard has not received it
    written: int
    event: object
    names: Callable[[Shard], Iterable[str]]  # the cores that the event concerns,
    # except these, which failed on it and would always fail again
    failed: frozenset[str] = frozenset()


class Place:
    """One partition, whether loaded or not."""

    __slots__ = ("epoch", "index", "late", "loading", "missed", "not_before", "requests", "shard", "source", "writing")

    def __init__(self, index: int) -> None:
        self.index = index
        self.shard: Shard | None = None
        self.source: Source | None = None
        self.loading: asyncio.Task[None] | None = None
        # leader epoch of the last load while no other host may have led it since; -1 = none
        self.epoch = -1
        self.missed: list[Missed] = []  # since that load
        self.late: asyncio.TimerHandle | None = None  # fires when lazy Persists must be written
        self.requests: set[int] = set()
        self.not_before = 0.0
        # the last write, by this shard or by one since discarded
        self.writing: asyncio.Task[None] | None = None

    def forget_missed(self) -> None:
        """Drops the posted events: another host leads the partition, or may have led it, and has
        handled them.
        """
        self.epoch, self.missed = -1, []


def expire(future: asyncio.Future[object]) -> None:
    """Fails a request that has waited for its partition for too long."""
    if not future.done():
        future.set_exception(CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE))


def only(name: str, _shard: Shard) -> tuple[str, ...]:
    """The cores that an event for one core concerns."""
    return (name,)
