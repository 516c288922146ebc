"""The worker's side of a move between log directories: how it ends, how it fails, and what waits
for what. Files are real, reactor and controller are not.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from mqd.cluster.host.messages import Applied, Command, CommandDone, MoveCompleted, PartitionImage, TopicImage
from mqd.log import directories, moving
from mqd.protocol.errors import ErrorCode
from mqd.worker.background import Background
from mqd.worker.catalog import Catalog, Changes, OwnedPartition
from mqd.worker.log_directory import LogDirectory
from mqd.worker.moving import Mover
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet
from mqd.worker.worker import Worker
from tests.unit.log.log_files import PlainFiles

TOPIC_ID = b"m" * 16
SLOT = 3
LOG_START = 7


class Failing(PlainFiles):
    fails_in = 0

    def _note(self, kind: str, path: Path) -> None:
        if self.fails_in:
            self.fails_in -= 1
            if not self.fails_in:
                raise OSError(5, "Input/output error", str(path))
        super()._note(kind, path)


def image(log_dir: int, replicas: tuple[int, ...] = (1,), **fields: int) -> TopicImage:
    one = PartitionImage(0, SLOT, 0, log_dir, 1, 0, list(replicas), list(replicas))
    return TopicImage("t", TOPIC_ID, [msgspec.structs.replace(one, **fields)], {})


class Partitions:
    """The part of PartitionSet that moves use."""

    def __init__(self, log_dirs: list[LogDirectory]) -> None:
        self.log_dirs = log_dirs
        self.open: dict[tuple[bytes, int], OpenPartition] = {}
        self.failures: dict[int, str] = {}
        self.deleted: list[str] = []
        self.assigned: list[tuple[bytes, int]] = []  # open partitions that have been given their roles
        self.broker_config: dict[str, str] = {}

    async def apply(self, changes: Changes) -> None:
        for owned in changes.open:
            path, _ = directories.prepare(
                self.log_dirs[owned.log_dir].path, owned.topic, owned.index, owned.topic_id, PlainFiles()
            )
            self.open[owned.key] = OpenPartition(owned, path, 0, None, None)  # type: ignore[arg-type]
        self.assigned += [owned.key for owned, _ in changes.assign]

    async def close_for_move(self, opened: OpenPartition) -> bool:
        del self.open[opened.owned.key]
        self.assigned = [key for key in self.assigned if key != opened.owned.key]
        return True

    def delete_later(self, _log_dir: LogDirectory, path: Path) -> None:
        assert path.name.endswith("-delete")
        self.deleted.append(path.name.split(".")[0])

    def checkpoint_entries(self, _log_dir: int) -> tuple[list, list]:
        return [], []


class World:
    def __init__(self, tmp_path: Path) -> None:
        self.files = Failing()
        self.log_dirs = [
            LogDirectory(number, tmp_path / name, 0, 1, 0, self.files, lambda *_: (0, -1))
            for number, name in enumerate("ab")
        ]
        for log_dir in self.log_dirs:
            log_dir.path.mkdir()
            log_dir.open()
        self.partitions, self.catalog, self.background = Partitions(self.log_dirs), Catalog(0), Background()
        self.sent: list[MoveCompleted] = []
        view = SimpleNamespace(log_end_segment=0, log_end_position=1000, log_start_offset=LOG_START)
        control = SimpleNamespace(slot_view=lambda _slot: view, worker_count=2)
        self.mover = Mover(
            self.log_dirs,
            control,
            self.partitions,
            self.catalog,
            self.background,
            self.files,
            self.sent.append,
            asyncio.Lock(),
        )  # type: ignore[arg-type]

    async def serve(self, replicas: tuple[int, ...] = (1,)) -> OpenPartition:
        await self.partitions.apply(self.catalog.on_topic_put(image(0, replicas)))
        (opened,) = self.partitions.open.values()
        (opened.path / f"{0:020d}.log").write_bytes(b"r" * 1000)
        return opened

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)

    async def switch(self) -> OpenPartition:
        opened = await self.serve()
        assert await self.mover.begin(opened, 1) == (0, "")
        await self.until(lambda: self.sent)
        return opened

    def there(self, disk: int) -> list[str]:
        return sorted(
            path.name.split(".")[0] + path.name.rpartition("-")[2]
            for path in self.log_dirs[disk].path.iterdir()
            if path.is_dir()
        )


def run(tmp_path: Path, scenario: Callable[[World], Awaitable[None]]) -> None:
    async def body() -> None:
        world = World(tmp_path)
        try:
            await scenario(world)
        finally:
            await world.mover.close()
            world.background.close()

    asyncio.run(body())


def test_a_move_ends_when_the_metadata_says_so(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        opened = await world.switch()
        assert world.partitions.open == {} and world.sent == [MoveCompleted(TOPIC_ID, 0, 1)]
        world.mover.report_again()  # for example because the metadata log was full
        assert len(world.sent) == 2
        target = world.log_dirs[1].path / "t-0"
        assert moving.marked_log_start(target) == LOG_START and (target / f"{0:020d}.log").read_bytes() == b"r" * 1000
        await world.partitions.apply(world.catalog.on_topic_put(image(1)))
        await world.mover.on_applied(False)
        assert not opened.path.exists() and world.partitions.deleted == ["t-0"] and not moving.is_marked(target)
        world.mover.report_again()
        assert len(world.sent) == 2

    run(tmp_path, scenario)


def test_a_move_during_the_end_of_the_previous_one_is_not_refused(tmp_path: Path) -> None:
    back = Command(1, "move_replica", SLOT, 0)

    async def scenario(world: World) -> None:
        responses: list[object] = []

        async def carry_out(command: Command) -> None:
            (opened,) = world.partitions.open.values()
            error, _ = await world.mover.begin(opened, command.offset)
            responses.append(CommandDone(command.command_id, error, -1))

        async def changed() -> None:
            pass

        quiet = SimpleNamespace(update=lambda *_: None, on_applied=lambda: None, apply=changed)
        worker = SimpleNamespace(
            _changes_lock=asyncio.Lock(),
            _stopping=asyncio.Event(),
            _mover=world.mover,
            _partitions=world.partitions,
            _catalog=world.catalog,
            _cluster_id="",
            _subjects=quiet,
            _replication=quiet,
            _forwarding=quiet,
            _upkeep=quiet,
            _checked_left_behind=True,
            _controller_commands=SimpleNamespace(carry_out=carry_out),
            _link=SimpleNamespace(send=responses.append),
        )
        await world.switch()
        await Worker._on_message(worker, back)  # type: ignore[arg-type]
        await Worker._apply(worker, Changes(), 1)  # type: ignore[arg-type]
        assert responses == [Applied(1, {})]
        await Worker._apply(worker, world.catalog.on_topic_put(image(1)), 2)  # type: ignore[arg-type]
        assert responses[1:] == [Applied(2, {}), CommandDone(1, 0, -1)]
        await world.until(lambda: world.sent[1:])
        assert world.sent[1] == MoveCompleted(TOPIC_ID, 0, 0)

    run(tmp_path, scenario)


def test_a_command_does_not_wait_for_a_directory_that_failed_nor_for_a_new_controller(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        command = Command(1, "delete_records", SLOT, 5)
        assert not world.mover.hold(command)
        await world.switch()
        assert not world.mover.hold(Command(1, "delete_records", SLOT + 1, 5))
        assert world.mover.hold(command)
        await world.mover.on_applied(True)
        assert world.mover.release_held() == [] and world.mover.hold(command)
        world.partitions.failures[SLOT] = "its directory failed"
        assert not world.mover.hold(command) and world.mover.release_held() == [command]

    run(tmp_path, scenario)


def test_a_recreated_topic_in_place_of_a_copy_is_kept(tmp_path: Path) -> None:
    """The topic was deleted and recreated while the controller was down: one image has both
    changes.
    """

    async def scenario(world: World) -> None:
        await world.switch()
        world.catalog.on_topic_removed(TOPIC_ID)
        namesake = OwnedPartition("t", b"n" * 16, 0, 4, 1, 0)
        await world.partitions.apply(Changes(open=[namesake]))
        (world.log_dirs[1].path / "t-0" / "precious").write_bytes(b"1")
        await world.mover.on_applied(True)
        assert (world.log_dirs[1].path / "t-0" / "precious").exists() and world.partitions.deleted == []

    run(tmp_path, scenario)


def test_the_copy_of_a_deleted_topic_is_deleted(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.switch()
        world.catalog.on_topic_removed(TOPIC_ID)
        await world.mover.on_applied(False)
        assert world.partitions.deleted == ["t-0"] and not (world.log_dirs[1].path / "t-0").exists()

    run(tmp_path, scenario)


def test_both_copies_of_a_topic_that_is_not_served_for_now_are_kept(tmp_path: Path) -> None:
    """One of the directories was not usable for a restarted controller; either copy may be valid."""

    async def scenario(world: World) -> None:
        opened = await world.switch()
        world.catalog.on_topic_put(image(255, slot=-1, owner=65535))
        await world.mover.on_applied(True)
        assert opened.path.exists() and (world.log_dirs[1].path / "t-0").exists() and world.partitions.deleted == []
        assert not world.mover.is_moving()

    run(tmp_path, scenario)


@pytest.mark.parametrize("number", range(1, 8))
def test_after_any_failure_the_source_is_served_and_no_copy_is_left(tmp_path: Path, number: int) -> None:
    """Each change of the target directory in turn: mkdir, metadata, sync; mark, sync, rename, sync."""

    async def scenario(world: World) -> None:
        opened = await world.serve()
        world.files.fails_in = number
        error, _ = await world.mover.begin(opened, 1)
        assert error == (ErrorCode.KAFKA_STORAGE_ERROR if number <= 3 else 0)
        await world.until(lambda: not world.mover._moves)
        await world.until(lambda: world.there(1) in ([], ["t-0delete"]))
        (opened,) = world.partitions.open.values()
        assert world.files.fails_in == 0 and world.sent == [] and opened.owned.log_dir == 0
        assert await world.mover.begin(opened, 1) == (0, "")
        await world.until(lambda: world.sent)

    run(tmp_path, scenario)


def test_after_a_failed_switch_a_replica_has_its_role_again(tmp_path: Path) -> None:
    """The reactor forgets the role of a partition that it closes."""

    async def scenario(world: World) -> None:
        opened = await world.serve(replicas=(1, 2))
        assert world.partitions.assigned == [opened.owned.key]
        world.files.fails_in = 4  # the mark of the complete copy
        assert await world.mover.begin(opened, 1) == (0, "")
        await world.until(lambda: not world.mover._moves)
        assert world.files.fails_in == 0 and world.sent == [] and list(world.partitions.open) == [opened.owned.key]
        assert world.partitions.assigned == [opened.owned.key]

    run(tmp_path, scenario)


def test_nothing_is_copied_to_a_full_target(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        opened = await world.serve()
        guard = world.log_dirs[1].space_guard
        guard.is_full = True
        assert (await world.mover.begin(opened, 1))[0] == ErrorCode.KAFKA_STORAGE_ERROR
        guard.is_full = False
        assert (await world.mover.begin(opened, 1))[0] == 0
        guard.is_full = True  # by other writers meanwhile
        await world.until(lambda: not world.mover._moves and world.there(1) == ["t-0delete"])
        assert world.sent == [] and list(world.partitions.open) == [opened.owned.key]

    run(tmp_path, scenario)


def test_a_move_does_not_wait_for_a_cleaner_that_waits_for_the_files(tmp_path: Path) -> None:
    """The cleaner waits for the lock of the files when a move needs the partition: it gets the
    lock, sees that the partition is closing, and releases it.
    """

    async def scenario() -> None:
        async def partition_close(*_: object) -> SimpleNamespace:
            return SimpleNamespace(partition=SimpleNamespace(log_end_offset=5, close=lambda _clean: None))

        background = Background()
        partitions = PartitionSet(
            0,
            [],
            None,
            SimpleNamespace(partition_close=None),
            SimpleNamespace(run=partition_close),
            background,
            Catalog(0),
            {},
            PlainFiles(),
        )  # type: ignore[arg-type]
        opened = OpenPartition(OwnedPartition("t", TOPIC_ID, 0, SLOT, 0, 0), tmp_path, 0, None, None)  # type: ignore[arg-type]
        partitions.open[opened.owned.key] = partitions.by_slot[SLOT] = opened
        swapped = asyncio.Event()

        async def swap() -> None:
            async with opened.files_lock:
                swapped.set()

        async def release(_opened: OpenPartition) -> None:
            await asyncio.create_task(swap())

        partitions.before_close = release
        async with asyncio.timeout(20):
            assert await partitions.close_for_move(opened)
        assert swapped.is_set() and partitions.open == {}
        background.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("rate", "slept_s"), [(None, 0.0), ("500", 4.0), ("2000", 1.0)])
def test_copies_respect_the_rate_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: str | None, slept_s: float
) -> None:
    """replica.alter.log.dirs.io.max.bytes.per.second, half of it for this worker of two: 1000
    bytes.
    """
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    async def scenario(world: World) -> None:
        if rate is not None:
            world.partitions.broker_config["replica.alter.log.dirs.io.max.bytes.per.second"] = rate
        opened = await world.serve()
        monkeypatch.setattr("mqd.worker.moving.asyncio.sleep", noted)
        assert await world.mover.begin(opened, 1) == (0, "")
        async with asyncio.timeout(20):
            while not world.sent:
                await sleep(0.001)
        assert slept_s - 0.5 < sum(slept) <= slept_s

    run(tmp_path, scenario)
