"""`df.write` and `df.writeStream` into topics, with real Spark and a real broker: written records,
refusals and their errors, and dropped repetitions.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqd.client.partitioner import number_of
from tests.broker import Broker
from tests.interaction.transactional import connect, fetch_committed, read_committed, read_committed_records, topic_of
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually

PARTITIONS = 3


@pytest.fixture
def kafka(broker: Broker) -> Iterator[KafkaConnection]:
    with connect(broker) as connection:
        yield connection


@pytest.fixture
def topic(kafka: KafkaConnection) -> str:
    return topic_of(kafka, PARTITIONS)


def save(frame: Any, broker: Broker, **options: str) -> None:
    frame.write.format("mqd").mode("append").option("kafka.bootstrap.servers", broker.bootstrap).options(
        **options
    ).save()


def values(kafka: KafkaConnection, topic: str, partitions: int = PARTITIONS) -> list[bytes]:
    return [value for index in range(partitions) for value in read_committed(kafka, topic, index)]


def start(frame: Any, broker: Broker, checkpoint: Path, **options: str) -> Any:
    writer = frame.writeStream.format("mqd").outputMode("append").option("kafka.bootstrap.servers", broker.bootstrap)
    return writer.option("checkpointLocation", str(checkpoint)).options(**options)


# -- df.write --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"delivery": "at-least-once"}, {"kafka.compression.type": "zstd"}, {"kafka.compression.type": "lz4"}],
    ids=["plain", "at-least-once", "zstd", "lz4"],
)
def test_all_rows_of_a_frame_are_written(
    spark: Any, broker: Broker, kafka: KafkaConnection, topic: str, options: dict[str, str]
) -> None:
    frame = spark.range(0, 3000, 1, 4).selectExpr("concat('key-', id % 50) AS key", "cast(id AS string) AS value")
    save(frame, broker, topic=topic, **options)
    assert sorted(values(kafka, topic), key=int) == [b"%d" % number for number in range(3000)]
    for index in range(PARTITIONS):
        records = read_committed_records(kafka, topic, index)
        assert records and all(partition_of(record.key) == index for record in records)
        assert (
            fetch_committed(kafka, topic, index).last_stable_offset
            == fetch_committed(kafka, topic, index).high_watermark
        )


def partition_of(key: bytes) -> int:
    """As the Java client's default partitioner: the native tests compare mqd's murmur2 with its
    numbers.
    """
    from mqd.native.client import partition_for

    return partition_for(number_of("murmur2_random"), key, PARTITIONS)


def test_columns_set_topic_partition_headers_and_time(
    spark: Any, broker: Broker, kafka: KafkaConnection, topic: str
) -> None:
    other = topic_of(kafka)
    moment = datetime.datetime(2013, 1, 1, 5, 15, 0, 123_000, tzinfo=datetime.UTC)
    rows = [
        (b"k", b"first", topic, 2, [("source", b"here"), ("none", None)], moment),
        (None, b"second", other, None, None, moment),
        (b"k", None, topic, 2, [], None),
    ]
    kinds = (
        "key binary, value binary, topic string, partition int, headers array<struct<key:string,value:binary>>,"
        " timestamp timestamp, left_alone double"
    )
    save(spark.createDataFrame([(*row, 1.0) for row in rows], kinds).coalesce(1), broker)
    first, tombstone = read_committed_records(kafka, topic, 2)
    assert (first.key, first.value, first.timestamp_ms) == (b"k", b"first", round(moment.timestamp() * 1000))
    assert [(header[0], header[1]) for header in first.headers] == [("source", b"here"), ("none", None)]
    assert (tombstone.key, tombstone.value, list(tombstone.headers)) == (b"k", None, [])
    assert abs(tombstone.timestamp_ms - datetime.datetime.now(datetime.UTC).timestamp() * 1000) < 600_000
    (second,) = read_committed_records(kafka, other, 0)
    assert (second.key, second.value) == (None, b"second")


def test_the_option_topic_overrides_the_column(spark: Any, broker: Broker, kafka: KafkaConnection, topic: str) -> None:
    save(spark.createDataFrame([(b"x", "elsewhere")], "value binary, topic string"), broker, topic=topic)
    assert values(kafka, topic) == [b"x"]


def test_an_empty_frame_is_written(spark: Any, broker: Broker, kafka: KafkaConnection, topic: str) -> None:
    save(spark.range(0).selectExpr("cast(id AS string) AS value"), broker, topic=topic)
    assert values(kafka, topic) == []


def failing(spark: Any) -> Any:
    """One task writes and completes, another finds an invalid value."""
    return spark.range(0, 2000, 1, 2).selectExpr(
        "CASE WHEN id = 1999 THEN raise_error('no such luck') ELSE cast(id AS string) END AS value"
    )


def test_a_failed_job_leaves_no_records(spark: Any, broker: Broker, kafka: KafkaConnection, topic: str) -> None:
    """The job is aborted, and none of its records is visible."""
    with pytest.raises(Exception, match="no such luck"):
        save(failing(spark), broker, topic=topic)
    assert values(kafka, topic) == []


def test_the_transaction_of_a_failed_job_is_aborted_at_once(
    spark: Any, broker: Broker, kafka: KafkaConnection, topic: str
) -> None:
    """A task that outlives the abort begins no other transaction: readers of committed records do
    not wait for a timeout.
    """
    with pytest.raises(Exception, match="no such luck"):
        save(failing(spark), broker, topic=topic)

    def is_over(index: int) -> bool:
        found = fetch_committed(kafka, topic, index)
        return found.last_stable_offset == found.high_watermark

    eventually(lambda: all(map(is_over, range(PARTITIONS))), "the transaction has ended")


def test_a_write_of_an_application_and_version_happens_once(
    spark: Any, broker: Broker, kafka: KafkaConnection, topic: str
) -> None:
    for version, text in (("1", "first"), ("1", "again"), ("2", "second"), ("0", "late")):
        save(
            spark.createDataFrame([(text,)], "value string"),
            broker,
            topic=topic,
            txnAppId=f"app-{topic}",
            txnVersion=version,
        )
    assert sorted(values(kafka, topic)) == [b"first", b"second"]


@pytest.mark.parametrize(
    ("kinds", "options", "problem"),
    [
        ("key binary", {"topic": "t"}, "column value .* is required"),
        ("value int", {"topic": "t"}, "column value is int"),
        ("value string, key double", {"topic": "t"}, "column key is double"),
        ("value string", {}, "set the option topic"),
        ("value string, topic int", {}, "column topic is int"),
        ("value string, partition bigint", {"topic": "t"}, "column partition is bigint"),
        ("value string, headers map<string,binary>", {"topic": "t"}, "column headers is map"),
        ("value string", {"topic": "t", "kafka.value.serializer": "x"}, "value.serializer"),
        ("value string", {"topic": "t", "kafka.transactional.id": "x"}, "transactional.id"),
        ("value string", {"topic": "t", "delivery": "perhaps"}, "delivery"),
        ("value string", {"topic": "t", "kafka.compression.type": "rar"}, "compression.type"),
        ("value string", {"topic": "t", "kafka.acks": "0"}, "kafka.acks"),
        ("value string", {"topic": "t", "txnAppId": "x"}, "txnVersion"),
    ],
)
def test_invalid_options_are_refused_before_a_task_runs(
    spark: Any, broker: Broker, kinds: str, options: dict[str, str], problem: str
) -> None:
    with pytest.raises(Exception, match=problem):
        save(spark.createDataFrame([], kinds), broker, **options)


def test_overwriting_is_refused(spark: Any, broker: Broker, topic: str) -> None:
    with pytest.raises(Exception, match="cannot be overwritten"):
        spark.range(1).selectExpr("'x' AS value").write.format("mqd").mode("overwrite").option(
            "kafka.bootstrap.servers", broker.bootstrap
        ).option("topic", topic).save()


def test_rows_that_cannot_be_written_are_named(spark: Any, broker: Broker, kafka: KafkaConnection, topic: str) -> None:
    small = topic_of(kafka, 1, **{"max.message.bytes": "5000"})
    one = spark.range(1)
    with pytest.raises(Exception, match=rf"topic {small}, partition 0: a row of \d+ bytes is larger"):
        save(one.selectExpr("repeat('x', 20000) AS value"), broker, topic=small)
    with pytest.raises(Exception, match=f"topic {topic} has partitions 0 to 2, but a row has 7"):
        save(one.selectExpr("'x' AS value", "7 AS partition"), broker, topic=topic)
    with pytest.raises(Exception, match="null topic"):
        save(one.selectExpr("'x' AS value", "cast(NULL AS string) AS topic"), broker)
    save(spark.range(0, 300, 1, 1).selectExpr("repeat('y', 100) AS value"), broker, topic=small)
    assert len(values(kafka, small, 1)) == 300, "a batch that is larger than the topic takes is sent in parts"


def test_a_missing_topic_is_named(spark: Any, start_broker: Callable[..., Broker]) -> None:
    broker = start_broker(config={"auto.create.topics.enable": "false"})
    with pytest.raises(Exception, match="topic nowhere cannot be written"):
        save(spark.range(1).selectExpr("'x' AS value"), broker, topic="nowhere")


# -- df.writeStream --------------------------------------------------------------------------------


@pytest.fixture
def numbers(spark: Any, tmp_path: Path) -> Callable[[int, int], Any]:
    """numbers(first, end): adds a file to the stream of numbers that it returns, one file per
    batch.
    """
    folder = tmp_path / "numbers"
    folder.mkdir()

    def more(first: int, end: int) -> Any:
        (folder / f"{first}.txt").write_text("".join(f"{number}\n" for number in range(first, end)))
        return spark.readStream.format("text").option("maxFilesPerTrigger", "1").load(str(folder)).repartition(3)

    return more


def run(frame: Any, broker: Broker, checkpoint: Path, **options: str) -> None:
    query = start(frame, broker, checkpoint, **options).trigger(availableNow=True).start()
    try:
        query.awaitTermination(120)
    finally:
        query.stop()


def test_a_stream_continues_from_its_checkpoint(
    broker: Broker, kafka: KafkaConnection, topic: str, tmp_path: Path, numbers: Any
) -> None:
    frame = numbers(0, 100)
    run(frame, broker, tmp_path / "checkpoint", topic=topic)
    numbers(100, 200)
    run(numbers(200, 201), broker, tmp_path / "checkpoint", topic=topic)
    assert sorted(values(kafka, topic), key=int) == [b"%d" % number for number in range(201)]


def forget_commit(checkpoint: Path, batch: int) -> None:
    """As when the driver dies after the sink's commit, before Spark has persisted it."""
    for name in (str(batch), f".{batch}.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)


@pytest.mark.slow  # fail_after of test_sink_deaths.py has this result
def test_a_repeated_committed_batch_is_dropped(
    broker: Broker, kafka: KafkaConnection, topic: str, tmp_path: Path, numbers: Any
) -> None:
    checkpoint = tmp_path / "checkpoint"
    frame = numbers(0, 100)
    numbers(100, 200)
    run(frame, broker, checkpoint, topic=topic)
    forget_commit(checkpoint, 1)
    run(frame, broker, checkpoint, topic=topic)
    assert sorted(values(kafka, topic), key=int) == [b"%d" % number for number in range(200)]

    other = topic_of(kafka, PARTITIONS)
    run(frame, broker, tmp_path / "other", topic=other, delivery="at-least-once")
    forget_commit(tmp_path / "other", 1)
    run(frame, broker, tmp_path / "other", topic=other, delivery="at-least-once")
    assert len(values(kafka, other)) == 300, "at least once writes it twice: so the test above proves something"


def test_update_mode_is_refused_and_complete_writes_all(
    spark: Any, broker: Broker, kafka: KafkaConnection, topic: str, tmp_path: Path, numbers: Any
) -> None:
    counted = numbers(0, 10).groupBy().count().selectExpr("cast(count AS string) AS value")
    numbers(10, 15)
    with pytest.raises(Exception, match="(?i)update"):
        counted.writeStream.format("mqd").outputMode("update").option(
            "kafka.bootstrap.servers", broker.bootstrap
        ).option("topic", topic).option("checkpointLocation", str(tmp_path / "update")).start().awaitTermination(60)
    query = (
        start(counted, broker, tmp_path / "complete", topic=topic)
        .outputMode("complete")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination(120)
    assert sorted(values(kafka, topic)) == [b"10", b"15"]
