"""Measures a disk under a broker's workload: appends that are flushed one by one, long sequential
writes, and long sequential reads.
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
GROUP_BYTES = 256 * 1024  # what many producers together send during one flush
FREE_SHARE_MIN = 0.05  # share of the file system that must stay free
PATIENCE_S = 30.0  # by how much the measurement may exceed the given time before the disk is considered hung
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class Flushes(NamedTuple):
    """Appends of `size_bytes`, each followed by fdatasync. Latencies in ms."""

    size_bytes: int
    appends: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    per_second: float


class Figures(NamedTuple):
    """`single`: appends of RECORD_BYTES; `group`: of GROUP_BYTES. Rates in bytes per second.
    `is_cached`: the reads came from the page cache, because the file system has no O_DIRECT.
    """

    single: Flushes
    group: Flushes
    write_bytes_per_s: float
    read_bytes_per_s: float
    is_cached: bool


def percentile(ordered: list[float], share: float) -> float:
    """The smallest value v such that at least this share of the values is <= v. `ordered` must be
    sorted in ascending order and not be empty.
    """
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def flushes_of(size_bytes: int, latencies_s: list[float]) -> Flushes:
    ordered = sorted(latencies_s)
    p50, p99, longest = (percentile(ordered, share) * 1000 for share in (0.5, 0.99, 1.0))
    return Flushes(size_bytes, len(ordered), p50, p99, longest, len(ordered) / max(sum(ordered), 1e-9))


class _Bench:
    """One measurement in an unlinked file: nothing is left behind if the process is killed."""

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
        # allocated like a segment, so that a flush need not write a new file length
        os.posix_fallocate(self._fd, 0, self._size_bytes)
        os.fsync(self._fd)
        write_bytes_per_s = self._measure_writes()
        single, group = self._measure_flushes(RECORD_BYTES), self._measure_flushes(GROUP_BYTES)
        is_cached = not self._bypass_cache()
        return Figures(single, group, write_bytes_per_s, self._measure_reads(), is_cached)

    def _measure_writes(self) -> float:
        """Returns bytes per second."""
        block = os.urandom(MIB)  # not compressible
        began = time.perf_counter()
        while self._written + MIB <= self._size_bytes and time.perf_counter() - began < self._stage_s:
            os.pwrite(self._fd, block, self._written)
            self._written += MIB
            if self._written % (16 * MIB) == 0:
                os.fdatasync(self._fd)  # so that the stage ends in time: the page cache is faster than the disk
        os.fdatasync(self._fd)
        return self._written / (time.perf_counter() - began)

    def _measure_flushes(self, size_bytes: int) -> Flushes:
        block = os.urandom(size_bytes)
        latencies: list[float] = []
        offset = 0
        deadline = time.perf_counter() + self._stage_s
        while (began := time.perf_counter()) < deadline or not latencies:
            os.pwrite(self._fd, block, offset)
            os.fdatasync(self._fd)
            latencies.append(time.perf_counter() - began)
            offset += size_bytes
            if offset + size_bytes > self._size_bytes:
                offset = 0
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

    def _measure_reads(self) -> float:
        """Returns bytes per second."""
        with mmap.mmap(-1, MIB) as block:  # O_DIRECT needs aligned memory
            began, offset = time.perf_counter(), 0
            while offset < self._written and time.perf_counter() - began < self._stage_s:
                offset += os.preadv(self._read_fd, [block], offset)
            return offset / max(time.perf_counter() - began, 1e-9)


def check_space(directory: Path, size_bytes: int) -> None:
    """Raises CliError."""
    status = os.statvfs(directory)
    free, reserved = status.f_bavail * status.f_frsize, int(status.f_blocks * status.f_frsize * FREE_SHARE_MIN)
    if free - size_bytes < reserved:
        raise CliError(
            f"{directory} has {human_bytes(free)} free; using {human_bytes(size_bytes)} of it would leave less than"
            f" {FREE_SHARE_MIN:.0%} of the file system free: use a smaller --size, or free space"
        )


def measure(directory: Path, size_bytes: int, seconds: float, patience_s: float = PATIENCE_S) -> Figures:
    """Takes about `seconds`, and uses `size_bytes` of space. Raises CliError, including if the disk
    hangs.
    """
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

    # a call that hangs in the kernel cannot be interrupted, but the process can exit without
    # waiting for it
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


# -- text ------------------------------------------------------------------------------------------


_KINDS: tuple[tuple[float, str], ...] = (
    (0.02, "faster than any disk: memory, or a disk that ignores flushes. Records would not survive a power cut"),
    (0.5, "as fast as an SSD whose cache survives a power cut"),
    (3.0, "a typical SSD"),
    (15.0, "slow: a desktop SSD, a network disk, or a spinning disk behind a cache"),
    (math.inf, "a spinning disk, or a shared machine: acks=all will be slow here"),
)
# a p99 above both limits is reported
SLOW_P99_FACTOR = 10.0  # times p50
SLOW_P99_MS = 50.0


def describe_flush_latency(p50_ms: float) -> str:
    return next(text for limit, text in _KINDS if p50_ms < limit)


def _ms(value: float) -> str:
    return f"{value:.3f} ms" if value < 1 else f"{value:.1f} ms"


def advice(figures: Figures, file_system: str) -> list[str]:
    single = figures.single
    if file_system in MEMORY_FILE_SYSTEMS:
        return [f"this is {file_system}, memory: nothing in it survives a restart of the machine"]
    lines = [f"the median flush takes {_ms(single.p50_ms)}: {describe_flush_latency(single.p50_ms)}"]
    lines.append(
        f"a producer that waits for each record (acks=all) gets about {1000 / single.p50_ms:,.0f} records/s here;"
        " those that do not wait share flushes, and are limited only by the disk's write rate"
    )
    if single.p99_ms > max(SLOW_P99_FACTOR * single.p50_ms, SLOW_P99_MS):
        lines.append(
            f"one flush in a hundred takes {_ms(single.p99_ms)} or more: other programs use this disk, or it is"
            " collecting garbage. Producers' p99 will be higher"
        )
    if figures.is_cached:
        lines.append("this file system has no direct I/O, so the read rate is the page cache's, not the disk's")
    return lines


def labelled_figures(figures: Figures) -> list[tuple[str, str]]:
    """Returns (label, text) of each measured figure."""
    flush_rows = []
    for flushes in (figures.single, figures.group):
        flush_rows.append(
            (
                f"append {flushes.size_bytes // 1024} KiB and flush",
                f"{flushes.per_second:,.0f}/s, p50 {_ms(flushes.p50_ms)}, p99 {_ms(flushes.p99_ms)},"
                f" longest {_ms(flushes.max_ms)}",
            )
        )
    return [
        *flush_rows,
        ("write", f"{human_bytes(figures.write_bytes_per_s)}/s"),
        ("read", f"{human_bytes(figures.read_bytes_per_s)}/s{' (from memory)' if figures.is_cached else ''}"),
    ]
