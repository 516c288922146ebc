"""Upkeep beside a log directory that does not respond: work for the others continues.
Nothing here may depend on speed: each condition is awaited.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.log.retention import RetentionDecision
from mqd.worker import background
from mqd.worker import maintenance as upkeep
from mqd.worker.background import Background
from mqd.worker.catalog import OwnedPartition
from mqd.worker.maintenance import Upkeep
from mqd.worker.open_partitions import OpenPartition
from tests.polling import PATIENCE_S

HUNG, SOUND = 0, 1


class Directory:
    """Counts all calls; calls to the hanging disk return when it is released."""

    def __init__(self, index: int, let_go: threading.Event) -> None:
        self.index, self.path, self.failure, self.pruned = index, f"/directory-{index}", "", False
        self.guard = SimpleNamespace(is_full=False, reserve_bytes=0, on_free_bytes=lambda free, now_ms: False)
        self.requested: Counter[str] = Counter()
        self._close_held = let_go

    def answer(self, question: str, result: Any) -> Any:
        if self.index == HUNG:
            assert self._close_held.wait(60)
        self.requested[question] += 1
        return result

    def write_high_watermarks(self, entries: list) -> None:
        self.answer("high watermarks", None)

    def write_checkpoints(self, points: list, starts: list) -> bool:
        return self.answer("checkpoints", True)

    def prune(self, failed: list) -> bool:
        self.pruned = self.answer("prune", True)
        return True

    def free_bytes(self) -> int:
        return self.answer("free bytes", 1 << 40)

    def decide(self) -> RetentionDecision:
        return self.answer("retention", RetentionDecision())


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.005)


@pytest.fixture
def let_go():
    event = threading.Event()
    yield event
    event.set()


def test_periodic_work_continues_in_the_other_directories(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TICK_S", "CHECKPOINT_S", "FREE_SPACE_S", "SPACE_RESPONSE_S"):
        monkeypatch.setattr(upkeep, name, 0.01)
    directories = [Directory(index, let_go) for index in (HUNG, SOUND)]
    opened = {
        index: OpenPartition(OwnedPartition("t", b"t" * 16, index, index, index, 0), None, 0, None, None)
        for index in (HUNG, SOUND)
    }  # type: ignore[arg-type]
    partitions = SimpleNamespace(
        log_dirs=directories,
        open=opened,
        by_slot=opened,
        broker_config={"retention.free.bytes": "1"},
        checkpoint_entries=lambda index: ([], []),
        high_watermarks=lambda index: [],
        failed_names=list,
    )
    control = SimpleNamespace(
        slot_view=lambda slot: None,
        metadata_version=7,
        connection_count=lambda worker: 0,
        local_usage=lambda worker: (0, 0),
    )
    unchanged = SimpleNamespace(adjust=lambda count: False)
    subject = Upkeep(0, 1, control, None, None, partitions, Background(), unchanged, unchanged, 100, None)  # type: ignore[arg-type]
    subject._decide = lambda opened, view, log_dir: log_dir.decide()  # type: ignore[method-assign, assignment]
    subject._retention_interval_s = lambda: 0.01  # type: ignore[method-assign]

    async def scenario() -> None:
        subject.prune_when_applied(7)
        tasks = [asyncio.ensure_future(work) for work in subject.tasks()]
        requested = directories[SOUND].requested
        await until(
            lambda: (
                requested["prune"]
                and all(
                    requested[question] >= 3 * background.URGENT_COUNT
                    for question in ("high watermarks", "checkpoints", "free bytes", "retention")
                )
            )
        )
        assert not directories[HUNG].requested and not directories[HUNG].pruned
        let_go.set()
        await until(lambda: len(directories[HUNG].requested) == len(requested) == 5)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(scenario())


def test_a_directory_that_hangs_takes_no_thread_of_the_others(let_go: threading.Event) -> None:
    async def scenario() -> None:
        threads = Background()
        held = [
            asyncio.ensure_future(threads.urgent(HUNG, let_go.wait, 60)) for _ in range(2 * background.URGENT_COUNT)
        ]
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.gather(
                threads.urgent(SOUND, int),
                threads.urgent(background.NO_LOG_DIR, int),
                threads.slow(HUNG, int),
                threads.slow(SOUND, int),
            ) == [0, 0, 0, 0]
        let_go.set()
        await asyncio.wait(held)
        threads.close()

    asyncio.run(scenario())
