"""The brokers, the controllers, the disks, and the partitions that lack something."""

from __future__ import annotations

from starlette.responses import Response

from mqd.base.clock import now_ms
from mqd.console import looking
from mqd.console.pages.overview import HEALTH_S
from mqd.console.visit import Visit

DIRECTORIES_S = 10.0


def page(visit: Visit) -> Response:
    health = visit.cached("health", HEALTH_S, lambda: looking.health(visit.settings))
    found, reason = visit.attempt(
        lambda: visit.cached("directories", DIRECTORIES_S, lambda: looking.directories(visit.settings))
    )
    directories, missing = found if found is not None else ([], [reason])
    return visit.page(
        "cluster.html", health=health, directories=directories, hidden=[*health.hidden, *missing], now_ms=now_ms()
    )
