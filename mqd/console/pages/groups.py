"""Consumer and share groups: their lag, their members, and which members delay a rebalance."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from mqd.cli.group_listing import SHARE
from mqd.cli.verbs.group import WAITED_FOR_TEXTS, assignment_text, member_labels
from mqd.console import queries
from mqd.console.page_request import PageRequest
from mqd.console.pages.overview import GROUPS_CACHE_S, REBALANCING_STATES
from mqd.console.rendering import url

PER_PAGE = 25
LAGS_CACHE_S = 2.0
GROUP_CACHE_S = 2.0
ROWS_PER_PAGE = 100


def page(request: PageRequest) -> Response:
    text, state = request.text("q"), request.text("state")
    all_groups = request.cached("groups", GROUPS_CACHE_S, lambda: queries.groups(request.settings))
    matching = [
        group
        for group in all_groups
        if text.casefold() in group.group.casefold() and (not state or group.state == state)
    ]
    number = request.number("page", 1, 1, max(1, -(-len(matching) // PER_PAGE)))
    shown = matching[(number - 1) * PER_PAGE : number * PER_PAGE]
    key = "lags " + " ".join(group.group for group in shown)
    lags, reason = request.attempt(
        lambda: request.cached(key, LAGS_CACHE_S, lambda: queries.group_lags(request.settings, shown))
    )
    return request.page(
        "groups.html",
        groups=shown,
        lags=lags or {},
        count=len(matching),
        total=len(all_groups),
        page=number,
        per_page=PER_PAGE,
        q=text,
        state=state,
        states=sorted({group.state for group in all_groups} | ({state} if state else set())),
        rebalancing_states=REBALANCING_STATES,
        link=lambda page: url("/groups", q=text, state=state, page=page),
        unavailable=[f"lag: {reason}"] if reason else [],
    )


def _seconds(milliseconds: int) -> float | None:
    return None if milliseconds < 0 else milliseconds / 1000


def group_page(request: PageRequest) -> Response:
    name = request.required_text("name")
    details = request.cached(f"group {name}", GROUP_CACHE_S, lambda: queries.group(request.settings, name))
    group, labels = details.group, member_labels(details.group)
    partition_counts: dict[str, int] = {}  # by member id, like `lags`
    lags: dict[str, int] = {}
    for row in details.rows:
        if row.member is not None:
            partition_counts[row.member.member_id] = partition_counts.get(row.member.member_id, 0) + 1
            lags[row.member.member_id] = lags.get(row.member.member_id, 0) + (row.lag or 0)
    members: list[dict[str, Any]] = [
        {
            "label": labels[member.member_id],
            "id": member.member_id,
            "host": member.host,
            "assigned": assignment_text(member.assignment),
            "target": None if member.target is None else assignment_text(member.target),
            "partitions": partition_counts.get(member.member_id, 0),
            "lag": lags.get(member.member_id, 0),
        }
        for member in sorted(group.members, key=lambda member: labels[member.member_id])
    ]
    delaying_members: list[dict[str, Any]] = []
    if group.rebalance is not None:
        delaying_members = [
            {
                "label": labels.get(delaying.member_id, delaying.instance_id or delaying.client_id),
                "host": delaying.host,
                "waited_for": WAITED_FOR_TEXTS.get(delaying.waited_for, delaying.waited_for),
                "waited_s": _seconds(delaying.waited_ms),
                "silent_s": _seconds(delaying.silent_ms),
            }
            for delaying in group.rebalance.held_up_by
        ]
    number = request.number("page", 1, 1, max(1, -(-len(details.rows) // ROWS_PER_PAGE)))
    return request.page(
        "group.html",
        group=group,
        lag=sum(row.lag or 0 for row in details.rows) if details.rows else None,
        oldest=max(details.ages.values(), default=None),
        ages=details.ages,
        rows=details.rows[(number - 1) * ROWS_PER_PAGE : number * ROWS_PER_PAGE],
        row_count=len(details.rows),
        page=number,
        per_page=ROWS_PER_PAGE,
        link=lambda page: url("/group", name=name, page=page),
        largest=max((row.lag or 0 for row in details.rows), default=0) or 1,
        labels=labels,
        members=members,
        delaying_members=delaying_members,
        is_rebalancing=group.state in REBALANCING_STATES,
        is_share=group.type == SHARE,
        is_spark_query=any(row.is_spark_progress for row in details.rows),
        elapsed_s=None if group.rebalance is None else _seconds(group.rebalance.elapsed_ms),
    )
