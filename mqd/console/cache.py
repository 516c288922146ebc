"""Loads data once for many tabs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
ENTRIES_MAX = 256
# a result that took a second to load is kept for twenty: with any number of tabs and any size of
# the cluster, loading costs each side a twentieth of a core
SHARE = 20.0


class Cache:
    """Thread-safe. Concurrent calls for the same entry wait for one load. Failures are not kept. A
    load must not use another entry: it would wait for itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._turns: dict[
            Hashable, tuple[threading.Lock, int]
        ] = {}  # lock, number of callers that hold it or wait for it
        self._lock = threading.Lock()

    def get(self, key: Hashable, seconds: float, load: Callable[[], T]) -> T:
        with self._turn(key):
            begun = self._clock()
            with self._lock:
                found = self._kept.get(key)
            if found is not None and begun < found[0]:
                return found[1]
            value = load()
            now = self._clock()
            with self._lock:
                self._kept[key] = (now + max(seconds, SHARE * (now - begun)), value)
                self._kept.move_to_end(key)
                while len(self._kept) > ENTRIES_MAX:
                    self._kept.popitem(last=False)
            return value

    @contextlib.contextmanager
    def _turn(self, key: Hashable) -> Iterator[None]:
        with self._lock:
            turn, users = self._turns.get(key, (threading.Lock(), 0))
            self._turns[key] = (turn, users + 1)
        try:
            with turn:
                yield
        finally:
            with self._lock:
                users = self._turns[key][1] - 1
                if users:
                    self._turns[key] = (turn, users)
                else:
                    del self._turns[key]

    def clear(self) -> None:
        """Called after a change, so that the next page shows the new state."""
        with self._lock:
            self._kept.clear()
