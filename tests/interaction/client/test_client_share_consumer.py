"""mqd.ShareConsumer against a running broker, over shared memory and over TCP: acknowledgements of
each type, locks and renewals, limits, errors, deaths.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import (
    AcknowledgeType,
    ConcurrentModificationException,
    IllegalStateException,
    KafkaError,
    KafkaException,
    Producer,
    ShareConsumer,
    TopicPartition,
)
from tests.broker import Broker, is_alive
from tests.interaction.share_members import begin_at_first_record, configure_group
from tests.polling import PATIENCE_S, eventually

SECONDS = PATIENCE_S
LOCK_S = 5.0  # with a shorter one a slow machine would be late with the first renewal


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {"group.share.min.record.lock.duration.ms": "1000", "log.flush.on.ack": "false"}
    with Broker(tmp_path_factory.mktemp("share-consumer"), config=config) as broker:
        yield broker


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


class Jobs:
    """A topic, and a group of the same name that begins at its first record."""

    def __init__(self, broker: Broker, transport: str, partitions: int = 2) -> None:
        self.partitions = partitions
        self.broker, self.transport, self.name = broker, transport, f"jobs-{uuid.uuid4().hex[:10]}"
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})  # kept alive until it has a response
        admin.create_topics([NewTopic(self.name, partitions)])[self.name].result(SECONDS)
        begin_at_first_record(broker.bootstrap, self.name)
        self.consumers: list[ShareConsumer] = []

    def produce(self, *values: str, **more: Any) -> None:
        """Round-robin over the partitions."""
        producer = Producer({"bootstrap.servers": self.broker.bootstrap, **more})
        for index, value in enumerate(values):
            producer.produce(
                self.name, value, key="key", headers=[("job", value.encode())], partition=index % self.partitions
            )
        assert producer.flush(SECONDS) == 0
        producer.close()

    def consumer(self, mode: str = "explicit", **more: Any) -> ShareConsumer:
        settings = {"bootstrap.servers": self.broker.bootstrap, "group.id": self.name, "transport": self.transport}
        consumer = ShareConsumer({**settings, "share.acknowledgement.mode": mode, **more})
        assert consumer.transport == self.transport
        self.consumers.append(consumer)
        consumer.subscribe([self.name])
        return consumer

    def shorten_locks(self) -> None:
        configure_group(self.broker.bootstrap, self.name, "share.record.lock.duration.ms", str(int(LOCK_S * 1000)))


@pytest.fixture
def jobs(broker: Broker, transport: str) -> Iterator[Jobs]:
    made = Jobs(broker, transport)
    yield made
    for consumer in made.consumers:
        consumer.close()


@pytest.fixture
def queue(broker: Broker, transport: str) -> Iterator[Jobs]:
    """A group that reads one partition, shared by all its members."""
    made = Jobs(broker, transport, 1)
    yield made
    for consumer in made.consumers:
        consumer.close()


def polled(poll: Callable[[], Any]) -> list[Any]:
    """The next records."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if found := list(poll()):
            return found
    raise AssertionError("no record came")


def values(messages: list[Any]) -> list[str]:
    return sorted(message.value().decode() for message in messages)


def gathered(consumer: ShareConsumer, count: int) -> list[Any]:
    """This many records, each accepted."""
    found: list[Any] = []
    while len(found) < count:
        messages = polled(lambda: consumer.poll(1.0))
        consumer.acknowledge_batch(messages)
        found += messages
    assert set(consumer.commit_sync(SECONDS).values()) <= {None}
    return found


def test_each_type_of_acknowledgement(jobs: Jobs) -> None:
    jobs.produce("accepted", "released", "rejected", "last")
    consumer = jobs.consumer()
    called: list[tuple[dict[TopicPartition, set[int]], Any]] = []
    consumer.set_acknowledgement_commit_callback(lambda offsets, error: called.append((offsets, error)))
    kinds = {"released": AcknowledgeType.RELEASE, "rejected": AcknowledgeType.REJECT}
    seen: list[tuple[str, int]] = []
    while len(seen) < 5:
        for message in polled(lambda: consumer.poll(1.0)):
            value, count = message.value().decode(), message.delivery_count()
            assert message.key() == b"key" and message.headers() == [("job", value.encode())]
            seen.append((value, count))
            consumer.acknowledge(message, kinds.get(value, AcknowledgeType.ACCEPT) if count == 1 else 1)
        assert set(consumer.commit_sync(SECONDS).values()) == {None}
    assert sorted(seen) == [("accepted", 1), ("last", 1), ("rejected", 1), ("released", 1), ("released", 2)]
    assert consumer.commit_sync() == {}
    assert {error for _, error in called} == {None}
    assert sum(len(offsets) for one, _ in called for offsets in one.values()) == 5
    assert not consumer.poll(0.1).count()


def test_implicit_mode_accepts_with_the_next_poll_or_commit(jobs: Jobs) -> None:
    jobs.produce("a", "b")
    first = jobs.consumer("implicit")
    found: list[Any] = []
    while len(found) < 2:
        found += polled(lambda: first.poll(1.0))
    with pytest.raises(IllegalStateException):
        first.acknowledge(found[0])
    assert set(first.commit_sync(SECONDS).values()) == {None}
    jobs.produce("c")
    assert values(polled(lambda: first.poll(1.0))) == ["c"]
    first.close()  # it has not been accepted
    assert [(m.value(), m.delivery_count()) for m in gathered(jobs.consumer(), 1)] == [(b"c", 2)]


def test_consume_returns_at_most_num_messages(queue: Jobs) -> None:
    queue.produce(*"abcdef")
    one, other = queue.consumer(), queue.consumer()
    (message,) = polled(lambda: one.consume(1, 1.0))
    rest: list[Any] = []
    while len(rest) < 5:
        messages = polled(lambda: other.consume(2, 1.0))
        assert len(messages) <= 2
        other.acknowledge_batch(messages)
        rest += messages
    assert values([message, *rest]) == list("abcdef")
    one.acknowledge(message)
    assert set(one.commit_sync(SECONDS).values()) == {None}
    with pytest.raises(ValueError, match="num_messages"):
        one.consume(0)


def test_a_callback_that_raises_loses_no_record(queue: Jobs) -> None:
    def raises(_offsets: object, _error: object) -> None:
        raise ZeroDivisionError

    queue.produce("first", "second")
    consumer = queue.consumer()
    (message,) = polled(lambda: consumer.consume(1, 1.0))
    consumer.set_acknowledgement_commit_callback(raises)
    consumer.acknowledge(message)
    with pytest.raises(ZeroDivisionError):  # its acknowledgement result comes with the next record
        polled(lambda: consumer.consume(1, 1.0))
    consumer.set_acknowledgement_commit_callback(None)
    assert values(polled(lambda: consumer.consume(1, 1.0))) == ["second"]


def test_a_renewed_lock_is_kept_and_another_expires(queue: Jobs) -> None:
    queue.shorten_locks()
    queue.produce("renewed", "forgotten")
    slow, other = queue.consumer(), queue.consumer()
    renewed, forgotten = polled(lambda: slow.poll(1.0))
    found: list[Any] = []
    begun = time.monotonic()
    while not found and time.monotonic() < begun + SECONDS:
        assert set(slow.renew([renewed], SECONDS).values()) == {None}
        found = list(other.poll(LOCK_S / 4))
    assert values(found) == ["forgotten"] and time.monotonic() >= begun + LOCK_S / 2
    slow.acknowledge(renewed)
    assert set(slow.commit_sync(SECONDS).values()) == {None}
    slow.acknowledge(forgotten)
    (outcome,) = slow.commit_sync(SECONDS).values()
    assert isinstance(outcome, KafkaException) and outcome.args[0].code() == KafkaError.INVALID_RECORD_STATE


def test_calls_that_the_state_does_not_allow_are_refused(jobs: Jobs) -> None:
    jobs.produce("a")
    consumer = jobs.consumer()
    (message,) = polled(lambda: consumer.poll(1.0))
    with pytest.raises(IllegalStateException, match="acknowledged"):
        consumer.poll(0)
    for given, error in (((message, 4), ValueError), ((message, "1"), TypeError), ((1,), TypeError)):
        with pytest.raises(error):
            consumer.acknowledge(*given)
    with pytest.raises(IllegalStateException, match="not held"):
        consumer.acknowledge_offset(jobs.name, 0, 77)
    with pytest.raises(ValueError):
        consumer.acknowledge_offset(jobs.name, -1, 0)
    with pytest.raises(TypeError):
        consumer.set_acknowledgement_commit_callback(3)
    consumer.acknowledge(message)
    with pytest.raises(IllegalStateException, match="not held"):
        consumer.acknowledge(message)
    raised: list[BaseException] = []
    waiting = threading.Thread(target=lambda: consumer.poll(5.0))
    waiting.start()
    while consumer._calling_thread is None and waiting.is_alive():
        time.sleep(0.001)
    try:
        consumer.poll(0)
    except ConcurrentModificationException as error:
        raised.append(error)
    waiting.join()
    assert raised
    assert consumer.subscription() == [jobs.name] and consumer.memberid()
    consumer.unsubscribe()
    with pytest.raises(IllegalStateException, match="not subscribed"):
        consumer.poll(0)
    consumer.close()
    consumer.close()
    for call in (consumer.poll, consumer.commit_sync, consumer.subscription):
        with pytest.raises(IllegalStateException, match="closed"):
            call()


def test_configurations_are_checked_as_by_confluent_kafka(broker: Broker, transport: str) -> None:
    given = {"bootstrap.servers": broker.bootstrap, "transport": transport}
    for more in ({}, {"group.id": "g", "auto.offset.reset": "earliest"}, {"group.id": "g", "nonsense": 1}):
        with pytest.raises((ValueError, KafkaException)) as theirs:
            confluent_kafka.ShareConsumer({"log_level": 0, **more})
        with pytest.raises(type(theirs.value)) as ours:
            ShareConsumer({**given, **more})
        assert str(ours.value) == str(theirs.value)
    with pytest.raises(KafkaException, match="acknowledgement"):
        ShareConsumer({**given, "group.id": "g", "share.acknowledgement.mode": "maybe"})


def test_killing_a_worker_loses_no_record(jobs: Jobs) -> None:
    jobs.shorten_locks()
    consumer = jobs.consumer()
    jobs.produce(*(f"before-{number}" for number in range(20)))
    accepted: set[str] = set()
    for worker in [entry["name"] for entry in jobs.broker.running() if entry["role"] == "worker"]:
        messages = polled(lambda: consumer.poll(1.0))
        pid = jobs.broker.pid(worker)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        # until then it may receive an acknowledgement whose response is lost
        eventually(lambda pid=pid: not is_alive(pid), "the worker has ended")
        consumer.acknowledge_batch(messages)
        outcome = consumer.commit_sync(SECONDS)
        accepted.update(
            message.value().decode()
            for message in messages
            if outcome.get(TopicPartition(message.topic(), message.partition()), ()) is None
        )
    jobs.broker.wait_until_ready()
    jobs.produce("after-0", "after-1")
    wanted = {f"before-{number}" for number in range(20)} | {"after-0", "after-1"}
    again: list[str] = []
    while accepted | set(again) != wanted:
        messages = polled(lambda: consumer.poll(1.0))
        consumer.acknowledge_batch(messages)
        outcome = consumer.commit_sync(SECONDS)
        again += [
            message.value().decode()
            for message in messages
            if outcome.get(TopicPartition(message.topic(), message.partition()), ()) is None
        ]
    assert len(again) == len(set(again)) and not accepted & set(again), "accepted and answered: not delivered again"


def test_a_child_of_fork_is_refused(jobs: Jobs) -> None:
    consumer = jobs.consumer()
    child = os.fork()
    if child == 0:
        try:
            consumer.poll(0)
        except KafkaException as error:
            os._exit(0 if error.args[0].code() == KafkaError._STATE else 2)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert consumer.poll(0.1).count() == 0
