"""A swap of compacted segments that has begun is completed although a disk temporarily refuses it."""

from __future__ import annotations

import asyncio
import errno

import pytest

from mqd.worker.compaction import until_done


class Disk:
    def __init__(self, *errors: int) -> None:
        self.errors, self.attempts, self.reports = list(errors), 0, 0

    async def attempt(self) -> None:
        self.attempts += 1
        if self.errors:
            raise OSError(self.errors.pop(0), "refused")

    def failed(self, error: OSError) -> None:
        self.reports += 1

    def run(self, closes_after: int = 100) -> None:
        asyncio.run(until_done(self.attempt, lambda: self.attempts >= closes_after, self.failed, pause_s=0))


def test_it_is_retried_until_the_disk_accepts_it() -> None:
    disk = Disk(errno.EIO, errno.ENOSPC, errno.EIO)
    disk.run()
    assert (disk.attempts, disk.reports) == (4, 1)


def test_a_partition_that_closes_does_not_wait() -> None:
    disk = Disk(*[errno.EIO] * 10)
    with pytest.raises(OSError, match="refused"):
        disk.run(closes_after=3)
    assert disk.attempts == 3


def test_the_last_step_is_not_repeated() -> None:
    disk = Disk(errno.EIO, errno.ENOENT)
    disk.run()
    assert disk.attempts == 2
    disk = Disk(errno.ENOENT)  # at the first attempt it is an error like any other
    disk.run()
    assert (disk.attempts, disk.reports) == (2, 1)
