"""Small files of an archive into large ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines.manifest import Archive, ArchivedFile, Commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACTION = -1


def due(archive: Archive, file_bytes: int, from_files: int) -> list[list[ArchivedFile]]:
    """Groups of files of one topic's day, each at most `file_bytes` together, worth to be one file: at least `from_files` that are smaller than half of it."""
    if from_files == 0:
        return []
    days: dict[tuple[str, str], list[ArchivedFile]] = {}
    for file in archive.files.values():
        if file.size_bytes < file_bytes / 2:
            days.setdefault((file.topic, file.date), []).append(file)
    found = []
    for _, files in sorted(days.items()):
        if len(files) >= max(from_files, 2):
            found += [group for group in _packed(sorted(files, key=lambda file: (file.spans[0].first, file.path)), file_bytes) if len(group) > 1]
    return found


def compact(spark: SparkSession, archive: Archive, groups: list[list[ArchivedFile]]) -> Commit:
    """One file instead of each group; groups are of one topic's day each, and work for one task. The old files are deleted by a later `vacuum`."""
    from mqd.spark.pipelines.parquet import COLUMNS, ArchivedTask

    tasks = [[ArchivedTask(archive.path, file.path, file.topic, ((span.partition, span.first, span.end),)) for file in group for span in file.spans] for group in groups]
    added = archiving.write(archiving.archived(archiving.scan(spark, tasks, (*COLUMNS, "topic"))), archive, "compacted")
    commit = Commit("", COMPACTION, added, [file.path for group in groups for file in group])
    archive.commit(commit)
    return commit


def _packed(files: list[ArchivedFile], file_bytes: int) -> list[list[ArchivedFile]]:
    groups: list[list[ArchivedFile]] = [[]]
    filled = 0
    for file in files:
        if groups[-1] and filled + file.size_bytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.size_bytes
    return groups
