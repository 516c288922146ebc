"""Partitions that are closed or deleted where the log directory does not answer: other changes do not wait, and what is done late meets nothing that came after it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd import native
from mqd.cluster.controller_messages import Command, CommandDone, TopicRemoved
from mqd.log import directories
from mqd.log.files import NativeFiles
from mqd.worker import late, worker
from mqd.worker.background import Background
from mqd.worker.catalog import Catalog, Changes, Owned
from mqd.worker.log_directory import LogDirectory
from mqd.worker.partitions import OpenPartition, PartitionSet

PATIENCE_S = 20.0
HUNG, SOUND = 0, 1


def owned(topic: str, log_dir: int, slot: int, topic_id: bytes = b"") -> Owned:
    return Owned(topic, (topic_id or topic.encode()).ljust(16, b"."), 0, slot, log_dir, 0)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():
            await asyncio.sleep(0.005)


class World:
    """Renames in one directory wait until it is let go; `flushes` is what the reactor waits for before it gives a partition of it back."""

    def __init__(self, tmp_path: Path) -> None:
        self.let_go = threading.Event()
        self.flushes: asyncio.Future[None] | None = None
        self.taken_back: list[int] = []
        self.opening: list[Owned] = []
        files = NativeFiles()
        self.log_dirs = [LogDirectory(index, tmp_path / str(index), 0, 1, 0, files, lambda *_: (0, -1)) for index in (HUNG, SOUND)]
        for log_dir in self.log_dirs:
            log_dir.path.mkdir()
            log_dir.open()
            log_dir.settle([])
        control = SimpleNamespace(set_slot_state=lambda slot, state: None, slot_view=lambda slot: SimpleNamespace(log_start_offset=0, high_watermark=5))
        self.catalog = Catalog(0)
        self.set = PartitionSet(0, self.log_dirs, control, SimpleNamespace(partition_close=None), self, Background(), self.catalog, {}, files)  # type: ignore[arg-type]
        set_aside = self.set._set_aside
        self.set._set_aside = lambda path, one: (self._wait(path), set_aside(path, one))[1]  # type: ignore[method-assign]
        self.set._open_one = self._open_one  # type: ignore[method-assign, assignment]
        self.said: list[int] = []

    def _wait(self, path: Path) -> None:
        if path == self.log_dirs[HUNG].path:
            assert self.let_go.wait(60)

    def _open_one(self, one: Owned, view: object) -> None:
        self.opening.append(one)
        raise OSError("as far as this goes here")

    async def run(self, command: object, slot: int) -> SimpleNamespace:
        """The reactor's partition_close."""
        self.taken_back.append(slot)
        if self.flushes is not None and self.set.by_slot[slot].owned.log_dir == HUNG:
            await self.flushes
        return SimpleNamespace(partition=SimpleNamespace(log_end_offset=5, close=lambda clean: None))

    def serve(self, one: Owned) -> Path:
        path, _ = directories.prepare(self.log_dirs[one.log_dir].path, one.topic, one.index, one.topic_id, NativeFiles())
        self.set.open[one.key] = self.set.by_slot[one.slot] = OpenPartition(one, path, 0, None, None)  # type: ignore[arg-type]
        self.catalog.owned[one.key] = one
        return path

    async def apply(self, **changes: list[Owned]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for one in changes.get("delete", []):
                self.catalog.owned.pop(one.key, None)
            for one in changes.get("open", []):
                self.catalog.owned[one.key] = one
            await self.set.apply(Changes(**changes))  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(late, "ANSWER_S", 0.05)
    monkeypatch.setattr(late, "LATE_ANSWER_S", 0.01)
    found = World(tmp_path)
    yield found
    found.let_go.set()


def run(scenario: Callable[[], object]) -> None:
    asyncio.run(scenario())  # type: ignore[arg-type]


def test_a_deletion_where_the_directory_hangs_holds_up_no_other_change(world: World) -> None:
    doomed, next_one = owned("doomed", HUNG, 3), owned("next", SOUND, 4)

    async def scenario() -> None:
        path = world.serve(doomed)
        world.set.late_ends.on_ended = lambda: world.said.append(world.set.in_force(9))
        await world.apply(delete=[doomed])
        assert world.set.in_force(7) == 7 and world.taken_back == [3], "the slot is free, whatever becomes of the files"
        await world.apply(open=[next_one])
        assert world.opening == [next_one] and path.exists() and not world.said
        world.let_go.set()
        await until(lambda: world.said == [9])
        assert not path.exists()

    run(scenario)


def test_a_slot_that_the_reactor_has_not_given_back_is_not_told_as_free(world: World) -> None:
    """A flush is under way there, which will publish in that slot."""
    doomed, other = owned("doomed", HUNG, 3), owned("other", SOUND, 4)

    async def scenario() -> None:
        world.flushes = asyncio.get_running_loop().create_future()
        world.let_go.set()
        world.serve(doomed)
        world.serve(other)
        world.set.late_ends.on_ended = lambda: world.said.append(world.set.in_force(9))
        assert world.set.in_force(6) == 6
        await world.apply(delete=[doomed])
        assert world.set.in_force(7) == 6
        await world.apply(delete=[other])
        assert world.set.in_force(9) == 6 and other.slot not in world.set.by_slot
        world.flushes.set_result(None)
        await until(lambda: world.said == [9])

    run(scenario)


@pytest.mark.parametrize(
    "after", [owned("t", HUNG, 9), owned("t", HUNG, 9, b"another"), owned("u", SOUND, 3), owned("t", SOUND, 9)], ids=["again", "a namesake", "in its slot", "in another directory"]
)  # fmt: skip
def test_nothing_is_opened_where_an_end_is_late(world: World, after: Owned) -> None:
    before, beside = owned("t", HUNG, 3), owned("beside", HUNG, 8)

    async def scenario() -> None:
        world.serve(before)
        await world.apply(delete=[before])
        await world.apply(open=[after, beside])
        assert world.opening == [beside] and "does not answer" in world.set.failures[after.slot]
        assert after in world.catalog.failed_partitions()
        world.let_go.set()
        await until(lambda: not world.set.late_ends.owned())
        again = world.catalog.retry().open
        assert again == [after]
        await world.apply(open=again)
        assert world.opening == [beside, after]

    run(scenario)


def test_the_end_of_what_was_in_a_slot_takes_no_failure_of_what_is_to_come(world: World) -> None:
    before, after = owned("t", HUNG, 3), owned("t", SOUND, 3)

    async def scenario() -> None:
        world.flushes = asyncio.get_running_loop().create_future()
        world.serve(before)
        await world.apply(close=[before], open=[after])
        world.flushes.set_result(None)
        await until(lambda: not world.set.late_ends.owned())
        assert "does not answer" in world.set.failures[3] and not world.opening

    run(scenario)


def test_what_ends_late_and_is_wanted_again_and_deleted_ends_once(world: World) -> None:
    before, after = owned("t", HUNG, 3), owned("t", HUNG, 9)

    async def scenario() -> None:
        world.flushes = asyncio.get_running_loop().create_future()
        path = world.serve(before)
        await world.apply(close=[before])
        await world.apply(open=[after])
        await world.apply(delete=[after])
        assert world.taken_back == [3] and world.set.in_force(7) == 6 and path.exists()
        world.flushes.set_result(None)
        world.let_go.set()
        await until(lambda: not world.set.late_ends.owned())
        assert world.taken_back == [3] and world.set.in_force(7) == 7 and not path.exists()

    run(scenario)


def test_a_partition_that_ends_late_takes_no_changes(world: World) -> None:
    one = owned("t", HUNG, 3)

    async def scenario() -> None:
        world.flushes = asyncio.get_running_loop().create_future()
        world.serve(one)
        await world.apply(close=[one])
        await world.apply(set_epoch=[one], set_options=[one])  # its commands would be refused
        await world.set._assign(one, None)  # type: ignore[arg-type]
        world.flushes.set_result(None)
        await until(lambda: not world.set.late_ends.owned())

    run(scenario)


@pytest.mark.parametrize("flushing", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_the_end_of_the_worker_waits_for_late_ends_as_for_all_others(world: World, monkeypatch: pytest.MonkeyPatch, answers: bool, flushing: bool) -> None:
    monkeypatch.setattr("mqd.worker.background.HANG_S", PATIENCE_S if answers else 0.5)
    gone, here = owned("gone", HUNG, 3), owned("here", HUNG, 4)

    async def scenario() -> None:
        held = world.flushes = asyncio.get_running_loop().create_future() if flushing else None
        world.serve(gone)
        world.serve(here)
        await world.apply(delete=[gone])
        ending = asyncio.ensure_future(world.set.close_all(7))
        await until(lambda: world.taken_back == [3, 4])
        if answers:
            world.let_go.set()
            if held is not None:
                held.set_result(None)
        assert await asyncio.wait_for(ending, 2 * PATIENCE_S) == ([] if answers else [world.log_dirs[HUNG]])
        assert (world.log_dirs[HUNG].path / "clean-shutdown.0").exists() == answers

    run(scenario)


def test_records_are_deleted_where_the_directory_hangs_beside_other_changes() -> None:
    """The order is carried out beside the changes, as retention does it."""
    applied: list[int] = []
    said: list[CommandDone] = []
    opened = SimpleNamespace(closing=False, owned=SimpleNamespace(log_dir=HUNG))
    one = object.__new__(worker.Worker)

    async def scenario() -> None:
        disk: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def advance_start(*_: object) -> int:
            return await disk

        async def apply(changes: object, version: int) -> None:
            applied.append(version)

        vars(one).update(
            _applying=asyncio.Lock(), _stopping=asyncio.Event(), _side_tasks=set(), _partitions=SimpleNamespace(by_slot={3: opened}), _control=SimpleNamespace(slot_view=lambda slot: SimpleNamespace(high_watermark=50)),
            _upkeep=SimpleNamespace(advance_start=advance_start), _log_dirs=[None], _link=SimpleNamespace(send=said.append), _apply=apply, _catalog=SimpleNamespace(on_message=lambda message: None),
        )  # fmt: skip
        async with asyncio.timeout(PATIENCE_S):
            await one._on_message(Command(11, "delete_records", 3, 40))
            await one._on_message(TopicRemoved(8, "t", b"t" * 16, [4]))
            assert applied == [8] and not said
            disk.set_result(40)
            while not said:
                await asyncio.sleep(0)
        assert (said[0].command_id, said[0].error, said[0].offset) == (11, 0, 40)

    run(scenario)


def test_a_refusal_by_the_reactor_that_comes_late_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    ends = late.LateEnds()

    async def scenario() -> None:
        told = asyncio.Event()
        ends.on_ended = told.set
        held = asyncio.get_running_loop().create_future()

        async def work() -> None:
            await held

        await ends.run(owned("t", HUNG, 3), work())
        held.set_exception(native.NativeError(5, "no such slot"))
        await asyncio.wait_for(told.wait(), PATIENCE_S)
        assert not ends.owned()

    run(scenario)
    assert any("no such slot" in str(vars(record)) for record in caplog.records)
