"""Consumer groups (KIP-848) on a running broker: librdkafka's consumers with
group.protocol=consumer, together with classic ones, and raw frames.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    FindCoordinatorRequest,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    UpdateFeaturesRequest,
)
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S

SECONDS = PATIENCE_S
HEARTBEAT, DESCRIBE = 68, 69


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {
        "group.consumer.min.session.timeout.ms": "1000",
        "group.consumer.session.timeout.ms": "45000",
        "group.consumer.min.heartbeat.interval.ms": "100",
    }
    with Broker(tmp_path_factory.mktemp("consumer-groups"), config=config) as broker:
        yield broker


@pytest.fixture
def admin(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


@pytest.fixture
def consumers(broker: Broker) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def make(group: str, *topics: str, protocol: str = "consumer", **config: object) -> Consumer:
        classic = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 300} if protocol == "classic" else {}
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "auto.offset.reset": "earliest",
            **classic,
            **config,
        }
        consumer = Consumer({name.replace("_", "."): value for name, value in settings.items()})
        if topics:
            consumer.subscribe(list(topics))
        made.append(consumer)
        return consumer

    yield make
    for consumer in made:
        consumer.close()


def name(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex[:10]}"


def create(admin: AdminClient, topic: str, partitions: int) -> str:
    admin.create_topics([NewTopic(topic, partitions)])[topic].result(60)
    return topic


def wait(what: Callable[[], object], *polled: Consumer, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "timed out"
        for consumer in polled:
            message = consumer.poll(0.02)
            assert (
                message is None
                or message.error() is None
                or message.error().retriable()
                or message.error().code() == E.UNKNOWN_TOPIC_OR_PARTITION
            ), message.error()
        if not polled:
            time.sleep(0.02)


def held(consumer: Consumer) -> set[tuple[str, int]]:
    return {(one.topic, one.partition) for one in consumer.assignment()}


def shares(*consumers: Consumer) -> list[int]:
    return sorted(len(held(consumer)) for consumer in consumers)


def commit(consumer: Consumer, **what: object) -> None:
    """A member's epoch rises before the heartbeat response reports it to the member: a commit in
    between has a stale epoch and must be retried (KIP-848).
    """
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            consumer.commit(**what, asynchronous=False)
            return
        except KafkaException as error:
            if error.args[0].code() != E.STALE_MEMBER_EPOCH or time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def test_members_join_share_and_leave(admin: AdminClient, consumers: Callable[..., Consumer]) -> None:
    topic, group = create(admin, name("t"), 6), name("g")
    first = consumers(group, topic)
    wait(lambda: shares(first) == [6], first)
    before = held(first)
    second, third = consumers(group, topic), consumers(group, topic)
    wait(lambda: shares(first, second, third) == [2, 2, 2], first, second, third)
    assert held(first) < before, "the first member keeps some of its partitions"
    assert held(first) | held(second) | held(third) == before
    second.close()
    wait(lambda: shares(first, third) == [3, 3], first, third)
    described = admin.describe_consumer_groups([group])[group].result(60)
    assert (
        str(described.type).endswith("CONSUMER")
        and str(described.state).endswith("STABLE")
        and len(described.members) == 2
    )


def test_members_keep_consuming_partitions_that_they_keep(
    admin: AdminClient, consumers: Callable[..., Consumer]
) -> None:
    topic, group = create(admin, name("t"), 4), name("g")
    lost: list[set[tuple[str, int]]] = []
    first = consumers(group)
    first.subscribe(
        [topic], on_revoke=lambda _consumer, partitions: lost.append({(one.topic, one.partition) for one in partitions})
    )
    wait(lambda: shares(first) == [4], first)
    second = consumers(group, topic)
    wait(lambda: shares(first, second) == [2, 2], first, second)
    assert [len(one) for one in lost] == [2] and not lost[0] & held(first)


def test_records_are_read_once_over_rebalances(
    broker: Broker, admin: AdminClient, consumers: Callable[..., Consumer]
) -> None:
    topic, group = create(admin, name("t"), 4), name("g")
    producer, seen = Producer({"bootstrap.servers": broker.bootstrap}), []

    def read(*readers: Consumer) -> None:
        for reader in readers:
            message = reader.poll(0.02)
            if message is not None and message.error() is None:
                seen.append(message.value())
                commit(reader, message=message)

    readers = [consumers(group, topic, enable_auto_commit=False)]
    wait(lambda: shares(*readers) == [4], *readers)
    for number in range(200):
        producer.produce(topic, str(number).encode(), partition=number % 4)
        if number == 100:
            readers.append(consumers(group, topic, enable_auto_commit=False))
        producer.poll(0)
        read(*readers)
    producer.flush()
    deadline = time.monotonic() + SECONDS
    while len(set(seen)) < 200 or shares(*readers) != [2, 2]:
        assert time.monotonic() < deadline
        read(*readers)
    assert sorted(map(int, seen)) == list(range(200)), "each once: an owner commits before it releases a partition"


def test_static_members_come_back(admin: AdminClient, consumers: Callable[..., Consumer]) -> None:
    topic, group = create(admin, name("t"), 4), name("g")
    one, two = consumers(group, topic, group_instance_id="one"), consumers(group, topic, group_instance_id="two")
    wait(lambda: shares(one, two) == [2, 2], one, two)
    before, members = held(one), _describe(admin, group).members
    one.close()
    again = consumers(group, topic, group_instance_id="one")
    wait(lambda: len(held(again)) == 2, again, two)
    assert held(again) == before and len(_describe(admin, group).members) == len(members) == 2


def _describe(admin: AdminClient, group: str):
    return admin.describe_consumer_groups([group])[group].result(60)


def is_coordinator_available(admin: AdminClient, group: str) -> bool:
    """Its coordinator is available again: the client does not retry by itself."""
    try:
        _describe(admin, group)
    except KafkaException as error:
        assert error.args[0].code() == E.COORDINATOR_LOAD_IN_PROGRESS, error
        return False
    return True


def test_expressions_and_new_topics(admin: AdminClient, consumers: Callable[..., Consumer]) -> None:
    prefix, group = name("x"), name("g")
    create(admin, f"{prefix}-1", 2)
    member = consumers(group, f"^{prefix}-.*")
    wait(lambda: shares(member) == [2], member)
    create(admin, f"{prefix}-2", 3)
    wait(lambda: shares(member) == [5], member)
    admin.create_partitions([NewPartitions(f"{prefix}-1", 4)])[f"{prefix}-1"].result(60)
    wait(lambda: shares(member) == [7], member)
    admin.delete_topics([f"{prefix}-2"])[f"{prefix}-2"].result(60)
    wait(lambda: held(member) == {(f"{prefix}-1", index) for index in range(4)}, member)


def test_an_expression_matches_internal_topics_too(admin: AdminClient, consumers: Callable[..., Consumer]) -> None:
    """As with Apache Kafka 4.2."""
    topic = create(admin, name("t"), 1)
    member = consumers(name("g"), "^.*")
    wait(lambda: {(topic, 0), ("__consumer_offsets", 0)} <= held(member), member)


def test_migration_to_the_consumer_protocol_and_back(admin: AdminClient, consumers: Callable[..., Consumer]) -> None:
    topic, group = create(admin, name("t"), 4), name("g")
    old = consumers(group, topic, protocol="classic", partition_assignment_strategy="cooperative-sticky")
    wait(lambda: shares(old) == [4], old)
    assert str(_describe(admin, group).type).endswith("CLASSIC")
    new = consumers(group, topic)
    wait(lambda: shares(old, new) == [2, 2], old, new)
    assert str(_describe(admin, group).type).endswith("CONSUMER")
    assert held(old) | held(new) == {(topic, index) for index in range(4)}
    new.close()
    wait(lambda: shares(old) == [4], old)
    assert str(_describe(admin, group).type).endswith("CLASSIC")


def test_an_eager_classic_member_migrates_too(admin: AdminClient, consumers: Callable[..., Consumer]) -> None:
    topic, group = create(admin, name("t"), 4), name("g")
    old = consumers(group, topic, protocol="classic", partition_assignment_strategy="range")
    wait(lambda: shares(old) == [4], old)
    new = consumers(group, topic)
    wait(lambda: shares(old, new) == [2, 2], old, new)
    old.close()
    wait(lambda: shares(new) == [4], new)


def test_the_group_outlives_the_acceptor(
    broker: Broker, admin: AdminClient, consumers: Callable[..., Consumer]
) -> None:
    topic, group = create(admin, name("t"), 4), name("g")
    one, two = consumers(group, topic), consumers(group, topic)
    wait(lambda: shares(one, two) == [2, 2], one, two)
    before = held(one), held(two)
    commit(one, offsets=[TopicPartition(topic, next(iter(held(one)))[1], 3)])
    os.kill(broker.pids("acceptor")[0], signal.SIGKILL)
    broker.wait_until_ready()
    deadline = time.monotonic() + 3
    wait(lambda: time.monotonic() > deadline and (held(one), held(two)) == before, one, two)
    wait(lambda: is_coordinator_available(admin, group), one, two)
    assert len(_describe(admin, group).members) == 2


def test_configuration_of_one_group(admin: AdminClient, broker: Broker) -> None:
    group = name("g")
    resource = ConfigResource(ResourceType.GROUP, group)
    assert int(admin.describe_configs([resource])[resource].result(60)["consumer.session.timeout.ms"].value) == 45_000

    def alter(option: str, value: str) -> None:
        change = ConfigResource(ResourceType.GROUP, group)
        change.add_incremental_config(ConfigEntry(option, value, incremental_operation=AlterConfigOpType.SET))
        admin.incremental_alter_configs([change])[change].result(60)

    alter("consumer.heartbeat.interval.ms", "200")
    alter("consumer.session.timeout.ms", "1000")
    found = admin.describe_configs([resource])[resource].result(60)
    assert (found["consumer.session.timeout.ms"].value, found["consumer.heartbeat.interval.ms"].value) == (
        "1000",
        "200",
    )
    for option, value in (
        ("consumer.session.timeout.ms", "10"),
        ("consumer.session.timeout.ms", "100"),
        ("consumer.heartbeat.interval.ms", "900000"),
        ("retention.ms", "5"),
    ):
        with pytest.raises(KafkaException):
            alter(option, value)
    topic = create(admin, name("t"), 1)
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        _find(kafka, group)
        assert _join(kafka, group, "m1", topic).heartbeat_interval_ms == 200
        began = time.monotonic()
        wait(
            lambda: (
                _heartbeat(kafka, group, "m2", 1).error_code == E.UNKNOWN_MEMBER_ID
                and not kafka.call(DESCRIBE, 1, ConsumerGroupDescribeRequest(group_ids=[group])).groups[0].members
            )
        )
        assert time.monotonic() - began < SECONDS


# -- raw frames ------------------------------------------------------------------------------------


def _find(kafka: KafkaConnection, group: str) -> None:
    wait(lambda: kafka.call(10, 4, FindCoordinatorRequest(coordinator_keys=[group])).coordinators[0].error_code == 0)


def _heartbeat(kafka: KafkaConnection, group: str, member_id: str, epoch: int, version: int = 1, **fields: object):
    """Retried while the coordinator is being loaded."""
    responses = []

    def answered() -> bool:
        request = ConsumerGroupHeartbeatRequest(group_id=group, member_id=member_id, member_epoch=epoch, **fields)
        responses.append(kafka.call(HEARTBEAT, version, request))
        return responses[-1].error_code not in (
            E.COORDINATOR_LOAD_IN_PROGRESS,
            E.COORDINATOR_NOT_AVAILABLE,
            E.NOT_COORDINATOR,
        )

    wait(answered)
    return responses[-1]


def _join(kafka: KafkaConnection, group: str, member_id: str, *topics: str, **fields: object):
    return _heartbeat(
        kafka,
        group,
        member_id,
        0,
        **{"rebalance_timeout_ms": 5_000, "subscribed_topic_names": list(topics), "topic_partitions": [], **fields},
    )


def test_raw_members(broker: Broker, admin: AdminClient) -> None:
    topic, group = create(admin, name("t"), 2), name("g")
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        _find(kafka, group)
        assert _heartbeat(kafka, group, "m1", 1).error_code == E.GROUP_ID_NOT_FOUND
        joined = _join(kafka, group, "m1", topic)
        assert (
            joined.error_code,
            joined.member_epoch,
            [list(one.partitions) for one in joined.assignment.topic_partitions],
        ) == (0, 1, [[0, 1]])
        assert _join(kafka, group, "", topic, version=0).member_id
        assert _join(kafka, group, "", topic).error_code == E.INVALID_REQUEST
        assert _join(kafka, group, "m3", topic, server_assignor="sticky").error_code == E.UNSUPPORTED_ASSIGNOR
        assert _join(kafka, group, "m3", subscribed_topic_regex="[").error_code == E.INVALID_REGULAR_EXPRESSION
        assert _heartbeat(kafka, group, "m1", 9).error_code == E.FENCED_MEMBER_EPOCH
        assert _heartbeat(kafka, group, "nobody", 1).error_code == E.UNKNOWN_MEMBER_ID
        assert _join(kafka, "", "m1", topic).error_code == E.INVALID_REQUEST
        assert _join(kafka, "x" * 20_000, "m1", topic).error_code == E.INVALID_REQUEST
        described = kafka.call(
            DESCRIBE, 1, ConsumerGroupDescribeRequest(group_ids=[group, "nobody's"], include_authorized_operations=True)
        ).groups
        assert (
            described[0].group_state,
            described[0].group_epoch,
            described[0].assignor_name,
            len(described[0].members),
        ) == ("Reconciling", 2, "uniform", 2)
        assert described[1].error_code == E.GROUP_ID_NOT_FOUND
        listed = {
            one.group_id: one.group_type
            for one in kafka.call(16, 5, ListGroupsRequest(types_filter=["consumer"])).groups
        }
        assert listed.get(group) == "consumer"


def test_raw_commits(broker: Broker, admin: AdminClient) -> None:
    topic, group = create(admin, name("t"), 1), name("g")
    partition = OffsetCommitRequest.Partition(partition_index=0, committed_offset=5, committed_metadata="")

    def commit(member_id: str, epoch: int) -> int:
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=epoch,
            member_id=member_id,
            topics=[OffsetCommitRequest.Topic(name=topic, partitions=[partition])],
        )
        return kafka.call(8, 9, request).topics[0].partitions[0].error_code

    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        _find(kafka, group)
        assert _join(kafka, group, "m1", topic).member_epoch == 1
        assert (commit("m1", 1), commit("m1", 0), commit("m2", 1)) == (0, E.STALE_MEMBER_EPOCH, E.UNKNOWN_MEMBER_ID)
        for member_id, epoch, error in (
            ("m1", 1, 0),
            (None, -1, 0),
            ("m1", 7, E.STALE_MEMBER_EPOCH),
            ("m2", 1, E.UNKNOWN_MEMBER_ID),
        ):
            requested = OffsetFetchRequest.Group(group_id=group, member_id=member_id, member_epoch=epoch, topics=None)
            assert kafka.call(9, 9, OffsetFetchRequest(groups=[requested])).groups[0].error_code == error


def test_without_the_feature_the_protocol_is_refused(start_broker: Callable[..., Broker]) -> None:
    broker = start_broker(workers=1)
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        _find(kafka, "g")
        for level, error in ((0, E.UNSUPPORTED_VERSION), (1, E.GROUP_ID_NOT_FOUND)):
            update = UpdateFeaturesRequest.FeatureUpdateKey(
                feature="group.version", max_version_level=level, upgrade_type=1 if level else 2
            )
            assert kafka.call(57, 1, UpdateFeaturesRequest(feature_updates=[update])).error_code == 0
            wait(lambda error=error: _heartbeat(kafka, "g", "m1", 1).error_code == error)
        finalized = {one.name: one.max_version_level for one in kafka.call(18, 4).finalized_features}
        assert finalized["group.version"] == 1
