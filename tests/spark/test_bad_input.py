"""Failures of the broker and of data while Spark reads, streams and writes: nothing is skipped
silently, and errors name topic, partition and offset. Failures of batch reads: test_spark_read.py;
of streams between their runs: test_spark_stream.py; rows that cannot be written: test_sink.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker
from tests.spark.support import (
    LADEN,
    Stream,
    add_partitions,
    delete_topic,
    new_topic,
    numbered,
    options,
    produce,
    read,
    rows,
)

TRANSPORTS = ["shm", "tcp"]
UNREACHABLE = {"kafka.bootstrap.servers": "127.0.0.1:1", "kafka.default.api.timeout.ms": "500"}


def ended(stream: Stream | Copy) -> str:
    """The error that ends a running stream."""
    try:
        stream.wait(lambda: False)
    except Exception as error:  # noqa: BLE001  (Spark's are many)
        assert not isinstance(error, AssertionError), error
        return str(error)
    raise AssertionError("it did not fail")


class Copy:
    """A query from topic to topic, exactly once."""

    def __init__(
        self,
        spark: Any,
        broker: Broker,
        source: str,
        target: str,
        place: Path,
        columns: tuple[str, ...] = ("key", "value"),
        **more: str,
    ) -> None:
        self._spark, self._broker, self._source, self._target = spark, broker, source, target
        self._place, self._columns, self._more = place, columns, more
        self.query: Any = None

    def start(self) -> None:
        frame = (
            self._spark.readStream.format("mqd")
            .options(**options(self._broker, self._source, startingOffsets="earliest"))
            .load()
            .selectExpr(*self._columns)
        )
        writer = (
            frame.writeStream.format("mqd")
            .outputMode("append")
            .option("kafka.bootstrap.servers", self._broker.bootstrap)
            .options(topic=self._target, **self._more)
        )
        self.query = writer.option("checkpointLocation", str(self._place / "copy")).start()

    def found(self) -> list[Any]:
        return rows(read(self._spark, self._broker, self._target, kafka__isolation__level="read_committed"))

    def wait(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Waits while the query runs. Raises its error."""
        deadline = time.monotonic() + seconds
        while not condition():
            problem = self.query.exception() if not self.query.isActive else None
            if problem is not None and any(text in str(problem) for text in LADEN):
                self.start()
            elif problem is not None:
                raise problem
            assert time.monotonic() < deadline, f"it did not come about: {self.query.status}"
            time.sleep(0.1)  # polls Spark's own threads; there is no event to wait for


@pytest.fixture
def copy(spark: Any, tmp_path: Path) -> Iterator[Callable[..., Copy]]:
    made: list[Copy] = []

    def start(broker: Broker, source: str, target: str, **more: Any) -> Copy:
        made.append(Copy(spark, broker, source, target, tmp_path, **more))
        made[-1].start()
        return made[-1]

    yield start
    for one in made:
        if one.query is not None:
            one.query.stop()


# -- streams that read -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_topic_vanishes_while_a_stream_reads_it(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 10))
    stream = Stream(spark, tmp_path, options(broker, topic, startingOffsets="earliest"))
    stream.start(available_now=False)
    stream.wait(lambda: len(stream.seen) == 10)
    delete_topic(broker, topic)
    reported = ended(stream)
    assert f"{topic}-0 was deleted; the last batch ended at 0: 10" in reported and "failOnDataLoss" in reported


@pytest.mark.slow
def test_a_topic_is_recreated_while_a_stream_reads_it(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """Without failOnDataLoss it continues with the new one, from its beginning."""
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 10))
    stream = Stream(spark, tmp_path, options(broker, topic, startingOffsets="earliest", failOnDataLoss="false"))
    stream.start(available_now=False)
    stream.wait(lambda: len(stream.seen) == 10)
    delete_topic(broker, topic)
    new_topic(broker, name=topic)
    produce(broker, topic, numbered(100, 20))
    stream.wait(lambda: len(stream.seen) >= 30)
    stream.stop()
    assert [row[3] for row in stream.seen] == [*numbered(0, 10), *numbered(100, 20)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_damaged_batch_ends_a_stream(spark: Any, broker: Broker, tmp_path: Path, transport: str) -> None:
    """At every start; a query that begins after it omits it."""
    topic = new_topic(broker)
    for value in (b"good", b"to be damaged", b"behind"):
        produce(broker, topic, [value])
    (path,) = Path(broker.data_dir).rglob(f"{topic}-0/*.log")
    with open(path, "r+b") as log:
        at = log.read().index(b"to be damaged")
        log.seek(at)
        log.write(b"T")
    given = options(broker, topic, startingOffsets="earliest", transport=transport)
    stream = Stream(spark, tmp_path, given)
    for _ in range(2):
        reported = stream.failure()
        assert (
            f"{topic}-0: a damaged record batch at offset 1" in reported
            and "checksum" in reported
            and "startingOffsets" in reported
        )
    assert stream.seen == []
    behind = Stream(spark, tmp_path / "behind", {**given, "startingOffsets": f'{{"{topic}":{{"0":2}}}}'})
    assert [row[3] for row in behind.run()] == [b"behind"]


@pytest.mark.slow
def test_unreachable_brokers_are_reported_for_each_topic(spark: Any, broker: Broker, tmp_path: Path) -> None:
    reported = Stream(spark, tmp_path, {**UNREACHABLE, "subscribe": "letters"}).failure()
    assert "topics letters: no response within 0.5 s from 127.0.0.1:1" in reported
    topic = new_topic(broker)
    for delivery in ("exactly-once", "at-least-once"):
        writer = (
            spark.range(1)
            .selectExpr("'x' AS value")
            .write.format("mqd")
            .mode("append")
            .options(**UNREACHABLE, topic="letters", delivery=delivery)
        )
        with pytest.raises(Exception, match=r"(?s)topic letters: .* within 0\.5 s .*127\.0\.0\.1:1"):
            writer.save()
    produce(broker, topic, numbered(0, 3))
    frame = spark.readStream.format("mqd").options(**options(broker, topic, startingOffsets="earliest")).load()
    query = (
        frame.select("value")
        .writeStream.format("mqd")
        .options(**UNREACHABLE, topic="letters")
        .option("checkpointLocation", str(tmp_path / "write"))
        .start()
    )
    with pytest.raises(Exception, match=r"(?s)topic letters: .* within 0\.5 s .*127\.0\.0\.1:1"):
        query.awaitTermination(120)


# -- batches that read, while it happens -----------------------------------------------------------


class Gate:
    """Between the source and the reader of its rows: the first rows wait, and then the source waits
    too, with full buffers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def before(self, frame: Any) -> Any:
        reached, opened = self._folder / "reached", self._folder / "open"

        def hold(batches: Any) -> Any:
            for batch in batches:
                reached.touch()
                while not opened.exists():
                    time.sleep(0.02)  # another process opens it
                yield batch

        return frame.mapInArrow(hold, frame.schema)

    def wait_until_reached(self, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not (self._folder / "reached").exists():
            assert time.monotonic() < deadline, "no row came to the gate"
            time.sleep(0.02)  # one of Spark's processes creates it; there is no event to wait for

    def open(self) -> None:
        (self._folder / "open").touch()


def gathered(gate: Gate, frame: Any, amid: Callable[[], None]) -> list[Any]:
    """(partition, offset, number in the value) of all rows, in order; `amid` is called while most
    of them have not been read.
    them are not read yet.
    """
    found: list[Any] = []
    problems: list[BaseException] = []

    def collect() -> None:
        try:
            found.extend(
                gate.before(
                    frame.selectExpr(
                        "partition", "offset", "cast(substring(cast(value AS string), 1, 8) AS int) AS number"
                    )
                ).collect()
            )
        except BaseException as problem:  # noqa: BLE001  (reported below)
            problems.append(problem)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        gate.wait_until_reached()
        amid()
    finally:
        gate.open()
        thread.join(300)
    if problems:
        raise problems[0]
    return sorted((row.partition, row.offset, row.number) for row in found)


def wide(count: int) -> list[bytes]:
    """Eight-digit numbers in half a kilobyte each."""
    return [b"%08d" % number + b"." * 500 for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_broker_is_killed_and_restarted_while_a_batch_is_read(
    spark: Any, start_broker: Any, tmp_path: Path, transport: str
) -> None:
    broker, count = start_broker(), 60_000
    topic = new_topic(broker)
    produce(broker, topic, wide(count))
    frame = read(
        spark,
        broker,
        topic,
        transport=transport,
        kafka__fetch__max__bytes=1 << 17,
        kafka__max__partition__fetch__bytes=1 << 17,
    )

    def restart() -> None:
        broker.kill_all()
        broker.start()

    assert gathered(Gate(tmp_path / "gate"), frame, restart) == [(0, number, number) for number in range(count)]


# -- streams that write ----------------------------------------------------------------------------


@pytest.mark.slow  # a pipeline in a separate process; rows of null are in test_formats.py
def test_a_null_value_goes_through(broker: Broker, copy: Callable[..., Copy]) -> None:
    source, target = new_topic(broker), new_topic(broker)
    produce(
        broker, source, [{"key": b"kept", "value": b"1"}, {"key": b"gone", "value": None}, {"key": None, "value": b""}]
    )
    job = copy(broker, source, target)
    job.wait(lambda: len(job.found()) == 3)
    assert [row[2:] for row in job.found()] == [(b"kept", b"1"), (b"gone", None), (None, b"")]


@pytest.mark.slow
def test_a_schema_that_does_not_match_ends_a_stream_before_it_writes(broker: Broker, copy: Callable[..., Copy]) -> None:
    source, target = new_topic(broker), new_topic(broker)
    produce(broker, source, numbered(0, 3))
    with pytest.raises(Exception, match="column value is int, and must be binary or string"):
        copy(broker, source, target, columns=("length(value) AS value",)).query.awaitTermination(120)


@pytest.mark.slow
def test_a_broker_is_restarted_and_a_partition_added_while_a_stream_writes(
    start_broker: Any, copy: Callable[..., Copy]
) -> None:
    broker = start_broker()
    source, target = new_topic(broker), new_topic(broker)
    produce(broker, source, [{"key": value, "value": value} for value in numbered(0, 10)])
    job = copy(broker, source, target)
    job.wait(lambda: len(job.found()) == 10)
    broker.kill_all()
    broker.start()
    add_partitions(broker, target, 2)
    produce(broker, source, [{"key": value, "value": value} for value in numbered(10, 50)])
    job.wait(lambda: len(job.found()) >= 60)
    assert sorted(int(row[3]) for row in job.found()) == list(range(60))
    assert {row[0] for row in job.found()} == {0, 1}


@pytest.mark.slow
def test_a_topic_vanishes_while_a_stream_writes_it(start_broker: Any, copy: Callable[..., Copy]) -> None:
    broker = start_broker(config={"auto.create.topics.enable": "false"})
    source, target = new_topic(broker), new_topic(broker)
    produce(broker, source, numbered(0, 10))
    job = copy(broker, source, target, **{"kafka.default.api.timeout.ms": "3000"})
    job.wait(lambda: len(job.found()) == 10)
    delete_topic(broker, target)
    produce(broker, source, numbered(10, 10))
    reported = ended(job)
    assert f"topic {target} cannot be written" in reported and f"mqd topic create {target}" in reported
