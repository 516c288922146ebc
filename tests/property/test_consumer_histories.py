"""Consumer groups checked with consumer_histories.py; and proof of its effectiveness: each planted
bug is caught within the quick share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from mqd.coordinator.group.consumer import core as consumer
from mqd.coordinator.group.consumer import known_members, records
from mqd.coordinator.group.consumer import members as consumer_members
from mqd.coordinator.group.consumer.core import ConsumerGroup
from mqd.coordinator.group.consumer.members import NOTHING, REVOKING, STABLE, Member, Owners
from mqd.coordinator.group.consumer.records import CurrentAssignment
from mqd.coordinator.group.consumer.subscriptions import Subscriptions
from tests.property.consumer_histories import run
from tests.tiers import quick

SEEDS_OF_A_SHARE = 25  # about 600 events each
PLANTED_SEEDS = 60


@pytest.mark.parametrize("share", quick([*range(4), *range(40, 120)], [0]))
def test_histories(share: int) -> None:
    first = share * SEEDS_OF_A_SHARE
    assert sum(run(seed).event_count for seed in range(first, first + SEEDS_OF_A_SHARE)) > 12_500


def test_histories_are_deterministic() -> None:
    first, second = run(7), run(7)
    assert first.log == second.log and first.event_count == second.event_count and first.errors == second.errors


@pytest.mark.slow
def test_histories_reach_rare_cases() -> None:
    """Not only the good case: fenced, forgotten and refused members occur."""
    met = set().union(*(run(seed).errors for seed in range(20)))
    assert {0, 25, 110, 111} <= met


# -- planted bugs ----------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def planted(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED[function.__name__] = function
    return function


@planted
def assigns_partitions_that_are_still_owned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer_members, "_select_free", lambda member_id, expected, owners: (expected, False))
    patch.setattr(
        Owners,
        "claim",
        lambda self, member_id, partitions: [
            self._by_topic.setdefault(topic, {}).update(dict.fromkeys(indexes, member_id))
            for topic, indexes in partitions.items()
        ],
    )
    patch.setattr(
        Owners,
        "release",
        lambda self, member_id, partitions: [
            self._by_topic.get(topic, {}).pop(index, None) for topic, indexes in partitions.items() for index in indexes
        ],
    )


@planted
def does_not_wait_for_release(patch: pytest.MonkeyPatch) -> None:
    original = consumer.next_state
    patch.setattr(
        consumer, "next_state", lambda member, target, epoch, owners, owned: original(member, target, epoch, owners, {})
    )


@planted
def takes_any_list_for_a_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(consumer_members, "overlap", lambda one, other: False)


@planted
def interrupts_all_members_in_a_rebalance(patch: pytest.MonkeyPatch) -> None:
    original = consumer_members.intersection
    patch.setattr(
        consumer_members,
        "intersection",
        lambda one, other: one if one == other else original(one, {}) if one else NOTHING,
    )


@planted
def no_member_is_removed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "_on_timer", lambda self, event, now_ms, replies: self.deadlines.take_expired(now_ms))


@planted
def members_that_do_not_release_may_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "set_step", lambda self, member, kind, at_ms: None)


@planted
def topics_are_read_only_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subscriptions, "is_current", lambda self: self._version is not None)


@planted
def a_changed_topic_makes_no_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Subscriptions, "hash", property(lambda self: 1))


@planted
def owned_partitions_are_not_persisted(patch: pytest.MonkeyPatch) -> None:
    original = ConsumerGroup.set_current

    def set_current(self: ConsumerGroup, member: Member, current: CurrentAssignment) -> None:
        original(self, member, current)
        self.pending.pop()

    patch.setattr(ConsumerGroup, "set_current", set_current)


@planted
def a_target_is_not_persisted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        records, "target_record", lambda group_id, member_id, partitions: (b"\x00\x07\x00\x01g\x00\x01x", None)
    )


@planted
def partitions_to_release_are_missing_in_the_log(patch: pytest.MonkeyPatch) -> None:
    original = records.current_record
    lost = lambda current: (
        CurrentAssignment(current.epoch, current.previous_epoch, STABLE, current.assigned, NOTHING)
        if current.state == REVOKING
        else current
    )  # noqa: E731
    patch.setattr(
        records, "current_record", lambda group_id, member_id, current: original(group_id, member_id, lost(current))
    )


@planted
def tombstones_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "member_tombstones", lambda group_id, member_id: [])


@planted
def any_epoch_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConsumerGroup, "_validate_epoch", lambda self, member, epoch: 0)


@planted
def an_old_epoch_needs_no_proof(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(known_members, "_check_epoch", lambda member, message: None)


@planted
def leaving_members_keep_their_partitions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Owners, "release", lambda self, member_id, partitions: None)


@planted
def returning_members_get_another_target(patch: pytest.MonkeyPatch) -> None:
    original = ConsumerGroup._rename

    def renamed(self: ConsumerGroup, old: Member, member_id: str) -> Member:
        self.target.pop(old.member_id, None)
        return original(self, old, member_id)

    patch.setattr(ConsumerGroup, "_rename", renamed)


@planted
def a_partition_is_assigned_to_two(patch: pytest.MonkeyPatch) -> None:
    original = consumer.ASSIGNORS["uniform"]

    def uniform(members, counts):
        found = original(members, counts)
        busy = [member_id for member_id, partitions in found.items() if partitions]
        idle = [member_id for member_id, partitions in found.items() if not partitions and member_id not in busy]
        if busy and idle:
            found[idle[0]] = dict(found[busy[0]])
        return found

    patch.setitem(consumer.ASSIGNORS, "uniform", uniform)


@planted
def responds_before_it_persists(patch: pytest.MonkeyPatch) -> None:
    original = ConsumerGroup.handle
    patch.setattr(
        ConsumerGroup,
        "handle",
        lambda self, event, now_ms: sorted(
            original(self, event, now_ms), key=lambda action: type(action).__name__ == "Persist"
        ),
    )


@contextlib.contextmanager
def _patched(plant: Callable[[pytest.MonkeyPatch], None]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    with _patched(PLANTED[name]), pytest.raises((AssertionError, KeyError)):
        for seed in range(PLANTED_SEEDS):
            run(seed)
