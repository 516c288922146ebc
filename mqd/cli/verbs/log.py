"""`mqd log`: shows and verifies the contents of segment files. It only reads files: it needs no
broker, and does not disturb a running one.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from mqd.cli.common import EXIT_FAILED, CliError, Settings, emit_json, human_bytes, options
from mqd.cli.records import json_field


@click.group(help="Dump and verify segment files.")
def command() -> None:
    pass


def _segments(path: Path) -> list[Path]:
    """The segment file, or all segment files of a partition's directory. Raises CliError."""
    if path.is_dir():
        segments = sorted(path.glob("*.log"))
        if not segments:
            raise CliError(f"{path} has no segments; name a partition's directory such as TOPIC-0, or a file in it")
        return segments
    return [path]


@command.command()
@options
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("-r", "--records", "show_records", is_flag=True, help="Also print the records of each batch.")
@click.option(
    "-o", "--from-offset", type=click.IntRange(0), default=0, help="Leave out batches that end before this offset."
)
@click.option("-n", "--count", type=click.IntRange(1), help="Stop after this number of batches.")
def dump(settings: Settings, path: Path, show_records: bool, from_offset: int, count: int | None) -> None:
    """Print the record batches of PATH, a segment file or a partition's directory."""
    from mqd.log.batches import CorruptBatch
    from mqd.log.dump import dump_records, dump_segment

    printed_count = 0
    for segment in _segments(path):
        if not settings.json:
            click.echo(f"{segment}:")
        try:
            for batch in dump_segment(segment):
                if batch.last_offset < from_offset:
                    continue
                records = dump_records(segment, batch) if show_records else None
                sys.stdout.write(_batch_json(segment, batch, records) if settings.json else _batch_text(batch, records))
                printed_count += 1
                if count is not None and printed_count >= count:
                    return
        except CorruptBatch as error:
            sys.stdout.flush()
            raise CliError(f"{segment}: {error}; mqd log verify shows how much is sound") from error


def _batch_json(segment: Path, batch: Any, records: list[Any] | None) -> str:
    fields = {"segment": str(segment), **msgspec.structs.asdict(batch), "compression": batch.compression_name}
    if records is not None:
        fields["records"] = [
            {
                "offset": record.offset,
                "timestamp_ms": record.timestamp_ms,
                **json_field("key", record.key),
                **json_field("value", record.value),
                "headers": [{"name": name, **json_field("value", value)} for name, value in record.headers],
            }
            for record in records
        ]
    return json.dumps(fields, ensure_ascii=False) + "\n"


def _batch_text(batch: Any, records: list[Any] | None) -> str:
    producer = (
        f" producer {batch.producer_id} epoch {batch.producer_epoch} sequence {batch.base_sequence}"
        if batch.producer_id >= 0
        else ""
    )
    crc = {True: "valid", False: "WRONG", None: "not checked"}[batch.crc_valid]
    lines = [
        f"  offsets {batch.base_offset}..{batch.last_offset} records {batch.record_count} position {batch.position}"
        f" bytes {batch.size_bytes} leader epoch {batch.partition_leader_epoch} time"
        f" {batch.base_timestamp_ms}..{batch.max_timestamp_ms} compression {batch.compression_name}{producer} crc {crc}"
    ]
    for record in records or ():
        headers = "".join(f" {name}={value!r}" for name, value in record.headers)
        lines.append(
            f"    {record.offset} time {record.timestamp_ms} key {record.key!r} value {record.value!r}{headers}"
        )
    return "\n".join(lines) + "\n"


def _reports(paths: tuple[Path, ...], deep: bool, progress: Any) -> Iterator[tuple[Path, list[Any], bool]]:
    """Yields (path, segment reports, whether it is damaged) for each file or partition. A directory
    without segments stands for the partitions in it.
    """
    from mqd.log.dump import verify_directory, verify_segment

    for path in paths:
        if not path.is_dir():
            report = verify_segment(path, deep, progress)
            yield path, [report], report.problem is not None and not report.incomplete
            continue
        directories = (
            [path] if any(path.glob("*.log")) else sorted({segment.parent for segment in path.glob("*/*.log")})
        )
        if not directories:
            raise CliError(f"{path} has no segments and no partitions")
        for directory in directories:
            directory_report = verify_directory(directory, progress, deep)
            yield directory, directory_report.segments, directory_report.damaged


@command.command()
@options
@click.argument("paths", nargs=-1, required=True, metavar="PATH...", type=click.Path(exists=True, path_type=Path))
@click.option("--deep", is_flag=True, help="Also decompress and decode every record.")
def verify(settings: Settings, paths: tuple[Path, ...], deep: bool) -> int:
    """Check headers, checksums, offsets and indexes of segments, partitions or whole log
    directories.

    Exit status 1 when stored records are unreadable, or an index of aborted transactions disagrees
    with the log. A truncated last batch (after a crash, or while a broker is writing) does not
    count as damage; nor does damage to any other index, because the broker rebuilds it.
    """
    results = []
    damaged_count = 0
    with _Progress() as progress:
        for path, segments, damaged in _reports(paths, deep, progress.update):
            damaged_count += damaged
            results.append(
                {
                    "path": str(path),
                    "damaged": damaged,
                    "segments": [msgspec.to_builtins(segment) for segment in segments],
                }
            )
            if not settings.json:
                progress.clear()
                _show(path, segments, damaged)
    if settings.json:
        emit_json(results)
    return EXIT_FAILED if damaged_count else 0


def _show(path: Path, segments: list[Any], damaged: bool) -> None:
    record_count = sum(segment.record_count for segment in segments)
    size_bytes = sum(segment.valid_bytes for segment in segments)
    state = "DAMAGED" if damaged else "sound"
    click.echo(f"{path}: {state}, {len(segments)} segments, {record_count} records, {human_bytes(size_bytes)}")
    for segment in segments:
        name = Path(segment.path).name
        if segment.problem is not None:
            kind = "incomplete end" if segment.incomplete else "damage"
            click.echo(
                f"  {name}: {kind}: {segment.problem}; sound up to byte {segment.valid_bytes}, offset"
                f" {segment.next_offset}"
            )
        for problem in segment.index_problems + segment.aborted_problems:
            click.echo(f"  {name}: {problem} (indexes are rebuilt when the broker is started again)")


class _Progress:
    """A progress line on stderr during long runs, if stderr is a terminal."""

    def __init__(self) -> None:
        self._is_shown = sys.stderr.isatty()
        self._percent = -1

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def update(self, done: int, total: int) -> None:
        percent = done * 100 // max(total, 1)
        if self._is_shown and percent != self._percent and total > 64 << 20:
            self._percent = percent
            sys.stderr.write(f"\rverifying {percent} %  ")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._percent >= 0:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._percent = -1
