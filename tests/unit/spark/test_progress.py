"""A stream from trigger to trigger, with a log controlled by the test: where it starts, how far it
reads, and what it reports as lost.
"""

from __future__ import annotations

from typing import Any

import pytest

from mqd.spark.offsets import Position
from mqd.spark.options import EARLIEST, LATEST, SourceOptions, source_options
from mqd.spark.planning import Key, Range, split
from mqd.spark.progress import Progress
from mqd.spark.wire import MqdMissingError, MqdReadError, Topic


class World:
    """Replaces the driver: partitions as (earliest, latest), topics' ids."""

    def __init__(self, options: SourceOptions, logs: dict[Key, tuple[int, int]]) -> None:
        self.options, self.logs = options, dict(logs)
        self.numbers = {topic: 1 for topic, _ in logs}
        self.topics: dict[str, Topic] = {}
        self.losses: list[str] = []
        self.committed: list[dict[Key, int]] = []
        self.refuses = False
        # the next responses: an earlier state
        self.behind: list[tuple[dict[Key, tuple[int, int]], dict[str, int]]] = []
        self.turns = 0  # how often another broker was requested
        self.hidden: dict[Key, int] = {}  # retired partitions, and where they ended

    def partitions(self, skip_missing: bool = False) -> list[Key]:
        logs, numbers = self.behind.pop(0) if self.behind else (self.logs, self.numbers)
        self.topics = {name: Topic(name, bytes([numbers[name]]) * 16, {}) for name, _ in logs}
        return sorted(logs)

    def use_another_broker(self) -> None:
        self.turns += 1

    def topic_ids(self) -> dict[str, bytes]:
        return {name: topic.topic_id for name, topic in self.topics.items()}

    def offsets_at(self, keys: Any, at: int) -> dict[Key, int]:
        gone = [key for key in keys if key not in self.logs]
        if gone:
            raise MqdMissingError(f"offsets of {gone}: UNKNOWN_TOPIC_OR_PARTITION")
        return {key: self.logs[key][0 if at == EARLIEST else 1] for key in keys}

    def retired_end_offsets(self, keys: Any) -> dict[Key, int]:
        return {key: self.hidden[key] for key in keys if key in self.hidden}

    def resolve(self, limit: Any, keys: Any, word: str) -> dict[Key, int]:
        return self.offsets_at(keys, limit.symbolic if limit.symbolic is not None else LATEST)

    def split_into_tasks(self, ranges: list[Range]) -> list[Range]:
        return split(ranges, self.options.min_partitions, self.options.max_records_per_partition)

    def report_loss(self, text: str) -> None:
        self.losses.append(text)
        if self.options.fail_on_data_loss:
            raise MqdReadError(text)

    def commit_offsets(self, group: str, offsets: dict[Key, int]) -> None:
        if self.refuses:
            raise ConnectionError("the coordinator is away")
        self.committed.append(dict(offsets))

    def close(self) -> None:
        pass

    def grow(self, topic: str, partition: int, count: int) -> None:
        start, end = self.logs.get((topic, partition), (0, 0))
        self.logs[topic, partition] = (start, end + count)
        self.numbers.setdefault(topic, 1)


def _world(logs: dict[Key, tuple[int, int]], clock: list[float] | None = None, **given: str) -> tuple[World, Progress]:
    options = source_options({"kafka.bootstrap.servers": "a", "subscribe": "t", **given}, streaming=True)
    world = World(options, logs)
    return world, Progress(options, world, now=(lambda: clock[0]) if clock else lambda: 0.0, pause=_no_pause)


def _offsets(found: dict[str, Any]) -> dict[Key, int]:
    return Position.from_json(found).offsets


def _again(world: World) -> Progress:
    """Restarts the query; the world is unchanged."""
    return Progress(world.options, world, pause=_no_pause)


def _no_pause(seconds: float) -> None:
    pass


def _ranges(made: list[Range]) -> list[tuple[int, int, int]]:
    return [(one.partition, one.start, one.end) for one in made]


def test_earliest_reads_all_existing_records() -> None:
    world, progress = _world({("t", 0): (2, 10), ("t", 1): (0, 5)}, startingOffsets="earliest")
    start = progress.initial()
    assert progress.initial() == start and _offsets(start) == {("t", 0): 2, ("t", 1): 0}
    end = progress.latest(start, unlimited=True)
    made = progress.plan(start, end)
    assert _ranges(made) == [(0, 2, 10), (1, 0, 5)] and {one.topic_id for one in made} == {b"\1" * 16}
    assert progress.latest(end, True) == end and progress.plan(end, end) == []
    assert progress.report() == end


def test_latest_is_persisted_before_anything_is_read() -> None:
    """S2, at any time of a crash."""
    world, progress = _world({("t", 0): (0, 10)})
    start = progress.initial()
    world.grow("t", 0, 5)
    first = progress.latest(start, True)
    assert first == start  # the first batch is empty
    world.grow("t", 0, 5)
    progress = _again(world)  # Spark has persisted the first batch, and did not commit it
    later = progress.initial()
    assert _offsets(later) == {("t", 0): 20}
    assert progress.plan(later, first) == []
    end = progress.latest(first, True)
    assert _ranges(progress.plan(first, end)) == [(0, 10, 20)]


def test_rate_limits_and_available_now() -> None:
    world, progress = _world(
        {("t", 0): (0, 100), ("t", 1): (0, 50)}, startingOffsets="earliest", maxOffsetsPerTrigger="60"
    )
    start = progress.initial()
    progress.prepare_available_now()
    world.grow("t", 0, 1000)
    taken = []
    while (end := progress.latest(start, unlimited=False)) != start:
        taken.append(sum(_offsets(end).values()) - sum(_offsets(start).values()))
        start = end
    assert taken == [60, 60, 30] and _offsets(start) == {("t", 0): 100, ("t", 1): 50}


def test_unlimited_overrides_the_options() -> None:
    world, progress = _world({("t", 0): (0, 100)}, startingOffsets="earliest", maxOffsetsPerTrigger="10")
    assert _offsets(progress.latest(progress.initial(), unlimited=True)) == {("t", 0): 100}


def test_too_few_records_wait_for_a_limited_time() -> None:
    clock = [1000.0]
    world, progress = _world(
        {("t", 0): (0, 1)}, clock, startingOffsets="earliest", minOffsetsPerTrigger="10", maxTriggerDelay="5s"
    )
    end = progress.latest(progress.initial(), False)
    assert _offsets(end) == {("t", 0): 1}
    world.grow("t", 0, 9)
    assert progress.latest(end, False) == end
    clock[0] += 4.9
    assert progress.latest(end, False) == end
    clock[0] += 0.2
    late = progress.latest(end, False)
    assert _offsets(late) == {("t", 0): 10}
    world.grow("t", 0, 10)
    assert _offsets(progress.latest(late, False)) == {("t", 0): 20}


def test_a_new_partition_begins_at_its_earliest() -> None:
    world, progress = _world({("t", 0): (0, 3)}, startingOffsets="latest")
    start = progress.latest(progress.initial(), True)
    world.grow("t", 1, 7)
    end = progress.latest(start, True)
    assert _ranges(progress.plan(start, end)) == [(1, 0, 7)]
    assert _ranges(_again(world).plan(start, end)) == [(1, 0, 7)]  # S1
    world.logs["t", 2] = (4, 9)
    with pytest.raises(MqdReadError, match="the new partition t-2 begins at 4 instead of 0"):
        progress.latest(end, True)


def test_lost_records_are_reported() -> None:
    world, progress = _world({("t", 0): (0, 10), ("t", 1): (0, 10)}, startingOffsets="earliest")
    start = progress.initial()
    end = progress.latest(start, True)
    kept = dict(world.logs)
    del world.logs["t", 1]
    with pytest.raises(MqdReadError, match="t-1 was deleted; the last batch ended at 0: 10, 1: 10"):
        progress.latest(end, True)
    world.logs = {**kept, ("t", 0): (0, 4)}
    with pytest.raises(MqdReadError, match="t-0: the log ends at 4, before offset 10"):
        progress.latest(end, True)
    world.logs = {("t", 0): (0, 50), ("t", 1): (0, 50)}
    world.numbers["t"] = 2
    with pytest.raises(MqdReadError, match="topic t was deleted and created again"):
        progress.latest(end, True)


def test_allowed_losses_do_not_stop_the_query() -> None:
    world, progress = _world({("t", 0): (0, 10), ("t", 1): (0, 10)}, startingOffsets="earliest", failOnDataLoss="false")
    end = progress.latest(progress.initial(), True)
    world.logs = {("t", 0): (0, 4)}
    world.numbers["t"] = 2  # recreated, with one partition, and fewer records
    after = progress.latest(end, True)
    assert _offsets(after) == {("t", 0): 4}
    assert _ranges(progress.plan(end, after)) == [(0, 0, 4)]
    assert any("created again" in text for text in world.losses)
    world.logs = {("t", 0): (0, 2)}  # truncated, the same topic
    assert _offsets(progress.latest(after, True)) == {("t", 0): 4}


def test_offsets_that_go_back_within_a_batch() -> None:
    world, progress = _world({("t", 0): (0, 10)}, startingOffsets="earliest")
    with pytest.raises(MqdReadError, match="the batch ends at 3, before its beginning 5"):
        progress.plan({"t": {"0": 5}}, {"t": {"0": 3}})


def test_progress_is_committed_also_of_the_last_batch() -> None:
    world, progress = _world({("t", 0): (0, 10)}, startingOffsets="earliest", groupId="g")
    start = progress.initial()
    first = progress.latest(start, True)
    assert world.committed == []  # nothing was completed yet
    world.refuses = True
    progress.commit_offsets(first)
    assert world.committed == []
    world.refuses = False
    assert progress.latest(first, True) == first  # S5: commit() is not called for a run's last batch
    assert world.committed == [{("t", 0): 10}]
    progress.commit_offsets(first)
    assert len(world.committed) == 1


def test_offsets_of_deleted_topics_are_not_committed() -> None:
    """A group cannot have an offset of a missing topic: the broker would refuse it with every
    batch.
    """
    world, progress = _world(
        {("t", 0): (0, 10), ("u", 0): (0, 10)}, startingOffsets="earliest", groupId="g", failOnDataLoss="false"
    )
    end = progress.latest(progress.initial(), True)
    del world.logs["u", 0]
    progress = _again(world)
    world.refuses = True  # so does the broker, until the query has refreshed
    end = progress.latest(end, True)
    assert _offsets(end)["u", 0] == 10
    world.refuses = False
    progress.commit_offsets(end)
    assert world.committed == [{("t", 0): 10}]


def test_nothing_is_committed_without_a_group() -> None:
    world, progress = _world({("t", 0): (0, 10)}, startingOffsets="earliest")
    progress.commit_offsets(progress.latest(progress.initial(), True))
    assert world.committed == []


def test_one_outdated_response_is_not_a_loss() -> None:
    """A broker that does not know yet a topic, its partitions, or its recreation: another one is
    queried.
    """
    world, progress = _world({("t", 0): (0, 10), ("t", 1): (0, 10), ("u", 0): (0, 10)}, startingOffsets="earliest")
    world.numbers["u"] = 2
    end = progress.latest(progress.initial(), True)
    world.grow("t", 1, 5)
    for lacking in ({("t", 0), ("t", 1)}, {("u", 0)}, {("t", 1)}, set()):
        old = {key: log for key, log in world.logs.items() if key not in lacking}
        world.behind, world.turns = [(old, {"t": 1, "u": 1 if not lacking else 2})], 0
        after = progress.latest(end, True)
        assert _ranges(progress.plan(end, after)) == [(1, 10, 15)] and Position.from_json(after).ids["u"] == b"\2" * 16
        assert world.turns == 1 and not world.losses


def test_an_outdated_end_for_available_now() -> None:
    world, progress = _world({("t", 0): (0, 10), ("u", 0): (0, 10)}, startingOffsets="earliest")
    end = progress.latest(progress.initial(), True)
    world.grow("u", 0, 5)
    progress = _again(world)
    world.behind = [({("t", 0): (0, 10)}, {"t": 1})]
    progress.prepare_available_now()
    after = progress.latest(end, True)
    assert _offsets(after) == {("t", 0): 10, ("u", 0): 15} and progress.latest(after, True) == after
    assert not world.losses


@pytest.mark.parametrize("restarted", [False, True])
def test_a_temporarily_missing_topic_is_not_read_twice(restarted: bool) -> None:
    """With failOnDataLoss=false: its position is kept until it is visible again, or another topic
    with its name.
    """
    world, progress = _world({("t", 0): (0, 10), ("u", 0): (0, 10)}, startingOffsets="earliest", failOnDataLoss="false")
    end = progress.latest(progress.initial(), True)
    kept = world.logs.pop(("u", 0))
    without = progress.latest(end, True)
    assert without == end and progress.plan(end, without) == [] and len(world.losses) == 1
    requested = world.turns
    world.grow("t", 0, 1)
    end = progress.latest(without, True)
    assert _offsets(end) == {("t", 0): 11, ("u", 0): 10}
    assert world.turns == requested and len(world.losses) == 1, "reported once, and waited for once"
    progress = _again(world) if restarted else progress
    world.logs["u", 0] = kept
    world.grow("u", 0, 2)
    seen = progress.latest(end, True)
    assert _ranges(progress.plan(end, seen)) == [(0, 10, 12)]
    world.numbers["u"] = 2
    again = progress.latest(seen, True)
    assert (
        _ranges(progress.plan(seen, again)) == [(0, 0, 12)]
        and "topic u was deleted and created again" in world.losses[-1]
    )


def test_a_missing_topic_without_a_known_id_is_dropped() -> None:
    """Offsets of Spark's source for Kafka have no ids: a topic recreated with that name looks the
    same.
    """
    world, progress = _world({("t", 0): (0, 10)}, failOnDataLoss="false")
    end = progress.latest({"t": {"0": 10}, "u": {"0": 10}}, True)
    assert _offsets(end) == {("t", 0): 10} and len(world.losses) == 1


@pytest.mark.parametrize("restarted", [False, True])
def test_retired_partitions_that_were_read_are_not_a_loss(restarted: bool) -> None:
    world, progress = _world({("t", 0): (0, 10), ("t", 1): (0, 10)}, startingOffsets="earliest")
    end = progress.latest(progress.initial(), True)
    del world.logs["t", 1]
    world.hidden["t", 1] = 10
    progress = _again(world) if restarted else progress
    after = progress.latest(end, True)
    assert _offsets(after) == {("t", 0): 10} and world.losses == []
    for one in (progress, _again(world)):
        assert one.plan(end, after) == []  # the batch in which they are removed
    world.grow("t", 1, 15)  # added again: new ones
    assert _ranges(progress.plan(after, progress.latest(after, True))) == [(1, 0, 15)]


@pytest.mark.parametrize("hidden", [{}, {("t", 1): 11}])
def test_retired_partitions_that_were_not_read_are_lost(hidden: dict[Key, int]) -> None:
    """Even when it is no longer known where they ended: retention may have deleted records after
    the last batch.
    """
    world, progress = _world({("t", 0): (0, 10), ("t", 1): (0, 10)}, startingOffsets="earliest", failOnDataLoss="false")
    end = progress.latest(progress.initial(), True)
    del world.logs["t", 1]
    world.hidden |= hidden
    after = progress.latest(end, True)
    assert len(world.losses) == 1 and "t-1 was deleted; the last batch ended at" in world.losses[0]
    assert _offsets(after) == {("t", 0): 10}, "one of that index which is added later is another"


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("recreated", [False, True])
def test_a_topic_deleted_before_its_first_batch_was_read(restarted: bool, recreated: bool) -> None:
    """Its start can no longer be queried; the batch continues without it, instead of failing at
    every start.
    """
    world, progress = _world({("t", 0): (0, 10)}, startingOffsets="earliest", failOnDataLoss="false")
    first = progress.latest(progress.initial(), True)
    world.grow("t", 0, 1)
    world.grow("u", 0, 5)
    end = progress.latest(first, True)
    del world.logs["u", 0]
    if recreated:
        world.numbers["u"] = 2
        world.grow("u", 0, 7)
    progress = _again(world) if restarted else progress
    made = progress.plan(first, end)
    assert [(one.topic, one.start, one.end) for one in made] == [("t", 10, 11)]
    assert len(world.losses) == 1 and "u-0 was deleted" in world.losses[0]
    after = progress.latest(end, True)
    assert [(one.topic, one.start, one.end) for one in progress.plan(end, after)] == (
        [("u", 0, 7)] if recreated else []
    )


def test_a_topic_deleted_before_its_first_batch_was_read_is_a_loss() -> None:
    world, progress = _world({("t", 0): (0, 10)}, startingOffsets="earliest")
    first = progress.latest(progress.initial(), True)
    world.grow("u", 0, 5)
    end = progress.latest(first, True)
    del world.logs["u", 0]
    with pytest.raises(MqdReadError, match="u-0 was deleted or recreated; the batch that ends at 5 was not read"):
        _again(world).plan(first, end)


@pytest.mark.parametrize("fails", ["false", "true"])
def test_a_topic_deleted_between_two_queries_is_a_loss(fails: str) -> None:
    world, progress = _world(
        {("t", 0): (0, 10), ("u", 0): (0, 5)}, startingOffsets="earliest", subscribe="t,u", failOnDataLoss=fails
    )
    start = progress.initial()
    world.behind = [(dict(world.logs), world.numbers)]  # it still exists when partitions are queried
    del world.logs["u", 0]
    if fails == "true":
        with pytest.raises(MqdReadError, match="u-0 was deleted"):
            progress.latest(start, True)
        return
    assert _offsets(progress.latest(start, True))["t", 0] == 10 and len(world.losses) == 1
