"""Consumers of every kind on a compacted topic: gaps, batches with removed records, empty batches,
tombstones.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.log import compaction_report
from mqd.log.dump import dump_segment
from tests.broker import Broker

CONFIG = {
    "cleanup.policy": "compact",
    "segment.bytes": "16384",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "60000",
}
KEYS, PARTITIONS = 30, 2
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

Final = dict[tuple[int, bytes], bytes]


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, str, Final]]:
    """A broker, a topic whose sealed segments were compacted, and the final values that a consumer
    must have.
    """
    with Broker(tmp_path_factory.mktemp("compacted"), config={"log.cleaner.backoff.ms": "100"}) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})  # kept alive until it has a response
        admin.create_topics([NewTopic("kept", PARTITIONS, 1, config=CONFIG)])["kept"].result(20)
        final = _fill(broker)
        deadline = time.monotonic() + 60
        while _runs(broker) < PARTITIONS or not _emptied(broker):
            assert time.monotonic() < deadline, broker.logs()
            time.sleep(0.05)  # another process
        yield broker, "kept", final


def _fill(broker: Broker) -> Final:
    chance, final = random.Random(1), {}
    for number, codec in enumerate(CODECS * 3):
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "enable.idempotence": number % 2 == 0,
                "compression.type": codec,
                "linger.ms": 5,
                "batch.num.messages": 25,
            }
        )
        for count in range(300):
            partition, key = chance.randrange(PARTITIONS), b"key-%d" % chance.randrange(KEYS)
            value = None if chance.random() < 0.1 else b"%d-%d-" % (number, count) + b"." * 60
            producer.produce("kept", value, key, partition, headers=[("codec", codec.encode())])
            final[partition, key] = value
        assert producer.flush(30) == 0
    return {place: value for place, value in final.items() if value is not None}


def _runs(broker: Broker) -> int:
    return sum(
        one.runs > 0
        for worker in range(broker.workers)
        for one in compaction_report.read(broker.data_dir / "run", worker).partitions
    )


def _emptied(broker: Broker) -> bool:
    """Whether there is a batch without records, so that clients encounter one."""
    for path in sorted((broker.data_dir / "log").glob("kept-*/*.log")):
        try:
            if any(batch.record_count == 0 for batch in dump_segment(path)):
                return True
        except FileNotFoundError:
            pass  # compacted just now
    return False


def reduce(rows: list[tuple[int, int, bytes, bytes | None]]) -> Final:
    """(partition, offset, key, value) in the order of delivery."""
    last: dict[int, int] = {}
    found: Final = {}
    for partition, offset, key, value in rows:
        assert offset > last.get(partition, -1), f"offset {offset} after {last[partition]} in partition {partition}"
        last[partition] = offset
        if value is None:
            found.pop((partition, key), None)
        else:
            found[partition, key] = value
    return found


def test_confluent_kafka(compacted):
    broker, topic, final = compacted
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "g",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "check.crcs": True,
            "fetch.max.bytes": 20000,
            "message.max.bytes": 20000,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    rows, ended, deadline = [], set(), time.monotonic() + 60
    while len(ended) < PARTITIONS:
        assert time.monotonic() < deadline
        message = consumer.poll(1)
        if message is None:
            continue
        if message.error():
            assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF, message.error()
            ended.add(message.partition())
        else:
            rows.append((message.partition(), message.offset(), message.key(), message.value()))
    consumer.close()
    assert reduce(rows) == final and len(rows) < 3000


def test_kafka_python(compacted):
    broker, topic, final = compacted
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=broker.bootstrap,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=20000,
    )
    expected = [kafka.TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    consumer.assign(expected)
    ends, rows, deadline = consumer.end_offsets(expected), [], time.monotonic() + 60
    while any(consumer.position(one) < ends[one] for one in expected):
        assert time.monotonic() < deadline, {one: consumer.position(one) for one in expected}
        for messages in consumer.poll(500).values():
            rows += [(message.partition, message.offset, message.key, message.value) for message in messages]
    consumer.close()
    assert reduce(rows) == final


def test_aiokafka(compacted):
    broker, topic, final = compacted

    async def read() -> list[tuple[int, int, bytes, bytes | None]]:
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=broker.bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            max_partition_fetch_bytes=20000,
        )
        await consumer.start()
        try:
            expected = [aiokafka.TopicPartition(topic, partition) for partition in range(PARTITIONS)]
            consumer.assign(expected)
            ends, rows, deadline = await consumer.end_offsets(expected), [], time.monotonic() + 60
            for one in expected:
                consumer.seek(one, 0)
            while any([await consumer.position(one) < ends[one] for one in expected]):
                assert time.monotonic() < deadline
                for messages in (await consumer.getmany(timeout_ms=500)).values():
                    rows += [(message.partition, message.offset, message.key, message.value) for message in messages]
            return rows
        finally:
            await consumer.stop()

    assert reduce(asyncio.run(read())) == final
