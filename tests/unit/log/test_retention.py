"""Which segments retention deletes."""

from hypothesis import given
from hypothesis import strategies as st

from mqd.log.retention import Candidate, RetentionPolicy, decide, log_starts_after_freeing
from mqd.log.segments import Segment

NEVER = RetentionPolicy(-1, -1, 10**15)
HOUR = 3_600_000


def listing(*rows: tuple[int, int, int]) -> list[Segment]:
    return [Segment(base, size, newest, 0) for base, size, newest in rows]


def test_by_age_deletes_whole_segments_from_the_oldest() -> None:
    found = listing((0, 10, 100), (10, 10, 200), (20, 10, 300), (30, 10, 400))
    decision = decide(found, RetentionPolicy(1000, -1, 10**15), now_ms=1250, log_start_offset=0, high_watermark=40)
    assert (decision.new_start_offset, decision.reason, decision.should_roll) == (20, "age", False)


def test_by_age_stops_at_the_first_young_segment() -> None:
    found = listing((0, 10, 9000), (10, 10, 100), (20, 10, 9000))
    assert decide(found, RetentionPolicy(1000, -1, 10**15), 9500, 0, 30).new_start_offset is None


def test_exactly_the_limit_stays() -> None:
    found = listing((0, 10, 100), (10, 10, 5000))
    assert decide(found, RetentionPolicy(1000, -1, 10**15), 1100, 0, 20).new_start_offset is None
    assert decide(found, RetentionPolicy(1000, -1, 10**15), 1101, 0, 20).new_start_offset == 10


def test_by_size_keeps_at_least_the_limit() -> None:
    found = listing((0, 100, 1), (10, 100, 1), (20, 100, 1), (30, 50, 1))
    assert decide(found, RetentionPolicy(-1, 250, 10**15), 0, 0, 40).new_start_offset == 10
    assert decide(found, RetentionPolicy(-1, 251, 10**15), 0, 0, 40).new_start_offset is None
    assert decide(found, RetentionPolicy(-1, 0, 10**15), 0, 0, 40).new_start_offset == 30, "the active segment stays"


def test_nothing_at_or_above_the_high_watermark_is_deleted() -> None:
    found = listing((0, 10, 1), (10, 10, 1), (20, 10, 1))
    assert decide(found, RetentionPolicy(0, 0, 10**15), 10**6, 0, 19).new_start_offset == 10
    assert decide(found, RetentionPolicy(0, 0, 10**15), 10**6, 0, 9).new_start_offset is None


def test_an_old_active_segment_is_rolled_first() -> None:
    found = listing((0, 10, 100))
    decision = decide(found, RetentionPolicy(1000, -1, 10**15), 10**6, 0, 10)
    assert decision.should_roll and decision.new_start_offset is None


def test_an_empty_active_segment_is_not_rolled() -> None:
    assert not decide(listing((10, 0, -1)), RetentionPolicy(0, 0, 1), 10**9, 10, 10, 1).should_roll


def test_segment_ms_rolls_by_the_first_record() -> None:
    policy = RetentionPolicy(-1, -1, HOUR)
    assert not decide(listing((0, 10, 100)), policy, HOUR + 100, 0, 10, 100).should_roll
    assert decide(listing((0, 10, 100)), policy, HOUR + 101, 0, 10, 100).should_roll


def test_without_timestamps_the_files_age_counts() -> None:
    found = [Segment(0, 10, -1, mtime_ms=100), Segment(10, 10, -1, mtime_ms=5000)]
    assert decide(found, RetentionPolicy(1000, -1, 10**15), 2000, 0, 20).new_start_offset == 10


def test_without_the_delete_policy_nothing_is_deleted() -> None:
    found = listing((0, 10, 1), (10, 10, 1))
    assert decide(found, RetentionPolicy(0, 0, 10**15, may_delete=False), 10**9, 0, 20) == decide(
        found, NEVER, 10**9, 0, 20
    )


segments = st.lists(
    st.tuples(st.integers(1, 50), st.integers(0, 1000), st.integers(-1, 10_000)), min_size=1, max_size=12
).map(lambda rows: [Segment(sum(row[0] for row in rows[:i]), row[1], row[2], 5000) for i, row in enumerate(rows)])
policies = st.builds(
    RetentionPolicy, st.integers(-1, 12_000), st.integers(-1, 8000), st.integers(1, 12_000), st.booleans()
)


@given(segments, policies, st.integers(0, 20_000), st.integers(0, 600), st.integers(0, 600))
def test_decisions_respect_the_limits(
    found: list[Segment], policy: RetentionPolicy, now_ms: int, log_start: int, high_watermark: int
) -> None:
    decision = decide(found, policy, now_ms, log_start, high_watermark)
    new_start = decision.new_start_offset
    if new_start is None:
        return
    assert policy.may_delete
    assert log_start < new_start <= high_watermark
    assert new_start in [segment.base_offset for segment in found[1:]], (
        "always a boundary, and the active segment stays"
    )
    kept = [segment for segment in found if segment.base_offset >= new_start]
    gone = found[: len(found) - len(kept)]
    by_age = policy.retention_ms >= 0 and all(
        now_ms - segment.age_timestamp_ms > policy.retention_ms for segment in gone
    )
    by_size = policy.retention_bytes >= 0 and sum(segment.size_bytes for segment in kept) >= policy.retention_bytes
    assert by_age or by_size
    again = decide(kept, policy, now_ms, new_start, high_watermark)
    assert again.new_start_offset is None or (decision.reason, again.reason) == ("size", "age"), (
        "looking again finds nothing more"
    )


def test_age_is_checked_again_after_a_deletion_by_size() -> None:
    """Found by hypothesis: producers' timestamps may decrease from one segment to the next. As in
    Kafka, the next check deletes the segments that have become the oldest.
    """
    found = [Segment(0, 0, 1, 5000), Segment(1, 1, 0, 5000), Segment(2, 0, 0, 5000)]
    policy = RetentionPolicy(retention_ms=0, retention_bytes=1, segment_ms=10**15)
    first = decide(found, policy, 1, 0, 2)
    assert (first.new_start_offset, first.reason) == (1, "size")
    then = decide(found[1:], policy, 1, 1, 2)
    assert (then.new_start_offset, then.reason) == (2, "age")


# -- free space ------------------------------------------------------------------------------------


def test_free_space_deletes_the_oldest_of_all_partitions() -> None:
    a = Candidate("a", listing((0, 100, 10), (10, 100, 30), (20, 100, 50)), 0, 30, True)
    b = Candidate("b", listing((0, 100, 20), (5, 100, 40), (9, 100, 60)), 0, 12, True)
    assert log_starts_after_freeing([a, b], 1) == {"a": 10}
    assert log_starts_after_freeing([a, b], 200) == {"a": 10, "b": 5}
    assert log_starts_after_freeing([a, b], 201) == {"a": 20, "b": 5}
    assert log_starts_after_freeing([a, b], 10**9) == {"a": 20, "b": 9}, "active segments stay"
    assert log_starts_after_freeing([a, b], 0) == {}


def test_free_space_spares_topics_without_the_delete_policy() -> None:
    compacted = Candidate("c", listing((0, 100, 1), (10, 100, 2)), 0, 20, False)
    assert log_starts_after_freeing([compacted], 100) == {}


@given(st.lists(st.tuples(segments, st.integers(0, 600)), max_size=5), st.integers(0, 10_000))
def test_free_space_deletes_enough_or_everything_allowed(
    partitions: list[tuple[list[Segment], int]], expected: int
) -> None:
    candidates = [
        Candidate(number, found, 0, high_watermark, True) for number, (found, high_watermark) in enumerate(partitions)
    ]
    starts = log_starts_after_freeing(candidates, expected)
    freed, possible = 0, 0
    for candidate in candidates:
        bases = [segment.base_offset for segment in candidate.segments]
        start = starts.get(candidate.key, 0)
        assert start in bases and start <= max(candidate.high_watermark, 0)
        freed += sum(segment.size_bytes for segment in candidate.segments if segment.base_offset < start)
        limit = max((base for base in bases if base <= candidate.high_watermark), default=0)
        possible += sum(segment.size_bytes for segment in candidate.segments if segment.base_offset < limit)
    assert freed >= min(expected, possible)
