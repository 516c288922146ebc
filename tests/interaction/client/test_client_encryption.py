"""Encrypted values end to end: the stored bytes, and what consumers with and without the keys read,
over both transports, in transactions, and by the command line. A compacted topic keeps its
tombstones.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import AsyncConsumer, AsyncProducer, Consumer, Producer
from mqd.client.encryption.envelope import MAGIC
from mqd.client.encryption.keys import format_keys, new_key
from tests.broker import Broker
from tests.client_reading import read_all
from tests.interaction.command_line import CommandLine

SECRET = b"the broker must not read these words"


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(format_keys({"key-1": new_key()}))
    file.chmod(0o600)
    return file


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    name = f"sealed-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(20)
    return name


def _producer(broker: Broker, keys: Path | None, transport: str, **config: Any) -> Producer:
    return Producer(_settings(broker, keys, transport, config))


def _consumer(broker: Broker, keys: Path | None, transport: str, topic: str, **config: Any) -> Consumer:
    consumer = Consumer({"group.id": topic, **_settings(broker, keys, transport, config)})
    consumer.assign([TopicPartition(topic, 0, confluent_kafka.OFFSET_STORED)])
    return consumer


def _settings(broker: Broker, keys: Path | None, transport: str, more: dict[str, Any]) -> dict[str, Any]:
    encryption = {} if keys is None else {"encryption.key.provider": f"file:{keys}"}
    more = {name if callable(value) else name.replace("_", "."): value for name, value in more.items()}
    return {
        "bootstrap.servers": broker.bootstrap,
        "transport": transport,
        **({"auto.offset.reset": "earliest"} if "linger.ms" not in more else {}),
        **encryption,
        **more,
    }


def _take(consumer: Consumer, count: int) -> Iterator[Any]:
    for _ in range(count):
        message = consumer.poll(20)
        assert message is not None
        yield message


def test_stored_values_are_encrypted_and_read_back(
    shared_broker: Broker, topic: str, keys: Path, transport: str
) -> None:
    reports: list[tuple[Any, bytes | None]] = []
    rows = np.frombuffer(SECRET * 3, np.uint8).reshape(3, -1)
    with _producer(
        shared_broker,
        keys,
        transport,
        linger_ms=1,
        encryption_compression="zstd",
        on_delivery=lambda error, message: reports.append((error, message.value())),
    ) as producer:
        producer.produce(topic, SECRET, key=b"a", headers={"kind": b"clear"})
        producer.produce(topic, SECRET.decode() * 9, key="b", on_delivery=lambda e, m: reports.append((e, m.value())))
        producer.produce(topic, None, key=b"a")
        assert producer.produce_batch(topic, rows, keys=[b"c", None, b""], headers={"kind": b"clear"}) == 3
        assert producer.produce_batch(topic, [None, SECRET], keys=[b"c", b"d"]) == 2
        assert producer.flush(60) == 0
    assert reports[:3] == [(None, SECRET), (None, SECRET * 9), (None, None)]

    stored = read_all(shared_broker, topic, 8)
    values = [message.value() for message in stored]
    assert [message.key() for message in stored] == [b"a", b"b", b"a", b"c", None, b"", b"c", b"d"]
    assert [message.headers() for message in stored[:2]] == [[("kind", b"clear")], None]
    assert [index for index, value in enumerate(values) if value is None] == [2, 6]  # tombstones stay
    sealed = [value for value in values if value is not None]
    assert all(value.startswith(MAGIC) for value in sealed) and len(set(sealed)) == 6
    segments = list(shared_broker.data_dir.rglob(f"{topic}-0/*.log"))
    assert segments and not any(SECRET in segment.read_bytes() for segment in segments)

    given = [SECRET, SECRET * 9, None, SECRET, SECRET, SECRET, None, SECRET]
    for way in ("shm", "tcp"):
        consumer = _consumer(shared_broker, keys, way, topic, enable_auto_commit=False)
        assert [message.value() for message in _take(consumer, 3)] == given[:3]
        found = consumer.consume(2, 20)
        assert [message.value() for message in found] == given[3:5] and found[0].headers() == [("kind", b"clear")]
        rest: list[Any] = []
        while len(rest) < 3:
            with consumer.consume_batch(100, 20) as batch:
                rest += zip(batch.keys.to_list(), batch.values.to_list(), map(batch.headers, range(len(batch))))
        assert [value for _, value, _ in rest] == given[5:]
        assert [key for key, _, _ in rest] == [b"", b"c", b"d"] and rest[0][2] == [("kind", b"clear")]
        consumer.close()


def test_a_value_that_cannot_be_decrypted(
    shared_broker: Broker, topic: str, keys: Path, transport: str, tmp_path: Path
) -> None:
    """It is reported as an error event with the sealed value, and nothing is committed beyond it
    until a later record is returned. consume_batch raises it once, between the records before and
    after it.
    """
    with _producer(shared_broker, keys, transport, linger_ms=1) as sealing:
        sealing.produce(topic, b"first")
        sealing.flush(60)
        with _producer(shared_broker, None, transport, linger_ms=1) as plain:
            plain.produce(topic, b"plain")
            plain.flush(60)
        sealing.produce(topic, b"last")
        sealing.flush(60)

    consumer = _consumer(shared_broker, keys, transport, topic)
    first, wrong = _take(consumer, 2)
    assert first.value() == b"first" and wrong.value() == b"plain" and wrong.offset() == 1
    assert wrong.error().code() == KafkaError._VALUE_DESERIALIZATION and "it is not sealed" in wrong.error().str()
    with pytest.raises(KafkaException):
        consumer.commit(wrong)
    consumer.close()
    consumer = _consumer(shared_broker, keys, transport, topic)
    again, last = _take(consumer, 2)
    assert (again.offset(), again.error().code()) == (1, KafkaError._VALUE_DESERIALIZATION)
    assert last.value() == b"last"
    consumer.close()
    assert _consumer_position(shared_broker, topic) == 3

    consumer = _consumer(shared_broker, keys, transport, topic)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[Any] = []
    while len(found) < 3:
        try:
            found += consumer.consume_batch(100, 20).values.to_list()
        except KafkaException as error:
            found.append(error.args[0].str())
            assert _stored(consumer) <= 1
    assert found[::2] == [b"first", b"last"] and f"{topic} [0]: the value at offset 1 cannot be opened" in found[1]
    consumer.close()

    foreign = tmp_path / "foreign"
    foreign.write_text(format_keys({"key-2": new_key()}))
    consumer = _consumer(shared_broker, foreign, transport, topic, enable_auto_commit=False)
    consumer.assign([TopicPartition(topic, 0, 0)])
    (message,) = _take(consumer, 1)
    assert "its key 'key-1' cannot be obtained" in message.error().str() and message.value().startswith(MAGIC)
    consumer.close()
    raw = _consumer(shared_broker, foreign, transport, topic, enable_auto_commit=False, encryption_on_failure="raw")
    raw.assign([TopicPartition(topic, 0, 0)])
    values = [message.value() for message in _take(raw, 3)]
    assert values[1] == b"plain" and values[0].startswith(MAGIC) and values[2].startswith(MAGIC)
    raw.close()


def _stored(consumer: Consumer) -> int:
    """The offsets a commit would write."""
    try:
        found = consumer.commit(asynchronous=False)
    except KafkaException:
        return -1
    return max((one.offset for one in found or ()), default=-1)


def _consumer_position(broker: Broker, topic: str) -> int:
    reader = confluent_kafka.Consumer({"bootstrap.servers": broker.bootstrap, "group.id": topic})
    (found,) = reader.committed([TopicPartition(topic, 0)], 20)
    reader.close()
    return found.offset


def test_a_transaction_of_sealed_values(shared_broker: Broker, topic: str, keys: Path, transport: str) -> None:
    with _producer(shared_broker, keys, transport, linger_ms=1, transactional_id=topic) as producer:
        producer.init_transactions(20)
        for value, commits in ((b"aborted", False), (b"committed", True)):
            producer.begin_transaction()
            producer.produce(topic, value, key=b"k")
            producer.produce_batch(topic, [value] * 2, keys=[b"k"] * 2)
            producer.commit_transaction(20) if commits else producer.abort_transaction(20)
    consumer = _consumer(shared_broker, keys, transport, topic, isolation_level="read_committed")
    assert [message.value() for message in _take(consumer, 3)] == [b"committed"] * 3
    consumer.close()


def test_asyncio(shared_broker: Broker, topic: str, keys: Path, transport: str) -> None:
    async def run() -> list[Any]:
        async with AsyncProducer(_settings(shared_broker, keys, transport, {"linger_ms": 1})) as producer:
            written = await (await producer.produce(topic, SECRET, key=b"k"))
            assert written.value() == SECRET
            await producer.produce_batch(topic, [SECRET] * 4)
        settings = _settings(shared_broker, keys, transport, {"group.id": topic, "enable.auto.commit": False})
        async with AsyncConsumer(settings) as consumer:
            await consumer.assign([TopicPartition(topic, 0, 0)])
            found = [await consumer.getone()]
            # a cancelled wait, whose records are not lost
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await consumer.getmany(2)
            found += await consumer.consume(2, 20)
            while len(found) < 5:
                found += await consumer.getmany(2, 20)
            return [message.value() for message in found]

    assert asyncio.run(run()) == [SECRET] * 5


def test_invalid_settings_are_refused(shared_broker: Broker, keys: Path, transport: str) -> None:
    for make in (Producer, Consumer):
        for more, message in (
            ({"encryption.key.provider": "file:/no/such/file"}, "cannot read the keys in /no/such/file"),
            ({"encryption.topics": "x"}, "encryption.key.provider is needed for encryption"),
            ({"encryption.key.file": "x"}, 'No such configuration property: "encryption.key.file"'),
        ):
            with pytest.raises(KafkaException) as raised:
                make({"bootstrap.servers": shared_broker.bootstrap, "transport": transport, "group.id": "g", **more})
            assert raised.value.args[0].code() == KafkaError._INVALID_ARG and message in raised.value.args[0].str()


def test_the_command_line(
    shared_broker: Broker,
    topic: str,
    keys: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    mqd = CommandLine(shared_broker, monkeypatch, capfdbinary)
    lines = tmp_path / "lines"
    lines.write_bytes(b"k:%s\nk:\n" % SECRET)
    provider = f"encryption.key.provider=file:{keys}"
    code, _, error = mqd("produce", topic, str(lines), "-k", ":", "-Z", "-X", provider)
    assert code == 0, error
    stored = read_all(shared_broker, topic, 2)
    assert stored[0].value().startswith(MAGIC) and (stored[1].key(), stored[1].value()) == (b"k", None)
    settings = tmp_path / "client.properties"
    settings.write_text(provider + "\n")
    monkeypatch.setenv("MQD_CLIENT_CONFIG", "")  # --client-config sets it: monkeypatch restores the old value
    for reported in (("-X", provider), ("--client-config", str(settings))):
        code, out, error = mqd("consume", topic, "-e", "-Z", "-f", "%k=%v\n", *reported)
        assert (code, out) == (0, f"k={SECRET.decode()}\nk=NULL\n"), error
        monkeypatch.setenv("MQD_CLIENT_CONFIG", "")
    code, out, _ = mqd("consume", topic, "-e", "-n", "1", "-f", "%V\n")
    assert (code, int(out)) == (0, len(stored[0].value()))
    other = tmp_path / "other"
    assert mqd("key", "create", str(other), "--id", "key-2")[0] == 0
    code, out, error = mqd("consume", topic, "-e", "-X", f"encryption.key.provider=file:{other}")
    assert (code, out) == (1, "") and "its key 'key-1' cannot be obtained" in error


@pytest.mark.slow
def test_a_compacted_topic(start_broker: Callable[..., Broker], keys: Path, transport: str) -> None:
    """The last sealed value of each key stays and can be decrypted; a tombstone removes its key."""
    broker = start_broker(config={"log.cleaner.backoff.ms": "100"})
    name = f"compacted-{uuid.uuid4().hex[:8]}"
    compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.bytes": "16384"}
    compacted |= {"delete.retention.ms": "0", "min.compaction.lag.ms": "0"}
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, 1, 1, config=compacted)])[name].result(20)
    refused: list[Any] = []
    with _producer(
        broker,
        keys,
        transport,
        linger_ms=1,
        batch_num_messages=20,  # a batch has to fit into a segment
        on_delivery=lambda error, _message: error and refused.append(error),
    ) as producer:
        for turn in range(200):
            for key in (b"kept", b"gone"):
                producer.produce(name, b"%d" % turn * 50, key=key)
        producer.produce(name, None, key=b"gone")
        producer.flush(60)
        deadline, turn = time.monotonic() + 60, 0
        while True:
            producer.produce(name, b"%d" % turn * 500, key=b"rolls")  # the active segment is not compacted
            producer.flush(60)
            assert not refused
            consumer = _consumer(broker, keys, transport, name, enable_auto_commit=False)
            consumer.assign([TopicPartition(name, 0, 0)])
            found: dict[bytes, list[bytes | None]] = {}
            while b"%d" % turn * 500 not in found.get(b"rolls", ()):
                (message,) = _take(consumer, 1)
                assert message.error() is None
                found.setdefault(message.key(), []).append(message.value())
            consumer.close()
            if found.get(b"kept") == [b"199" * 50] and b"gone" not in found:
                return
            assert time.monotonic() < deadline, {key: len(values) for key, values in found.items()}
            turn += 1
