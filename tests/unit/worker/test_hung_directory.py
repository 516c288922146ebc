"""The end of a worker beside a log directory that does not answer: a disk whose fsync never
returns. The others are closed and marked, it is not, and the worker ends.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.base import logging
from mqd.log.files import NativeFiles
from mqd.worker import background, worker
from mqd.worker.background import Background
from mqd.worker.catalog import OwnedPartition
from mqd.worker.compaction import Compactor
from mqd.worker.log_directory import LogDirectory
from mqd.worker.maintenance import Upkeep
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet

GENERATION = 7


class Disk:
    """`hangs` until it is let go."""

    def __init__(self) -> None:
        self.hangs = False
        self.let_go = threading.Event()
        self.closed = 0

    def close(self, clean: bool) -> None:
        if self.hangs:
            assert self.let_go.wait(60)
        self.closed += 1


class Here:
    """Two log directories with partitions, more of them than threads close; all else of a worker is
    left out.
    """

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 6) -> None:
        monkeypatch.setattr(background, "HANG_S", 2.0)
        self.disks = [Disk(), Disk()]
        self.paths = [tmp_path / "a", tmp_path / "b"]
        self.log_dirs = []
        for index, path in enumerate(self.paths):
            path.mkdir()
            log_dir = LogDirectory(index, path, 0, 1, 0, NativeFiles(), lambda *_: 0)
            log_dir.open()
            self.log_dirs.append(log_dir)
        self.set = object.__new__(PartitionSet)
        control = SimpleNamespace(slot_view=lambda slot: SimpleNamespace(log_start_offset=0, high_watermark=5))
        vars(self.set).update(
            log_dirs=self.log_dirs,
            _control=control,
            _background=Background(),
            _deletion_tasks=set(),
            open={},
            by_slot={},
            failures={},
            before_close=None,
            _catalog=SimpleNamespace(failed_partitions=list),
            _log=logging.get("worker.partitions"),
            _close_in_reactor=self.from_reactor,
        )
        for slot in range(2 * count):
            owned = OwnedPartition("t", b"t" * 16, slot, slot, slot % 2, 0)
            self.set.open[owned.key] = OpenPartition(owned, self.paths[slot % 2], 0, None, None)  # type: ignore[arg-type]

    async def from_reactor(self, owned: OwnedPartition) -> object:
        del self.set.open[owned.key]
        return SimpleNamespace(log_end_offset=5, close=self.disks[owned.log_dir].close)

    def prune(self) -> None:
        for log_dir in self.log_dirs:
            log_dir.prune([])

    def marked(self) -> list[bool]:
        return [(path / "clean-shutdown.0").exists() for path in self.paths]

    def let_go(self) -> None:
        for disk in self.disks:
            disk.let_go.set()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    found = Here(tmp_path, monkeypatch)
    yield found
    found.let_go()


def test_a_directory_that_hangs_is_given_up_and_the_others_end_well(
    here: Here, caplog: pytest.LogCaptureFixture
) -> None:
    here.prune()
    here.disks[0].hangs = True

    async def scenario() -> list[LogDirectory]:
        return await asyncio.wait_for(here.set.close_all(GENERATION), 20)

    began = time.monotonic()
    assert asyncio.run(scenario()) == [here.log_dirs[0]]
    assert time.monotonic() - began < 10
    assert here.marked() == [False, True] and here.disks[1].closed == 6
    assert [
        str(here.paths[0]) in str(vars(record))
        for record in caplog.records
        if "does not respond" in record.getMessage()
    ] == [True]
    here.let_go()
    time.sleep(0.1)
    assert here.marked() == [False, True], "what comes back later does not make it clean"


def test_a_slow_directory_that_gets_on_is_waited_for(here: Here) -> None:
    here.prune()

    def close(clean: bool) -> None:
        time.sleep(1.2)  # two after the other take longer than HANG_S

    here.disks[0].close = close  # type: ignore[method-assign]
    assert asyncio.run(here.set.close_all(GENERATION)) == [] and here.marked() == [True, True]


@pytest.mark.parametrize("reason", ["it is stopped", "its own fault"])
def test_a_worker_that_cannot_end_says_where_and_goes(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """Also while a change that opens a partition there holds the lock of the end, and the event
    loop waits for a thread. After a fault of its own with a status that makes supervisord start it
    again.
    """
    left = threading.Event()
    statuses: list[int] = []
    watched = threading.Event()
    monkeypatch.setattr(worker, "END_S", 0.2)
    monkeypatch.setattr(worker.os, "_exit", lambda status: (statuses.append(status), left.set()))

    class Timer(threading.Timer):
        def start(self) -> None:
            super().start()
            watched.set()

    async def failing() -> None:
        if reason == "its own fault":
            raise RuntimeError(reason)
        await asyncio.Event().wait()

    monkeypatch.setattr(worker.threading, "Timer", Timer)
    one = object.__new__(worker.Worker)
    nothing = SimpleNamespace(
        close=lambda: None, watch=lambda *_: None, run=asyncio.Event().wait, tasks=list, exit_status=0
    )
    vars(one).update(
        _client=nothing,
        _set_up=lambda loop: None,
        _start_and_follow=failing,
        _retry_failed=asyncio.Event().wait,
        _reporter=nothing,
        _tls=nothing,
        _upkeep=nothing,
        _scrubber=nothing,
        _compactor=nothing,
        _stopping=asyncio.Event(),
        _changes_lock=asyncio.Lock(),
        _log_dirs=here.log_dirs,
        _partitions=here.set,
        _credits=nothing,
        _local=nothing,
        _log=logging.get("worker"),
    )

    async def scenario() -> None:
        await one._changes_lock.acquire()
        if reason == "it is stopped":
            one._stop(reason)
        running = asyncio.ensure_future(one.run())
        while not watched.is_set():
            await asyncio.sleep(0.001)
        assert left.wait(10)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert statuses == [0 if reason == "it is stopped" else 1]
    assert [
        all(str(path) in str(vars(record)) for path in here.paths)
        for record in caplog.records
        if "did not end in time" in record.getMessage()
    ] == [True]


def test_a_reactor_that_cannot_end_is_given_up_and_the_directory_that_hangs_is_named(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread of its own is in a flush that never returns: no partition comes back, so none is
    closed.
    """
    held = threading.Event()
    monkeypatch.setattr(worker, "PROBE_S", 0.2)
    monkeypatch.setattr(worker, "REACTOR_S", 0.0)

    def leave(status: int) -> None:
        raise InterruptedError(status)

    monkeypatch.setattr(worker.os, "_exit", leave)

    async def nothing() -> None:
        pass

    def sync(path: Path) -> None:
        assert path != here.paths[0] or held.wait(60)

    one = object.__new__(worker.Worker)
    ends = SimpleNamespace(close=nothing)
    gone = SimpleNamespace(close=lambda: None)
    vars(one).update(
        _replication=ends,
        _forwarding=ends,
        _mover=ends,
        _controller_commands=ends,
        _compactor=ends,
        _background=here.set._background,
        _reactor=SimpleNamespace(stop=lambda: held.wait(60)),
        _files=SimpleNamespace(sync_directory=sync),
        _client=SimpleNamespace(exit_status=0),
        _stopping=asyncio.Event(),
        _log_dirs=here.log_dirs,
        _credits=gone,
        _local=gone,
        _log=logging.get("worker"),
    )
    one._stop("it is to end")

    async def scenario() -> None:
        with pytest.raises(InterruptedError, match="0"):
            await asyncio.wait_for(one._end(True), 20)

    began = time.monotonic()
    asyncio.run(scenario())
    assert time.monotonic() - began < 10
    logged = [str(vars(record)) for record in caplog.records if "does not respond" in record.getMessage()]
    assert len(logged) == 1 and str(here.paths[0]) in logged[0] and str(here.paths[1]) not in logged[0]
    held.set()


def test_a_compaction_that_hangs_keeps_no_other_directory_from_its_clean_end(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step cannot be cancelled: it is in a thread, and the disk does not answer."""
    here.prune()
    here.disks[0].hangs = True
    hangs, statuses = threading.Event(), []

    def leave(status: int) -> None:
        statuses.append(status)
        raise InterruptedError(status)

    async def nothing(*_: object) -> SimpleNamespace:
        return SimpleNamespace(offset=0)

    def options(chosen: object) -> None:
        hangs.set()
        assert here.disks[0].let_go.wait(60)

    monkeypatch.setattr(worker.os, "_exit", leave)
    # it would outlive this test
    monkeypatch.setattr(worker.threading, "Timer", lambda *_: SimpleNamespace(start=lambda: None))
    compactor = object.__new__(Compactor)
    hung = next(opened for opened in here.set.open.values() if opened.owned.log_dir == 0)
    vars(compactor).update(
        _thread_pool=ThreadPoolExecutor(1),
        _skip_pause=asyncio.Event(),
        _current_released=asyncio.Event(),
        _current=None,
        _clean_ends={},
        _retry_at={},
        _uncleanable={},
        _reports={},
        _commands=SimpleNamespace(run=nothing),
        _reactor=SimpleNamespace(segments_hold=None),
        _options=options,
    )
    compactor.tasks = lambda: [compactor._compact(SimpleNamespace(opened=hung, plan=None))]  # type: ignore[method-assign, arg-type]
    here.set.before_close = compactor.release
    one = object.__new__(worker.Worker)
    ends = SimpleNamespace(close=nothing)
    runs = SimpleNamespace(
        exit_status=0,
        close=lambda: None,
        watch=lambda *_: None,
        run=asyncio.Event().wait,
        tasks=list,
        maybe_prune=nothing,
        welcome=SimpleNamespace(generation=GENERATION),
    )
    vars(one).update(
        _client=runs,
        _set_up=lambda loop: None,
        _start_and_follow=asyncio.Event().wait,
        _retry_failed=asyncio.Event().wait,
        _reporter=runs,
        _tls=runs,
        _upkeep=runs,
        _scrubber=runs,
        _compactor=compactor,
        _replication=ends,
        _forwarding=ends,
        _mover=ends,
        _controller_commands=ends,
        _background=here.set._background,
        _reactor=SimpleNamespace(stop=lambda: None),
        _stopping=asyncio.Event(),
        _changes_lock=asyncio.Lock(),
        _log_dirs=here.log_dirs,
        _partitions=here.set,
        _credits=runs,
        _local=runs,
        _log=logging.get("worker"),
    )

    async def scenario() -> None:
        running = asyncio.ensure_future(one.run())
        while not hangs.is_set():
            await asyncio.sleep(0.001)
        one._stop("it is to end")
        with pytest.raises(InterruptedError):
            await asyncio.wait_for(running, 20)
        here.let_go()

    asyncio.run(scenario())
    assert statuses == [0] and here.marked() == [False, True] and here.disks[1].closed == 6


def upkeep_about_to_prune(here: Here) -> Upkeep:
    kept = object.__new__(Upkeep)
    vars(kept).update(
        _prune_at_version=1,
        _control=SimpleNamespace(metadata_version=1),
        _background=here.set._background,
        _partitions=SimpleNamespace(log_dirs=here.log_dirs, failed_names=list),
    )
    return kept


def test_pruning_at_the_end_does_not_wait_for_a_directory_that_hangs(here: Here) -> None:
    held = threading.Event()
    here.log_dirs[0].prune = lambda expected: held.wait(60)  # type: ignore[assignment, method-assign, return-value]
    kept = upkeep_about_to_prune(here)

    async def scenario() -> None:
        pruning = asyncio.ensure_future(kept.maybe_prune())
        await asyncio.wait({pruning}, timeout=1)
        assert here.log_dirs[1].pruned and not pruning.done()
        pruning.cancel()

    asyncio.run(scenario())
    held.set()


def test_a_directory_that_cannot_be_pruned_is_retried_and_does_not_prevent_a_clean_end(here: Here) -> None:
    class Refusing(NativeFiles):
        def unlink(self, path: Path) -> None:
            raise OSError(5, "Input/output error", str(path))

    orphan = here.paths[0] / "recovery-point-offset-checkpoint.7"
    orphan.write_bytes(b"0\n0\n")
    kept = upkeep_about_to_prune(here)
    here.log_dirs[0]._files = Refusing()
    asyncio.run(kept.maybe_prune())
    assert orphan.exists() and [log_dir.pruned for log_dir in here.log_dirs] == [True, True]
    here.log_dirs[0]._files = NativeFiles()
    asyncio.run(kept.maybe_prune())
    assert not orphan.exists() and not kept._is_prune_due()
