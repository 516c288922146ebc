"""Every client as a consumer of manually assigned partitions: seeking, time, ends, long polls,
topics that are created, extended and deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import aiokafka
import confluent_kafka
import kafka
import pytest
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient

from mqd.protocol.messages import CreatePartitionsRequest, DeleteRecordsRequest
from mqd.protocol.records import Record
from tests.broker import Broker
from tests.compat import topics
from tests.compat.kcat import Kcat

COUNT = 50
FIRST_MS = 1_700_000_000_000
STEP_MS = 10
DEADLINE_SECONDS = 60
LONG_POLL_MS = 25_000
SOON_SECONDS = 15.0  # far below the long poll, far above what a busy machine needs


@pytest.fixture
def numbered(shared_broker: Broker) -> str:
    """One partition of 50 records in batches of 5, ten milliseconds between each two."""
    name = topics.create_topic(shared_broker, "numbered", 2)
    with topics.connect(shared_broker) as connection:
        for start in range(0, COUNT, 5):
            topics.must_produce(
                connection,
                name,
                *[Record(value=b"%d" % n, timestamp_ms=FIRST_MS + n * STEP_MS) for n in range(start, start + 5)],
            )
    return name


@contextlib.contextmanager
def confluent_consumer(broker: Broker, **settings: object) -> Iterator[confluent_kafka.Consumer]:
    defaults = {
        "bootstrap.servers": broker.bootstrap,
        "group.id": "by hand",
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 50,
    }
    consumer = confluent_kafka.Consumer(
        {**defaults, **{name.replace("_", "."): value for name, value in settings.items()}}
    )
    try:
        yield consumer
    finally:
        consumer.close()


@contextlib.contextmanager
def kafka_python_consumer(broker: Broker, **settings: object) -> Iterator[kafka.KafkaConsumer]:
    consumer = kafka.KafkaConsumer(
        **{
            "bootstrap_servers": broker.bootstrap,
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            **settings,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def aiokafka_consumer(broker: Broker, **settings: object) -> aiokafka.AIOKafkaConsumer:
    return aiokafka.AIOKafkaConsumer(
        **{
            "bootstrap_servers": broker.bootstrap,
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            **settings,
        }
    )


def poll_confluent(consumer: confluent_kafka.Consumer, count: int) -> list[confluent_kafka.Message]:
    found: list[confluent_kafka.Message] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        message = consumer.poll(1)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message)
    return found


def poll_kafka_python(consumer: kafka.KafkaConsumer, count: int) -> list[kafka.consumer.fetcher.ConsumerRecord]:
    found: list[kafka.consumer.fetcher.ConsumerRecord] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        for records in consumer.poll(1000, max_records=count - len(found)).values():
            found += records
    return found


# -- by offset -------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 7, 24, 45, 49])
def test_seek_confluent(shared_broker: Broker, numbered: str, offset: int) -> None:
    with confluent_consumer(shared_broker) as consumer:
        consumer.assign([TopicPartition(numbered, 0, 30)])
        poll_confluent(consumer, 2)
        consumer.seek(TopicPartition(numbered, 0, offset))
        found = poll_confluent(consumer, COUNT - offset)
        assert [(message.offset(), message.value()) for message in found] == [
            (n, b"%d" % n) for n in range(offset, COUNT)
        ]
        assert consumer.get_watermark_offsets(TopicPartition(numbered, 0), timeout=60) == (0, COUNT)


def test_seek_kafka_python(shared_broker: Broker, numbered: str) -> None:
    partition = kafka.TopicPartition(numbered, 0)
    with kafka_python_consumer(shared_broker) as consumer:
        consumer.assign([partition])
        for offset in (30, 7, 0, 49, 24):
            consumer.seek(partition, offset)
            found = poll_kafka_python(consumer, COUNT - offset)
            assert [(record.offset, record.value) for record in found] == [(n, b"%d" % n) for n in range(offset, COUNT)]
        assert (consumer.beginning_offsets([partition]), consumer.end_offsets([partition])) == (
            {partition: 0},
            {partition: COUNT},
        )
        consumer.seek_to_end(partition)
        assert consumer.position(partition) == COUNT


def test_seek_aiokafka(shared_broker: Broker, numbered: str) -> None:
    async def run() -> None:
        partition = aiokafka.TopicPartition(numbered, 0)
        consumer = aiokafka_consumer(shared_broker)
        consumer.assign([partition])
        async with consumer:
            for offset in (30, 7, 0, 49, 24):
                consumer.seek(partition, offset)
                for expected in range(offset, COUNT):
                    record = await asyncio.wait_for(consumer.getone(), DEADLINE_SECONDS)
                    assert (record.offset, record.value) == (expected, b"%d" % expected)
            assert await consumer.beginning_offsets([partition]) == {partition: 0}
            assert await consumer.end_offsets([partition]) == {partition: COUNT}

    asyncio.run(run())


def test_seek_kcat(shared_broker: Broker, numbered: str, kcat: Kcat) -> None:
    for where, start in (("7", 7), ("-3", COUNT - 3), ("beginning", 0), ("49", 49)):
        found = kcat.consume(shared_broker.bootstrap, numbered, "-p", "0", "-o", where)
        assert [offset for _, offset, *_ in found] == list(range(start, COUNT))


# -- by time ---------------------------------------------------------------------------------------

TIMES = [
    (FIRST_MS - 1, 0),
    (FIRST_MS, 0),
    (FIRST_MS + 1, 1),
    (FIRST_MS + 23 * STEP_MS, 23),
    (FIRST_MS + 23 * STEP_MS - 5, 23),
    (FIRST_MS + 49 * STEP_MS, 49),
]
PAST_THE_LAST_MS = FIRST_MS + 50 * STEP_MS


def test_times_confluent(shared_broker: Broker, numbered: str) -> None:
    with confluent_consumer(shared_broker) as consumer:
        for timestamp, offset in TIMES:
            (found,) = consumer.offsets_for_times([TopicPartition(numbered, 0, timestamp)], timeout=60)
            assert found.error is None and found.offset == offset
            consumer.assign([found])
            assert poll_confluent(consumer, 1)[0].offset() == offset
        (found,) = consumer.offsets_for_times([TopicPartition(numbered, 0, PAST_THE_LAST_MS)], timeout=60)
        assert found.offset == confluent_kafka.OFFSET_END


def test_times_kafka_python(shared_broker: Broker, numbered: str) -> None:
    partition, empty = kafka.TopicPartition(numbered, 0), kafka.TopicPartition(numbered, 1)
    with kafka_python_consumer(shared_broker) as consumer:
        consumer.assign([partition])
        for timestamp, offset in TIMES:
            found = consumer.offsets_for_times({partition: timestamp, empty: timestamp})
            assert (found[partition].offset, found[partition].timestamp, found[empty]) == (
                offset,
                FIRST_MS + offset * STEP_MS,
                None,
            )
        assert consumer.offsets_for_times({partition: PAST_THE_LAST_MS}) == {partition: None}


def test_times_aiokafka(shared_broker: Broker, numbered: str) -> None:
    async def run() -> None:
        partition = aiokafka.TopicPartition(numbered, 0)
        consumer = aiokafka_consumer(shared_broker)
        consumer.assign([partition])
        async with consumer:
            for timestamp, offset in TIMES:
                found = (await consumer.offsets_for_times({partition: timestamp}))[partition]
                assert (found.offset, found.timestamp) == (offset, FIRST_MS + offset * STEP_MS)
            assert await consumer.offsets_for_times({partition: PAST_THE_LAST_MS}) == {partition: None}

    asyncio.run(run())


def test_times_kcat(shared_broker: Broker, numbered: str, kcat: Kcat) -> None:
    for timestamp, offset in TIMES:
        assert (
            kcat.run("-Q", "-b", shared_broker.bootstrap, "-t", f"{numbered}:0:{timestamp}")
            .strip()
            .endswith(b"offset %d" % offset)
        )
    found = kcat.consume(
        shared_broker.bootstrap, numbered, "-p", "0", "-o", f"s@{TIMES[3][0]}", "-o", f"e@{FIRST_MS + 30 * STEP_MS}"
    )
    assert [offset for _, offset, *_ in found] == list(range(23, 30))


# -- ends ------------------------------------------------------------------------------------------


def test_confluent_reports_partition_ends(shared_broker: Broker, numbered: str) -> None:
    with confluent_consumer(shared_broker, enable_partition_eof=True) as consumer:
        consumer.assign([TopicPartition(numbered, 0, 40), TopicPartition(numbered, 1, 0)])
        ends: dict[int, int] = {}
        values = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(ends) < 2:
            assert time.monotonic() < deadline
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is None:
                values.append(message.value())
            else:
                assert message.error().code() == KafkaError._PARTITION_EOF
                ends[message.partition()] = message.offset()
        assert ends == {0: COUNT, 1: 0} and values == [b"%d" % n for n in range(40, COUNT)]


def test_an_offset_out_of_range_is_reset_as_configured(shared_broker: Broker, numbered: str) -> None:
    requested = DeleteRecordsRequest.Topic(
        name=numbered, partitions=[DeleteRecordsRequest.Partition(partition_index=0, offset=20)]
    )
    with topics.connect(shared_broker) as connection:
        assert (
            connection.call(21, 2, DeleteRecordsRequest(topics=[requested], timeout_ms=60_000))
            .topics[0]
            .partitions[0]
            .error_code
            == 0
        )
    with confluent_consumer(shared_broker, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(numbered, 0, 5)])
        assert poll_confluent(consumer, 1)[0].offset() == 20
    with confluent_consumer(shared_broker) as consumer:
        consumer.assign([TopicPartition(numbered, 0, 5)])
        message = consumer.poll(DEADLINE_SECONDS)
        assert message is not None and message.error().code() == KafkaError._AUTO_OFFSET_RESET
    with kafka_python_consumer(shared_broker, auto_offset_reset="earliest") as consumer:
        consumer.assign([kafka.TopicPartition(numbered, 0)])
        consumer.seek(kafka.TopicPartition(numbered, 0), 5)
        assert poll_kafka_python(consumer, 1)[0].offset == 20

    async def run() -> None:
        consumer = aiokafka_consumer(shared_broker, auto_offset_reset="earliest")
        consumer.assign([aiokafka.TopicPartition(numbered, 0)])
        async with consumer:
            consumer.seek(aiokafka.TopicPartition(numbered, 0), 5)
            assert (await asyncio.wait_for(consumer.getone(), DEADLINE_SECONDS)).offset == 20

    asyncio.run(run())


def test_read_committed_reads_records_without_transactions(shared_broker: Broker, numbered: str) -> None:
    with confluent_consumer(shared_broker, isolation_level="read_committed") as consumer:
        consumer.assign([TopicPartition(numbered, 0, 0)])
        assert len(poll_confluent(consumer, COUNT)) == COUNT
    with kafka_python_consumer(shared_broker, isolation_level="read_committed") as consumer:
        consumer.assign([kafka.TopicPartition(numbered, 0)])
        consumer.seek_to_beginning()
        assert len(poll_kafka_python(consumer, COUNT)) == COUNT


# -- long polls ------------------------------------------------------------------------------------


def seen_after(broker: Broker, topic: str, wait_seen: Callable[[], None], parked: Callable[[], object]) -> float:
    """Seconds between the acknowledgement of a record and its arrival at a consumer whose fetch is
    parked for long.
    """
    seen: list[float] = []
    failure: list[BaseException] = []

    def watch() -> None:
        try:
            wait_seen()
            seen.append(time.monotonic())
        except BaseException as error:  # reported to the test below
            failure.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    parked()
    with topics.connect(broker) as connection:
        topics.must_produce(connection, topic, b"now", partition=1)
    written = time.monotonic()
    thread.join(DEADLINE_SECONDS)
    assert not failure and seen, failure or "not seen"
    return seen[0] - written


def settle() -> None:
    # the client's fetch is then parked at the broker; if it were not, the test would pass for
    # another reason, not fail
    time.sleep(0.7)


def test_long_poll_confluent(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "long-poll", 2)
    with confluent_consumer(shared_broker, fetch_wait_max_ms=LONG_POLL_MS, fetch_error_backoff_ms=1) as consumer:
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(2)])
        assert seen_after(shared_broker, topic, lambda: poll_confluent(consumer, 1), settle) < SOON_SECONDS


def test_long_poll_kafka_python(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "long-poll", 2)
    with kafka_python_consumer(shared_broker, fetch_max_wait_ms=LONG_POLL_MS, request_timeout_ms=60_000) as consumer:
        consumer.assign([kafka.TopicPartition(topic, partition) for partition in range(2)])
        consumer.seek_to_beginning()
        assert seen_after(shared_broker, topic, lambda: poll_kafka_python(consumer, 1), settle) < SOON_SECONDS


def test_long_poll_aiokafka(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "long-poll", 2)

    def wait_seen() -> None:
        async def run() -> None:
            consumer = aiokafka_consumer(shared_broker, fetch_max_wait_ms=LONG_POLL_MS, request_timeout_ms=60_000)
            consumer.assign([aiokafka.TopicPartition(topic, partition) for partition in range(2)])
            await consumer.start()
            try:
                await consumer.seek_to_beginning()
                await asyncio.wait_for(consumer.getone(), DEADLINE_SECONDS)
                arrived.append(time.monotonic())
            finally:
                await consumer.stop()

        asyncio.run(run())

    arrived: list[float] = []
    settled = time.monotonic()
    seen_after(shared_broker, topic, wait_seen, settle)
    # its stop() waits for the next long poll: measured when the record arrived
    assert arrived[0] - settled < SOON_SECONDS + 1


def test_long_poll_kcat(shared_broker: Broker, kcat: Kcat) -> None:
    topic = topics.create_topic(shared_broker, "long-poll", 2)
    command = [
        kcat.binary,
        "-C",
        "-q",
        "-u",
        "-b",
        shared_broker.bootstrap,
        "-t",
        topic,
        "-p",
        "1",
        "-o",
        "beginning",
        "-X",
        f"fetch.wait.max.ms={LONG_POLL_MS}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=kcat.environment) as process:
        try:
            assert process.stdout is not None
            out = process.stdout
            assert (
                seen_after(
                    shared_broker, topic, lambda: out.readline() == b"now\n" or pytest.fail("something else"), settle
                )
                < SOON_SECONDS
            )
        finally:
            process.kill()


# -- topics that come, grow and go -----------------------------------------------------------------


@pytest.fixture(scope="module")
def strict_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Does not auto-create topics: a client that requests a deleted one must not recreate it."""
    with Broker(tmp_path_factory.mktemp("strict"), config={"auto.create.topics.enable": "false"}) as broker:
        yield broker


def test_a_topic_deleted_while_it_is_consumed_confluent(strict_broker: Broker) -> None:
    """The caller gets the error, and the consumer's other topic continues."""
    doomed, lasting = topics.create_topic(strict_broker, "doomed"), topics.create_topic(strict_broker, "lasting", 2)
    patience = {"topic_metadata_refresh_interval_ms": 200, "topic_metadata_propagation_max_ms": 500}
    with topics.connect(strict_broker) as connection, confluent_consumer(strict_broker, **patience) as consumer:
        topics.must_produce(connection, doomed, b"last words")
        consumer.assign([TopicPartition(doomed, 0, 0), TopicPartition(lasting, 1, 0)])
        assert poll_confluent(consumer, 1)[0].value() == b"last words"
        topics.delete_topic(strict_broker, doomed)
        deadline = time.monotonic() + DEADLINE_SECONDS
        # librdkafka gets it from Fetch (unknown topic id) and from Metadata, drops the partition,
        # and notifies the application only when polled.
        while consumer.list_topics(doomed, timeout=60).topics[doomed].error is None:
            assert time.monotonic() < deadline
        assert consumer.list_topics(doomed, timeout=60).topics[doomed].error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
        topics.must_produce(connection, lasting, b"goes on", partition=1)
        while (message := consumer.poll(1)) is None or message.error() is not None:
            assert time.monotonic() < deadline
        assert message.value() == b"goes on"


def test_a_topic_deleted_while_it_is_consumed_kafka_python(strict_broker: Broker) -> None:
    doomed, lasting = topics.create_topic(strict_broker, "doomed"), topics.create_topic(strict_broker, "lasting", 2)
    with (
        topics.connect(strict_broker) as connection,
        kafka_python_consumer(strict_broker, metadata_max_age_ms=300) as consumer,
    ):
        topics.must_produce(connection, doomed, b"last words")
        consumer.assign([kafka.TopicPartition(doomed, 0), kafka.TopicPartition(lasting, 1)])
        consumer.seek_to_beginning()
        assert poll_kafka_python(consumer, 1)[0].value == b"last words"
        topics.delete_topic(strict_broker, doomed)
        consumer.poll(1000)
        topics.must_produce(connection, lasting, b"goes on", partition=1)
        assert poll_kafka_python(consumer, 1)[0].value == b"goes on"


def test_a_topic_deleted_while_it_is_consumed_aiokafka(strict_broker: Broker) -> None:
    doomed, lasting = topics.create_topic(strict_broker, "doomed"), topics.create_topic(strict_broker, "lasting", 2)

    async def run() -> None:
        consumer = aiokafka_consumer(strict_broker, metadata_max_age_ms=300)
        consumer.assign([aiokafka.TopicPartition(doomed, 0), aiokafka.TopicPartition(lasting, 1)])
        async with consumer:
            await consumer.seek_to_beginning()
            assert (await asyncio.wait_for(consumer.getone(), DEADLINE_SECONDS)).value == b"last words"
            await asyncio.to_thread(topics.delete_topic, strict_broker, doomed)
            await asyncio.to_thread(topics.must_produce, connection, lasting, b"goes on", partition=1)
            assert (
                await asyncio.wait_for(consumer.getone(aiokafka.TopicPartition(lasting, 1)), DEADLINE_SECONDS)
            ).value == b"goes on"

    with topics.connect(strict_broker) as connection:
        topics.must_produce(connection, doomed, b"last words")
        asyncio.run(run())


def test_added_partitions_are_seen_and_served(shared_broker: Broker) -> None:
    topic = topics.create_topic(shared_broker, "grows", 2)
    partition = kafka.TopicPartition(topic, 4)
    with (
        topics.connect(shared_broker) as connection,
        kafka_python_consumer(shared_broker, metadata_max_age_ms=200) as other,
    ):
        assert other.partitions_for_topic(topic) == {0, 1}
        request = CreatePartitionsRequest(
            topics=[CreatePartitionsRequest.Topic(name=topic, count=5, assignments=None)], timeout_ms=60_000
        )
        assert connection.call(37, 3, request).results[0].error_code == 0
        topics.wait_served(connection, topic)
        assert sorted(
            AdminClient({"bootstrap.servers": shared_broker.bootstrap})
            .list_topics(topic, timeout=60)
            .topics[topic]
            .partitions
        ) == [0, 1, 2, 3, 4]
        topics.must_produce(connection, topic, b"new", partition=4)
        other.assign([partition])
        other.seek_to_beginning(partition)
        assert poll_kafka_python(other, 1)[0].value == b"new"
        deadline = time.monotonic() + DEADLINE_SECONDS
        while other.partitions_for_topic(topic) != {0, 1, 2, 3, 4}:
            other.poll(100)
            assert time.monotonic() < deadline


def test_a_consumer_that_waits_for_a_topic_gets_it(shared_broker: Broker) -> None:
    """Assigned before the topic exists: librdkafka checks at each metadata refresh."""
    topic = topics.fresh_name("to-come")
    with confluent_consumer(
        shared_broker,
        topic_metadata_refresh_interval_ms=200,
        topic_metadata_refresh_fast_interval_ms=100,
        allow_auto_create_topics=False,
    ) as consumer:
        consumer.assign([TopicPartition(topic, 0, 0)])
        consumer.poll(0.3)
        topics.create_named(shared_broker, topic)
        with topics.connect(shared_broker) as connection:
            topics.must_produce(connection, topic, b"at last")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (message := consumer.poll(1)) is None or message.error() is not None:
            assert time.monotonic() < deadline
        assert message.value() == b"at last"


def test_consumers_keep_going_over_a_restart(start_broker: Callable[..., Broker]) -> None:
    broker = start_broker()
    topic = topics.create_topic(broker, "restart")
    with (
        confluent_consumer(broker, reconnect_backoff_max_ms=200) as one,
        kafka_python_consumer(broker, reconnect_backoff_max_ms=200) as two,
    ):
        one.assign([TopicPartition(topic, 0, 0)])
        two.assign([kafka.TopicPartition(topic, 0)])
        two.seek(kafka.TopicPartition(topic, 0), 0)
        for life in range(2):
            with topics.connect(broker) as connection:
                topics.wait_served(connection, topic)
                topics.must_produce(connection, topic, b"life %d" % life)
            deadline = time.monotonic() + DEADLINE_SECONDS
            # the client reports the broken connection, too
            while (message := one.poll(1)) is None or message.error() is not None:
                assert time.monotonic() < deadline
            assert (message.offset(), message.value()) == (life, b"life %d" % life)
            assert poll_kafka_python(two, 1)[0].value == b"life %d" % life
            if life == 0:
                broker.stop()
                broker.start()
