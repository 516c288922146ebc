"""Compacts small files of an archive into large ones.

A record is rewritten rarely: a file is compacted only with others that are together as large as it
is, so each time it moves to a file at least twice as large. A day that gets N bytes a minute,
compacted to files of M bytes, is rewritten about log2(M/N) times instead of once a minute, and
besides its large files has at most a few of each size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines.manifest import Archive, ArchivedFile, Commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACTION = -1


def due(archive: Archive, file_bytes: int, from_files: int, without: Collection[str] = ()) -> list[list[ArchivedFile]]:
    """Groups of files worth merging, each of one topic and day, and at most `file_bytes` together.
    A day has groups if at least `from_files` of its files are smaller than half of `file_bytes`,
    and the largest of these is no larger than the others together.

    without: paths of files that cannot be compacted; the others of their day still are.
    """
    if from_files == 0:
        return []
    days: dict[tuple[str, str], list[ArchivedFile]] = {}
    for file in archive.files.values():
        if file.size_bytes < file_bytes / 2 and file.path not in without:
            days.setdefault((file.topic, file.date), []).append(file)
    found = []
    for _, files in sorted(days.items()):
        small = _choose_balanced(files)
        if len(small) >= max(from_files, 2):
            groups = _pack(sorted(small, key=lambda file: (file.spans[0].first, file.path)), file_bytes)
            found += [group for group in groups if len(group) > 1 and _is_worth(group, file_bytes)]
    return found


def _choose_balanced(files: list[ArchivedFile]) -> list[ArchivedFile]:
    """The smallest files, up to the last one that is not larger than all smaller ones together."""
    ordered = sorted(files, key=lambda file: (file.size_bytes, file.path))
    before = count = 0
    for index, file in enumerate(ordered):
        if file.size_bytes <= before:
            count = index + 1
        before += file.size_bytes
    return ordered[:count]


def _is_worth(group: list[ArchivedFile], file_bytes: int) -> bool:
    """Whether the resulting file is large enough not to be compacted again, or at least twice as large
    as each file of the group. It may be neither, because packing may have separated a large file from
    the small ones.
    """
    together = sum(file.size_bytes for file in group)
    return together >= file_bytes / 2 or together >= 2 * max(file.size_bytes for file in group)


def compact(spark: SparkSession, archive: Archive, groups: list[list[ArchivedFile]]) -> Commit:
    """Replaces each group by one file; a group belongs to one topic and day, and is one task.
    The old files are deleted by a later compaction, or `vacuum`.
    """
    from mqd.spark.pipelines.parquet import COLUMNS, ArchivedTask

    tasks = [
        [
            ArchivedTask(archive.path, file.path, file.topic, ((span.partition, span.first, span.end),))
            for file in group
            for span in file.spans
        ]
        for group in groups
    ]
    added = archiving.write(archiving.archived(archiving.scan(spark, tasks, (*COLUMNS, "topic"))), archive, "compacted")
    commit = Commit("", COMPACTION, added, [file.path for group in groups for file in group])
    archive.commit(commit)
    archive.sweep()
    return commit


def _pack(files: list[ArchivedFile], file_bytes: int) -> list[list[ArchivedFile]]:
    groups: list[list[ArchivedFile]] = [[]]
    filled = 0
    for file in files:
        if groups[-1] and filled + file.size_bytes > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(file)
        filled += file.size_bytes
    return groups
