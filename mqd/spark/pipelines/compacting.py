"""Compacts small files of an archive into large ones.

A record is rewritten rarely: a file is compacted only with others that are together at least as
large, so each time its records move to a file at least twice as large. A day that gets N bytes a
minute, compacted to files of M bytes, is rewritten about log2(M/N) times instead of once a minute,
and it never has more than a few small files of about the same size.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines.manifest import Archive, ArchivedFile, Commit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACTION_BATCH = -1


def find_due(
    archive: Archive, file_bytes: int, files_min: int, excluded: Collection[str] = ()
) -> list[list[ArchivedFile]]:
    """Returns groups of files worth merging. The files of a group are of one topic and day, and have
    at most `file_bytes` in total. A day has groups if at least `files_min` of its files are smaller
    than half of `file_bytes`, and the largest of these is no larger than the others together.

    excluded: paths of files that cannot be compacted; the other files of their day still are.
    """
    if files_min == 0:
        return []
    days: dict[tuple[str, str], list[ArchivedFile]] = {}
    for file in archive.files.values():
        if file.size_bytes < file_bytes / 2 and file.path not in excluded:
            days.setdefault((file.topic, file.date), []).append(file)
    due_groups = []
    for _, files in sorted(days.items()):
        small = _choose_balanced(files)
        if len(small) >= max(files_min, 2):
            groups = _pack(sorted(small, key=lambda file: (file.spans[0].first, file.path)), file_bytes)
            due_groups += [group for group in groups if len(group) > 1 and _is_worth_merging(group, file_bytes)]
    return due_groups


def _choose_balanced(files: list[ArchivedFile]) -> list[ArchivedFile]:
    """The smallest files, up to the last one that is not larger than all smaller ones together."""
    ordered = sorted(files, key=lambda file: (file.size_bytes, file.path))
    smaller_bytes = count = 0
    for index, file in enumerate(ordered):
        if file.size_bytes <= smaller_bytes:
            count = index + 1
        smaller_bytes += file.size_bytes
    return ordered[:count]


def _is_worth_merging(group: list[ArchivedFile], file_bytes: int) -> bool:
    """Whether the resulting file is large enough not to be compacted again, or at least twice as
    large as each file of the group. It may be neither, because packing may have separated a large
    file from the small ones.
    """
    total_bytes = sum(file.size_bytes for file in group)
    return total_bytes >= file_bytes / 2 or total_bytes >= 2 * max(file.size_bytes for file in group)


def compact(spark: SparkSession, archive: Archive, groups: list[list[ArchivedFile]]) -> Commit:
    """Replaces each group with one file; a group belongs to one topic and day, and is one task.
    The old files are deleted by a later compaction, or by `vacuum`.
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
    added = archiving.write(
        archiving.with_archive_columns(archiving.scan(spark, tasks, (*COLUMNS, "topic"))), archive, "compacted"
    )
    commit = Commit("", COMPACTION_BATCH, added, [file.path for group in groups for file in group])
    archive.commit(commit)
    archive.sweep()
    return commit


def _pack(files: list[ArchivedFile], file_bytes: int) -> list[list[ArchivedFile]]:
    groups: list[list[ArchivedFile]] = [[]]
    group_bytes = 0
    for file in files:
        if groups[-1] and group_bytes + file.size_bytes > file_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(file)
        group_bytes += file.size_bytes
    return groups
