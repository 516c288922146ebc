"""The budget of connections: real semaphores, real process deaths."""

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import sysv_ipc
from hypothesis import given
from hypothesis import strategies as st

from mqd.shm import credits
from mqd.shm.credits import Budget, Credits


@pytest.fixture
def name() -> Iterator[str]:
    name = f"/mqd-test-{uuid.uuid4().hex}"
    yield name
    credits.remove(name)


def attach(name: str, tmp_path: Path, generation: int = 1, maximum: int = 10_000, workers: int = 2) -> Credits:
    return Credits.attach(name, generation, tmp_path / "credits.lock", maximum, workers)


def in_child(work) -> int:
    """Runs `work` in a forked process that then waits to be killed; returns its pid once `work` is
    done.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os.write(writable, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writable)
    assert os.read(readable, 1) == b"x", "the child failed"
    os.close(readable)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@given(st.integers(1, 1_000_000), st.integers(1, 64))
def test_blocks_never_exceed_the_budget(maximum: int, workers: int) -> None:
    budget = Budget.of(maximum, workers)
    assert 1 <= budget.block_size <= 64 and budget.block_count >= 1
    assert budget.block_size * budget.block_count <= maximum


@given(st.integers(1, 1_000_000), st.integers(1, 64), st.integers(0, 1_000_000))
def test_leased_credits_cover_used_ones(maximum: int, workers: int, used: int) -> None:
    budget = Budget.of(maximum, workers)
    for exhausted in (False, True):
        blocks = budget.target_block_count(used, workers, exhausted)
        assert 1 <= blocks <= budget.block_count
        assert blocks * budget.block_size >= min(used, budget.block_count * budget.block_size)


def test_credits_of_a_killed_process_are_returned(name: str, tmp_path: Path) -> None:
    ours = attach(name, tmp_path)
    total = ours.free_block_count
    assert total == ours.budget.block_count

    def take() -> None:
        theirs = attach(name, tmp_path)
        theirs.adjust(5000)
        assert theirs.granted_count >= 5000

    pid = in_child(take)
    assert ours.free_block_count <= total - 5000 // ours.budget.block_size
    kill(pid)
    assert ours.free_block_count == total


def test_a_worker_gets_the_remaining_credits_and_more_when_others_return_them(name: str, tmp_path: Path) -> None:
    def take() -> None:
        attach(name, tmp_path, maximum=6400).adjust(4000)

    ours = attach(name, tmp_path, maximum=6400)
    pid = in_child(take)
    ours.adjust(4000)
    assert 0 < ours.granted_count < 4000, "two workers cannot both hold 4000 of 6400"
    kill(pid)
    assert ours.adjust(4000) and ours.granted_count >= 4000


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_a_burst_of_half_the_budget_finds_its_credits_leased(name: str, tmp_path: Path, workers: int) -> None:
    """Connections arrive by the thousand within a second; the lease is adjusted once a second."""
    leases = [attach(name, tmp_path, maximum=10_000, workers=workers) for _ in range(workers)]
    for lease in leases:
        lease.adjust(0)
    assert all(lease.granted_count >= 5000 // workers for lease in leases)
    assert leases[0].free_block_count > 0


def test_headroom_is_given_back_when_the_budget_runs_out(name: str, tmp_path: Path) -> None:
    idle, busy = attach(name, tmp_path, maximum=640), attach(name, tmp_path, maximum=640)
    idle.adjust(0)
    before = idle.granted_count
    busy.adjust(640)
    assert idle.free_block_count == 0
    assert idle.adjust(0) and idle.granted_count < before
    assert busy.adjust(640), "and the worker that needs it gets it"
    assert busy.granted_count + idle.granted_count <= 640


def test_fewer_connections_give_credits_back(name: str, tmp_path: Path) -> None:
    ours = attach(name, tmp_path)
    ours.adjust(8000)
    assert ours.granted_count >= 8000
    ours.adjust(10)
    assert ours.granted_count < 4000
    ours.close()
    assert ours.free_block_count == ours.budget.block_count


def test_a_restarted_broker_begins_with_the_whole_budget(name: str, tmp_path: Path) -> None:
    old = attach(name, tmp_path, generation=1, maximum=1000)
    old.adjust(500)
    new = attach(name, tmp_path, generation=2, maximum=2000)
    assert new.free_block_count == Budget.of(2000, 2).block_count
    also = attach(name, tmp_path, generation=2, maximum=2000)
    new.adjust(100)
    assert also.free_block_count == new.free_block_count, "workers of one life share one semaphore"
    assert not old.adjust(0), "the old one is gone; nothing breaks"
    old.close()


def test_many_processes_attach_at_once(name: str, tmp_path: Path) -> None:
    ours = None
    pids = [in_child(lambda: attach(name, tmp_path, generation=9).adjust(0)) for _ in range(8)]
    try:
        ours = attach(name, tmp_path, generation=9)
        assert ours.free_block_count < ours.budget.block_count
    finally:
        for pid in pids:
            kill(pid)
    assert ours.free_block_count == ours.budget.block_count


def test_removed_semaphores_are_recreated_with_their_state(name: str, tmp_path: Path) -> None:
    """systemd's RemoveIPC= removes them under a running broker."""
    first, second = attach(name, tmp_path), attach(name, tmp_path)
    first.adjust(3000)
    second.adjust(100)
    held = first.held_block_count + second.held_block_count
    credits.remove(name)
    first.adjust(3000)
    assert first.granted_count >= 3000
    second.adjust(100)
    assert first.held_block_count + second.held_block_count == held
    assert first.free_block_count == second.free_block_count == first.budget.block_count - held
    third = attach(name, tmp_path)  # a successor finds the same
    assert third.free_block_count == first.free_block_count


def test_one_of_the_two_semaphores_removed(name: str, tmp_path: Path) -> None:
    ours = attach(name, tmp_path)
    ours.adjust(1000)
    for number in (0, 1):
        sysv_ipc.Semaphore(credits._key(name, number)).remove()
        theirs = attach(name, tmp_path)
        ours.adjust(1000)
        assert ours.granted_count >= 1000 and theirs.free_block_count == ours.budget.block_count - ours.held_block_count
