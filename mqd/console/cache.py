"""Caches what pages show, so that many browser tabs need only one load."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
ENTRIES_MAX = 256
# a result that took a second to load is kept for twenty seconds: however many tabs are open and
# however large the cluster is, loading costs the console and the brokers a twentieth of a core each
KEEP_FACTOR = 20.0


class Cache:
    """Thread-safe. Concurrent calls for the same entry wait for one load. Failures are not kept. A
    load must not call get(): two loads could wait for each other.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()  # (time of expiry, value)
        # (lock, number of callers that hold it or wait for it)
        self._key_locks: dict[Hashable, tuple[threading.Lock, int]] = {}
        self._lock = threading.Lock()
        self._change_count = 0

    def get(self, key: Hashable, seconds: float, load: Callable[[], T]) -> T:
        """Returns the cached value, or loads it. A value is kept for `seconds`, or longer if it was
        slow to load (KEEP_FACTOR).
        """
        with self._locked(key):
            began_s = self._clock()
            with self._lock:
                entry, change_count = self._entries.get(key), self._change_count
            if entry is not None and began_s < entry[0]:
                return entry[1]
            value = load()
            now = self._clock()
            with self._lock:
                if change_count != self._change_count:
                    return value  # it may be from before the change, so the next page loads again
                self._entries[key] = (now + max(seconds, KEEP_FACTOR * (now - began_s)), value)
                self._entries.move_to_end(key)
                while len(self._entries) > ENTRIES_MAX:
                    self._entries.popitem(last=False)
            return value

    @contextlib.contextmanager
    def _locked(self, key: Hashable) -> Iterator[None]:
        with self._lock:
            lock, caller_count = self._key_locks.get(key, (threading.Lock(), 0))
            self._key_locks[key] = (lock, caller_count + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                caller_count = self._key_locks[key][1] - 1
                if caller_count:
                    self._key_locks[key] = (lock, caller_count)
                else:
                    del self._key_locks[key]

    def clear(self) -> None:
        """Called after a change, so that the next page shows the new state."""
        with self._lock:
            self._entries.clear()
            self._change_count += 1
