"""When the periodic work of a worker may pause."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from mqd.worker import periodic_work as module
from mqd.worker.maintenance import Upkeep
from mqd.worker.periodic_work import IDLE_S, Pace, PeriodicWork

PERIOD_S = 1.0


def test_the_work_runs_once_more_before_it_pauses() -> None:
    is_idle = [False]
    pace = Pace(PeriodicWork(lambda: is_idle[0]))
    assert pace.wait_s(PERIOD_S) <= PERIOD_S * 1.1
    is_idle[0] = True
    assert pace.wait_s(PERIOD_S) <= PERIOD_S * 1.1
    assert pace.wait_s(PERIOD_S) == IDLE_S


def test_work_that_arises_meanwhile_runs_before_the_next_pause() -> None:
    periodic_work = PeriodicWork(lambda: True)
    pace = Pace(periodic_work)
    assert [pace.wait_s(PERIOD_S) == IDLE_S for _ in range(2)] == [False, True]
    periodic_work.on_resumed()
    assert [pace.wait_s(PERIOD_S) == IDLE_S for _ in range(2)] == [False, True]


def test_work_that_is_needed_does_not_pause() -> None:
    is_needed = [True]
    pace = Pace(PeriodicWork(lambda: True), lambda: is_needed[0])
    assert all(pace.wait_s(PERIOD_S) < IDLE_S for _ in range(3))
    is_needed[0] = False
    assert [pace.wait_s(PERIOD_S) == IDLE_S for _ in range(2)] == [False, True]


def test_all_work_resumes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.clock, "seconds_until_tick", lambda _period_s: 0.0)

    async def main() -> None:
        periodic_work = PeriodicWork(lambda: True)
        turns = [0, 0]

        async def work(index: int) -> None:
            async for _ in periodic_work.ticks(PERIOD_S):
                turns[index] += 1

        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work(index)) for index in range(2)]
        await _until_still()
        assert turns == [1, 1]
        periodic_work.on_resumed()
        await _until_still()
        assert turns == [3, 3]  # at once, and again before the next pause
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    asyncio.run(main())


async def _until_still() -> None:
    """Nothing here waits for anything but the loop: a hundred iterations are more than enough."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_changed_configuration_ends_a_pause(is_idle: bool) -> None:
    subject: Upkeep = object.__new__(Upkeep)
    periodic_work = PeriodicWork(lambda: is_idle)
    vars(subject).update(_periodic_work=periodic_work, limit_connections=lambda: None)
    subject.on_applied()
    assert periodic_work.resumed_count == is_idle
