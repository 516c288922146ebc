"""The consumer's parts without a broker: commits in order, the eager view of a rebalance, actions
of a membership core, offsets' messages, batches over TCP.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, TopicPartition

from mqd.client import offsets
from mqd.client.config import read
from mqd.client.group.consumer_protocol import INTERVAL_FIRST_MS, RELEASE_WAIT_MS, ConsumerProtocolCore, Settings
from mqd.client.group.events import (
    Assign,
    Done,
    Leave,
    Left,
    Lost,
    Partition,
    Polled,
    Problem,
    Resolve,
    ResponseMissing,
    Revoke,
    Send,
    Subscribe,
    Tick,
    TopicsKnown,
)
from mqd.client.group.membership import MAX_POLL_EXCEEDED, State
from mqd.client.messages import local_error
from mqd.client.offsets import Committed, PartitionResult
from mqd.client.shm.consumer_config import ConsumerConfig
from mqd.client.shm.partitions import AssignedPartition, AssignedPartitions, Phase
from mqd.client.tcp.consumer import TcpConsumer
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ConsumerGroupHeartbeatResponse, FetchResponse, OffsetFetchResponse
from tests.unit.client.client_member import CoreMember

# -- the membership core ---------------------------------------------------------------------------

T = b"t" * 16
_Assignment, _TopicPartitions = (
    ConsumerGroupHeartbeatResponse.Assignment,
    ConsumerGroupHeartbeatResponse.TopicPartitions,
)


def answer(
    epoch: int, partitions: list[int] | None = None, error: int = 0, interval_ms: int = 1000
) -> ConsumerGroupHeartbeatResponse:
    assignment = (
        None
        if partitions is None
        else _Assignment(topic_partitions=[_TopicPartitions(topic_id=T, partitions=partitions)] if partitions else [])
    )
    return ConsumerGroupHeartbeatResponse(
        error_code=error, member_id="m", member_epoch=epoch, heartbeat_interval_ms=interval_ms, assignment=assignment
    )


class Member(CoreMember):
    def __init__(self, **settings: Any) -> None:
        super().__init__(ConsumerProtocolCore(Settings("g", "m", **{"max_poll_interval_ms": 10_000, **settings})))

    def sent(self, actions: list) -> Any:
        (send,) = [action for action in actions if isinstance(action, Send)]
        return send.message

    def with_assignment(self, partitions: list[int]) -> None:
        self.give(Subscribe(("t",)))
        self.answered(answer(1, partitions))
        self.give(TopicsKnown({T: "t"}))
        self.give(Done())
        self.answered(answer(1))
        assert self.core.owned == {(T, index) for index in partitions} and self.core.request_under_way is None


def test_joining_sends_everything_and_reports_the_assignment() -> None:
    member = Member(instance_id="i", rack_id="r", server_assignor="range")
    message = member.sent(member.give(Subscribe(("t",), "x.*")))
    assert (
        message.member_epoch,
        message.subscribed_topic_names,
        message.subscribed_topic_regex,
        message.topic_partitions,
    ) == (0, ["t"], "x.*", [])
    assert (message.instance_id, message.rack_id, message.server_assignor, message.rebalance_timeout_ms) == (
        "i",
        "r",
        "range",
        10_000,
    )
    assert member.answered(answer(3, [0, 1])) == [Resolve((T,))]
    assert member.give(TopicsKnown({T: "t"})) == [Assign((Partition("t", 0, T), Partition("t", 1, T)))]
    message = member.sent(member.give(Done()))
    assert (
        message.member_epoch == 3
        and message.subscribed_topic_names is None
        and [one.partitions for one in message.topic_partitions] == [[0, 1]]
    )
    assert member.answered(answer(3)) == [] and member.core.next_ms == 1000
    member.now_ms = 1000
    message = member.sent(member.give(Tick()))
    assert message.topic_partitions is None and message.rebalance_timeout_ms == -1


def test_unknown_topics_do_not_delay_the_report() -> None:
    member = Member()
    member.give(Subscribe(("t",)))
    assert member.answered(answer(1, [0])) == [Resolve((T,))]
    assert member.give(TopicsKnown({})) == []
    member.now_ms = member.core.next_ms
    actions = member.give(Tick())
    assert Resolve((T,)) in actions and member.sent(actions).topic_partitions == []
    # not before the report has a response: until then the coordinator may have reassigned it
    assert member.give(TopicsKnown({T: "t"})) == []
    assert isinstance(member.answered(answer(1))[0], Assign)


def test_revoked_partitions_are_reported_after_the_application_has_finished() -> None:
    member = Member()
    member.with_assignment([0, 1])
    member.now_ms = 1000
    member.give(Tick())
    assert member.answered(answer(1, [1])) == [Revoke((Partition("t", 0, T),))]
    member.now_ms = 2000
    assert member.sent(member.give(Tick())).topic_partitions is None  # alive, but it has not released it
    member.answered(answer(1))
    message = member.sent(member.give(Done()))
    assert [one.partitions for one in message.topic_partitions] == [[1]]


@pytest.mark.parametrize("error", [ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID])
def test_a_fenced_member_loses_its_partitions_and_joins_again(error: int) -> None:
    member = Member()
    member.with_assignment([0])
    member.now_ms = 1000
    member.give(Tick())
    assert member.answered(answer(0, error=int(error))) == [Lost((Partition("t", 0, T),))]
    assert member.core.has_lost_partitions and member.core.generation == -1
    message = member.sent(member.give(Done()))
    assert message.member_epoch == 0 and message.topic_partitions == []


def test_lost_responses_and_an_unavailable_coordinator() -> None:
    member = Member()
    member.with_assignment([0])
    member.now_ms = 1000
    member.give(Tick())
    assert member.give(ResponseMissing(member.number)) == [] and member.core.next_ms == 1100
    member.now_ms = 1100
    message = member.sent(member.give(Tick()))
    assert (
        message.member_epoch == 1 and message.subscribed_topic_names == ["t"] and message.topic_partitions is not None
    )
    member.answered(answer(0, error=int(ErrorCode.NOT_COORDINATOR)))
    assert member.core.next_ms == 1300 and member.core.owned  # nothing is lost by that


def test_a_member_leaves() -> None:
    for instance_id, epoch in ((None, -1), ("i", -2)):
        member = Member(instance_id=instance_id)
        member.with_assignment([0])
        (revoke,) = member.give(Leave())
        assert isinstance(revoke, Revoke) and member.core.generation == 1  # commits while leaving still count
        assert member.sent(member.give(Done())).member_epoch == epoch
        assert member.answered(answer(epoch)) == [Left()] and member.core.state is State.IDLE
    assert Member().give(Leave()) == [Left()]


def test_an_application_that_does_not_poll() -> None:
    member = Member()
    member.with_assignment([0])
    member.now_ms = 9_999
    assert not any(isinstance(action, Problem) for action in member.give(Tick()))
    member.answered(answer(1))
    member.now_ms = 10_000
    actions = member.give(Tick())
    assert (
        [type(action) for action in actions] == [Problem, Send, Lost]
        and actions[0].code == MAX_POLL_EXCEEDED
        and member.sent(actions).member_epoch == -1
    )
    assert member.core.wants_poll
    assert member.sent(member.give(Done())).member_epoch == 0
    other = Member()
    other.with_assignment([0])
    other.now_ms = 10_000
    assert other.sent(other.give(Tick(is_polling=True))).member_epoch == 1
    other.now_ms = 19_999
    other.give(Polled())


def test_an_instance_id_that_is_still_taken() -> None:
    member = Member(instance_id="i", max_poll_interval_ms=10 * RELEASE_WAIT_MS)
    member.give(Subscribe(("t",)))
    taken = answer(0, error=int(ErrorCode.UNRELEASED_INSTANCE_ID))
    assert member.answered(taken) == []
    while member.now_ms < RELEASE_WAIT_MS:
        member.now_ms = member.core.next_ms
        member.give(Tick())
        actions = member.answered(taken)
    assert actions[0].is_fatal and member.core.state is State.FATAL
    assert member.give(Leave()) == [Left()]


def test_a_member_stays_in_its_group_when_a_topic_is_not_authorized() -> None:
    """The permission may be granted later."""
    denied = answer(0, error=int(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
    member = Member()
    member.with_assignment([0])
    for _ in range(3):
        member.now_ms = before_ms = member.core.next_ms
        member.give(Tick(is_polling=True))
        (problem,) = member.answered(denied)
        assert problem.code == ErrorCode.TOPIC_AUTHORIZATION_FAILED and not problem.is_fatal
        assert member.core.is_member and member.core.owned and member.core.next_ms == before_ms + 1000
    member.now_ms = member.core.next_ms
    assert member.sent(member.give(Tick())).subscribed_topic_names == ["t"]
    member.answered(answer(1))
    joining = Member()
    joining.give(Subscribe(("t",)))
    (problem,) = joining.answered(denied)
    assert not problem.is_fatal and joining.core.next_ms == INTERVAL_FIRST_MS
    joining.now_ms = INTERVAL_FIRST_MS
    assert joining.sent(joining.give(Tick())).member_epoch == 0


# -- small things ----------------------------------------------------------------------------------


def test_results_compare_with_confluent_kafkas_own() -> None:
    good, bad = PartitionResult("t", 1, 5), PartitionResult("t", 0, error=local_error(KafkaError._STATE))
    assert good == TopicPartition("t", 1) and TopicPartition("t", 1) == good and good != TopicPartition("t", 2)
    assert (
        sorted([good, bad, TopicPartition("t", 3)])[0] is bad
        and bad.error.code() == KafkaError._STATE
        and bad.offset == OFFSET_INVALID
    )
    assert {good: 1}[TopicPartition("t", 1)] == 1 and "offset=5" in str(good)


def test_messages_about_offsets() -> None:
    message = offsets.commit_request("g", "m", -1, "i", {("t", 0): Committed(1, 2, "x"), ("t", 1): Committed(3)})
    assert (message.member_id, message.group_instance_id, message.generation_id_or_member_epoch) == (
        "",
        None,
        -1,
    ) and len(message.topics) == 1
    Group = OffsetFetchResponse.Group
    one = OffsetFetchResponse.GroupPartition(partition_index=0, committed_offset=7, metadata="")
    response = OffsetFetchResponse(
        groups=[Group(group_id="g", error_code=15, topics=[OffsetFetchResponse.GroupTopic(name="t", partitions=[one])])]
    )
    assert offsets.decode_offset_fetch_response(response) == {("t", 0): (15, Committed(7, -1, None))}
    request = offsets.positions_request([(T, 0, 5), (T, 1, 6)], 1, 100, "")
    assert request.max_bytes == 0 and [one.fetch_offset for one in request.topics[0].partitions] == [5, 6]
    found = FetchResponse(
        responses=[
            FetchResponse.TopicResponse(
                topic_id=T, partitions=[FetchResponse.PartitionData(partition_index=1, high_watermark=9)]
            )
        ]
    )
    assert [(topic_id, index, data.high_watermark) for topic_id, index, data in offsets.read_positions(found)] == [
        (T, 1, 9)
    ]


def test_turns_are_round_robin_and_skip_paused_partitions() -> None:
    parts = AssignedPartitions()
    for index in range(4):
        part = AssignedPartition("t", index)
        part.phase = Phase.ACTIVE
        parts.add(part)
    parts.get(("t", 1)).paused = True
    assert [next(iter(parts.turns())).index for _ in range(4)] == [0, 2, 3, 0]
    parts.remove([("t", 0)])
    assert [part.index for part in parts.turns()] == [2, 3]


def test_the_effect_of_configurations() -> None:
    def config(**given: object) -> ConsumerConfig:
        return ConsumerConfig(
            read({"group.id": "g", **{name.replace("_", "."): value for name, value in given.items()}})
        )

    assert config().is_eager and config().isolation_level == 1 and config().offset_reset == "latest"
    assert (
        not config(group_protocol="consumer").is_eager
        and not config(partition_assignment_strategy="cooperative-sticky").is_eager
    )
    assert (
        config(isolation_level="read_uncommitted").isolation_level == 0
        and config(auto_offset_reset="beginning").offset_reset == "earliest"
    )
    with pytest.raises(ValueError):
        ConsumerConfig(read({}))


def test_over_tcp_fetched_records_do_not_count_as_returned() -> None:
    """A batch belongs to one partition; records fetched along with it wait, and are neither stored
    nor returned when their partition is revoked.
    """
    consumer = TcpConsumer(None, read({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}), "test")
    stored: list = []
    fake = SimpleNamespace(
        consume=lambda count, timeout: [record(0, 1), record(1, 5), record(1, 6), record(0, 2)],
        close=lambda: None,
        pause=lambda _: None,
        seek=lambda one: stored.append(("seek", one.offset)),
        store_offsets=lambda offsets: stored.append([(one.partition, one.offset) for one in offsets]),
    )
    consumer._consumer.close()
    consumer._consumer, consumer._poll_one = fake, lambda timeout: record(0, 0)
    batch = consumer.consume_batch(10, 1)
    assert (batch.partition, batch.offsets.tolist(), stored) == (0, [0, 1], [[(0, 2)]])
    assert consumer.poll(0).offset() == 5
    consumer.pause([TopicPartition("t", 1)])
    assert stored[-1] == ("seek", 6)
    assert [message.offset() for message in consumer.consume(10, 0)] == [2]
    consumer.close()
    assert stored[-1] == [(1, 6), (0, 3)]


def record(partition: int, offset: int) -> Any:
    from mqd.client.messages import Message

    return Message("t", partition, offset, None, b"v", None, None, (1, 0), None, 0)
