"""The consumer's parts without a broker: commits in order, the eager view of a rebalance, what a
membership core asks for, offsets' messages, batches over TCP.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from mqd.client import offsets
from mqd.client.config import read
from mqd.client.group import rebalancing
from mqd.client.group.committing import QUEUE_MAX, Commits
from mqd.client.group.consumer_protocol import MAX_POLL_EXCEEDED, RELEASE_WAIT_MS, GroupCore, Settings, State
from mqd.client.group.events import (
    Answered,
    Assign,
    Done,
    Leave,
    Left,
    Lost,
    Partition,
    Polled,
    Problem,
    Resolve,
    Revoke,
    Send,
    Subscribe,
    Tick,
    TopicsKnown,
    Unanswered,
)
from mqd.client.group.rebalancing import Rebalancer
from mqd.client.messages import local_error
from mqd.client.offsets import Committed, PartitionResult
from mqd.client.shm.consumer_config import ConsumerConfig
from mqd.client.shm.inbox import Inbox
from mqd.client.shm.partitions import Part, Parts, Phase
from mqd.client.tcp.consumer import TcpConsumer
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    ConsumerGroupHeartbeatResponse,
    FetchResponse,
    OffsetCommitResponse,
    OffsetFetchResponse,
)

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


class Member:
    """A core and its clock."""

    def __init__(self, **settings: Any) -> None:
        self.core = GroupCore(Settings("g", "m", **{"max_poll_interval_ms": 10_000, **settings}))
        self.now_ms = 0
        self.number = 0

    def give(self, event: object) -> list:
        actions = self.core.handle(event, self.now_ms)
        self.core.check()
        for action in actions:
            if isinstance(action, Send):
                self.number = action.number
        return actions

    def answered(self, response: ConsumerGroupHeartbeatResponse) -> list:
        return self.give(Answered(self.number, response))

    def sent(self, actions: list) -> Any:
        (send,) = [action for action in actions if isinstance(action, Send)]
        return send.message

    def with_assignment(self, partitions: list[int]) -> None:
        self.give(Subscribe(("t",)))
        self.answered(answer(1, partitions))
        self.give(TopicsKnown({T: "t"}))
        self.give(Done())
        self.answered(answer(1))
        assert self.core.owned == {(T, index) for index in partitions} and self.core.under_way is None


def test_joining_says_everything_and_reports_what_it_took() -> None:
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


def test_topics_that_stay_unknown_do_not_hold_up_the_report() -> None:
    member = Member()
    member.give(Subscribe(("t",)))
    assert member.answered(answer(1, [0])) == [Resolve((T,))]
    assert member.give(TopicsKnown({})) == []
    member.now_ms = member.core.next_ms
    actions = member.give(Tick())
    assert Resolve((T,)) in actions and member.sent(actions).topic_partitions == []
    # not before the report is answered: the coordinator may have given it away by then
    assert member.give(TopicsKnown({T: "t"})) == []
    assert isinstance(member.answered(answer(1))[0], Assign)


def test_what_goes_is_reported_after_the_application_has_let_go() -> None:
    member = Member()
    member.with_assignment([0, 1])
    member.now_ms = 1000
    member.give(Tick())
    assert member.answered(answer(1, [1])) == [Revoke((Partition("t", 0, T),))]
    member.now_ms = 2000
    assert member.sent(member.give(Tick())).topic_partitions is None  # alive, but it has not let go
    member.answered(answer(1))
    message = member.sent(member.give(Done()))
    assert [one.partitions for one in message.topic_partitions] == [[1]]


@pytest.mark.parametrize("error", [ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID])
def test_who_is_fenced_has_lost_everything_and_joins_again(error: int) -> None:
    member = Member()
    member.with_assignment([0])
    member.now_ms = 1000
    member.give(Tick())
    assert member.answered(answer(0, error=int(error))) == [Lost((Partition("t", 0, T),))]
    assert member.core.has_lost and member.core.generation == -1
    message = member.sent(member.give(Done()))
    assert message.member_epoch == 0 and message.topic_partitions == []


def test_lost_answers_and_a_coordinator_that_is_away() -> None:
    member = Member()
    member.with_assignment([0])
    member.now_ms = 1000
    member.give(Tick())
    assert member.give(Unanswered(member.number)) == [] and member.core.next_ms == 1100
    member.now_ms = 1100
    message = member.sent(member.give(Tick()))
    assert (
        message.member_epoch == 1 and message.subscribed_topic_names == ["t"] and message.topic_partitions is not None
    )
    member.answered(answer(0, error=int(ErrorCode.NOT_COORDINATOR)))
    assert member.core.next_ms == 1300 and member.core.owned  # nothing is lost by that


def test_the_last_word_of_a_member() -> None:
    for instance_id, epoch in ((None, -1), ("i", -2)):
        member = Member(instance_id=instance_id)
        member.with_assignment([0])
        (revoke,) = member.give(Leave())
        assert isinstance(revoke, Revoke) and member.core.generation == 1  # commits on the way out still count
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


# -- commits ---------------------------------------------------------------------------------------


class Control:
    """An attachment that keeps what it is to send."""

    def __init__(self) -> None:
        self.sent: deque = deque()
        self.api = SimpleNamespace(pick=lambda key, at_most=0: at_most)
        self.lock, self.metadata = threading.RLock(), SimpleNamespace(topics={})

    def send(self, _key: int, _version: int, message: Any, on_response: Any, *_timeout: float) -> None:
        self.sent.append((message, on_response))


def commits_over(control: Control) -> tuple[Commits, Inbox, list]:
    inbox, committed = Inbox(lambda: None), []
    coordinator = SimpleNamespace(ask=lambda: None)
    return (
        Commits(
            control,
            inbox,
            "g",
            None,
            lambda: ("m", 5),
            lambda key, offset: committed.append((key, offset)),
            coordinator,
        ),
        inbox,
        committed,
    )


def respond(control: Control, inbox: Inbox, code: int = 0, error: KafkaError | None = None) -> dict:
    message, on_response = control.sent.popleft()
    said = {
        (topic.name, one.partition_index): one.committed_offset for topic in message.topics for one in topic.partitions
    }
    Topic, One = OffsetCommitResponse.TopicResponse, OffsetCommitResponse.PartitionResponse
    topics = [
        Topic(
            name=topic.name,
            partitions=[One(partition_index=one.partition_index, error_code=code) for one in topic.partitions],
        )
        for topic in message.topics
    ]
    on_response(None if error else OffsetCommitResponse(topics=topics), error)
    inbox.serve()
    return said


def test_a_commit_that_is_tried_again_stays_before_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control()
    commits, inbox, committed = commits_over(control)
    first = commits.add({("t", 0): Committed(10)}, None, 60)
    second = commits.add({("t", 0): Committed(20)}, None, 60)
    assert len(control.sent) == 1
    respond(control, inbox, int(ErrorCode.STALE_MEMBER_EPOCH))
    commits.advance()
    assert not control.sent and commits.due < time.monotonic() + 1
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    commits.advance()
    assert respond(control, inbox) == {("t", 0): 10} and first.outcome == (None, [PartitionResult("t", 0, 10)])
    assert (
        respond(control, inbox) == {("t", 0): 20}
        and committed == [(("t", 0), 10), (("t", 0), 20)]
        and second.outcome is not None
    )


def test_a_commit_is_not_tried_again_for_partitions_that_have_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its member was put out while the coordinator was away, and is in the group again when the
    commit would be tried: another has committed more for partition 0 since.
    """
    control = Control()
    commits, inbox, committed = commits_over(control)
    both = commits.add({("t", 0): Committed(10), ("t", 1): Committed(11)}, None, 60)
    waits = commits.add({("t", 0): Committed(12)}, None, 60)
    respond(control, inbox, error=local_error(KafkaError._TRANSPORT))
    assert commits.concern({("t", 0)}) and not commits.concern({("t", 2)})
    commits.gone({("t", 0)})
    assert commits.concern({("t", 1)}) and not commits.concern({("t", 0)})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    commits.advance()
    assert respond(control, inbox) == {("t", 1): 11} and committed == [(("t", 1), 11)]
    assert [result.error and result.error.code() for result in both.outcome[1]] == [ErrorCode.ILLEGAL_GENERATION, None]
    assert waits.outcome[0].code() == ErrorCode.ILLEGAL_GENERATION and not control.sent and not commits.is_busy


def test_a_commit_names_ids_where_all_are_known_and_is_tried_again_whatever_else_is_refused_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = Control()
    versions: list[int] = []
    control.api.pick = lambda _key, at_most: versions.append(at_most) or at_most
    commits, inbox, committed = commits_over(control)
    both = commits.add({("a", 0): Committed(1, topic_id=T), ("b", 0): Committed(2, topic_id=b"b" * 16)}, None, 60)
    Topic, One = OffsetCommitResponse.TopicResponse, OffsetCommitResponse.PartitionResponse

    def answer(code: int) -> list:
        message, on_response = control.sent.popleft()
        codes = {T: int(ErrorCode.UNKNOWN_TOPIC_ID), b"b" * 16: code}
        on_response(
            OffsetCommitResponse(
                topics=[
                    Topic(
                        topic_id=topic.topic_id, partitions=[One(partition_index=0, error_code=codes[topic.topic_id])]
                    )
                    for topic in message.topics
                ]
            ),
            None,
        )
        inbox.serve()
        return [topic.topic_id for topic in message.topics]

    assert answer(int(ErrorCode.NOT_COORDINATOR)) == [T, b"b" * 16] and both.outcome is None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    commits.advance()
    answer(0)
    error, results = both.outcome
    assert (
        error.code() == ErrorCode.UNKNOWN_TOPIC_ID
        and [one.error and one.error.code() for one in results] == [ErrorCode.UNKNOWN_TOPIC_ID, None]
        and committed == [(("b", 0), 2)]
    )
    commits.add({("a", 0): Committed(3, topic_id=T), ("b", 0): Committed(4)}, None, 60)
    assert versions == [10, 10, 9]


def test_what_a_commit_of_a_partition_that_has_gone_came_to_is_not_told_of_who_has_its_name_now() -> None:
    control = Control()
    commits, inbox, committed = commits_over(control)
    commits.add({("t", 0): Committed(10), ("t", 1): Committed(11)}, None, 60)
    commits.gone({("t", 0)})
    respond(control, inbox)
    assert committed == [(("t", 1), 11)]


def test_commits_end_once_and_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control()
    commits, inbox, _ = commits_over(control)
    refused = commits.add({("t", 0): Committed(1)}, lambda *_: None, 60)
    respond(control, inbox, int(ErrorCode.UNKNOWN_MEMBER_ID))
    assert (
        refused.outcome[0].code() == ErrorCode.UNKNOWN_MEMBER_ID
        and list(commits.finished) == [refused]
        and inbox.attention
    )
    late = commits.add({("t", 0): Committed(2)}, None, -1)
    respond(control, inbox, error=local_error(KafkaError._TRANSPORT))
    assert late.outcome[0].code() == KafkaError._TRANSPORT
    waiting = [commits.add({("t", 0): Committed(number)}, None, 60) for number in range(QUEUE_MAX + 1)]
    with pytest.raises(KafkaException):
        commits.add({("t", 0): Committed(0)}, None, 60)
    commits.give_up(local_error(KafkaError._DESTROY))
    assert all(commit.outcome[0].code() == KafkaError._DESTROY for commit in waiting) and not commits.is_busy


# -- rebalances ------------------------------------------------------------------------------------


class FakeConsumer:
    def __init__(self, is_eager: bool) -> None:
        self.config = SimpleNamespace(is_eager=is_eager)
        self._inbox = Inbox(lambda: None)
        self._owner, self._subscription = self, ["t"]
        self.parts: list = []
        self.done_count = 0
        self._runner = SimpleNamespace(done=self._done, core=SimpleNamespace(has_lost=False))
        self.gone: list = []  # and whether it was lost
        self._offsets = SimpleNamespace(let_go=lambda keys, is_lost: self.gone.append((keys, is_lost)))
        self.rebalancer = Rebalancer(self)
        self.log: list = []
        self.rebalancer.set_callbacks(*(self._logged(name) for name in ("assign", "revoke", "lost")))

    def _done(self) -> None:
        self.done_count += 1

    def _logged(self, name: str):
        return lambda _, partitions: self.log.append((name, [one.partition for one in partitions]))

    def assign(self, partitions: list[TopicPartition]) -> None:
        self.parts = [SimpleNamespace(key=(one.topic, one.partition)) for one in partitions]

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.parts += [SimpleNamespace(key=(one.topic, one.partition)) for one in partitions]

    def _remove(self, parts: list) -> None:
        self.parts = [part for part in self.parts if part not in parts]

    def has(self) -> list[int]:
        return sorted(part.key[1] for part in self.parts)


def some(*indexes: int) -> tuple[Partition, ...]:
    return tuple(Partition("t", index, T) for index in indexes)


def test_the_eager_view() -> None:
    consumer = FakeConsumer(is_eager=True)
    carry = consumer.rebalancer.carry_out
    carry(Assign(some(0, 1)))
    carry(Revoke(some(0)))
    assert (
        consumer.log == [("assign", [0, 1]), ("revoke", [0, 1]), ("assign", [1])]
        and consumer.has() == [1]
        and consumer.gone == [([("t", 0)], False)]
    )
    carry(Assign(some(2)))
    assert (
        consumer.log[3:] == [("revoke", [1]), ("assign", [1, 2])]
        and consumer.has() == [1, 2]
        and consumer.done_count == 3
    )
    consumer._inbox.put_operation(Assign(some(3)))  # comes right behind: one assignment for both
    carry(Revoke(some(2)))
    assert consumer.log[5:] == [("revoke", [1, 2])] and consumer.has() == []
    carry(consumer._inbox.operations.popleft())
    assert consumer.log[6:] == [("assign", [1, 3])]
    carry(Lost(some(1, 3)))
    assert (
        consumer.log[7:] == [("lost", [1, 3])]
        and consumer.has() == []
        and consumer.gone[-1] == ([("t", 1), ("t", 3)], True)
    )


def test_the_incremental_view_and_a_callback_that_raises() -> None:
    consumer = FakeConsumer(is_eager=False)
    carry = consumer.rebalancer.carry_out
    carry(Assign(some(0, 1)))
    carry(Revoke(some(0)))
    assert consumer.log == [("assign", [0, 1]), ("revoke", [0])] and consumer.has() == [1]
    consumer._runner.core.has_lost = True
    carry(Revoke(some(1)))  # came too late: it is another's already
    assert consumer.log[2:] == [("lost", [1])] and consumer.has() == []

    def fail(*_: object) -> None:
        raise LookupError

    consumer.rebalancer.set_callbacks(fail, None, None)
    with pytest.raises(LookupError):
        carry(Assign(some(5)))
    assert consumer.done_count == 4


def test_eager_what_stays_is_shown_also_after_a_callback_has_raised() -> None:
    consumer = FakeConsumer(is_eager=True)
    carry = consumer.rebalancer.carry_out
    carry(Assign(some(0, 1, 2)))

    def fail(*_: object) -> None:
        raise LookupError

    for operation, callbacks in (
        (Revoke(some(2)), (None, fail, None)),
        (Lost(some(1)), (None, None, fail)),
        (Assign(some(3)), (None, fail, None)),
    ):
        consumer.rebalancer.set_callbacks(*callbacks)
        with pytest.raises(LookupError):
            carry(operation)
        assert consumer.has() == [key[1] for key in consumer.rebalancer._group]
    assert consumer.has() == [0, 3] and consumer.done_count == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_eager_what_stays_is_shown_also_after_the_member_has_left_once(is_late: bool) -> None:
    """Late: the coordinator was away, and unsubscribe() waited for its word no longer."""
    consumer = FakeConsumer(is_eager=True)
    carry = consumer.rebalancer.carry_out
    carry(Assign(some(0, 1, 2)))
    consumer._subscription = []
    carry(Revoke(some(0, 1, 2)))
    assert consumer.has() == []
    for operation in [Left(), None] if not is_late else [None, Left()]:
        if operation is not None:
            carry(operation)
        else:
            consumer._subscription = ["t"]
            consumer.rebalancer.set_callbacks(None, None, None)
    carry(Assign(some(0, 1, 2)))
    carry(Revoke(some(2)))
    assert consumer.has() == [0, 1]


def test_problems_are_errors() -> None:
    error = FakeConsumer(is_eager=True).rebalancer.carry_out(Problem(MAX_POLL_EXCEEDED, "too slow"))
    assert error is not None and error.code() == KafkaError._MAX_POLL_EXCEEDED and not error.fatal()
    error = rebalancing._problem(int(ErrorCode.FENCED_INSTANCE_ID), "fenced", True)
    assert error.fatal() and error.code() == KafkaError.FENCED_INSTANCE_ID


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
    assert offsets.read_committed(response) == {("t", 0): (15, Committed(7, -1, None))}
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


def test_turns_go_round_and_leave_out_who_may_not() -> None:
    parts = Parts()
    for index in range(4):
        part = Part("t", index)
        part.phase = Phase.ACTIVE
        parts.add(part)
    parts.get(("t", 1)).paused = True
    assert [next(iter(parts.turns())).index for _ in range(4)] == [0, 2, 3, 0]
    parts.remove([("t", 0)])
    assert [part.index for part in parts.turns()] == [2, 3]


def test_what_a_configuration_means() -> None:
    def config(**given: object) -> ConsumerConfig:
        return ConsumerConfig(
            read({"group.id": "g", **{name.replace("_", "."): value for name, value in given.items()}})
        )

    assert config().is_eager and config().isolation_level == 1 and config().reset == "latest"
    assert (
        not config(group_protocol="consumer").is_eager
        and not config(partition_assignment_strategy="cooperative-sticky").is_eager
    )
    assert (
        config(isolation_level="read_uncommitted").isolation_level == 0
        and config(auto_offset_reset="beginning").reset == "earliest"
    )
    with pytest.raises(ValueError):
        ConsumerConfig(read({}))


def test_over_tcp_what_lies_here_is_not_counted_as_handed_out() -> None:
    """A batch is one partition's; what came along with it waits, and is neither stored nor handed
    out when its partition goes.
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
