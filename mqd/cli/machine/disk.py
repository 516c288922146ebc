"""Measures how fast a disk is for the work of a broker: appends that are flushed one by one, long writes,
long reads.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from mqd.cli.common import CliError, human_bytes

MIB = 1 << 20
RECORD_BYTES = 4096  # one small batch
COMMIT_BYTES = 256 * 1024  # bytes that many producers sent during one flush
FREE_AFTER = 0.05  # share of the file system that stays free
PATIENCE_S = 30.0  # how long the measurement may take beyond the given time before the disk counts as hanging
MEMORY = ("tmpfs", "ramfs")


class Flushes(NamedTuple):
    """Appends of `size_bytes`, each followed by fdatasync. Latencies in ms."""

    size_bytes: int
    appends: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    per_second: float


class Figures(NamedTuple):
    """Rates in bytes a second. `is_cached`: the bytes read came from memory, because there is no O_DIRECT."""

    single: Flushes
    commit: Flushes
    write_bytes_s: float
    read_bytes_s: float
    is_cached: bool


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed. `ordered` ascends and
    is not empty.
    """
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def flushes_of(size_bytes: int, latencies_s: list[float]) -> Flushes:
    ordered = sorted(latencies_s)
    p50, p99, longest = (percentile(ordered, share) * 1000 for share in (0.5, 0.99, 1.0))
    return Flushes(size_bytes, len(ordered), p50, p99, longest, len(ordered) / max(sum(ordered), 1e-9))


class _Bench:
    """One measurement in a file that has no name: nothing is left when the process is killed."""

    def __init__(self, directory: Path, size_bytes: int, seconds: float) -> None:
        self._stage_s = seconds / 4
        self._size_bytes = size_bytes
        path = directory / f".mqd-bench-disk-{os.getpid()}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        self._read_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._written = 0

    def close(self) -> None:
        os.close(self._fd)
        os.close(self._read_fd)

    def run(self) -> Figures:
        os.posix_fallocate(self._fd, 0, self._size_bytes)  # like a segment, so that a flush writes no new length
        os.fsync(self._fd)
        write_bytes_s = self._write()
        single, commit = self._flushes(RECORD_BYTES), self._flushes(COMMIT_BYTES)
        is_cached = not self._bypass_cache()
        return Figures(single, commit, write_bytes_s, self._read(), is_cached)

    def _write(self) -> float:
        block = os.urandom(MIB)  # not compressible
        began = time.perf_counter()
        while self._written + MIB <= self._size_bytes and time.perf_counter() - began < self._stage_s:
            os.pwrite(self._fd, block, self._written)
            self._written += MIB
            if self._written % (16 * MIB) == 0:
                os.fdatasync(self._fd)  # so that the stage ends in time: the page cache is faster than the disk
        os.fdatasync(self._fd)
        return self._written / (time.perf_counter() - began)

    def _flushes(self, size_bytes: int) -> Flushes:
        block = os.urandom(size_bytes)
        latencies: list[float] = []
        place = 0
        ends = time.perf_counter() + self._stage_s
        while (began := time.perf_counter()) < ends or not latencies:
            os.pwrite(self._fd, block, place)
            os.fdatasync(self._fd)
            latencies.append(time.perf_counter() - began)
            place += size_bytes
            if place + size_bytes > self._size_bytes:
                place = 0
        return flushes_of(size_bytes, latencies)

    def _bypass_cache(self) -> bool:
        """Makes reads bypass the page cache. False: the file system has no O_DIRECT."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            direct = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return False
        os.dup2(direct, self._read_fd, inheritable=False)
        os.close(direct)
        return True

    def _read(self) -> float:
        with mmap.mmap(-1, MIB) as block:  # O_DIRECT needs aligned memory
            began, place = time.perf_counter(), 0
            while place < self._written and time.perf_counter() - began < self._stage_s:
                place += os.preadv(self._read_fd, [block], place)
            return place / max(time.perf_counter() - began, 1e-9)


def check_space(directory: Path, size_bytes: int) -> None:
    """Raises CliError."""
    status = os.statvfs(directory)
    free, kept = status.f_bavail * status.f_frsize, int(status.f_blocks * status.f_frsize * FREE_AFTER)
    if free - size_bytes < kept:
        raise CliError(
            f"{directory} has {human_bytes(free)} free, and {human_bytes(size_bytes)} more would leave less than"
            f" {FREE_AFTER:.0%} of it: use --size, or free space"
        )


def measure(directory: Path, size_bytes: int, seconds: float, patience_s: float = PATIENCE_S) -> Figures:
    """Takes about `seconds`, and `size_bytes` of space meanwhile. Raises CliError, also if the disk hangs."""
    outcome: list[Figures | OSError] = []

    def run() -> None:
        try:
            bench = _Bench(directory, size_bytes, seconds)
            try:
                outcome.append(bench.run())
            finally:
                bench.close()
        except OSError as error:
            outcome.append(error)

    # a call that hangs in the kernel cannot be interrupted, but the process can end without it
    thread = threading.Thread(target=run, name="bench-disk", daemon=True)
    thread.start()
    thread.join(seconds + patience_s)
    if not outcome:
        raise CliError(
            f"{directory}: the disk has not completed a write or flush within {patience_s:.0f} s; dmesg may show why."
            " A broker would fail there"
        )
    if isinstance(outcome[0], OSError):
        raise CliError(f"{directory}: {outcome[0].strerror}") from outcome[0]
    return outcome[0]


# -- in words --------------------------------------------------------------------------------------


_KINDS: tuple[tuple[float, str], ...] = (
    (0.02, "faster than any disk: memory, or a disk that ignores flushes. Records would not survive a power cut"),
    (0.5, "as fast as an SSD whose cache survives a power cut"),
    (3.0, "a usual SSD"),
    (15.0, "slow: an SSD for desktops, a network disk, or a spinning disk behind a cache"),
    (math.inf, "a spinning disk, or a machine that others use: acks=all will be slow here"),
)
SLOW_P99 = 10.0  # times p50
P99_MS_MIN = 50.0


def kind(p50_ms: float) -> str:
    return next(text for limit, text in _KINDS if p50_ms < limit)


def _ms(value: float) -> str:
    return f"{value:.3f} ms" if value < 1 else f"{value:.1f} ms"


def advice(figures: Figures, file_system: str) -> list[str]:
    single = figures.single
    if file_system in MEMORY:
        return [f"this is {file_system}, memory: nothing in it survives a restart of the machine"]
    found = [f"a flush takes {_ms(single.p50_ms)} in the median: {kind(single.p50_ms)}"]
    found.append(
        f"a producer that waits for each record (acks=all) gets about {1000 / single.p50_ms:,.0f} records/s here;"
        " those that do not wait share flushes and get as much as the disk writes"
    )
    if single.p99_ms > max(SLOW_P99 * single.p50_ms, P99_MS_MIN):
        found.append(
            f"one flush in a hundred takes {_ms(single.p99_ms)} or more: other programs use this disk, or it collects"
            " garbage. Producers' p99 will be above that"
        )
    if figures.is_cached:
        found.append("this file system has no direct I/O, so the read rate is that of memory, not of the disk")
    return found


def rows(figures: Figures) -> list[tuple[str, str]]:
    found = []
    for one in (figures.single, figures.commit):
        found.append(
            (
                f"append {one.size_bytes // 1024} KiB and flush",
                f"{one.per_second:,.0f}/s, p50 {_ms(one.p50_ms)}, p99 {_ms(one.p99_ms)}, longest {_ms(one.max_ms)}",
            )
        )
    return [
        *found,
        ("write", f"{human_bytes(figures.write_bytes_s)}/s"),
        ("read", f"{human_bytes(figures.read_bytes_s)}/s{' (from memory)' if figures.is_cached else ''}"),
    ]
