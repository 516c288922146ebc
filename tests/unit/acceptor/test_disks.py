"""Reads of log directories by the acceptor: a directory that hangs does not delay requests for
others, and gets an error.
"""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.acceptor import disks as module
from mqd.acceptor.disks import LOAD_THREADS, READ_THREADS, Disks
from mqd.acceptor.handlers.records import list_offsets
from mqd.base import blocking_queries as queries
from mqd.base.blocking_queries import QueryProgress
from mqd.cluster.host.messages import PartitionImage
from mqd.log.lookup import OffsetAndTimestamp
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ListOffsetsRequest
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

SOUND, HUNG = 0, 1


class Hanging:
    """Work in a directory that hangs until it is released."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.threads: list[threading.Thread] = []

    def __call__(self, *_: object) -> str:
        self.threads.append(threading.current_thread())
        assert self.let_go.wait(60)
        return "at last"


def disks() -> Disks:
    return Disks([Path("/a"), Path("/b")])


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def test_reads_of_a_hung_directory_time_out_and_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        requested, hanging = disks(), Hanging()
        reads = [asyncio.create_task(requested.read(HUNG, hanging)) for _ in range(3 * READ_THREADS)]
        await asyncio.sleep(0)
        for number in range(3 * READ_THREADS):
            assert await requested.read(SOUND, int, str(number)) == number
        assert not any(read.done() for read in reads)
        monkeypatch.setattr(module, "SILENT_S", 0.01)
        with pytest.raises(TimeoutError, match="/b does not respond"):
            await requested.read(HUNG, hanging)
        assert len(hanging.threads) == READ_THREADS
        monkeypatch.setattr(module, "SILENT_S", 60)
        hanging.let_go.set()
        assert await requested.read(HUNG, int, "5") == 5
        assert await asyncio.gather(*reads) == len(reads) * ["at last"]

    run(scenario())


def test_loads_of_a_hung_directory_time_out_and_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        requested, hanging = disks(), Hanging()
        monkeypatch.setattr(module, "SILENT_S", 60)
        loads = [asyncio.create_task(requested.load(HUNG, hanging)) for _ in range(10)]
        await asyncio.sleep(0)
        for _ in range(10):
            assert await requested.load(SOUND, lambda under_way: "here") == "here"
        for load in loads:
            load.cancel()
        await asyncio.wait(loads)
        monkeypatch.setattr(module, "SILENT_S", 0.01)
        for _ in range(10):  # callers retry
            with pytest.raises(TimeoutError, match="/b does not respond"):
                await requested.load(HUNG, hanging)
        assert len(hanging.threads) == LOAD_THREADS
        monkeypatch.setattr(module, "SILENT_S", 60)
        hanging.let_go.set()
        assert await requested.load(HUNG, lambda under_way: "here") == "here"

    run(scenario())


def test_a_load_that_makes_progress_or_no_longer_reads_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [100.0]
    for one in (queries, module):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def scenario() -> None:
        steps = [threading.Event() for _ in range(2)]

        def slow(under_way: QueryProgress) -> str:
            assert steps[0].wait(60)
            under_way.stop_timing()
            assert steps[1].wait(60)
            return "loaded"

        requested = disks()
        load = asyncio.create_task(requested.load(SOUND, slow))
        await asyncio.sleep(0)
        now_s[0] += module.SILENT_S - 1
        steps[0].set()
        work = next(iter(requested._loads[SOUND][1]._under_way))
        while work.last_step_s < 1e9:
            await asyncio.sleep(0.001)
        now_s[0] += 1000
        queued = [asyncio.create_task(requested.load(SOUND, lambda under_way: "too")) for _ in range(3)]
        assert await asyncio.gather(*queued) == ["too"] * 3
        assert not load.done()
        steps[1].set()
        assert await load == "loaded"

    run(scenario())


def test_errors_are_raised_and_a_missing_thread_has_its_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        def refused(self: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        requested = disks()
        with pytest.raises(ValueError, match="invalid literal"):
            await requested.read(SOUND, int, "five")
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refused)
            for _ in range(2 * READ_THREADS):
                with pytest.raises(OSError, match="new thread"):
                    await requested.read(SOUND, int, "5")
        assert await requested.read(SOUND, int, "5") == 5

    run(scenario())


def test_offsets_by_time_in_a_hung_directory_get_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads waited there forever, so offsets of all directories could no longer be looked up,
    and no group could be loaded.
    """
    hanging = Hanging()

    def hangs_in_b(
        _broker: object, _name: str, partition: PartitionImage, *_: object
    ) -> tuple[OffsetAndTimestamp, int]:
        if partition.log_dir == HUNG:
            hanging()
        return OffsetAndTimestamp(-1, -1), -1

    monkeypatch.setattr(list_offsets, "_look_up", hangs_in_b)

    async def scenario() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "t", 12)
            partitions = broker.metadata.topics["t"].partitions
            for partition in partitions:
                broker.place("t", partition.index, high_watermark=5)

            async def request(log_dir: int) -> set[int]:
                requests = [
                    ListOffsetsRequest.Partition(partition_index=one.index, timestamp=7, current_leader_epoch=-1)
                    for one in partitions
                    if one.log_dir == log_dir
                ]
                response = await broker.send_request(
                    ListOffsetsRequest(topics=[ListOffsetsRequest.Topic(name="t", partitions=requests)]), 7
                )
                assert [one.partition_index for one in response.topics[0].partitions] == [
                    one.partition_index for one in requests
                ]
                return {one.error_code for one in response.topics[0].partitions}

            waiting = asyncio.create_task(request(HUNG))
            while not hanging.threads:
                await asyncio.sleep(0.001)
            assert await asyncio.wait_for(request(SOUND), 20) == {0}
            assert not waiting.done()
            waiting.cancel()
            monkeypatch.setattr(module, "SILENT_S", 0.01)
            assert await request(HUNG) == {ErrorCode.KAFKA_STORAGE_ERROR}
            monkeypatch.setattr(module, "SILENT_S", 60)
            assert await request(SOUND) == {0}
            hanging.let_go.set()
            assert await request(HUNG) == {0}

    try:
        run(scenario())
    finally:
        hanging.let_go.set()
