"""One partition of a coordinator's internal topic: its shard while it is loaded, and what is kept
about it while it is not.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mqd.coordinator.internal_topic import Source
from mqd.coordinator.shard import Shard


class Missed(NamedTuple):
    """An event that cores may have to be told once more: nobody was there to hear it, or what they
    made of it is not written yet.
    """

    written: int  # by the shard that has heard it, when it has written so many units; a later one has not heard it
    event: object
    names: Callable[[Shard], Iterable[str]]  # of the cores that it is for,
    failed: frozenset[str] = frozenset()  # but not of these, which have failed of it: they would for ever


class Place:
    """One partition, whether loaded or not."""

    __slots__ = ("epoch", "index", "late", "loading", "missed", "not_before", "requests", "shard", "source", "writing")

    def __init__(self, index: int) -> None:
        self.index = index
        self.shard: Shard | None = None
        self.source: Source | None = None
        self.loading: asyncio.Task[None] | None = None
        self.epoch = -1  # leader epoch that it was loaded for last, while nobody else may have led it since; -1 = none
        self.missed: list[Missed] = []  # since then
        self.late: asyncio.TimerHandle | None = None  # when what is lazy is to be written
        self.requests: set[int] = set()
        self.not_before = 0.0
        self.writing: asyncio.Task[None] | None = None  # the last write, of this shard or of one that was thrown away

    def forget_missed(self) -> None:
        """Another host leads it, or may have: what was posted was heard there."""
        self.epoch, self.missed = -1, []
