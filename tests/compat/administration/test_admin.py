"""Each client's admin interface: create, extend, configure, empty and delete topics, describe the
cluster, and errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterator

import aiokafka
import aiokafka.admin
import confluent_kafka
import kafka
import kafka.admin
import kafka.errors
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from mqd.protocol import ErrorCode
from tests.broker import Broker
from tests.compat import topics
from tests.compat.kcat import Kcat
from tests.polling import eventually

DEADLINE_SECONDS = 20


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    name = topics.create_topic(shared_broker, "admin", 3)
    with topics.connect(shared_broker) as connection:
        for number in range(5):
            topics.must_produce(connection, name, b"%d" % number, partition=1)
    return name


# -- confluent-kafka -------------------------------------------------------------------------------


@pytest.fixture
def confluent(shared_broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": shared_broker.bootstrap})


def result_of(futures: dict) -> object:
    (future,) = futures.values()
    return future.result(DEADLINE_SECONDS)


def code_of(futures: dict) -> int:
    with pytest.raises(KafkaException) as caught:
        result_of(futures)
    return caught.value.args[0].code()


def test_confluent_topics(confluent: AdminClient) -> None:
    name = topics.fresh_name("confluent")
    new = NewTopic(name, 4, 1, config={"retention.ms": "123456"})
    assert result_of(confluent.create_topics([new], validate_only=True)) is None
    assert name not in confluent.list_topics(timeout=60).topics, "only validated"
    result_of(confluent.create_topics([new]))
    eventually(lambda: name in confluent.list_topics(timeout=60).topics)
    found = confluent.list_topics(name, timeout=60).topics[name]
    assert sorted(found.partitions) == [0, 1, 2, 3]
    assert all(
        (partition.leader, partition.replicas, partition.isrs) == (1, [1], [1])
        for partition in found.partitions.values()
    )
    result_of(confluent.create_partitions([NewPartitions(name, 6)]))
    eventually(lambda: len(confluent.list_topics(name, timeout=60).topics[name].partitions) == 6)
    result_of(confluent.delete_topics([name]))
    eventually(lambda: name not in confluent.list_topics(timeout=60).topics)


def test_confluent_gets_the_reason(confluent: AdminClient, topic: str) -> None:
    assert code_of(confluent.create_topics([NewTopic(topic, 1, 1)])) == KafkaError.TOPIC_ALREADY_EXISTS
    assert code_of(confluent.create_topics([NewTopic("no/slashes", 1, 1)])) == KafkaError.TOPIC_EXCEPTION
    assert (
        code_of(confluent.create_topics([NewTopic(topics.fresh_name("x"), 1, 3)]))
        == KafkaError.INVALID_REPLICATION_FACTOR
    )
    assert (
        code_of(confluent.create_topics([NewTopic(topics.fresh_name("x"), 1, 1, config={"no.such.thing": "1"})]))
        == KafkaError.INVALID_CONFIG
    )
    assert (
        code_of(confluent.create_topics([NewTopic(topics.fresh_name("x"), 1, 1, config={"retention.ms": "soon"})]))
        == KafkaError.INVALID_CONFIG
    )
    assert code_of(confluent.create_partitions([NewPartitions(topic, 2)])) == KafkaError.INVALID_PARTITIONS
    assert (
        code_of(confluent.create_partitions([NewPartitions(topics.fresh_name("nowhere"), 2)]))
        == KafkaError.UNKNOWN_TOPIC_OR_PART
    )
    assert code_of(confluent.delete_topics([topics.fresh_name("nowhere")])) == KafkaError.UNKNOWN_TOPIC_OR_PART


def test_confluent_configs(confluent: AdminClient, topic: str) -> None:
    def configs() -> dict[str, ConfigEntry]:
        return result_of(confluent.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))

    before = configs()
    assert before["retention.ms"].value == "604800000" and before["retention.ms"].is_default
    changes = [
        ConfigEntry("retention.ms", "1000000", incremental_operation=AlterConfigOpType.SET),
        ConfigEntry("max.message.bytes", "2000000", incremental_operation=AlterConfigOpType.SET),
    ]
    result_of(
        confluent.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=changes)])
    )
    eventually(lambda: configs()["retention.ms"].value == "1000000")
    assert not configs()["retention.ms"].is_default and configs()["max.message.bytes"].value == "2000000"
    back = [ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE)]
    result_of(
        confluent.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=back)])
    )
    eventually(lambda: configs()["retention.ms"].value == "604800000")
    assert configs()["max.message.bytes"].value == "2000000"
    wrong = [ConfigEntry("retention.ms", "-5", incremental_operation=AlterConfigOpType.SET)]
    assert (
        code_of(
            confluent.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=wrong)])
        )
        == KafkaError.INVALID_CONFIG
    )
    broker = result_of(confluent.describe_configs([ConfigResource(ResourceType.BROKER, "1")]))
    assert broker["advertised.listeners"].value.startswith("PLAINTEXT://127.0.0.1:") and broker["io.backend"].value in (
        "epoll",
        "io_uring",
    )


def test_confluent_records_and_offsets(confluent: AdminClient, topic: str) -> None:
    deleted = result_of(confluent.delete_records([TopicPartition(topic, 1, 2)]))
    assert deleted.low_watermark == 2

    def offset(spec: OffsetSpec) -> int:
        return result_of(confluent.list_offsets({TopicPartition(topic, 1): spec})).offset

    assert (offset(OffsetSpec.earliest()), offset(OffsetSpec.latest())) == (2, 5)
    assert offset(OffsetSpec.max_timestamp()) in range(2, 5)
    assert offset(OffsetSpec.for_timestamp(0)) == 2
    assert code_of(confluent.delete_records([TopicPartition(topic, 1, 99)])) == KafkaError.OFFSET_OUT_OF_RANGE
    assert (
        result_of(confluent.delete_records([TopicPartition(topic, 1, confluent_kafka.OFFSET_END)])).low_watermark == 5
    )


def test_confluent_describes(confluent: AdminClient, shared_broker: Broker, topic: str) -> None:
    cluster = confluent.describe_cluster(request_timeout=10).result(DEADLINE_SECONDS)
    assert [(node.id, node.port) for node in cluster.nodes] == [(1, shared_broker.port)] and cluster.controller.id == 1
    assert cluster.cluster_id == confluent.list_topics(timeout=60).cluster_id
    described = confluent.describe_topics(confluent_kafka.TopicCollection([topic]))[topic].result(DEADLINE_SECONDS)
    assert [(partition.id, partition.leader.id) for partition in described.partitions] == [(0, 1), (1, 1), (2, 1)]


# -- kafka-python ----------------------------------------------------------------------------------


@pytest.fixture
def python_admin(shared_broker: Broker) -> Iterator[kafka.KafkaAdminClient]:
    admin = kafka.KafkaAdminClient(bootstrap_servers=shared_broker.bootstrap)
    try:
        yield admin
    finally:
        admin.close()


def test_kafka_python_topics(python_admin: kafka.KafkaAdminClient, topic: str) -> None:
    name = topics.fresh_name("kafka-python")
    python_admin.create_topics([kafka.admin.NewTopic(name, 2, 1, topic_configs={"segment.bytes": "1000000"})])
    eventually(lambda: name in python_admin.list_topics())
    python_admin.create_partitions({name: 5})
    eventually(lambda: len(python_admin.describe_topics([name])[0]["partitions"]) == 5)
    (found,) = python_admin.describe_topic_partitions([name])["topics"]
    assert [partition["partition_index"] for partition in found["partitions"]] == [0, 1, 2, 3, 4]
    python_admin.delete_topics([name])
    eventually(lambda: name not in python_admin.list_topics())
    with pytest.raises(kafka.errors.TopicAlreadyExistsError):
        python_admin.create_topics([kafka.admin.NewTopic(topic, 1, 1)])
    with pytest.raises(kafka.errors.UnknownTopicOrPartitionError):
        python_admin.delete_topics([name])
    with pytest.raises(kafka.errors.InvalidTopicError):
        python_admin.create_topics([kafka.admin.NewTopic("no slashes/please", 1, 1)])


@pytest.mark.parametrize("incremental", [True, False])
def test_kafka_python_configs(python_admin: kafka.KafkaAdminClient, topic: str, incremental: bool) -> None:
    def configs() -> dict[str, dict]:
        resource = kafka.admin.ConfigResource("TOPIC", topic, None)
        (found,) = (named[topic] for named in python_admin.describe_configs([resource], config_filter="all").values())
        return found

    assert configs()["retention.ms"]["value"] == "604800000"
    python_admin.alter_configs(
        [kafka.admin.ConfigResource("TOPIC", topic, {"retention.ms": "2000000"})], incremental=incremental
    )
    eventually(lambda: configs()["retention.ms"]["value"] == "2000000")
    python_admin.reset_configs([kafka.admin.ConfigResource("TOPIC", topic, ["retention.ms"])], incremental=incremental)
    eventually(lambda: configs()["retention.ms"]["value"] == "604800000")


def test_kafka_python_records_and_offsets(python_admin: kafka.KafkaAdminClient, topic: str) -> None:
    partition = kafka.TopicPartition(topic, 1)
    assert python_admin.delete_records({partition: 3})[partition]["low_watermark"] == 3
    for spec, offset in ((kafka.admin.OffsetSpec.EARLIEST, 3), (kafka.admin.OffsetSpec.LATEST, 5), (0, 3)):
        assert python_admin.list_partition_offsets({partition: spec})[partition].offset == offset
    with pytest.raises(kafka.errors.OffsetOutOfRangeError):
        python_admin.delete_records({partition: 77})


def test_kafka_python_describes(python_admin: kafka.KafkaAdminClient, shared_broker: Broker, topic: str) -> None:
    cluster = python_admin.describe_cluster()
    assert cluster["controller_id"] == 1
    assert [broker["port"] for broker in cluster["brokers"]] == [shared_broker.port]
    reported = json.dumps(python_admin.describe_log_dirs({topic: [0, 1, 2]}), default=str)
    assert str(shared_broker.data_dir) in reported and topic in reported


# -- aiokafka --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def aiokafka_admin(broker: Broker):
    admin = aiokafka.admin.AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def eventually_async(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not await what():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_aiokafka_topics(shared_broker: Broker, topic: str) -> None:
    async def run() -> None:
        name = topics.fresh_name("aiokafka")
        async with aiokafka_admin(shared_broker) as admin:
            new = aiokafka.admin.NewTopic(name, 2, 1, topic_configs={"retention.ms": "123456"})
            created = await admin.create_topics([new])
            assert [(row[0], row[1]) for row in created.topic_errors] == [(name, 0)]
            again = await admin.create_topics([aiokafka.admin.NewTopic(topic, 1, 1)])
            assert again.topic_errors[0][1] == ErrorCode.TOPIC_ALREADY_EXISTS

            async def listed() -> bool:
                return name in await admin.list_topics()

            await eventually_async(listed)
            await admin.create_partitions({name: aiokafka.admin.NewPartitions(total_count=4)})

            async def grown() -> bool:
                return len((await admin.describe_topics([name]))[0]["partitions"]) == 4

            await eventually_async(grown)
            deleted = await admin.delete_topics([name])
            assert [tuple(row)[:2] for row in deleted.topic_error_codes] == [(name, 0)]

            async def gone() -> bool:
                return name not in await admin.list_topics()

            await eventually_async(gone)

    asyncio.run(run())


def test_aiokafka_configs(shared_broker: Broker, topic: str) -> None:
    async def run() -> None:
        async with aiokafka_admin(shared_broker) as admin:

            async def value() -> str:
                (response,) = await admin.describe_configs(
                    [aiokafka.admin.config_resource.ConfigResource("TOPIC", topic)]
                )
                (resource,) = response.resources
                assert resource[0] == 0
                return {row[0]: row[1] for row in resource[4]}["retention.ms"]

            async def changed() -> bool:
                return await value() == "3000000"

            assert await value() == "604800000"
            await admin.alter_configs(
                [aiokafka.admin.config_resource.ConfigResource("TOPIC", topic, {"retention.ms": "3000000"})]
            )
            await eventually_async(changed)

    asyncio.run(run())


def test_aiokafka_records_and_cluster(shared_broker: Broker, topic: str) -> None:
    async def run() -> None:
        partition = aiokafka.TopicPartition(topic, 1)
        async with aiokafka_admin(shared_broker) as admin:
            assert await admin.delete_records({partition: aiokafka.admin.RecordsToDelete(before_offset=4)}) == {
                partition: 4
            }
            cluster = await admin.describe_cluster()
            assert cluster["controller_id"] == 1 and [broker["port"] for broker in cluster["brokers"]] == [
                shared_broker.port
            ]
            assert cluster["cluster_id"]

    asyncio.run(run())
    with topics.connect(shared_broker) as connection:
        assert topics.list_offset(connection, topic, topics.EARLIEST, 1).offset == 4


# -- kcat ------------------------------------------------------------------------------------------


def test_kcat_lists(shared_broker: Broker, kcat: Kcat, topic: str) -> None:
    everything = json.loads(kcat.run("-L", "-J", "-b", shared_broker.bootstrap))
    assert everything["brokers"] == [{"id": 1, "name": shared_broker.bootstrap}] and everything["controllerid"] == 1
    assert topic in [row["topic"] for row in everything["topics"]]
    (found,) = json.loads(kcat.run("-L", "-J", "-b", shared_broker.bootstrap, "-t", topic))["topics"]
    assert [(row["partition"], row["leader"], row["isrs"]) for row in found["partitions"]] == [
        (number, 1, [{"id": 1}]) for number in range(3)
    ]
