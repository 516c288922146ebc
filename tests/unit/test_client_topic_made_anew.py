"""A topic that is deleted and made anew under its name while a consumer reads it: an offset of the old one means nothing in the new one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from mqd.client.messages import OFFSET_INVALID, Message
from mqd.protocol.errors import ErrorCode
from tests.unit.client_consumer import TOPIC, ConsumerWorld

NEW = b"NEW".ljust(16, b"\2")


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[ConsumerWorld]:
    made = ConsumerWorld(5, enable_auto_commit=False, fetch_error_backoff_ms=1, **getattr(request, "param", {}))
    yield made
    made.consumer.close()


def next_record(world: ConsumerWorld) -> Message:
    """The next one; what is told before it is that the old topic is not there."""
    while (message := world.consumer.poll(30)) is not None and message.error() is not None:
        assert message.error().code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, ErrorCode.UNKNOWN_TOPIC_ID)
    assert message is not None
    return message


def look_again(world: ConsumerWorld) -> None:
    """The metadata are those of the broker from here on."""
    control = world.consumer.control
    with control.lock:
        known = control.metadata.version
        control.metadata.refresh([TOPIC])
    while not world.consumer.until(lambda: control.metadata.version != known, time.monotonic() + 0.01):
        pass


def position(world: ConsumerWorld) -> int:
    (one,) = world.consumer.position([TopicPartition(TOPIC, 0)])
    return one.offset


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
@pytest.mark.parametrize(("committed", "begin"), [(-1, 0), (7, 7)])
def test_it_is_read_from_what_is_committed_of_it_or_from_where_the_application_wants_to_begin(world: ConsumerWorld, committed: int, begin: int) -> None:
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.committed = {0: committed}
    world.make_anew(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, begin)
    world.consumer.commit(asynchronous=False)
    assert world.commits == [{0: begin + 1}]


def test_at_its_end_where_the_application_wants_what_comes(world: ConsumerWorld) -> None:
    """auto.offset.reset=latest, the default."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.make_anew(NEW, 100)
    at_end: list[int] = []
    world.at_end = lambda: at_end or world.readers[0].topic_id != NEW or (at_end.append(world.readers[0].position), setattr(world.readers[0], "end", 101))
    message = next_record(world)
    assert at_end == [100] and (message.value(), message.offset()) == (NEW, 100)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_what_was_read_ahead_of_the_old_one_is_neither_handed_out_nor_committed_after_it(world: ConsumerWorld) -> None:
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(2)] == [0, 1]
    world.make_anew(NEW, 100)
    part: Any = consumer.parts.get((TOPIC, 0))
    look_again(world)
    consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))  # as the Fetch is answered that waits
    while not consumer.until(lambda: part.topic_id == NEW, time.monotonic() + 0.01):
        pass
    assert position(world) == OFFSET_INVALID
    assert (message := next_record(world)).value() == NEW and message.offset() == 0
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 1}]


def test_a_seek_after_the_error_is_one_in_the_new_topic(world: ConsumerWorld) -> None:
    assert next_record(world).offset() == 0
    world.broker.topics.clear()
    world.make_anew(NEW, 100)
    part: Any = world.consumer.parts.get((TOPIC, 0))
    look_again(world)
    world.consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))
    world.consumer.seek(TopicPartition(TOPIC, 0, 30))
    world.broker.topics[TOPIC] = 1
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_who_is_read_from_another_host_hears_of_it_from_the_metadata(world: ConsumerWorld) -> None:
    """Its reader asks by name, and tells of nothing; the replicas are the same."""
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part: Any = consumer.parts.get((TOPIC, 0))
    part.remote_view = consumer._fetcher._view_of(part)
    world.make_anew(NEW, 100)
    world.readers[0].problem = None
    look_again(world)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)
