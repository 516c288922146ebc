"""`mqd txn`: list, describe, abort."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import CliError as CliError
from mqd.cli.common import Settings, completing, emit_json, emit_table, options

if TYPE_CHECKING:
    from mqd.cli.broker_lookup import Cluster
    from mqd.cli.transactions import OpenProducer, Transaction

STATES = ("Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead")
_HANGING_AFTER = "15m"  # transaction.max.timeout.ms: no coordinator keeps a transaction open for longer


class Duration(click.ParamType):
    """Milliseconds, from 90s, 15m, 2h, 1d or 500ms."""

    name = "TIME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,9})(ms|s|m|h|d)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a time such as 90s, 15m or 2h", param, ctx)
        return int(match[1]) * {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}[match[2]]


@click.group(help="List, describe and abort transactions; find those that hang.")
def command() -> None:
    pass


@completing
def _complete_id(bootstrap: str) -> Iterable[str]:
    from mqd.cli.transactions import transactional_ids

    return transactional_ids(bootstrap)


def _duration_text(milliseconds: int | None) -> str:
    from mqd.cli.verbs.group import duration_text

    return "-" if milliseconds is None else duration_text(milliseconds)


def _partitions(partitions: dict[str, list[int]]) -> str:
    from mqd.cli.verbs.group import ranges_text

    return " ".join(f"{topic}:{ranges_text(indexes)}" for topic, indexes in sorted(partitions.items())) or "-"


# -- list ------------------------------------------------------------------------------------------


@command.command("list")
@options
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(STATES, case_sensitive=False),
    help="Only transactions in this state; may be repeated.",
)
@click.option("--longer-than", type=Duration(), help="Only those open for longer than this: 90s, 15m, 2h.")
@click.option(
    "--hanging", is_flag=True, help="Those open in a partition but unknown to all coordinators, so that they never end."
)
@click.option(
    "--idle",
    type=Duration(),
    default=_HANGING_AFTER,
    show_default=True,
    help="With --hanging: only those that wrote nothing for this long.",
)
def list_(settings: Settings, states: tuple[str, ...], longer_than: int | None, hanging: bool, idle: int) -> None:
    """List transactions, those that have been open longest first, then by transactional id."""
    from mqd.cli import transactions as txns
    from mqd.cli.broker_lookup import Cluster, report_left_out

    if hanging and (states or longer_than is not None):
        raise click.UsageError(
            "--hanging can only be combined with --idle: no coordinator knows the state of such a transaction"
        )
    with Cluster(settings.bootstrap) as cluster:
        if hanging:
            _show_hanging(settings, txns.hanging_transactions(cluster, idle))
            return
        found, unavailable = txns.all_transactions(cluster, states, -1 if longer_than is None else longer_than)
    report_left_out("transactional id", unavailable)
    if settings.json:
        emit_json([_json(one) for one in found])
    elif found:
        rows = [
            (
                one.transactional_id,
                one.state,
                _duration_text(one.open_ms),
                one.producer_id,
                one.producer_epoch,
                sum(map(len, one.partitions.values())),
            )
            for one in found
        ]
        emit_table(("TRANSACTIONAL ID", "STATE", "OPEN FOR", "PRODUCER ID", "EPOCH", "PARTITIONS"), rows)
    elif not unavailable:
        click.echo(
            "there is no such transaction" if states or longer_than is not None else "there is no transactional id"
        )


def _json(one: "Transaction") -> dict[str, Any]:
    return {
        "transactional_id": one.transactional_id,
        "state": one.state,
        "producer_id": one.producer_id,
        "producer_epoch": one.producer_epoch,
        "timeout_ms": one.timeout_ms,
        "started_ms": one.started_ms if one.open_ms is not None else None,
        "open_ms": one.open_ms,
        "partitions": one.partitions,
    }


def _open_json(one: "OpenProducer") -> dict[str, Any]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "start_offset": one.start_offset,
        "producer_id": one.producer_id,
        "producer_epoch": one.producer_epoch,
        "coordinator_epoch": one.coordinator_epoch,
        "idle_ms": one.idle_ms,
    }


def _show_hanging(settings: Settings, found: "list[OpenProducer]") -> None:
    if settings.json:
        emit_json([_open_json(one) for one in found])
    elif found:
        rows = [
            (
                one.topic,
                one.partition,
                one.start_offset,
                one.producer_id,
                one.producer_epoch,
                _duration_text(one.idle_ms),
            )
            for one in found
        ]
        emit_table(("TOPIC", "PARTITION", "START OFFSET", "PRODUCER ID", "EPOCH", "SILENT FOR"), rows)
        click.echo(
            f"readers of committed records wait there; mqd txn abort {found[0].topic} {found[0].partition}"
            f" {found[0].start_offset} --execute ends the first"
        )
    else:
        click.echo("no transaction hangs")


# -- describe --------------------------------------------------------------------------------------


@command.command()
@options
@click.argument("name", metavar="TRANSACTIONAL_ID", shell_complete=_complete_id)
def describe(settings: Settings, name: str) -> None:
    """Show the transaction of TRANSACTIONAL_ID.

    This includes its state, age and producer, and its first offset in each partition.
    """
    from mqd.cli import transactions as txns
    from mqd.cli.broker_lookup import Cluster

    with Cluster(settings.bootstrap) as cluster:
        found = txns.describe(cluster, name)
        open_producers = txns.open_by_partition(cluster, found)
    if settings.json:
        emit_json(_json(found) | {"open_in": [_open_json(one) for one in open_producers.values()]})
        return
    _show(found)
    if found.partitions:
        click.echo()
        rows = []
        for topic, indexes in sorted(found.partitions.items()):
            for index in indexes:
                one = open_producers.get((topic, index))
                rows.append((topic, index, *((one.start_offset, _duration_text(one.idle_ms)) if one else ("-", "-"))))
        emit_table(("TOPIC", "PARTITION", "START OFFSET", "SILENT FOR"), rows)


def _show(found: "Transaction") -> None:
    age = (
        f", open for {_duration_text(found.open_ms)} of at most {_duration_text(found.timeout_ms)}"
        if found.open_ms is not None
        else f", timeout {_duration_text(found.timeout_ms)}"
    )
    click.echo(
        f"transactional id {found.transactional_id}: {found.state}{age}, producer id {found.producer_id}, epoch"
        f" {found.producer_epoch}"
    )


# -- abort -----------------------------------------------------------------------------------------


@command.command()
@options
@click.argument(
    "what",
    nargs=-1,
    required=True,
    metavar="TRANSACTIONAL_ID | TOPIC PARTITION [START_OFFSET]",
    shell_complete=_complete_id,
)
@click.option(
    "--producer-id",
    type=click.IntRange(0),
    help="With TOPIC PARTITION: the transaction's producer, instead of START_OFFSET.",
)
@click.option("--execute", is_flag=True, help="Abort it.  [default: show what would be aborted]")
def abort(settings: Settings, what: tuple[str, ...], producer_id: int | None, execute: bool) -> None:
    """Abort a transaction, by id or by its position.

    TRANSACTIONAL_ID: its transaction is aborted, and its producer fenced. TOPIC PARTITION
    START_OFFSET: the transaction that begins there, for hanging ones (mqd txn list --hanging).
    """
    from mqd.cli.broker_lookup import Cluster

    if len(what) == 1:
        if producer_id is not None:
            raise click.UsageError("--producer-id goes with TOPIC PARTITION")
        with Cluster(settings.bootstrap) as cluster:
            _abort_by_id(settings, cluster, what[0], execute)
        return
    if len(what) > 3 or not all(word.isdecimal() for word in what[1:]) or (len(what) == 3) == (producer_id is not None):
        raise click.UsageError(
            "give TRANSACTIONAL_ID, or TOPIC PARTITION START_OFFSET, or TOPIC PARTITION --producer-id ID"
        )
    with Cluster(settings.bootstrap) as cluster:
        _abort_in_partition(
            settings, cluster, what[0], int(what[1]), int(what[2]) if len(what) == 3 else None, producer_id, execute
        )


def _abort_by_id(settings: Settings, cluster: "Cluster", name: str, execute: bool) -> None:
    from mqd.cli import transactions as txns

    found = txns.describe(cluster, name)
    txns.check_open(found)
    if execute:
        txns.abort_by_id(cluster, found)
    if settings.json:
        emit_json({**_json(found), "aborted": execute})
    else:
        where = _partitions(found.partitions)
        if execute:
            click.echo(
                f"aborted the transaction of {name} in {where}; its producer (id {found.producer_id}, epoch"
                f" {found.producer_epoch}) is fenced"
            )
        else:
            _show(found)
            click.echo(f"nothing was changed; --execute would abort it in {where} and fence its producer")


def _abort_in_partition(
    settings: Settings,
    cluster: "Cluster",
    topic: str,
    index: int,
    start_offset: int | None,
    producer_id: int | None,
    execute: bool,
) -> None:
    from mqd.cli import transactions as txns

    one, coordinator_view = txns.find_open_transaction(cluster, topic, index, start_offset, producer_id)
    everywhere = coordinator_view is not None and coordinator_view.state == "Ongoing"
    if execute:
        txns.abort_in_partition(cluster, one)
    if settings.json:
        emit_json(
            {
                **_open_json(one),
                "transactional_id": coordinator_view.transactional_id if coordinator_view and everywhere else None,
                "maybe_committed": txns.maybe_committed(coordinator_view, one),
                "aborted": execute,
            }
        )
        return
    what = f"the transaction of producer id {one.producer_id} that begins at {topic}-{index} offset {one.start_offset}"
    if coordinator_view is not None and everywhere:
        also = (
            f": it is that of {coordinator_view.transactional_id}, in {_partitions(coordinator_view.partitions)},"
            f" {'was' if execute else 'would be'} aborted everywhere, and its producer fenced"
        )
    else:
        also = "" if execute else f"; silent for {_duration_text(one.idle_ms)}, and no coordinator will end it"
    if coordinator_view is not None and txns.maybe_committed(coordinator_view, one):
        also += (
            f". It may be the last commit of {coordinator_view.transactional_id}, whose marker was lost in a power"
            " failure (a topic with flush.on.ack=false): once it is aborted, readers of committed records never see it"
            " here. mqd cat -C -X isolation.level=read_uncommitted shows its records"
        )
    click.echo(f"aborted {what}{also}" if execute else f"nothing was changed; --execute would abort {what}{also}")
