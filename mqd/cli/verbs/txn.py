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
# the default transaction.max.timeout.ms: coordinators abort transactions that are open for longer
_HANGING_AFTER = "15m"


class Duration(click.ParamType):
    """A duration such as 90s, 15m, 2h, 1d or 500ms, converted to milliseconds."""

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


def _partitions_text(partitions: dict[str, list[int]]) -> str:
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
    "--hanging",
    is_flag=True,
    help="Only transactions that no coordinator knows, but that are open in a partition: they never end.",
)
@click.option(
    "--idle",
    type=Duration(),
    default=_HANGING_AFTER,
    show_default=True,
    help="With --hanging: only those that have written nothing for this long.",
)
def list_(settings: Settings, states: tuple[str, ...], longer_than: int | None, hanging: bool, idle: int) -> None:
    """List transactions: the longest open first, then by transactional id."""
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
        transactions, unavailable = txns.all_transactions(cluster, states, -1 if longer_than is None else longer_than)
    report_left_out("transactional id", unavailable)
    if settings.json:
        emit_json([_transaction_json(transaction) for transaction in transactions])
    elif transactions:
        rows = [
            (
                transaction.transactional_id,
                transaction.state,
                _duration_text(transaction.open_ms),
                transaction.producer_id,
                transaction.producer_epoch,
                sum(map(len, transaction.partitions.values())),
            )
            for transaction in transactions
        ]
        emit_table(("TRANSACTIONAL ID", "STATE", "OPEN FOR", "PRODUCER ID", "EPOCH", "PARTITIONS"), rows)
    elif not unavailable:
        click.echo("no such transactions" if states or longer_than is not None else "no transactional ids")


def _transaction_json(transaction: "Transaction") -> dict[str, Any]:
    return {
        "transactional_id": transaction.transactional_id,
        "state": transaction.state,
        "producer_id": transaction.producer_id,
        "producer_epoch": transaction.producer_epoch,
        "timeout_ms": transaction.timeout_ms,
        "started_ms": transaction.started_ms if transaction.open_ms is not None else None,
        "open_ms": transaction.open_ms,
        "partitions": transaction.partitions,
    }


def _producer_json(producer: "OpenProducer") -> dict[str, Any]:
    return {
        "topic": producer.topic,
        "partition": producer.partition,
        "start_offset": producer.start_offset,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.producer_epoch,
        "coordinator_epoch": producer.coordinator_epoch,
        "idle_ms": producer.idle_ms,
    }


def _show_hanging(settings: Settings, open_producers: "list[OpenProducer]") -> None:
    if settings.json:
        emit_json([_producer_json(producer) for producer in open_producers])
    elif open_producers:
        rows = [
            (
                producer.topic,
                producer.partition,
                producer.start_offset,
                producer.producer_id,
                producer.producer_epoch,
                _duration_text(producer.idle_ms),
            )
            for producer in open_producers
        ]
        emit_table(("TOPIC", "PARTITION", "START OFFSET", "PRODUCER ID", "EPOCH", "SILENT FOR"), rows)
        first = open_producers[0]
        click.echo(
            "read_committed consumers are blocked at these offsets; to abort the first transaction:"
            f" mqd txn abort {first.topic} {first.partition} {first.start_offset} --execute"
        )
    else:
        click.echo("no transaction hangs")


# -- describe --------------------------------------------------------------------------------------


@command.command()
@options
@click.argument("name", metavar="TRANSACTIONAL_ID", shell_complete=_complete_id)
def describe(settings: Settings, name: str) -> None:
    """Show the transaction of TRANSACTIONAL_ID.

    Shows its state, age and producer, and its first offset in each partition.
    """
    from mqd.cli import transactions as txns
    from mqd.cli.broker_lookup import Cluster

    with Cluster(settings.bootstrap) as cluster:
        transaction = txns.describe(cluster, name)
        open_producers = txns.open_by_partition(cluster, transaction)
    if settings.json:
        emit_json(
            _transaction_json(transaction)
            | {"open_in": [_producer_json(producer) for producer in open_producers.values()]}
        )
        return
    _show(transaction)
    if transaction.partitions:
        click.echo()
        rows = []
        for topic, indexes in sorted(transaction.partitions.items()):
            for index in indexes:
                producer = open_producers.get((topic, index))
                position = (producer.start_offset, _duration_text(producer.idle_ms)) if producer else ("-", "-")
                rows.append((topic, index, *position))
        emit_table(("TOPIC", "PARTITION", "START OFFSET", "SILENT FOR"), rows)


def _show(transaction: "Transaction") -> None:
    age = (
        f", open for {_duration_text(transaction.open_ms)} of at most {_duration_text(transaction.timeout_ms)}"
        if transaction.open_ms is not None
        else f", timeout {_duration_text(transaction.timeout_ms)}"
    )
    click.echo(
        f"transactional id {transaction.transactional_id}: {transaction.state}{age}, producer id"
        f" {transaction.producer_id}, epoch {transaction.producer_epoch}"
    )


# -- abort -----------------------------------------------------------------------------------------


@command.command()
@options
@click.argument(
    "target",
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
def abort(settings: Settings, target: tuple[str, ...], producer_id: int | None, execute: bool) -> None:
    """Abort a transaction, by id or by its position.

    TRANSACTIONAL_ID: aborts its transaction and fences its producer. TOPIC PARTITION START_OFFSET:
    aborts the transaction that begins there, for hanging transactions (mqd txn list --hanging).
    """
    from mqd.cli.broker_lookup import Cluster

    if len(target) == 1:
        if producer_id is not None:
            raise click.UsageError("--producer-id needs TOPIC PARTITION")
        with Cluster(settings.bootstrap) as cluster:
            _abort_by_id(settings, cluster, target[0], execute)
        return
    if (
        len(target) > 3
        or not all(word.isdecimal() for word in target[1:])
        or (len(target) == 3) == (producer_id is not None)
    ):
        raise click.UsageError(
            "give TRANSACTIONAL_ID, or TOPIC PARTITION START_OFFSET, or TOPIC PARTITION --producer-id ID"
        )
    with Cluster(settings.bootstrap) as cluster:
        _abort_in_partition(
            settings,
            cluster,
            target[0],
            int(target[1]),
            int(target[2]) if len(target) == 3 else None,
            producer_id,
            execute,
        )


def _abort_by_id(settings: Settings, cluster: "Cluster", name: str, execute: bool) -> None:
    from mqd.cli import transactions as txns

    transaction = txns.describe(cluster, name)
    txns.check_open(transaction)
    if execute:
        txns.abort_by_id(cluster, transaction)
    if settings.json:
        emit_json({**_transaction_json(transaction), "aborted": execute})
    else:
        partitions = _partitions_text(transaction.partitions)
        if execute:
            click.echo(
                f"aborted the transaction of {name} in {partitions}; its producer (id {transaction.producer_id}, epoch"
                f" {transaction.producer_epoch}) is fenced"
            )
        else:
            _show(transaction)
            click.echo(f"nothing was changed; --execute would abort it in {partitions} and fence its producer")


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

    open_producer, coordinator_view = txns.find_open_transaction(cluster, topic, index, start_offset, producer_id)
    coordinator_can_abort = coordinator_view is not None and coordinator_view.state == "Ongoing"
    if execute:
        txns.abort_in_partition(cluster, open_producer)
    if settings.json:
        emit_json(
            {
                **_producer_json(open_producer),
                "transactional_id": coordinator_view.transactional_id
                if coordinator_view and coordinator_can_abort
                else None,
                "maybe_committed": txns.maybe_committed(coordinator_view, open_producer),
                "aborted": execute,
            }
        )
        return
    description = (
        f"the transaction of producer id {open_producer.producer_id} that begins at"
        f" {topic}-{index} offset {open_producer.start_offset}"
    )
    if coordinator_view is not None and coordinator_can_abort:
        consequences = (
            f"; it belongs to {coordinator_view.transactional_id}: it {'was' if execute else 'would be'} aborted in"
            f" all its partitions ({_partitions_text(coordinator_view.partitions)}), and its producer fenced"
        )
    else:
        consequences = (
            "" if execute else f"; silent for {_duration_text(open_producer.idle_ms)}, and no coordinator will end it"
        )
    if coordinator_view is not None and txns.maybe_committed(coordinator_view, open_producer):
        consequences += (
            f". {coordinator_view.transactional_id} may already have committed it, and this partition may have lost"
            " the marker in a power failure (possible if the topic has flush.on.ack=false): once the transaction is"
            " aborted, read_committed consumers will never see its records in this partition. To see them:"
            " mqd cat -C -X isolation.level=read_uncommitted"
        )
    click.echo(
        f"aborted {description}{consequences}"
        if execute
        else f"nothing was changed; --execute would abort {description}{consequences}"
    )
