"""The brokers, the controllers, the disks, and the partitions with problems."""

from __future__ import annotations

from starlette.responses import Response

from mqd.base.clock import now_ms
from mqd.console import queries
from mqd.console.page_request import PageRequest
from mqd.console.pages.overview import HEALTH_CACHE_S

DIRECTORIES_CACHE_S = 10.0


def page(request: PageRequest) -> Response:
    health = request.cached("health", HEALTH_CACHE_S, lambda: queries.health(request.settings))
    loaded, reason = request.attempt(
        lambda: request.cached("directories", DIRECTORIES_CACHE_S, lambda: queries.directories(request.settings))
    )
    directories, missing = loaded if loaded is not None else ([], [reason])
    return request.page(
        "cluster.html",
        health=health,
        directories=directories,
        unavailable=[*health.unavailable, *missing],
        now_ms=now_ms(),
    )
