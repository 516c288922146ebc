"""Share groups checked with share_group_histories.py, and proof that planted bugs are found; the
assignor `simple` by itself.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from mqd.coordinator.group.consumer.assignors import MemberSpec
from mqd.coordinator.group.group import Group
from mqd.coordinator.group.share import assignor, records
from mqd.coordinator.group.share import core as share
from mqd.coordinator.group.share.core import ShareGroup
from mqd.coordinator.group.share.events import StatesChanged
from mqd.coordinator.group.share.offsets import OffsetsAdmin
from mqd.coordinator.group.share.records import States
from tests.property.share_group_histories import run
from tests.tiers import quick

SEEDS_OF_A_SHARE = 15  # about 200 events each
PLANTED_SEEDS = 100


@pytest.mark.parametrize("share_number", quick(list(range(200)), [0]))
def test_histories(share_number: int) -> None:
    first = share_number * SEEDS_OF_A_SHARE
    histories = [run(seed) for seed in range(first, first + SEEDS_OF_A_SHARE)]
    assert sum(history.event_count for history in histories) > 2_000
    if share_number == 0:  # the rare cases are not in every share
        met = set().union(*(history.errors for history in histories))
        assert {0, 68, 69, 81} <= met
        assert any(history.altered for history in histories)


def test_a_deletion_that_failed_stays_whole_when_offsets_are_altered() -> None:
    """Otherwise a later group of this name could never use the partitions that were left."""
    run(2953)


def test_histories_are_deterministic() -> None:
    assert run(7).log == run(7).log


# -- the assignor ----------------------------------------------------------------------------------


def test_simple() -> None:
    """A1 to A5 over random members, partitions and earlier assignments."""
    rng = random.Random(5)
    topics = [bytes([number]) * 16 for number in range(4)]
    for _ in range(300):
        partitions = {topic: tuple(range(rng.randrange(0, 9))) for topic in topics}
        alike = rng.random() < 0.5
        some = frozenset(rng.sample(topics, rng.randrange(1, 4)))
        subscriptions = {
            f"m{number}": some if alike else frozenset(rng.sample(topics, rng.randrange(4)))
            for number in range(rng.randrange(1, 12))
        }
        current = {
            name: {topic: tuple(sorted(rng.sample(range(9), 3))) for topic in rng.sample(topics, 2)}
            for name in subscriptions
        }
        members = {name: MemberSpec(names, current[name]) for name, names in subscriptions.items()}
        found = assignor.simple(members, partitions)
        assert found == assignor.simple(dict(reversed(members.items())), partitions)  # A5
        users = Counter((topic, index) for held in found.values() for topic in held for index in held[topic])
        for name, held in found.items():
            assert held.keys() <= subscriptions[name], "A3"
            assert all(set(indexes) <= set(partitions[topic]) for topic, indexes in held.items()), "A3"
        pools = [[topic for topic in topics if topic in some]] if alike else [[topic] for topic in topics]
        for pool in pools:
            _check_pool(pool, subscriptions, partitions, found, users)
        again = assignor.simple({name: MemberSpec(subscriptions[name], found[name]) for name in members}, partitions)
        assert again == found, "A4"


def _check_pool(pool, subscriptions, partitions, found, users) -> None:
    subscribers = [name for name, names in subscriptions.items() if set(pool) <= names]
    size = sum(len(partitions[topic]) for topic in pool)
    if not subscribers or not size:
        return
    sharing = -(-len(subscribers) // size)
    assert {users[topic, index] for topic in pool for index in partitions[topic]} == {sharing}, "A1, A2"
    counts = [sum(len(found[name].get(topic, ())) for topic in pool) for name in subscribers]
    assert max(counts) - min(counts) <= 1, "A1, A2"


# -- planted bugs ----------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def planted(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED[function.__name__] = function
    return function


@planted
def uninitialized_partitions_are_assigned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ShareGroup,
        "_assignable",
        lambda self: {
            topic_id: tuple(range(count)) for topic_id, count in self.subscriptions.partition_counts.items() if count
        },
    )


@planted
def initialized_partitions_are_missing_in_the_log(patch: pytest.MonkeyPatch) -> None:
    original = records.states_record
    patch.setattr(
        records,
        "states_record",
        lambda group_id, states: original(group_id, States(states.initializing, {}, states.deleting, states.names)),
    )


@planted
def an_alteration_deletes_the_state_first(patch: pytest.MonkeyPatch) -> None:
    original = ShareGroup.initialize

    def initialize(self: ShareGroup, starts: dict[bytes, dict[int, int]]) -> int:
        states = self.states
        if any(start >= 0 for one in starts.values() for start in one.values()):
            gone = {topic_id: tuple(one) for topic_id, one in starts.items()}
            initialized = share.difference(states.initialized, gone)
            self.set_states(share.union(states.initializing, gone), initialized, states.deleting)
        return original(self, starts)

    patch.setattr(ShareGroup, "initialize", initialize)


@planted
def failed_partitions_count_as_initialized(patch: pytest.MonkeyPatch) -> None:
    original = ShareGroup._on_states_changed
    patch.setattr(
        ShareGroup,
        "_on_states_changed",
        lambda self, event, now_ms, replies: original(self, StatesChanged(event.token, {}), now_ms, replies),
    )


@planted
def assignable_partitions_cause_no_new_epoch(patch: pytest.MonkeyPatch) -> None:
    original = ShareGroup.refresh

    def refresh(self: ShareGroup, bump: bool) -> None:
        self.needs_new_epoch = False
        original(self, bump)

    patch.setattr(ShareGroup, "refresh", refresh)


@planted
def dead_members_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShareGroup, "_on_timer", lambda self, event, now_ms, replies: self.deadlines.take_expired(now_ms))


@planted
def any_epoch_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShareGroup, "_find", lambda self, message: self.members.get(message.member_id))


@planted
def administrators_need_no_empty_group(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OffsetsAdmin, "_error_if_unchangeable", lambda self: 0)


@planted
def tombstones_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "member_tombstones", lambda group_id, member_id: [])


@planted
def assignments_are_not_persisted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        records, "current_record", lambda group_id, member_id, current: records.group_record(group_id, current.epoch, 0)
    )


@planted
def one_member_has_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(assignor, "_distribute", lambda pool, users, current: {users[0]: pool})


@planted
def a_deleted_topic_keeps_its_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShareGroup, "forget_topics", lambda self, names: [])
    original = Group.check

    def check(self: Group) -> None:
        original(self)
        if self.share is not None and self.cluster.version > 20:
            names = list(self.share.states.names.values())
            assert len(set(names)) == len(names), "states of two topics with one name"

    patch.setattr(Group, "check", check)


@planted
def responds_before_it_persists(patch: pytest.MonkeyPatch) -> None:
    original = ShareGroup.handle
    patch.setattr(ShareGroup, "handle", lambda self, event, now_ms: original(self, event, now_ms)[::-1])


@pytest.mark.parametrize("name", quick(list(PLANTED), ["uninitialized_partitions_are_assigned"]))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for seed in range(PLANTED_SEEDS):
            run(seed)
