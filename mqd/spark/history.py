"""The archived part of a batch read: `option("archive", PATH)` reads each partition from the
archive as far as the archive goes, and then from the log.

    H1  each offset is read once: from the archive, the offsets from a partition's first archived
        record to the end of its last archived batch; from the log, those before and after
    H2  a read from `earliest` begins at the lower of the archive's and the log's first offset;
        other starting offsets may be before the log's start as long as the archive has them
    H3  a task returns records in the order of their offsets, partition after partition
    H4  offsets that are in neither of the two are reported as lost
    H5  the archive is read before the logs' ends are queried: an archive that grew in
        between could extend beyond them, and would look like the archive of a recreated topic
Only the driver reads the archive's commits (mqd/spark/pipelines/manifest.py); executors open the
files that they receive (mqd/spark/pipelines/parquet.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mqd.spark.offsets import id_text
from mqd.spark.options import EARLIEST, SourceOptions
from mqd.spark.pipelines.manifest import Archive, ArchiveError
from mqd.spark.pipelines.parquet import ArchivedTask
from mqd.spark.planning import Key
from mqd.spark.wire import MqdReadError

_ADVICE = "Read the archive's Parquet files directly"


def open_archive(options: SourceOptions) -> Archive:
    """The archive's present state, read before the logs' ends are queried (H5). Raises
    MqdReadError."""
    assert options.archive is not None
    try:
        archive = Archive(options.archive)
    except ArchiveError as error:
        raise MqdReadError(str(error)) from error
    if not archive.batches:
        raise MqdReadError(
            f"option archive: there is no archive at {archive.path}, or nothing was archived yet: `mqd pipeline run`"
            ' with pipeline = "archive" fills one'
        )
    return archive


def plan(
    options: SourceOptions,
    starts: Mapping[Key, int],
    ends: Mapping[Key, int],
    latest: Mapping[Key, int],
    ids: Mapping[str, bytes] = MappingProxyType({}),
    archive: Archive | None = None,
) -> tuple[list[ArchivedTask], dict[Key, list[tuple[int, int]]]]:
    """Returns the tasks that read the archive, and for each partition the (start, end) ranges to
    read from its log. `ids`: the current topic ids; `archive`: the archive as it was before
    `latest` was queried (H5). Raises MqdReadError.
    """
    archive = open_archive(options) if archive is None else archive
    for topic, topic_id in ids.items():
        if archive.topic_ids.get(topic, id_text(topic_id)) != id_text(topic_id):
            raise MqdReadError(
                f"{topic} was recreated after it was archived at {options.archive}: the same offset is a different"
                f" record there. {_ADVICE}"
            )
    archived_ranges = {
        key: span for topic in {topic for topic, _ in starts} for key, span in _archived_ranges(archive, topic).items()
    }
    tasks = []
    log_ranges: dict[Key, list[tuple[int, int]]] = {}
    firsts: dict[Key, int] = {}
    for key, start in starts.items():
        first, end = archived_ranges.get(key, (start, start))
        if end > latest[key]:
            raise MqdReadError(
                f"{key[0]}-{key[1]}: the archive {options.archive} extends to offset {end} and the log only to"
                f" {latest[key]}: the topic was recreated after it was archived. {_ADVICE}"
            )
        firsts[key] = min(first, start) if options.starting.symbolic == EARLIEST else start
        # if the log does not continue where the archive ends, the records between the two are lost;
        # the caller reports that
        log_ranges[key] = (
            [(firsts[key], min(first, ends[key])), (max(firsts[key], end), ends[key])]
            if key in archived_ranges
            else [(start, ends[key])]
        )
    for topic in sorted({topic for topic, _ in starts}):
        for file in archive.files_of(topic):
            requested = tuple(
                (span.partition, max(span.first, firsts[key]), min(span.end, ends[key]))
                for span in file.spans
                if (key := (topic, span.partition)) in firsts and span.end > firsts[key] and span.first < ends[key]
            )
            if requested:
                tasks.append(ArchivedTask(archive.path, file.path, topic, requested))
    return tasks, {key: [(start, end) for start, end in ranges if start < end] for key, ranges in log_ranges.items()}


def _archived_ranges(archive: Archive, topic: str) -> dict[Key, tuple[int, int]]:
    """For each partition with archived records: the offset of the first of them, and the offset
    at which the partition's archive ends.
    """
    ends = archive.ends(topic)
    firsts: dict[int, int] = {}
    for file in archive.files_of(topic):
        for span in file.spans:
            firsts[span.partition] = min(firsts.get(span.partition, span.first), span.first)
    return {(topic, partition): (first, ends[partition]) for partition, first in firsts.items()}
