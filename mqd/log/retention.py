"""Decides which segments may be deleted, and why: pure functions over a listing.

Each returns a new log start offset, never files: the caller moves the start first, then unlinks the
files below it.

R1  the active segment (the last of the listing) is never deleted; if it is too old, `should_roll` requests
    a new one, and the next check finds the old one sealed.
R2  only segments wholly below the high watermark are deleted, and only in order, beginning with
    the oldest.
R3  a topic without the policy `delete` loses nothing by age, size or free space (segments below the
    log start are still deleted).

Rules by age and size are Kafka's: by age while now - newest timestamp > retention.ms; by size while
the rest is at least retention.bytes.
"""

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import msgspec

from mqd.log.segments import Segment

Key = TypeVar("Key", bound=Hashable)


class RetentionPolicy(msgspec.Struct, frozen=True):
    retention_ms: int  # < 0 = never
    retention_bytes: int  # < 0 = no limit
    # an active segment with a first batch older than this is rolled; includes the jitter
    segment_ms: int
    may_delete: bool = True  # cleanup.policy has `delete`


class RetentionDecision(msgspec.Struct, frozen=True):
    new_start_offset: int | None = None
    should_roll: bool = False
    reason: str = ""


def _removable_count(segments: Sequence[Segment], high_watermark: int) -> int:
    """How many of the oldest segments may be deleted according to R1 and R2."""
    count = 0
    for following in segments[1:]:
        if following.base_offset > high_watermark:
            break
        count += 1
    return count


def _count_by_age(segments: Sequence[Segment], limit: int, retention_ms: int, now_ms: int) -> int:
    count = 0
    while retention_ms >= 0 and count < limit and now_ms - segments[count].age_timestamp_ms > retention_ms:
        count += 1
    return count


def _count_by_size(segments: Sequence[Segment], limit: int, retention_bytes: int) -> int:
    if retention_bytes < 0:
        return 0
    excess = sum(segment.size_bytes for segment in segments) - retention_bytes
    count = 0
    while count < limit and excess >= segments[count].size_bytes:
        excess -= segments[count].size_bytes
        count += 1
    return count


def decide(
    segments: Sequence[Segment],
    policy: RetentionPolicy,
    now_ms: int,
    log_start_offset: int,
    high_watermark: int,
    active_first_timestamp_ms: int = -1,
) -> RetentionDecision:
    """Applies the rules by age and size to one partition. `segments`: ascending, the active one
    last. `active_first_timestamp_ms`: of the first batch of the active segment; -1 = unknown or
    empty.
    """
    if not segments:
        return RetentionDecision()
    active = segments[-1]
    should_roll = active.size_bytes > 0 and _active_is_old(active, policy, now_ms, active_first_timestamp_ms)
    count, reason = 0, ""
    if policy.may_delete:
        limit = _removable_count(segments, high_watermark)
        by_age, by_size = (
            _count_by_age(segments, limit, policy.retention_ms, now_ms),
            _count_by_size(segments, limit, policy.retention_bytes),
        )
        count = max(by_age, by_size)
        reason = "" if not count else "age" if by_age >= by_size else "size"
    start = segments[count].base_offset
    return RetentionDecision(start if count and start > log_start_offset else None, should_roll, reason)


def _active_is_old(active: Segment, policy: RetentionPolicy, now_ms: int, first_timestamp_ms: int) -> bool:
    expired = policy.may_delete and policy.retention_ms >= 0 and now_ms - active.age_timestamp_ms > policy.retention_ms
    return expired or (first_timestamp_ms >= 0 and now_ms - first_timestamp_ms > policy.segment_ms)


class Candidate(msgspec.Struct, Generic[Key], frozen=True):
    """A partition that free-space retention may shorten."""

    key: Key
    segments: Sequence[Segment]
    log_start_offset: int
    high_watermark: int
    may_delete: bool


def log_starts_after_freeing(candidates: Sequence[Candidate[Key]], bytes_needed: int) -> dict[Key, int]:
    """New log start offsets (key -> offset) that free at least `bytes_needed`, taking the oldest
    sealed segments of all partitions first; fewer bytes if there are no more segments. Empty if no
    bytes are needed.
    """
    removable = [
        (segment.age_timestamp_ms, index, segment_index, segment.size_bytes)
        for index, candidate in enumerate(candidates)
        if candidate.may_delete
        for segment_index, segment in enumerate(
            candidate.segments[: _removable_count(candidate.segments, candidate.high_watermark)]
        )
    ]
    starts: dict[Key, int] = {}
    next_segment_index = [0] * len(candidates)
    freed_bytes = 0
    for _, index, segment_index, _ in sorted(removable):
        if freed_bytes >= bytes_needed:
            break
        candidate = candidates[index]
        # producers' timestamps may fall from one segment to the next: earlier segments are included
        # (R2)
        while next_segment_index[index] <= segment_index:
            freed_bytes += candidate.segments[next_segment_index[index]].size_bytes
            next_segment_index[index] += 1
        start = candidate.segments[next_segment_index[index]].base_offset
        if start > candidate.log_start_offset:
            starts[candidate.key] = start
    return starts
