"""Counters of the acceptor's own requests, and the start of the metrics page's server.

The page (mqd/acceptor/metrics/page.py) is imported at the first scrape: importing prometheus_client
and its HTTP servers would make an acceptor load 15 % more code at start.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from mqd import native
from mqd.acceptor.broker import Broker
from mqd.acceptor.metrics import health
from mqd.acceptor.metrics.server import MetricsServer, listen
from mqd.base import listeners, logging
from mqd.base.property_values import ConfigError

log = logging.get("acceptor.metrics")
PORT_OFFSET = 552  # offset from the first listener's port: 9644 for 9092
HANDLER_BUCKETS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)


class Page(Protocol):
    def render(self) -> bytes: ...


class RequestStats:
    """Statistics of one API. `counts` has one more element than HANDLER_BUCKETS, for requests slower
    than the last bucket.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(HANDLER_BUCKETS) + 1)
        self.seconds = 0.0
        self.failed_count = 0


class Observer:
    """Counts in the loop's thread. The rendering thread reads the counters without a lock, and may miss the
    newest request.
    """

    def __init__(self, broker: Broker, control: native.Control, worker_count: int, run_dir: Path) -> None:
        self.broker = broker
        self.control = control
        self.worker_count = worker_count
        self.run_dir = run_dir
        self.requests: dict[str, RequestStats] = {}
        self.arena_extents: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self.certificate_expiries_s: Callable[[], dict[str, float]] = dict
        self.shows_partitions = True
        self._page: Page | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def observe(self, api: str, seconds: float, failed: bool) -> None:
        stats = self.requests.get(api)
        if stats is None:
            stats = self.requests[api] = RequestStats()
        stats.counts[bisect_left(HANDLER_BUCKETS, seconds)] += 1
        stats.seconds += seconds
        stats.failed_count += failed

    def watch_arena(self, extents: Callable[[], tuple[int, int]]) -> None:
        """`extents()` gives (used, total) of the acceptor's own arena."""
        self.arena_extents = extents

    def check(self, path: str, on_decided: Callable[[list[str]], None]) -> None:
        """Runs a health check in the acceptor's loop. Callable from any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the acceptor is shutting down
            self._loop.call_soon_threadsafe(lambda: on_decided(self._faults() if path == health.READY else []))

    def _faults(self) -> list[str]:
        return health.faults(self.broker, self.control, self.worker_count)

    def start(self, config: Mapping[str, str], kafka_port: int) -> int:
        """Called in the acceptor's loop. Returns the port, or -1 if the metrics page is disabled
        (admin.port=-1), its port cannot be bound, or its TLS or credentials cannot be used.
        Without metrics.listener, a free port is used if the usual one is taken.
        """
        configured = listeners.metrics_listener(config)
        token_file = config.get("metrics.token.file")
        self.shows_partitions = config.get("metrics.partitions", "true") == "true"
        listener = (
            listen(configured, kafka_port + PORT_OFFSET, bool(config.get("metrics.listener"))) if configured else None
        )
        if configured is None or listener is None:
            return -1
        port: int = listener.getsockname()[1]
        token = tls = None
        try:
            if token_file:
                from mqd.acceptor.metrics.token import Token

                token = Token(Path(token_file))
            if configured.has_tls:
                from mqd.security.python_tls import ServerTls

                tls = ServerTls(config, configured)
        except ConfigError as error:  # `mqd up` checked these files; they have changed since
            log.error("the metrics page is not available", reason=str(error))
            listener.close()
            return -1
        self._loop = asyncio.get_running_loop()
        MetricsServer(listener, self._render, self, token, tls).start()
        return port

    def _render(self) -> bytes:
        """Called by one thread at a time."""
        if self._page is None:
            from mqd.acceptor.metrics.page import Metrics

            self._page = Metrics(self)
        return self._page.render()
