"""The same programs and assertions with `format("mqd")` and Spark's own `format("kafka")`: users
only change the format's name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker
from tests.spark.connector import jars
from tests.spark.support import new_topic, produce


@pytest.fixture(params=["mqd", pytest.param("kafka", marks=pytest.mark.slow)])
def form(request: pytest.FixtureRequest) -> str:
    if request.param == "kafka" and not jars()[0]:
        pytest.skip(jars()[1])
    return request.param


@pytest.fixture
def topic(broker: Broker) -> str:
    return new_topic(broker, 3)


def write(broker: Broker, topic: str, *values: str, partition: int = 0) -> None:
    records = [
        {
            "value": value,
            "key": f"k{number}",
            "headers": [("n", str(number).encode())],
            "timestamp": 1_700_000_000_000 + number,
        }
        for number, value in enumerate(values)
    ]
    produce(broker, topic, records, partition)


def reader(spark: Any, form: str, broker: Broker, topic: str, **options: str) -> Any:
    return (
        spark.read.format(form)
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .option("subscribe", topic)
        .options(**options)
    )


def test_records_are_rows(spark: Any, form: str, broker: Broker, topic: str) -> None:
    write(broker, topic, "a", "b", partition=2)
    frame = reader(spark, form, broker, topic, includeHeaders="true").load()
    assert [(field.name, field.dataType.simpleString()) for field in frame.schema.fields] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    rows = frame.selectExpr("*", "unix_millis(timestamp) AS ms").orderBy("offset").collect()
    assert [
        (row.key, row.value, row.topic, row.partition, row.offset, row.ms, row.timestampType, row.headers[0].value)
        for row in rows
    ] == [
        (b"k0", b"a", topic, 2, 0, 1_700_000_000_000, 0, b"0"),
        (b"k1", b"b", topic, 2, 1, 1_700_000_000_001, 0, b"1"),
    ]


def test_a_range_of_offsets(spark: Any, form: str, broker: Broker, topic: str) -> None:
    write(broker, topic, *"abcdef")
    write(broker, topic, *"xy", partition=1)
    starting, ending = json.dumps({topic: {"0": 2, "1": -2, "2": -2}}), json.dumps({topic: {"0": 4, "1": 1, "2": -1}})
    rows = reader(spark, form, broker, topic, startingOffsets=starting, endingOffsets=ending).load().collect()
    assert sorted(bytes(row.value) for row in rows) == [b"c", b"d", b"x"]


def test_rows_are_records(spark: Any, form: str, broker: Broker, topic: str) -> None:
    rows = [
        (f"key-{number}", f"value-{number}", [{"key": "h", "value": bytearray([number])}]) for number in range(50)
    ] + [(None, None, None)]
    frame = spark.createDataFrame(rows, "key STRING, value STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>")
    frame.write.format(form).mode("append").option("kafka.bootstrap.servers", broker.bootstrap).option(
        "topic", topic
    ).option("includeHeaders", "true").save()
    got = reader(spark, form, broker, topic, includeHeaders="true").load().collect()
    found = sorted(
        (bytes(row.key), bytes(row.value), bytes(row.headers[0].value)) for row in got if row.key is not None
    )
    assert found == sorted(
        (key.encode(), value.encode(), bytes(headers[0]["value"])) for key, value, headers in rows[:-1]
    )
    assert [(row.key, row.value) for row in got if row.key is None] == [(None, None)]
    places = {bytes(row.key): row.partition for row in got if row.key is not None}
    assert len(set(places.values())) == 3


def test_both_formats_put_a_key_in_the_same_partition(spark: Any, broker: Broker) -> None:
    if not jars()[0]:
        pytest.skip(jars()[1])
    places = []
    frame = spark.createDataFrame([(f"key-{number}", "v") for number in range(100)], "key STRING, value STRING")
    for form in ("mqd", "kafka"):
        name = new_topic(broker, 7)
        frame.write.format(form).mode("append").option("kafka.bootstrap.servers", broker.bootstrap).option(
            "topic", name
        ).save()
        places.append({bytes(row.key): row.partition for row in reader(spark, form, broker, name).load().collect()})
    assert places[0] == places[1]


def word_count(spark: Any, form: str, servers: str, topic: str, checkpoint: Path) -> dict[str, int]:
    """The word count of Spark's guide; only the format's name differs."""
    from pyspark.sql.functions import explode, split

    lines = (
        spark.readStream.format(form)
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "2")
        .load()
        .selectExpr("CAST(value AS STRING)")
    )
    words = lines.select(explode(split(lines.value, " ")).alias("word")).groupBy("word").count()
    query = (
        words.writeStream.outputMode("complete")
        .format("memory")
        .queryName("counts")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]] == [2, 2], (
        "as many as a trigger may take"
    )
    return {row.word: row["count"] for row in spark.table("counts").collect()}


@pytest.mark.slow
def test_the_word_count_of_sparks_guide(spark: Any, form: str, broker: Broker, topic: str, tmp_path: Path) -> None:
    write(broker, topic, "one two two", "three one", "two", "two")
    assert word_count(spark, form, broker.bootstrap, topic, tmp_path / "checkpoint") == {"one": 2, "two": 4, "three": 1}


@pytest.mark.slow
def test_a_stream_into_a_topic(spark: Any, form: str, broker: Broker, topic: str, tmp_path: Path) -> None:
    target = new_topic(broker, 2)
    for values in (["a", "b"], ["c"], []):
        write(broker, topic, *values)
        records = (
            spark.readStream.format(form)
            .option("kafka.bootstrap.servers", broker.bootstrap)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .load()
        )
        writer = (
            records.selectExpr("key", "upper(CAST(value AS STRING)) AS value")
            .writeStream.format(form)
            .option("kafka.bootstrap.servers", broker.bootstrap)
        )
        writer.option("topic", target).option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(
            availableNow=True
        ).start().awaitTermination()
    assert sorted(bytes(row.value) for row in reader(spark, form, broker, target).load().collect()) == [
        b"A",
        b"B",
        b"C",
    ]
