"""A producer or a consumer of the long stream through shared memory, as a separate process: every
byte is derived from partition and offset, and is checked.

    python -m tests.crash.client.local_stream produce|consume '{"bootstrap":
    "127.0.0.1:9092", "topic": "t", "partition": 0, "bytes": 1000000, "progress": FILE, "idempotent": true}'

Each partition has one producer, so a record's offset is its number. Records come in chunks of
CHUNK_RECORDS of one size, which follows from the chunk's number; 64-bit word j of record n of
partition p is n * A + j * B + p * C (mod 2^64). A stream is the fewest chunks that make `bytes`.
`progress` is a file of unsigned 64-bit counters, one of bytes produced and one of bytes consumed
for each partition: producers stay within LEAD_BYTES of their consumer, so that retention may delete
what was read.

Prints one line of JSON: records, bytes, seconds, cpu_seconds, transport. Exits with 1 and reports
the position of the first wrong byte.
"""

from __future__ import annotations

import json
import mmap
import resource
import sys
import time
from typing import Any

import numpy as np

from mqd import Consumer, Producer, TopicPartition

CHUNK_RECORDS = 256
WORDS_MAX = 512
LEAD_BYTES = 192 << 20
STALLED_SECONDS = 60.0
_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)


def words_of(chunk: int) -> int:
    """The size of a chunk's records, in words of eight bytes."""
    return 1 + (chunk * 2654435761 >> 7) % WORDS_MAX


def chunks_of(bytes_least: int) -> int:
    total = chunk = 0
    while total < bytes_least:
        total += words_of(chunk) * 8 * CHUNK_RECORDS
        chunk += 1
    return chunk


def pattern(partition: int, first: int, count: int, words: int) -> np.ndarray:
    """uint64[count, words]: the values of records first ... first + count - 1."""
    with np.errstate(over="ignore"):
        rows = np.arange(first, first + count, dtype=np.uint64) * _A + np.uint64(partition) * _C
        return rows[:, None] + (np.arange(words, dtype=np.uint64) * _B)[None, :]


class WrongByte(Exception):
    """The bytes read are not those written."""


class Progress:
    def __init__(self, path: str, partition: int) -> None:
        with open(path, "r+b") as file:
            self._counters = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint64)
        self._partition = partition

    def produced(self, total: int) -> None:
        self._counters[2 * self._partition] = total

    def consumed(self, total: int) -> None:
        self._counters[2 * self._partition + 1] = total

    @property
    def lead(self) -> int:
        return int(self._counters[2 * self._partition]) - int(self._counters[2 * self._partition + 1])


def produce(settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
    partition, chunks, total, reported = settings["partition"], chunks_of(settings["bytes"]), 0, 0

    def on_delivery(error: Any, delivery: Any) -> None:
        nonlocal reported
        if error is not None:
            raise SystemExit(f"a batch failed: {error}")
        reported += delivery.count

    producer = Producer(
        {
            "bootstrap.servers": settings["bootstrap"],
            "client.id": f"stream-p{partition}",
            "transport": "shm",
            "enable.idempotence": settings["idempotent"],
            "linger.ms": 5,
            "batch.size": 262_144,
        }
    )
    for chunk in range(chunks):
        words = words_of(chunk)
        values = (
            pattern(partition, chunk * CHUNK_RECORDS, CHUNK_RECORDS, words)
            .view(np.uint8)
            .reshape(CHUNK_RECORDS, words * 8)
        )
        taken = producer.produce_batch(settings["topic"], values, partition=partition, on_delivery=on_delivery)
        assert taken == CHUNK_RECORDS
        total += values.nbytes
        progress.produced(total)
        patience = time.monotonic() + STALLED_SECONDS
        while producer.poll(0.01 if progress.lead > LEAD_BYTES else 0) or progress.lead > LEAD_BYTES:
            if time.monotonic() > patience:
                raise SystemExit(f"the consumer of partition {partition} stands still, {progress.lead} bytes behind")
    left = producer.flush(STALLED_SECONDS)
    if left or reported != chunks * CHUNK_RECORDS:
        raise SystemExit(f"{left} records are outstanding, {reported} of {chunks * CHUNK_RECORDS} were acknowledged")
    transport = producer.transport
    producer.close()
    return {"records": reported, "bytes": total, "transport": transport}


def check(partition: int, offsets: np.ndarray, values: Any, due: int) -> int:
    """Checks every byte of a batch whose first record must be number `due`; returns the bytes of
    its values. Raises WrongByte.
    """
    count = len(offsets)
    if not np.array_equal(offsets, np.arange(due, due + count)):
        raise WrongByte(f"partition {partition}: offsets {offsets[:3]}... where {due} is due")
    total = 0
    for chunk in range(due // CHUNK_RECORDS, (due + count - 1) // CHUNK_RECORDS + 1):
        first, last = max(due, chunk * CHUNK_RECORDS), min(due + count, (chunk + 1) * CHUNK_RECORDS)
        part, words = values[first - due : last - due], words_of(chunk)
        if not (part.sizes == words * 8).all():
            raise WrongByte(
                f"partition {partition} from offset {first}: sizes {np.unique(part.sizes)} where {words * 8} is due"
            )
        found = part.to_numpy().view(np.uint64).reshape(last - first, words)
        expected = pattern(partition, first, last - first, words)
        if not np.array_equal(found, expected):
            row, word = np.argwhere(found != expected)[0]
            raise WrongByte(
                f"partition {partition} offset {first + row} word {word}: {found[row, word]:#x} where"
                f" {expected[row, word]:#x} is due"
            )
        total += found.nbytes
    return total


def consume(settings: dict[str, Any], progress: Progress) -> dict[str, Any]:
    partition, expected, total, due = settings["partition"], chunks_of(settings["bytes"]) * CHUNK_RECORDS, 0, 0
    consumer = Consumer(
        {
            "bootstrap.servers": settings["bootstrap"],
            "client.id": f"stream-c{partition}",
            "group.id": f"stream-{partition}",
            "transport": "shm",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(settings["topic"], partition, 0)])
    while due < expected:
        batch = consumer.consume_batch(4096, STALLED_SECONDS)
        if batch is None:
            raise SystemExit(f"partition {partition} gives nothing behind offset {due} of {expected}")
        with batch:
            total += check(partition, batch.offsets, batch.values, due)
            due += len(batch)
        progress.consumed(total)
    transport = consumer.transport
    consumer.close()
    return {"records": due, "bytes": total, "transport": transport}


def main() -> int:
    what, settings = sys.argv[1], json.loads(sys.argv[2])
    began = time.monotonic()
    progress = Progress(settings["progress"], settings["partition"])
    try:
        done = (produce if what == "produce" else consume)(settings, progress)
    except WrongByte as error:
        print(error, file=sys.stderr)
        return 1
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(
        json.dumps(
            {
                **done,
                "seconds": round(time.monotonic() - began, 2),
                "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
