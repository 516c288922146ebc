"""mqd.Consumer on a running broker: most tests over shared memory and over TCP, some only over
shared memory.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import confluent_kafka
import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from mqd import Consumer
from tests.broker import Broker
from tests.polling import PATIENCE_S

SECONDS = PATIENCE_S
QUICK_GROUPS = {
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.min.session.timeout.ms": "1000",
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp("client-consumer"),
        config={**QUICK_GROUPS, "group.initial.rebalance.delay.ms": "0", "log.flush.on.ack": "false"},
    ) as broker:
        yield broker


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def consumers(broker: Broker) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(group: str | None = None, *topics: str, transport: str = "shm", **config: object) -> Consumer:
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group or uuid.uuid4().hex,
            "auto.offset.reset": "earliest",
            "transport": transport,
            **config,
        }
        consumer = Consumer(
            {name if callable(value) else name.replace("_", "."): value for name, value in settings.items()}
        )
        assert consumer.transport == transport, consumer.transport_reason
        made.append(consumer)
        if topics:
            consumer.subscribe(list(topics))
        return consumer

    yield make
    for consumer in made:
        consumer.close()


@pytest.fixture(scope="module")
def admin(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


@pytest.fixture
def topic(admin: AdminClient) -> str:
    return make_topic(admin, 4)


def make_topic(admin: AdminClient, partitions: int, **config: str) -> str:
    name = f"t{uuid.uuid4().hex[:12]}"
    admin.create_topics(
        [NewTopic(name, partitions, config={key.replace("_", "."): value for key, value in config.items()})]
    )[name].result(SECONDS)
    return name


def produce(
    broker: Broker, topic: str, values: list[bytes], partition: int | None = None, partitions: int = 4, **config: object
) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": broker.bootstrap, **{name.replace("_", "."): value for name, value in config.items()}}
    )
    for index, value in enumerate(values):
        producer.produce(
            topic,
            value,
            key=b"k%d" % index,
            partition=index % partitions if partition is None else partition,
            headers=[("n", b"%d" % index)],
        )
    assert producer.flush(SECONDS) == 0


def take(consumer: Consumer, count: int, seconds: float = SECONDS) -> list:
    """Records; an error fails the test."""
    found: list = []
    deadline = time.monotonic() + seconds
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
    assert len(found) == count, f"{len(found)} of {count} records"
    return found


def until(consumers: list[Consumer], is_done: Callable[[], object], seconds: float = SECONDS) -> None:
    """Polls all consumers until the condition holds."""
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "not done in time"
        for consumer in consumers:
            message = consumer.poll(0.02)
            assert message is None or message.error() is None, message.error()


def positions_of(partitions: list[TopicPartition]) -> list[tuple[str, int]]:
    return sorted((one.topic, one.partition) for one in partitions)


# -- both transports ---------------------------------------------------------------------------


def test_a_group_reads_everything_once_and_continues_where_it_stopped(
    broker: Broker, topic: str, consumers, transport: str
) -> None:
    values = [b"%d" % index for index in range(500)]
    produce(broker, topic, values)
    # commit() does not return offsets that an automatic commit has committed meanwhile
    first = consumers("g-" + topic, topic, transport=transport, enable_auto_commit=False)
    found = take(first, 300)
    assert len({one.value() for one in found}) == 300
    one = found[0]
    assert (
        one.topic() == topic
        and one.headers() == [("n", one.value())]
        and one.key() == b"k" + one.value()
        and one.timestamp()[0] == 1
        and one.leader_epoch() == 0
    )
    committed = first.commit(asynchronous=False)
    assert sum(partition.offset for partition in committed if partition.offset > 0) == 300 and not any(
        partition.error for partition in committed
    )
    first.close()
    second = consumers("g-" + topic, topic, transport=transport)
    rest = take(second, 200)
    assert {message.value() for message in found + rest} == set(values)
    assert second.poll(0.1) is None
    with pytest.raises(RuntimeError):
        first.poll(0)


def test_order_and_positions(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"%d" % index for index in range(1000)], partition=1)
    consumer = consumers(transport=transport)
    consumer.assign([TopicPartition(topic, 1, 100)])
    assert consumer.position([TopicPartition(topic, 1)])[0].offset == OFFSET_INVALID
    assert [message.offset() for message in take(consumer, 5)] == [100, 101, 102, 103, 104]
    assert consumer.position([TopicPartition(topic, 1)])[0].offset == 105
    consumer.seek(TopicPartition(topic, 1, 990))
    assert [message.offset() for message in take(consumer, 10)] == list(range(990, 1000))
    consumer.seek(TopicPartition(topic, 1, OFFSET_BEGINNING))
    assert take(consumer, 1)[0].offset() == 0
    assert positions_of(consumer.assignment()) == [(topic, 1)]
    with pytest.raises(KafkaException):
        consumer.seek(TopicPartition(topic, 3, 0))


def test_pause_and_resume(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"%d" % index for index in range(40)])
    consumer = consumers(transport=transport)
    consumer.assign([TopicPartition(topic, index, 0) for index in range(4)])
    before = take(consumer, 1)[0].partition()
    others = [index for index in range(4) if index != before]
    consumer.pause([TopicPartition(topic, before)])
    assert {message.partition() for message in take(consumer, 30)} == set(others)
    assert consumer.poll(0.2) is None
    consumer.resume([TopicPartition(topic, before)])
    assert [message.offset() for message in take(consumer, 9)] == list(range(1, 10))


def test_ends_of_partitions(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"a", b"b"], partition=2)
    consumer = consumers(transport=transport, enable_partition_eof=True)
    consumer.assign([TopicPartition(topic, 2, 0)])
    found = [consumer.poll(SECONDS) for _ in range(3)]
    assert [message.error() and message.error().code() for message in found] == [None, None, KafkaError._PARTITION_EOF]
    assert (found[2].topic(), found[2].partition(), found[2].offset()) == (topic, 2, 2)
    assert consumer.poll(0.2) is None
    produce(broker, topic, [b"c"], partition=2)
    assert consumer.poll(SECONDS).value() == b"c"
    assert consumer.poll(SECONDS).error().code() == KafkaError._PARTITION_EOF


def test_auto_offset_reset(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"old"] * 4)
    latest = consumers(transport=transport, auto_offset_reset="latest", enable_partition_eof=True)
    latest.assign([TopicPartition(topic, index) for index in range(4)])
    # it queries the end offsets before the next record is written
    ends = [latest.poll(SECONDS) for _ in range(4)]
    assert {(end.error().code(), end.offset()) for end in ends} == {(KafkaError._PARTITION_EOF, 1)}
    produce(broker, topic, [b"new"], partition=0)
    assert latest.poll(SECONDS).value() == b"new"
    end = consumers(transport=transport)
    end.assign([TopicPartition(topic, 1, OFFSET_END)])
    assert end.poll(0.3) is None
    error = consumers(transport=transport, auto_offset_reset="error")
    error.assign([TopicPartition(topic, 1)])
    assert error.poll(SECONDS).error().code() == KafkaError._AUTO_OFFSET_RESET
    beyond = consumers(transport=transport)
    beyond.assign([TopicPartition(topic, 1, 1000)])
    assert take(beyond, 1)[0].offset() == 0  # auto.offset.reset=earliest


def test_commits(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"%d" % index for index in range(8)])
    reported: list = []
    consumer = consumers(
        "c-" + topic,
        transport=transport,
        enable_auto_commit=False,
        on_commit=lambda error, partitions: reported.append((error, partitions)),
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(4)])
    message = take(consumer, 5)[-1]
    partition = TopicPartition(topic, message.partition())
    assert consumer.committed([partition], SECONDS)[0].offset == OFFSET_INVALID
    assert consumer.commit(message=message) is None
    until([consumer], lambda: reported)
    assert reported[0][0] is None and reported[0][1][0].offset == message.offset() + 1
    assert consumer.committed([partition], SECONDS)[0].offset == message.offset() + 1
    done = consumer.commit(offsets=[TopicPartition(topic, 3, 1, "note")], asynchronous=False)
    assert done[0].offset == 1 and done[0].error is None
    found = consumer.committed([TopicPartition(topic, 3)], SECONDS)[0]
    assert (found.offset, found.metadata) == (1, "note")
    with pytest.raises(KafkaException):
        consumer.store_offsets(offsets=[TopicPartition(topic, 0, 1)])
    with pytest.raises(ValueError):
        consumer.commit(message=message, offsets=[partition])


def test_only_stored_offsets_are_committed(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"%d" % index for index in range(10)], partition=0)
    consumer = consumers("s-" + topic, transport=transport, enable_auto_offset_store=False, enable_auto_commit=False)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = take(consumer, 10)
    with pytest.raises(KafkaException) as raised:
        consumer.commit(asynchronous=False)
    assert raised.value.args[0].code() == KafkaError._NO_OFFSET
    consumer.store_offsets(message=found[3])
    assert [one.offset for one in consumer.commit(asynchronous=False)] == [4]


def test_automatic_commits_at_intervals_and_on_close(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"%d" % index for index in range(10)], partition=0)
    reported: list = []
    consumer = consumers(
        "a-" + topic,
        topic,
        transport=transport,
        auto_commit_interval_ms=100,
        on_commit=lambda error, partitions: reported.append((error, partitions)),
    )
    take(consumer, 6)
    until([consumer], lambda: reported)
    assert reported[0][0] is None
    consumer.close()
    watcher = consumers("a-" + topic, transport=transport)
    assert watcher.committed([TopicPartition(topic, 0)], SECONDS)[0].offset >= 6


@pytest.mark.parametrize("ending", ["close", "unsubscribe"])
def test_pending_commits_are_sent_before_partitions_are_revoked(
    broker: Broker, topic: str, consumers, transport: str, ending: str
) -> None:
    produce(broker, topic, [b"%d" % index for index in range(50)], partition=0)
    consumer = consumers(f"w-{ending}-" + topic, topic, transport=transport, enable_auto_commit=False)
    for message in take(consumer, 50):
        consumer.commit(message=message)
    getattr(consumer, ending)()
    watcher = consumers(f"w-{ending}-" + topic, transport=transport)
    until(
        [consumer] if ending == "unsubscribe" else [],
        lambda: watcher.committed([TopicPartition(topic, 0)], SECONDS)[0].offset == 50,
    )


def test_watermarks_times_and_topics(broker: Broker, topic: str, consumers, transport: str) -> None:
    produce(broker, topic, [b"x"] * 12)
    consumer = consumers(transport=transport)
    assert consumer.get_watermark_offsets(TopicPartition(topic, 0), SECONDS) == (0, 3)
    now_ms = int(time.time() * 1000)
    times = consumer.offsets_for_times(
        [TopicPartition(topic, 0, 0), TopicPartition(topic, 1, now_ms + 3_600_000)], SECONDS
    )
    assert [one.offset for one in times] == [0, OFFSET_END]
    found = consumer.list_topics(topic, SECONDS).topics[topic]
    assert sorted(found.partitions) == [0, 1, 2, 3] and found.partitions[0].leader >= 0
    assert topic in consumer.list_topics(timeout=SECONDS).topics
    assert consumer.cluster_id(SECONDS) and consumer.memberid() in (None, "")


def test_batches(broker: Broker, topic: str, consumers, transport: str) -> None:
    values = [b"value %d" % index for index in range(3000)]
    for codec in ("none", "lz4", "zstd", "gzip", "snappy"):
        produce(broker, topic, values, partition=0, compression_type=codec, linger_ms=20)
    consumer = consumers("b-" + topic, transport=transport, enable_auto_commit=False)
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes] = []
    offsets: list[int] = []
    while len(found) < 15_000:
        batch = consumer.consume_batch(1000, SECONDS)
        assert 0 < len(batch) <= 1000 and batch.topic == topic and batch.partition == 0
        found += batch.values.to_list()
        offsets += batch.offsets.tolist()
        assert batch.headers(0)[0][0] == "n"
    assert found == values * 5 and offsets == list(range(15_000))
    assert consumer.commit(asynchronous=False)[0].offset == 15_000
    assert consumer.consume_batch(1000, 0.1) is None


def test_read_committed(broker: Broker, topic: str, consumers, transport: str) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "x" + topic})
    producer.init_transactions(SECONDS)
    for number in range(6):
        producer.begin_transaction()
        for index in range(10):
            producer.produce(topic, b"%d-%d" % (number, index), partition=0)
        producer.flush(SECONDS)
        producer.commit_transaction(SECONDS) if number % 2 else producer.abort_transaction(SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(SECONDS)
    committed, everything = (
        consumers(transport=transport),
        consumers(transport=transport, isolation_level="read_uncommitted"),
    )
    for consumer in (committed, everything):
        consumer.assign([TopicPartition(topic, 0, 0)])
    expected = [b"%d-%d" % (number, index) for number in (1, 3, 5) for index in range(10)]
    assert [message.value() for message in take(committed, 30)] == expected
    assert committed.poll(0.3) is None
    assert len(take(everything, 61)) == 61
    producer.commit_transaction(SECONDS)
    assert take(committed, 1)[0].value() == b"open"


def test_callbacks_of_rebalances(broker: Broker, admin: AdminClient, consumers, transport: str) -> None:
    """librdkafka's default is eager: all partitions are revoked, then assigned again. A callback
    may choose where to begin.
    """
    topic = make_topic(admin, 2)
    produce(broker, topic, [b"%d" % index for index in range(20)], partitions=2)
    log: list[tuple[str, int]] = []

    def on_assign(consumer, partitions: list[TopicPartition]) -> None:
        assert isinstance(consumer, Consumer)
        log.append(("assign", len(partitions)))
        for partition in partitions:
            partition.offset = 7
        consumer.assign(partitions)

    first = consumers(
        "r-" + topic, transport=transport, enable_auto_commit=False, session_timeout_ms=6000, heartbeat_interval_ms=200
    )
    first.subscribe(
        [topic], on_assign=on_assign, on_revoke=lambda _, partitions: log.append(("revoke", len(partitions)))
    )
    assert sorted(message.offset() for message in take(first, 6)) == [7, 7, 8, 8, 9, 9]
    second = consumers("r-" + topic, topic, transport=transport, session_timeout_ms=6000, heartbeat_interval_ms=200)
    until([first, second], lambda: len(first.assignment()) == len(second.assignment()) == 1)
    assert log == [("assign", 2), ("revoke", 2), ("assign", 1)]
    second.close()
    until([first], lambda: len(first.assignment()) == 2)
    first.unsubscribe()
    until([first], lambda: log[-1] == ("revoke", 2)) if transport == "tcp" else None
    assert log[3:] == [("revoke", 1), ("assign", 2), ("revoke", 2)] and first.assignment() == []


def test_a_topic_grows_and_expressions_match(broker: Broker, admin: AdminClient, consumers, transport: str) -> None:
    topic = make_topic(admin, 1)
    consumer = consumers("e-" + topic, f"^{topic[:10]}", transport=transport, topic_metadata_refresh_interval_ms=200)
    until([consumer], lambda: positions_of(consumer.assignment()) == [(topic, 0)])
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result(SECONDS)
    until([consumer], lambda: positions_of(consumer.assignment()) == [(topic, 0), (topic, 1), (topic, 2)])
    produce(broker, topic, [b"a", b"b", b"c"], partitions=3)
    assert len(take(consumer, 3)) == 3


def test_errors_are_events(broker: Broker, consumers, transport: str) -> None:
    if transport == "shm":  # librdkafka reports no error here
        consumer = consumers()
        consumer.assign([TopicPartition("there-is-no-such-topic", 0, 0)])
        assert consumer.poll(SECONDS).error().code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        assert consumer.poll(0.3) is None
    with pytest.raises(KafkaException):
        Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g", "transport": transport, "no.such.key": 1})
    with pytest.raises(ValueError):
        Consumer({"bootstrap.servers": broker.bootstrap, "transport": transport})


def test_offsets_within_a_transaction(broker: Broker, topic: str, consumers, transport: str) -> None:
    """consumer_group_metadata() works with a producer of either transport: here with
    confluent_kafka's.
    """
    produce(broker, topic, [b"a", b"b", b"c"], partition=0)
    consumer = consumers("x-" + topic, topic, transport=transport, enable_auto_commit=False)
    take(consumer, 2)
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "o" + topic})
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    producer.produce(topic, b"out", partition=1)
    producer.send_offsets_to_transaction([TopicPartition(topic, 0, 2)], consumer.consumer_group_metadata(), SECONDS)
    producer.commit_transaction(SECONDS)
    assert consumer.committed([TopicPartition(topic, 0)], SECONDS)[0].offset == 2


# -- members of both transports in one group ----------------------------------------------------


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_one_group_of_shared_memory_and_librdkafka(broker: Broker, topic: str, consumers, protocol: str) -> None:
    local = consumers("m-" + topic, topic)
    until([local], lambda: len(local.assignment()) == 4)
    more = (
        {"group_protocol": protocol}
        if protocol == "consumer"
        else {"partition_assignment_strategy": "cooperative-sticky", "heartbeat_interval_ms": 200}
    )
    remote = consumers("m-" + topic, topic, transport="tcp", **more)
    until([local, remote], lambda: len(local.assignment()) == len(remote.assignment()) == 2)
    assert positions_of(local.assignment() + remote.assignment()) == [(topic, index) for index in range(4)]
    values = {b"%d" % index for index in range(200)}
    produce(broker, topic, sorted(values))
    found: list[bytes] = []
    deadline = time.monotonic() + SECONDS
    while len(found) < 200 and time.monotonic() < deadline:
        for consumer in (local, remote):
            found += [message.value() for message in consumer.consume(50, 0.1)]
    assert sorted(found) == sorted(values)
    remote.close()
    until([local], lambda: len(local.assignment()) == 4)


# -- shared memory only ------------------------------------------------------------------------


def test_an_idle_consumer_wakes_at_once_and_uses_no_cpu(broker: Broker, topic: str, consumers) -> None:
    consumer = consumers(None, topic)
    until([consumer], lambda: len(consumer.assignment()) == 4)
    assert consumer.poll(0.3) is None
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    producer.list_topics(timeout=SECONDS)
    began = time.process_time()
    timer = threading.Timer(2.0, lambda: producer.produce(topic, b"now"))
    timer.start()
    message = consumer.poll(SECONDS)
    used = time.process_time() - began
    assert message.value() == b"now" and time.time() * 1000 - message.timestamp()[1] < 10_000
    assert used < 0.5, f"{used:.3f} s of processor time in 2 s of sleep"
    producer.flush(SECONDS)


def test_a_batch_outlives_its_consumer(broker: Broker, topic: str, consumers) -> None:
    produce(broker, topic, [b"%05d" % index for index in range(100)], partition=0)
    consumer = consumers()
    consumer.assign([TopicPartition(topic, 0, 0)])
    batch = consumer.consume_batch(100, SECONDS)
    views = batch.values.views()
    consumer.close()
    assert bytes(views[42]) == b"00042" and batch.values.to_list()[99] == b"00099"


def test_poll_consume_and_consume_batch_can_be_mixed(broker: Broker, topic: str, consumers) -> None:
    """poll, consume and consume_batch in turn: each record once."""
    produce(broker, topic, [b"%d" % index for index in range(100)], partition=0)
    consumer = consumers()
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = [message.offset() for message in take(consumer, 3)]
    found += consumer.consume_batch(10, SECONDS).offsets.tolist()
    found += [message.offset() for message in consumer.consume(7, SECONDS)]
    found += consumer.consume_batch(80, SECONDS).offsets.tolist()
    assert found == list(range(100))


def test_a_consumer_that_does_not_poll_loses_its_partitions_and_rejoins(broker: Broker, topic: str, consumers) -> None:
    lost: list = []
    slow = consumers("p-" + topic, max_poll_interval_ms=4000, session_timeout_ms=4000)
    slow.subscribe([topic], on_lost=lambda _, partitions: lost.append(len(partitions)))
    until([slow], lambda: len(slow.assignment()) == 4)
    other = consumers("p-" + topic, topic)
    until([other], lambda: len(other.assignment()) == 4)
    message = slow.poll(SECONDS)
    assert message.error().code() == KafkaError._MAX_POLL_EXCEEDED
    until([slow, other], lambda: len(slow.assignment()) == len(other.assignment()) == 2)
    assert lost == [4]


def test_a_static_member_keeps_its_partitions(broker: Broker, topic: str, consumers) -> None:
    group = "i-" + topic
    one = consumers(group, topic, group_instance_id="one")
    two = consumers(group, topic, group_instance_id="two")
    until([one, two], lambda: len(one.assignment()) == len(two.assignment()) == 2)
    had = positions_of(one.assignment())
    one.close()
    again = consumers(group, topic, group_instance_id="one")
    until([again, two], lambda: positions_of(again.assignment()) == had)
    assert len(two.assignment()) == 2
