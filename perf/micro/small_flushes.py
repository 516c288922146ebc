"""`python -m perf.micro.small_flushes [DIRECTORY]`: how long it takes until one batch each for several
partitions is on the disk, by each way to flush them, without a broker.

A commit writes BATCH_BYTES to the file of each partition and ends when all of them are durable. The
ways alternate; every round uses new files. "Commit log" stands for a second copy of all the batches
in one file, whose flush is the only one that a response waits for.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from perf.loading import BUILD
from perf.report import number

BATCH_BYTES = 1000
COMMITS = 200  # of each way in a round
ROUNDS = 5
PARTITIONS = (1, 3, 16)
FILE_BYTES = COMMITS * BATCH_BYTES
FALLOC_FL_KEEP_SIZE = 1  # linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


class Files(NamedTuple):
    partitions: list[int]  # file descriptors
    commit_log: int
    threads: ThreadPoolExecutor


def _reserved(path: Path, size: int) -> int:
    """A new file with reserved blocks and size 0: how the log begins a segment."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    if _libc.fallocate(fd, FALLOC_FL_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size)):
        raise OSError(ctypes.get_errno(), f"fallocate {path}")
    return fd


def _written(path: Path, size: int) -> int:
    """A file whose blocks have all been written: overwriting them changes no metadata but its times."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.pwrite(fd, bytes(size), 0)
    os.fsync(fd)
    return fd


def _flush_one_by_one(files: Files, _data: bytes, _number: int) -> None:
    for fd in files.partitions:
        os.fdatasync(fd)


def _flush_in_parallel(files: Files, _data: bytes, _number: int) -> None:
    list(files.threads.map(os.fdatasync, files.partitions))


def _flush_file_system(files: Files, _data: bytes, _number: int) -> None:
    if _libc.syncfs(files.partitions[0]):
        raise OSError(ctypes.get_errno(), "syncfs")


def _flush_commit_log(files: Files, data: bytes, number_of_commit: int) -> None:
    copies = [data] * len(files.partitions)
    os.pwritev(files.commit_log, copies, number_of_commit * len(data) * len(copies))
    os.fdatasync(files.commit_log)


Create = Callable[[Path, int], int]
Flush = Callable[[Files, bytes, int], None]
WAYS: dict[str, tuple[Create, Create, Flush]] = {  # how to create a partition's file and the commit log, and to flush
    "fdatasync of each file, one after the other": (_reserved, _reserved, _flush_one_by_one),
    "fdatasync of each file, in parallel (as mqd)": (_reserved, _reserved, _flush_in_parallel),
    "fdatasync of each file, in parallel, files written before": (_written, _reserved, _flush_in_parallel),
    "syncfs": (_reserved, _reserved, _flush_file_system),
    "commit log, new file": (_reserved, _reserved, _flush_commit_log),
    "commit log, file written before": (_reserved, _written, _flush_commit_log),
}


@contextmanager
def _open(directory: Path, way: tuple[Create, Create, Flush], partitions: int) -> Iterator[Files]:
    create_partition, create_log, _ = way
    with (
        tempfile.TemporaryDirectory(dir=directory) as place,
        ThreadPoolExecutor(min(partitions, 4)) as threads,  # mqd's pool has four threads by default
    ):
        partition_fds = [create_partition(Path(place, f"{index}.log"), FILE_BYTES) for index in range(partitions)]
        commit_log = create_log(Path(place, "commit.log"), FILE_BYTES * partitions)
        os.sync()
        try:
            yield Files(partition_fds, commit_log, threads)
        finally:
            for fd in (*partition_fds, commit_log):
                os.close(fd)


def _disk_flushes(device: int) -> int:
    """Flush requests that the disk has completed; 0 where the kernel does not count them."""
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    fields = stat.read_text().split() if stat.exists() else []
    return int(fields[15]) if len(fields) > 15 else 0


def measure(directory: Path, way: tuple[Create, Create, Flush], partitions: int) -> dict[str, float]:
    """Microseconds of a commit, p50 and p99; the process's CPU-µs and the disk's flushes of a commit."""
    data = os.urandom(BATCH_BYTES)
    device = directory.stat().st_dev
    took = []
    with _open(directory, way, partitions) as files:
        flushes, cpu = _disk_flushes(device), time.process_time_ns()
        for index in range(COMMITS):
            began = time.perf_counter_ns()
            for fd in files.partitions:
                os.pwrite(fd, data, index * BATCH_BYTES)
            way[2](files, data, index)
            took.append((time.perf_counter_ns() - began) / 1000)
        cpu, flushes = time.process_time_ns() - cpu, _disk_flushes(device) - flushes
    took.sort()
    return {
        "p50": took[len(took) // 2],
        "p99": took[-len(took) // 100],
        "CPU-µs": cpu / 1000 / COMMITS,
        "flushes": flushes / COMMITS,
    }


def main(words: list[str]) -> int:
    place = Path(words[0]) if words else BUILD
    place.mkdir(parents=True, exist_ok=True)
    measured: dict[tuple[int, str], list[dict[str, float]]] = {}
    for number_of_round in range(ROUNDS):
        for partitions in PARTITIONS:
            for name, way in WAYS.items():
                measured.setdefault((partitions, name), []).append(measure(place, way, partitions))
        print(f"round {number_of_round + 1} of {ROUNDS}", file=sys.stderr)
    columns = ("p50", "p99", "CPU-µs", "flushes")
    print("partitions " + " ".join(f"{column:>9}" for column in columns))
    for (partitions, name), values in measured.items():
        medians = [number(statistics.median(one[column] for one in values)) for column in columns]
        print(f"{partitions:>10} " + " ".join(f"{value:>9}" for value in medians) + f"  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
