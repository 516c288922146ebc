"""Credits: budgets for the broker's max.connections and for the memory of its local clients. Each
is a SysV semaphore from which the workers lease blocks with SEM_UNDO.

When a worker dies, for whatever reason, the kernel returns its blocks. There is no bookkeeping that
could be wrong.

K1  the semaphore counts the blocks that no worker holds; number of blocks x block size never
    exceeds max.connections.
K2  for each keeper process (`generation`) the first worker that attaches takes a lock file and
    recreates the semaphore; a second semaphore holds the generation. A keeper starts only when
    every worker of the previous one is gone, so no process holds credits of the previous
    generation.
K3  a worker may hold connections up to `granted_count`; it leases in advance, because connections
    arrive faster than it checks, and returns unused blocks when the budget runs out, so that no
    worker starves next to an idle one.

These rules are stated for connections; they apply equally to memory (local.memory.max.bytes), which
is counted in MiB.

K4  when the semaphores are removed under a running broker (systemd's RemoveIPC=, ipcrm), the first
    worker that notices recreates them, and each worker acquires the blocks that it holds from the
    new semaphore.

Keys are derived from the broker's shared-memory name. SysV semaphores outlive processes: after a
kill -9 of the whole broker its four small semaphores remain, and the next start reuses them; the
keeper removes them at its clean shutdown (`remove`).
"""

import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import sysv_ipc

BLOCK_SIZE_MAX = 64
_SEMAPHORE_MAX = 32767  # SEMVMX
_MODE = 0o600


class Budget(msgspec.Struct, frozen=True):
    """The division of max.connections into blocks. Small budgets have small blocks, so that every
    worker gets some.
    """

    block_size: int  # connections per block
    block_count: int

    @classmethod
    def of(cls, connection_count_max: int, worker_count: int) -> "Budget":
        block_size = max(1, min(BLOCK_SIZE_MAX, connection_count_max // (8 * worker_count)))
        return cls(block_size, max(1, min(connection_count_max // block_size, _SEMAPHORE_MAX)))

    @property
    def connection_capacity(self) -> int:
        """The whole budget."""
        return self.block_size * self.block_count

    def target_block_count(self, connection_count: int, worker_count: int, is_exhausted: bool) -> int:
        """Returns how many blocks a worker with this many connections should hold. That is most of
        its fair share, because connections can arrive faster than the lease is adjusted. A worker
        that uses more holds the used blocks and some headroom. If the budget is exhausted, a worker
        holds only the used blocks and one more.
        """
        used_block_count = -(-connection_count // self.block_size)
        if is_exhausted:
            return min(used_block_count + 1, self.block_count)
        share = self.block_count / worker_count
        return max(1, min(max(int(share * 3 / 4), used_block_count + max(1, int(share / 8))), self.block_count))


def _key(name: str, number: int) -> int:
    """A SysV key, 31 bits, never 0 (IPC_PRIVATE)."""
    return int.from_bytes(hashlib.sha256(f"{name}:credits:{number}".encode()).digest()[:4], "big") & 0x7FFFFFFF | 1 << 8


class Credits:
    """One worker's lease. Not thread-safe."""

    def __init__(self, open_semaphore: Callable[[bool], sysv_ipc.Semaphore], budget: Budget, worker_count: int):
        """`open_semaphore(had_credits)`: see _open_credits."""
        self._open_semaphore = open_semaphore
        self._semaphore = open_semaphore(False)
        self.budget = budget
        self._worker_count = worker_count
        self.held_block_count = 0

    @classmethod
    def attach(
        cls,
        name: str,
        generation: int,
        lock_path: Path,
        connection_count_max: int,
        worker_count: int,
        property_name: str = "max.connections",
    ) -> "Credits":
        """`name`: the name of the broker's control segment, or local_memory_name() of it. `lock_path`:
        a file that the workers of one broker share. Raises OSError; its message says how to fix
        the problem.
        """
        budget = Budget.of(connection_count_max, worker_count)

        def open_semaphore(had_credits: bool) -> sysv_ipc.Semaphore:
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                return _open_credits(name, generation, budget.block_count, had_credits)
            except sysv_ipc.Error as error:
                raise OSError(
                    f"cannot get the semaphore of {property_name}: {error}; see the limits in /proc/sys/kernel/sem"
                    " and `ipcs -s`"
                ) from error
            finally:
                os.close(fd)

        return cls(open_semaphore, budget, worker_count)

    @property
    def granted_count(self) -> int:
        """Number of connections that this worker may hold now."""
        return self.held_block_count * self.budget.block_size

    @property
    def free_block_count(self) -> int:
        return self._semaphore.value

    def adjust(self, connection_count: int) -> bool:
        """Leases or returns blocks; True if `granted_count` changed. Never returns blocks that
        `connection_count` needs. If the semaphore is gone it is recreated (K4); until that
        succeeds, the held blocks stay valid.
        """
        previous_count = self.held_block_count
        try:
            self._adjust(connection_count)
        except sysv_ipc.ExistentialError:
            try:
                self._semaphore = self._open_semaphore(True)
                self.held_block_count = 0
                self._acquire(previous_count)
                self._adjust(connection_count)
            except (OSError, sysv_ipc.Error):
                self.held_block_count = self.held_block_count or previous_count
        return self.held_block_count != previous_count

    def _adjust(self, connection_count: int) -> None:
        target_block_count = self.budget.target_block_count(connection_count, self._worker_count, is_exhausted=False)
        if self.held_block_count < target_block_count:
            self._acquire(target_block_count - self.held_block_count)
        # hysteresis: do not adjust with every connection
        if self.held_block_count > target_block_count + target_block_count // 4:
            self._release(self.held_block_count - target_block_count)
        if self.free_block_count == 0:
            target_block_count = self.budget.target_block_count(connection_count, self._worker_count, is_exhausted=True)
            self._release(max(0, self.held_block_count - target_block_count))

    def _acquire(self, count: int) -> None:
        """Acquires `count` blocks, or as many as are available."""
        while count > 0:
            try:
                self._semaphore.acquire(None, count)
            except sysv_ipc.BusyError:
                count = min(count - 1, self.free_block_count)
                continue
            self.held_block_count += count
            return

    def _release(self, count: int) -> None:
        if count > 0:
            self._semaphore.release(count)
            self.held_block_count -= count

    def close(self) -> None:
        """Returns all blocks. If the semaphore is gone, there is nothing to return."""
        try:
            self._release(self.held_block_count)
        except sysv_ipc.ExistentialError:
            self.held_block_count = 0


def _open(key: int, initial_value: int) -> tuple[sysv_ipc.Semaphore, bool]:
    """Returns (semaphore, whether this call created it). Called under the lock, so no process sees
    the semaphore between its creation and its initialization.
    """
    try:
        return sysv_ipc.Semaphore(key, sysv_ipc.IPC_CREX, _MODE, initial_value), True
    except sysv_ipc.ExistentialError:
        return sysv_ipc.Semaphore(key), False


def _open_credits(name: str, generation: int, block_count: int, had_credits: bool) -> sysv_ipc.Semaphore:
    """Returns the credits of this keeper process, and creates them if needed (K2). `had_credits`:
    this worker had credits before. If the semaphores now belong to a later keeper, it must not
    replace them: ExistentialError is raised.
    """
    mark = generation % _SEMAPHORE_MAX
    # no generation has the mark _SEMAPHORE_MAX: this value means that the semaphore was created, but
    # not set yet
    generation_semaphore, _ = _open(_key(name, 1), _SEMAPHORE_MAX)
    if had_credits and generation_semaphore.value not in (mark, _SEMAPHORE_MAX):
        raise sysv_ipc.ExistentialError(f"the semaphores belong to another run of the broker, not to {generation}")
    credits, is_new = _open(_key(name, 0), block_count)
    if generation_semaphore.value != mark and not is_new:
        credits.remove()
        credits, _ = _open(_key(name, 0), block_count)
    generation_semaphore.value = mark  # set last: if this process dies before this, the next worker recreates both
    credits.undo, credits.block = True, False
    return credits


def local_memory_name(name: str) -> str:
    """The name for the credits of local clients' memory, which are separate from those for
    connections.
    """
    return f"{name}:local"


def remove(name: str) -> None:
    """Removes the semaphores at the clean shutdown of a broker. A process that still holds credits
    no longer needs to return them.
    """
    for semaphore_name in (name, local_memory_name(name)):
        for number in (0, 1):
            try:
                sysv_ipc.Semaphore(_key(semaphore_name, number)).remove()
            except sysv_ipc.ExistentialError:
                pass
