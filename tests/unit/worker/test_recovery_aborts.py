"""What goes wrong while a partition is opened: opening it repeatedly aborts its worker by a broken
invariant; an obsolete file cannot be removed.
"""

import asyncio
import errno
import faulthandler
import mmap
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd import native
from mqd.worker import shortened_log as shortened
from mqd.worker.catalog import Changes, OwnedPartition
from mqd.worker.partitions import RECOVERY_ABORTS_MAX, _OpenResult
from tests.unit.worker.test_shortened import Set
from tests.unit.worker.test_strays import PlainFiles

TOPIC, SLOT = b"t" * 16, 5


@pytest.fixture
def control() -> native.Control:
    control = native.Control.format(mmap.mmap(-1, native.control_size_bytes()), 2, b"b" * 16, 7, 1000)
    control.assign_slot(SLOT, TOPIC, 0, 1, 0, 3)
    return control


def abort_while_opening(control: native.Control, slot: int) -> None:
    """Frees memory that is not allocated, which invariant A2 of the arena forbids."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler.disable()  # pytest's: this process is meant to abort
        arena = native.lib.mqd_arena_open(native.ffi.new("uint8_t[4096]"), 4096, 4096)
        with control.opening(slot):
            native.lib.mqd_arena_hold(arena, 1 << 40)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGABRT


def aborts(control: native.Control) -> int:
    with control.opening(SLOT) as count:
        return count


def open_one(control: native.Control, path: Path) -> object:
    made = Set(path)
    made.partitions._control = control
    owned = OwnedPartition("t", TOPIC, 0, SLOT, 0, 3)
    made.partitions._recovery_inputs = lambda *_: native.Recovery()  # type: ignore[method-assign]
    made.partitions.log_dirs[0].trusted_points = object()
    made.partitions._log_options = lambda _: native.LogOptions()  # type: ignore[method-assign]
    made.path.rmdir()
    return made.partitions._open_one(owned, control.slot_view(SLOT))


def test_an_abort_counts_against_the_slot_that_is_being_opened(control: native.Control) -> None:
    assert aborts(control) == 0
    abort_while_opening(control, SLOT)
    abort_while_opening(control, SLOT + 1)
    assert aborts(control) == 1


def test_the_count_is_reset_for_another_partition_in_the_slot(control: native.Control) -> None:
    abort_while_opening(control, SLOT)
    control.clear_slot(SLOT)
    control.assign_slot(SLOT, b"u" * 16, 0, 1, 0, 3)
    assert aborts(control) == 0


def test_the_partition_is_offline_after_two_attempts(control: native.Control, tmp_path: Path) -> None:
    for count in range(RECOVERY_ABORTS_MAX):
        (tmp_path / str(count)).mkdir()
        opened = open_one(control, tmp_path / str(count))
        opened.partition.close(True)  # type: ignore[attr-defined]
        abort_while_opening(control, SLOT)
    (tmp_path / "last").mkdir()
    with pytest.raises(
        OSError, match="aborted 2 times while opening it, because of a broken invariant.*mqd log verify"
    ):
        open_one(control, tmp_path / "last")


def test_a_sole_replica_is_opened_although_its_mark_as_shortened_cannot_be_removed(
    control: native.Control, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(_files: PlainFiles, path: Path) -> None:
        raise OSError(errno.EROFS, "refused", str(path))

    monkeypatch.setattr(PlainFiles, "unlink", unlink)
    monkeypatch.setattr(shortened, "is_marked", lambda _path: True)
    open_one(control, tmp_path).partition.close(True)  # type: ignore[attr-defined]


def test_a_partition_whose_directory_fails_while_it_is_opened_is_reported(tmp_path: Path) -> None:
    made = Set(tmp_path)

    async def run(*_: object) -> None:
        made.partitions.log_dirs[0].failure = "a write failed"

    made.partitions._commands = SimpleNamespace(run=run)  # type: ignore[assignment]
    made.partitions._reactor = SimpleNamespace(partition_open=None)  # type: ignore[assignment]
    made.partitions._catalog = SimpleNamespace(  # type: ignore[assignment]
        topic_of=lambda _owned: SimpleNamespace(config={}), broker_config={}
    )
    opened = _OpenResult(OwnedPartition("t", TOPIC, 0, SLOT, 0, 3), made.path, None, native.Recovery(), True)  # type: ignore[arg-type]
    asyncio.run(made.partitions._pass_to_reactor(opened))
    assert "a write failed" in made.partitions.failures[SLOT]


def test_a_partition_that_is_given_up_is_not_reported_any_more(tmp_path: Path) -> None:
    """Its slot may soon hold another worker's partition."""
    made = Set(tmp_path)
    made.partitions.failures[SLOT] = "t-0: it cannot be opened"
    asyncio.run(made.partitions.apply(Changes(close=[OwnedPartition("t", TOPIC, 0, SLOT, 0, 3)])))
    assert made.partitions.failures == {}
