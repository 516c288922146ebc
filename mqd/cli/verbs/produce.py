"""`mqd produce`: writes lines of stdin or of files as records."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import click

from mqd.cli.common import Settings, complete_topic, emit_json, human_bytes, options, pairs
from mqd.cli.records import parse_header, split, split_key, unescape

_PROGRESS_S = 0.1


@click.command(help="Write lines or files to a topic.")
@options
@click.argument("topic", shell_complete=complete_topic)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, allow_dash=True), metavar="[FILE...]")
@click.option(
    "-k", "--key-separator", metavar="TEXT", help="Text between the key and the value of a line, such as : or \\t."
)
@click.option("-K", "--key", metavar="TEXT", help="Key of the lines that have no key of their own.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header for every record; may be repeated."
)
@click.option("-p", "--partition", type=click.IntRange(0), help="Write to this partition.  [default: by key]")
@click.option(
    "-z",
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
)
@click.option(
    "--acks",
    type=click.Choice(["0", "1", "all"]),
    default="all",
    show_default=True,
    help="Replicas that must have a record before it is acknowledged: none, the leader, all in sync.",
)
@click.option("--idempotent", is_flag=True, help="Retries neither duplicate nor reorder records.")
@click.option("-D", "--delimiter", metavar="TEXT", default="\\n", show_default=True, help="Text that ends a record.")
@click.option(
    "-Z",
    "--null-empty",
    is_flag=True,
    help="Send an empty key or value as null (in a compacted topic, a null value deletes its key).",
)
@click.option("--whole-files", is_flag=True, help="Each FILE is one record.")
@click.option("-X", "properties", multiple=True, metavar="PROPERTY=VALUE", help="Any property of librdkafka.")
def command(
    settings: Settings,
    topic: str,
    files: tuple[str, ...],
    key_separator: str | None,
    key: str | None,
    headers: tuple[str, ...],
    partition: int | None,
    compression: str,
    acks: str,
    idempotent: bool,
    delimiter: str,
    null_empty: bool,
    whole_files: bool,
    properties: tuple[str, ...],
) -> None:
    from mqd.cli.topic_writing import Writer

    if key_separator == "" or delimiter == "":
        raise click.UsageError("a separator cannot be empty")
    if idempotent and acks != "all":
        raise click.UsageError("--idempotent needs --acks all")
    config = (
        {"compression.type": compression, "acks": acks}
        | ({"enable.idempotence": "true"} if idempotent else {})
        | pairs(properties, "-X")
    )
    parsed_headers = [parse_header(text) for text in headers]
    separator, default_key = unescape(key_separator) if key_separator else None, None if key is None else key.encode()
    writer = Writer(settings.bootstrap, config)
    started = time.monotonic()
    with _Progress(files) as progress, writer:
        for record in _records(files, unescape(delimiter), whole_files, progress):
            own_key, value = split_key(record, separator, default_key)
            writer.send(
                topic,
                None if null_empty and not value else value,
                None if null_empty and not own_key else own_key,
                parsed_headers,
                -1 if partition is None else partition,
            )
            progress.update(writer)
    seconds = time.monotonic() - started
    if settings.json:
        emit_json(
            {"topic": topic, "records": writer.sent_count, "bytes": writer.sent_bytes, "seconds": round(seconds, 3)}
        )
    else:
        rate = writer.sent_count / seconds if seconds else 0.0
        click.echo(
            f"{writer.sent_count} record{'s' * (writer.sent_count != 1)}, {human_bytes(writer.sent_bytes)}"
            f" written to {topic} in {seconds:.1f} s"
            f" ({rate:,.0f} records/s)",
            err=True,
        )


def _records(files: tuple[str, ...], delimiter: bytes, whole_files: bool, progress: "_Progress") -> Iterator[bytes]:
    for name in files or ("-",):
        with contextlib.nullcontext(sys.stdin.buffer) if name == "-" else open(name, "rb") as stream:
            counted: BinaryIO = progress.watch(stream)
            if whole_files and name != "-":
                yield counted.read()
            else:
                yield from split(counted, delimiter)


class _Progress:
    """A progress bar on stderr, if stderr is a terminal and stdin is not interactive. Otherwise it
    shows nothing and does not import rich.
    """

    def __init__(self, files: tuple[str, ...]):
        are_all_regular = all(os.path.isfile(name) for name in files)
        self._total = sum(os.path.getsize(name) for name in files) if files and are_all_regular else None
        self._is_shown = sys.stderr.isatty() and (bool(files) or not sys.stdin.isatty())
        self._read_bytes = 0
        self._next_update_s = 0.0
        self._bar: Any = None  # rich's Progress, which is imported only if it is shown

    def __enter__(self) -> "_Progress":
        if self._is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TextColumn("{task.fields[records]:,} records"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("writing", total=self._total, records=0)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def watch(self, stream: BinaryIO) -> Any:
        return stream if self._bar is None else _CountingStream(stream, self)

    def count(self, size_bytes: int) -> None:
        self._read_bytes += size_bytes

    def update(self, writer: Any) -> None:
        if self._bar is not None and (now := time.monotonic()) >= self._next_update_s:
            self._next_update_s = now + _PROGRESS_S
            self._bar.update(self._task, completed=self._read_bytes, records=writer.sent_count)


class _CountingStream:
    """A stream that reports to `progress` how many bytes were read."""

    def __init__(self, stream: BinaryIO, progress: _Progress):
        self._read1 = getattr(stream, "read1", stream.read)
        self._stream, self._progress = stream, progress

    def read1(self, size: int) -> bytes:
        data = self._read1(size)
        self._progress.count(len(data))
        return data

    def read(self) -> bytes:
        data = self._stream.read()
        self._progress.count(len(data))
        return data
