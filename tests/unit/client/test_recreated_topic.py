"""A topic that is deleted and recreated under its name while a consumer reads it: an offset of the
old one is meaningless in the new one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

from mqd.client.messages import OFFSET_INVALID
from mqd.client.shm.partitions import Phase
from mqd.client.shm.reading import Problem
from mqd.protocol.errors import ErrorCode
from tests.polling import PATIENCE_S
from tests.unit.client.client_consumer import (  # noqa: F401 (fixtures)
    NEW,
    TOPIC,
    ConsumerWorld,
    interrupt_consume,
    learns_of_deletion,
    look_again,
    make,
    next_record,
    places,
    starts_over,
    world,
)


def position(world: ConsumerWorld) -> int:
    (one,) = world.consumer.position([TopicPartition(TOPIC, 0)])
    return one.offset


def test_an_offset_is_requested_again_from_a_worker_without_its_partitions(world: ConsumerWorld) -> None:
    """The metadata still contains the topic: the application gets no error."""
    world.list_errors = [int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)] * 3
    world.consumer.assign([TopicPartition(TOPIC, 0, OFFSET_BEGINNING)])
    message = world.consumer.poll(PATIENCE_S)
    assert message.error() is None and message.offset() == 0
    assert not world.list_errors


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
@pytest.mark.parametrize(("committed", "begin"), [(-1, 0), (7, 7)])
def test_the_new_topic_is_read_from_its_committed_offset_or_the_configured_reset(
    world: ConsumerWorld, committed: int, begin: int
) -> None:
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.committed = {0: committed}
    world.recreate(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, begin)
    world.consumer.commit(asynchronous=False)
    assert world.commits == [{0: begin + 1}]


def test_the_new_topic_is_read_from_its_end_with_latest(world: ConsumerWorld) -> None:
    """auto.offset.reset=latest, the default."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.recreate(NEW, 100)
    at_end: list[int] = []
    world.at_end = lambda: (
        at_end
        or world.readers[0].topic_id != NEW
        or (at_end.append(world.readers[0].position), setattr(world.readers[0], "end", 101))
    )
    message = next_record(world)
    assert at_end == [100] and (message.value(), message.offset()) == (NEW, 100)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_prefetched_records_of_the_old_topic_are_not_handed_out_or_committed(world: ConsumerWorld) -> None:
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(2)] == [0, 1]
    world.recreate(NEW, 100)
    starts_over(world)
    assert position(world) == OFFSET_INVALID
    assert (message := next_record(world)).value() == NEW and message.offset() == 0
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 1}]


def test_a_seek_after_the_error_applies_to_the_new_topic(world: ConsumerWorld) -> None:
    assert next_record(world).offset() == 0
    world.broker.topics.clear()
    world.recreate(NEW, 100)
    part: Any = world.consumer.parts.get((TOPIC, 0))
    look_again(world)
    world.consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))
    world.consumer.seek(TopicPartition(TOPIC, 0, 30))
    world.broker.topics[TOPIC] = 1
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_a_remote_reader_learns_of_it_from_the_metadata(world: ConsumerWorld) -> None:
    """Its reader uses names and reports no error; the replicas are the same."""
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part: Any = consumer.parts.get((TOPIC, 0))
    part.remote_replicas = consumer._fetcher._current_replicas(part)
    world.recreate(NEW, 100)
    world.readers[0].problem = None
    look_again(world)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)


def read_elsewhere(world: ConsumerWorld) -> Any:
    """Reads from another host, whose reader uses names."""
    part: Any = world.consumer.parts.get((TOPIC, 0))
    part.remote_replicas = world.consumer._fetcher._current_replicas(part)
    world.readers[0].is_remote = True
    return part


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_a_remote_reader_learns_of_it_from_an_offset_out_of_range(world: ConsumerWorld) -> None:
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part = read_elsewhere(world)
    world.recreate(NEW, 3)
    old = world.readers[0]
    old.topic_id, old.end, old.problem = NEW, 3, Problem("range")
    found = [next_record(world) for _ in range(3)]
    assert [(message.value(), message.offset()) for message in found] == [
        (NEW, 0),
        (NEW, 1),
        (NEW, 2),
    ] and part.topic_id == NEW
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 3}] and not world.refused
    look_again(world)
    assert consumer.poll(0) is None and position(world) == 3


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_a_remote_reader_resets_an_offset_out_of_range(world: ConsumerWorld) -> None:
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part = read_elsewhere(world)
    world.readers[0].problem = Problem("range")
    assert next_record(world).offset() == 0 and part.reader is world.readers[0] and part.reader.is_remote


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_a_remote_reader_learns_of_it_from_a_refused_commit(world: ConsumerWorld) -> None:
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    read_elsewhere(world)
    world.recreate(NEW, 100)
    world.readers[0].problem = None
    with pytest.raises(KafkaException):
        consumer.commit(asynchronous=False)
    assert consumer.control.wait_for(lambda: consumer.control.metadata.topics[TOPIC].topic_id == NEW, 30)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)


# -- what the application was not given of the old one does not say where the new one begins -------


def with_fifty_read(make: Callable[..., ConsumerWorld]) -> ConsumerWorld:
    world = make(60, 1, enable_auto_commit=False, fetch_error_backoff_ms=1, auto_offset_reset="earliest")
    world.consumer.seek(TopicPartition(TOPIC, 0, 50))
    return world


def recreated_at_its_end(world: ConsumerWorld) -> Callable[[], None]:
    """For at_end: when all has been read, once."""

    def at_end() -> None:
        if world.all_is_read():
            world.at_end = lambda: None
            world.recreate(NEW, 100, 1)
            world.readers[1].problem = None
            control = world.consumer.control
            with control.lock:
                control.metadata.refresh([TOPIC])

    return at_end


def test_consume_ends_when_a_topic_whose_records_it_has_is_recreated(make: Callable[..., ConsumerWorld]) -> None:
    world = with_fifty_read(make)
    consumer = world.consumer
    world.at_end = recreated_at_its_end(world)
    found = [message for message in consumer.consume(1000, 60) if message.error() is None]
    assert sorted(places(found)) == [*((0, offset) for offset in range(50, 60)), (1, 0)] and NEW not in {
        message.value() for message in found
    }
    with pytest.raises(KafkaException):
        consumer.commit(message=[message for message in found if message.partition() == 0][-1], asynchronous=False)
    assert not world.commits
    assert places([next_record(world) for _ in range(2)]) == [(0, 0), (0, 1)]


def test_a_consume_that_raises_after_that_reads_the_new_topic_from_its_start(
    make: Callable[..., ConsumerWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does the other partition, which is only read then."""
    world = with_fifty_read(make)
    world.at_end = recreated_at_its_end(world)
    part: Any = world.consumer.parts.get((TOPIC, 0))
    interrupt_consume(world, monkeypatch, lambda: part.topic_id == NEW)
    found = [next_record(world) for _ in range(101)]
    assert {message.value() for message in found} == {NEW} and sorted(places(found)) == [
        *((0, offset) for offset in range(100)),
        (1, 0),
    ]


def test_records_of_the_old_topic_do_not_move_the_position_in_the_new_one(make: Callable[..., ConsumerWorld]) -> None:
    world = with_fifty_read(make)
    consumer = world.consumer
    while not (found := consumer.take(1000, 30)) or found[0].partition() != 0:
        pass
    world.recreate(NEW, 100, 1)
    world.readers[1].problem = None
    starts_over(world)
    consumer.give_back(found)
    while (message := next_record(world)).partition() != 0:
        pass
    assert message.value() == NEW and message.offset() == 0


def test_consume_continues_when_it_has_no_records_of_the_recreated_topic(make: Callable[..., ConsumerWorld]) -> None:
    world = make(0, 3, enable_auto_commit=False, fetch_error_backoff_ms=1, auto_offset_reset="earliest")
    recreated = recreated_at_its_end(world)

    def interrupted() -> None:
        if world.readers[0].topic_id == NEW and world.readers[0].position == 100:
            world.at_end = lambda: None
            raise KeyboardInterrupt

    def at_end() -> None:
        recreated()
        if world.at_end is not at_end:
            world.at_end = interrupted

    world.at_end = at_end
    with pytest.raises(KeyboardInterrupt):
        world.consumer.consume(1000, 60)
    found = [next_record(world) for _ in range(101)]
    assert {message.value() for message in found} == {NEW} and sorted(places(found)) == [
        *((0, offset) for offset in range(100)),
        (1, 0),
    ]


# -- seek() ----------------------------------------------------------------------------------------


def test_a_seek_after_the_error_leaves_no_old_offset_to_commit(make: Callable[..., ConsumerWorld]) -> None:
    world = make(5, auto_commit_interval_ms=3_600_000, auto_offset_reset="latest")
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.recreate(NEW, 100)
    part = learns_of_deletion(world)
    look_again(world)
    consumer.seek(TopicPartition(TOPIC, 0, 0))
    while not consumer.wait_until(lambda: part.topic_id == NEW, time.monotonic() + 0.01):
        pass
    with pytest.raises(KafkaException):
        consumer.commit(asynchronous=False)
    consumer.unassign()
    assert not world.commits + world.refused


@pytest.mark.parametrize("offset", [0, OFFSET_BEGINNING, 30])
def test_a_seek_with_new_metadata_applies_to_the_new_topic(world: ConsumerWorld, offset: int) -> None:
    """Its reader does not know yet, and would return the old topic's records."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.recreate(NEW, 100)
    world.readers[0].problem = None
    look_again(world)
    world.consumer.seek(TopicPartition(TOPIC, 0, offset))
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, max(offset, 0))


def test_a_seek_before_the_client_knows_applies_to_the_new_topic(world: ConsumerWorld) -> None:
    """The error was reported, but the metadata is still the old one."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part = learns_of_deletion(world)
    world.consumer.seek(TopicPartition(TOPIC, 0, 30))
    assert part.phase is Phase.ACTIVE and part.topic_id != NEW
    world.recreate(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("incremental", [True, False])
def test_an_assigned_offset_before_the_client_knows_applies_to_the_new_topic(
    world: ConsumerWorld, incremental: bool
) -> None:
    """Like an offset given to seek()."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.consumer.unassign()
    world.recreate(NEW, 100)
    (world.consumer.incremental_assign if incremental else world.consumer.assign)([TopicPartition(TOPIC, 0, 30)])
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
@pytest.mark.parametrize("has_read", [True, False])
def test_a_seek_completed_in_the_old_topic_does_not_apply_to_the_new_one(world: ConsumerWorld, has_read: bool) -> None:
    """It has read from there on, or waits there for more."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.consumer.seek(TopicPartition(TOPIC, 0, 4 if has_read else 5))
    if has_read:
        assert next_record(world).offset() == 4
    else:
        waits: list[int] = []
        world.at_end = lambda: waits.append(1)
        while not waits:
            assert world.consumer.poll(0.01) is None
    world.recreate(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
@pytest.mark.parametrize("is_known", [True, False], ids=["known", "that only reading tells"])
def test_a_seek_beyond_the_end_of_the_old_topic_applies_to_the_new_one(world: ConsumerWorld, is_known: bool) -> None:
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.consumer.seek(TopicPartition(TOPIC, 0, 30))
    looked: list[int] = []
    reader = world.readers[0]
    if not is_known:
        looks, reads, reader.lag_end = reader.lag_end, reader.read, lambda: -1  # type: ignore[method-assign]
        reader.read = lambda *most: (setattr(reader, "lag_end", looks), reads(*most))[1]  # type: ignore[method-assign]
    world.at_end = lambda: looked.append(1)
    while not looked:
        assert world.consumer.poll(0.01) is None
    assert world.consumer.poll(0) is None
    world.recreate(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_a_paused_partition_follows_the_metadata_and_stays_paused(world: ConsumerWorld) -> None:
    """Its reader is not used; a commit of the application's offset would be for the old one."""
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    consumer.pause([TopicPartition(TOPIC, 0)])
    world.recreate(NEW, 100)
    look_again(world)
    part: Any = consumer.parts.get((TOPIC, 0))
    while part.phase is not Phase.ACTIVE:
        assert consumer.poll(0.01) is None
    assert part.topic_id == NEW
    consumer.commit(offsets=[TopicPartition(TOPIC, 0, 7)], asynchronous=False)
    assert world.commits == [{0: 7}] and not world.refused
    assert consumer.poll(0) is None
    consumer.resume([TopicPartition(TOPIC, 0)])
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)
