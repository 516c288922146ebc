"""A replacement of Spark's driver: `python sink_driver.py BOOTSTRAP TOPIC CHECKPOINT SEED`. Writes
batches of numbers by tasks in separate processes, through mqd/spark/writing.py; commits are
recorded in the checkpoint one batch late, as in Spark. Tasks sometimes run twice, or fail after
their rows; zombies continue when the driver is killed.

Batch n is the numbers n * BATCH .. (n + 1) * BATCH - 1. Never ends.
"""

from __future__ import annotations

import os
import random
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from mqd.coordinator.transaction.joint import JOINT_PREFIX
from mqd.spark import writing
from mqd.spark.options import KafkaSettings
from mqd.spark.sink_options import COLUMNS, SinkOptions

BATCH, TASKS, PIECES = 600, 3, 4


def options(bootstrap: str, topic: str) -> SinkOptions:
    columns = tuple(name if name in ("key", "value") else "" for name in COLUMNS)
    return SinkOptions(KafkaSettings(bootstrap), columns, topic, batch_bytes=16 << 10, transaction_timeout_ms=20_000)


def pieces(batch: int, task: int) -> Iterator[pa.RecordBatch]:
    numbers = range(batch * BATCH + task, (batch + 1) * BATCH, TASKS)
    for piece in range(PIECES):
        texts = [b"%d" % number for number in numbers[piece::PIECES]]
        yield pa.record_batch({"key": pa.array(texts, pa.binary()), "value": pa.array(texts, pa.binary())})


class Attempt:
    """A task attempt in a child process; `result()` waits for it: its child, "dropped", or None
    when it failed.
    """

    def __init__(self, found: SinkOptions, place: writing.BatchRun, batch: int, task: int, fails: bool) -> None:
        self.task = task
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reader)
            try:
                every = pieces(batch, task)
                outcome = writing.write(found, place, next(every), every)
                if not fails:
                    os.write(writer, b"dropped" if outcome.was_dropped else b"%d %d" % outcome.child)
            finally:
                os._exit(0)
        os.close(writer)
        self._reader = reader

    def result(self) -> str | tuple[int, int] | None:
        reported = os.read(self._reader, 100).decode()
        os.close(self._reader)
        os.waitpid(self.pid, 0)
        if not reported or reported == "dropped":
            return reported or None
        producer_id, epoch = reported.split()
        return int(producer_id), int(epoch)


def carry_out(found: SinkOptions, place: writing.BatchRun, batch: int, rng: random.Random) -> None:
    winners = {}
    attempts = [
        Attempt(found, place, batch, task, rng.random() < 0.1)
        for task in range(TASKS)
        for _ in range(1 + (rng.random() < 0.2))
    ]
    while attempts:
        attempt = attempts.pop(0)
        result = attempt.result()
        if result is not None:
            winners.setdefault(attempt.task, result)
        elif attempt.task not in winners and not any(one.task == attempt.task for one in attempts):
            attempts.append(Attempt(found, place, batch, attempt.task, False))
    writing.joint_transaction(found, place).commit(
        [writing.Child(*one) for one in winners.values() if one != "dropped"]
    )


def main(bootstrap: str, topic: str, checkpoint: str, seed: str) -> None:
    rng, run, noted = random.Random(int(seed)), uuid.uuid4().hex, Path(checkpoint)
    batch = int(noted.read_text()) if noted.exists() else 0
    found = options(bootstrap, topic)
    while True:
        carry_out(found, (f"{JOINT_PREFIX}{noted.name}", batch, run), batch, rng)
        batch += 1
        fresh = noted.with_suffix(".new")
        fresh.write_text(str(batch))
        fresh.rename(noted)


if __name__ == "__main__":
    main(*sys.argv[1:])
