"""Replicas that are moving between brokers: their progress, and the time until all have moved."""

from __future__ import annotations

import threading
import time

import msgspec
from starlette.responses import Response

from mqd.cli import moves, verifying
from mqd.cli.common import Settings
from mqd.cli.kafka_request import Broker
from mqd.cli.verifying import PlannedPartition
from mqd.console import queries
from mqd.console.page_request import PageRequest
from mqd.console.pages.overview import HEALTH_CACHE_S

MOVES_CACHE_S = 2.0
TOPICS_MAX = 20  # topics whose progress is requested: each costs a request to the brokers
ROWS_MAX = 200


class MovesInProgress(msgspec.Struct, frozen=True):
    """`count`: how many partitions are moving; `topic_count`: how many topics they belong to;
    `shown`: the progress of the first partitions.
    """

    count: int
    topic_count: int
    shown: tuple[PlannedPartition, ...]

    @property
    def copied_bytes(self) -> int:
        return sum(partition.copied_bytes or 0 for partition in self.shown)

    @property
    def total_bytes(self) -> int:
        return sum(partition.total_bytes or 0 for partition in self.shown)


def moves_in_progress(settings: Settings) -> MovesInProgress:
    """Raises CliError."""
    with Broker(settings.bootstrap) as broker:
        ongoing = moves.ongoing_moves(broker)
        topics = sorted({topic for topic, _ in ongoing})
        shown: list[PlannedPartition] = []
        for name in topics[:TOPICS_MAX]:
            plan = {
                partition: [node for node in move.replicas if node not in move.removing]
                for partition, move in sorted(ongoing.items())
                if partition[0] == name
            }
            shown += (
                partition
                for partition in verifying.planned_partitions(broker, name, plan)
                if partition.move is not None
            )
    return MovesInProgress(len(ongoing), len(topics), tuple(shown[:ROWS_MAX]))


class Pace:
    """Estimates the remaining time from how fast the remaining bytes decrease. Thread-safe. There is
    one for each user.
    """

    def __init__(self) -> None:
        self._start: tuple[float, int] | None = None  # time in seconds, remaining bytes at this time
        self._lock = threading.Lock()

    def remaining_s(self, remaining_bytes: int, now_s: float) -> float | None:
        """Returns None if the pace is not known yet."""
        with self._lock:
            if not remaining_bytes or self._start is None or remaining_bytes > self._start[1]:
                self._start = (now_s, remaining_bytes) if remaining_bytes else None
                return None
            elapsed_s, copied_bytes = now_s - self._start[0], self._start[1] - remaining_bytes
            return remaining_bytes * elapsed_s / copied_bytes if copied_bytes else None


def page(request: PageRequest) -> Response:
    progress = request.cached("moves", MOVES_CACHE_S, lambda: moves_in_progress(request.settings))
    pace = request.cached("pace", float("inf"), Pace)
    health, _ = request.attempt(
        lambda: request.cached("health", HEALTH_CACHE_S, lambda: queries.health(request.settings))
    )
    return request.page(
        "moves.html",
        progress=progress,
        remaining_s=pace.remaining_s(progress.total_bytes - progress.copied_bytes, time.monotonic()),
        is_mqd=health is not None and health.is_mqd,
        nodes=health.nodes if health is not None else (),
    )
