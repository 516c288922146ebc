"""Streams groups checked with streams_group_histories.py, and proof that planted bugs are found;
the assignor `sticky` by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mqd.coordinator.group.streams import assignor, members, records, tasks
from mqd.coordinator.group.streams import core as streams
from mqd.coordinator.group.streams.assignor import MemberSpec, TopologyShape, check_assignment, sticky
from mqd.coordinator.group.streams.core import StreamsGroup
from mqd.coordinator.group.streams.members import STABLE, UNRELEASED
from mqd.coordinator.group.streams.tasks import NO_TASKS, Holders, Tasks, iter_tasks
from tests.property.streams_group_histories import run
from tests.tiers import quick

SEEDS_OF_A_SHARE = 10  # about 300 events each
PLANTED_SEEDS = 400


@pytest.mark.parametrize("share_number", quick(list(range(350)), [0]))
def test_histories(share_number: int) -> None:
    first = share_number * SEEDS_OF_A_SHARE
    histories = [run(seed) for seed in range(first, first + SEEDS_OF_A_SHARE)]
    assert sum(history.event_count for history in histories) > 1_500
    met = set().union(*(history.errors for history in histories))
    assert 0 in met and met <= {0, 25, 42, 69, 81, 110}, met
    assert {0, 1, 2, 3} <= set().union(*(history.statuses for history in histories))
    assert sum(history.commits for history in histories) > 20


def test_histories_are_deterministic() -> None:
    assert run(7).log == run(7).log


# -- the assignor ----------------------------------------------------------------------------------


def random_members(rng: random.Random, count: int) -> dict[str, MemberSpec]:
    return {f"m{number}": MemberSpec(f"p{rng.randrange(4)}", NO_TASKS) for number in range(count)}


def moves(before: dict[str, MemberSpec], after: dict[str, Tasks]) -> int:
    return sum(
        len({*iter_tasks(after[name].active)} - {*iter_tasks(spec.current.active)})
        for name, spec in before.items()
        if name in after
    )


def test_sticky() -> None:
    """A1 to A4 and A6, over members that come and go and topologies that change."""
    rng = random.Random(5)
    for _ in range(300):
        counts = {str(number): rng.randrange(1, 8) for number in range(rng.randrange(1, 4))}
        shape = TopologyShape(counts, frozenset(name for name in counts if rng.random() < 0.6))
        replicas = rng.randrange(3)
        specs = random_members(rng, rng.randrange(1, 8))
        for _ in range(4):
            found = sticky(specs, shape, replicas)
            check_assignment(specs, shape, replicas, found)
            assert found == sticky(dict(reversed(specs.items())), shape, replicas), "A6"
            kept = {name: MemberSpec(spec.process_id, found[name]) for name, spec in specs.items()}
            assert moves(kept, sticky(kept, shape, replicas)) == 0, "A4"
            specs = {name: spec for name, spec in kept.items() if rng.random() < 0.8} or kept
            name = f"m{rng.randrange(100, 1000)}"
            specs[name] = MemberSpec(f"p{rng.randrange(4)}", NO_TASKS)


def test_sticky_moves_no_more_than_balance_needs() -> None:
    shape = TopologyShape({"0": 12}, frozenset())
    before = {f"m{number}": MemberSpec(f"p{number}", NO_TASKS) for number in range(3)}
    found = sticky(before, shape, 0)
    joined = {name: MemberSpec(spec.process_id, found[name]) for name, spec in before.items()}
    joined["m3"] = MemberSpec("p3", NO_TASKS)
    assert moves(joined, sticky(joined, shape, 0)) == 3, "A4: the new member gets three of twelve, nothing else moves"


def test_a_failed_process_is_replaced_by_its_standbys() -> None:
    """A5: every active task of the dead process continues at a former standby."""
    shape = TopologyShape({"0": 8}, frozenset({"0"}))
    before = {f"m{number}": MemberSpec(f"p{number}", NO_TASKS) for number in range(4)}
    found = sticky(before, shape, 1)
    left = {name: MemberSpec(spec.process_id, found[name]) for name, spec in before.items() if name != "m0"}
    after = sticky(left, shape, 1)
    lost = {*iter_tasks(found["m0"].active)}
    for name, spec in left.items():
        gained = {*iter_tasks(after[name].active)} & lost
        assert gained <= {*iter_tasks(spec.current.standby)}, f"A5: {name} restores {gained}"


# -- planted bugs ----------------------------------------------------------------------------------

PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def planted(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    PLANTED[plant.__name__] = plant
    return plant


@planted
def tasks_are_assigned_before_they_are_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Holders, "may_take", lambda self, member_id, process_id, task, is_active: True)


@planted
def a_member_need_not_confirm_a_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(members, "overlap", lambda one, other: False)


@planted
def a_member_that_reports_nothing_has_released(patch: pytest.MonkeyPatch) -> None:
    original = members.next_state
    patch.setattr(
        streams,
        "next_state",
        lambda member, target, epoch, holders, owned: original(member, target, epoch, holders, owned or NO_TASKS),
    )


@planted
def a_process_may_have_a_task_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Holders,
        "may_take",
        lambda self, member_id, process_id, task, is_active: (
            not is_active or self.active.get(task, member_id) == member_id
        ),
    )


@planted
def a_kept_task_gets_a_new_epoch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        members, "_epochs", lambda current, kept: dict.fromkeys(iter_tasks(kept.active), max(current.epoch, 1))
    )


@planted
def any_epoch_may_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamsGroup, "_has_held_since", lambda self, member, topic, partition, epoch: True)


@planted
def an_older_epoch_never_commits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamsGroup, "_has_held_since", lambda self, member, topic, partition, epoch: False)


@planted
def waiting_members_are_stable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(members, "UNRELEASED", STABLE)
    assert UNRELEASED != STABLE


@planted
def a_heartbeat_extends_the_time_to_release(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamsGroup, "_set_release_deadline", lambda self, member, now_ms: None)


@planted
def a_missed_response_is_not_repeated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams, "contains", lambda whole, part: True)
    original = streams.responses.set_tasks
    told: dict[str, Tasks] = {}

    def set_tasks(response, assigned: Tasks) -> None:
        if told.get(response.member_id) != assigned:
            original(response, assigned)
        told[response.member_id] = assigned

    patch.setattr(streams.responses, "set_tasks", set_tasks)


@planted
def leaving_makes_no_epoch(patch: pytest.MonkeyPatch) -> None:
    original = StreamsGroup._fence

    def fence(self: StreamsGroup, gone: list) -> None:
        patch_refresh, self.refresh = self.refresh, lambda bump: None  # type: ignore[method-assign]
        original(self, gone)
        self.refresh = patch_refresh  # type: ignore[method-assign]

    patch.setattr(StreamsGroup, "_fence", fence)


@planted
def changed_topics_are_ignored(patch: pytest.MonkeyPatch) -> None:
    original = StreamsGroup._configure

    def configuration(self: StreamsGroup, topology):
        if topology is self.topology and self.configured.task_counts:
            return self.configured
        return original(self, topology)

    patch.setattr(StreamsGroup, "_configure", configuration)


@planted
def a_topology_may_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "topology_record", lambda group_id, topology: records.target_epoch_record(group_id, 0))


@planted
def dead_members_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamsGroup, "_on_timer", lambda self, event, now_ms: None)


@planted
def a_wrong_epoch_is_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamsGroup, "_find", lambda self, event: self.members.get(event.message.member_id))


@planted
def tombstones_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(records, "member_tombstones", lambda group_id, member_id: [])


@planted
def the_tasks_of_a_member_are_not_persisted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        records, "current_record", lambda group_id, member_id, current: records.target_epoch_record(group_id, 0)
    )


@planted
def the_epochs_of_tasks_are_not_persisted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        records, "_with_epochs", lambda role, epochs: records.as_structs(role, records._CURRENT.value.cls.TaskIds)
    )


@planted
def a_task_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = assignor._all_tasks
    patch.setattr(assignor, "_all_tasks", lambda shape: original(shape)[:-1])


@planted
def one_member_has_all(patch: pytest.MonkeyPatch) -> None:
    def all_to_one(specs, shape, replicas):
        every = tasks.task_set(assignor._all_tasks(shape))
        first = min(specs)
        return {name: Tasks(every) if name == first else NO_TASKS for name in specs}

    patch.setattr(streams, "sticky", all_to_one)


@planted
def there_are_no_standbys(patch: pytest.MonkeyPatch) -> None:
    original = assignor.sticky
    patch.setattr(streams, "sticky", lambda specs, shape, replicas: original(specs, shape, 0))


@planted
def responds_before_it_persists(patch: pytest.MonkeyPatch) -> None:
    original = StreamsGroup.handle
    patch.setattr(StreamsGroup, "handle", lambda self, event, now_ms: original(self, event, now_ms)[::-1])


@pytest.mark.parametrize("name", quick(list(PLANTED), ["tasks_are_assigned_before_they_are_released"]))
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[name](monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        for seed in range(PLANTED_SEEDS):
            run(seed)
