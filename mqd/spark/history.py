"""What an archive has of a batch read: `option("archive", PATH)` reads each partition from there as far as it goes, and from the log from there on.

    H1  an offset comes from the archive or from the log, never from both: the archive's end of a partition is where its log begins to be read
    H2  a read begins at the archive's first offset when it begins at `earliest`; other starting offsets may lie before the log's start as long as the archive has them
    H3  records of a task come in the order of their offsets, partition after partition
Only the driver reads the archive's commits (mqd/spark/pipelines/manifest.py); executors open the files that they are given (mqd/spark/pipelines/parquet.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from mqd.spark.options import EARLIEST, SourceOptions
from mqd.spark.pipelines.manifest import Archive, ArchiveError
from mqd.spark.pipelines.parquet import ArchivedTask
from mqd.spark.planning import Key
from mqd.spark.wire import MqdReadError


def plan(options: SourceOptions, starts: Mapping[Key, int], ends: Mapping[Key, int], latest: Mapping[Key, int]) -> tuple[list[ArchivedTask], dict[Key, int]]:
    """Tasks over the archive, and where the log of each partition begins to be read. Raises MqdReadError."""
    assert options.archive is not None
    try:
        archive = Archive(options.archive)
    except ArchiveError as error:
        raise MqdReadError(str(error)) from error
    if not archive.batches:
        raise MqdReadError(f"option archive: there is no archive at {archive.path}, or nothing was archived yet: `mqd pipeline run` with pipeline = \"archive\" fills one")
    archived = {topic: archive.ends(topic) for topic in {topic for topic, _ in starts}}
    log_starts: dict[Key, int] = {}
    for key, start in starts.items():
        end = archived[key[0]].get(key[1], 0)
        if end > latest[key]:
            raise MqdReadError(
                f"{key[0]}-{key[1]}: the archive {options.archive} goes to offset {end} and the log only to {latest[key]}: the topic was made anew after it was archived. "
                "Read the archive's Parquet files by themselves"
            )
        # from the beginning: the log has to go on where the archive ends, or records between the two are lost, which the caller says
        log_starts[key] = end if options.starting.at == EARLIEST and end else max(start, end)
    firsts = {key: 0 for key in starts} if options.starting.at == EARLIEST else dict(starts)
    tasks = []
    for topic in sorted(archived):
        for file in archive.of(topic):
            wanted = tuple(
                (span.partition, max(span.first, firsts[key]), min(span.end, ends[key]))
                for span in file.spans
                if (key := (topic, span.partition)) in firsts and span.end > firsts[key] and span.first < ends[key]
            )
            if wanted:
                tasks.append(ArchivedTask(archive.path, file.path, topic, wanted))
    return tasks, log_starts
