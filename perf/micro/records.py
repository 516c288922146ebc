"""The cost of validating produced batches (record.validation), in nanoseconds of CPU per record:
uncompressed ones as a worker walks them, compressed ones as the acceptor decompresses and walks
them.

    python perf/micro/records.py             a table (best of ROUNDS; one core)
    python perf/micro/records.py --json      one JSON object
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable

from mqd import native
from mqd.acceptor.checks import check_records
from mqd.protocol.records import HEADER_BYTES, Record, encode_batch

ROUNDS = 25
BATCH_BYTES = 16384  # the default batch.size of most clients
CODECS = ("gzip", "snappy", "lz4", "zstd")
SHAPES = {
    "20-byte values": (20, False, False),
    "100-byte values": (100, False, False),
    "100-byte values, keys": (100, True, False),
    "100-byte values, keys, two headers": (100, True, True),
    "1,000-byte values": (1000, False, False),
}


def batch(value_bytes: int, keyed: bool, has_headers: bool, compression: str = "none") -> tuple[bytes, int]:
    """A batch of about BATCH_BYTES before compression, with values that halve when they are compressed;
    and its number of records.
    """
    random_bytes = random.Random(1)
    count = max(1, BATCH_BYTES // (value_bytes + 10))
    records = [
        Record(
            value=random_bytes.randbytes(value_bytes // 2) + bytes(value_bytes - value_bytes // 2),
            key=b"key-%06d" % number if keyed else None,
            timestamp_ms=number,
            headers=[("trace", b"0123456789abcdef"), ("type", b"reading")] if has_headers else [],
        )
        for number in range(count)
    ]
    return encode_batch(records, compression=compression), count


def best_ns(work: Callable[[], object], count: int) -> float:
    """The best CPU time of this thread, in ns for each record."""
    best, repeats = float("inf"), max(1, 20_000 // count)
    for _ in range(ROUNDS):
        begun = time.thread_time_ns()
        for _ in range(repeats):
            work()
        best = min(best, (time.thread_time_ns() - begun) / repeats / count)
    return round(best, 1)


def walk_ns(data: bytes, count: int) -> float:
    """ns for each record, without the overhead of the call from Python, which the worker does not have."""
    records = memoryview(data)[HEADER_BYTES:]
    empty = best_ns(lambda: native.validate_records(b"", 0, 0), count)
    return round(best_ns(lambda: native.validate_records(records, count, 0), count) - empty, 1)


def measure() -> dict[str, float]:
    costs = {f"uncompressed, {name}": walk_ns(*batch(*shape)) for name, shape in SHAPES.items()}
    for codec in CODECS:
        for value_bytes in (100, 1000):
            data, count = batch(value_bytes, False, False, codec)
            costs[f"{codec}, {value_bytes:,}-byte values"] = best_ns(
                lambda data=data: check_records(data, False), count
            )
    return costs


def main() -> None:
    costs = measure()
    if "--json" in sys.argv[1:]:
        print(json.dumps(costs))
        return
    for name, ns in costs.items():
        print(f"{ns:10,.1f} ns a record   {name}")


if __name__ == "__main__":
    main()
