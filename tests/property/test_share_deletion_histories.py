"""Deletion on acknowledgement in random histories; planted bugs are found."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mqd.coordinator.share import deletion
from mqd.coordinator.share.deletion import StartOffsets
from tests.property.share_deletion_histories import KEY, Decide, History, Violation
from tests.tiers import quick

STEPS = 400


@pytest.mark.parametrize("seeds", quick([range(60), range(60, 2_600)], lambda seeds: len(seeds) < 100), ids=len)
def test_no_group_loses_unfinished_records(seeds: range) -> None:
    deleted = sum(History(seed).run(STEPS).deleted for seed in seeds)
    assert deleted > 10 * len(seeds), "hardly anything was deleted"


def _any_answer_is_enough(
    responses: Iterable[StartOffsets], state_partition_count: int
) -> dict[deletion.TopicPartition, int]:
    return deletion.deletable_ends(responses, 0)


def _the_greatest_start(
    responses: Iterable[StartOffsets], state_partition_count: int
) -> dict[deletion.TopicPartition, int]:
    responses = list(responses)
    found = [response.lowest[KEY] for response in responses if KEY in response.lowest]
    places = frozenset().union(*(response.state_partitions for response in responses))
    return deletion.deletable_ends([StartOffsets(places, {KEY: max(found)} if found else {})], state_partition_count)


def _a_start_not_chosen_is_ignored(
    responses: Iterable[StartOffsets], state_partition_count: int
) -> dict[deletion.TopicPartition, int]:
    chosen = [
        StartOffsets(response.state_partitions, {key: offset for key, offset in response.lowest.items() if offset >= 0})
        for response in responses
    ]
    return deletion.deletable_ends(chosen, state_partition_count)


@pytest.mark.parametrize(
    "bug",
    [
        pytest.param((_any_answer_is_enough, True), id="any answer is enough"),
        pytest.param((_the_greatest_start, True), id="the greatest start"),
        pytest.param((_a_start_not_chosen_is_ignored, True), id="a start not chosen is ignored"),
        pytest.param((deletion.deletable_ends, False), id="answered before it is written"),
    ],
)
def test_a_planted_bug_is_found(bug: tuple[Decide, bool]) -> None:
    with pytest.raises(Violation):
        for seed in range(300):
            History(seed, *bug).run(STEPS)
