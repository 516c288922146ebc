"""Changes made from pages. The cluster first validates a change; then the page previews what it
would do and shows the equivalent mqd command; the change is carried out once the user has confirmed
it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from datetime import datetime
from typing import Any

import click
import msgspec

from mqd.cli.broker_lookup import Cluster
from mqd.cli.common import CliError, Settings
from mqd.cli.group_listing import WITHOUT_MEMBERS, must_describe
from mqd.cli.kafka_request import Broker, check
from mqd.cli.records import parse_header
from mqd.cli.seeking import SPARK_PROGRESS_NOTE, Move, alter, commit, parse_destination, plan
from mqd.cli.topic_writing import Writer
from mqd.cli.verbs.group import parse_target, refusal_text
from mqd.console import queries
from mqd.protocol.messages import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    IncrementalAlterConfigsRequest,
)

CREATE_TOPICS, DELETE_TOPICS, CREATE_PARTITIONS, ALTER_CONFIGS = 19, 20, 37, 44
SET, DELETE = 0, 1
TIMEOUT_MS = 20_000
PARTITIONS_MAX = 100_000
REPLICAS_MAX = 10_000
CONFIGS_MAX = 50
HEADERS_MAX = 50
# the command on the page reads longer values from a file: an argument can have at most 128 KiB
LARGE_VALUE_CHARACTERS = 10_000
# the broker's limit decides; librdkafka's default would refuse a value of 1 MB
PRODUCER_SETTINGS = {"message.max.bytes": "4000000"}
Form = dict[str, str]
Row = tuple[object, ...]


class BadForm(Exception):
    """An invalid field; the text says which values are valid."""


class Change(msgspec.Struct):
    """`carry_out` makes the change; it returns a password, which is shown only once, or None.
    `notice` is shown afterwards, on `next_page` (path and query). `rows`: a table of the individual
    changes, with the column titles `titles`. `text_to_type`: what the user must type to confirm, or
    "". `refusal`: why the cluster would refuse the change now, or "".
    """

    title: str
    command: str
    effects: list[str]
    carry_out: Callable[[], str | None]
    notice: str
    next_page: tuple[str, dict[str, str]]
    titles: tuple[str, ...] = ()
    rows: list[Row] = []
    text_to_type: str = ""
    refusal: str = ""
    is_dangerous: bool = False


def command_of(settings: Settings, *words: str) -> str:
    return " ".join(["mqd", *(shlex.quote(word) for word in words), "-b", shlex.quote(settings.bootstrap)])


def number_in(form: Form, name: str, label: str, maximum: int) -> int | None:
    text = form.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= maximum:
        raise BadForm(f"{label}: {text!r} is not a number from 1 to {maximum}")
    return int(text)


def required(form: Form, name: str, description: str) -> str:
    text = form.get(name, "").strip()
    if not text:
        raise BadForm(f"give {description}")
    return text


# -- topics ----------------------------------------------------------------------------------------


def create_topic(settings: Settings, form: Form) -> Change:
    name = required(form, "name", "a name for the topic")
    partitions = number_in(form, "partitions", "partitions", PARTITIONS_MAX)
    replicas = number_in(form, "replicas", "replicas", REPLICAS_MAX)
    lines = [line.strip() for line in form.get("configs", "").splitlines() if line.strip()]
    if len(lines) > CONFIGS_MAX:
        raise BadForm(f"give at most {CONFIGS_MAX} properties")
    configs: dict[str, str] = {}
    for line in lines:
        key, equals, value = line.partition("=")
        if not equals or not key.strip():
            raise BadForm(f"properties are KEY=VALUE, one per line, not {line!r}")
        configs[key.strip()] = value.strip()

    def send(validate_only: bool) -> Any:
        topic = CreateTopicsRequest.Topic(
            name=name,
            num_partitions=partitions or -1,
            replication_factor=replicas or -1,
            configs=[CreateTopicsRequest.Config(name=key, value=value) for key, value in configs.items()],
        )
        request = CreateTopicsRequest(topics=[topic], timeout_ms=TIMEOUT_MS, validate_only=validate_only)
        with Broker(settings.bootstrap) as broker:
            result = broker.request(CREATE_TOPICS, request).topics[0]
        check(f"topic {name}", result.error_code, result.error_message)
        return result

    planned = send(validate_only=True)

    def apply() -> None:
        send(validate_only=False)

    words = ["topic", "create", name]
    words += ["-p", str(partitions)] if partitions else []
    words += ["-r", str(replicas)] if replicas else []
    for key, value in configs.items():
        words += ["-c", f"{key}={value}"]
    partition_count = planned.num_partitions if planned.num_partitions > 0 else partitions
    replica_count = planned.replication_factor if planned.replication_factor > 0 else replicas
    effects = [
        f"It will have {partition_count or 'as many partitions as the broker gives by default'}"
        f"{'' if not partition_count else ' partition' if partition_count == 1 else ' partitions'}, each with"
        f" {replica_count or 'the default number of'} replica{'' if replica_count == 1 else 's'}.",
        *(f"{key} = {value}" for key, value in configs.items()),
    ]
    return Change(
        f"Create the topic {name}?",
        command_of(settings, *words),
        effects,
        apply,
        f"Created the topic {name}.",
        ("/topic", {"name": name}),
    )


def alter_topic(settings: Settings, form: Form) -> Change:
    name, key = required(form, "name", "a topic"), required(form, "key", "a property")
    is_reset, value = form.get("reset") == "1", form.get("config", "").strip()
    with Broker(settings.bootstrap) as broker:
        configs = {config.name: config for config in queries.topic_configs(broker, name)}
    if key not in configs:
        raise BadForm(f"topics have no property {key}")
    old = configs[key]

    def send(validate_only: bool) -> None:
        config = IncrementalAlterConfigsRequest.Config(
            name=key, config_operation=DELETE if is_reset else SET, value=None if is_reset else value
        )
        resource = IncrementalAlterConfigsRequest.Resource(
            resource_type=queries.TOPIC_RESOURCE, resource_name=name, configs=[config]
        )
        request = IncrementalAlterConfigsRequest(resources=[resource], validate_only=validate_only)
        with Broker(settings.bootstrap) as broker:
            result = broker.request(ALTER_CONFIGS, request).responses[0]
        check(f"topic {name}", result.error_code, result.error_message)

    send(validate_only=True)
    words = ["-d", key] if is_reset else ["-c", f"{key}={value}"]
    after = "the broker's value" if is_reset else value or "(empty)"
    return Change(
        f"Change {key} of the topic {name}?",
        command_of(settings, "topic", "alter", name, *words),
        [f"From {old.value} ({old.source}) to {after}.", *([old.documentation] if old.documentation else [])],
        lambda: send(validate_only=False),
        f"{key} of {name} is now {after}.",
        ("/topic", {"name": name}),
    )


def add_partitions(settings: Settings, form: Form) -> Change:
    name = required(form, "name", "a topic")
    total = number_in(form, "total", "partitions", PARTITIONS_MAX)
    if total is None:
        raise BadForm("give the new number of partitions")

    def send(validate_only: bool) -> None:
        topic = CreatePartitionsRequest.Topic(name=name, count=total)
        request = CreatePartitionsRequest(topics=[topic], timeout_ms=TIMEOUT_MS, validate_only=validate_only)
        with Broker(settings.bootstrap) as broker:
            result = broker.request(CREATE_PARTITIONS, request).results[0]
        check(f"topic {name}", result.error_code, result.error_message)

    send(validate_only=True)
    return Change(
        f"Give the topic {name} {total} partitions?",
        command_of(settings, "topic", "add-partitions", name, "--to", str(total)),
        [
            "Keys move: records with the same key may be in different partitions if some were written before the"
            " change and others after it."
        ],
        lambda: send(validate_only=False),
        f"{name} has {total} partitions.",
        ("/topic", {"name": name}),
    )


def delete_topic(settings: Settings, form: Form) -> Change:
    name = required(form, "name", "a topic")
    topic = queries.topic(settings, name)

    def apply() -> None:
        request = DeleteTopicsRequest(
            topics=[DeleteTopicsRequest.TopicState(name=name)], topic_names=[name], timeout_ms=TIMEOUT_MS
        )
        with Broker(settings.bootstrap) as broker:
            result = broker.request(DELETE_TOPICS, request).responses[0]
        check(f"topic {name}", result.error_code, result.error_message)

    return Change(
        f"Delete the topic {name}?",
        command_of(settings, "topic", "delete", name, "-y"),
        [
            f"Its {len(topic.partitions):,} partitions and {topic.offset_count:,} records are deleted for all clients."
            " They cannot be restored."
        ],
        apply,
        f"Deleted the topic {name}.",
        ("/topics", {}),
        text_to_type=name,
        is_dangerous=True,
    )


# -- records ---------------------------------------------------------------------------------------


def produce(settings: Settings, form: Form) -> Change:
    topic = required(form, "topic", "a topic")
    key, value, is_null = form.get("key", ""), form.get("value", ""), form.get("null") == "1"
    if is_null and value:
        raise BadForm("a null value has no text: leave the value empty, or do not choose null")
    if not key and not value:
        raise BadForm("give a value, or a key")
    partition = form.get("partition", "").strip()
    if partition and not re.fullmatch(r"[0-9]{1,6}", partition):
        raise BadForm(f"{partition!r} is not a partition")
    lines = [line for line in form.get("headers", "").splitlines() if line.strip()]
    if len(lines) > HEADERS_MAX:
        raise BadForm(f"give at most {HEADERS_MAX} headers")
    headers = [parse_header(line) for line in lines]
    indexes = {partition.index for partition in queries.topic(settings, topic).partitions}
    if partition and int(partition) not in indexes:
        raise BadForm(f"topic {topic} has no partition {partition}; it has 0 to {len(indexes) - 1}")

    def apply() -> None:
        with Writer(settings.bootstrap, {"acks": "all", **PRODUCER_SETTINGS}) as writer:
            writer.send(
                topic,
                None if is_null else value.encode(),
                key.encode() if key else None,
                headers,
                int(partition) if partition else -1,
            )

    words = ["produce", topic]
    words += ["-p", partition] if partition else []
    for line in lines:
        words += ["-H", line]
    size = len(value.encode())
    if value:
        words += ["-D", r"\x00"] + (["-K", key] if key else [])
        words += [
            word for name, limit in PRODUCER_SETTINGS.items() if size > 900_000 for word in ("-X", f"{name}={limit}")
        ]
        source = f"printf %s {shlex.quote(value)}" if len(value) <= LARGE_VALUE_CHARACTERS else "cat VALUE"
    else:  # a record with only a key: from empty input, the command would write no record
        words += ["-k", r"\x01"] + (["-Z"] if is_null else [])
        source = f"printf '%s\\001' {shlex.quote(key)}"
    return Change(
        f"Write a record to {topic}?",
        f"{source} | {command_of(settings, *words)}",
        [f"Its value is {'null' if is_null else f'{size:,} bytes'}, its key {key or 'null'},"
         f" with {len(headers)} header{'' if len(headers) == 1 else 's'}.",
         *(["The command reads the value from the file VALUE."] if len(value) > LARGE_VALUE_CHARACTERS else [])],
        apply,
        f"Wrote the record to {topic}.",
        ("/messages", {"topic": topic}),
    )  # fmt: skip


# -- groups ----------------------------------------------------------------------------------------


def _moved_by(move: Move) -> str:
    return "–" if move.old is None or move.new is None else f"{move.new - move.old:+d}"


def seek(settings: Settings, form: Form) -> Change:
    name = required(form, "name", "a group")
    destination = required(form, "to", "the position at which the group continues")
    targets = form.get("topics", "").split()
    try:
        start = parse_destination(destination, datetime.now().astimezone())
        requested = [parse_target(text) for text in targets]
    except (click.UsageError, OverflowError) as error:
        raise BadForm(str(error).removeprefix("--to ")) from None
    with Cluster(settings.bootstrap) as cluster:
        group = must_describe(cluster, name)
        is_share = group.type == "share"
        moves = plan(cluster, name, requested, start, 0, is_share)

    def apply() -> None:
        with Cluster(settings.bootstrap) as cluster:
            if (current_group := must_describe(cluster, name)).state not in WITHOUT_MEMBERS:
                raise CliError(refusal_text(current_group))
            planned = plan(cluster, name, requested, start, 0, is_share)
            failed = (alter if is_share else commit)(cluster, name, planned)
        if failed:
            raise CliError(f"{len(failed)} of {len(planned)} offsets were not committed: {next(iter(failed.values()))}")

    count = sum(move.new is not None and move.new != move.old for move in moves)
    effects = [f"{count} of {len(moves)} offset{'' if len(moves) == 1 else 's'} would move."]
    if any(move.is_spark_progress for move in moves):
        effects.append(SPARK_PROGRESS_NOTE.format(group=name))
    return Change(
        f"Move the offsets of {name} to {destination}?",
        command_of(settings, "group", "seek", name, *targets, "--to", destination, "--execute"),
        effects,
        apply,
        f"Moved the offsets of {name}.",
        ("/group", {"name": name}),
        ("Partition", "Old offset", "New offset", "Moves by", ""),
        [(f"{move.topic}-{move.partition}", move.old, move.new, _moved_by(move), move.note) for move in moves],
        refusal="" if group.state in WITHOUT_MEMBERS else refusal_text(group),
    )
