"""Reading by format("mqd"): records of a topic into Spark's noop sink, and its steps one by one.

    decode        batches in memory into Arrow, in this process: no broker, no Spark
    local, tcp    an executor's whole task in this process, without Spark: mapped segments, Fetch
    spark         spark.read...write.format("noop"), local[2]; `connector`: the same by Spark's own
                  connector for Kafka, from the same broker

CPU seconds per million rows are shown beside the rates: on a machine with other load only they can be
compared. `spark` counts the JVM and its Python workers; the broker's CPU time is shown separately.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
KEY_BYTES = 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Figure(NamedTuple):
    """`cpu_s`: user and system time of the reading processes; `broker_cpu_s`: of the broker."""

    name: str
    rows: int
    wall_s: float
    cpu_s: float
    broker_cpu_s: float = 0.0

    def line(self) -> str:
        million = self.rows / 1e6
        return (
            f"{self.name:<28} {million / self.wall_s:7.2f} M rows/s   {self.cpu_s / million:6.3f} CPU-s per million"
            f" rows   broker {self.broker_cpu_s / million:6.3f}"
        )


def children_of(pid: int) -> Iterator[int]:
    """The process and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = [int(word) for word in task.read_text().split()]
        except OSError:
            continue
        for child in below:
            yield from children_of(child)


def adopt_orphans() -> None:
    """From now on descendants whose parent ends become children of this process, so that their CPU time
    can be counted. Linux (prctl(2), PR_SET_CHILD_SUBREAPER).
    """
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def cpu_seconds(pid: int) -> float:
    """CPU time of the process and its descendants, including those that ended and were waited for."""
    total = 0
    for one in children_of(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(fields[place]) for place in (11, 12, 13, 14))
    return total / _TICKS_PER_S


def create(bootstrap: str, topic: str, partitions: int) -> None:
    from confluent_kafka.admin import NewTopic

    from mqd import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    for created in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        created.result(30)


def fill(bootstrap: str, topic: str, rows: int, value_bytes: int, partitions: int) -> None:
    """Values of random bytes, keys of KEY_BYTES digits."""
    import numpy

    from mqd import Producer

    producer = Producer(
        {"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 262144, "queue.buffering.max.messages": 200_000}
    )
    chunk = 50_000
    values = numpy.random.default_rng(1).integers(0, 256, (chunk, value_bytes), numpy.uint8)
    for start in range(0, rows, chunk):
        count = min(chunk, rows - start)
        keys = numpy.array([b"%0*d" % (KEY_BYTES, number) for number in range(start, start + count)])
        producer.produce_batch(topic, values[:count], keys, partition=start // chunk % partitions)
    if producer.flush(600):
        raise RuntimeError("the records could not be produced in ten minutes")
    producer.close()


def measure(name: str, rows: int, work: Callable[[], int], broker: Callable[[], float]) -> Figure:
    broker_before, before, began = broker(), cpu_seconds(os.getpid()), time.perf_counter()
    got = work()
    wall, cpu = time.perf_counter() - began, cpu_seconds(os.getpid()) - before
    if got != rows:
        raise RuntimeError(f"{name}: {got} rows instead of {rows}")
    return Figure(name, rows, wall, cpu, broker() - broker_before)


def decode(value_bytes: int, rows: int = 2_000_000) -> Figure:
    """Decodes batches of 4 MiB in total, repeatedly."""
    from mqd.client.shm.reading import PartitionReader
    from mqd.native.reader import SegmentReader
    from mqd.protocol.records import Record, encode_batch
    from mqd.spark.fetching import BYTES_MAX, RECORDS_MAX
    from mqd.spark.reading import ROWS_MAX, BatchBuilder

    count = max(1, 256_000 // (value_bytes + KEY_BYTES + 10))
    batch = encode_batch(
        [
            Record(
                value=os.urandom(value_bytes), key=b"%0*d" % (KEY_BYTES, place), timestamp_ms=1_700_000_000_000 + place
            )
            for place in range(count)
        ]
    )
    # the base offset is outside of the checksum
    data = b"".join((number * count).to_bytes(8, "big") + batch[8:] for number in range(16))
    end, rounds = 16 * count, -(-rows // (16 * count))
    builder = BatchBuilder(COLUMNS, "topic", 0, ROWS_MAX)

    def work() -> int:
        total = 0
        for _ in range(rounds):
            reader = PartitionReader(SegmentReader.of_memory(data), "topic", b"", 0, 0)
            while reader.position < end:
                view = reader.read(RECORDS_MAX, BYTES_MAX)
                total += sum(made.num_rows for made in builder.add(view)) if view is not None else 0
        return total + sum(made.num_rows for made in builder.remaining())

    work()
    return measure("decode", rounds * end, work, lambda: 0.0)


def task(name: str, bootstrap: str, topic: str, transport: str, rows: int, broker: Callable[[], float]) -> Figure:
    """Reads all ranges of the topic by the code of one executor."""
    from mqd.spark.driver import plan_batch
    from mqd.spark.options import source_options
    from mqd.spark.reading import read_range

    options = source_options(
        {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, "transport": transport}, streaming=False
    )
    ranges = plan_batch(options)
    return measure(
        name, rows, lambda: sum(batch.num_rows for one in ranges for batch in read_range(options, COLUMNS, one)), broker
    )


def by_spark(
    session: Any,
    bootstrap: str,
    topic: str,
    rows: int,
    broker: Callable[[], float],
    rounds: int,
    name: str,
    form: str = "mqd",
    **given: str,
) -> Figure:
    """The median round by wall time. The first one, in which workers start and Java compiles, is
    not counted.
    """
    frame = (
        session.read.format(form).options(**{"kafka.bootstrap.servers": bootstrap, "subscribe": topic, **given}).load()
    )

    def work() -> int:
        frame.write.format("noop").mode("overwrite").save()
        return rows

    if frame.count() != rows:
        raise RuntimeError("rows are missing")
    work()
    figures = sorted((measure(name, rows, work, broker) for _ in range(rounds)), key=lambda one: one.wall_s)
    return figures[statistics.median_low(range(len(figures)))]
