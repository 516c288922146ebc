"""Queries about log directories, for metrics scrapes. Each runs in a thread of its own, so that a
hanging directory costs one thread and does not delay a scrape for long.

Concurrency: any thread.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

CPU_FACTOR = 100
WAIT_S_MAX = 5.0  # how long a scrape waits for a query, counted from the start of the query

T = TypeVar("T")


class CachedQuery(Generic[T]):
    """The last result of `query`. The query runs again only when the result is older than both
    `cache_s` and CPU_FACTOR times the query's CPU time, so a costly query runs less often.
    """

    def __init__(self, query: Callable[[], T], cache_s: float) -> None:
        self._query, self._cache_s = query, cache_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._started_at = self._result_at = float("-inf")
        self._result: T | None = None
        self._cpu_s = 0.0

    def refresh(self) -> None:
        """Starts the query unless it is running or the result is fresh."""
        with self._lock:
            if self._thread is not None or time.monotonic() - self._result_at <= max(
                self._cache_s, CPU_FACTOR * self._cpu_s
            ):
                return
            self._thread, self._started_at = (
                threading.Thread(target=self._run_query, name="measuring", daemon=True),
                time.monotonic(),
            )
            try:
                self._thread.start()
            except RuntimeError:  # no thread is available
                self._thread = None

    def _run_query(self) -> None:
        try:
            self._result, self._result_at = self._query(), time.monotonic()
            self._cpu_s = time.thread_time()
        finally:
            self._thread = None

    def wait_for_result(self) -> T | None:
        """Waits for the running query, at most WAIT_S_MAX, and returns the last result. None: there has
        never been one.
        """
        thread = self._thread
        if thread is not None:
            thread.join(max(0.0, self._started_at + WAIT_S_MAX - time.monotonic()))
        return self._result
