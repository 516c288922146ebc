"""Requests of admin clients beyond topics and configurations: features, the quorum, elections,
reassignments, disks, credentials; and clients under a quota.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import confluent_kafka
import kafka
import kafka.admin
import pytest
from confluent_kafka import ElectionType, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from kafka.errors import LeaderNotAvailableError, NoError, NotLeaderForPartitionError

from mqd.protocol.messages import AlterClientQuotasRequest, DescribeAclsRequest
from tests.broker import Broker
from tests.compat import topics
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually

DEADLINE_SECONDS = 20
DESCRIBE_ACLS = 29


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    return topics.create_topic(shared_broker, "administration", 2)


@pytest.fixture
def python_admin(shared_broker: Broker) -> Iterator[kafka.KafkaAdminClient]:
    admin = kafka.KafkaAdminClient(bootstrap_servers=shared_broker.bootstrap)
    yield admin
    admin.close()


def test_confluent_elects_and_describes_credentials(shared_broker: Broker, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    requests = [TopicPartition(topic, 0), TopicPartition(topic, 9)]
    found = admin.elect_leaders(ElectionType.PREFERRED, requests).result(DEADLINE_SECONDS)
    assert {partition.partition: error.code() for partition, error in found.items()} == {0: 84, 9: 3}
    assert admin.elect_leaders(ElectionType.UNCLEAN, None).result(DEADLINE_SECONDS) == {}
    with pytest.raises(KafkaException) as caught:
        admin.describe_user_scram_credentials(["nobody"])["nobody"].result(DEADLINE_SECONDS)
    assert caught.value.args[0].code() == 91
    assert admin.describe_user_scram_credentials(None).result(DEADLINE_SECONDS) == {}


def test_acls_are_disabled_and_everything_is_authorized(shared_broker: Broker, topic: str) -> None:
    """As with an Apache Kafka broker without an authorizer."""
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    everything = AclBindingFilter(
        ResourceType.ANY, None, ResourcePatternType.ANY, None, None, AclOperation.ANY, AclPermissionType.ANY
    )
    rule = AclBinding(
        ResourceType.TOPIC,
        topic,
        ResourcePatternType.LITERAL,
        "User:me",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )
    # confluent_kafka returns an empty list instead of an error
    with KafkaConnection("127.0.0.1", shared_broker.port) as kafka_connection:
        for version in (1, 2, 3):
            described = kafka_connection.call(
                DESCRIBE_ACLS, version, DescribeAclsRequest(resource_type_filter=1, operation=1, permission_type=1)
            )
            assert (described.error_code, described.error_message, described.resources) == (
                KafkaError.SECURITY_DISABLED,
                "No Authorizer is configured.",
                [],
            )
    for requested in (*admin.create_acls([rule]).values(), *admin.delete_acls([everything]).values()):
        with pytest.raises(KafkaException) as caught:
            requested.result(DEADLINE_SECONDS)
        assert caught.value.args[0].code() == KafkaError.SECURITY_DISABLED and "No Authorizer is configured" in str(
            caught.value
        )
    described = admin.describe_topics(TopicCollection([topic]), include_authorized_operations=True)[topic].result(
        DEADLINE_SECONDS
    )
    names = {"READ", "WRITE", "CREATE", "DELETE", "ALTER", "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"}
    assert {operation.name for operation in described.authorized_operations} == names
    cluster = admin.describe_cluster(include_authorized_operations=True).result(DEADLINE_SECONDS)
    of_cluster = (names - {"READ", "WRITE", "DELETE"}) | {"CLUSTER_ACTION", "IDEMPOTENT_WRITE"}
    assert {operation.name for operation in cluster.authorized_operations} == of_cluster
    assert not admin.describe_cluster().result(DEADLINE_SECONDS).authorized_operations


def test_kafka_python_describes_the_cluster(python_admin: kafka.KafkaAdminClient, topic: str) -> None:
    (partition,) = python_admin.describe_metadata_quorum()["topics"][0]["partitions"]
    assert partition["leader_id"] == 1 and [voter["replica_id"] for voter in partition["current_voters"]] == [1]
    resources = python_admin.list_config_resources()
    assert topic in str(resources) and python_admin.list_config_resources(["GROUP"]) is not None
    assert python_admin.list_partition_reassignments() == {}
    python_admin.alter_partition_reassignments({kafka.TopicPartition(topic, 0): [1]})
    assert python_admin.describe_user_scram_credentials() == {}
    python_admin.elect_leaders(0, {topic: [0]}, raise_errors=False)


def test_kafka_python_moves_features_down_and_up(python_admin: kafka.KafkaAdminClient) -> None:
    before = python_admin.describe_features()
    low, high = before["metadata.version"]["supported"]
    assert before["metadata.version"]["finalized"] == (high, high)
    python_admin.update_features({"metadata.version": (2, low)}, validate_only=True)
    assert python_admin.describe_features() == before
    python_admin.update_features({"metadata.version": (2, low)})
    eventually_finalized(python_admin, low)
    python_admin.update_features({"metadata.version": (1, high)})
    eventually_finalized(python_admin, high)
    assert (
        python_admin.describe_features()["metadata.version"]["finalized_epoch"]
        > before["metadata.version"]["finalized_epoch"]
    )


def eventually_finalized(admin: kafka.KafkaAdminClient, level: int) -> None:
    """Workers respond with what the acceptor publishes a moment after the change."""
    eventually(lambda: admin.describe_features()["metadata.version"]["finalized"] == (level, level))


def test_kafka_python_moves_a_replica(start_broker, tmp_path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    broker = start_broker(config={"log.dirs": ",".join(map(str, disks))})
    topic = topics.create_topic(broker, "disks", 1)
    admin = kafka.KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    for disk in (*disks, disks[0]):
        deadline = time.monotonic() + DEADLINE_SECONDS
        # retriable while the previous move, which is described already, opens the partition
        while (response := [*admin.alter_replica_log_dirs({(topic, 0, 1): str(disk)}).values()]) != [NoError]:
            (error,) = response
            assert error in (NotLeaderForPartitionError, LeaderNotAvailableError), response
            assert time.monotonic() < deadline, response
        eventually(lambda disk=disk: _directories_of(admin, topic) == [str(disk)], broker.logs)
    admin.close()


def _directories_of(admin: kafka.KafkaAdminClient, topic: str) -> list[str]:
    (about,) = admin.describe_log_dirs({topic: [0]})
    return [
        directory["log_dir"]
        for directory in about["log_dirs"]
        for one in directory["topics"]
        if one["name"] == topic and one["partitions"]
    ]


def limit(broker: Broker, client_id: str, key: str, value: float | None) -> None:
    entry = AlterClientQuotasRequest.EntryData(
        entity=[AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name=client_id)],
        ops=[AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)],
    )
    with topics.connect(broker) as connection:
        (response,) = connection.call(49, 1, AlterClientQuotasRequest(entries=[entry])).entries
    assert response.error_code == 0


def test_clients_under_a_quota_lose_nothing_and_are_notified(start_broker, io_backend: str) -> None:
    """librdkafka does not wait by itself: its requests wait in the socket, and none times out."""
    broker = start_broker(config={"io.backend": io_backend, "quota.window.num": "2"})
    topic = topics.create_topic(broker, "quota", 1)
    limit(broker, "slow", "producer_byte_rate", 100_000)
    reported: list[float] = []
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "client.id": "slow",
            "linger.ms": 5,
            "batch.num.messages": 10,
            "throttle_cb": lambda event: reported.append(event.throttle_time),
        }
    )
    delivered, began = [], time.monotonic()
    for number in range(400):
        producer.produce(
            topic,
            b"%d" % number + b"x" * 1000,
            on_delivery=lambda error, message: delivered.append((error, message.offset())),
        )
    assert producer.flush(60) == 0
    assert time.monotonic() - began >= 2.5, (
        "400 KB at 100 KB/s, one second of it ahead, and the last requests before they are paid for"
    )
    assert [error for error, _ in delivered if error] == [] and sorted(offset for _, offset in delivered) == list(
        range(400)
    )
    assert reported and max(reported) > 0
    limit(broker, "reader", "consumer_byte_rate", 150_000)
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": broker.bootstrap, "client.id": "reader", "group.id": "g", "auto.offset.reset": "earliest"}
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    seen, began = 0, time.monotonic()
    while seen < 400:
        message = consumer.poll(DEADLINE_SECONDS)
        assert message is not None and message.error() is None
        assert message.offset() == seen
        seen += 1
    assert time.monotonic() - began >= 400_000 / 150_000 - 1 - 1
    consumer.close()
