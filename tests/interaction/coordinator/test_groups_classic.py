"""Classic groups on a running broker: raw frames of every version, librdkafka and kafka-python, a
coordinator that is killed.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.messages import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    ListGroupsRequest,
    SyncGroupRequest,
)
from tests.broker import Broker
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S, eventually

FIND, JOIN, HEARTBEAT, LEAVE, SYNC, DESCRIBE, LIST, DELETE = 10, 11, 12, 13, 14, 15, 16, 42
WAIT_S = PATIENCE_S


@pytest.fixture
def kafka(shared_broker: Broker) -> Iterator[KafkaConnection]:
    with KafkaConnection("127.0.0.1", shared_broker.port, timeout_s=WAIT_S) as connection:
        ready(connection)
        yield connection


def ready(kafka: KafkaConnection) -> None:
    """The coordinator's topic exists and is loaded."""
    eventually(
        lambda: (
            kafka.call(FIND, 4, FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])).coordinators[0].error_code
            == 0
        )
    )
    eventually(lambda: kafka.call(LIST, 5).error_code == 0)


@pytest.fixture
def group() -> str:
    return f"group-{uuid.uuid4()}"


def join_request(
    group: str, member_id: str = "", instance: str | None = None, session_ms: int = 30_000
) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=session_ms,
        rebalance_timeout_ms=30_000,
        member_id=member_id,
        group_instance_id=instance,
        protocol_type="consumer",
        protocols=[
            JoinGroupRequest.Protocol(name="range", metadata=b"\0\0\0\0\0\0"),
            JoinGroupRequest.Protocol(name="sticky", metadata=b"\0\1\0\0\0\0"),
        ],
    )


def join(kafka: KafkaConnection, group: str, version: int = 9, instance: str | None = None) -> JoinGroupResponse:
    response = kafka.call(JOIN, version, join_request(group, instance=instance))
    if response.error_code == E.MEMBER_ID_REQUIRED:
        response = kafka.call(JOIN, version, join_request(group, response.member_id, instance))
    return response


def sync(
    kafka: KafkaConnection,
    group: str,
    joined: JoinGroupResponse,
    version: int = 5,
    assignment: bytes = b"mine",
    instance: str | None = None,
):
    given = (
        [SyncGroupRequest.Assignment(member_id=joined.member_id, assignment=assignment)]
        if joined.leader == joined.member_id
        else []
    )
    message = SyncGroupRequest(
        group_id=group,
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        group_instance_id=instance,
        protocol_type="consumer",
        protocol_name="range",
        assignments=given,
    )
    return kafka.call(SYNC, version, message)


def beat(
    kafka: KafkaConnection, group: str, joined: JoinGroupResponse, version: int = 4, instance: str | None = None
) -> int:
    message = HeartbeatRequest(
        group_id=group, generation_id=joined.generation_id, member_id=joined.member_id, group_instance_id=instance
    )
    return kafka.call(HEARTBEAT, version, message).error_code


@pytest.mark.parametrize("version", range(10))
def test_join_sync_heartbeat_and_leave_in_every_version(kafka: KafkaConnection, group: str, version: int) -> None:
    joined = join(kafka, group, version)
    assert (joined.error_code, joined.protocol_name, joined.leader) == (0, "range", joined.member_id)
    assert [one.metadata for one in joined.members] == [b"\0\0\0\0\0\0"]
    assert sync(kafka, group, joined, min(version, 5)).assignment == b"mine"
    assert beat(kafka, group, joined, min(version, 4)) == 0
    message = LeaveGroupRequest(
        group_id=group,
        member_id=joined.member_id,
        members=[LeaveGroupRequest.MemberIdentity(member_id=joined.member_id, reason="done")],
    )
    left = kafka.call(LEAVE, min(version, 5), message)
    assert left.error_code == 0 and all(one.error_code == 0 for one in left.members)
    assert kafka.call(DELETE, min(version, 2), DeleteGroupsRequest(groups_names=[group])).results[0].error_code == 0


@pytest.mark.parametrize("version", range(10))
def test_refusals_in_every_version(kafka: KafkaConnection, group: str, version: int) -> None:
    assert kafka.call(JOIN, version, join_request("")).error_code == E.INVALID_GROUP_ID
    assert kafka.call(JOIN, version, join_request(group, session_ms=5)).error_code == E.INVALID_SESSION_TIMEOUT
    assert kafka.call(JOIN, version, join_request(group, "stranger")).error_code == E.UNKNOWN_MEMBER_ID
    stranger = JoinGroupResponse(member_id="stranger", generation_id=1)
    assert beat(kafka, group, stranger, min(version, 4)) == E.UNKNOWN_MEMBER_ID
    assert sync(kafka, group, stranger, min(version, 5)).error_code == E.UNKNOWN_MEMBER_ID
    message = LeaveGroupRequest(
        group_id=group, member_id="stranger", members=[LeaveGroupRequest.MemberIdentity(member_id="stranger")]
    )
    left = kafka.call(LEAVE, min(version, 5), message)
    assert [left.error_code, *(one.error_code for one in left.members)] == (
        [E.UNKNOWN_MEMBER_ID] if version < 3 else [0, E.UNKNOWN_MEMBER_ID]
    )
    assert (
        kafka.call(DELETE, min(version, 2), DeleteGroupsRequest(groups_names=[group])).results[0].error_code
        == E.GROUP_ID_NOT_FOUND
    )
    if version >= 5:
        assert (
            kafka.call(SYNC, 5, SyncGroupRequest(group_id=group, member_id="stranger")).error_code
            == E.INCONSISTENT_GROUP_PROTOCOL
        )


def test_groups_are_described_and_listed(kafka: KafkaConnection, group: str) -> None:
    joined = join(kafka, group)
    sync(kafka, group, joined)
    for version in range(7):
        found = kafka.call(
            DESCRIBE,
            version,
            DescribeGroupsRequest(groups=[group, "nowhere"], include_authorized_operations=version >= 3),
        ).groups
        assert (found[0].group_state, found[0].protocol_data, found[0].error_code) == ("Stable", "range", 0)
        member = found[0].members[0]
        assert (member.member_id, member.client_id, member.client_host, member.member_assignment) == (
            joined.member_id,
            "test",
            "/127.0.0.1",
            b"mine",
        )
        assert (found[1].group_state, found[1].error_code) == ("Dead", E.GROUP_ID_NOT_FOUND if version >= 6 else 0)
    mine = [
        one
        for one in kafka.call(LIST, 5, ListGroupsRequest(states_filter=["stable"], types_filter=["Classic"])).groups
        if one.group_id == group
    ]
    assert [(one.protocol_type, one.group_state, one.group_type) for one in mine] == [("consumer", "Stable", "classic")]
    assert group not in {one.group_id for one in kafka.call(LIST, 5, ListGroupsRequest(states_filter=["Empty"])).groups}
    assert group not in {
        one.group_id for one in kafka.call(LIST, 5, ListGroupsRequest(types_filter=["consumer"])).groups
    }
    assert kafka.call(DELETE, 2, DeleteGroupsRequest(groups_names=[group])).results[0].error_code == E.NON_EMPTY_GROUP


def test_two_members_over_two_connections(shared_broker: Broker, kafka: KafkaConnection, group: str) -> None:
    """The first member's connection stays usable while its second JoinGroup waits for the other
    member to join.
    """
    first = join(kafka, group)
    sync(kafka, group, first)
    with KafkaConnection("127.0.0.1", shared_broker.port, timeout_s=WAIT_S) as other:
        other.send(JOIN, 3, join_request(group))
        eventually(lambda: beat(kafka, group, first) == E.REBALANCE_IN_PROGRESS)
        again = kafka.call(JOIN, 9, join_request(group, first.member_id))
        second = other.receive().body
        assert again.generation_id == second.generation_id == first.generation_id + 1
        assert {one.member_id for one in again.members} == {first.member_id, second.member_id}
        other.send(
            SYNC, 3, SyncGroupRequest(group_id=group, generation_id=second.generation_id, member_id=second.member_id)
        )
        assert sync(kafka, group, again).assignment == b"mine"
        assert other.receive().body.assignment == b""


def test_static_members(kafka: KafkaConnection, group: str) -> None:
    old = join(kafka, group, instance="one")
    sync(kafka, group, old, instance="one")
    new = join(kafka, group, instance="one")
    assert new.generation_id == old.generation_id and new.member_id != old.member_id and new.skip_assignment
    assert (
        beat(kafka, group, old, instance="one") == E.FENCED_INSTANCE_ID and beat(kafka, group, new, instance="one") == 0
    )
    assert sync(kafka, group, new, instance="one").assignment == b"mine"
    removed = kafka.call(
        LEAVE, 5, LeaveGroupRequest(group_id=group, members=[LeaveGroupRequest.MemberIdentity(group_instance_id="one")])
    )
    assert removed.members[0].error_code == 0 and beat(kafka, group, new, instance="one") == E.UNKNOWN_MEMBER_ID


def test_a_killed_coordinator_recovers_its_groups(start_broker: Callable[..., Broker], group: str) -> None:
    broker = start_broker()
    with KafkaConnection("127.0.0.1", broker.port, timeout_s=WAIT_S) as kafka:
        ready(kafka)
        joined = join(kafka, group)
        sync(kafka, group, joined)
    os.kill(broker.pid("mqd-acceptor"), signal.SIGKILL)

    def is_recovered() -> bool:
        try:
            with KafkaConnection("127.0.0.1", broker.port, timeout_s=WAIT_S) as kafka:
                return (
                    kafka.call(LIST, 5).error_code == 0
                    and beat(kafka, group, joined) == 0
                    and sync(kafka, group, joined).assignment == b"mine"
                )
        except (ConnectionEnded, OSError):
            return False

    eventually(is_recovered)


# -- clients ---------------------------------------------------------------------------------------


@pytest.fixture
def topic(shared_broker: Broker) -> str:
    name = f"topic-{uuid.uuid4()}"
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    admin.create_topics([NewTopic(name, 6, 1)])[name].result()
    producer = Producer({"bootstrap.servers": shared_broker.bootstrap})
    for number in range(60):
        producer.produce(name, b"%d" % number, partition=number % 6)
    assert producer.flush(WAIT_S) == 0
    return name


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky"])
def test_librdkafka_joins_reads_and_leaves(shared_broker: Broker, topic: str, group: str, assignor: str) -> None:
    def consumer() -> Consumer:
        settings = {
            "bootstrap.servers": shared_broker.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "heartbeat.interval.ms": 200,
        }
        made = Consumer(
            {
                **settings,
                "session.timeout.ms": 6_000,
                "partition.assignment.strategy": assignor,
                "enable.auto.commit": False,
            }
        )
        made.subscribe(["^" + topic])
        return made

    consumers = [consumer() for _ in range(3)]
    read: set[bytes] = set()

    def poll() -> None:
        for one in consumers:
            message = one.poll(0.02)
            if message is not None and message.error() is None:
                read.add(message.value())

    def is_balanced() -> bool:
        poll()
        return len(read) == 60 and sorted(len(one.assignment()) for one in consumers) == [6 // len(consumers)] * len(
            consumers
        )

    eventually(is_balanced)
    consumers.pop().close()
    eventually(is_balanced)
    for one in consumers:
        one.close()


def test_kafka_python_reads_and_continues(shared_broker: Broker, topic: str, group: str) -> None:
    from kafka import KafkaConsumer

    def read(count: int) -> set[bytes]:
        consumer = KafkaConsumer(
            topic,
            bootstrap_servers=shared_broker.bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
        )
        found: set[bytes] = set()
        deadline = time.monotonic() + WAIT_S
        while len(found) < count and time.monotonic() < deadline:
            for records in consumer.poll(200, max_records=count - len(found)).values():
                found.update(record.value for record in records)
        consumer.commit()
        consumer.close()
        return found

    first = read(20)
    assert len(first) == 20 and len(read(40) - first) == 40
