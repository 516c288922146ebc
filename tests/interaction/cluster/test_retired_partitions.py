"""A topic gets fewer partitions while clients that know nothing of it continue: a complete `mqd
topic retire-partitions` under load. No acknowledged record is lost or duplicated, no consumer of a
group sees the records of a key out of order, transactions stay atomic.
docs/decisions/cluster/2026-11-21-retired-partitions.md.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

import mqd
from mqd.cli.kafka_request import Broker as Requests
from mqd.cli.main import main as cli
from mqd.cli.retirement import CREATE_PARTITIONS, HIDDEN, REDIRECTED, SEALED, STATUS
from mqd.protocol.messages import CreatePartitionsRequest
from tests.broker import Broker
from tests.cluster import Cluster
from tests.interaction.cluster_clients import run
from tests.interaction.traffic import eventually
from tests.interaction.transactional import RawProducer, connect, fetch_committed, fresh, read_committed
from tests.polling import PATIENCE_S

GRACE_S = 2
CONFIG = {"partition.retire.grace.ms": str(1000 * GRACE_S), "log.retention.check.interval.ms": "300"}
KEYS = 12
RENEWED_MS = 400  # how often clients refresh the number of partitions
RUN_S_MAX = 120


class Writer(threading.Thread):
    """Writes records of its keys, numbered for each key. `written`: those that must be read in the
    end, in order. As a context manager, so that a failing test leaves no thread running.
    """

    producer: Any

    def __init__(self, name: str, topic: str) -> None:
        super().__init__(name=name, daemon=True)
        self.topic, self.end = topic, threading.Event()
        self.written: dict[str, list[int]] = defaultdict(list)
        self.failures: list[str] = []
        self.acknowledged = 0
        self._next: dict[str, int] = defaultdict(int)

    def record(self, number: int) -> tuple[str, int]:
        key = f"{self.name}-{number % KEYS}"
        self._next[key] += 1
        return key, self._next[key]

    def count(self) -> int:
        """How many records the broker has acknowledged."""
        return self.acknowledged

    def failed(self, error: object, _message: object = None) -> None:
        if error:
            self.failures.append(str(error))
        else:
            self.acknowledged += 1

    def run(self) -> None:
        try:
            self.write()
        except Exception as error:  # noqa: BLE001 - the test's own thread shall see it
            self.failures.append(repr(error))

    def write(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self.end.set()
        self.join(PATIENCE_S)
        assert not self.is_alive() and not self.failures, (self.name, self.failures[:3])

    def __enter__(self) -> Writer:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """After stop() nothing is left to purge."""
        self.end.set()
        # calls that wait for records return at once from now on; those that wait for the broker
        # have PATIENCE_S
        while self.is_alive():
            with contextlib.suppress(Exception):
                self.producer.purge()
                self.producer.poll(0)
            self.join(0.1)
        with contextlib.suppress(Exception):  # of a transaction that can no longer be aborted
            self.producer.close()
        del self.producer


class Plain(Writer):
    """An idempotent producer of librdkafka, or of mqd over shared memory, with several batches in
    flight.
    """

    def __init__(self, name: str, topic: str, bootstrap: str, local: bool = False) -> None:
        super().__init__(name, topic)
        own = {"transport": "shm"} if local else {"topic.metadata.refresh.interval.ms": RENEWED_MS}
        self.producer = (mqd.Producer if local else Producer)(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": 50_000,
                **own,
            }
        )

    def write(self) -> None:
        number = 0
        while not self.end.wait(0.002):
            key, count = self.record(number)
            self.producer.produce(self.topic, str(count).encode(), key.encode(), on_delivery=self.failed)
            self.written[key].append(count)
            self.producer.poll(0)
            number += 1
        assert self.producer.flush(PATIENCE_S) == 0


class Transactional(Writer):
    """Every third transaction is aborted, and its records must not be read. A transaction that
    fails with an error that Kafka calls abortable is aborted and written again.
    """

    def __init__(self, name: str, topic: str, bootstrap: str) -> None:
        super().__init__(name, topic)
        self.may_begin = threading.Event()
        self.may_begin.set()
        self.idle = threading.Event()
        self.producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": fresh(name),
                "topic.metadata.refresh.interval.ms": RENEWED_MS,
                "linger.ms": 1,
                "transaction.timeout.ms": 50_000,
            }
        )

    def write(self) -> None:
        self.producer.init_transactions(PATIENCE_S)
        number = 0
        while not self.end.is_set():
            self.idle.set()
            self.may_begin.wait()
            self.idle.clear()
            records = [self.record(number + i) for i in range(KEYS)]
            while not self._carried_out(records, number % 3 != 2):
                if self.end.is_set():
                    return
            number += 1

    @contextlib.contextmanager
    def between_transactions(self) -> Iterator[None]:
        """No transaction is open."""
        self.may_begin.clear()
        assert self.idle.wait(PATIENCE_S)
        try:
            yield
        finally:
            self.may_begin.set()

    def _carried_out(self, records: list[tuple[str, int]], commit: bool) -> bool:
        self.producer.begin_transaction()
        try:
            for key, count in records:
                self.producer.produce(self.topic, str(count).encode(), key.encode())
            if commit:
                self.producer.commit_transaction(PATIENCE_S)
                for key, count in records:
                    self.written[key].append(count)
                    self.acknowledged += 1
            else:
                self.producer.flush(PATIENCE_S)
                self.producer.abort_transaction(PATIENCE_S)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            self.producer.abort_transaction(PATIENCE_S)
            return False
        return True


class Readers:
    """A group of two consumers, as a context manager. `read`: numbers by key, in the order in which
    they were delivered; a redelivery after a rebalance has the same offset and is not counted.
    """

    def __init__(self, topic: str, bootstrap: str) -> None:
        self._settings = {
            "bootstrap.servers": bootstrap,
            "group.id": fresh("readers"),
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "auto.commit.interval.ms": 100,
            "topic.metadata.refresh.interval.ms": RENEWED_MS,
            "fetch.wait.max.ms": 20,
        }
        self.topic, self.end, self.lock = topic, threading.Event(), threading.Lock()
        self.read: dict[str, list[int]] = defaultdict(list)
        self.seen: set[tuple[int, int]] = set()
        self.assigned: dict[int, set[int]] = {}
        self.failures: list[str] = []
        self.threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(2)]

    def __enter__(self) -> Readers:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end.set()
        for thread in self.threads:
            thread.join()

    def _run(self, number: int) -> None:
        consumer = Consumer(self._settings)
        try:
            self._read(number, consumer)
        except Exception as error:  # noqa: BLE001 - the test's own thread shall see it
            self.failures.append(repr(error))
        finally:
            consumer.close()

    def _read(self, number: int, consumer: Consumer) -> None:
        consumer.subscribe([self.topic])
        while not self.end.is_set():
            message = consumer.poll(0.1)
            with self.lock:
                self.assigned[number] = {one.partition for one in consumer.assignment()}
                if message is None:
                    continue
                if message.error():
                    # the partition has just been deleted
                    if message.error().code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                        self.failures.append(message.error().str())
                elif (place := (message.partition(), message.offset())) not in self.seen:
                    self.seen.add(place)
                    self.read[message.key().decode()].append(int(message.value()))

    def has_all(self, written: dict[str, list[int]]) -> bool:
        with self.lock:
            return all(len(self.read[key]) >= len(numbers) for key, numbers in written.items())

    def stop(self) -> None:
        self.end.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not self.failures, self.failures[:3]


@contextlib.contextmanager
def reported_with(broker: Broker) -> Iterator[None]:
    """Failures are reported with the broker's log."""
    try:
        yield
    except AssertionError as error:
        error.add_note(broker.logs())
        raise


def make_topic(bootstrap: str, partitions: int = 4, replicas: int = 1, **config: str) -> str:
    name = fresh("retired")
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, replicas, config=config)])[name].result(PATIENCE_S)
    return name


def count_of(bootstrap: str, topic: str) -> int:
    return len(
        AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic, timeout=PATIENCE_S).topics[topic].partitions
    )


def step_of(bootstrap: str, topic: str) -> int:
    with Requests(bootstrap) as requests:
        request = CreatePartitionsRequest(
            topics=[CreatePartitionsRequest.Topic(name=topic, count=0, assignments=None, retirement_action=STATUS)],
            timeout_ms=60_000,
        )
        return requests.request(CREATE_PARTITIONS, request).results[0].retirement.step


def retire(bootstrap: str, topic: str, *arguments: str, fails: bool = False) -> str:
    """The command runs in this process: starting one for it would cost time that the test does not
    need.
    """
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as done:
        cli(["topic", "retire-partitions", topic, *arguments, "-b", bootstrap])
    assert bool(done.value.code) == fails, out.getvalue() + errors.getvalue()
    return errors.getvalue() if fails else out.getvalue()


def delete_records(bootstrap: str, topic: str, partitions: Iterator[int] | range) -> None:
    """As retention would; of these partitions only."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for done in admin.delete_records([TopicPartition(topic, index, -1) for index in partitions]).values():
        done.result(PATIENCE_S)


def until(what: str, holds: Callable[[], object]) -> None:
    eventually(holds, what, PATIENCE_S)


def write_on(writers: list[Writer]) -> None:
    before = {writer: writer.count() for writer in writers}

    def standing() -> list[tuple[str, list[str]]]:
        return [
            (writer.name, writer.failures[:2]) for writer, count in before.items() if writer.count() <= count + 3 * KEYS
        ]

    eventually(lambda: not standing(), lambda: f"writing on; these do not: {standing()}", PATIENCE_S)


def check(writers: list[Writer], readers: Readers) -> None:
    for writer in writers:
        writer.stop()
    written = {key: numbers for writer in writers for key, numbers in writer.written.items()}
    until("everything is read", lambda: readers.has_all(written))
    readers.stop()
    for key, numbers in written.items():
        assert readers.read[key] == numbers, (
            key,
            [pair for pair in zip(numbers, readers.read[key], strict=False) if pair[0] != pair[1]][:3],
            len(numbers),
            len(readers.read[key]),
        )
    assert readers.read.keys() == written.keys()
    assert all(writer.acknowledged > 3 * KEYS for writer in writers)


@pytest.mark.slow
def test_clients_continue_during_a_complete_retirement(io_backend: str, start_broker: Callable[..., Broker]) -> None:
    # readers on a busy machine may be slow
    broker = start_broker(
        config={**CONFIG, "io.backend": io_backend, "partition.retire.barrier.ms": str(int(1000 * PATIENCE_S))}
    )
    topic = make_topic(broker.bootstrap)
    with reported_with(broker), contextlib.ExitStack() as clients:
        readers = clients.enter_context(Readers(topic, broker.bootstrap))
        writers: list[Any] = [
            clients.enter_context(Plain("plain", topic, broker.bootstrap)),
            clients.enter_context(Plain("local", topic, broker.bootstrap, local=True)),
            clients.enter_context(Transactional("transactional", topic, broker.bootstrap)),
        ]
        until("all of them write", lambda: all(len(writer.written) == KEYS for writer in writers))
        with writers[2].between_transactions():
            assert (
                "co_locating"
                in run(
                    "topic",
                    "retire-partitions",
                    topic,
                    "--to",
                    "2",
                    "--no-wait",
                    "-b",
                    broker.bootstrap,
                    "--format",
                    "json",
                ).stdout
            )
        done = run("topic", "retire-partitions", topic, "--to", "2", "-b", broker.bootstrap, "--format", "json")
        output = json.loads(done.stdout)
        assert (output["step"], output["partitions"], output["groups_behind"]) == ("redirected", 2, []), output
        assert count_of(broker.bootstrap, topic) == 4
        write_on(writers)
        delete_records(broker.bootstrap, topic, range(2, 4))
        until("hidden", lambda: step_of(broker.bootstrap, topic) == HIDDEN)
        until("clients are shown two", lambda: count_of(broker.bootstrap, topic) == 2)
        until("the group reads two partitions", lambda: set().union(*readers.assigned.values()) == {0, 1})
        hidden_s = time.monotonic()
        # librdkafka's producers keep using four partitions as long as they live
        while time.monotonic() < hidden_s + 2 * GRACE_S:
            write_on(writers)
        assert step_of(broker.bootstrap, topic) == HIDDEN
        for writer in writers:
            writer.stop()
        until("gone", lambda: step_of(broker.bootstrap, topic) == 0)
        writers.append(clients.enter_context(Plain("after", topic, broker.bootstrap)))
        write_on(writers[-1:])
        check(writers, readers)
    assert "2 partitions; none is being retired" in retire(broker.bootstrap, topic, "--status")


def test_an_open_transaction_is_named_and_ends_in_old_and_remaining_partitions(shared_broker: Broker) -> None:
    bootstrap = shared_broker.bootstrap
    topic = make_topic(bootstrap)
    with connect(shared_broker) as kafka:
        producer = RawProducer(kafka)
        assert producer.init().error_code == 0
        assert producer.produce(topic, 3, b"first") == 0
        refused = retire(bootstrap, topic, "--to", "2", fails=True)
        assert (
            f"partition 3 of {topic}" in refused
            and producer.name in refused
            and f"producer id {producer.producer_id}" in refused
        )
        assert step_of(bootstrap, topic) == 0
        assert producer.end(True) == 0
        retire(bootstrap, topic, "--to", "2", "--no-wait")
        assert step_of(bootstrap, topic) > 0
        retire(bootstrap, topic, "--to", "2")
        assert producer.produce(topic, 3, b"aborted") == 0
        assert fetch_committed(kafka, topic, 1).last_stable_offset == 0
        assert producer.end(False) == 0
        assert producer.produce(topic, 3, b"committed") == 0
        assert producer.end(True) == 0
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": fresh("reader"),
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 1, 0), TopicPartition(topic, 3, 0)])
    found, ends = [], 0
    while ends < 2:
        message = consumer.poll(PATIENCE_S)
        ends += bool(message.error())
        if not message.error():
            found.append((message.partition(), message.value()))
    consumer.close()
    assert sorted(found) == [(1, b"committed"), (3, b"first")]


@contextlib.contextmanager
def member(bootstrap: str, topic: str) -> Iterator[tuple[str, Consumer]]:
    """A group's name, and its only member, which has read the first record."""
    group = fresh("group")
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    try:
        consumer.subscribe([topic])
        until("it is a member, and reads", lambda: consumer.poll(0.1) is not None)
        yield group, consumer
    finally:
        consumer.close()


def test_a_group_that_is_behind_is_reported_and_waited_for_within_the_bound(
    start_broker: Callable[..., Broker],
) -> None:
    broker = start_broker(workers=1, config={**CONFIG, "partition.retire.barrier.ms": "300"})
    topic = make_topic(broker.bootstrap)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
    for number in range(40):
        producer.produce(topic, b"x", partition=number % 4)
    assert producer.flush(PATIENCE_S) == 0
    with member(broker.bootstrap, topic) as (group, consumer):
        consumer.commit(offsets=[TopicPartition(topic, 3, 4)], asynchronous=False)
        text = retire(broker.bootstrap, topic, "--to", "2")
    assert f"group {group} has" in text and "may be read out of order" in text
    assert step_of(broker.bootstrap, topic) == REDIRECTED


def test_aborted_records_do_not_count_as_unread_by_a_group(shared_broker: Broker) -> None:
    topic = make_topic(shared_broker.bootstrap)
    with connect(shared_broker) as kafka:
        producer = RawProducer(kafka)
        assert producer.init().error_code == 0
        for value in (b"committed", b"aborted"):
            assert producer.produce(topic, 3, value) == 0
            assert producer.end(value == b"committed") == 0
        with member(shared_broker.bootstrap, topic) as (_, consumer):
            consumer.commit(offsets=[TopicPartition(topic, 3, 1)], asynchronous=False)
            output = json.loads(retire(shared_broker.bootstrap, topic, "--to", "2", "--format", "json"))
    assert (output["step"], output["groups_behind"]) == ("redirected", []), output


@pytest.mark.slow
def test_partitions_added_later_are_new_ones(start_broker: Callable[..., Broker]) -> None:
    """Same topic id, same index: a group begins at their first record, and a transaction that wrote
    to a removed partition ends where its records were.
    """
    broker = start_broker(config={**CONFIG, "partition.retire.grace.ms": "300"})
    bootstrap = broker.bootstrap
    topic = make_topic(bootstrap)
    admin = AdminClient({"bootstrap.servers": bootstrap})

    def add() -> None:
        admin.create_partitions([NewPartitions(topic, 4)])[topic].result(PATIENCE_S)

    with (
        reported_with(broker),
        connect(broker) as kafka,
        contextlib.closing(
            Consumer({"bootstrap.servers": bootstrap, "group.id": fresh("g"), "auto.offset.reset": "error"})
        ) as consumer,
    ):
        before = RawProducer(kafka)
        assert before.init().error_code == 0
        assert [before.produce(topic, 3, b"old") for _ in range(5)] == [0] * 5 and before.end(True) == 0
        consumer.commit(offsets=[TopicPartition(topic, 3, 5), TopicPartition(topic, 1, 0)], asynchronous=False)
        retire(bootstrap, topic, "--to", "2")
        producer = RawProducer(kafka)
        assert producer.init().error_code == 0 and producer.produce(topic, 3, b"redirected") == 0
        delete_records(bootstrap, topic, range(2, 4))
        until("gone", lambda: step_of(bootstrap, topic) == 0)
        with pytest.raises(KafkaException, match="former partition 3"):
            add()
        assert producer.end(True) == 0
        until("the end of the transaction is read", lambda: read_committed(kafka, topic, 1) == [b"redirected"])
        add()
        until("the new one is served", lambda: count_of(bootstrap, topic) == 4)
        assert [one.offset for one in consumer.committed([TopicPartition(topic, 3), TopicPartition(topic, 1)])] == [
            OFFSET_INVALID,
            0,
        ]
        after = RawProducer(kafka)
        assert after.init().error_code == 0
        until("the new one takes a record", lambda: after.produce(topic, 3, b"new") == 0)
        assert after.end(True) == 0 and read_committed(kafka, topic, 3) == [b"new"]


@pytest.mark.slow
def test_leaders_die_while_partitions_are_retired(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Cluster(
        tmp_path_factory.mktemp("retired"),
        config={**CONFIG, "broker.session.timeout.ms": "2000", "partition.retire.grace.ms": "600000"},
    ) as cluster:
        topic = make_topic(cluster.bootstrap, replicas=3)
        with contextlib.ExitStack() as clients:
            readers = clients.enter_context(Readers(topic, cluster.bootstrap))
            writers: list[Any] = [
                clients.enter_context(one(one.__name__, topic, cluster.bootstrap)) for one in (Plain, Transactional)
            ]
            _leaders_die(cluster, topic, writers, readers)


def _leaders_die(cluster: Cluster, topic: str, writers: list[Any], readers: Readers) -> None:
    until("all of them write", lambda: all(len(writer.written) == KEYS for writer in writers))
    with writers[1].between_transactions():
        retire(cluster.bootstrap, topic, "--to", "2", "--no-wait")
    for want in (SEALED, REDIRECTED, REDIRECTED):
        until("the step", lambda want=want: step_of(cluster.bootstrap, topic) >= want)
        leader = (
            AdminClient({"bootstrap.servers": cluster.bootstrap})
            .list_topics(topic, timeout=PATIENCE_S)
            .topics[topic]
            .partitions[3]
            .leader
        )
        member = cluster.brokers[leader]
        for role in ("mqd-worker", "mqd-controller"):
            for pid in member.pids(role):
                os.kill(pid, signal.SIGKILL)
        write_on(writers)
    until("redirected", lambda: step_of(cluster.bootstrap, topic) == REDIRECTED)
    delete_records(cluster.bootstrap, topic, range(2, 4))
    until("hidden", lambda: step_of(cluster.bootstrap, topic) == HIDDEN)
    until("the group reads two partitions", lambda: set().union(*readers.assigned.values()) == {0, 1})
    check(writers, readers)
