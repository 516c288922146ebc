"""Share groups as queues: records that wait, are delivered again, or have failed permanently."""

from __future__ import annotations

import shlex

from starlette.responses import Response

from mqd.cli.group_listing import SHARE
from mqd.console import queries, queues
from mqd.console.page_request import PageRequest
from mqd.console.pages.overview import GROUPS_CACHE_S
from mqd.console.rendering import url

PER_PAGE, QUEUES_CACHE_S = 10, 4.0


def page(request: PageRequest) -> Response:
    text = request.text("q")
    all_groups = request.cached("groups", GROUPS_CACHE_S, lambda: queries.groups(request.settings))
    matching = [group for group in all_groups if group.type == SHARE and text.casefold() in group.group.casefold()]
    number = request.number("page", 1, 1, max(1, -(-len(matching) // PER_PAGE)))
    shown = matching[(number - 1) * PER_PAGE : number * PER_PAGE]
    key = "queues " + " ".join(group.group for group in shown)
    share_queues = request.cached(key, QUEUES_CACHE_S, lambda: queues.queues(request.settings, shown)) if shown else []
    return request.page(
        "queues.html",
        queues=share_queues,
        redrives={
            queue.dead_letter_topic: f"mqd queue redrive {shlex.quote(queue.dead_letter_topic)}"
            for queue in share_queues
        },
        count=len(matching),
        page=number,
        per_page=PER_PAGE,
        q=text,
        link=lambda page: url("/queues", q=text, page=page),
    )
