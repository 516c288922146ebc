"""A topic that is deleted and made anew under its name while a consumer reads it: an offset of the old one means nothing in the new one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from mqd.client import requests
from mqd.client.group_events import Assign, Partition, Revoke
from mqd.client.messages import OFFSET_INVALID, Message
from mqd.client.partitions import Phase
from mqd.client.reading import Problem
from mqd.protocol.errors import ErrorCode
from tests.unit.client_consumer import TOPIC, ConsumerWorld, places

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


def read_elsewhere(world: ConsumerWorld) -> Any:
    """As from another host, whose reader asks by name."""
    part: Any = world.consumer.parts.get((TOPIC, 0))
    part.remote_view = world.consumer._fetcher._view_of(part)
    world.readers[0].is_remote = True
    return part


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_who_is_read_from_another_host_hears_of_it_when_its_offset_is_beyond_the_new_ones_end(world: ConsumerWorld) -> None:
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part = read_elsewhere(world)
    world.make_anew(NEW, 3)
    old = world.readers[0]
    old.topic_id, old.end, old.problem = NEW, 3, Problem("range")
    found = [next_record(world) for _ in range(3)]
    assert [(message.value(), message.offset()) for message in found] == [(NEW, 0), (NEW, 1), (NEW, 2)] and part.topic_id == NEW
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 3}] and not world.refused
    look_again(world)
    assert consumer.poll(0) is None and position(world) == 3


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_who_is_read_from_another_host_begins_where_the_reset_says_in_the_topic_that_was_there_before(world: ConsumerWorld) -> None:
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part = read_elsewhere(world)
    world.readers[0].problem = Problem("range")
    assert next_record(world).offset() == 0 and part.reader is world.readers[0] and part.reader.is_remote


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_who_is_read_from_another_host_hears_of_it_when_a_commit_is_refused(world: ConsumerWorld) -> None:
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    read_elsewhere(world)
    world.make_anew(NEW, 100)
    world.readers[0].problem = None
    with pytest.raises(KafkaException):
        consumer.commit(asynchronous=False)
    assert consumer.control.wait_for(lambda: consumer.control.metadata.topics[TOPIC].topic_id == NEW, 30)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)


# -- nothing of the old one is committed for the new one -----------------------------------------------------------------------------


def settled(world: ConsumerWorld) -> None:
    """Every commit has been answered."""
    commits = world.consumer._offsets.commits
    while not world.consumer.until(lambda: not commits.is_busy, time.monotonic() + 0.01):
        pass


def by_name_only(world: ConsumerWorld) -> None:
    """The broker speaks OffsetCommit up to 9."""
    control = world.consumer.control
    control.api = requests.ApiTable(control.api.versions | {requests.OFFSET_COMMIT: (2, 9)}, control.api.features)


def hears_that_it_is_gone(world: ConsumerWorld) -> Any:
    """And tries it again in an hour."""
    consumer = world.consumer
    part: Any = consumer.parts.get((TOPIC, 0))
    consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))
    part.retry_at = time.monotonic() + 3600
    return part


@pytest.mark.parametrize("knows_ids", [True, False])
@pytest.mark.parametrize("looks", [True, False])
def test_an_automatic_commit_that_is_due_when_it_is_gone_says_nothing_of_it(knows_ids: bool, looks: bool) -> None:
    world = ConsumerWorld(5, auto_commit_interval_ms=3_600_000, auto_offset_reset="earliest")
    consumer = world.consumer
    if not knows_ids:
        by_name_only(world)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.make_anew(NEW, 100)
    part = hears_that_it_is_gone(world)
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


def test_a_commit_of_what_was_handed_out_before_anything_is_heard_is_refused_by_the_broker() -> None:
    told: list[int] = []
    world = ConsumerWorld(5, auto_commit_interval_ms=3_600_000, auto_offset_reset="earliest", on_commit=lambda error, _: told.append(error and error.code()))
    consumer = world.consumer
    records = [next_record(world) for _ in range(5)]
    world.make_anew(NEW, 100)
    problem, world.readers[0].problem = world.readers[0].problem, None
    consumer._offsets.due = 0.0
    consumer.poll(0)
    settled(world)
    consumer.poll(0)
    assert told == [ErrorCode.UNKNOWN_TOPIC_ID]
    for arguments in ({}, {"message": records[-1]}, {"offsets": [TopicPartition(TOPIC, 0, 5)]}):
        with pytest.raises(KafkaException) as raised:
            consumer.commit(asynchronous=False, **arguments)  # type: ignore[arg-type]
        assert raised.value.args[0].code() == ErrorCode.UNKNOWN_TOPIC_ID
    assert not world.commits
    world.readers[0].problem = problem
    assert (message := next_record(world)).value() == NEW and message.offset() == 0
    consumer.close()
    assert world.commits == [{0: 1}]


def begun_anew(world: ConsumerWorld) -> Message:
    """Five records have been handed out when it is; returns the last one."""
    records = [next_record(world) for _ in range(5)]
    world.make_anew(NEW, 100)
    look_again(world)
    part: Any = world.consumer.parts.get((TOPIC, 0))
    world.consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))
    while not world.consumer.until(lambda: part.topic_id == NEW, time.monotonic() + 0.01):
        pass
    return records[-1]


@pytest.mark.parametrize("given", [0, 1, 3])
@pytest.mark.parametrize("knows_ids", [True, False])
def test_a_record_of_the_old_one_cannot_be_committed_for_the_new_one(knows_ids: bool, given: int) -> None:
    """Nor when `given` records of the new one have been handed out; those can."""
    told: list[int] = []
    world = ConsumerWorld(5, enable_auto_commit=False, fetch_error_backoff_ms=1, auto_offset_reset="earliest", on_commit=lambda error, _: told.append(error and error.code()))
    consumer = world.consumer
    if not knows_ids:
        by_name_only(world)
    old = begun_anew(world)
    new = [next_record(world) for _ in range(given)]
    with pytest.raises(KafkaException) as raised:
        consumer.commit(message=old, asynchronous=False)
    assert raised.value.args[0].code() == ErrorCode.UNKNOWN_TOPIC_ID
    consumer.commit(message=old)
    consumer.poll(0)
    assert told == [ErrorCode.UNKNOWN_TOPIC_ID] and not world.commits
    consumer.seek(TopicPartition(TOPIC, 0, 0))
    for message in new:
        assert message.value() == NEW
        consumer.commit(message=message, asynchronous=False)
    assert world.commits == [{0: message.offset() + 1} for message in new]
    consumer.close()


def test_a_record_of_the_old_one_cannot_be_stored_for_the_new_one() -> None:
    world = ConsumerWorld(5, enable_auto_commit=False, enable_auto_offset_store=False, fetch_error_backoff_ms=1, auto_offset_reset="earliest")
    consumer = world.consumer
    old = begun_anew(world)
    with pytest.raises(KafkaException) as raised:
        consumer.store_offsets(old)
    assert raised.value.args[0].code() == ErrorCode.UNKNOWN_TOPIC_ID
    consumer.store_offsets(next_record(world))
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 1}]
    consumer.close()


@pytest.mark.parametrize("knows_ids", [True, False])
def test_commit_says_what_the_broker_did_not_know_for_a_moment_if_it_is_told_ids(knows_ids: bool) -> None:
    """In on_revoke it is the last chance. By its name alone it might be taken for another topic's."""
    world = ConsumerWorld(5, 5, enable_auto_commit=False)
    if not knows_ids:
        by_name_only(world)
    assert {(message := next_record(world)).partition() for _ in range(10)} == {0, 1} and message.error() is None
    hears_that_it_is_gone(world)
    world.consumer.commit(asynchronous=False)
    assert world.commits == [{0: 5, 1: 5} if knows_ids else {1: 5}]
    world.consumer.close()


def test_commit_says_nothing_of_what_is_gone_and_was_committed() -> None:
    """It would be refused, each time, and the commits of the others raise."""
    world = ConsumerWorld(5, 5, enable_auto_commit=False)
    assert {next_record(world).partition() for _ in range(10)} == {0, 1}
    world.consumer.commit(asynchronous=False)
    hears_that_it_is_gone(world)
    world.consumer.commit(asynchronous=False)
    assert world.commits == [{0: 5, 1: 5}, {1: 5}]
    world.consumer.close()


@pytest.mark.parametrize("leaves", [False, True])
def test_a_commit_that_goes_by_name_says_nothing_of_what_the_broker_does_not_know(leaves: bool) -> None:
    """As soon as one id is not known: what is gone might be taken for the topic made anew."""
    world = ConsumerWorld(5, 5)
    assert {next_record(world).partition() for _ in range(10)} == {0, 1}
    hears_that_it_is_gone(world)
    other = world.consumer.parts.get((TOPIC, 1))
    assert other is not None
    other.topic_id = None
    if leaves:
        world.consumer.unassign()
    else:
        world.consumer.commit(asynchronous=False)
    assert world.commits == [{1: 5}]
    world.consumer.close()


@pytest.mark.parametrize("knows_ids", [True, False])
def test_commit_of_what_is_gone_alone_is_told_so(knows_ids: bool) -> None:
    world = ConsumerWorld(5, enable_auto_commit=False)
    if not knows_ids:
        by_name_only(world)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.make_anew(NEW, 100)
    hears_that_it_is_gone(world)
    with pytest.raises(KafkaException) as raised:
        world.consumer.commit(asynchronous=False)
    assert raised.value.args[0].code() == (ErrorCode.UNKNOWN_TOPIC_ID if knows_ids else KafkaError._NO_OFFSET)
    assert not world.commits and world.refused == ([{0: 5}] if knows_ids else [])
    world.consumer.close()


def test_without_an_interval_of_automatic_commits_what_leaves_is_committed() -> None:
    """auto.commit.interval.ms=0: no timer, which was due at once, and again, in each turn of a poll() that waited."""
    world = ConsumerWorld(5, auto_commit_interval_ms=0)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert world.consumer.poll(0) is None and world.consumer._offsets.due == float("inf") and not world.commits
    world.consumer.unassign()
    assert world.commits == [{0: 5}]
    world.consumer.close()


def test_an_automatic_commit_that_is_due_when_the_broker_does_not_know_it_for_a_moment_is_made_later() -> None:
    """Also where nothing is being handed out that would bring about another."""
    world = ConsumerWorld(5, auto_commit_interval_ms=3_600_000, fetch_error_backoff_ms=1)
    consumer: Any = world.consumer
    while consumer.consume_batch(100, 30).next_offset < 5:
        pass
    part = hears_that_it_is_gone(world)
    consumer._offsets.due = 0.0
    with pytest.raises(KafkaException):
        consumer.consume_batch(100, 0)
    assert consumer.consume_batch(100, 0) is None
    assert not world.commits and 0.0 < consumer._offsets.due < float("inf")
    part.retry_at = 0.0
    while part.phase is not Phase.ACTIVE:
        consumer.consume_batch(100, 0.01)
    consumer._offsets.due = 0.0
    consumer.consume_batch(100, 0)
    settled(world)
    assert world.commits == [{0: 5}]
    consumer.close()


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
@pytest.mark.parametrize(("looks", "knows_ids"), [(True, True), (True, False), (False, True)])
def test_a_rebalance_that_comes_before_the_consumer_has_heard_commits_nothing_of_the_old_one(strategy: str, looks: bool, knows_ids: bool) -> None:
    """As its coordinator takes away the old one and gives the new one."""
    world = ConsumerWorld(5, auto_commit_interval_ms=3_600_000, auto_offset_reset="earliest", partition_assignment_strategy=strategy)
    consumer: Any = world.consumer
    if not knows_ids:
        by_name_only(world)
    consumer.unassign()
    core = SimpleNamespace(has_lost=False)
    consumer._runner = SimpleNamespace(done=lambda: None, core=core, polled=lambda: None, identity=lambda: ("m", 1), leave=lambda: None, close=lambda: None)
    consumer._subscription = [TOPIC]
    old = world.broker._topic(TOPIC).topic_id
    consumer._inbox.put_operation(Assign((Partition(TOPIC, 0, old),)))
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.make_anew(NEW, 100)
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


def test_what_the_broker_did_not_know_for_a_moment_is_committed_before_it_goes() -> None:
    world = ConsumerWorld(5, auto_commit_interval_ms=3_600_000)
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    hears_that_it_is_gone(world)
    world.consumer.close()
    assert world.commits == [{0: 5}]


# -- nor does what the application was not given of the old one say where the new one begins ------------------------------------------


def with_fifty_read(**config: object) -> ConsumerWorld:
    world = ConsumerWorld(60, 1, enable_auto_commit=False, fetch_error_backoff_ms=1, auto_offset_reset="earliest", **config)
    world.consumer.seek(TopicPartition(TOPIC, 0, 50))
    return world


def made_anew_at_its_end(world: ConsumerWorld) -> Callable[[], None]:
    """For at_end: when all has been read, once."""

    def at_end() -> None:
        if len(world.readers) == 2 and all(reader.position >= reader.end for reader in world.readers.values()):
            world.at_end = lambda: None
            world.make_anew(NEW, 100, 1)
            world.readers[1].problem = None
            control = world.consumer.control
            with control.lock:
                control.metadata.refresh([TOPIC])

    return at_end


def test_consume_ends_when_a_topic_of_which_it_has_records_is_another() -> None:
    world = with_fifty_read()
    consumer = world.consumer
    world.at_end = made_anew_at_its_end(world)
    found = [message for message in consumer.consume(1000, 60) if message.error() is None]
    assert sorted(places(found)) == [*((0, offset) for offset in range(50, 60)), (1, 0)] and NEW not in {message.value() for message in found}
    with pytest.raises(KafkaException):
        consumer.commit(message=[message for message in found if message.partition() == 0][-1], asynchronous=False)
    assert not world.commits
    assert places([next_record(world) for _ in range(2)]) == [(0, 0), (0, 1)]
    consumer.close()


def test_consume_that_raises_after_that_begins_the_new_one_at_its_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """So does the other partition, which is looked at only then."""
    world = with_fifty_read()
    consumer = world.consumer
    world.at_end = made_anew_at_its_end(world)
    part: Any = consumer.parts.get((TOPIC, 0))
    commits = consumer._offsets.commits

    def interrupted() -> None:
        if part.topic_id == NEW:
            raise KeyboardInterrupt

    monkeypatch.setattr(commits, "advance", interrupted)
    with pytest.raises(KeyboardInterrupt):
        consumer.consume(1000, 60)
    monkeypatch.undo()
    found = [next_record(world) for _ in range(101)]
    assert {message.value() for message in found} == {NEW} and sorted(places(found)) == [*((0, offset) for offset in range(100)), (1, 0)]
    consumer.close()


def test_what_is_given_back_of_the_old_one_does_not_move_the_new_one() -> None:
    world = with_fifty_read()
    consumer = world.consumer
    part: Any = consumer.parts.get((TOPIC, 0))
    while not (found := consumer.take(1000, 30)) or found[0].partition() != 0:
        pass
    world.make_anew(NEW, 100, 1)
    world.readers[1].problem = None
    look_again(world)
    consumer._fetcher._on_error(part, int(ErrorCode.UNKNOWN_TOPIC_ID))
    while not consumer.until(lambda: part.topic_id == NEW, time.monotonic() + 0.01):
        pass
    consumer.give_back(found)
    while (message := next_record(world)).partition() != 0:
        pass
    assert message.value() == NEW and message.offset() == 0
    consumer.close()


def test_consume_goes_on_when_it_has_no_record_of_what_is_another_and_reads_that_again_when_it_raises() -> None:
    world = ConsumerWorld(0, 3, enable_auto_commit=False, fetch_error_backoff_ms=1, auto_offset_reset="earliest")
    consumer = world.consumer
    made_anew = made_anew_at_its_end(world)

    def interrupted() -> None:
        if world.readers[0].topic_id == NEW and world.readers[0].position == 100:
            world.at_end = lambda: None
            raise KeyboardInterrupt

    def at_end() -> None:
        made_anew()
        if world.at_end is not at_end:
            world.at_end = interrupted

    world.at_end = at_end
    with pytest.raises(KeyboardInterrupt):
        consumer.consume(1000, 60)
    found = [next_record(world) for _ in range(101)]
    assert {message.value() for message in found} == {NEW} and sorted(places(found)) == [*((0, offset) for offset in range(100)), (1, 0)]
    consumer.close()


# -- seek() ------------------------------------------------------------------------------------------------------------------------


def test_a_seek_after_the_error_leaves_nothing_of_the_old_one_to_commit() -> None:
    world = ConsumerWorld(5, auto_commit_interval_ms=3_600_000, auto_offset_reset="latest")
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.make_anew(NEW, 100)
    part = hears_that_it_is_gone(world)
    look_again(world)
    consumer.seek(TopicPartition(TOPIC, 0, 0))
    while not consumer.until(lambda: part.topic_id == NEW, time.monotonic() + 0.01):
        pass
    with pytest.raises(KafkaException):
        consumer.commit(asynchronous=False)
    consumer.unassign()
    assert not world.commits + world.refused
    consumer.close()


@pytest.mark.parametrize("offset", [0, OFFSET_BEGINNING, 30])
def test_a_seek_when_the_metadata_know_the_new_one_is_one_in_that(world: ConsumerWorld, offset: int) -> None:
    """Its reader has not heard, and would give the old one's records."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.make_anew(NEW, 100)
    world.readers[0].problem = None
    look_again(world)
    world.consumer.seek(TopicPartition(TOPIC, 0, offset))
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, max(offset, 0))


def test_a_seek_that_begins_in_the_old_one_because_nobody_has_heard_is_still_one_in_the_new_one(world: ConsumerWorld) -> None:
    """The error was told, but the metadata are those from before."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    part = hears_that_it_is_gone(world)
    world.consumer.seek(TopicPartition(TOPIC, 0, 30))
    assert part.phase is Phase.ACTIVE and part.topic_id != NEW
    world.make_anew(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("incremental", [True, False])
def test_an_offset_that_is_assigned_is_one_in_the_new_topic_though_nobody_has_heard(world: ConsumerWorld, incremental: bool) -> None:
    """As one that is sought."""
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.consumer.unassign()
    world.make_anew(NEW, 100)
    (world.consumer.incremental_assign if incremental else world.consumer.assign)([TopicPartition(TOPIC, 0, 30)])
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
@pytest.mark.parametrize("has_read", [True, False])
def test_a_seek_that_has_been_carried_out_in_the_old_one_says_nothing_of_the_new_one(world: ConsumerWorld, has_read: bool) -> None:
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
    world.make_anew(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 0)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_a_seek_beyond_the_end_of_the_old_one_has_not_been_carried_out_in_that(world: ConsumerWorld) -> None:
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    world.consumer.seek(TopicPartition(TOPIC, 0, 30))
    looked: list[int] = []
    world.at_end = lambda: looked.append(1)
    while not looked:
        assert world.consumer.poll(0.01) is None
    assert world.consumer.poll(0) is None
    world.make_anew(NEW, 100)
    message = next_record(world)
    assert (message.value(), message.offset()) == (NEW, 30)


@pytest.mark.parametrize("world", [{"auto_offset_reset": "earliest"}], indirect=True)
def test_what_is_paused_hears_of_it_from_the_metadata_and_stays_paused(world: ConsumerWorld) -> None:
    """Nobody asks its reader; a commit of what the application says would name the old one."""
    consumer = world.consumer
    assert [next_record(world).offset() for _ in range(5)] == [0, 1, 2, 3, 4]
    consumer.pause([TopicPartition(TOPIC, 0)])
    world.make_anew(NEW, 100)
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
