"""Timers and deadlines against a plain model: each fires once and in time, and heaps stay small for
any times that clients choose.
"""

from __future__ import annotations

import random

import pytest

from mqd.coordinator import timers
from mqd.coordinator.group.classic import members as classic_members
from mqd.coordinator.group.classic.members import NEVER, Deadlines, Timed
from mqd.coordinator.timers import Timers
from tests.tiers import quick

WEEKS_MS = 2**31 - 1


@pytest.mark.parametrize("seed", quick(range(5), [0, 1]))
def test_timers_fire_once_and_in_order(seed: int) -> None:
    chance, model, found = random.Random(seed), {}, Timers()
    now = 0
    for _ in range(20_000):
        name = (f"core-{chance.randrange(40)}", chance.choice(("a", "b")))
        at = chance.choice((None, now + chance.randrange(50), now + chance.randrange(5_000), now + WEEKS_MS - now // 2))
        found.set(name, at)
        model.pop(name, None)
        if at is not None:
            model[name] = at
        if chance.random() < 0.3:
            now += chance.randrange(20)
            due = sorted((at, name) for name, at in model.items() if at <= now)
            assert found.take_due(now) == [name for _, name in due]
            for _, name in due:
                del model[name]
        assert len(found) == len(model) and len(found._heap) <= 2 * len(model) + timers.HEAP_SLACK + 1
        assert not model or found.next_ms() <= min(model.values())


@pytest.mark.parametrize("seed", quick(range(5), [0, 1]))
def test_deadlines_fire_once(seed: int) -> None:
    chance, found = random.Random(seed), Deadlines()
    every_process = [Timed(f"m{number}") for number in range(40)]
    model: dict[str, int] = {}
    now = 0
    for _ in range(20_000):
        one = chance.choice(every_process)
        if chance.random() < 0.1:
            found.drop(one)
            model.pop(one.member_id, None)
        else:
            model[one.member_id] = now + chance.choice(
                (chance.randrange(50), chance.randrange(5_000), WEEKS_MS - now // 2)
            )
            found.move(one, model[one.member_id])
        if chance.random() < 0.3:
            now += chance.randrange(20)
            due = {name for name, at in model.items() if at <= now}
            assert {watched.member_id for watched in found.take_expired(now)} == due
            for name in due:
                del model[name]
        found.check(every_process)
        assert len(found._heap) <= 2 * len(every_process) + 2 * classic_members.HEAP_SLACK
    assert all((one.deadline_ms != NEVER) == (one.member_id in model) for one in every_process)


def test_ever_shorter_deadlines_leave_nothing_behind() -> None:
    """A member that rejoins repeatedly, each time with a slightly shorter rebalance or session
    timeout.
    """
    found, deadlines, one = Timers(), Deadlines(), Timed("m")
    for number in range(10_000):
        found.set(("g", "join"), WEEKS_MS - number)
        deadlines.move(one, WEEKS_MS - number)
    assert len(found._heap) < 100 and len(deadlines._heap) < 200
    for number in range(10_000):  # groups that are created and deleted
        found.set((f"g{number}", "join"), WEEKS_MS)
        found.set((f"g{number}", "join"), None)
    assert len(found._heap) < 100 and len(found._entry_ms) < 100
