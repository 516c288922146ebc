"""Asserts the invariants of core.py over the whole group. O(members + tasks)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.coordinator.group.classic.members import NEVER
from mqd.coordinator.group.streams.members import STABLE, UNREVOKED
from mqd.coordinator.group.streams.tasks import NO_TASKS, Holders, iter_tasks

if TYPE_CHECKING:
    from mqd.coordinator.group.streams.core import StreamsGroup


def check(group: StreamsGroup) -> None:
    from mqd.coordinator.group.streams.core import size_bytes_of

    assert not group.pending, "T8: records that were not persisted"
    assert group.topology is not None or not group.members, "T7"
    _check_holders(group)
    _check_epochs(group)
    _check_target(group)
    _check_deadlines(group)
    described = sum(size_bytes_of(name, member.description) for name, member in group.members.items())
    held = sum(member.current.assigned.size + member.current.revoking.size for member in group.members.values())
    assert (described, held) == (group.described_bytes, group.held_count), "T9"


def _check_holders(group: StreamsGroup) -> None:
    rebuilt = Holders()
    for member_id, member in group.members.items():
        current = member.current
        for tasks in (current.assigned, current.revoking):
            rebuilt.claim(member_id, member.process_id, tasks)
        active = {*iter_tasks(current.assigned.active), *iter_tasks(current.revoking.active)}
        assert current.epochs.keys() == active, "T2"
        assert all(0 < current.epochs[task] <= max(member.epoch, 1) for task in active), "T2"
    assert (rebuilt.active, rebuilt.in_process) == (group.holders.active, group.holders.in_process), "T2"


def _check_epochs(group: StreamsGroup) -> None:
    assert group.assignment_epoch <= group.epoch, f"T3: target {group.assignment_epoch}, group {group.epoch}"
    for member in group.members.values():
        assert 0 <= member.epoch <= group.assignment_epoch, f"T3: {member.epoch}, target {group.assignment_epoch}"


def _check_target(group: StreamsGroup) -> None:
    assert group.target.keys() <= group.members.keys(), "T4"
    if group.epoch == group.assignment_epoch and group.configured.task_counts and not group.needs_new_epoch:
        all_tasks = sorted(
            (name, partition) for name, count in group.configured.task_counts.items() for partition in range(count)
        )
        active = sorted(task for tasks in group.target.values() for task in iter_tasks(tasks.active))
        assert not group.members or active == all_tasks, f"T4: {active} of {all_tasks}"
    for name, member in group.members.items():
        current = member.current
        assert (current.state == UNREVOKED) != current.revoking.is_empty, "T5"
        if current.state == STABLE and member.epoch == group.assignment_epoch and not group.needs_new_epoch:
            assert current.assigned == group.target.get(name, NO_TASKS), f"T5: {name} lacks its target"


def _check_deadlines(group: StreamsGroup) -> None:
    members = group.members.values()
    group.deadlines.check(members)
    group.deadlines.check(member.release_timer for member in members)
    for member in members:
        assert member.deadline_ms != NEVER, "T6"
        assert (member.release_timer.deadline_ms != NEVER) == (member.current.state == UNREVOKED), "T6"
