"""Replicas that move between brokers: how far each is, and how long it will take at this pace."""

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
    """`count`: the number of moving partitions; `shown`: those with their progress."""

    count: int
    topics: int
    shown: tuple[PlannedPartition, ...]

    @property
    def copied(self) -> int:
        return sum(one.copied_bytes or 0 for one in self.shown)

    @property
    def total(self) -> int:
        return sum(one.total_bytes or 0 for one in self.shown)


def moves_in_progress(settings: Settings) -> MovesInProgress:
    """Raises CliError."""
    with Broker(settings.bootstrap) as broker:
        found = moves.ongoing_moves(broker)
        topics = sorted({topic for topic, _ in found})
        shown: list[PlannedPartition] = []
        for name in topics[:TOPICS_MAX]:
            plan = {
                partition: [node for node in move.replicas if node not in move.removing]
                for partition, move in sorted(found.items())
                if partition[0] == name
            }
            shown += (one for one in verifying.planned_partitions(broker, name, plan) if one.move is not None)
    return MovesInProgress(len(found), len(topics), tuple(shown[:ROWS_MAX]))


class Pace:
    """Estimates the remaining time from how fast the remaining bytes decrease. Thread-safe; one for each user."""

    def __init__(self) -> None:
        self._begun: tuple[float, int] | None = None
        self._lock = threading.Lock()

    def left_s(self, left: int, now_s: float) -> float | None:
        """None: not known yet."""
        with self._lock:
            if not left or self._begun is None or left > self._begun[1]:
                self._begun = (now_s, left) if left else None
                return None
            since_s, done = now_s - self._begun[0], self._begun[1] - left
            return left * since_s / done if done else None


def page(request: PageRequest) -> Response:
    found = request.cached("moves", MOVES_CACHE_S, lambda: moves_in_progress(request.settings))
    pace = request.cached("pace", float("inf"), Pace)
    health, _ = request.attempt(
        lambda: request.cached("health", HEALTH_CACHE_S, lambda: queries.health(request.settings))
    )
    return request.page(
        "moves.html",
        found=found,
        left_s=pace.left_s(found.total - found.copied, time.monotonic()),
        is_mqd=health is not None and health.is_mqd,
        nodes=health.nodes if health is not None else (),
    )
