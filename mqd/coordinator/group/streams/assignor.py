"""The `sticky` assignor for streams groups (KIP-1071), as a pure function.

Guarantees (asserted by check_assignment() and the property tests)
    A1  every task is active on exactly one member; members' counts of active tasks differ by at
        most one
    A2  a process has each task at most once, in any role
    A3  each task of a stateful subtopology has as many standbys as configured, but at most one on
        each process other than the one where it is active; tasks of stateless subtopologies have
        none
    A4  members keep their active tasks as far as A1 allows: with unchanged input none move
    A5  active tasks that must move go to processes that have their state, as far as A1 allows
    A6  the same input gives the same output
Cost: O(tasks log members + standbys x processes).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import NamedTuple

from mqd.coordinator.group.streams.tasks import NOTHING, Task, Tasks, TaskSet, iter_tasks, task_set

NAME = "sticky"


class MemberSpec(NamedTuple):
    """`current`: the member's part of the last target."""

    process_id: str
    current: Tasks


class TopologyShape(NamedTuple):
    """What the assignor needs to know of a topology. `task_counts`: subtopology id -> number of
    tasks. `stateful`: ids of the subtopologies that have changelogs.
    """

    task_counts: Mapping[str, int]
    stateful: frozenset[str]


def sticky(members: Mapping[str, MemberSpec], shape: TopologyShape, standby_replicas: int) -> dict[str, Tasks]:
    if not members:
        return {}
    active = _assign_active(members, shape)
    standby = _assign_standbys(members, shape, active, standby_replicas) if standby_replicas else {}
    return {
        member_id: _reuse_object(
            Tasks(task_set(active[member_id]), task_set(standby.get(member_id, [])), NOTHING), spec
        )
        for member_id, spec in members.items()
    }


def _reuse_object(tasks: Tasks, spec: MemberSpec) -> Tasks:
    return spec.current if tasks == spec.current else tasks


def _all_tasks(shape: TopologyShape) -> list[Task]:
    """All tasks, ordered by partition number, so that a subtopology's tasks are spread."""
    tasks = [
        (subtopology_id, partition)
        for subtopology_id in sorted(shape.task_counts)
        for partition in range(shape.task_counts[subtopology_id])
    ]
    return sorted(tasks, key=lambda task: (task[1], task[0]))


def _assign_active(members: Mapping[str, MemberSpec], shape: TopologyShape) -> dict[str, list[Task]]:
    tasks = _all_tasks(shape)
    low, extra = divmod(len(tasks), len(members))
    free = dict.fromkeys(tasks)
    held: dict[str, list[Task]] = {}
    for member_id in sorted(members):
        held[member_id] = [task for task in iter_tasks(members[member_id].current.active) if task in free]
        for task in held[member_id]:
            del free[task]
    # the members with the most tasks may keep one more
    for member_id in sorted(held, key=lambda member_id: -len(held[member_id])):
        quota = low + (extra > 0 and len(held[member_id]) > low)
        extra -= quota - low
        for task in held[member_id][quota:]:
            free[task] = None
        del held[member_id][quota:]
    unassigned = _assign_to_state_holders(members, [task for task in tasks if task in free], held, low, extra)
    heap = [(len(member_tasks), member_id) for member_id, member_tasks in held.items()]
    heapq.heapify(heap)
    for task in unassigned:
        count, member_id = heap[0]
        held[member_id].append(task)
        heapq.heapreplace(heap, (count + 1, member_id))
    return held


def _assign_to_state_holders(
    members: Mapping[str, MemberSpec], tasks: list[Task], held: dict[str, list[Task]], low: int, extra: int
) -> list[Task]:
    """Gives each task to a member of a process that has the task's state, if there is one with
    room; `extra` members may have one more task than `low`. Returns the other tasks.
    """
    state_holders: dict[Task, list[str]] = {}
    by_process: dict[str, list[str]] = {}
    for member_id in sorted(members):
        spec = members[member_id]
        by_process.setdefault(spec.process_id, []).append(member_id)
        for role in (spec.current.active, spec.current.standby):
            for task in iter_tasks(role):
                state_holders.setdefault(task, []).append(member_id)
    unassigned = []
    for task in tasks:
        holders = state_holders.get(task, [])
        process_mates = [mate for holder in holders for mate in by_process[members[holder].process_id]]
        receiver = next(
            (candidate for candidate in (*holders, *process_mates) if len(held[candidate]) < low + (extra > 0)), None
        )
        if receiver is None:
            unassigned.append(task)
        else:
            held[receiver].append(task)
            extra -= len(held[receiver]) > low
    return unassigned


def _assign_standbys(
    members: Mapping[str, MemberSpec], shape: TopologyShape, active: Mapping[str, list[Task]], replicas: int
) -> dict[str, list[Task]]:
    active_process = {task: members[member_id].process_id for member_id, tasks in active.items() for task in tasks}
    assigned = {(process, task) for task, process in active_process.items()}
    # (process, member): number of the process's active tasks for which the member has standbys
    backup_counts: dict[tuple[str, str], int] = {}
    load = {member_id: len(tasks) for member_id, tasks in active.items()}
    standbys: dict[str, list[Task]] = {member_id: [] for member_id in sorted(members)}
    previous_holders: dict[Task, list[str]] = {}
    for member_id in standbys:
        for role in (members[member_id].current.standby, members[member_id].current.active):
            for task in iter_tasks(role):
                previous_holders.setdefault(task, []).append(member_id)
    processes = {spec.process_id for spec in members.values()}
    stateful = [task for task in _all_tasks(shape) if task[0] in shape.stateful]
    wanted = min(replicas, len(processes) - 1)
    limit = -(-(sum(load.values()) + wanted * len(stateful)) // len(members))

    def assign_standby(member_id: str, task: Task) -> None:
        standbys[member_id].append(task)
        load[member_id] += 1
        assigned.add((members[member_id].process_id, task))
        backup_counts[active_process[task], member_id] = backup_counts.get((active_process[task], member_id), 0) + 1

    for task in stateful:
        missing = wanted
        for member_id in previous_holders.get(task, ()):
            if missing and load[member_id] < limit and (members[member_id].process_id, task) not in assigned:
                assign_standby(member_id, task)
                missing -= 1
        for _ in range(missing):
            others = (member_id for member_id in standbys if (members[member_id].process_id, task) not in assigned)
            assign_standby(
                min(
                    others,
                    key=lambda member_id: (
                        load[member_id],
                        backup_counts.get((active_process[task], member_id), 0),
                        member_id,
                    ),
                ),
                task,
            )
    return standbys


def check_assignment(
    members: Mapping[str, MemberSpec], shape: TopologyShape, replicas: int, assignment: Mapping[str, Tasks]
) -> None:
    """Asserts A1 to A3."""
    all_tasks = {(name, partition) for name, count in shape.task_counts.items() for partition in range(count)}
    active = [task for tasks in assignment.values() for task in iter_tasks(tasks.active)]
    assert len(active) == len(set(active)) and set(active) == all_tasks, "A1: a task is not active exactly once"
    counts = [_size(tasks.active) for tasks in assignment.values()]
    assert not counts or max(counts) - min(counts) <= 1, f"A1: {counts}"
    held = [
        (members[name].process_id, task)
        for name, tasks in assignment.items()
        for role in tasks
        for task in iter_tasks(role)
    ]
    assert len(held) == len(set(held)), "A2: a process has a task twice"
    process_count = len({spec.process_id for spec in members.values()})
    expected = min(replicas, process_count - 1)
    standbys = [task for tasks in assignment.values() for task in iter_tasks(tasks.standby)]
    for task in all_tasks:
        wanted = expected if task[0] in shape.stateful else 0
        assert standbys.count(task) == wanted, f"A3: {task} has {standbys.count(task)} standbys, not {wanted}"


def _size(tasks: TaskSet) -> int:
    return sum(map(len, tasks.values()))
