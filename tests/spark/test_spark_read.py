"""spark.read.format("mqd"): the frame has all records of the log, with either transport; records
that cannot be read are reported.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker
from tests.spark.support import (
    add_partitions,
    delete_records,
    new_topic,
    numbered,
    options,
    produce,
    read,
    rows,
    values,
)

TRANSPORTS = ("shm", "tcp")


def _fails(spark: Any, text: str, **given: str) -> str:
    with pytest.raises(Exception) as error:
        spark.read.format("mqd").options(**given).load().collect()
    assert text in str(error.value), str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def everything(broker: Broker) -> str:
    """Records of every kind in two partitions, and of every codec."""
    topic = new_topic(broker, 2)
    for number, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd")):
        made: list[Any] = [
            {"value": b"", "key": b"empty value"},
            {"value": None, "key": b"no value"},
            {"value": b"no key"},
            {"value": b"x" * 3000, "key": b"", "headers": [("a", b"1"), ("a", None), ("b", b"")]},
            {"value": codec.encode(), "timestamp": 1_700_000_000_123 + number},
        ]
        produce(
            broker,
            topic,
            [{**one, "partition": place % 2} for place, one in enumerate(made)],
            **{"compression.type": codec},
        )
    return topic


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_kind_of_record(spark: Any, broker: Broker, everything: str, transport: str) -> None:
    frame = read(spark, broker, everything, includeHeaders="true", transport=transport)
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers"]
    found = sorted(frame.collect(), key=lambda row: (row.partition, row.offset))
    assert [(row.partition, row.offset) for row in found] == [(0, offset) for offset in range(15)] + [
        (1, offset) for offset in range(10)
    ]
    assert {(row.topic, row.timestampType) for row in found} == {(everything, 0)}
    first = {codec: place for place, codec in enumerate(("none", "gzip", "snappy", "lz4", "zstd"))}
    for codec, place in first.items():
        zero, one = found[3 * place : 3 * place + 3], found[15 + 2 * place : 17 + 2 * place]
        assert [(row.key, row.value) for row in zero] == [
            (b"empty value", b""),
            (None, b"no key"),
            (None, codec.encode()),
        ]
        assert [(row.key, row.value) for row in one] == [(b"no value", None), (b"", b"x" * 3000)]
        assert [row.headers for row in (*zero, one[0])] == [None] * 4
        assert [tuple(header) for header in one[1].headers] == [("a", b"1"), ("a", None), ("b", b"")]
        assert zero[2].timestamp.replace(tzinfo=UTC) == datetime.fromtimestamp((1_700_000_000_123 + place) / 1000, UTC)


def test_offsets_times_and_parts(spark: Any, broker: Broker) -> None:
    topic = new_topic(broker, 2)
    produce(
        broker, topic, [{"value": b"%d" % n, "timestamp": 1_700_000_000_000 + n, "partition": n % 2} for n in range(40)]
    )
    given = {
        "startingOffsets": json.dumps({topic: {"0": 5, "1": -2}}),
        "endingOffsets": json.dumps({topic: {"0": -1, "1": 3}}),
    }
    assert [row[:2] for row in rows(read(spark, broker, topic, **given))] == [
        (0, offset) for offset in range(5, 20)
    ] + [(1, offset) for offset in range(3)]
    frame = read(spark, broker, topic, startingTimestamp=1_700_000_000_010, endingTimestamp=1_700_000_000_020)
    assert sorted(int(value) for value in values(frame)) == list(range(10, 20))
    by_time = {"startingOffsetsByTimestamp": json.dumps({topic: {"0": 1_700_000_000_030, "1": 1_700_000_000_038}})}
    assert sorted(int(value) for value in values(read(spark, broker, topic, **by_time))) == [30, 32, 34, 36, 38, 39]
    parts = read(spark, broker, topic, minPartitions=5)
    assert parts.rdd.getNumPartitions() == 5 and len(values(parts)) == 40
    assigned = (
        spark.read.format("mqd")
        .options(**{"kafka.bootstrap.servers": broker.bootstrap, "assign": json.dumps({topic: [1]})})
        .load()
    )
    assert [row[0] for row in rows(assigned)] == [1] * 20
    pattern = (
        spark.read.format("mqd")
        .options(**{"kafka.bootstrap.servers": broker.bootstrap, "subscribePattern": f"^{topic}$"})
        .load()
    )
    assert len(values(pattern)) == 40
    some = spark.read.format("mqd").schema("offset bigint, value binary").options(**options(broker, topic)).load()
    assert some.columns == ["offset", "value"] and some.count() == 40
    _fails(
        spark,
        "you must specify all TopicPartitions",
        **options(broker, topic, startingOffsets=json.dumps({topic: {"0": 1}})),
    )
    _fails(spark, "no record is that late", **options(broker, topic, startingTimestamp=1_900_000_000_000))


def test_an_empty_topic(spark: Any, broker: Broker) -> None:
    topic = new_topic(broker, 3)
    assert values(read(spark, broker, topic)) == []
    name = new_topic(broker)
    produce(broker, name, [b"one"])
    assert values(read(spark, broker, name, startingOffsets=json.dumps({name: {"0": 1}}))) == []


def test_invalid_options(spark: Any, broker: Broker) -> None:
    topic = new_topic(broker)
    for more, text in (
        ({"kafka__auto__offset__reset": "latest"}, "auto.offset.reset"),
        ({"kafka__key__deserializer": "x"}, "key.deserializer"),
        ({"startingOffsets": "latest"}, "starting offset can't be latest for batch queries"),
        ({"assign": '{"a":[0]}'}, "Only one of the following options"),
        ({"kafka__security__protocol": "TLS"}, "is not known"),
    ):
        _fails(spark, text, **options(broker, topic, **more))
    _fails(spark, "must be specified", subscribe=topic)
    _fails(spark, "UNKNOWN_TOPIC_OR_PARTITION", **options(broker, "nowhere", kafka__default__api__timeout__ms=500))
    _fails(
        spark,
        "no response within 0.5 s",
        **{"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "x", "kafka.default.api.timeout.ms": "500"},
    )
    with pytest.raises(Exception, match="no column 'colour'"):
        spark.read.format("mqd").schema("colour string").options(**options(broker, topic)).load().collect()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_read_committed(spark: Any, broker: Broker, transport: str) -> None:
    from confluent_kafka import Producer

    topic = new_topic(broker)
    for number, commit in enumerate((True, False, True, False)):
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": f"{topic}-{number % 2}"})
        producer.init_transactions(30)
        producer.begin_transaction()
        for place in range(10):
            producer.produce(topic, b"%d.%d" % (number, place), partition=0)
        producer.flush(30)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    kept = [b"%d.%d" % (number, place) for number in (0, 2) for place in range(10)]
    assert values(read(spark, broker, topic, kafka__isolation__level="read_committed", transport=transport)) == kept
    assert len(values(read(spark, broker, topic, transport=transport))) == 40


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_deleted_records(spark: Any, broker: Broker, transport: str) -> None:
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 50))
    delete_records(broker, topic, 0, 20)
    assert len(values(read(spark, broker, topic, transport=transport))) == 30
    given = options(broker, topic, transport=transport, startingOffsets=json.dumps({topic: {"0": 10}}))
    reported = _fails(spark, "offsets 10 to 19 were deleted", **given)
    assert f"{topic}-0" in reported and "failOnDataLoss" in reported
    assert values(spark.read.format("mqd").options(**given, failOnDataLoss="false").load()) == numbered(20, 30)
    beyond = options(broker, topic, transport=transport, endingOffsets=json.dumps({topic: {"0": 60}}))
    _fails(spark, "the ending offset 60 is beyond the log's end 50", **beyond)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_damaged_batch(spark: Any, broker: Broker, transport: str) -> None:
    topic = new_topic(broker)
    produce(broker, topic, [b"good"])
    produce(broker, topic, [b"to be damaged"])
    produce(broker, topic, [b"behind"])
    (path,) = Path(broker.data_dir).rglob(f"{topic}-0/*.log")
    with open(path, "r+b") as log:
        at = log.read().index(b"to be damaged")
        log.seek(at)
        log.write(b"T")
    reported = _fails(spark, "a damaged record batch at offset 1", **options(broker, topic, transport=transport))
    assert f"{topic}-0" in reported and "checksum" in reported


def test_by_sql(spark: Any, broker: Broker) -> None:
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 5))
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW t USING mqd OPTIONS ('kafka.bootstrap.servers' '{broker.bootstrap}',"
        f" subscribe '{topic}')"
    )
    assert [row[0] for row in spark.sql("SELECT CAST(value AS STRING) FROM t ORDER BY offset").collect()] == [
        "0",
        "1",
        "2",
        "3",
        "4",
    ]
    add_partitions(broker, topic, 2)
