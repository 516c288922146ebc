"""A task that waits for an event or a timeout, and is cancelled in the same iteration of the loop
in which the event is set, ends: shutdown waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.base import logging
from mqd.controller.gossip import Gossip
from mqd.worker.compaction import Compactor
from mqd.worker.maintenance import Upkeep
from mqd.worker.periodic_work import PeriodicWork
from mqd.worker.replication import Replication, Route, Target, _Connection

TURNS = 8  # more than any of them takes from one wait to the next


def checkpoints() -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    async def checkpoint(_: object) -> None:
        pass

    upkeep = object.__new__(Upkeep)
    vars(upkeep).update(_wake_checkpoints={0: asyncio.Event()}, checkpoint=checkpoint, _periodic_work=PeriodicWork())
    return upkeep._checkpoint_loop(SimpleNamespace(index=0)), upkeep.on_rolled  # type: ignore[arg-type]


def link() -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    async def connect(*_: object) -> None:
        raise OSError("nobody is there")

    replication = object.__new__(Replication)
    vars(replication).update(_connect=connect, _log=logging.get("worker.replication"))
    connection = _Connection(Target("127.0.0.1", 1, 5))
    return replication._maintain_connection(Route(2, 0, 0), connection), connection.changed.set


def throttled() -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    async def thread(*_: object) -> tuple[bool, int]:
        await asyncio.sleep(0)
        return False, 1 << 30

    compactor = object.__new__(Compactor)
    vars(compactor).update(_skip_pause=asyncio.Event(), _run_in_thread=thread, _value=lambda name: 1, _worker_count=1)
    work = compactor._run_steps(SimpleNamespace(closing=False), SimpleNamespace())  # type: ignore[arg-type]
    return work, compactor._skip_pause.set


def goodbye() -> tuple[Coroutine[Any, Any, None], Callable[[], None]]:
    gossip = object.__new__(Gossip)
    vars(gossip).update(
        _transport=SimpleNamespace(close=lambda: None),
        _leave_done=asyncio.Event(),
        _timer=None,
        _tasks=set(),
        _resolver=SimpleNamespace(stop=lambda: None),
        handle=lambda event: None,
    )
    return gossip.stop(), gossip._leave_done.set


@pytest.mark.parametrize("turns", range(TURNS))
@pytest.mark.parametrize("made", [checkpoints, link, throttled, goodbye])
def test_cancelled_while_the_event_is_reported(
    made: Callable[[], tuple[Coroutine[Any, Any, None], Callable[[], None]]], turns: int
) -> None:
    async def scenario() -> None:
        work, report = made()
        task = asyncio.ensure_future(work)
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not task.done()
        report()
        for _ in range(turns):
            await asyncio.sleep(0)
        if not task.cancel():
            assert made is goodbye, "the others never end by themselves"
            return
        for _ in range(TURNS):
            await asyncio.sleep(0)
        ended = task.done()
        while not task.done():  # otherwise the end of the loop would wait for it
            task.cancel()
            await asyncio.sleep(0)
        assert ended and task.cancelled()

    asyncio.run(scenario())
