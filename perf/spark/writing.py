"""Writing by format("mqd"): rows into a topic, exactly once unless stated otherwise, and its steps one by
one.

    write         a task's whole work in this process, without Spark: enlisted, encoded, sent,
                  acknowledged, committed
    spark write   spark.range(...).write.format("mqd"), local[2]; the figures include generating
                  the rows
"""

from __future__ import annotations

import itertools
import statistics
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from perf.spark.reading import KEY_BYTES, Figure, measure

ARROW_ROWS = 10_000  # of a batch, as Spark hands them over


def _batches(rows: int, value_bytes: int) -> Iterator[Any]:
    import numpy
    import pyarrow as pa

    values = numpy.random.default_rng(1).integers(0, 256, (ARROW_ROWS, value_bytes), numpy.uint8)
    column = pa.array([value.tobytes() for value in values], pa.binary())
    keys = pa.array([b"%0*d" % (KEY_BYTES, number) for number in range(ARROW_ROWS)], pa.binary())
    batch = pa.record_batch({"key": keys, "value": column})
    yield from itertools.repeat(batch, rows // ARROW_ROWS)


def task(
    name: str, bootstrap: str, topic: str, rows: int, value_bytes: int, broker: Callable[[], float], **given: str
) -> Figure:
    from mqd.coordinator.transaction.joint import JOINT_PREFIX
    from mqd.spark import writing
    from mqd.spark.options import SparkOptions, kafka_settings
    from mqd.spark.sink_options import COLUMNS, SinkOptions

    columns = tuple(name if name in ("key", "value") else "" for name in COLUMNS)
    options = SinkOptions(
        kafka_settings(SparkOptions({"kafka.bootstrap.servers": bootstrap, **given}), {}, "producer"), columns, topic
    )
    place = (f"{JOINT_PREFIX}perf.{uuid.uuid4().hex}", 0, "run")

    def work() -> int:
        every = _batches(rows, value_bytes)
        outcome = writing.write(options, place, next(every), every)
        assert outcome.child is not None
        writing.joint_transaction(options, place).commit([outcome.child])
        return outcome.row_count

    return measure(name, rows // ARROW_ROWS * ARROW_ROWS, work, broker)


def by_spark(
    session: Any,
    bootstrap: str,
    topic: str,
    rows: int,
    value_bytes: int,
    broker: Callable[[], float],
    rounds: int,
    name: str,
    form: str = "mqd",
    **given: str,
) -> Figure:
    """The median round by wall time; the first one is not counted."""
    key = f"cast(lpad(cast(id % 100000 AS string), {KEY_BYTES}, '0') AS binary) AS key"
    frame = session.range(0, rows, 1, 2).selectExpr(
        key, f"cast(rpad(cast(id AS string), {value_bytes}, 'x') AS binary) AS value"
    )

    def work() -> int:
        frame.write.format(form).mode("append").options(
            **{"kafka.bootstrap.servers": bootstrap, "topic": topic, **given}
        ).save()
        return rows

    work()
    figures = sorted((measure(name, rows, work, broker) for _ in range(rounds)), key=lambda one: one.wall_s)
    return figures[statistics.median_low(range(len(figures)))]
