"""The list of topics, filtered and split into pages on the server, and the page of a single topic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from mqd.cli.group_listing import Group
from mqd.console import queries
from mqd.console.page_request import PageRequest
from mqd.console.pages.overview import GROUPS_CACHE_S
from mqd.console.queries import Topic
from mqd.console.rendering import url

PER_PAGE = 50
TOPICS_CACHE_S = 3.0
SIZES_CACHE_S = 10.0
TOTALS_CACHE_S = 2.0
TOPIC_CACHE_S = 2.0
CONFIGS_MAX = 500
SORTS = ("name", "partitions", "size")


def matching(topics: tuple[Topic, ...], text: str, with_internal: bool) -> list[Topic]:
    wanted = text.casefold()
    return [topic for topic in topics if (with_internal or not topic.is_internal) and wanted in topic.name.casefold()]


def page(request: PageRequest) -> Response:
    text, sort, with_internal = request.text("q"), request.text("sort", "name"), bool(request.text("internal"))
    sort = sort if sort in SORTS else "name"
    is_descending = request.text("order") == "down"
    all_topics = request.cached("topics", TOPICS_CACHE_S, lambda: queries.topics(request.settings))
    matches = matching(all_topics, text, with_internal)
    sizes: dict[str, int] = {}
    reason = ""
    if sort == "size":
        found_sizes, reason = request.attempt(
            lambda: request.cached("sizes", SIZES_CACHE_S, lambda: queries.all_sizes(request.settings))
        )
        sizes = found_sizes or {}
    keys: dict[str, Callable[[Topic], Any]] = {
        "name": lambda topic: topic.name,
        "partitions": lambda topic: topic.partition_count,
        "size": lambda topic: sizes.get(topic.name, -1),
    }
    matches.sort(key=keys[sort], reverse=is_descending)
    number = request.number("page", 1, 1, max(1, -(-len(matches) // PER_PAGE)))
    shown = matches[(number - 1) * PER_PAGE : number * PER_PAGE]
    names = [topic.name for topic in shown]
    totals = request.cached(
        f"totals {' '.join(names)}",
        TOTALS_CACHE_S,
        lambda: queries.topic_totals(request.settings, names) if names else {},
    )

    def link(page: int = 1, **changed: Any) -> str:
        query = {
            "q": text,
            "sort": sort,
            "order": "down" if is_descending else "",
            "internal": "1" if with_internal else "",
        }
        return url("/topics", **(query | changed), page=page if page > 1 else "")

    return request.page(
        "topics.html",
        topics=shown,
        totals=totals,
        count=len(matches),
        total=sum(with_internal or not topic.is_internal for topic in all_topics),
        page=number,
        per_page=PER_PAGE,
        q=text,
        sort=sort,
        down=is_descending,
        internal=with_internal,
        link=link,
        unavailable=[f"sizes: {reason}"] if reason else [],
    )


def topic_page(request: PageRequest) -> Response:
    name = request.required_text("name")
    topic = request.cached(f"topic {name}", TOPIC_CACHE_S, lambda: queries.topic(request.settings, name))
    ends = {partition.index: partition.end for partition in topic.partitions if partition.end is not None}

    def consumers() -> list[queries.ConsumingGroup]:
        groups: list[Group] = queries.groups(request.settings)
        return queries.consuming_groups(request.settings, groups, name, ends)

    consuming_groups, reason = request.attempt(lambda: request.cached(f"consumers {name}", GROUPS_CACHE_S, consumers))
    unavailable = [*topic.unavailable, *([f"groups: {reason}"] if reason else ())]
    number = request.number("page", 1, 1, max(1, -(-len(topic.partitions) // PER_PAGE)))
    return request.page(
        "topic.html",
        topic=topic,
        partitions=topic.partitions[(number - 1) * PER_PAGE : number * PER_PAGE],
        page=number,
        per_page=PER_PAGE,
        link=lambda page: url("/topic", name=name, page=page),
        largest=max((partition.size or 0 for partition in topic.partitions), default=0) or 1,
        consuming_groups=consuming_groups,
        own_configs=[config for config in topic.configs if config.is_own],
        other_configs=[config for config in topic.configs if not config.is_own][:CONFIGS_MAX],
        leaderless=sum(partition.leader < 0 for partition in topic.partitions),
        under_replicated=sum(partition.is_under_replicated for partition in topic.partitions),
        unavailable=unavailable,
    )
