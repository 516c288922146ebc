"""The cost of compaction: CPU time of the native core over a log of 1 KiB records, without a broker; the
disk is written and flushed as in a broker.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from mqd import native
from mqd.log import segments
from mqd.protocol.records import Record, encode_batch
from mqd.worker.compaction_steps import advance

SEGMENT_BYTES = 32 << 20
RECORDS_PER_BATCH = 16
VALUE_BYTES = 960
MEGABYTES = {"none": 192, "zstd": 64}


def write_log(directory: Path, codec: str) -> tuple[list[int], int]:
    """(bases of all segments, bytes of records). Every key comes four times."""
    directory.mkdir(parents=True)
    chance, offset, size = random.Random(1), 0, 0
    count = MEGABYTES[codec] * 1_000_000 // 1024
    bases: list[int] = []
    file = None
    while offset < count:
        if file is None or file.tell() >= SEGMENT_BYTES:
            if file is not None:
                file.close()
            bases.append(offset)
            file = open(segments.segment_path(directory, offset), "wb")
        records = [
            Record(b"%030d" % offset * (VALUE_BYTES // 30), b"key-%012d" % chance.randrange(count // 4), 1000 + offset)
            for _ in range(RECORDS_PER_BATCH)
        ]
        file.write(encode_batch(records, base_offset=offset, compression=codec))
        size += 1000 * RECORDS_PER_BATCH  # as they were before they were compressed
        offset += RECORDS_PER_BATCH
    assert file is not None
    file.close()
    segments.segment_path(directory, offset).touch()
    return [*bases, offset], size


def compact(directory: Path, bases: list[int]) -> Iterator[None]:
    """The whole compaction except the swaps, which are a few renames."""
    options = native.CompactOptions(
        first_dirty_offset=0, to_clean_count=len(bases) - 1, now_ms=1 << 40, delete_retention_ms=0, map_bytes=64 << 20
    )
    compaction = native.Compaction(directory, bases, options)
    try:
        while not advance(compaction)[0]:
            yield
        for number in range(len(bases) - 1):
            compaction.group_begin(number, 1)
            while not advance(compaction)[0]:
                yield
            compaction.group_end()
    finally:
        compaction.close()


def megabytes_per_cpu_second(directory: Path, codec: str) -> float:
    """MB of uncompressed records, which both passes read and which count once."""
    target = directory / f"compaction-{codec}"
    try:
        bases, size = write_log(target, codec)
        begun = time.process_time()
        for _ in compact(target, bases):
            pass
        return size / (time.process_time() - begun) / 1e6
    finally:
        shutil.rmtree(target, ignore_errors=True)
