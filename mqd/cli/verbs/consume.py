"""`mqd consume`: reads the records of a topic, starting anywhere in it."""

import sys
from datetime import datetime

import click

from mqd.cli.common import Settings, complete_topic, error_line, options, pairs
from mqd.cli.records import Position, compile_format, envelope, parse_position, parse_time

SILENT_POLLS_MAX = 4  # consecutive polls without a record: two seconds


@click.command(
    help="Read the records of a topic.",
    epilog="FORMAT: %k key, %v value, %K %V their sizes, %t topic, %p partition, %o offset, %T time in ms, %h headers.",
)
@options
@click.argument("topic", shell_complete=complete_topic)
@click.option(
    "-o",
    "--offset",
    default="beginning",
    show_default=True,
    metavar="WHERE",
    help=(
        "beginning, end, an offset, -COUNT (the last COUNT of each partition) or @TIME (2026-01-31T12:00, ms since"
        " 1970, -15m)."
    ),
)
@click.option("--until", metavar="TIME", help="Stop before this time.")
@click.option(
    "-p",
    "--partition",
    "partitions",
    multiple=True,
    type=click.IntRange(0),
    help="Only this partition; may be repeated.",
)
@click.option("-n", "--count", type=click.IntRange(1), help="Stop after this number of records.")
@click.option("-e", "--exit-at-end", is_flag=True, help="Stop at the end of the partitions.  [default: wait for more]")
@click.option(
    "-f", "--fields", metavar="FORMAT", default="%v\\n", show_default=True, help="The parts of a record to print."
)
@click.option("-Z", "--show-null", is_flag=True, help="Print NULL for a null key or value.")
@click.option("-X", "properties", multiple=True, metavar="PROPERTY=VALUE", help="Any property of librdkafka.")
def command(
    settings: Settings,
    topic: str,
    offset: str,
    until: str | None,
    partitions: tuple[int, ...],
    count: int | None,
    exit_at_end: bool,
    fields: str,
    show_null: bool,
    properties: tuple[str, ...],
) -> None:
    now = datetime.now().astimezone()
    start = parse_position(offset, now)
    stop = None if until is None else Position("time", parse_time(until, now))
    render = envelope if settings.json else compile_format(fields, b"NULL" if show_null else b"")
    config = pairs(properties, "-X")

    from mqd.cli.topic_reading import Reader

    reader = Reader(settings.bootstrap, topic, config)
    out = sys.stdout.buffer
    silent_count, has_notified = 0, exit_at_end or stop is not None
    try:
        reader.assign(reader.partitions(list(partitions)), start, stop)
        for batch in reader.batches(count, exit_at_end):
            silent_count = 0 if batch else silent_count + 1
            if silent_count == SILENT_POLLS_MAX and not has_notified:
                has_notified = True
                error_line("waiting for more records; Ctrl-C stops, and -e stops at the end of the partitions")
            if batch:
                out.write(b"".join([render(message) for message in batch]))
                out.flush()
    finally:
        reader.close()
