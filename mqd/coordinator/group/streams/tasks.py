"""Sets of tasks in their three roles, and which member holds each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mqd.coordinator.group import sets

TaskSet = sets.NumbersByKey[str]  # subtopology id -> partitions, ascending, never empty
Task = tuple[str, int]
NOTHING: TaskSet = {}


class Tasks(NamedTuple):
    active: TaskSet = NOTHING
    standby: TaskSet = NOTHING
    warmup: TaskSet = NOTHING

    @property
    def is_empty(self) -> bool:
        return not (self.active or self.standby or self.warmup)

    @property
    def size(self) -> int:
        return sum(len(partitions) for role in self for partitions in role.values())


NO_TASKS = Tasks()


def iter_tasks(tasks: TaskSet) -> Iterator[Task]:
    return ((name, partition) for name, partitions in tasks.items() for partition in partitions)


def task_set(tasks: list[Task]) -> TaskSet:
    by_subtopology: dict[str, list[int]] = {}
    for name, partition in tasks:
        by_subtopology.setdefault(name, []).append(partition)
    return {name: tuple(sorted(by_subtopology[name])) for name in sorted(by_subtopology)}


def intersection(left: Tasks, right: Tasks) -> Tasks:
    """The tasks that are in both, in the same role."""
    return Tasks(*(sets.intersection(left_role, right_role) for left_role, right_role in zip(left, right, strict=True)))


def difference(left: Tasks, right: Tasks) -> Tasks:
    return Tasks(*(sets.difference(left_role, right_role) for left_role, right_role in zip(left, right, strict=True)))


def union(left: Tasks, right: Tasks) -> Tasks:
    return Tasks(*(sets.union(left_role, right_role) for left_role, right_role in zip(left, right, strict=True)))


def overlap(left: Tasks, right: Tasks) -> bool:
    return any(sets.overlap(left_role, right_role) for left_role, right_role in zip(left, right, strict=True))


def contains(whole: Tasks, part: Tasks) -> bool:
    return all(sets.contains(whole_role, part_role) for whole_role, part_role in zip(whole, part, strict=True))


class Holders:
    """Maps each task to the member that holds it, until the member has released it. At most one
    member has a task as active. Within a process at most one member has it, in any role, because
    the members of a process share a state directory.
    """

    def __init__(self) -> None:
        self.active: dict[Task, str] = {}
        self.in_process: dict[tuple[str, Task], str] = {}

    def may_take(self, member_id: str, process_id: str, task: Task, is_active: bool) -> bool:
        if self.in_process.get((process_id, task), member_id) != member_id:
            return False
        return not is_active or self.active.get(task, member_id) == member_id

    def claim(self, member_id: str, process_id: str, tasks: Tasks) -> None:
        for role_index, role in enumerate(tasks):
            for task in iter_tasks(role):
                assert self.may_take(member_id, process_id, task, role_index == 0), f"T1: {task} would have two holders"
                self.in_process[process_id, task] = member_id
                if role_index == 0:
                    self.active[task] = member_id

    def release(self, process_id: str, tasks: Tasks) -> None:
        for role_index, role in enumerate(tasks):
            for task in iter_tasks(role):
                self.in_process.pop((process_id, task), None)
                if role_index == 0:
                    self.active.pop(task, None)
