"""Commits and rebalances of a consumer, without a broker."""

from __future__ import annotations

import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from mqd.client.group import rebalancing
from mqd.client.group.committing import QUEUE_MAX, CommitQueue
from mqd.client.group.events import Assign, Left, Lost, Partition, Problem, Revoke
from mqd.client.group.membership import MAX_POLL_EXCEEDED
from mqd.client.group.rebalancing import Rebalancer
from mqd.client.messages import local_error
from mqd.client.offsets import Committed, PartitionResult
from mqd.client.shm.inbox import Inbox
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import OffsetCommitResponse
from tests.unit.client.test_consumer_parts import T

# -- commits ---------------------------------------------------------------------------------------


class Control:
    """An attachment that records its requests."""

    def __init__(self) -> None:
        self.sent: deque = deque()
        self.api = SimpleNamespace(pick=lambda key, version_max=0: version_max)
        self.lock, self.metadata = threading.RLock(), SimpleNamespace(topics={})

    def send(self, _key: int, _version: int, message: Any, on_response: Any, *_timeout: float) -> None:
        self.sent.append((message, on_response))


def commits_over(control: Control) -> tuple[CommitQueue, Inbox, list]:
    inbox, committed = Inbox(lambda: None), []
    coordinator = SimpleNamespace(look_up=lambda: None)
    return (
        CommitQueue(
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
    text = {
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
    inbox.handle_responses()
    return text


def test_a_retried_commit_stays_before_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_commit_is_not_retried_for_revoked_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its member was removed while the coordinator was unavailable, and has rejoined when the
    commit would be retried: another member has committed more for partition 0 since.
    """
    control = Control()
    commits, inbox, committed = commits_over(control)
    both = commits.add({("t", 0): Committed(10), ("t", 1): Committed(11)}, None, 60)
    waits = commits.add({("t", 0): Committed(12)}, None, 60)
    respond(control, inbox, error=local_error(KafkaError._TRANSPORT))
    assert commits.has_pending({("t", 0)}) and not commits.has_pending({("t", 2)})
    commits.drop({("t", 0)})
    assert commits.has_pending({("t", 1)}) and not commits.has_pending({("t", 0)})
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 1)
    commits.advance()
    assert respond(control, inbox) == {("t", 1): 11} and committed == [(("t", 1), 11)]
    assert [result.error and result.error.code() for result in both.outcome[1]] == [ErrorCode.ILLEGAL_GENERATION, None]
    assert waits.outcome[0].code() == ErrorCode.ILLEGAL_GENERATION and not control.sent and not commits.is_busy


def test_a_commit_with_all_ids_is_retried_whatever_else_is_refused_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control()
    versions: list[int] = []
    control.api.pick = lambda _key, version_max: versions.append(version_max) or version_max
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
        inbox.handle_responses()
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


def test_the_result_of_a_commit_for_a_deleted_partition_is_not_reported_for_a_new_one_of_its_name() -> None:
    control = Control()
    commits, inbox, committed = commits_over(control)
    commits.add({("t", 0): Committed(10), ("t", 1): Committed(11)}, None, 60)
    commits.drop({("t", 0)})
    respond(control, inbox)
    assert committed == [(("t", 1), 11)]


def test_each_commit_ends_once_with_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_many_commits_that_cannot_be_sent_each_end_with_a_result() -> None:
    control = Control()
    commits, inbox, _ = commits_over(control)
    waiting = [commits.add({("t", 0): Committed(number)}, lambda *_: None, 60) for number in range(2_000)]

    def fail(*_: object) -> None:
        raise KafkaException(local_error(KafkaError._DESTROY))

    control.send = fail
    respond(control, inbox, error=local_error(KafkaError._DESTROY))
    assert all(commit.outcome[0].code() == KafkaError._DESTROY for commit in waiting) and not commits.is_busy
    assert list(commits.finished) == waiting


# -- rebalances ------------------------------------------------------------------------------------


class FakeConsumer:
    def __init__(self, is_eager: bool) -> None:
        self.config = SimpleNamespace(is_eager=is_eager)
        self._inbox = Inbox(lambda: None)
        self._owner, self._subscription = self, ["t"]
        self.parts: list = []
        self.done_count = 0
        self._runner = SimpleNamespace(done=self._done, core=SimpleNamespace(has_lost_partitions=False))
        self.gone: list = []  # and whether it was lost
        self._offsets = SimpleNamespace(release=lambda keys, is_lost: self.gone.append((keys, is_lost)))
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
    consumer._inbox.put_operation(Assign(some(3)))  # arrives immediately: one assignment for both
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
    consumer._runner.core.has_lost_partitions = True
    carry(Revoke(some(1)))  # too late: it belongs to another member already
    assert consumer.log[2:] == [("lost", [1])] and consumer.has() == []

    def fail(*_: object) -> None:
        raise LookupError

    consumer.rebalancer.set_callbacks(fail, None, None)
    with pytest.raises(LookupError):
        carry(Assign(some(5)))
    assert consumer.done_count == 4


def test_eager_kept_partitions_are_assigned_after_a_callback_has_raised() -> None:
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
        assert consumer.has() == [key[1] for key in consumer.rebalancer._owned]
    assert consumer.has() == [0, 3] and consumer.done_count == 4


@pytest.mark.parametrize("is_late", [False, True])
def test_eager_kept_partitions_are_assigned_after_the_member_has_left_once(is_late: bool) -> None:
    """Late: the coordinator was unavailable, and unsubscribe() no longer waited for its response."""
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
