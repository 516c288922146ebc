"""Who may use the cluster: users with a password, rules (ACLs) and quotas."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from mqd.cli import access
from mqd.cli.access import QuotaEntity
from mqd.cli.acl_text import rule_columns
from mqd.console.access_changes import DEFAULT
from mqd.console.page_request import PageRequest
from mqd.console.rendering import url
from mqd.security.acl import AclFilter

PER_PAGE = 100
LIST_CACHE_S = 3.0
TITLES = {"users": "Users", "rules": "Rules", "quotas": "Quotas"}


def page(request: PageRequest) -> Response:
    tab, text = request.text("show", "users"), request.text("q")
    tab = tab if tab in TITLES else "users"
    settings = request.settings

    def load() -> list[tuple[str, ...]]:
        if tab == "users":
            return [_user_row(name, credentials) for name, credentials in sorted(access.users(settings).items())]
        if tab == "rules":
            return [rule_columns(rule) for rule in access.rules(settings, AclFilter())]
        return [_quota_row(entity, values) for entity, values in access.quotas(settings, {})]

    all_rows, reason = request.attempt(lambda: request.cached(f"access {tab}", LIST_CACHE_S, load))
    wanted = text.casefold()
    matching_rows = [row for row in all_rows or () if wanted in " ".join(row).casefold()]
    page_number = request.number("page", 1, 1, max(1, -(-len(matching_rows) // PER_PAGE)))
    return request.page(
        "access.html",
        tab=tab,
        titles=TITLES,
        links=[(title, url("/access", show=name), name == tab) for name, title in TITLES.items()],
        rows=matching_rows[(page_number - 1) * PER_PAGE : page_number * PER_PAGE],
        count=len(matching_rows),
        total=len(all_rows or ()),
        page=page_number,
        per_page=PER_PAGE,
        q=text,
        limits=[access.quota_label(name) for name in access.QUOTA_KEYS],
        link=lambda page: url("/access", show=tab, q=text, page=page),
        reason=reason,
    )


def _user_row(name: str, credentials: list[tuple[int, int]]) -> tuple[str, ...]:
    return name, ", ".join(
        f"{access.mechanism_name(number)} ({iterations:,} iterations)" for number, iterations in credentials
    )


def _quota_row(entity: QuotaEntity, values: dict[str, Any]) -> tuple[str, ...]:
    """A row: user, client id and address ("" if the quota does not depend on it), then the limits."""
    names = (DEFAULT if entity[kind] is None else entity[kind] or "" for kind in access.ENTITY_NOUNS if kind in entity)
    by_kind = dict(zip((kind for kind in access.ENTITY_NOUNS if kind in entity), names, strict=True))
    limits = (access.quota_text(key, values[key]) if key in values else "–" for key in access.QUOTA_KEYS.values())
    return (*(by_kind.get(kind, "") for kind in access.ENTITY_NOUNS), *limits)
