"""A million real records, written in every compression, archived and replayed into a new topic:
keys, values, headers, timestamps and the order of each partition are preserved, byte for byte.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from mqd.cli.verbs.demo import flights_file, read_flights
from tests.broker import Broker
from tests.spark.support import new_topic

RECORDS = 1_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
PARTITIONS = 5
BATCH = 10_000
FOR_EVER = {"retention.ms": "-1"}  # the flights are of 2013
PATIENCE_S = 60.0


def flights() -> Iterator[dict[str, Any]]:
    """Arguments of produce(), RECORDS of them: nulls, empty values, headers with a duplicate key,
    bytes that are not UTF-8, timestamps years apart.
    """
    encode = msgspec.json.Encoder().encode
    for number, flight in enumerate(
        itertools.islice(
            itertools.chain.from_iterable(read_flights(flights_file()) for _ in itertools.count()), RECORDS
        )
    ):
        headers = [
            ("carrier", flight["carrier"].encode()),
            ("delay", None if flight["dep_delay"] is None else b"%d" % flight["dep_delay"]),
        ]
        if number % 7 == 0:
            headers += [("carrier", number.to_bytes(4, "little")), ("", b"")]
        yield {
            "key": flight["tailnum"].encode() if flight["tailnum"] else None,
            "value": None if flight["dep_time"] is None else b"" if number % 1000 == 0 else encode(flight),
            "headers": headers if number % 3 else None,
            "timestamp": (
                int(datetime.fromisoformat(flight["time_hour"]).replace(tzinfo=UTC).timestamp() * 1000)
                + number % 3_600_000
            ),
        }


def write(broker: Broker, topic: str) -> None:
    """The next records go to the next partition by the next producer: each codec writes to all of
    them.
    """
    failed: list[Any] = []
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "linger.ms": 20,
        "enable.idempotence": True,
        "queue.buffering.max.messages": 2 * BATCH,
    }
    producers = [Producer({**settings, "compression.type": codec}) for codec in CODECS]
    for number, chunk in enumerate(_batched(flights(), 1000)):
        producer = producers[number % len(CODECS)]
        for record in chunk:
            producer.produce(
                topic,
                partition=number // len(CODECS) % PARTITIONS,
                on_delivery=lambda error, _: error and failed.append(error),
                **record,
            )
        assert producer.flush(PATIENCE_S) == 0 and not failed, failed[:3]


def _batched(records: Iterator[Any], count: int) -> Iterator[tuple[Any, ...]]:
    while chunk := tuple(itertools.islice(records, count)):
        yield chunk


def digests(broker: Broker, topic: str) -> dict[int, tuple[int, str]]:
    """Partition -> its number of records and the digest of their content, in order."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": f"digest-{topic}",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    found = {partition: hashlib.blake2b(digest_size=16) for partition in range(PARTITIONS)}
    counts, ended = dict.fromkeys(range(PARTITIONS), 0), set()
    encode = msgspec.msgpack.Encoder().encode
    while len(ended) < PARTITIONS:
        messages = consumer.consume(BATCH, PATIENCE_S)
        assert messages, f"{topic}: silence after {counts}"
        for message in messages:
            if message.error():
                ended.add(message.partition())
                continue
            counts[message.partition()] += 1
            found[message.partition()].update(
                encode((message.key(), message.value(), message.headers(), message.timestamp()))
            )
    consumer.close()
    return {partition: (counts[partition], digest.hexdigest()) for partition, digest in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_records_are_restored_unchanged(spark: Any, broker: Broker, tmp_path: Path) -> None:
    from mqd.spark.pipelines.manifest import Archive
    from mqd.spark.pipelines.running import run, start
    from mqd.spark.pipelines.settings import parse_settings

    source = new_topic(broker, PARTITIONS, config=FOR_EVER)
    write(broker, source)
    expected = digests(broker, source)
    assert sum(count for count, _ in expected.values()) == RECORDS

    common = {"bootstrap": broker.bootstrap, "path": str(tmp_path / "archive")}
    triggers = {"trigger": "available-now", "checkpoint": str(tmp_path / "checkpoint"), "compact_from_files": 4}
    by_batches = {"topics": [source], "options": {"maxOffsetsPerTrigger": "300000"}}
    start(
        spark,
        parse_settings({"pipeline": "archive", "name": "million", "source": by_batches, **triggers, **common}, "test"),
    ).awaitTermination()
    archive = Archive(str(tmp_path / "archive"))
    assert archive.ends(source) == {partition: count for partition, (count, _) in expected.items()}
    assert any(path.rsplit("/", 1)[1].startswith("compacted-") for path in archive.files), (
        "it goes through compaction, too"
    )

    for options in ({}, {"kafka.compression.type": "zstd"}):
        target = new_topic(broker, PARTITIONS, config=FOR_EVER)
        replay = parse_settings(
            {"pipeline": "replay", "name": f"back-{target}", "to": {source: target}, "options": options, **common},
            "test",
        )
        run(spark, replay, lambda _: None, threading.Event())
        assert digests(broker, target) == expected
