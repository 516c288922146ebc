"""Every client's groups: each assignor and both protocols; members of different clients in one
group; a member that does not poll is removed; admin views.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import aiokafka.admin
import confluent_kafka
import kafka
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka.structs import OffsetAndMetadata

from tests.broker import Broker
from tests.compat import topics
from tests.compat.groups.members import DEADLINE_SECONDS, MEMBERS, Member, share, until, values_of

PARTITIONS = 4
CONFIG = {
    "group.initial.rebalance.delay.ms": "50",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
}
QUICK = [
    ("confluent-kafka", "cooperative-sticky"),
    ("confluent-kafka", "consumer"),
    ("kafka-python", "range"),
    ("kafka-python", "cooperative-sticky"),
    ("aiokafka", "roundrobin"),
]
SLOW = [
    ("confluent-kafka", "range"),
    ("confluent-kafka", "roundrobin"),
    ("kafka-python", "roundrobin"),
    ("kafka-python", "sticky"),
    ("aiokafka", "range"),
    ("aiokafka", "sticky"),
]


@pytest.fixture(scope="module", params=["epoll", pytest.param("io_uring", marks=pytest.mark.slow)])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("groups"), config={**CONFIG, "io.backend": request.param}) as broker:
        yield broker


@pytest.fixture
def join(broker: Broker) -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def join(client: str, group: str, topic: str, kind: str, **options: object) -> Member:
        members.append(MEMBERS[client](broker.bootstrap, group, topic, kind, **options))
        return members[-1]

    yield join
    for member in members:
        member.leaving.set()
    for member in members:
        member.join(DEADLINE_SECONDS)


def write(broker: Broker, topic: str, first: int, count: int) -> set[bytes]:
    values = [b"%d" % number for number in range(first, first + count)]
    with topics.connect(broker) as connection:
        for number, value in enumerate(values):
            topics.must_produce(connection, topic, value, partition=number % PARTITIONS)
    return set(values)


@pytest.mark.parametrize(("client", "kind"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_members_share_and_resume(broker: Broker, join: Callable[..., Member], client: str, kind: str) -> None:
    topic, group = topics.create_topic(broker, "groups", PARTITIONS), topics.fresh_name("group")
    written = write(broker, topic, 0, 40)
    first = join(client, group, topic, kind)
    share(topic, PARTITIONS, first)
    until("the first reads", lambda: set(first.values) == written and first.committed == len(first.values), first)
    second = join(client, group, topic, kind)
    share(topic, PARTITIONS, first, second)
    written |= write(broker, topic, 40, 40)
    until("both read", lambda: values_of([first, second]) == written, first, second)
    assert set(second.values) and not set(second.values) & {b"%d" % number for number in range(40)}, (
        "what was committed is not read again"
    )
    second.leave()
    share(topic, PARTITIONS, first)
    written |= write(broker, topic, 80, 40)
    until("who stayed reads", lambda: values_of([first, second]) == written, first)
    first.leave()
    new = write(broker, topic, 120, 8)
    third = join(client, group, topic, kind)
    until("a new member reads", lambda: set(third.values) >= new, third)
    third.leave()
    assert set(third.values) == new, "the group continues where it was"


def test_clients_share_one_group(broker: Broker, join: Callable[..., Member]) -> None:
    """Any of them may be the leader that assigns for all."""
    topic, group = topics.create_topic(broker, "mixed", 6), topics.fresh_name("mixed")
    members = [join(client, group, topic, "range") for client in MEMBERS]
    share(topic, 6, *members)
    members[0].leave()
    share(topic, 6, *members[1:])
    members[1].leave()
    share(topic, 6, members[2])
    members[2].leave()


def test_a_member_that_does_not_poll_leaves_and_rejoins(broker: Broker, join: Callable[..., Member]) -> None:
    """max.poll.interval.ms: librdkafka leaves by itself, and rejoins when it is polled."""
    topic, group = topics.create_topic(broker, "lazy", PARTITIONS), topics.fresh_name("lazy")
    lazy = confluent_kafka.Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": group,
            "session.timeout.ms": 1000,
            "heartbeat.interval.ms": 100,
            "max.poll.interval.ms": 1000,
        }
    )
    try:
        lazy.subscribe([topic])
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(lazy.assignment()) < PARTITIONS:
            assert time.monotonic() < deadline
            lazy.poll(0.05)
        other = join("confluent-kafka", group, topic, "range")
        share(topic, PARTITIONS, other)
        while len(other.held) == PARTITIONS:
            other.check()
            assert time.monotonic() < deadline
            lazy.poll(0.05)  # the first poll reports that the interval was exceeded
        while len(lazy.assignment()) != PARTITIONS // 2:
            assert time.monotonic() < deadline
            lazy.poll(0.05)
        other.leave()
    finally:
        lazy.close()


@pytest.fixture
def committed(broker: Broker, join: Callable[..., Member]) -> tuple[str, str, Member]:
    """A topic, a group of one member, and that member, which has read and committed five records of
    each partition.
    """
    topic, group = topics.create_topic(broker, "administered", PARTITIONS), topics.fresh_name("administered")
    written = write(broker, topic, 0, 5 * PARTITIONS)
    member = join("kafka-python", group, topic, "range")
    until("it reads", lambda: set(member.values) == written and member.committed == len(member.values), member)
    return topic, group, member


def test_confluent_administers_groups(broker: Broker, committed: tuple[str, str, Member]) -> None:
    topic, group, member = committed
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    described = admin.describe_consumer_groups([group])[group].result(20)
    assert described.state.name == "STABLE" and described.partition_assignor == "range" and len(described.members) == 1
    assert {(one.topic, one.partition) for one in described.members[0].assignment.topic_partitions} == set(member.held)
    assert group in {one.group_id for one in admin.list_consumer_groups().result(20).valid}
    with pytest.raises(confluent_kafka.KafkaException) as caught:
        admin.delete_consumer_groups([group])[group].result(20)
    assert caught.value.args[0].code() == confluent_kafka.KafkaError.NON_EMPTY_GROUP
    member.leave()
    moved = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 2)])
    admin.alter_consumer_group_offsets([moved])[group].result(20)
    requested = ConsumerGroupTopicPartitions(
        group, [TopicPartition(topic, partition) for partition in range(PARTITIONS)]
    )
    found = admin.list_consumer_group_offsets([requested])[group].result(20)
    assert [one.offset for one in found.topic_partitions] == [2, 5, 5, 5]
    admin.delete_consumer_groups([group])[group].result(20)
    assert group not in {one.group_id for one in admin.list_consumer_groups().result(20).valid}


def test_kafka_python_administers_groups(broker: Broker, committed: tuple[str, str, Member]) -> None:
    topic, group, member = committed
    admin = kafka.KafkaAdminClient(bootstrap_servers=broker.bootstrap)
    try:
        described = admin.describe_groups([group])[group]
        assert (described["group_state"], described["protocol_data"], len(described["members"])) == (
            "Stable",
            "range",
            1,
        )
        assert group in {one["group_id"] for one in admin.list_groups()}
        assert admin.delete_groups([group])[group] == "NonEmptyGroupError"
        member.leave()
        zero, one = kafka.TopicPartition(topic, 0), kafka.TopicPartition(topic, 1)
        admin.alter_group_offsets(group, {zero: OffsetAndMetadata(3, "moved", -1)})
        admin.delete_group_offsets(group, [one])
        found = admin.list_group_offsets(group)[group]
        assert (found[zero].offset, found[zero].metadata) == (3, "moved") and (
            one not in found or found[one].offset == -1
        )
        assert admin.delete_groups([group])[group] == "OK"
        assert admin.delete_groups([group])[group] == "GroupIdNotFoundError"
    finally:
        admin.close()


def test_aiokafka_describes_groups(broker: Broker, committed: tuple[str, str, Member]) -> None:
    topic, group, _member = committed

    async def look() -> None:
        admin = aiokafka.admin.AIOKafkaAdminClient(bootstrap_servers=broker.bootstrap)
        await admin.start()
        try:
            assert group in {name for name, _protocol in await admin.list_consumer_groups()}
            (response,) = await admin.describe_consumer_groups([group])
            (described,) = response.groups
            assert described[1:4] == (group, "Stable", "consumer")
            found = await admin.list_consumer_group_offsets(group)
            assert {
                one.partition: offset.offset for one, offset in found.items() if one.topic == topic
            } == dict.fromkeys(range(PARTITIONS), 5)
        finally:
            await admin.close()

    asyncio.run(look())
