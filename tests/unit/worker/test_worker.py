"""How a worker orders its changes: what waits for what, and what an end interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

from mqd.cluster.host.messages import Command, CommandDone, PartitionImage, TopicImage
from mqd.worker.catalog import Catalog
from mqd.worker.controller_commands import ControllerCommands
from mqd.worker.worker import Worker

TOPIC = b"t" * 16


def test_a_partition_that_failed_to_open_still_counts_as_failed_when_the_worker_ends() -> None:
    """Its log was not checked, so the directory must not be marked as clean."""

    async def once(*_: object) -> AsyncIterator[None]:
        yield

    catalog = Catalog(0)
    catalog.on_topic_put(TopicImage("t", TOPIC, [PartitionImage(0, 5, 0, 0, 1, 0, [1], [1])], {}))
    catalog.record_failure((TOPIC, 0), is_transient=True)
    worker = SimpleNamespace(
        _catalog=catalog,
        _changes_lock=asyncio.Lock(),
        _stopping=asyncio.Event(),
        _mover=SimpleNamespace(report_again=lambda: None),
        _periodic_work=SimpleNamespace(ticks=once),
    )
    worker._stopping.set()
    asyncio.run(Worker._retry_failed(worker))  # type: ignore[arg-type]
    assert [owned.slot for owned in catalog.failed_partitions()] == [5]


def test_changes_do_not_wait_for_a_deletion_of_records() -> None:
    """It waits for the partition's files, which compaction holds until a disk accepts its work."""
    sent: list[object] = []

    async def scenario() -> None:
        opened = SimpleNamespace(owned=SimpleNamespace(log_dir=0), closing=False, files_lock=asyncio.Lock())

        async def advance_start(_opened: object, _log_dir: object, offset: int) -> int:
            async with opened.files_lock:
                return offset

        mover = SimpleNamespace(hold=lambda _command: False)
        commands = ControllerCommands(
            SimpleNamespace(slot_view=lambda _slot: SimpleNamespace(high_watermark=9)),  # type: ignore[arg-type]
            [None],  # type: ignore[list-item]
            SimpleNamespace(by_slot={5: opened}, failures={}),  # type: ignore[arg-type]
            SimpleNamespace(advance_start=advance_start),  # type: ignore[arg-type]
            mover,  # type: ignore[arg-type]
            sent.append,
        )
        worker = SimpleNamespace(
            _changes_lock=asyncio.Lock(), _stopping=asyncio.Event(), _mover=mover, _controller_commands=commands
        )
        async with opened.files_lock, asyncio.timeout(5):
            await Worker._on_message(worker, Command(1, "delete_records", 5, 7))  # type: ignore[arg-type]
            assert not sent
        async with asyncio.timeout(5):
            while not sent:
                await asyncio.sleep(0.001)
        assert sent == [CommandDone(1, 0, 7)]
        async with opened.files_lock:
            await commands.carry_out(Command(2, "delete_records", 5, 8))
            await asyncio.sleep(0)
            await commands.close()  # the worker ends
        assert len(sent) == 1

    asyncio.run(scenario())
