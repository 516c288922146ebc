"""`mqd topic`: create, list, describe, alter, delete, add-partitions, retire-partitions, reassign."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mqd.base.views import VIEW_OF
from mqd.cli.common import EXIT_FAILED, Settings, complete_topic, emit_json, emit_table, options, pairs
from mqd.cli.common import CliError as CliError

_CREATE_PARTITIONS = 37
_DELETE_TOPICS, _DELETE_TOPICS_VERSION_MIN = 20, 6
_PARTITIONS_MAX = 100_000  # librdkafka's limit for one topic; a broker's limit may be lower
_REPLICAS_MAX = 10_000  # librdkafka's limit; a broker's limit may be lower


@click.group(help="Create, list, describe, alter and delete topics.")
def command() -> None:
    pass


@command.command()
@options
@click.argument("name")
@click.option(
    "-p",
    "--partitions",
    type=click.IntRange(1, _PARTITIONS_MAX),
    help="Number of partitions.  [default: the broker's num.partitions]",
)
@click.option(
    "-r",
    "--replication-factor",
    type=click.IntRange(1, _REPLICAS_MAX),
    help="Replicas of each partition.  [default: the broker's default.replication.factor]",
)
@click.option(
    "-c", "--config", "configs", multiple=True, metavar="KEY=VALUE", help="A property of the topic; may be repeated."
)
@click.option("--if-not-exists", is_flag=True, help="No error when the topic exists.")
@click.option("--dry-run", is_flag=True, help="Have the broker check the request without creating anything.")
def create(
    settings: Settings,
    name: str,
    partitions: int | None,
    replication_factor: int | None,
    configs: tuple[str, ...],
    if_not_exists: bool,
    dry_run: bool,
) -> None:
    """Create the topic NAME."""
    from confluent_kafka import KafkaError, KafkaException
    from confluent_kafka.admin import NewTopic

    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, admin_client, resource_error

    topic = NewTopic(
        name, num_partitions=partitions or -1, replication_factor=replication_factor or -1, config=pairs(configs, "-c")
    )
    existed = False
    admin = admin_client(settings.bootstrap)  # must outlive its futures
    try:
        admin.create_topics([topic], operation_timeout=REQUEST_TIMEOUT_S, validate_only=dry_run)[name].result()
    except KafkaException as error:
        if not (if_not_exists and error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS):
            raise resource_error(f"topic {name}", error) from None
        existed = True
    if settings.json:
        emit_json({"topic": name, "created": not existed and not dry_run, "existed": existed})
    else:
        click.echo(
            f"topic {name} exists"
            if existed
            else f"topic {name} could be created"
            if dry_run
            else f"created topic {name}"
        )


@command.command("list")
@options
@click.option("--internal", is_flag=True, help="Also list topics that begin with two underscores.")
def list_(settings: Settings, internal: bool) -> None:
    """List the topics: a table on a terminal, otherwise only names."""
    from mqd.cli.librdkafka import admin_client, metadata

    topics = metadata(admin_client(settings.bootstrap)).topics
    listed = [topics[name] for name in sorted(topics) if internal or not name.startswith("__")]
    if settings.json:
        emit_json(
            [
                {
                    "topic": topic.topic,
                    "partitions": len(topic.partitions),
                    "replication_factor": _replication_factor(topic),
                }
                for topic in listed
            ]
        )
    elif sys.stdout.isatty():
        emit_table(
            ("TOPIC", "PARTITIONS", "REPLICAS"),
            [(topic.topic, len(topic.partitions), _replication_factor(topic)) for topic in listed],
        )
    else:
        for topic in listed:
            click.echo(topic.topic)


def _replication_factor(topic: Any) -> int:
    return max((len(partition.replicas) for partition in topic.partitions.values()), default=0)


def _offsets(admin: Any, name: str, partitions: list[int]) -> dict[int, tuple[int | None, int | None]]:
    """Partition -> (log start offset, high watermark); None where the broker does not return it."""
    from confluent_kafka import KafkaException, TopicPartition
    from confluent_kafka.admin import OffsetSpec

    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S

    offsets: list[dict[int, int | None]] = []
    requests = [
        admin.list_offsets(
            {TopicPartition(name, index): spec for index in partitions}, request_timeout=REQUEST_TIMEOUT_S
        )
        for spec in (OffsetSpec.earliest(), OffsetSpec.latest())
    ]
    for futures in requests:
        response: dict[int, int | None] = {}
        for partition, future in futures.items():
            try:
                response[partition.partition] = future.result().offset
            except KafkaException:
                response[partition.partition] = None
        offsets.append(response)
    return {index: (offsets[0].get(index), offsets[1].get(index)) for index in partitions}


def _configs(admin: Any, name: str) -> list[Any]:
    from confluent_kafka.admin import ConfigResource, ResourceType

    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S

    resource = ConfigResource(ResourceType.TOPIC, name)
    return sorted(
        admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)[resource].result().values(),
        key=lambda entry: entry.name,
    )


@command.command()
@options
@click.argument("name", shell_complete=complete_topic)
def describe(settings: Settings, name: str) -> None:
    """Show the partitions and offsets of the topic NAME, and the properties that are set on it."""
    from confluent_kafka.admin import ConfigSource

    from mqd.cli.librdkafka import admin_client, metadata

    admin = admin_client(settings.bootstrap)
    topic = metadata(admin, name).topics[name]
    offsets = _offsets(admin, name, sorted(topic.partitions))
    source = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
    configs = {entry.name: entry.value for entry in _configs(admin, name) if entry.source == source}
    partitions = []
    for index in sorted(topic.partitions):
        partition, (start, end) = topic.partitions[index], offsets[index]
        partitions.append(
            {
                "partition": index,
                "leader": partition.leader,
                "replicas": partition.replicas,
                "in_sync_replicas": partition.isrs,
                "log_start_offset": start,
                "high_watermark": end,
                "error": partition.error.str() if partition.error is not None else None,
            }
        )
    if settings.json:
        emit_json(
            {
                "topic": name,
                "replication_factor": _replication_factor(topic),
                "config": configs,
                "partitions": partitions,
            }
        )
        return
    offset_count = sum((p["high_watermark"] or 0) - (p["log_start_offset"] or 0) for p in partitions)
    replicas = _replication_factor(topic)
    base = configs.get(VIEW_OF)
    click.echo(
        f"topic {name}: {len(partitions)} partition{'s' * (len(partitions) != 1)}, {replicas}"
        f" replica{'s' * (replicas != 1)}, at most {offset_count} record{'s' * (offset_count != 1)}"
        + (f"; a view: partitions, replicas and offsets are those of {base}" if base else "")
    )
    for key, value in configs.items():
        click.echo(f"  {key}={value}")
    rows = []
    for p in partitions:
        offset_texts = ["?" if p[key] is None else p[key] for key in ("log_start_offset", "high_watermark")]
        rows.append(
            (
                p["partition"],
                p["leader"],
                ",".join(map(str, p["replicas"])),
                ",".join(map(str, p["in_sync_replicas"])),
                *offset_texts,
                p["error"] or "",
            )
        )
    emit_table(("PARTITION", "LEADER", "REPLICAS", "IN SYNC", "START OFFSET", "HIGH WATERMARK", ""), rows)


def _reject_partitions(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    """Rejects --partitions, an option of kafka-topics --alter, and names the command to use instead."""
    if value is not None:
        raise click.UsageError(f"to add partitions: mqd topic add-partitions NAME --to {value}")


@command.command()
@options
@click.argument("name", shell_complete=complete_topic)
@click.option("-c", "--config", "configs", multiple=True, metavar="KEY=VALUE", help="Set a property; may be repeated.")
@click.option(
    "-d",
    "--delete",
    "deleted",
    multiple=True,
    metavar="KEY",
    help="Reset a property to the broker's value; may be repeated.",
)
@click.option("-p", "--partitions", "_partitions", hidden=True, callback=_reject_partitions, expose_value=False)
def alter(settings: Settings, name: str, configs: tuple[str, ...], deleted: tuple[str, ...]) -> None:
    """Change the configuration of the topic NAME; other settings stay unchanged."""
    from mqd.cli.verbs.config import alter as alter_configs

    if not configs and not deleted:
        raise click.UsageError("nothing to change; give -c KEY=VALUE or -d KEY")
    alter_configs(settings, f"topic/{name}", pairs(configs, "-c"), list(deleted))


@command.command()
@options
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_topic)
@click.option("--if-exists", is_flag=True, help="No error when a topic does not exist.")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, without deleting anything.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation on a terminal.")
def delete(settings: Settings, names: tuple[str, ...], if_exists: bool, dry_run: bool, yes: bool) -> None:
    """Delete topics with all their records. If any of the topics does not exist, none is deleted."""
    from mqd.cli.kafka_request import Broker, error_text
    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, admin_client, metadata
    from mqd.protocol.errors import ErrorCode
    from mqd.protocol.messages import DeleteTopicsRequest

    existing = metadata(admin_client(settings.bootstrap)).topics
    missing = [name for name in dict.fromkeys(names) if name not in existing]
    if missing and not if_exists:
        raise CliError(f"nothing was deleted: there is no topic {', '.join(missing)} (--if-exists deletes the others)")
    selected = [name for name in dict.fromkeys(names) if name in existing]
    if dry_run or not selected:
        if settings.json:
            emit_json({"deleted": [], "would_delete": selected})
        else:
            for name in selected:
                click.echo(f"would delete topic {name} ({len(existing[name].partitions)} partitions)")
        return
    if sys.stdin.isatty() and not yes:
        click.confirm(f"Delete {', '.join(selected)} with all records?", abort=True, err=True)
    # not with librdkafka's admin client, which drops the broker's message, for example which views
    # must be deleted first
    request = DeleteTopicsRequest(
        topics=[DeleteTopicsRequest.TopicState(name=name) for name in selected],
        timeout_ms=int(REQUEST_TIMEOUT_S * 1000),
    )
    with Broker(settings.bootstrap) as broker:
        results = broker.request(_DELETE_TOPICS, request, version_min=_DELETE_TOPICS_VERSION_MIN).responses
    deleted = [result.name for result in results if not result.error_code]
    is_failure = lambda code: code and not (if_exists and code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    failed = [result for result in results if is_failure(result.error_code)]
    if settings.json:
        emit_json({"deleted": deleted})
    else:
        for name in deleted:
            click.echo(f"deleted topic {name}")
    if failed:
        raise CliError(
            "; ".join(
                f"topic {result.name}: {error_text(result.error_code, result.error_message)}" for result in failed
            )
        )


@command.command("add-partitions")
@options
@click.argument("name", shell_complete=complete_topic)
@click.option(
    "--to", "total", required=True, type=click.IntRange(1, _PARTITIONS_MAX), help="The new number of partitions."
)
def add_partitions(settings: Settings, name: str, total: int) -> None:
    """Give the topic NAME more partitions. Keys move: records with the same key may be in different
    partitions if some were written before the change and others after it.
    """
    from confluent_kafka.admin import NewPartitions

    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, admin_client, raise_failures, wait_for_futures

    admin = admin_client(settings.bootstrap)
    futures = admin.create_partitions([NewPartitions(name, total)], operation_timeout=REQUEST_TIMEOUT_S)
    _, failed = wait_for_futures(futures)
    raise_failures((f"topic {name}", error) for name, error in failed)
    if settings.json:
        emit_json({"topic": name, "partitions": total})
    else:
        click.echo(f"topic {name} has {total} partitions")


@command.command("retire-partitions")
@options
@click.argument("name", shell_complete=complete_topic)
@click.option(
    "--to", "total", type=click.IntRange(1), help="How many partitions remain: a divisor of the current number."
)
@click.option(
    "--allow-moved-keys",
    is_flag=True,
    help="Allow any number in --to: keys also move between the remaining partitions, and lose their order.",
)
@click.option("--wait", is_flag=True, help="Wait until the partitions are removed, which takes as long as retention.")
@click.option(
    "--no-wait",
    is_flag=True,
    help="Do not check what groups have read: the producers' pause ends after partition.retire.barrier.ms.",
)
@click.option("--release", is_flag=True, help="End the producers' pause now, even if groups have not read everything.")
@click.option("--status", is_flag=True, help="Show the progress.")
def retire_partitions(
    settings: Settings,
    name: str,
    total: int | None,
    allow_moved_keys: bool,
    wait: bool,
    no_wait: bool,
    release: bool,
    status: bool,
) -> None:
    """Give the topic NAME fewer partitions. The retired partitions stay readable until retention
    has emptied them; then they are removed.

    First, producers pause briefly, until the consumers of all groups have read the retired
    partitions, so that no consumer sees the records of a key out of order. Groups that are too far
    behind are listed. Then new records for a retired partition are appended to one of the remaining
    partitions. No transaction may be open in the retired partitions.

    --wait can take as long as retention does. An interrupt ends the waiting, not the retirement.
    """
    from mqd.cli import retirement as retiring
    from mqd.cli.broker_lookup import Cluster

    if (total is not None) + release + status != 1 or (wait and no_wait):
        raise click.UsageError("give one of --to, --release, --status; and at most one of --wait, --no-wait")
    output = _RetirementOutput(settings)
    with Cluster(settings.bootstrap) as cluster:
        if total is None:
            state = retiring.request(
                cluster.bootstrap_broker, name, 0, retiring.RELEASE if release else retiring.STATUS
            )
        else:
            state = retiring.request(
                cluster.bootstrap_broker,
                name,
                total,
                retiring.RETIRE_MOVING_KEYS if allow_moved_keys else retiring.RETIRE,
            )
        readers = retiring.Readers()
        if wait or (total is not None and not no_wait):
            state, readers = retiring.wait(
                # after the last step, HIDDEN, the partitions are removed
                cluster,
                name,
                retiring.HIDDEN + 1 if wait else retiring.REDIRECTED,
                output.reporter(cluster),
            )
        elif state.step == retiring.SEALED:
            readers = retiring.groups_behind(cluster, state)
        records_left = (
            retiring.stored_record_count(cluster, state)
            if state.step in (retiring.SEALED, retiring.REDIRECTED)
            else None
        )
    output.end(state, readers, records_left)


class _RetirementOutput:
    """Prints the output of `retire-partitions`: a line on stderr after each change, and finally the
    state on stdout.
    """

    def __init__(self, settings: Settings) -> None:
        self._json, self._last_text = settings.json, ""

    def reporter(self, cluster: Any) -> Callable[[Any, Any], None]:
        from mqd.cli import retirement as retiring

        def show(state: Any, readers: Any) -> None:
            if self._json or state.step == retiring.NONE:
                return
            text = retiring.STEP_DESCRIPTIONS[state.step]
            if state.step == retiring.SEALED and (readers.behind or readers.error):
                text += ": " + _lag_text(readers)
            elif state.step == retiring.REDIRECTED:
                text += f", {retiring.stored_record_count(cluster, state)} records are left for retention to delete"
            if text != self._last_text:
                self._last_text = text
                click.echo(f"topic {state.topic}: {text}", err=True)

        return show

    def end(self, state: Any, readers: Any, records_left: int | None) -> None:
        from mqd.cli import retirement as retiring

        if self._json:
            emit_json(retiring.as_json(state, readers, records_left))
            return
        if state.step == retiring.NONE:
            click.echo(
                f"topic {state.topic} has {state.staying_count} partition{'s' * (state.staying_count != 1)};"
                " none is being retired"
            )
            return
        last = state.staying_count + len(state.retired) - 1
        partitions_text = (
            f"partitions {state.staying_count} to {last} are" if last > state.staying_count else f"partition {last} is"
        )
        click.echo(f"topic {state.topic}: {partitions_text} being retired: {retiring.STEP_DESCRIPTIONS[state.step]}")
        if readers.behind or readers.error:
            click.echo(
                f"not read yet: {_lag_text(readers)}"
                + (
                    "; records of a key may be read out of order, as when partitions are added"
                    if state.step > retiring.SEALED
                    else ""
                )
            )
        if records_left is not None:
            click.echo(
                f"retention still has to delete {records_left} record{'s' * (records_left != 1)} from the retired"
                f" partition{'s' * (len(state.retired) != 1)}; then the partitions are removed"
                f" (mqd topic retire-partitions {state.topic} --status, or --wait)"
            )


def _lag_text(readers: Any) -> str:
    group_texts = [
        f"group {group.group} has {group.unread_count} records left to"
        f" read{'' if group.has_members else ' and no members, so nothing reads them'}"
        for group in readers.behind
    ]
    unknown_texts = [f"what other groups have read is not known: {readers.error}"] if readers.error else []
    return "; ".join(
        group_texts[:3] + ([f"and {len(group_texts) - 3} more groups"] if len(group_texts) > 3 else []) + unknown_texts
    )


@command.command()
@options
@click.argument("name", shell_complete=complete_topic)
@click.option("--brokers", metavar="ID,...", help="Move the topic to these brokers, spread over their racks.")
@click.option(
    "--replication-factor",
    "-r",
    type=click.IntRange(1),
    help="With --brokers: this many replicas of each partition.  [default: as now]",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Carry out a plan in the format of kafka-reassign-partitions.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan, without moving anything.")
@click.option(
    "--status", is_flag=True, help="Show the moves in progress; with --plan, whether the plan has been carried out."
)
@click.option("--cancel", is_flag=True, help="Stop the moves in progress; replicas stay where they were.")
@click.option("--no-wait", is_flag=True, help="Do not wait until all moves are done.")
def reassign(
    settings: Settings,
    name: str,
    brokers: str | None,
    replication_factor: int | None,
    plan_file: Path | None,
    dry_run: bool,
    status: bool,
    cancel: bool,
    no_wait: bool,
) -> int:
    """Move the partitions of the topic NAME to other brokers. Records are copied first, so they
    stay readable throughout.

    --plan FILE --status moves nothing. It shows for each partition of the plan whether it is done,
    under way (and how much has been copied), or not done. Exit status: 0 if all are done, else 1.
    """
    from mqd.cli import moves, verifying
    from mqd.cli.kafka_request import Broker

    if (brokers is not None) + (plan_file is not None or status) + cancel != 1:
        raise click.UsageError(
            "give one of --brokers, --plan, --status, --cancel; or --plan and --status to verify a plan"
        )
    with Broker(settings.bootstrap) as broker:
        if plan_file is not None and status:
            return _show_plan(
                settings, name, verifying.planned_partitions(broker, name, moves.read_plan(plan_file, name))
            )
        if status or cancel:
            ongoing_moves = moves.ongoing_moves(broker, name)
            if cancel and ongoing_moves:
                moves.begin(broker, dict.fromkeys(ongoing_moves))
            _show_moves(settings, name, ongoing_moves, cancel)
            return 0
        current = moves.replicas_of(broker, name)
        plan = (
            moves.read_plan(plan_file, name)
            if plan_file is not None
            else moves.spread(current, _broker_ids(brokers or ""), replication_factor, moves.racks_of(broker))
        )
        if dry_run:
            click.echo(moves.plan_text(plan))
            return 0
        moves.begin(broker, plan)
        if not no_wait:
            moves.wait(broker, plan, not settings.json)
    if settings.json:
        emit_json(
            [{"topic": topic, "partition": index, "replicas": replicas} for (topic, index), replicas in plan.items()]
        )
    else:
        click.echo(f"topic {name}: {len(plan)} partition{'s' * (len(plan) != 1)} {'move' if no_wait else 'moved'}")
    return 0


def _broker_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.UsageError(f"--brokers takes numbers separated by commas, not {text!r}") from None


def _show_plan(settings: Settings, name: str, partitions: list[Any]) -> int:
    """Shows the state of a plan. Returns the exit status."""
    from mqd.cli import verifying

    if settings.json:
        emit_json([partition.as_json() for partition in partitions])
    else:
        rows = [
            (
                partition.partition[1],
                partition.state,
                *(",".join(map(str, nodes)) or "-" for nodes in (partition.planned_replicas, partition.replicas)),
                partition.copied_percent,
            )
            for partition in sorted(partitions)
        ]
        emit_table(("PARTITION", "STATE", "PLANNED", "REPLICAS", "COPIED"), rows)
        click.echo(verifying.summary(name, partitions))
    return 0 if all(partition.state == verifying.DONE for partition in partitions) else EXIT_FAILED


def _show_moves(settings: Settings, name: str, ongoing_moves: dict[tuple[str, int], Any], cancelled: bool) -> None:
    if settings.json:
        emit_json(
            [
                {
                    "topic": topic,
                    "partition": index,
                    "replicas": move.replicas,
                    "adding": move.adding,
                    "removing": move.removing,
                }
                for (topic, index), move in ongoing_moves.items()
            ]
        )
    elif not ongoing_moves:
        click.echo(f"topic {name}: nothing moves")
    elif cancelled:
        click.echo(
            f"topic {name}: {len(ongoing_moves)} partition{'s' * (len(ongoing_moves) != 1)} stay where they were"
        )
    else:
        rows = [
            (index, *(",".join(map(str, nodes)) or "-" for nodes in move))
            for (_, index), move in sorted(ongoing_moves.items())
        ]
        emit_table(("PARTITION", "REPLICAS", "ADDING", "REMOVING"), rows)
