"""A member of a streams group, the tasks it holds, and their reconciliation with its target.

    STABLE      the member holds tasks that its target does not include -> UNREVOKED; other members
                still hold some of its new tasks -> UNRELEASED
    UNREVOKED   the member reports that it no longer owns what it must lose -> STABLE or UNRELEASED,
                at the target's epoch
    UNRELEASED  the tasks are free -> STABLE

The numbers of the states are those in Kafka's records.
"""

from __future__ import annotations

from mqd.coordinator.group.classic.members import Timed
from mqd.coordinator.group.streams.records import CurrentAssignment, Description, Epochs
from mqd.coordinator.group.streams.tasks import (
    NO_TASKS,
    Holders,
    Tasks,
    difference,
    intersection,
    iter_tasks,
    overlap,
    task_set,
    union,
)

STABLE, UNREVOKED, UNRELEASED = 1, 2, 3
JUST_JOINED = CurrentAssignment(0, 0, STABLE, NO_TASKS, NO_TASKS, {})


class Member(Timed):
    """`deadline_ms` (of Timed): the end of its session. `release_timer`: its deadline is when the
    member must have released its tasks.
    """

    __slots__ = ("current", "description", "release_timer")

    def __init__(self, member_id: str, description: Description, current: CurrentAssignment = JUST_JOINED) -> None:
        super().__init__(member_id)
        self.description = description
        self.current = current
        self.release_timer = Timed(member_id)

    @property
    def epoch(self) -> int:
        return self.current.epoch

    @property
    def process_id(self) -> str:
        return self.description.process_id


def next_state(
    member: Member, target: Tasks, target_epoch: int, holders: Holders, owned: Tasks | None
) -> CurrentAssignment:
    """The member's new state. `owned`: the tasks that it reports; None: its request does not list
    them. Pure.
    """
    current = member.current
    epoch, assigned = current.epoch, current.assigned
    if current.state == UNREVOKED:
        if owned is None or overlap(current.revoking, owned):
            return current
        epoch = min(epoch + 1, target_epoch)
    elif current.state == STABLE and epoch == target_epoch and assigned == target:
        return current
    kept = intersection(assigned, target)
    revoking = difference(assigned, kept)
    if not revoking.is_empty and (owned is None or overlap(revoking, owned)):
        return CurrentAssignment(
            epoch, _previous(current, epoch), UNREVOKED, kept, revoking, _epochs(current, assigned)
        )
    free, must_wait = _select_free(member, difference(target, kept), holders)
    held = union(kept, free)
    return CurrentAssignment(
        target_epoch,
        _previous(current, target_epoch),
        UNRELEASED if must_wait else STABLE,
        held,
        NO_TASKS,
        dict.fromkeys(iter_tasks(free.active), target_epoch) | _epochs(current, kept),
    )


def _epochs(current: CurrentAssignment, kept: Tasks) -> Epochs:
    return {task: current.epochs[task] for task in iter_tasks(kept.active)}


def _previous(current: CurrentAssignment, epoch: int) -> int:
    """The older epoch that the member may still use if it has missed the new one."""
    return current.epoch if epoch != current.epoch else current.previous_epoch


def _select_free(member: Member, requested: Tasks, holders: Holders) -> tuple[Tasks, bool]:
    """Returns the requested tasks that are free, and whether some requested tasks are not."""
    roles = [
        task_set(
            [
                task
                for task in iter_tasks(role)
                if holders.may_take(member.member_id, member.process_id, task, is_active=role_index == 0)
            ]
        )
        for role_index, role in enumerate(requested)
    ]
    free = Tasks(*roles)
    return free, free.size < requested.size
