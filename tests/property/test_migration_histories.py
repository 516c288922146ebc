"""Groups between the two protocols, checked with migration_histories.py; planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mqd.coordinator.group import migration
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.consumer import known_members
from mqd.coordinator.group.consumer.classic_members import ClassicMembers
from mqd.coordinator.group.consumer.core import ConsumerGroup
from mqd.coordinator.group.group import Group
from tests.property.migration_histories import MigrationHistory

QUICK_SEEDS = 20
PLANTED_SEEDS = 40
STEPS = 400


def test_histories() -> None:
    histories = [MigrationHistory(seed).run(STEPS) for seed in range(QUICK_SEEDS)]
    kinds = [history.kinds for history in histories]
    assert sum(history.counts["replaced"] for history in histories) > QUICK_SEEDS
    steps = {step for one in kinds for step in zip(one, one[1:])}
    assert {("classic", "consumer"), ("consumer", "classic")} <= steps


@pytest.mark.slow
@pytest.mark.parametrize("share", range(10))
def test_many_histories(share: int) -> None:
    for seed in range(1_000 + 100 * share, 1_100 + 100 * share):
        MigrationHistory(seed).run(STEPS)


def test_a_cooperative_member_keeps_its_partitions_while_a_generation_begins() -> None:
    MigrationHistory(1558).run(STEPS)


def loses_owned_partitions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration, "decode_assignment", lambda data: {})


def leaves_requests_without_a_response(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(migration, "replies_to_retry", lambda classic: [])


def leaves_the_consumer_group_in_the_log(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "all_tombstones", lambda self: [])


def leaves_the_classic_group_in_the_log(patch: pytest.MonkeyPatch) -> None:
    original = migration._records
    patch.setattr(
        migration,
        "_records",
        lambda classic, group: [record for record in original(classic, group) if record[1] is not None],
    )


def never_downgrades(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "_downgrade", lambda self, consumer, now_ms: 1 / 0)


def does_not_rebalance_after_a_downgrade(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClassicGroup, "take_over", lambda self, value, now_ms: (self.replay(value), [])[1])


def assumes_that_a_classic_member_has_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClassicMembers, "_owned_partitions", lambda self, subscription: {})


def never_makes_a_classic_member_rejoin(patch: pytest.MonkeyPatch) -> None:
    original = ClassicMembers.on_heartbeat

    def on_heartbeat(self, event, now_ms, replies) -> None:
        original(self, event, now_ms, replies)
        if replies[-1].response.error_code == 27:
            replies[-1].response.error_code = 0

    patch.setattr(ClassicMembers, "on_heartbeat", on_heartbeat)


def keeps_the_instance_id_of_a_classic_member(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_members, "_is_released", lambda member: member.epoch == -2)


PLANTED: list[Callable[[pytest.MonkeyPatch], None]] = [
    loses_owned_partitions,
    leaves_requests_without_a_response,
    leaves_the_consumer_group_in_the_log,
    leaves_the_classic_group_in_the_log,
    never_downgrades,
    does_not_rebalance_after_a_downgrade,
    assumes_that_a_classic_member_has_released,
    never_makes_a_classic_member_rejoin,
    keeps_the_instance_id_of_a_classic_member,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises((AssertionError, KeyError, ZeroDivisionError)):
        plant(patch)
        for seed in range(PLANTED_SEEDS):
            MigrationHistory(seed).run(STEPS)
