"""The age of a record when a stream's sink gets it: readStream.format("mqd"), no pause between batches,
into a sink that only records `now - timestamp` of every row.

Ages are taken when Spark passes the rows to write(): they include the log, planning, reading, and
Spark's two log writes for each batch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from perf.spark.reading import create

TOPIC = "perf-spark-ages"
RATE_PER_S, WARM_S, MEASURED_S = 1000, 15.0, 60.0


class Ages(NamedTuple):
    """Ages of records, in milliseconds."""

    rows: int
    batches: int
    p50: float
    p99: float
    most: float

    def line(self) -> str:
        return (
            f"{'spark stream, age at write()':<28} p50 {self.p50:.0f} ms   p99 {self.p99:.0f} ms   max {self.most:.0f}"
            f" ms   {self.rows} records in {self.batches} batches"
        )


def ages(session: Any, bootstrap: str, place: Path) -> Ages:
    import numpy

    folder = place / "ages"
    folder.mkdir()
    session.dataSource.register(_source())
    records = session.readStream.format("mqd").options(
        **{"kafka.bootstrap.servers": bootstrap, "subscribe": TOPIC, "startingOffsets": "earliest"}
    )
    end = threading.Event()
    writer = threading.Thread(target=_produce, args=(bootstrap, end), daemon=True)
    create(bootstrap, TOPIC, 1)
    writer.start()
    stream = (
        records.load()
        .select("timestamp")
        .writeStream.format("ages")
        .option("folder", str(folder))
        .option("checkpointLocation", str(place / "ages-checkpoint"))
    )
    query = stream.trigger(processingTime="0 seconds").start()
    try:
        began = time.time() + WARM_S
        query.awaitTermination(WARM_S + MEASURED_S)
    finally:
        query.stop()
        end.set()
        writer.join()
    files = [
        path
        for path in folder.iterdir()
        if path.suffix == ".npy" and began <= float(path.stem.split("-")[0]) / 1000 <= began + MEASURED_S
    ]
    found = numpy.concatenate([numpy.load(path) for path in files])
    return Ages(len(found), len(files), *(float(numpy.percentile(found, part)) for part in (50, 99, 100)))


def _produce(bootstrap: str, end: threading.Event) -> None:
    """Produces RATE_PER_S records a second, one at a time, evenly spaced."""
    from mqd import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    began, sent = time.monotonic(), 0
    while not end.is_set():
        while sent < (time.monotonic() - began) * RATE_PER_S:
            producer.produce(TOPIC, b"x" * 100)
            sent += 1
        producer.poll(0)
        time.sleep(0.001)
    producer.close()


def _source() -> type:
    """The data source `ages`, pickled whole: executors need not find this module."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

    class Writer(DataSourceStreamArrowWriter):
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
            import time
            import uuid

            import numpy

            found, now_ms = [], 0.0
            for batch in iterator:
                now_ms = time.time() * 1000
                found.append(now_ms - batch.column(0).cast("int64").to_numpy() / 1000)
            if found:
                numpy.save(f"{self.folder}/{now_ms:.0f}-{uuid.uuid4().hex}.npy", numpy.concatenate(found))
            return WriterCommitMessage()

        def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
            pass

        def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803
            pass

    class Ages(DataSource):
        @classmethod
        def name(cls) -> str:
            return "ages"

        def streamWriter(self, schema: Any, overwrite: bool) -> Writer:  # noqa: N802
            return Writer(self.options["folder"])

    return Ages
