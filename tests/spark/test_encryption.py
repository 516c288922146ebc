"""Encrypted values and Spark: the sink seals, the source opens, and an archive without keys replays
values that it cannot decrypt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqd import Consumer, Producer, TopicPartition
from mqd.client.encryption.envelope import MAGIC
from mqd.client.encryption.keys import format_keys, new_key
from mqd.spark.pipelines.settings import Replay
from tests.broker import Broker
from tests.client_reading import read_all
from tests.spark.support import new_topic
from tests.spark.test_pipelines_running import archive_of, run

ROWS = [(b"a", b"first"), (b"b", None), (None, b"third"), (b"", b"fourth" * 100)]


@pytest.fixture
def provider(tmp_path: Path) -> str:
    (tmp_path / "keys").write_text(format_keys({"key-1": new_key()}))
    return f"file:{tmp_path / 'keys'}"


def _load(spark: Any, broker: Broker, topic: str, **options: str) -> Any:
    reader = spark.read.format("mqd").option("kafka.bootstrap.servers", broker.bootstrap).option("subscribe", topic)
    return reader.option("includeHeaders", "true").options(**options).load()


def _opened(broker: Broker, topic: str, provider: str, count: int) -> list[tuple[bytes | None, bytes | None]]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topic, "encryption.key.provider": provider})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = consumer.consume(count, 20)
    consumer.close()
    assert [message.error() for message in found] == [None] * count
    return [(message.key(), message.value()) for message in found]


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_written_sealed_and_read_opened(spark: Any, broker: Broker, provider: str, transport: str) -> None:
    topic = new_topic(broker)
    options = {"transport": transport, "encryption.key.provider": provider, "encryption.compression": "zstd"}
    headers = [("kind", b"clear")]
    frame = spark.createDataFrame(
        [(*row, headers) for row in ROWS], "key binary, value binary, headers array<struct<key:string,value:binary>>"
    ).coalesce(1)
    writer = frame.write.format("mqd").mode("append").option("kafka.bootstrap.servers", broker.bootstrap)
    writer.option("topic", topic).options(**options).save()
    stored = read_all(broker, topic, len(ROWS))
    assert [message.key() for message in stored] == [key for key, _ in ROWS]
    assert [message.value() is not None and message.value()[:3] for message in stored] == [MAGIC, False, MAGIC, MAGIC]
    assert _opened(broker, topic, provider, len(ROWS)) == ROWS
    rows = _load(spark, broker, topic, **options).orderBy("offset").collect()
    assert [tuple(None if cell is None else bytes(cell) for cell in (row.key, row.value)) for row in rows] == ROWS
    assert [[(one.key, bytes(one.value)) for one in row.headers] for row in rows] == [headers] * len(ROWS)
    part = _load(spark, broker, topic, startingOffsets=f'{{"{topic}":{{"0":2}}}}', **options)
    assert [bytes(row.value) for row in part.orderBy("offset").collect()] == [b"third", b"fourth" * 100]


def test_values_that_cannot_be_decrypted_are_reported_by_offset(
    spark: Any, broker: Broker, provider: str, tmp_path: Path
) -> None:
    topic = new_topic(broker)
    with Producer({"bootstrap.servers": broker.bootstrap, "encryption.key.provider": provider}) as producer:
        producer.produce(topic, b"value")
        producer.flush(60)
    foreign = tmp_path / "foreign"
    foreign.write_text(format_keys({"key-2": new_key()}))
    reported = {"encryption.key.provider": f"file:{foreign}"}
    with pytest.raises(Exception, match="the value at offset 0 cannot be decrypted: its key 'key-1' cannot"):
        _load(spark, broker, topic, **reported).collect()
    (row,) = _load(spark, broker, topic, **reported, **{"encryption.on.failure": "raw"}).collect()
    assert bytes(row.value).startswith(MAGIC)


@pytest.mark.slow
def test_an_archive_without_keys_is_replayed(spark: Any, broker: Broker, provider: str, tmp_path: Path) -> None:
    """Into a topic with another name, which is set in the readers' options."""
    topic, copy = new_topic(broker), new_topic(broker)
    with Producer({"bootstrap.servers": broker.bootstrap, "encryption.key.provider": provider}) as producer:
        for key, value in ROWS:
            producer.produce(topic, value, key=key)
        producer.flush(60)
    run(spark, archive_of(broker, topic, tmp_path))
    run(spark, Replay(name="replaying", bootstrap=broker.bootstrap, path=str(tmp_path / "archive"), to={topic: copy}))
    assert [message.value() for message in read_all(broker, copy, len(ROWS))] == [
        message.value() for message in read_all(broker, topic, len(ROWS))
    ]
    reported = {"encryption.key.provider": provider, "encryption.topic.names": f"{copy}={topic}"}
    rows = _load(spark, broker, copy, **reported).orderBy("offset").collect()
    assert [row.value and bytes(row.value) for row in rows] == [value for _, value in ROWS]
