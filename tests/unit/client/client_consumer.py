"""A consumer over shared memory with a FakeBroker: its readers are in this module, and return
records set by a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from mqd.client import requests
from mqd.client.config import read
from mqd.client.messages import Message
from mqd.client.offsets import EARLIEST_TIMESTAMP
from mqd.client.shm.attachment import Attachment
from mqd.client.shm.consumer import ShmConsumer
from mqd.client.shm.consumer_config import ConsumerConfig
from mqd.client.shm.reading import Problem
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    FindCoordinatorResponse,
    ListOffsetsResponse,
    OffsetCommitResponse,
    OffsetFetchResponse,
)
from tests.unit.client.client_broker import FakeBroker

TOPIC = "events"
NEW = b"NEW".ljust(16, b"\2")  # id of the recreated topic


class LogReader:
    """The methods of reading.PartitionReader, over the records from 0 to `end`, whose values are
    the topic's id. `at_end()` is called when all have been returned; `problem`: returned by
    take_problem(), once.
    """

    is_remote = False

    def __init__(self, index: int, topic_id: bytes, begin: int, end: int, at_end: Callable[[], None]) -> None:
        self.index, self.topic_id, self.position, self.end, self._at_end = index, topic_id, begin, end, at_end
        self.problem: Any = None

    def lag_end(self) -> int:
        if self.position >= self.end:
            self._at_end()
        return -1 if self.problem is not None else self.end

    def log_start(self) -> int:
        return 0

    def read(self, records_max: int, _bytes_max: int) -> Any:
        if self.problem is not None:
            return None
        messages = [
            Message(TOPIC, self.index, offset, None, self.topic_id, None, None, (1, 0), None)
            for offset in range(self.position, min(self.end, self.position + records_max))
        ]
        self.position += len(messages)
        return (
            SimpleNamespace(messages=lambda: messages, next_offset=self.position, leader_epoch=-1) if messages else None
        )

    def seek(self, offset: int) -> None:
        self.position = offset

    def take_problem(self) -> Any:
        problem, self.problem = self.problem, None
        return problem

    def close(self) -> None:
        pass


class ConsumerWorld:
    """`consumer` is assigned all `ends`, each the end of a partition; `commits`: its commits, one
    dictionary of partitions per request; `refused`: commits refused because the topic of that id is
    deleted; `committed`: the response to OffsetFetch; `list_errors`: of the next ListOffsets.
    """

    def __init__(self, *ends: int, **config: object) -> None:
        self.broker = FakeBroker({TOPIC: len(ends)})
        self.ends = list(ends)
        self.commits: list[dict[int, int]] = []
        self.refused: list[dict[int, int]] = []
        self.committed: dict[int, int] = {}
        self.list_errors: list[int] = []
        self.readers: dict[int, LogReader] = {}  # the latest of each partition
        self.at_end: Callable[[], None] = lambda: None
        coordinator = FindCoordinatorResponse.Coordinator(key="g", node_id=1, host="h", port=1)
        self.broker.answers |= {
            requests.FIND_COORDINATOR: lambda _: FindCoordinatorResponse(coordinators=[coordinator]),
            requests.FETCH: lambda _: None,
            requests.OFFSET_COMMIT: self._commit,
            requests.OFFSET_FETCH: self._fetch_committed,
            requests.LIST_OFFSETS: self._list,
        }
        settings = read(
            {
                "bootstrap.servers": "x",
                "group.id": "g",
                **{name if callable(value) else name.replace("_", "."): value for name, value in config.items()},
            }
        )
        remote = SimpleNamespace(attach=lambda *_: None, stop=lambda: None, close=lambda: None, records_read=0)
        self.consumer = ShmConsumer(
            ConsumerConfig(settings),
            None,
            lambda name: Attachment(self.broker.attach, client_id=name),
            self._open,
            remote,
        )  # type: ignore[arg-type]
        # otherwise the response may come between two partitions, and the second one is read first
        self.consumer.control.metadata.find(TOPIC, 30)
        self.consumer.assign([TopicPartition(TOPIC, index, 0) for index in range(len(ends))])

    def _open(self, _native: Any, part: Any, offset: int) -> LogReader:
        reader = self.readers[part.index] = LogReader(
            part.index, part.topic_id, offset, self.ends[part.index], lambda: self.at_end()
        )
        if part.topic_id != self.broker._topic(TOPIC).topic_id:
            reader.problem = Problem("gone", int(ErrorCode.UNKNOWN_TOPIC_ID))
        return reader

    def all_is_read(self) -> bool:
        """Every partition has a reader, which has returned all its records."""
        return len(self.readers) == len(self.ends) and all(
            reader.position >= reader.end for reader in self.readers.values()
        )

    def recreate(self, topic_id: bytes, *ends: int) -> None:
        """The topic is deleted, and another one of its name is created."""
        described = self.broker._topic

        def topic(name: str) -> Any:
            found = described(name)
            found.topic_id = topic_id
            return found

        self.broker._topic = topic  # type: ignore[method-assign]
        self.ends = list(ends)
        for reader in self.readers.values():
            reader.problem = Problem("gone", int(ErrorCode.UNKNOWN_TOPIC_ID))

    def _fetch_committed(self, request: Any) -> OffsetFetchResponse:
        Group, Topic, One = (
            OffsetFetchResponse.Group,
            OffsetFetchResponse.GroupTopic,
            OffsetFetchResponse.GroupPartition,
        )
        (group,) = request.groups
        topics = [
            Topic(
                name=topic.name,
                partitions=[
                    One(partition_index=index, committed_offset=self.committed.get(index, -1))
                    for index in topic.partition_indexes
                ],
            )
            for topic in group.topics
        ]
        return OffsetFetchResponse(groups=[Group(group_id=group.group_id, topics=topics)])

    def _list(self, request: Any) -> ListOffsetsResponse:
        Topic, One = ListOffsetsResponse.TopicResponse, ListOffsetsResponse.PartitionResponse
        error = self.list_errors.pop(0) if self.list_errors else 0
        return ListOffsetsResponse(
            topics=[
                Topic(
                    name=topic.name,
                    partitions=[
                        One(
                            partition_index=one.partition_index,
                            error_code=error,
                            offset=0 if one.timestamp == EARLIEST_TIMESTAMP else self.ends[one.partition_index],
                        )
                        for one in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    def _commit(self, request: Any) -> OffsetCommitResponse:
        Topic, One = OffsetCommitResponse.TopicResponse, OffsetCommitResponse.PartitionResponse
        topics = []
        for topic in request.topics:
            offsets = {one.partition_index: one.committed_offset for one in topic.partitions}
            code = (
                0
                if topic.topic_id in (requests.NO_TOPIC_ID, self.broker._topic(TOPIC).topic_id)
                else int(ErrorCode.UNKNOWN_TOPIC_ID)
            )
            (self.refused if code else self.commits).append(offsets)
            if not code:
                self.committed |= offsets
            topics.append(
                Topic(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partitions=[One(partition_index=index, error_code=code) for index in offsets],
                )
            )
        return OffsetCommitResponse(topics=topics)


def places(messages: list[Message]) -> list[tuple[int, int]]:
    """(partition, offset) of each."""
    return [(message.partition(), message.offset()) for message in messages]


def next_record(world: ConsumerWorld) -> Message:
    """The next record; errors about the deleted topic are skipped."""
    while (message := world.consumer.poll(30)) is not None and message.error() is not None:
        assert message.error().code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, ErrorCode.UNKNOWN_TOPIC_ID)
    assert message is not None
    return message


def look_again(world: ConsumerWorld) -> None:
    """The client refreshes its metadata from here on."""
    control = world.consumer.control
    with control.lock:
        known = control.metadata.version
        control.metadata.refresh([TOPIC])
    while not world.consumer.wait_until(lambda: control.metadata.version != known, time.monotonic() + 0.01):
        pass


def learns_of_deletion(world: ConsumerWorld) -> Any:
    """The refresh after this is an hour later."""
    consumer = world.consumer
    part: Any = consumer.parts.get((TOPIC, 0))
    consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))
    part.retry_at = time.monotonic() + 3600
    return part


def starts_over(world: ConsumerWorld) -> Any:
    """It knows that the topic was recreated, and begins to read the new one."""
    consumer = world.consumer
    part: Any = consumer.parts.get((TOPIC, 0))
    look_again(world)
    consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))  # as in the response to a waiting Fetch
    while not consumer.wait_until(lambda: part.topic_id == NEW, time.monotonic() + 0.01):
        pass
    return part


def interrupt_consume(world: ConsumerWorld, monkeypatch: pytest.MonkeyPatch, when: Callable[[], bool]) -> None:
    """Ctrl-C, in the first turn in which `when()` is true."""

    def interrupted() -> None:
        if when():
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(world.consumer._offsets.commits, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.consumer.consume(1000, 60)


# Fixtures: a test module imports those that it uses; `world` needs `make`.


@pytest.fixture
def make() -> Iterator[Callable[..., ConsumerWorld]]:
    """make(*ends, **config) as ConsumerWorld; its consumer is closed with the test."""
    made: list[ConsumerWorld] = []

    def make(*ends: int, **config: object) -> ConsumerWorld:
        made.append(ConsumerWorld(*ends, **config))
        return made[-1]

    yield make
    for one in made:
        one.at_end = lambda: None
        one.consumer.close()


@pytest.fixture
def world(request: pytest.FixtureRequest, make: Callable[..., ConsumerWorld]) -> ConsumerWorld:
    """One partition with five records, without automatic commits. Its parameter adds to the
    configuration.
    """
    return make(5, enable_auto_commit=False, fetch_error_backoff_ms=1, **getattr(request, "param", {}))
