"""`python -m perf.micro.append_ways [DIRECTORY]`: the cost of appending to a segment file by each way
that the kernel offers, without a broker.

Each way writes FILE_BYTES in writes of 64 KiB, as the log does, with an fdatasync after every 8 MiB,
unless it says otherwise: in the writing thread, or in another one as in the broker.
The ways take turns; each round uses new memory for the page cache where a way needs it. A way that
the file system refuses is named and left out.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from perf.loading import BUILD
from perf.report import number

FILE_BYTES = 256 << 20
WRITE_BYTES = 64 << 10
FLUSH_BYTES = 8 << 20
RARE_FLUSH_BYTES = 64 << 20
SHIFT_BYTES = 1000  # of unaligned writes, from a page boundary
ROUNDS = 5
RWF_DONTCACHE = 0x80  # linux/fs.h, since Linux 6.14
SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h: starts to write dirty pages back, and does not wait
LIBC = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The file system or the kernel does not offer this way."""


def _new_file(path: Path, flags: int = 0) -> int:
    """A new file with reserved blocks, as the log makes its segments."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    _reserve(path)
    return fd


def _reserve(path: Path) -> None:
    """Reserves blocks and leaves the size at 0 (FALLOC_FL_KEEP_SIZE)."""
    done = subprocess.run(["fallocate", "-n", "-l", str(FILE_BYTES), str(path)], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip())


def _recycled_file(path: Path, flags: int = 0) -> int:
    """A file of an earlier turn, fully written: a recycled segment."""
    if not path.exists() or path.stat().st_size != FILE_BYTES:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(fd, 0, FILE_BYTES)
        block = b"\1" * (1 << 20)
        for at in range(0, FILE_BYTES, len(block)):
            os.pwrite(fd, block, at)
        os.fsync(fd)
        os.close(fd)
    return os.open(path, os.O_RDWR | flags)


def _uncached_file(path: Path) -> int:
    fd = _recycled_file(path)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd


def _zeroed_file(path: Path) -> int:
    """A new file, filled with zeroes: an append changes neither its size nor its extents."""
    path.unlink(missing_ok=True)
    return _recycled_file(path)


def _write_buffered(fd: int, data: memoryview, offset: int) -> None:
    os.pwrite(fd, data, offset)


def _write_uncached(fd: int, data: memoryview, offset: int) -> None:
    try:
        os.pwritev(fd, [data], offset, RWF_DONTCACHE)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            raise Refused("RWF_DONTCACHE") from error
        raise


def _write_unaligned(fd: int, data: memoryview, offset: int) -> None:
    """As the log writes: batches end anywhere, so each write ends inside a page."""
    os.pwrite(fd, data[: FILE_BYTES - offset - SHIFT_BYTES], offset + SHIFT_BYTES)


def _write_padded(fd: int, data: memoryview, offset: int) -> None:
    """The rest of the last page is overwritten too, so that the kernel need not read it first."""
    end = offset + WRITE_BYTES + SHIFT_BYTES
    rest = bytes(-end % mmap.PAGESIZE) if end < FILE_BYTES else b""
    os.pwritev(fd, [data[: FILE_BYTES - offset - SHIFT_BYTES], rest], offset + SHIFT_BYTES)


class Flushes:
    """How a way brings the bytes to the disk. The base class: fdatasync in the writing thread."""

    def after_write(self, fd: int, end: int) -> None:
        """`end`: where the bytes written so far end."""
        if end % FLUSH_BYTES == 0:
            os.fdatasync(fd)

    def finish(self, fd: int) -> None:
        """Waits until all bytes are on the disk."""


class DroppedPages(Flushes):
    def after_write(self, fd: int, end: int) -> None:
        super().after_write(fd, end)
        if end % FLUSH_BYTES == 0:
            os.posix_fadvise(fd, end - FLUSH_BYTES, FLUSH_BYTES, os.POSIX_FADV_DONTNEED)


class InThread(Flushes):
    """As in the broker: one fdatasync at a time, in another thread, after each `flush_bytes`."""

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        self._flush_bytes = flush_bytes
        self._pool = ThreadPoolExecutor(1)
        self._current: Future[None] | None = None

    def after_write(self, fd: int, end: int) -> None:
        if end % self._flush_bytes == 0 and (self._current is None or self._current.done()):
            self._current = self._pool.submit(os.fdatasync, fd)

    def finish(self, fd: int) -> None:
        self._pool.shutdown()
        os.fdatasync(fd)


class StartedEarly(InThread):
    """Write-back begins after each FLUSH_BYTES; the rarer flushes find little left to write."""

    def __init__(self) -> None:
        super().__init__(RARE_FLUSH_BYTES)

    def after_write(self, fd: int, end: int) -> None:
        if end % FLUSH_BYTES == 0:
            start = ctypes.c_int64(end - FLUSH_BYTES)
            if LIBC.sync_file_range(fd, start, ctypes.c_int64(FLUSH_BYTES), SYNC_FILE_RANGE_WRITE) < 0:
                raise Refused(os.strerror(ctypes.get_errno()))
        super().after_write(fd, end)


Way = tuple[Callable[[Path], int], Callable[[int, memoryview, int], None], Callable[[], Flushes]]
WAYS: dict[str, Way] = {
    "new file (as mqd)": (_new_file, _write_buffered, Flushes),
    "new file, flushed by another thread": (_new_file, _write_buffered, InThread),
    "new file, flushed by another thread after 64 MiB": (
        _new_file,
        _write_buffered,
        lambda: InThread(RARE_FLUSH_BYTES),
    ),
    "the same, sync_file_range after 8 MiB": (_new_file, _write_buffered, StartedEarly),
    "file of zeroes, flushed by another thread": (_zeroed_file, _write_buffered, InThread),
    "new file, pages dropped after each flush": (_new_file, _write_buffered, DroppedPages),
    "new file, RWF_DONTCACHE": (_new_file, _write_uncached, Flushes),
    "new file, O_DIRECT": (lambda path: _new_file(path, os.O_DIRECT), _write_buffered, Flushes),
    "recycled file, pages in the cache": (_recycled_file, _write_buffered, Flushes),
    "recycled file, no pages in the cache": (_uncached_file, _write_buffered, Flushes),
    "new file, unaligned writes": (_new_file, _write_unaligned, Flushes),
    "recycled file, pages in the cache, unaligned writes": (_recycled_file, _write_unaligned, Flushes),
    "recycled file, no pages in the cache, unaligned writes": (_uncached_file, _write_unaligned, Flushes),
    "recycled file, no pages in the cache, writes padded to a page": (_uncached_file, _write_padded, Flushes),
    "recycled file, O_DIRECT": (lambda path: _recycled_file(path, os.O_DIRECT), _write_buffered, Flushes),
}


def _busy_s() -> float:
    """CPU time of the whole machine, which includes kernel threads that work for the file."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:8]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def measure(way: Way, path: Path) -> dict[str, float]:
    """CPU-µs a MiB of writes, of flushes and of the whole machine; µs of a write, p50 and p99.9."""
    opened, write, make_flushes = way
    flushes = make_flushes()
    data = memoryview(mmap.mmap(-1, WRITE_BYTES))  # aligned, for O_DIRECT
    data[:] = os.urandom(WRITE_BYTES)
    fd = opened(path)
    try:
        took, write_ns, flush_ns, machine = [], 0, 0, _busy_s()
        for at in range(0, FILE_BYTES, WRITE_BYTES):
            began, cpu = time.perf_counter_ns(), time.thread_time_ns()
            write(fd, data, at)
            took.append((time.perf_counter_ns() - began) / 1000)
            write_ns += time.thread_time_ns() - cpu
            cpu = time.thread_time_ns()
            flushes.after_write(fd, at + WRITE_BYTES)
            flush_ns += time.thread_time_ns() - cpu
        flushes.finish(fd)
        machine = _busy_s() - machine
    finally:
        os.close(fd)
    mib = FILE_BYTES / (1 << 20)
    took.sort()
    return {
        "write": write_ns / 1000 / mib,
        "flush": flush_ns / 1000 / mib,
        "machine": machine * 1e6 / mib,
        "p50": took[len(took) // 2],
        "p99.9": took[-len(took) // 1000],
    }


def main(words: list[str]) -> int:
    place = Path(words[0]) if words else BUILD
    place.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=place) as directory:
        for number_of_round in range(ROUNDS):
            for index, (name, way) in enumerate(WAYS.items()):
                if name not in found:
                    continue
                try:
                    found[name].append(measure(way, Path(directory) / f"way-{index}"))
                except (Refused, OSError) as error:
                    print(f"{name}: {error}")
                    del found[name]
            print(f"round {number_of_round + 1} of {ROUNDS}", file=sys.stderr)
    columns = ("write", "flush", "machine", "p50", "p99.9")
    print(f"{'CPU-µs a MiB: write':>20} {'flush':>9} {'machine':>9} {'µs: p50':>9} {'p99.9':>9}")
    for name, values in found.items():
        medians = [number(statistics.median(one[column] for one in values)) for column in columns]
        print(f"{medians[0]:>20} " + " ".join(f"{value:>9}" for value in medians[1:]) + f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
