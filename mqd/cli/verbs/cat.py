"""`mqd cat`: kcat's options and output, so that habits and scripts carry over. Its behaviour was
compared with that of kcat 1.7.1.

Differences: -G (groups), -s and -r (serdes) are refused; -O prints the offset even with -D; -Z
prints NULL for null values but not for empty values; wrong usage is exit code 2. The other exit
codes are kcat's: 0 done, 1 failed, including when no broker can be reached.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import click
import msgspec

from mqd.cli.common import DEFAULT_BOOTSTRAP, CliError
from mqd.cli.records import (
    Position,
    compile_format,
    kcat_envelope,
    parse_header,
    parse_position,
    split,
    split_key,
    unescape,
)


class Options(msgspec.Struct, frozen=True):
    """kcat's options under descriptive names."""

    bootstrap: str
    mode: str  # C P L Q
    topics: tuple[str, ...]
    partition: int | None
    offsets: tuple[str, ...]
    delimiter: bytes
    key_delimiter: bytes | None
    fixed_key: bytes | None
    count: int | None
    headers: tuple[str, ...]
    message_format: str | None
    as_json: bool
    exit_at_end: bool
    quiet: bool
    unbuffered: bool
    uses_null: bool  # -Z: send null instead of an empty value; print NULL for null
    show_offset: bool
    split_lines: bool  # -l: split the file by the delimiter
    tee: bool
    timeout_s: float
    config: dict[str, str]
    arguments: tuple[str, ...]  # files to produce


def _print_note(options: Options, text: str) -> None:
    if not options.quiet:
        print("% " + text, file=sys.stderr, flush=True)


@click.command(
    help=(
        "Read, write and list with kcat's options.\n\nThe default broker is 127.0.0.1:9092 (or MQD_BOOTSTRAP). Without"
        " a mode: -P when stdin is piped, else -C."
    ),
    epilog=(
        "FORMAT: %s payload, %S its size, %R that as 4 bytes, %k key, %K its size, %t topic, %p partition, %o offset,"
        " %T time, %h headers."
    ),
)
@click.option("-C", "mode", flag_value="C", help="Consume.")
@click.option("-P", "mode", flag_value="P", help="Produce.")
@click.option("-L", "mode", flag_value="L", help="List brokers, topics and partitions.")
@click.option("-Q", "mode", flag_value="Q", help="Query offsets by time: -t TOPIC:PARTITION:MS.")
@click.option("-b", "--bootstrap", metavar="BROKERS", help="Broker to query.")
@click.option("-t", "topics", multiple=True, metavar="TOPIC", help="Topic.")
@click.option("-p", "partition", type=int, help="Partition; -1: any.")
@click.option(
    "-o", "offsets", multiple=True, metavar="OFFSET", help="beginning, end, N, -N, s@MS (start), e@MS (stop)."
)
@click.option("-D", "delimiter", default="\\n", metavar="DELIM", help="Message delimiter.")
@click.option("-K", "key_delimiter", metavar="DELIM", help="Key delimiter.")
@click.option("-k", "fixed_key", metavar="KEY", help="Key for messages that have none.")
@click.option("-c", "count", type=click.IntRange(1), help="Exit after this number of messages.")
@click.option("-H", "headers", multiple=True, metavar="NAME=VALUE", help="Header of every message.")
@click.option("-f", "message_format", metavar="FORMAT", help="Output format.")
@click.option("-J", "as_json", is_flag=True, help="JSON output.")
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), help="json: the same as -J.")
@click.option("-e", "exit_at_end", is_flag=True, help="Exit at the end of the partitions.")
@click.option("-q", "quiet", is_flag=True, help="Suppress informational messages.")
@click.option("-v", "_verbose", count=True, help="Accepted, without effect.")
@click.option(
    "-E", "_no_exit_on_error", is_flag=True, help="Accepted, without effect: transient errors never stop the command."
)
@click.option("-u", "unbuffered", is_flag=True, help="Unbuffered output.")
@click.option(
    "-Z",
    "uses_null",
    is_flag=True,
    help="Producer: send null instead of an empty value. Consumer: print NULL for null.",
)
@click.option("-O", "show_offset", is_flag=True, help="Print the offset, then -K's delimiter.")
@click.option("-l", "split_lines", is_flag=True, help="Split the file by the delimiter.")
@click.option("-T", "tee", is_flag=True, help="Print what is sent.")
@click.option("-z", "compression", metavar="CODEC", help="gzip, snappy, lz4 or zstd.")
@click.option(
    "-m", "timeout_s", type=float, default=5.0, metavar="SECONDS", help="Time limit for metadata and queries."
)
@click.option("-X", "properties", multiple=True, metavar="PROP=VALUE", help="Any property of librdkafka.")
@click.option("-F", "config_file", type=click.Path(exists=True, dir_okay=False), help="File of properties.")
@click.option("-d", "debug", metavar="CONTEXTS", help="librdkafka's debug contexts.")
@click.option("-G", "group", metavar="GROUP", help="Not supported; use kcat itself, which can join groups on mqd.")
@click.option("-s", "serdes", multiple=True, hidden=True)
@click.option("-V", "version", is_flag=True, help="Print the version.")
@click.argument("arguments", nargs=-1, metavar="[FILE... | TOPIC...]")
@click.pass_context
def command(ctx: click.Context, **parameters: Any) -> None:
    if parameters["version"]:
        from mqd.cli.librdkafka import VERSION

        click.echo(f"mqd cat - kcat's options\n{VERSION}")
        return
    options = _options(ctx, parameters)
    try:
        {"L": _list, "Q": _query, "C": _consume, "P": _produce}[options.mode](options)
    except CliError as error:
        raise CliError(error.message, 1) from None


def _properties(parameters: dict[str, Any]) -> dict[str, str]:
    lines = list(parameters["properties"])
    if parameters["config_file"]:
        with open(parameters["config_file"], encoding="utf-8") as stream:
            lines = [line.strip() for line in stream if line.strip() and not line.lstrip().startswith("#")] + lines
    properties = {}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals:
            raise click.UsageError(f"-X takes PROP=VALUE, not {line!r}")
        properties[name.strip().removeprefix("topic.")] = value.strip()
    if parameters["compression"]:
        properties["compression.codec"] = parameters["compression"]
    if parameters["debug"]:
        properties |= {"debug": parameters["debug"], "log_level": "7"}
    return properties


def _options(ctx: click.Context, parameters: dict[str, Any]) -> Options:
    if parameters["group"]:
        raise click.UsageError("-G: mqd cat does not join groups; use kcat -G, or -C -t TOPIC to read all partitions")
    if parameters["serdes"]:
        raise click.UsageError("-s: deserializers are not available; -f and -J print the bytes as they are")
    root_options = ctx.find_root().obj or {}
    config = _properties(parameters)
    configured_bootstrap = config.pop("bootstrap.servers", None) or config.pop("metadata.broker.list", None)
    bootstrap = (
        parameters["bootstrap"]
        or configured_bootstrap
        or root_options.get("bootstrap")
        or os.environ.get("MQD_BOOTSTRAP")
        or DEFAULT_BOOTSTRAP
    )
    topics, arguments = parameters["topics"], parameters["arguments"]
    mode = parameters["mode"]
    options = Options(
        bootstrap=bootstrap,
        mode=mode or ("C" if sys.stdin.isatty() else "P"),
        topics=topics,
        partition=parameters["partition"],
        offsets=parameters["offsets"],
        delimiter=unescape(parameters["delimiter"]),
        key_delimiter=unescape(parameters["key_delimiter"]) if parameters["key_delimiter"] else None,
        fixed_key=None if parameters["fixed_key"] is None else parameters["fixed_key"].encode(),
        count=parameters["count"],
        headers=parameters["headers"],
        message_format=parameters["message_format"],
        as_json=parameters["as_json"] or parameters["output_format"] == "json",
        exit_at_end=parameters["exit_at_end"],
        quiet=parameters["quiet"],
        unbuffered=parameters["unbuffered"],
        uses_null=parameters["uses_null"],
        show_offset=parameters["show_offset"],
        split_lines=parameters["split_lines"],
        tee=parameters["tee"],
        timeout_s=parameters["timeout_s"],
        config=config,
        arguments=arguments,
    )
    if not options.delimiter:
        raise click.UsageError("-D: the delimiter cannot be empty")
    if options.mode in "CP" and len(topics) != 1:
        raise click.UsageError("-t TOPIC is missing" if not topics else f"-{options.mode} takes one -t")
    if mode is None:
        _print_note(
            options,
            f"Auto-selecting {'Consumer' if options.mode == 'C' else 'Producer'} mode (use -P or -C to override)",
        )
    return options


# -- -L --------------------------------------------------------------------------------------------


def _list(options: Options) -> None:
    from confluent_kafka.admin import AdminClient

    from mqd.cli.librdkafka import base_config

    admin = AdminClient(base_config(options.bootstrap, options.timeout_s, options.config) | options.config)
    metadata = admin.list_topics(timeout=options.timeout_s)
    requested = options.topics[0] if options.topics else None
    topics = [topic for name, topic in metadata.topics.items() if requested is None or name == requested]
    click.echo(
        _list_json(metadata, topics, requested) if options.as_json else _list_text(metadata, topics, requested),
        nl=not options.as_json,
    )
    if requested is not None and not topics:
        raise CliError(f"{requested}: unknown topic; mqd topic list shows all topics")


def _list_text(metadata: Any, topics: list[Any], requested: str | None) -> str:
    lines = [
        f"Metadata for {requested or 'all topics'} (from broker {metadata.orig_broker_id}:"
        f" {metadata.orig_broker_name}):",
        f" {len(metadata.brokers)} brokers:",
    ]
    for broker in metadata.brokers.values():
        lines.append(
            f"  broker {broker.id} at"
            f" {broker.host}:{broker.port}{' (controller)' if broker.id == metadata.controller_id else ''}"
        )
    lines.append(f" {len(topics)} topics:")
    for topic in topics:
        lines.append(
            f'  topic "{topic.topic}" with {len(topic.partitions)} partitions:'
            + (f" {topic.error.str()}" if topic.error is not None else "")
        )
        for partition in topic.partitions.values():
            replicas, in_sync = (",".join(map(str, ids)) for ids in (partition.replicas, partition.isrs))
            error = f", {partition.error.str()}" if partition.error is not None else ""
            lines.append(
                f"    partition {partition.id}, leader {partition.leader}, replicas: {replicas}, isrs: {in_sync}{error}"
            )
    return "\n".join(lines)


def _list_json(metadata: Any, topics: list[Any], requested: str | None) -> str:
    def partition(item: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"partition": item.id} | (
            {"error": item.error.str()} if item.error is not None else {}
        )
        return fields | {
            "leader": item.leader,
            "replicas": [{"id": node} for node in item.replicas],
            "isrs": [{"id": node} for node in item.isrs],
        }

    def topic(item: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"topic": item.topic} | ({"error": item.error.str()} if item.error is not None else {})
        return fields | {"partitions": [partition(entry) for entry in item.partitions.values()]}

    return json.dumps(
        {
            "originating_broker": {"id": metadata.orig_broker_id, "name": metadata.orig_broker_name},
            "query": {"topic": requested or "*"},
            "controllerid": metadata.controller_id,
            "brokers": [
                {"id": broker.id, "name": f"{broker.host}:{broker.port}"} for broker in metadata.brokers.values()
            ],
            "topics": [topic(item) for item in topics],
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )


# -- -Q --------------------------------------------------------------------------------------------


def _query(options: Options) -> None:
    from confluent_kafka import Consumer, TopicPartition

    from mqd.cli.librdkafka import base_config

    requested = []
    for text in options.topics:
        name, partition, timestamp = ([*text.rsplit(":", 2), "", ""])[:3]
        if not (name and partition.isdigit() and timestamp.removeprefix("-").isdigit()):
            raise click.UsageError(f"-t: expected TOPIC:PARTITION:TIMESTAMP_MS, not {text!r}")
        requested.append(TopicPartition(name, int(partition), int(timestamp)))
    if not requested:
        raise click.UsageError("-Q needs -t TOPIC:PARTITION:TIMESTAMP_MS")
    consumer = Consumer(
        base_config(options.bootstrap, options.timeout_s, options.config) | {"group.id": "mqd-cli"} | options.config
    )
    try:
        responses = consumer.offsets_for_times(requested, timeout=options.timeout_s)
    finally:
        consumer.close()
    by_topic: dict[str, dict[str, Any]] = {}
    for response in responses:
        text = response.error.str() if response.error is not None else ""
        error = {"error": text} if response.error is not None else {}
        by_topic.setdefault(response.topic, {"topic": response.topic})[str(response.partition)] = {
            "partition": response.partition,
            "offset": response.offset,
        } | error
        if not options.as_json:
            click.echo(
                f"{response.topic} [{response.partition}] offset {response.offset}" + (f": {text}" if error else "")
            )
    if options.as_json:
        click.echo(json.dumps(by_topic, separators=(",", ":")), nl=False)
    first_error = next((response.error for response in responses if response.error is not None), None)
    if first_error is not None:
        raise CliError(f"offsets could not be queried: {first_error.str()}")


# -- -C --------------------------------------------------------------------------------------------


def _start_and_stop(options: Options) -> tuple[Position, Position | None]:
    start, stop = Position("beginning"), None
    for text in options.offsets:
        if text.startswith(("s@", "e@")):
            position = parse_position(text[1:], datetime.now().astimezone())
            start, stop = (position, stop) if text[0] == "s" else (start, position)
        elif text == "stored":
            raise click.UsageError("-o stored: mqd cat does not join groups, so it has no stored offsets")
        else:
            start = parse_position(text, datetime.now().astimezone())
    return start, stop


def _renderer(options: Options, leader: Callable[[int], int]) -> Callable[[Any], bytes]:
    if options.as_json:
        return lambda message: kcat_envelope(message, leader(message.partition()))
    null = b"NULL" if options.uses_null else b""
    if options.message_format is not None:
        return compile_format(options.message_format, null)
    prefix_parts = []
    if options.key_delimiter is not None:
        prefix_parts = [*([compile_format("%o")] if options.show_offset else []), compile_format("%k", null)]
    separator, end, payload = options.key_delimiter or b"", options.delimiter, compile_format("%s", null)
    return lambda message: b"".join([part(message) + separator for part in prefix_parts]) + payload(message) + end


def _consume(options: Options) -> None:
    from mqd.cli.topic_reading import Reader

    start, stop = _start_and_stop(options)
    if options.message_format is not None:
        compile_format(options.message_format)  # report errors before connecting
    topic = options.topics[0]

    def on_end(partition: int, offset: int, is_last: bool) -> None:
        _print_note(
            options, f"Reached end of topic {topic} [{partition}] at offset {offset}{': exiting' if is_last else ''}"
        )

    reader = Reader(options.bootstrap, topic, options.config, options.timeout_s)
    out = sys.stdout.buffer
    try:
        requested = None if options.partition is None or options.partition < 0 else [options.partition]
        reader.assign(reader.partitions(requested), start, stop)
        render = _renderer(options, reader.leader)
        for batch in reader.batches(options.count, options.exit_at_end, on_end):
            if options.unbuffered:
                for message in batch:
                    out.write(render(message))
                    out.flush()
            elif batch:
                out.write(b"".join([render(message) for message in batch]))
                out.flush()
    finally:
        reader.close()


# -- -P --------------------------------------------------------------------------------------------


def _input_records(options: Options) -> Iterator[bytes]:
    if not options.arguments:
        yield from split(sys.stdin.buffer, options.delimiter)
        return
    if options.split_lines and len(options.arguments) > 1:
        raise click.UsageError("-l takes one file")
    for name in options.arguments:
        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(open(name, "rb"))
            if options.split_lines:
                yield from split(stream, options.delimiter)
            else:
                yield stream.read()


def _produce(options: Options) -> None:
    from mqd.cli.topic_writing import Writer

    headers = [parse_header(text) for text in options.headers]
    defaults = {"message.timeout.ms": "300000"}
    partition = -1 if options.partition is None else options.partition
    topic = options.topics[0]
    with Writer(options.bootstrap, defaults | options.config) as writer:
        for record in _input_records(options):
            # whole files are sent unchanged: -K only splits lines into key and value
            is_whole_file = bool(options.arguments) and not options.split_lines
            key, value = (
                (options.fixed_key, record)
                if is_whole_file
                else split_key(record, options.key_delimiter, options.fixed_key)
            )
            writer.send(
                topic,
                None if options.uses_null and not value else value,
                None if options.uses_null and not key else key,
                headers,
                partition,
            )
            if options.tee:
                sys.stdout.buffer.write(record)
            if options.count is not None and writer.sent_count >= options.count:
                break
