"""Pages of transactions: the list (longest open first), one transaction, and hanging transactions."""

from __future__ import annotations

from starlette.responses import Response

from mqd.cli import transactions as txns
from mqd.cli.broker_lookup import Cluster
from mqd.cli.common import Settings
from mqd.cli.transactions import OpenProducer, Transaction
from mqd.cli.verbs.group import ranges_text
from mqd.cli.verbs.txn import STATES
from mqd.console.page_request import PageRequest
from mqd.console.rendering import url

PER_PAGE = 50
LIST_CACHE_S = 3.0
HANGING_CACHE_S = 10.0
# the default transaction.max.timeout.ms: coordinators abort transactions that are open for longer
HANGING_AFTER_MS = 15 * 60_000
LONG_MS = 60_000  # the default transaction.timeout.ms of producers


def _list(settings: Settings) -> tuple[list[Transaction], list[str]]:
    with Cluster(settings.bootstrap) as cluster:
        return txns.all_transactions(cluster, (), -1)


def _hanging(settings: Settings, idle_ms: int) -> list[OpenProducer]:
    with Cluster(settings.bootstrap) as cluster:
        return txns.hanging_transactions(cluster, idle_ms)


def page(request: PageRequest) -> Response:
    if request.text("show") == "hanging":
        return _hanging_page(request)
    text, state = request.text("q"), request.text("state")
    all_transactions, without_coordinator = request.cached(
        "transactions", LIST_CACHE_S, lambda: _list(request.settings)
    )
    matches = [
        transaction
        for transaction in all_transactions
        if text.casefold() in transaction.transactional_id.casefold() and (not state or transaction.state == state)
    ]
    number = request.number("page", 1, 1, max(1, -(-len(matches) // PER_PAGE)))
    return request.page(
        "transactions.html",
        show="",
        transactions=matches[(number - 1) * PER_PAGE : number * PER_PAGE],
        count=len(matches),
        total=len(all_transactions),
        page=number,
        per_page=PER_PAGE,
        q=text,
        state=state,
        states=STATES,
        long_ms=LONG_MS,
        link=lambda page: url("/transactions", q=text, state=state, page=page),
        unavailable=[
            f"transactional id {name}: its coordinator is changing; try again" for name in without_coordinator[:3]
        ],
    )


def _hanging_page(request: PageRequest) -> Response:
    minutes = request.number("idle", HANGING_AFTER_MS // 60_000, 0, 100_000)
    hanging, reason = request.attempt(
        lambda: request.cached(
            f"hanging {minutes}", HANGING_CACHE_S, lambda: _hanging(request.settings, minutes * 60_000)
        )
    )
    number = request.number("page", 1, 1, max(1, -(-len(hanging or ()) // PER_PAGE)))
    return request.page(
        "transactions.html",
        show="hanging",
        hanging=None if hanging is None else hanging[(number - 1) * PER_PAGE : number * PER_PAGE],
        count=len(hanging or ()),
        page=number,
        per_page=PER_PAGE,
        idle=minutes,
        link=lambda page: url("/transactions", show="hanging", idle=minutes, page=page),
        unavailable=[reason] if reason else [],
    )


def transaction_page(request: PageRequest) -> Response:
    name = request.required_text("id")

    def load() -> tuple[Transaction, dict[tuple[str, int], OpenProducer], str]:
        with Cluster(request.settings.bootstrap) as cluster:
            transaction = txns.describe(cluster, name)
            open_producers, reason = request.attempt(lambda: txns.open_by_partition(cluster, transaction))
        return transaction, open_producers or {}, reason

    transaction, open_producers, reason = request.cached(f"transaction {name}", LIST_CACHE_S, load)
    rows = [
        (topic, index, open_producers.get((topic, index)))
        for topic, indexes in sorted(transaction.partitions.items())
        for index in indexes
    ]
    return request.page(
        "transaction.html",
        transaction=transaction,
        rows=rows[: 4 * PER_PAGE],
        row_count=len(rows),
        summary=", ".join(
            f"{topic}:{ranges_text(indexes)}" for topic, indexes in sorted(transaction.partitions.items())
        ),
        unavailable=[f"the offsets at which this transaction is open could not be read: {reason}"] if reason else [],
    )
