"""The runtime's state of one partition of a coordinator's internal topic: its shard while it is
loaded, and the events that it missed while it was not.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mqd.base.tasks import InlineCoroutine
from mqd.coordinator.internal_topic import CoordinatorError, ServedPartition
from mqd.coordinator.shard import Shard
from mqd.protocol.errors import ErrorCode

CoreSelector = Callable[[Shard], Iterable[str]]  # returns the names of the cores that an event concerns


class MissedEvent(NamedTuple):
    """An event that the cores must get after the next load: the partition was not loaded when the
    event was posted, or the event's effects are not written yet. `until_written_count`: the effects
    are written once the shard's `written_count` has reached this number. `select`: selects the
    cores that the event concerns. `failed_names`: the cores that do not get the event again,
    because they failed on it.
    """

    until_written_count: int
    event: object
    select: CoreSelector
    failed_names: frozenset[str] = frozenset()


class PartitionState:
    """One partition, whether loaded or not."""

    __slots__ = (
        "index",
        "last_write",
        "lazy_timer",
        "loaded_epoch",
        "loading",
        "missed",
        "not_before_s",
        "requests",
        "shard",
        "served",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.shard: Shard | None = None
        self.served: ServedPartition | None = None
        self.loading: asyncio.Task[None] | None = None
        # leader epoch of the last load; -1: none, or another host may have led the partition since
        self.loaded_epoch = -1
        self.missed: list[MissedEvent] = []  # since that load
        self.lazy_timer: asyncio.TimerHandle | None = None  # fires when lazy Persists must be written
        self.requests: set[int] = set()  # numbers of the requests that wait for a response
        self.not_before_s = 0.0  # the event loop's time before which the partition is not loaded again
        # the last write to this partition, by this shard or by a discarded predecessor
        self.last_write: InlineCoroutine | None = None

    def forget_missed(self) -> None:
        """Drops the posted events. Called when another host leads the partition, or may have led
        it: that host has handled them.
        """
        self.loaded_epoch, self.missed = -1, []


def expire(future: asyncio.Future[object]) -> None:
    """Fails a request that has waited too long for its partition."""
    if not future.done():
        future.set_exception(CoordinatorError(ErrorCode.COORDINATOR_NOT_AVAILABLE))


def select_core(name: str, _shard: Shard) -> tuple[str, ...]:
    """A CoreSelector (bound to `name`) for an event that concerns only the core `name`."""
    return (name,)
