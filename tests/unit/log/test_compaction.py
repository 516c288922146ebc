"""When a partition is compacted, which segments, and up to where it is known to be clean."""

from pathlib import Path

import msgspec
import pytest

from mqd.log import cleaner_checkpoint, compaction, compaction_report
from mqd.log.compaction import CompactionPolicy, LogOffsets, StoredSegment
from mqd.log.segments import Segment, TimestampCache
from mqd.worker import compaction_steps
from mqd.worker.options import compaction_policy, log_options, retention_policy

NOW = 1_000_000_000
POLICY = CompactionPolicy(True, 0, 1 << 62, 0.5, 1000, 1000, 4096)


def log(*sizes: int, ages_ms: tuple[int, ...] = (), firsts_ms: tuple[int, ...] = ()) -> list[StoredSegment]:
    """Segments of 100 offsets; the last is the active one."""
    return [
        StoredSegment(
            Segment(100 * number, size, NOW - (ages_ms[number] if ages_ms else 10_000), NOW),
            firsts_ms[number] if firsts_ms else -1,
        )
        for number, size in enumerate(sizes)
    ]


def ends(active: int, **changes: int) -> LogOffsets:
    values = {
        "log_start_offset": 0,
        "last_stable_offset": active + 50,
        "high_watermark_segment": active,
        "high_watermark_position": 7,
        "durable_offset": active + 50,
    }
    return LogOffsets(**{**values, **changes})


def plan(stored, at=None, checkpoint=None, policy=POLICY):
    return compaction.plan(stored, at or ends(stored[-1].base_offset), policy, checkpoint, NOW)


def test_all_sealed_segments_are_dirty_at_first():
    found = plan(log(10, 20, 30, 5))
    assert found.bases == (0, 100, 200, 300) and found.to_clean_count == 3 and found.first_dirty_offset == 0
    assert (found.dirty_bytes, found.total_bytes, found.end_position) == (60, 60, 7) and found.is_due(POLICY)


def test_an_active_segment_alone_is_not_compacted():
    assert plan(log(10)) is None and compaction.plan([], ends(0), POLICY, None, NOW) is None


def test_clean_segments_count_for_the_ratio():
    found = plan(log(10, 20, 30, 5), checkpoint=200)
    assert (found.first_dirty_offset, found.dirty_bytes, found.total_bytes, found.to_clean_count) == (200, 30, 60, 3)
    assert not found.is_due(POLICY) and found.is_due(msgspec.structs.replace(POLICY, dirty_ratio_min=0.49))
    assert plan(log(10, 20, 30, 5), checkpoint=300) is None
    # in the middle: the table of keys was full
    assert plan(log(10, 20, 30, 5), checkpoint=250).first_dirty_offset == 250


@pytest.mark.parametrize(
    "checkpoint, expected", [(None, 100), (50, 100), (100, 100), (250, 250), (300, 300), (301, 100)]
)
def test_a_checkpoint_counts_only_within_the_sealed_log(checkpoint, expected):
    assert compaction.first_dirty_offset(checkpoint, 100, 300) == expected


@pytest.mark.parametrize(
    "changes, count",
    [
        ({"last_stable_offset": 299}, 2),
        ({"last_stable_offset": 300}, 3),
        ({"durable_offset": 200}, 2),
        ({"high_watermark_segment": 100}, 1),
        ({"last_stable_offset": 99}, None),
    ],
)
def test_only_stable_flushed_segments_below_the_high_watermark(changes, count):
    found = plan(log(10, 20, 30, 5), ends(300, **changes))
    assert (found.to_clean_count if found else None) == count


def test_segments_below_the_log_start_are_left_out():
    found = plan(log(10, 20, 30, 5), ends(300, log_start_offset=150))
    assert found.bases == (100, 200, 300) and found.first_dirty_offset == 100 and found.to_clean_count == 2


def test_young_segments_and_all_later_ones_wait():
    policy = msgspec.structs.replace(POLICY, min_lag_ms=5000)
    assert plan(log(10, 20, 30, 5, ages_ms=(9000, 4000, 9000, 0)), policy=policy).to_clean_count == 1
    assert plan(log(10, 20, 30, 5, ages_ms=(4000, 9000, 9000, 0)), policy=policy) is None


def test_a_record_that_waited_too_long_makes_it_due():
    policy = msgspec.structs.replace(POLICY, max_lag_ms=5000)
    stored = log(100, 1, 5, firsts_ms=(NOW - 9000, NOW - 6000, NOW))
    assert plan(stored, checkpoint=100, policy=policy).is_due(policy)
    assert not plan(log(100, 1, 5, firsts_ms=(NOW - 9000, NOW - 4000, NOW)), checkpoint=100, policy=policy).is_due(
        policy
    )


def test_groups_are_bounded_by_size_index_and_span():
    def groups(*sizes: int, index: int = 0) -> list[tuple[int, int]]:
        stored = [msgspec.structs.replace(one, index_bytes=index) for one in log(*sizes)]
        return compaction.merge_groups(stored, 100 * len(stored), 1000)

    assert groups(400, 600, 1, 999, 1001, 5) == [(0, 2), (2, 2), (4, 1), (5, 1)]
    assert groups() == [] and groups(5000) == [(0, 1)]
    assert groups(1, 1, 1, index=6 << 20) == [(0, 1), (1, 1), (2, 1)]
    wide = [StoredSegment(Segment(base, 1, NOW, NOW)) for base in (0, 1 << 30, 1 << 31)]
    assert compaction.merge_groups(wide, (1 << 31) + 10, 1000) == [(0, 1), (1, 2)]


class PlainFiles:
    def replace(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)


def test_the_highest_of_all_checkpoints_counts(tmp_path: Path):
    one, other = b"1" * 16, b"2" * 16
    for worker, offset in ((0, 70), (1, 50)):
        checkpoint = cleaner_checkpoint.CleanerCheckpoint(tmp_path, worker, PlainFiles())
        checkpoint.put("t", 0, one, offset)
        checkpoint.put("u", worker, one, 5)
    (tmp_path / "cleaner-offset-checkpoint.2").write_bytes(b"nonsense")
    found = cleaner_checkpoint.CleanerCheckpoint(tmp_path, 1, PlainFiles())
    found.load()
    assert len(found.problems) == 1 and found.get("t", 0, one) == 70 and found.get("t", 0, other) is None
    found.put("t", 0, one, 90, existing=[("u", 1, one)])
    assert found.get("u", 0, one) is None and found.get("u", 1, one) == 5 and found.get("t", 0, one) == 90


def test_a_report_is_read_again(tmp_path: Path):
    report = compaction_report.Report(
        runs=3, seconds=1.5, partitions=[compaction_report.PartitionReport("t", 1, uncleanable="why")]
    )
    compaction_report.write(tmp_path, 4, report)
    assert (
        compaction_report.read(tmp_path, 4) == report
        and compaction_report.read(tmp_path, 5) == compaction_report.Report()
    )
    (tmp_path / "compaction.4.json").write_text("{")
    assert compaction_report.read(tmp_path, 4) == compaction_report.Report()


def test_the_active_segment_is_closed_in_time_for_the_lag():
    topic = {"cleanup.policy": "compact,delete", "max.compaction.lag.ms": "60000", "min.cleanable.dirty.ratio": "0.2"}
    assert (
        log_options({}, topic, False)["segment_ms"] == retention_policy({}, topic).segment_ms == 60000
        and log_options({}, topic, False)["compacted"]
    )
    assert (
        retention_policy({}, topic).may_delete
        and compaction_policy({}, topic).is_enabled
        and compaction_policy({}, topic).dirty_ratio_min == 0.2
    )
    plain = {"cleanup.policy": "delete", "max.compaction.lag.ms": "60000"}
    assert log_options({}, plain, False)["segment_ms"] == 604800000 and not compaction_policy({}, plain).is_enabled


def test_a_directory_whose_segments_have_vanished_has_none(tmp_path: Path) -> None:
    """The topic is deleted while a partition is chosen for compaction."""
    assert compaction_steps.list_stored(tmp_path, 0, TimestampCache(lambda path, base, position: (0, -1)), 0) == []
