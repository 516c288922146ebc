"""The controller's queries of the file systems of log.dirs while it runs: one that hangs delays no
caller.
"""

import asyncio
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from mqd.cluster.broker import core as broker_core
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.raft.identity import directory_text
from mqd.cluster.raft.messages import ReplicaKey
from mqd.controller import __main__ as controller
from mqd.controller import directories
from mqd.controller import shell as shells
from mqd.controller.__main__ import Process
from mqd.controller.directories import DirectoryMonitor
from mqd.controller.host_gossip import HostGossip, disk_bytes
from tests.unit.cluster.test_rules import cluster, topic

FREE = 1 << 40


class FileSystems:
    """Replaces statvfs. `hung`: paths that do not respond until they are released; `asked`: every
    query.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hung: set[str] = set()
        self.requested: list[str] = []
        self._changed = threading.Condition()
        monkeypatch.setattr(directories, "measure", self.measure)
        monkeypatch.setattr(directories, "RESPONSE_S", 0.05)

    def measure(self, entry: Directory) -> Directory:
        with self._changed:
            self.requested.append(entry.path)
            assert self._changed.wait_for(lambda: entry.path not in self.hung, 60)
        return entry._replace(free_bytes=FREE)

    def let_go(self) -> None:
        with self._changed:
            self.hung.clear()
            self._changed.notify_all()


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch):
    found = FileSystems(monkeypatch)
    yield found
    found.let_go()


def entry(name: str, usable: bool = True) -> Directory:
    return Directory(name, f"/{name}", 1, usable)


def seen(found: list[Directory]) -> list[tuple[str, int, bool]]:
    return [(one.directory_id, one.free_bytes, one.usable) for one in found]


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


def test_a_hung_file_system_is_unusable_and_the_others_are_measured(systems: FileSystems) -> None:
    async def scenario() -> None:
        monitor = DirectoryMonitor([entry("a"), entry("b")])
        assert seen(await monitor.measure_all()) == [("a", FREE, True), ("b", FREE, True)]
        systems.hung.add("/a")
        for _ in range(3):
            assert seen(await monitor.measure_all()) == [("a", 0, False), ("b", FREE, True)]
        assert systems.requested.count("/a") == 2, "a hung disk takes one thread"
        systems.let_go()
        while not (found := await monitor.measure_all())[0].usable:
            pass
        assert seen(found) == [("a", FREE, True), ("b", FREE, True)]

    run(scenario())


def test_a_directory_unusable_at_the_start_stays_unusable(tmp_path: Path) -> None:
    """An empty mount point instead of the disk responds, but is empty; no worker has opened it.
    opened it.
    """

    async def scenario() -> None:
        lost = Directory("lost", str(tmp_path), 0, False)
        found = await DirectoryMonitor([lost, Directory("here", str(tmp_path), 0, True)]).measure_all()
        assert found[0] == lost and found[1].usable and found[1].free_bytes > 0

    run(scenario())


@pytest.mark.parametrize("own", ["metadata", "other metadata"])
def test_a_host_without_its_metadata_starts_with_its_current_directories(tmp_path: Path, own: str) -> None:
    """Data of an earlier host with its node id is not its own, and its replicas are placed again.
    With its metadata it notices the missing disk.
    """
    place = str(tmp_path / "log")
    (tmp_path / "log").mkdir()
    state = topic(cluster(2), (1, 2))
    state.brokers[1] = msgspec.structs.replace(
        state.brokers[1], directories={"d1": place}, directory_id=directory_text(b"k" * 16)
    )
    process = object.__new__(Process)
    process.node_id, process.log_dirs = 1, [place]
    process.key = ReplicaKey(1, b"k" * 16 if own == "metadata" else b"o" * 16)
    (found,) = asyncio.run(process.prepare_directories("c", state))
    assert (found.usable, found.directory_id == "d1") == ((False, True) if own == "metadata" else (True, False))


def test_a_directory_without_identity_is_not_probed(systems: FileSystems) -> None:
    """It could be neither read nor written at the start."""

    async def scenario() -> None:
        nameless = Directory("", "/x", 0, False)
        assert await DirectoryMonitor([nameless]).measure_all() == [nameless] and not systems.requested

    run(scenario())


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """log.dirs whose first directory does not respond until it is released."""
    let_go = threading.Event()
    places = [str(tmp_path / name) for name in ("hung", "sound")]

    def slowly(of):
        return lambda path, *more, **named: (
            of(path, *more, **named)
            if not str(path).startswith(places[0])
            else let_go.wait(60) and of(path, *more, **named)
        )

    for place in places:
        Path(place).mkdir()
        (Path(place) / directories.META_PROPERTIES).write_text(
            f"version=1\ncluster.id=c\nnode.id=1\ndirectory.id={Path(place).name}\n"
        )
    monkeypatch.setattr(directories, "RESPONSE_S", 0.2)
    monkeypatch.setattr(directories, "read_properties", slowly(directories.read_properties))
    monkeypatch.setattr(directories.os, "scandir", slowly(directories.os.scandir))
    monkeypatch.setattr(directories.os, "stat", slowly(directories.os.stat))
    monkeypatch.setattr(directories.os, "statvfs", slowly(directories.os.statvfs))
    late = threading.Timer(20, let_go.set)  # a test that waits for it fails instead of hanging
    late.daemon = True
    late.start()
    yield places
    late.cancel()
    let_go.set()


def test_a_start_does_not_wait_for_a_hung_log_directory(hung: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """It is offline, the others serve; and the event loop keeps running."""
    state = topic(cluster(2), (1, 2))
    state.brokers[1] = msgspec.structs.replace(
        state.brokers[1], directories={"hung": hung[0], "sound": hung[1]}, directory_id=directory_text(b"k" * 16)
    )
    process = object.__new__(Process)
    process.node_id, process.log_dirs, process.key = 1, hung, ReplicaKey(1, b"k" * 16)

    async def scenario() -> None:
        settling = asyncio.create_task(process.prepare_directories("c", state))
        turns = 0
        while not settling.done():
            turns += 1
            await asyncio.sleep(0.001)
        found = settling.result()
        assert [(one.directory_id, one.usable) for one in found] == [("hung", False), ("sound", True)] and turns > 1
        assert await disk_bytes({"log.dirs": ",".join(hung)}) == 0

    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began < 10
    assert any("does not respond" in record.getMessage() for record in caplog.records)


def test_a_clean_session_counts_without_the_devices_of_a_hung_log_directory(hung: list[str], tmp_path: Path) -> None:
    process = object.__new__(Process)
    process.log_dirs = hung
    began = time.monotonic()
    devices = asyncio.run(process.devices())
    assert time.monotonic() - began < 10
    kept = controller.session.Session(7, "d", controller.session.boot_id(), devices, False)
    for last, believed in ((kept, -1), (msgspec.structs.replace(kept, clean=True), 7)):
        controller.session.write(tmp_path / "session", last)
        assert (
            controller.session.clean_epoch(tmp_path / "session", "d", controller.session.boot_id(), devices) == believed
        )


def test_lost_metadata_beside_a_hung_log_directory_are_refused(hung: list[str], tmp_path: Path) -> None:
    with pytest.raises(controller.Refused, match="hung does not respond"):
        run(controller._refuse_lost_metadata(SimpleNamespace(metadata_dir=tmp_path), hung))
    run(controller._refuse_lost_metadata(SimpleNamespace(metadata_dir=tmp_path), hung[1:]))


def test_a_loop_that_ends_does_not_wait_for_a_hung_file_system(systems: FileSystems) -> None:
    systems.hung.add("/a")
    run(DirectoryMonitor([entry("a")]).measure_all())
    assert systems.hung and any(thread.daemon and thread.name == "blocking-query" for thread in threading.enumerate())


def test_the_controllers_ticks_do_not_wait_for_a_file_system(
    systems: FileSystems, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own heartbeats and all sessions depend on them."""
    monkeypatch.setattr(shells, "MEASURE_INTERVAL_S", 0.0)
    monkeypatch.setattr(directories, "RESPONSE_S", 30.0)
    systems.hung.add("/a")

    async def scenario() -> None:
        received: list[object] = []
        one = object.__new__(shells.Shell)
        one.directories = [entry("a")]
        one._directory_monitor = DirectoryMonitor(one.directories)
        one.on_broker = one.on_metadata = one.on_host = received.append  # type: ignore[method-assign, assignment]
        one._voter_changes = SimpleNamespace(tick=lambda: None)  # type: ignore[assignment]
        one._maybe_report_alive, one._pause_s = lambda: None, lambda: 0.001  # type: ignore[method-assign]

        async def restored() -> None:
            pass

        one.quorum = SimpleNamespace(maybe_retry_snapshot=lambda: None, disk=SimpleNamespace(restore_reserve=restored))
        ticking = asyncio.create_task(one.tick())
        while not systems.requested:
            await asyncio.sleep(0.001)
        before = sum(isinstance(event, metadata_core.Tick) for event in received)
        while (
            sum(isinstance(event, metadata_core.Tick) for event in received) < before + 20
            or sum(isinstance(event, broker_core.Tick) for event in received) < before + 20
        ):
            await asyncio.sleep(0.001)
        assert systems.requested == ["/a"] and not any(
            isinstance(event, metadata_core.DirectoriesSeen) for event in received
        )
        systems.let_go()
        while not any(isinstance(event, metadata_core.DirectoriesSeen) for event in received):
            await asyncio.sleep(0.001)
        assert one.directories[0].free_bytes == FREE
        ticking.cancel()

    run(scenario())


def test_an_error_while_directories_are_measured_ends_the_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shells, "MEASURE_INTERVAL_S", 0.0)

    async def failing() -> None:
        raise ValueError("our own fault")

    async def scenario() -> None:
        one = object.__new__(shells.Shell)
        one.on_broker = one.on_metadata = one.on_host = lambda event: None  # type: ignore[method-assign, assignment]
        one._voter_changes = SimpleNamespace(tick=lambda: None)  # type: ignore[assignment]
        one._maybe_report_alive, one._pause_s = lambda: None, lambda: 0.001  # type: ignore[method-assign]
        one._measure = failing  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="our own fault"):
            await one.tick()

    run(scenario())


def test_the_load_in_gossip_does_not_wait_for_a_file_system() -> None:
    async def work() -> None:
        gossip, answered = object.__new__(HostGossip), threading.Event()
        gossip._used_bytes, gossip._disk_check = 5, None
        requests = []

        def measure() -> int:
            requests.append(1)
            answered.wait(60)
            return 7

        gossip._measure_used = measure  # type: ignore[method-assign]
        assert [gossip._disk_used_bytes() for _ in range(3)] == [5, 5, 5] and len(requests) <= 1, (
            "one that hangs is queried once"
        )
        answered.set()
        async with asyncio.timeout(10):
            while gossip._disk_used_bytes() != 7:
                await asyncio.sleep(0.001)

    asyncio.run(work())


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("hangs", ["nothing", "the marker", "the device"])
def test_shutdown_does_not_wait_for_a_hung_log_directory_and_is_not_recorded_as_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: str
) -> None:
    let_go = threading.Event()
    place = tmp_path / "log"
    place.mkdir()
    (place / "clean-shutdown.0").touch()

    class Hanging(type(place)):  # type: ignore[misc]
        def exists(self) -> bool:
            return super().exists() if hangs != "the marker" else let_go.wait(60)

    monkeypatch.setattr(controller, "Path", Hanging)
    if hangs != "nothing":
        monkeypatch.setattr(directories, "RESPONSE_S", 0.2)
    remembered: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        controller.session, "devices", lambda paths: let_go.wait(60) and [] if hangs == "the device" else []
    )
    monkeypatch.setattr(
        controller.session, "write", lambda path, entry: remembered.append((entry.broker_epoch, entry.clean))
    )

    async def scenario() -> None:
        process = object.__new__(Process)
        control = SimpleNamespace(endpoint_state=lambda index: 3)
        process.client = SimpleNamespace(control=control, welcome=SimpleNamespace(worker_count=1))  # type: ignore[assignment]
        process.left_epoch, process.log_dirs, process.key = 9, [str(place)], ReplicaKey(1, b"k" * 16)
        process._session_lock, process._doubted_epoch = threading.Lock(), -1
        process.layout = SimpleNamespace(metadata_dir=tmp_path)  # type: ignore[assignment]
        process._marker_locations = lambda shell: {(str(place), 0)}  # type: ignore[method-assign]
        await process._record_clean_shutdown(SimpleNamespace(broker_epoch=9))  # type: ignore[arg-type]

    late = threading.Timer(20, let_go.set)
    late.daemon = True
    late.start()
    began = time.monotonic()
    run(scenario())
    assert time.monotonic() - began < 10
    assert remembered == ([(9, True)] if hangs == "nothing" else [])
    logged = [record for record in caplog.records if "not recorded as a clean shutdown" in record.getMessage()]
    assert len(logged) == (hangs != "nothing") and all(str(place) in str(vars(record)) for record in logged)
    let_go.set()


def test_a_doubtful_session_stays_doubtful_when_its_start_is_recorded_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It queries the devices of the log directories; one hangs, and the disk then fails its flush:
    the page cache no longer proves anything. A later session, after a restart of the host, is
    another one.
    """
    hangs, let_go = threading.Event(), threading.Event()
    of = controller.session.devices

    def devices(paths: list[str]) -> list[int]:
        hangs.set()
        assert let_go.wait(60)
        return of(paths)

    monkeypatch.setattr(controller.session, "devices", devices)
    process = object.__new__(Process)
    process.log_dirs, process.key = [str(tmp_path)], ReplicaKey(1, b"k" * 16)
    process._session_lock, process._doubted_epoch = threading.Lock(), -1
    process.layout = SimpleNamespace(metadata_dir=tmp_path)  # type: ignore[assignment]

    def believed() -> int:
        return controller.session.clean_epoch(
            tmp_path / "session", directory_text(b"k" * 16), controller.session.boot_id(), of(process.log_dirs)
        )

    registered = threading.Thread(target=process.record_session, args=(7, False), daemon=True)
    registered.start()
    assert hangs.wait(60)
    process.record_doubt(7)
    let_go.set()
    registered.join(60)
    assert not registered.is_alive() and believed() == -1
    process.record_session(8, False)
    assert believed() == (8 if controller.session.boot_id() else -1)
