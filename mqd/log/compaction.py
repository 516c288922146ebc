"""Decides which partition is compacted when, and which part of it: pure functions over a listing.
The work is implemented in native/log/compaction/compact.h and driven by mqd/worker/compaction.py.

    log start          first dirty offset              end of the compactable part
        | clean segments       | dirty segments                | too young, not yet stable, or active
        +----------------------+-------------------------------+---------------------------------------------

L1  a segment is compacted only if the whole segment is below the last stable offset, below the high
    watermark's segment and below the flushed end; the active segment is never compacted.
L2  a segment with a record younger than min.compaction.lag.ms waits, and so do all later ones.
L3  everything from the log start on is rewritten. A record is outdated if the dirty part has a
    later one with its key: the clean part therefore stays clean.
L4  the first dirty offset only ever rises, and only after the new files of all groups of segments
    are in place.

The rules are Kafka's (LogCleanerManager): the dirtiest log first, if the dirty bytes exceed
min.cleanable.dirty.ratio of the bytes to read; immediately if a record has waited longer than
max.compaction.lag.ms.
"""

from collections.abc import Sequence

import msgspec

from mqd.log.segments import Segment

INDEX_BYTES_MAX = 10 << 20  # native/log/index.h: a larger one is not read completely
OFFSET_SPAN_MAX = (1 << 31) - 1  # relative offsets are int32


class CompactionPolicy(msgspec.Struct, frozen=True):
    is_enabled: bool  # cleanup.policy has `compact`
    min_lag_ms: int
    max_lag_ms: int
    dirty_ratio_min: float
    delete_retention_ms: int
    segment_bytes: int
    index_interval_bytes: int


class StoredSegment(msgspec.Struct, frozen=True):
    """A segment with the additional data that compaction needs."""

    segment: Segment
    first_timestamp_ms: int = -1  # of its first batch; -1 = none, or not requested
    index_bytes: int = 0

    @property
    def base_offset(self) -> int:
        return self.segment.base_offset


class LogOffsets(msgspec.Struct, frozen=True):
    """The offsets of a log that the partition's owner has published."""

    log_start_offset: int
    last_stable_offset: int
    high_watermark_segment: int
    high_watermark_position: int
    durable_offset: int


class CompactionPlan(msgspec.Struct, frozen=True):
    """`bases`: the base offsets of all segments from the log's first to the high watermark's. The
    first `to_clean_count` of them are to be cleaned. `end_position`: the high watermark's position
    in the last of them; -1 if its segment is missing.
    """

    bases: tuple[int, ...]
    to_clean_count: int
    first_dirty_offset: int
    dirty_bytes: int
    total_bytes: int
    is_overdue: bool
    end_position: int

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / self.total_bytes if self.total_bytes else 0.0

    def is_due(self, policy: CompactionPolicy) -> bool:
        return self.dirty_bytes > 0 and (self.is_overdue or self.dirty_ratio > policy.dirty_ratio_min)


def first_dirty_offset(checkpoint: int | None, log_start_base: int, active_base: int) -> int:
    """Start of the dirty part. A checkpoint beyond the sealed segments belongs to a log that has
    been truncated since: no part is treated as clean.
    """
    if checkpoint is None or checkpoint < log_start_base or checkpoint > active_base:
        return log_start_base
    return checkpoint


def _stable_count(stored: Sequence[StoredSegment], offsets: LogOffsets) -> int:
    """How many segments may be compacted according to L1."""
    count = 0
    for segment, following in zip(stored, stored[1:], strict=False):
        end = following.base_offset
        if (
            end > offsets.last_stable_offset
            or end > offsets.durable_offset
            or segment.base_offset >= offsets.high_watermark_segment
        ):
            break
        count += 1
    return count


def plan(
    stored: Sequence[StoredSegment], offsets: LogOffsets, policy: CompactionPolicy, checkpoint: int | None, now_ms: int
) -> CompactionPlan | None:
    """`stored`: ascending, the active segment last; segments wholly below the log start are
    ignored. None: no dirty segment may be compacted.
    """
    start = max(
        (number for number, entry in enumerate(stored) if entry.base_offset <= offsets.log_start_offset), default=0
    )
    stored = stored[start:]
    if len(stored) < 2:
        return None
    dirty_from = first_dirty_offset(checkpoint, stored[0].base_offset, stored[-1].base_offset)
    limit = _stable_count(stored, offsets)
    first = next((number for number in range(limit) if stored[number + 1].base_offset > dirty_from), limit)
    for number in range(first, limit):
        if policy.min_lag_ms > 0 and stored[number].segment.age_timestamp_ms > now_ms - policy.min_lag_ms:  # L2
            limit = number
            break
    if first >= limit:
        return None
    dirty = stored[first:limit]
    oldest_ms = min((entry.first_timestamp_ms for entry in dirty if entry.first_timestamp_ms > 0), default=now_ms)
    last = max(number for number, entry in enumerate(stored) if entry.base_offset <= offsets.high_watermark_segment)
    return CompactionPlan(
        tuple(entry.base_offset for entry in stored[: last + 1]),
        limit,
        max(dirty_from, stored[0].base_offset),
        sum(entry.segment.size_bytes for entry in dirty),
        sum(entry.segment.size_bytes for entry in stored[:limit]),
        oldest_ms < now_ms - policy.max_lag_ms,
        offsets.high_watermark_position if stored[last].base_offset == offsets.high_watermark_segment else -1,
    )


def merge_groups(stored: Sequence[StoredSegment], end_offset: int, segment_bytes: int) -> list[tuple[int, int]]:
    """Divides the segments into groups of neighbours that may be merged. Returns (index of the
    first, count) of each group. `end_offset`: the base offset of the segment after the last one.
    """
    ranges: list[tuple[int, int]] = []
    first = size_bytes = index_bytes = 0
    bases = [entry.base_offset for entry in stored] + [end_offset]
    for number, entry in enumerate(stored):
        fits = (
            number > first
            and size_bytes + entry.segment.size_bytes <= segment_bytes
            and index_bytes + entry.index_bytes <= INDEX_BYTES_MAX
            and bases[number + 1] - bases[first] <= OFFSET_SPAN_MAX
        )
        if not fits and number > first:
            ranges.append((first, number - first))
            first, size_bytes, index_bytes = number, 0, 0
        size_bytes += entry.segment.size_bytes
        index_bytes += entry.index_bytes
    if stored:
        ranges.append((first, len(stored) - first))
    return ranges
