"""mqd.Producer against a running broker, over shared memory and over TCP: confluent_kafka's
contract, and produce_batch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import confluent_kafka
import numpy as np
import pytest

import mqd
from mqd import KafkaError, KafkaException, Producer
from tests.broker import Broker
from tests.client_reading import read_all

_names = iter(range(1_000_000))


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest, io_backend: str) -> str:
    """The I/O backends are tested with librdkafka in tests/compat: one is enough here."""
    if request.param == "tcp" and io_backend != "epoll":
        pytest.skip("TCP is tried with one engine")
    return request.param


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return _make_topic(shared_broker, 3)


def _make_topic(broker: Broker, partitions: int) -> str:
    from confluent_kafka.admin import AdminClient, NewTopic

    name = f"producer-{next(_names)}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config={"flush.on.ack": "false"})])[name].result(20)
    return name


@pytest.fixture
def make(shared_broker: Broker, transport: str) -> Iterator:
    made: list[Producer] = []

    def make(**config) -> Producer:
        given = {key.replace("_", "."): value for key, value in config.items()}
        made.append(
            Producer({"bootstrap.servers": shared_broker.bootstrap, "transport": transport, "linger.ms": 1, **given})
        )
        assert made[-1].transport == transport
        return made[-1]

    yield make
    for producer in made:
        producer.close()


def test_records_arrive_unchanged(make, shared_broker: Broker, topic: str) -> None:
    producer = make()
    reports: list = []
    note = lambda error, message: reports.append((error, message))  # noqa: E731
    producer.produce(topic, b"plain", partition=0)
    producer.produce(topic, "text", "key", 0, on_delivery=note, headers={"a": b"1", "b": None}, timestamp=1234567890123)
    producer.produce(topic, None, b"tombstone", 0, callback=note)
    producer.produce(topic, b"", partition=0, headers=[("x", "y")], on_delivery=note)
    assert producer.flush(60) == 0 and len(producer) == 0
    found = read_all(shared_broker, topic, 4)
    assert [(m.key(), m.value()) for m in found] == [
        (None, b"plain"),
        (b"key", b"text"),
        (b"tombstone", None),
        (None, b""),
    ]
    assert found[1].headers() == [("a", b"1"), ("b", None)] and found[1].timestamp() == (
        confluent_kafka.TIMESTAMP_CREATE_TIME,
        1234567890123,
    )
    assert found[3].headers() == [("x", b"y")]
    assert abs(found[0].timestamp()[1] / 1000 - time.time()) < 60
    assert [error for error, _ in reports] == [None] * 3
    assert [(m.topic(), m.partition(), m.offset()) for _, m in reports] == [(topic, 0, 1), (topic, 0, 2), (topic, 0, 3)]
    assert all(isinstance(m, confluent_kafka.Message) and m.latency() >= 0 for _, m in reports)
    assert (reports[0][1].key(), reports[0][1].value()) == (b"key", b"text")


def test_producing_creates_the_topic(make, shared_broker: Broker) -> None:
    producer = make()
    name = f"made-{next(_names)}"
    producer.produce(name, b"x")
    assert producer.flush(60) == 0
    assert len(read_all(shared_broker, name, 1)) == 1


def test_produce_raises_for_invalid_arguments(make, topic: str) -> None:
    producer = make(message_max_bytes=10_000)
    for arguments in [(topic, 5), (topic, b"v", 5), (None, b"v")]:
        with pytest.raises(TypeError):
            producer.produce(*arguments)
    with pytest.raises(TypeError, match="header"):
        producer.produce(topic, b"v", headers=[("a", 5)])
    with pytest.raises(TypeError, match="header"):
        producer.produce(topic, b"v", headers=5)
    with pytest.raises(KafkaException) as raised:
        producer.produce(topic, bytes(10_001))
    assert raised.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    with pytest.raises(KafkaException) as raised:
        producer.begin_transaction()
    assert raised.value.args[0].code() == KafkaError._NOT_CONFIGURED
    assert producer.flush(60) == 0


def test_an_unknown_partition_is_an_error(make, topic: str) -> None:
    producer = make()
    producer.list_topics(topic, 10)
    errors: list[KafkaError] = []
    producer.produce(topic, b"known", partition=0)
    assert producer.flush(60) == 0
    try:
        producer.produce(topic, b"v", partition=99, on_delivery=lambda error, _message: errors.append(error))
    except KafkaException as error:
        errors.append(error.args[0])
    producer.flush(60)
    assert [error.code() for error in errors] == [KafkaError._UNKNOWN_PARTITION]


def test_invalid_settings_are_refused_as_by_librdkafka(shared_broker: Broker, transport: str) -> None:
    for wrong in (
        {"no.such.key": 1},
        {"acks": 7777},
        {"enable.idempotence": True, "acks": 1},
        {"compression.type": "rar"},
        {"mqd.nothing": 1},
        {"transport": "pigeon"},
    ):
        with pytest.raises(KafkaException) as raised:
            Producer({"bootstrap.servers": shared_broker.bootstrap, "transport": transport, **wrong})
        assert raised.value.args[0].code() == KafkaError._INVALID_ARG
    with pytest.raises(TypeError):
        Producer("127.0.0.1:9092")  # type: ignore[arg-type]
    ignored = {
        "socket.keepalive.enable": True,
        "socket.send.buffer.bytes": 100000,
        "ssl.endpoint.identification.algorithm": "none",
        "client.rack": "a",
    }
    Producer({"bootstrap.servers": shared_broker.bootstrap, "transport": transport, **ignored}).close()


def test_a_full_queue_raises_buffer_error(make, shared_broker: Broker, topic: str) -> None:
    producer = make(queue_buffering_max_messages=10, linger_ms=1000)
    taken = 0
    with pytest.raises(BufferError, match="Queue full"):
        for _ in range(11):
            producer.produce(topic, b"x", partition=0)
            taken += 1
    assert taken == 10 and len(producer) == 10
    assert producer.flush(60) == 0
    producer.produce(topic, b"x", partition=0)
    assert producer.flush(60) == 0
    assert len(read_all(shared_broker, topic, 11)) == 11


def test_records_are_sent_after_linger_ms(make, topic: str) -> None:
    reports: list = []
    producer = make(linger_ms=20)
    producer.produce(topic, b"x", on_delivery=lambda error, message: reports.append(message))
    assert producer.poll(20) == 1 and len(reports) == 1


def test_order_with_many_threads(make, shared_broker: Broker) -> None:
    topic = _make_topic(shared_broker, 1)
    producer = make()

    def send(thread: int) -> None:
        for number in range(2000):
            producer.produce(topic, b"%d:%d" % (thread, number), key=None if number % 3 else b"k")

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert producer.flush(30) == 0
    seen: dict[bytes, list[int]] = {}
    for message in read_all(shared_broker, topic, 8000):
        thread, number = message.value().split(b":")
        seen.setdefault(thread, []).append(int(number))
    assert all(numbers == list(range(2000)) for numbers in seen.values()) and len(seen) == 4


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_compression_and_idempotence(make, shared_broker: Broker, topic: str, compression: str) -> None:
    producer = make(compression_type=compression, enable_idempotence=True)
    offsets: dict[int, list[int]] = {}
    for number in range(3000):
        producer.produce(
            topic,
            b"value %d " % number * 5,
            key=b"%d" % (number % 50),
            on_delivery=lambda error, m: offsets.setdefault(m.partition(), []).append(m.offset()),
            headers={"n": b"1"} if number % 7 == 0 else None,
        )
    assert producer.flush(30) == 0
    found = read_all(shared_broker, topic, 3000)
    assert sorted(m.value() for m in found) == sorted(b"value %d " % number * 5 for number in range(3000))
    assert all(numbers == list(range(len(numbers))) for numbers in offsets.values())
    by_key: dict[bytes, list[int]] = {}
    for m in found:
        by_key.setdefault(m.key(), []).append(int(m.value().split()[1]))
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_acks(make, shared_broker: Broker, topic: str, acks) -> None:
    producer = make(acks=acks)
    reports: list = []
    for _ in range(100):
        producer.produce(
            topic, b"x", partition=1, on_delivery=lambda error, message: reports.append((error, message.offset()))
        )
    assert producer.flush(60) == 0 and len(reports) == 100
    assert all(error is None for error, _ in reports)
    assert len(read_all(shared_broker, topic, 100)) == 100


# -- produce_batch ---------------------------------------------------------------------------------


def test_batches_of_every_kind(make, shared_broker: Broker) -> None:
    topic = _make_topic(shared_broker, 1)
    producer = make()
    expected: list[tuple] = []

    def send(values, plain: list, keys=None, plain_keys=None, **more) -> None:
        assert producer.produce_batch(topic, values, keys, **more) == len(plain)
        expected.extend(zip(plain, plain_keys or [None] * len(plain), strict=True))

    send([b"a", "b", None, bytearray(b"c")], [b"a", b"b", None, b"c"])
    send((b"x", b"yy"), [b"x", b"yy"], keys=["k", None], plain_keys=[b"k", None])
    send(np.array([b"full", b"part", b"x"]), [b"full", b"part", b"x"])
    send(np.array([b"same", b"size"]), [b"same", b"size"], keys=np.array([b"k1", b"k2"]), plain_keys=[b"k1", b"k2"])
    send(np.arange(12, dtype=np.uint8).reshape(3, 4), [bytes([0, 1, 2, 3]), bytes([4, 5, 6, 7]), bytes([8, 9, 10, 11])])
    send(np.array(["o", b"p", None], object), [b"o", b"p", None])
    send([], [])
    send([b"with"], [b"with"], headers={"h": b"1"}, timestamps=1_600_000_000_000, partition=0)
    send(
        [b"each", b"none"],
        [b"each", b"none"],
        headers=[{"h": "2"}, None],
        timestamps=np.array(["2020-01-01", "2020-01-02"], "datetime64[s]"),
        partition=np.array([0, -1]),
    )
    assert producer.flush(60) == 0
    found = read_all(shared_broker, topic, len(expected))
    assert [(m.value(), m.key()) for m in found] == expected
    assert [m.headers() for m in found[-3:]] == [[("h", b"1")], [("h", b"2")], None]
    assert [m.timestamp()[1] for m in found[-3:]] == [1_600_000_000_000, 1_577_836_800_000, 1_577_923_200_000]


def test_arrow_arrays(make, shared_broker: Broker) -> None:
    pa = pytest.importorskip("pyarrow")
    topic = _make_topic(shared_broker, 1)
    producer = make()
    arrays = [
        pa.array([b"a", None, b"ccc"], pa.binary()),
        pa.array(["x", "yy", ""], pa.string()),
        pa.array([b"zero", b"one", b"two", b"three"], pa.large_binary()).slice(1, 2),
        pa.array([b"1234", b"5678"], pa.binary(4)),
        pa.array([b"1234", None], pa.binary(4)),
        pa.chunked_array([["p"], ["q", None]]),
        pa.array([], pa.binary()),
        pa.array(["d", "d", "e"]).dictionary_encode(),
    ]
    expected: list = []
    for array in arrays:
        plain = [value.encode() if isinstance(value, str) else value for value in array.to_pylist()]
        assert producer.produce_batch(topic, array, keys=array) == len(plain)
        expected += plain
    assert producer.flush(60) == 0
    assert [(m.value(), m.key()) for m in read_all(shared_broker, topic, len(expected))] == [
        (value, value) for value in expected
    ]
    with pytest.raises(TypeError):
        producer.produce_batch(topic, pa.array([1, 2]))


def test_reports_of_a_batch(make, shared_broker: Broker, topic: str) -> None:
    producer = make()
    values = [b"%d" % number for number in range(5000)]
    keys = [b"key %d" % (number % 97) for number in range(5000)]
    reports: list = []
    assert (
        producer.produce_batch(
            topic, values, keys, on_delivery=lambda error, delivery: reports.append((error, delivery))
        )
        == 5000
    )
    assert producer.flush(60) == 0
    places = {}
    for error, delivery in reports:
        assert error is None and delivery.topic == topic and delivery.count == len(delivery.indices)
        for at, index in enumerate(delivery.indices):
            places[int(index)] = (delivery.partition, delivery.base_offset + at)
    assert sorted(places) == list(range(5000))
    for message in read_all(shared_broker, topic, 5000):
        assert places[int(message.value())] == (message.partition(), message.offset())


def test_a_batch_larger_than_the_queue_waits(make, shared_broker: Broker) -> None:
    topic = _make_topic(shared_broker, 1)
    producer = make(queue_buffering_max_messages=500)
    values = np.arange(20_000, dtype=">u8").view(np.uint8).reshape(-1, 8)
    reports: list = []
    assert (
        producer.produce_batch(topic, values, on_delivery=lambda error, delivery: reports.append(delivery.count))
        == 20_000
    )
    assert producer.flush(30) == 0 and sum(reports) == 20_000
    assert [int.from_bytes(m.value(), "big") for m in read_all(shared_broker, topic, 20_000)] == list(range(20_000))


def test_a_batch_without_waiting_returns_the_number_accepted(make, shared_broker: Broker) -> None:
    topic = _make_topic(shared_broker, 1)
    producer = make(queue_buffering_max_messages=100, linger_ms=50)
    producer.list_topics(topic, 10)
    producer.produce(topic, b"first")
    producer.flush(60)
    values = [b"%d" % number for number in range(1000)]
    taken = producer.produce_batch(topic, values, timeout=0)
    assert 0 < taken < 1000
    assert taken + producer.produce_batch(topic, values[taken:]) == 1000
    assert producer.flush(60) == 0
    assert [m.value() for m in read_all(shared_broker, topic, 1001)][1:] == values


def test_invalid_batches_are_refused_whole(make, shared_broker: Broker, topic: str) -> None:
    producer = make(message_max_bytes=1000)
    for values, keys, error in [
        ([b"a", 5], None, TypeError),
        (b"bytes", None, TypeError),
        ([b"a", b"b"], [b"k"], ValueError),
        ([b"a", bytes(1001)], None, KafkaException),
        (np.array([1.0]), None, TypeError),
        ([b"a" * 600], [b"k" * 600], KafkaException),
    ]:
        with pytest.raises(error):
            producer.produce_batch(topic, values, keys)
    with pytest.raises(TypeError):
        producer.produce_batch(topic, [b"a"], headers=[{"a": 5}])
    with pytest.raises((TypeError, ValueError)):
        producer.produce_batch(topic, [b"a"], partition=[0, 1])
    assert producer.produce_batch(topic, [b"a"]) == 1
    assert producer.flush(60) == 0
    assert len(read_all(shared_broker, topic, 1)) == 1


def test_confluent_kafkas_produce_batch(make, shared_broker: Broker, topic: str) -> None:
    producer = make()
    seen: list = []
    messages = [
        {"value": "one", "key": "k"},
        {"value": b"two", "partition": 2, "callback": lambda error, message: seen.append(message.partition())},
        {"value": 5.0},
    ]
    with pytest.raises(TypeError):
        producer.produce_batch(topic, messages)
    assert producer.produce_batch(topic, messages[:2], on_delivery=lambda error, message: seen.append("all")) == 2
    assert producer.flush(60) == 0
    assert sorted(map(str, seen))[:1] == ["2"] and "all" in seen
    assert len(read_all(shared_broker, topic, 4)) == 4


# -- partitioners ----------------------------------------------------------------------------------


def test_a_callable_can_be_the_partitioner(make, shared_broker: Broker, topic: str) -> None:
    producer = make(partitioner=lambda key, count: (len(key) if key else 0) % count)
    producer.produce(topic, b"a", key=b"1")
    producer.produce(topic, b"b", key=b"12")
    producer.produce_batch(topic, [b"c", b"d"], keys=[b"123", b"1234"])
    assert producer.flush(60) == 0
    assert {m.value(): m.partition() for m in read_all(shared_broker, topic, 4)} == {b"a": 1, b"b": 2, b"c": 0, b"d": 1}
    with pytest.raises(KafkaException):
        make(partitioner=lambda key, count: count).produce(topic, b"x")


# -- life ------------------------------------------------------------------------------------------


def test_purge(make, shared_broker: Broker, topic: str) -> None:
    producer = make(linger_ms=60_000)
    errors: list[KafkaError] = []
    for _ in range(10):
        producer.produce(topic, b"x", on_delivery=lambda error, message: errors.append(error.code()))
    producer.purge()
    assert producer.flush(60) == 0
    assert len(errors) == 10 and set(errors) <= {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT}
    producer.produce(topic, b"after")
    assert producer.flush(60) == 0
    assert [m.value() for m in read_all(shared_broker, topic, 1)] == [b"after"]


def test_a_callback_that_raises_does_not_drop_other_callbacks(make, topic: str) -> None:
    producer = make()
    seen: list[int] = []

    def report(number: int):
        def call(_error, _message) -> None:
            seen.append(number)
            if number == 3:
                raise RuntimeError("in a callback")

        return call

    for number in range(6):
        producer.produce(topic, b"x", partition=0, on_delivery=report(number))
    with pytest.raises(RuntimeError, match="in a callback"):
        producer.flush(60)
    assert producer.flush(60) == 0
    assert seen == list(range(6))


def test_a_child_of_fork_gets_an_error(shared_broker: Broker, topic: str) -> None:
    producer = Producer({"bootstrap.servers": shared_broker.bootstrap, "transport": "shm"})
    producer.produce(topic, b"before")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            producer.produce(topic, b"in the child")
        except KafkaException as error:
            status = 0 if "fork" in str(error) else 2
        except BaseException:
            status = 3
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.produce(topic, b"after")
    assert producer.flush(60) == 0
    producer.close()
    assert sorted(m.value() for m in read_all(shared_broker, topic, 2)) == [b"after", b"before"]


def test_close_flushes_and_later_calls_raise(make, shared_broker: Broker, topic: str) -> None:
    with make(linger_ms=1000) as producer:
        producer.produce(topic, b"x")
    assert len(read_all(shared_broker, topic, 1)) == 1
    with pytest.raises((KafkaException, RuntimeError)):
        producer.produce(topic, b"y")


def test_asyncio(shared_broker: Broker, topic: str, transport: str) -> None:
    async def run() -> list[tuple[int, int]]:
        async with mqd.AsyncProducer(
            {"bootstrap.servers": shared_broker.bootstrap, "transport": transport, "linger.ms": 1}
        ) as producer:
            futures = [await producer.produce(topic, b"%d" % number, partition=0) for number in range(100)]
            messages = await asyncio.gather(*futures)
            deliveries = await producer.produce_batch(topic, [b"batch"] * 1000)
            assert sum(delivery.count for delivery in deliveries) == 1000
            with pytest.raises(KafkaException):
                await (await producer.produce(topic, b"x", partition=77))
            return [(message.partition(), message.offset()) for message in messages]

    assert asyncio.run(run()) == [(0, offset) for offset in range(100)]
    assert len(read_all(shared_broker, topic, 1100)) == 1100


# -- choice of transport -----------------------------------------------------------------------


def test_a_client_that_cannot_attach_uses_tcp(
    shared_broker: Broker, topic: str, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    """A socket without a server, as a killed broker leaves it behind."""
    path = str(tmp_path / "client.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as left:
        left.bind(path)
    caplog.set_level(logging.INFO, "mqd.client")
    with Producer({"bootstrap.servers": shared_broker.bootstrap, "mqd.socket.path": path}) as producer:
        assert producer.transport == "tcp" and "refused" in producer.transport_reason.lower()
        producer.produce(topic, b"x")
        assert producer.flush(60) == 0
    assert producer.transport_reason in caplog.text
    with pytest.raises((KafkaException, OSError)):
        Producer({"bootstrap.servers": shared_broker.bootstrap, "mqd.socket.path": path, "transport": "shm"})


def test_auto_chooses_shared_memory_for_a_local_broker(shared_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    with Producer({"bootstrap.servers": shared_broker.bootstrap}) as producer:
        assert producer.transport == "shm" and producer.transport_reason
    monkeypatch.setenv("MQD_SOCKET", str(shared_broker.data_dir / "run" / "client.sock"))
    with Producer({"bootstrap.servers": "somewhere.invalid:9092"}) as producer:
        assert producer.transport == "shm" and "MQD_SOCKET" in producer.transport_reason


def test_an_admin_client_accepts_a_clients_configuration(shared_broker: Broker, topic: str) -> None:
    admin = mqd.AdminClient({"bootstrap.servers": shared_broker.bootstrap, "transport": "shm", "mqd.spin.us": 5})
    assert topic in admin.list_topics(timeout=60).topics
    with pytest.raises(KafkaException):
        mqd.AdminClient({"bootstrap.servers": shared_broker.bootstrap, "no.such.key": 1})


def test_metadata_is_as_librdkafka_gives_it(shared_broker: Broker, topic: str) -> None:
    config = {"bootstrap.servers": shared_broker.bootstrap}
    with Producer({**config, "transport": "shm"}) as ours:
        theirs = confluent_kafka.Producer(config)
        for name in (None, topic):
            mine, other = (
                ours.list_topics(name, 10) if name else ours.list_topics(timeout=60),
                (theirs.list_topics(name, 10) if name else theirs.list_topics(timeout=60)),
            )
            assert (
                set(mine.topics) == set(other.topics)
                and mine.cluster_id == other.cluster_id
                and set(mine.brokers) == set(other.brokers)
            )
            assert {p.id: (p.leader, p.replicas, p.isrs) for p in mine.topics[topic].partitions.values()} == {
                p.id: (p.leader, p.replicas, p.isrs) for p in other.topics[topic].partitions.values()
            }


def test_an_idle_producer_uses_no_cpu(shared_broker: Broker, topic: str) -> None:
    with Producer({"bootstrap.servers": shared_broker.bootstrap, "transport": "shm"}) as producer:
        producer.produce(topic, b"x")
        assert producer.flush(60) == 0
        began = time.process_time()
        assert producer.poll(1.0) == 0
        assert time.process_time() - began < 0.2


def test_waiting_and_non_waiting_threads_share_a_producer(make, topic: str) -> None:
    """The waiting thread drives; the records of the others are delivered too."""
    producer = make()
    done = threading.Event()
    waiter = threading.Thread(target=lambda: [producer.poll(0.05) for _ in iter(done.is_set, True)])
    waiter.start()
    try:
        for _ in range(50):
            seen = threading.Event()
            producer.produce(topic, b"x", on_delivery=lambda error, message, seen=seen: seen.set())
            assert seen.wait(60)
    finally:
        done.set()
        waiter.join(60)
