"""Records that a consumer has fetched and not returned to the application: no commit includes them,
and they are read again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from mqd.client import consumer as client_consumer
from mqd.client import requests
from mqd.client.async_consumer import AsyncConsumer
from mqd.client.config import read
from mqd.client.group.committing import Commit
from mqd.client.group.rebalancing import Call
from mqd.client.messages import Message
from mqd.client.shm.consumer import POLL_RECORDS
from mqd.client.shm.partitions import Phase
from mqd.client.shm.reading import Problem
from mqd.client.tcp.consumer import TcpConsumer
from mqd.protocol.errors import ErrorCode
from tests.unit.client.client_consumer import TOPIC, ConsumerWorld, interrupt_consume, make, places  # noqa: F401

# -- consume() -------------------------------------------------------------------------------------


def test_a_commit_within_consume_ends_before_the_gathered_records(make: Callable[..., ConsumerWorld]) -> None:
    """The automatic commit is due when the second partition's records are gathered."""
    world = make(3, 3)
    consumer = world.consumer
    assert len(consumer.consume(2, 10)) == 2

    def commit_is_due() -> None:
        if world.all_is_read():
            consumer._offsets.due = 0.0

    world.at_end = commit_is_due
    found = consumer.consume(100, 0.1)
    assert sorted(places(found)) == [(0, 2), (1, 0), (1, 1), (1, 2)] and world.commits == [{0: 2}]
    consumer.close()
    assert world.commits[1:] == [{0: 3, 1: 3}]


def test_a_rebalance_ends_consume_and_is_carried_out_by_the_next_call(make: Callable[..., ConsumerWorld]) -> None:
    """Otherwise endless: neither is a partition revoked whose records are gathered, nor a callback
    called that may raise.
    """
    world = make(3)
    called: list[int] = []
    world.at_end = lambda: (
        world.consumer._inbox.operations or called or world.consumer._inbox.put_operation(Call(called.append, (1,)))
    )
    assert places(world.consumer.consume(100)) == [(0, 0), (0, 1), (0, 2)] and not called
    assert world.consumer.poll(0) is None and called


@pytest.mark.parametrize("code", [0, int(ErrorCode.ILLEGAL_GENERATION)])
def test_a_commit_that_ends_within_consume_is_reported_by_the_next_call(
    make: Callable[..., ConsumerWorld], code: int
) -> None:
    """At most one per call: nothing more is committed before it returns."""
    reported: list[int] = []
    world = make(
        3,
        3,
        auto_commit_interval_ms=3_600_000,
        on_commit=lambda error, _: reported.append(error.code() if error is not None else 0),
    )
    consumer: Any = world.consumer
    assert len(consumer.consume(2, 10)) == 2
    committing = consumer._offsets.commits
    accepted = world.broker.answers[requests.OFFSET_COMMIT]

    def answer(request: Any) -> Any:
        response = accepted(request)
        response.topics[0].partitions[0].error_code = code
        return response

    world.broker.answers[requests.OFFSET_COMMIT] = answer
    until_waiting = consumer._fetcher.wait
    waited_with: list[bool] = []
    consumer._fetcher.wait = lambda until: (waited_with.append(bool(committing.finished)), until_waiting(until))

    def at_end() -> None:
        if not world.commits and not committing.is_busy and world.all_is_read():
            consumer._offsets.due = 0.0
            consumer._inbox.notify()

    world.at_end = at_end
    assert sorted(places(consumer.consume(100, 60))) == [(0, 2), (1, 0), (1, 1), (1, 2)]
    assert not reported and not any(waited_with) and world.commits == [{0: 2}]
    consumer.poll(0)
    assert reported == [code]


def test_a_commit_that_ends_within_consume_does_not_hide_available_records(make: Callable[..., ConsumerWorld]) -> None:
    reported: list[int] = []
    world = make(3 * POLL_RECORDS, enable_auto_commit=False)
    consumer: Any = world.consumer
    assert len(consumer.consume(1, 10)) == 1
    reader = world.readers[0]
    looks = reader.lag_end

    def ends() -> int:
        """While the second chunk is read."""
        if reader.position == POLL_RECORDS:
            consumer._offsets.commits.finish(Commit({}, lambda *_: reported.append(1), 0.0), None)
        return looks()

    reader.lag_end = ends  # type: ignore[method-assign]
    assert len(consumer.consume(3 * POLL_RECORDS - 1, 60)) == 3 * POLL_RECORDS - 1 and not reported
    consumer.poll(0)
    assert reported == [1]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, KafkaException])
def test_a_consume_that_raises_returns_no_records(
    make: Callable[..., ConsumerWorld], raised: type[BaseException]
) -> None:
    world = make(3, 4, enable_auto_commit=False)
    consumer = world.consumer
    assert [message.offset() for message in consumer.consume(2, 10)] == [0, 1]
    rest = [
        (index, offset)
        for index, end in enumerate(world.ends)
        for offset in range(end)
        if (index, offset) not in ((0, 0), (0, 1))
    ]

    def fail() -> None:
        if world.all_is_read():
            raise raised

    world.at_end = fail
    with pytest.raises(raised):
        consumer.consume(100, 10)
    world.at_end = lambda: None
    consumer.commit(asynchronous=False)
    assert world.commits == [{0: 2}]
    assert sorted(places(consumer.consume(100, 0))) == rest


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("in_gathered", [True, False])
def test_an_error_gathered_by_a_consume_that_raised_is_repeated_after_the_records(
    make: Callable[..., ConsumerWorld], monkeypatch: pytest.MonkeyPatch, in_gathered: bool, holds: bool
) -> None:
    """As does an end. `in_gathered`: consume() had taken it already."""
    world = make(3, 2, enable_auto_commit=False, enable_partition_eof=True, fetch_error_backoff_ms=1)
    consumer: Any = world.consumer
    reported: Any = consumer._fetcher.events

    def broken() -> None:
        if world.readers[0].position == 3:
            world.readers[0].problem = Problem("corrupt", 0, "")

    world.at_end = broken
    interrupt_consume(
        world, monkeypatch, lambda: consumer.parts.get((TOPIC, 0)).reported_error and bool(reported) != in_gathered
    )
    world.readers[0].problem = None
    if not holds:
        world.at_end = lambda: None
    found = [
        (message.partition(), message.offset(), message.error() and message.error().code())
        for message in (consumer.poll(60) for _ in range(7))
        if message is not None
    ]
    ours = [(offset, code) for partition, offset, code in found if partition == 0]
    assert ours == [(0, None), (1, None), (2, None), (3, KafkaError._BAD_MSG if holds else KafkaError._PARTITION_EOF)]
    assert [(offset, code) for partition, offset, code in found if partition == 1] == [
        (0, None),
        (1, None),
        (2, KafkaError._PARTITION_EOF),
    ]


def test_an_error_without_records_gathered_by_a_consume_that_raised_is_reported_next(
    make: Callable[..., ConsumerWorld], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(3, 0, enable_auto_commit=False, fetch_error_backoff_ms=3_600_000)
    consumer: Any = world.consumer
    reported: Any = consumer._fetcher.events

    def broken() -> None:
        if len(world.readers) == 2 and consumer.parts.get((TOPIC, 1)).phase is Phase.ACTIVE:
            world.readers[1].problem = Problem("corrupt", 0, "")

    world.at_end = broken
    interrupt_consume(
        world,
        monkeypatch,
        lambda: consumer.parts.get((TOPIC, 1)).reported_error and not reported and world.readers[0].position == 3,
    )
    world.at_end = lambda: None
    found = [
        (message.partition(), message.error() and message.error().code())
        for message in (consumer.poll(60) for _ in range(4))
    ]
    assert sorted(found, key=str) == [(0, None)] * 3 + [(1, KafkaError._BAD_MSG)]


def test_prefetched_records_are_read_again_while_their_partition_is_retried(make: Callable[..., ConsumerWorld]) -> None:
    world = make(5, enable_auto_commit=False, fetch_error_backoff_ms=1)
    consumer = world.consumer
    assert [consumer.poll(10).offset() for _ in range(2)] == [0, 1]
    consumer._fetcher._on_error(consumer.parts.get((TOPIC, 0)), int(ErrorCode.NOT_LEADER_OR_FOLLOWER))
    consumer.pause([TopicPartition(TOPIC, 0)])
    consumer.resume([TopicPartition(TOPIC, 0)])
    assert places(consumer.consume(3, 10)) == [(0, 2), (0, 3), (0, 4)]


# -- AsyncConsumer ---------------------------------------------------------------------------------


def run(
    monkeypatch: pytest.MonkeyPatch, world: ConsumerWorld, body: Callable[[AsyncConsumer, Callable[[Any], Any]], Any]
) -> None:
    """body(consumer, waits): `waits` makes a task of a coroutine, and returns it when it has read
    everything and waits for more.
    """
    monkeypatch.setattr(client_consumer, "_create_implementation", lambda _owner, _settings: world.consumer)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        async def until_waiting(work: Any) -> asyncio.Task:
            at_end = asyncio.Event()
            world.at_end = lambda: loop.call_soon_threadsafe(at_end.set)
            task = loop.create_task(work)
            await at_end.wait()
            world.at_end = lambda: None
            return task

        async with AsyncConsumer({"group.id": "g"}) as consumer:
            await asyncio.wait_for(body(consumer, until_waiting), 60)

    asyncio.run(main())


async def cancel(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_records_gathered_by_a_cancelled_consume_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    world = ConsumerWorld(5, enable_auto_commit=False)

    async def body(consumer: AsyncConsumer, until_waiting: Callable[[Any], Any]) -> None:
        await cancel(await until_waiting(consumer.consume(100)))
        await consumer.commit()
        assert world.commits == [{0: 0}]
        assert places(await consumer.consume(3, 10)) == [(0, 0), (0, 1), (0, 2)]
        await consumer.commit()
        assert world.commits[1:] == [{0: 3}]
        assert places([await consumer.getone(), await consumer.getone()]) == [(0, 3), (0, 4)]

    run(monkeypatch, world, body)


def test_records_of_a_cancelled_wait_are_committed_only_after_they_are_handed_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = ConsumerWorld(5, enable_auto_commit=False)

    async def body(consumer: AsyncConsumer, until_waiting: Callable[[Any], Any]) -> None:
        assert len(await consumer.getmany(100)) == 5
        await cancel(await until_waiting(consumer.getone()))
        assert consumer._pending_wait is not None
        world.readers[0].end = 7
        world.consumer._inbox.notify()
        await asyncio.wait({consumer._pending_wait})
        await consumer.commit()
        assert world.commits == [{0: 5}]
        assert places([await consumer.getone(), await consumer.getone()]) == [(0, 5), (0, 6)]
        await consumer.commit()
        assert world.commits[1:] == [{0: 7}]

    run(monkeypatch, world, body)


def test_an_interrupt_that_comes_too_late_does_not_end_the_next_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consume() that times out interrupts a wait which has ended meanwhile."""
    world = ConsumerWorld(0, enable_auto_commit=False)

    async def body(consumer: AsyncConsumer, until_waiting: Callable[[Any], Any]) -> None:
        assert await consumer.consume(5, 0.01) == []
        world.consumer.interrupt()
        task = await until_waiting(consumer.consume(1, 60))
        world.readers[0].end = 1
        world.consumer._inbox.notify()
        assert places(await task) == [(0, 0)]
        world.consumer.interrupt()
        task = await until_waiting(consumer.poll())
        world.readers[0].end = 2
        world.consumer._inbox.notify()
        assert places([await task]) == [(0, 1)]

    run(monkeypatch, world, body)


def test_an_interrupt_ends_one_wait_for_a_batch() -> None:
    consumer = ConsumerWorld(0).consumer
    timer = threading.Timer(0.05, consumer.interrupt)
    timer.start()
    assert consumer.consume_batch(10, 60) is None
    timer.join()
    began = time.monotonic()
    assert consumer.consume_batch(10, 0.05) is None and time.monotonic() >= began + 0.05


# -- over TCP --------------------------------------------------------------------------------------


class Librdkafka:
    """The part of confluent_kafka.Consumer that TcpConsumer uses. `there`: results of poll() and
    consume(); on_consume() is called within consume(), on_wait() where a call would wait.
    """

    def __init__(self, *there: tuple[int, int]) -> None:
        self.there = [Message(TOPIC, index, offset, None, b"", None, None, (1, 0), None) for index, offset in there]
        self.all = list(self.there)
        self.stored: dict[int, int] = {}
        self.on_consume: Callable[[], None] = lambda: None
        self.on_wait: Callable[[], None] = lambda: None

    def poll(self, timeout: float) -> Message | None:
        if not self.there and timeout:
            self.on_wait()
        return self.there.pop(0) if self.there else None

    def consume(self, count: int, timeout: float) -> list[Message]:
        self.on_consume()
        if len(self.there) < count and timeout:
            self.on_wait()
        found, self.there = self.there[:count], self.there[count:]
        return found

    def store_offsets(self, offsets: list[TopicPartition]) -> None:
        self.stored |= {one.partition: one.offset for one in offsets}

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """After the records that poll() and consume() have returned."""
        return [
            TopicPartition(
                one.topic,
                one.partition,
                max(
                    (
                        message.offset() + 1
                        for message in self.all[: -len(self.there) or None]
                        if message.partition() == one.partition
                    ),
                    default=-1001,
                ),
            )
            for one in partitions
        ]

    def commit(self, asynchronous: bool) -> dict[int, int]:
        return dict(self.stored)

    def close(self) -> None:
        pass


def over_tcp(fake: Librdkafka) -> TcpConsumer:
    made = TcpConsumer(None, read({"bootstrap.servers": "127.0.0.1:1", "group.id": "g", "log_level": 0}), "test")
    made._consumer.close()
    made._consumer, made._poll_one = fake, fake.poll
    return made


def test_over_tcp_returned_records_are_not_stored_and_are_delivered_again() -> None:
    fake = Librdkafka((0, 0), (0, 1), (0, 2))
    consumer = over_tcp(fake)
    # librdkafka commits stored offsets at any time
    assert places(consumer.take(2, 0)) == [(0, 0), (0, 1)] and fake.stored == {}
    consumer.give_back(consumer._taken[1:])
    assert consumer.commit() == {0: 1}
    consumer.interrupt()
    found = consumer.gather(10)
    assert places(found) == [(0, 1), (0, 2)] and fake.stored == {0: 1}
    assert consumer.take(1, 0) == [] and consumer.commit() == {0: 3}


def _waits() -> None:
    raise InterruptedError


@pytest.mark.parametrize(
    "read_more",
    [
        lambda consumer: consumer.poll(),
        lambda consumer: consumer.consume(100),
        lambda consumer: consumer.take(100, None),
        lambda consumer: consumer.gather(100),
        lambda consumer: consumer.consume_batch(),
    ],
    ids=["poll", "consume", "take", "gather", "consume_batch"],
)
def test_over_tcp_offsets_of_returned_records_are_stored_before_a_wait(
    read_more: Callable[[TcpConsumer], object],
) -> None:
    """While the topic was idle, the group's lag stayed, and after a kill the records were read again."""
    fake = Librdkafka(*((0, offset) for offset in range(10)))
    consumer = over_tcp(fake)
    assert [consumer.poll().offset() for _ in range(10)] == list(range(10)) and fake.stored == {0: 1}
    fake.on_wait = _waits
    with pytest.raises(InterruptedError):
        read_more(consumer)
    assert fake.stored == {0: 10}


@pytest.mark.parametrize("count", [1, 100])
def test_over_tcp_offsets_are_stored_by_a_consume_that_finds_nothing(count: int) -> None:
    fake = Librdkafka((0, 0), (0, 1))
    consumer = over_tcp(fake)
    assert places(consumer.consume(2, 0)) == [(0, 0), (0, 1)] and fake.stored == {0: 1}
    assert consumer.consume(count, 0) == [] and fake.stored == {0: 2}


def test_over_tcp_an_interrupted_consume_stores_and_loses_none_of_its_records() -> None:
    fake = Librdkafka((0, 0), (0, 1))
    consumer = over_tcp(fake)
    fake.on_wait = _waits
    with pytest.raises(InterruptedError):
        consumer.consume(3)
    assert fake.stored == {} and places(consumer.consume(3)) == [(0, 0), (0, 1)]


def test_over_tcp_the_first_of_several_records_is_dropped_with_its_partition() -> None:
    fake = Librdkafka((0, 0), (1, 0))
    consumer = over_tcp(fake)

    def fail() -> None:
        raise LookupError

    fake.on_consume = fail
    with pytest.raises(LookupError):
        consumer.take(10, 0)
    fake.on_consume = lambda: None
    assert places(consumer.take(1, 0)) == [(0, 0)]
    fake = Librdkafka((0, 0), (1, 0))
    consumer = over_tcp(fake)
    fake.on_consume = lambda: consumer._wrap_on_revoke(None)(None, [TopicPartition(TOPIC, 0)])
    assert places(consumer.take(10, 0)) == [(1, 0)]


@pytest.mark.parametrize("name", ["on_revoke", "on_lost"])
def test_over_tcp_buffered_records_are_dropped_with_their_partition(name: str) -> None:
    """Of a lost partition too: another member may read them already."""
    fake = Librdkafka((0, 0), (1, 0))
    consumer = over_tcp(fake)
    subscribed: dict[str, Any] = {}
    fake.subscribe = lambda topics, **callbacks: subscribed.update(callbacks)  # type: ignore[attr-defined]
    told: list[list[TopicPartition]] = []
    consumer.subscribe([TOPIC], **{name: lambda _consumer, partitions: told.append(partitions)})
    lost = [TopicPartition(TOPIC, 0)]
    fake.on_consume = lambda: subscribed[name](fake, lost)
    assert places(consumer.take(10, 0)) == [(1, 0)] and told == [lost]


def test_over_tcp_consume_batch_keeps_waiting_after_a_rebalance() -> None:
    """None means that the time is over: a program that reads until there are no more records ended."""
    fake = Librdkafka()
    consumer = over_tcp(fake)
    first, second = Librdkafka((0, 0), (1, 5)).there
    polled = iter([first, second])
    consumer._poll_one = lambda _timeout: next(polled)
    fake.on_consume = lambda: consumer._wrap_on_revoke(None)(None, [TopicPartition(TOPIC, 0)])
    batch = consumer.consume_batch(10)
    assert batch is not None and (batch.partition, batch.next_offset) == (1, 6)
    consumer._poll_one = lambda _timeout: None
    assert consumer.consume_batch(10, 0.01) is None


def test_over_tcp_a_position_follows_returned_records_not_fetched_ones() -> None:
    """Committed with a transaction, it skipped records that were never returned."""
    fake = Librdkafka((0, 0), (1, 5), (0, 1), (1, 6))
    consumer = over_tcp(fake)
    positions_requested = [TopicPartition(TOPIC, 0), TopicPartition(TOPIC, 1), TopicPartition(TOPIC, 2)]
    assert consumer.consume_batch(10).next_offset == 1
    assert [one.offset for one in consumer.position(positions_requested)] == [1, 5, -1001]
    assert consumer.consume_batch(10).partition == 1
    assert [one.offset for one in consumer.position(positions_requested)] == [1, 6, -1001]
    assert [consumer.poll(0).offset() for _ in range(2)] == [1, 6]
    assert [one.offset for one in consumer.position(positions_requested)] == [2, 7, -1001]


def test_over_tcp_the_position_of_a_partition_paused_with_fetched_records_is_known() -> None:
    """They are read again: librdkafka must seek(), and knows no position then until it returns the
    next one. A transaction ended without the records returned before.
    """
    fake = Librdkafka((1, 4), (0, 0), (1, 5), (0, 1))
    sought: list[TopicPartition] = []
    position, fake.pause, fake.seek = fake.position, lambda _partitions: None, sought.append
    fake.position = lambda partitions: [
        TopicPartition(TOPIC, one.partition, -1001) if one in sought else found
        for one, found in zip(partitions, position(partitions), strict=True)
    ]
    consumer, place = over_tcp(fake), TopicPartition(TOPIC, 1)
    assert consumer.consume_batch(10).partition == 1
    consumer.pause([place])
    assert [one.offset for one in sought] == [5] and [one.offset for one in consumer.position([place])] == [5]
    consumer.seek(place)
    assert [one.offset for one in consumer.position([place])] == [-1001]


def test_over_tcp_no_position_outlives_a_subscription() -> None:
    """librdkafka has none in a new assignment until it returns a record."""
    fake = Librdkafka((1, 4), (0, 0), (1, 5))
    fake.pause = fake.seek = lambda _partition: None
    fake.unsubscribe = lambda: None
    fake.position = lambda partitions: [TopicPartition(TOPIC, one.partition, -1001) for one in partitions]
    consumer, place = over_tcp(fake), TopicPartition(TOPIC, 1)
    assert consumer.consume_batch(10).partition == 1
    consumer.pause([place])
    assert [one.offset for one in consumer.position([place])] == [5]
    consumer.unsubscribe()
    assert [one.offset for one in consumer.position([place])] == [-1001] and consumer._buffered == []
