"""Sets of tasks in their three roles, and which member holds each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mqd.coordinator.group import sets

TaskSet = sets.Held[str]  # subtopology id -> partitions, ascending, never empty
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


def each(role: TaskSet) -> Iterator[Task]:
    return ((name, partition) for name, partitions in role.items() for partition in partitions)


def task_set(tasks: list[Task]) -> TaskSet:
    found: dict[str, list[int]] = {}
    for name, partition in tasks:
        found.setdefault(name, []).append(partition)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def intersection(one: Tasks, other: Tasks) -> Tasks:
    """The tasks that both have in the same role."""
    return Tasks(*(sets.intersection(mine, theirs) for mine, theirs in zip(one, other, strict=True)))


def difference(one: Tasks, other: Tasks) -> Tasks:
    return Tasks(*(sets.difference(mine, theirs) for mine, theirs in zip(one, other, strict=True)))


def union(one: Tasks, other: Tasks) -> Tasks:
    return Tasks(*(sets.union(mine, theirs) for mine, theirs in zip(one, other, strict=True)))


def overlap(one: Tasks, other: Tasks) -> bool:
    return any(sets.overlap(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def contains(whole: Tasks, part: Tasks) -> bool:
    return all(sets.contains(mine, theirs) for mine, theirs in zip(whole, part, strict=True))


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
        for number, role in enumerate(tasks):
            for task in each(role):
                assert self.may_take(member_id, process_id, task, number == 0), f"T1: {task} would have two holders"
                self.in_process[process_id, task] = member_id
                if number == 0:
                    self.active[task] = member_id

    def release(self, process_id: str, tasks: Tasks) -> None:
        for number, role in enumerate(tasks):
            for task in each(role):
                self.in_process.pop((process_id, task), None)
                if number == 0:
                    self.active.pop(task, None)
