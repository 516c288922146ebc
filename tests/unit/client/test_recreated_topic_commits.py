"""Commits of a consumer whose topic is deleted, and perhaps recreated with its name: no offset of
the old one is committed for the new one, and all other offsets are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from mqd.client import requests
from mqd.client.group.events import Assign, Partition, Revoke
from mqd.client.messages import Message
from mqd.client.shm.partitions import Phase
from mqd.protocol.errors import ErrorCode
from tests.unit.client.client_consumer import (
    NEW,
    TOPIC,
    ConsumerWorld,
    learns_of_deletion,
    look_again,
    make,  # noqa: F401 (a fixture of `world`)
    next_record,
    starts_over,
)


def settled(world: ConsumerWorld) -> None:
    """Every commit has a response."""
    commits = world.consumer._offsets.commits
    while not world.consumer.wait_until(lambda: not commits.is_busy, time.monotonic() + 0.01):
        pass


def by_name_only(world: ConsumerWorld) -> None:
    """The broker supports OffsetCommit up to version 9."""
    control = world.consumer.control
    control.api = requests.ApiTable(control.api.versions | {requests.OFFSET_COMMIT: (2, 9)}, control.api.features)


@pytest.mark.parametrize("knows_ids", [True, False])
@pytest.mark.parametrize("looks", [True, False])
def test_an_automatic_commit_omits_a_deleted_topic(
    make: Callable[..., ConsumerWorld], knows_ids: bool, looks: bool
) -> None:
    world = make(5, auto_commit_interval_ms=3_600_000, auto_offset_reset="earliest")
    consumer = world.consumer
    if not knows_ids:
        by_name_only(world)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.recreate(NEW, 100)
    part = learns_of_deletion(world)
    if looks:
        look_again(world)
    for _ in range(2):
        consumer._offsets.due = 0.0
        consumer.poll(0)
    settled(world)
    assert part.stored == 5 and not world.commits + world.refused
    part.retry_at = 0.0
    assert (message := next_record(world)).value() == NEW and message.offset() == 0
    consumer.close()
    assert world.commits == [{0: 1}]


def test_a_commit_of_old_records_before_the_client_knows_is_refused_by_the_broker(
    make: Callable[..., ConsumerWorld],
) -> None:
    reported: list[int] = []
    world = make(
        5,
        auto_commit_interval_ms=3_600_000,
        auto_offset_reset="earliest",
        on_commit=lambda error, _: reported.append(error and error.code()),
    )
    consumer = world.consumer
    records = [next_record(world) for _ in range(5)]
    world.recreate(NEW, 100)
    problem, world.readers[0].problem = world.readers[0].problem, None
    consumer._offsets.due = 0.0
    consumer.poll(0)
    settled(world)
    consumer.poll(0)
    assert reported == [ErrorCode.UNKNOWN_TOPIC_ID]
    for arguments in ({}, {"message": records[-1]}, {"offsets": [TopicPartition(TOPIC, 0, 5)]}):
        with pytest.raises(KafkaException) as raised:
            consumer.commit(asynchronous=False, **arguments)  # type: ignore[arg-type]
        assert raised.value.args[0].code() == ErrorCode.UNKNOWN_TOPIC_ID
    assert not world.commits
    world.readers[0].problem = problem
    assert (message := next_record(world)).value() == NEW and message.offset() == 0
    consumer.close()
    assert world.commits == [{0: 1}]


def started_over(world: ConsumerWorld) -> Message:
    """Five records have been returned before the topic is recreated; returns the last one."""
    records = [next_record(world) for _ in range(5)]
    world.recreate(NEW, 100)
    starts_over(world)
    return records[-1]


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("knows_ids", [True, False])
def test_a_record_of_the_old_one_cannot_be_committed_for_the_new_one(
    make: Callable[..., ConsumerWorld], knows_ids: bool, given: int
) -> None:
    """Not even after `given` records of the new one have been returned; those can be committed."""
    reported: list[int] = []
    world = make(
        5,
        enable_auto_commit=False,
        fetch_error_backoff_ms=1,
        auto_offset_reset="earliest",
        on_commit=lambda error, _: reported.append(error and error.code()),
    )
    consumer = world.consumer
    if not knows_ids:
        by_name_only(world)
    old = started_over(world)
    new = [next_record(world) for _ in range(given)]
    with pytest.raises(KafkaException) as raised:
        consumer.commit(message=old, asynchronous=False)
    assert raised.value.args[0].code() == ErrorCode.UNKNOWN_TOPIC_ID
    consumer.commit(message=old)
    consumer.poll(0)
    assert reported == [ErrorCode.UNKNOWN_TOPIC_ID] and not world.commits
    consumer.seek(TopicPartition(TOPIC, 0, 0))
    for message in new:
        assert message.value() == NEW
        consumer.commit(message=message, asynchronous=False)
    assert world.commits == [{0: message.offset() + 1} for message in new]


def test_a_record_of_the_old_one_cannot_be_stored_for_the_new_one(make: Callable[..., ConsumerWorld]) -> None:
    world = make(
        5,
        enable_auto_commit=False,
        enable_auto_offset_store=False,
        fetch_error_backoff_ms=1,
        auto_offset_reset="earliest",
    )
    consumer = world.consumer
    old = started_over(world)
    with pytest.raises(KafkaException) as raised:
        consumer.store_offsets(old)
    assert raised.value.args[0].code() == ErrorCode.UNKNOWN_TOPIC_ID
    consumer.store_offsets(next_record(world))
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 1}]


@pytest.mark.parametrize("knows_ids", [True, False])
def test_commit_includes_briefly_unknown_partitions_by_id(make: Callable[..., ConsumerWorld], knows_ids: bool) -> None:
    """on_revoke is the last chance to commit. With the name only it might be taken for another
    topic's.
    """
    world = make(5, 5, enable_auto_commit=False)
    if not knows_ids:
        by_name_only(world)
    assert {(message := next_record(world)).partition() for _ in range(10)} == {0, 1} and message.error() is None
    learns_of_deletion(world)
    world.consumer.commit(asynchronous=False)
    assert world.commits == [{0: 5, 1: 5} if knows_ids else {1: 5}]


def test_commit_omits_committed_offsets_of_deleted_topics(make: Callable[..., ConsumerWorld]) -> None:
    """It would be refused each time, and commits of other topics would raise."""
    world = make(5, 5, enable_auto_commit=False)
    assert {next_record(world).partition() for _ in range(10)} == {0, 1}
    world.consumer.commit(asynchronous=False)
    learns_of_deletion(world)
    world.consumer.commit(asynchronous=False)
    assert world.commits == [{0: 5, 1: 5}, {1: 5}]


@pytest.mark.parametrize("leaves", [False, True])
def test_a_commit_by_name_omits_unknown_topics(make: Callable[..., ConsumerWorld], leaves: bool) -> None:
    """As soon as one id is unknown: the deleted topic might be mistaken for the recreated one."""
    world = make(5, 5)
    assert {next_record(world).partition() for _ in range(10)} == {0, 1}
    learns_of_deletion(world)
    other = world.consumer.parts.get((TOPIC, 1))
    assert other is not None
    other.topic_id = None
    if leaves:
        world.consumer.unassign()
    else:
        world.consumer.commit(asynchronous=False)
    assert world.commits == [{1: 5}]


@pytest.mark.parametrize("knows_ids", [True, False])
def test_commit_of_only_a_deleted_topic_gets_an_error(make: Callable[..., ConsumerWorld], knows_ids: bool) -> None:
    world = make(5, enable_auto_commit=False)
    if not knows_ids:
        by_name_only(world)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.recreate(NEW, 100)
    learns_of_deletion(world)
    with pytest.raises(KafkaException) as raised:
        world.consumer.commit(asynchronous=False)
    assert raised.value.args[0].code() == (ErrorCode.UNKNOWN_TOPIC_ID if knows_ids else KafkaError._NO_OFFSET)
    assert not world.commits and world.refused == ([{0: 5}] if knows_ids else [])


def test_without_a_commit_interval_revoked_partitions_are_committed(make: Callable[..., ConsumerWorld]) -> None:
    """auto.commit.interval.ms=0: no timer, which would be due again in each turn of a waiting
    poll().
    """
    world = make(5, auto_commit_interval_ms=0)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert world.consumer.poll(0) is None and world.consumer._offsets.due == float("inf") and not world.commits
    world.consumer.unassign()
    assert world.commits == [{0: 5}]


def test_an_automatic_commit_of_a_briefly_unknown_topic_is_retried(make: Callable[..., ConsumerWorld]) -> None:
    """Also where no more records arrive that would cause another commit. The application gets no
    error: the metadata still contains the topic.
    """
    world = make(5, auto_commit_interval_ms=3_600_000, fetch_error_backoff_ms=1)
    consumer: Any = world.consumer
    while consumer.consume_batch(100, 30).next_offset < 5:
        pass
    part = learns_of_deletion(world)
    consumer._offsets.due = 0.0
    assert consumer.consume_batch(100, 0) is None
    assert not world.commits and 0.0 < consumer._offsets.due < float("inf")
    part.retry_at = 0.0
    while part.phase is not Phase.ACTIVE:
        consumer.consume_batch(100, 0.01)
    consumer._offsets.due = 0.0
    consumer.consume_batch(100, 0)
    settled(world)
    assert world.commits == [{0: 5}]


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
@pytest.mark.parametrize(("looks", "knows_ids"), [(True, True), (True, False), (False, True)])
def test_a_rebalance_before_the_consumer_knows_commits_nothing_of_the_old_topic(
    make: Callable[..., ConsumerWorld], strategy: str, looks: bool, knows_ids: bool
) -> None:
    """When its coordinator revokes the old one and assigns the new one."""
    world = make(
        5, auto_commit_interval_ms=3_600_000, auto_offset_reset="earliest", partition_assignment_strategy=strategy
    )
    consumer: Any = world.consumer
    if not knows_ids:
        by_name_only(world)
    consumer.unassign()
    core = SimpleNamespace(has_lost_partitions=False)
    consumer._runner = SimpleNamespace(
        done=lambda: None,
        core=core,
        note_poll=lambda: None,
        identity=lambda: ("m", 1),
        leave=lambda: None,
        close=lambda: None,
    )
    consumer._subscription = [TOPIC]
    old = world.broker._topic(TOPIC).topic_id
    consumer._inbox.put_operation(Assign((Partition(TOPIC, 0, old),)))
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.recreate(NEW, 100)
    if looks:
        control = consumer.control
        with control.lock:
            control.metadata.refresh([TOPIC])
        assert control.wait_for(lambda: control.metadata.topics[TOPIC].topic_id == NEW, 30)
    consumer._inbox.put_operation(Revoke((Partition(TOPIC, 0, old),)))
    consumer._inbox.put_operation(Assign((Partition(TOPIC, 0, NEW),)))
    assert (message := next_record(world)).value() == NEW and message.offset() == 0
    assert not world.commits and world.refused == ([] if looks else [{0: 5}])
    consumer._runner = None
    consumer.close()
    assert world.commits == [{0: 1}]


def test_offsets_of_a_briefly_unknown_topic_are_committed_before_it_is_revoked(
    make: Callable[..., ConsumerWorld],
) -> None:
    world = make(5, auto_commit_interval_ms=3_600_000)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    learns_of_deletion(world)
    world.consumer.close()
    assert world.commits == [{0: 5}]
