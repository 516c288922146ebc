"""Joint transactions against a real broker: only the winners' records become visible; a repeated
batch is recognized; both hold when processes are killed between any two steps.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from mqd.protocol.messages import InitProducerIdRequest, ListTransactionsRequest, WriteTxnMarkersRequest
from tests.broker import Broker
from tests.interaction.command_line import CommandLine
from tests.interaction.joint import AGAIN, Driver, joint_id
from tests.interaction.traffic import INIT_PRODUCER_ID, PRODUCE, eventually, one_outcome
from tests.interaction.transactional import (
    END_TXN,
    RawProducer,
    connect,
    fetch_committed,
    fresh,
    read_committed,
    topic_of,
)
from tests.kafka_connection import ConnectionEnded, KafkaConnection

INVALID_PRODUCER_EPOCH, INVALID_TXN_STATE, INVALID_PRODUCER_ID_MAPPING, FENCED, INVALID_REQUEST = 47, 48, 49, 90, 42
LIST_TRANSACTIONS, WRITE_TXN_MARKERS = 66, 27
PRODUCE_AGAIN = AGAIN | {3, 5, 6, 7, 19, 56}


@pytest.fixture
def kafka(shared_broker: Broker) -> Iterator[KafkaConnection]:
    with connect(shared_broker) as connection:
        yield connection


def write(child: RawProducer, topic: str, partition: int, *values: bytes) -> None:
    assert child.produce(topic, partition, *values) == 0


def test_only_the_winners_records_are_visible(kafka: KafkaConnection) -> None:
    topic, driver = topic_of(kafka, 2), Driver(kafka)
    first, second, loser, idle = (driver.child(0) for _ in range(4))
    assert len({first.producer_id, second.producer_id, loser.producer_id, idle.producer_id}) == 4
    write(loser, topic, 0, b"lost")
    write(first, topic, 0, b"a", b"b")
    write(first, topic, 1, b"c")
    write(second, topic, 1, b"d")
    assert read_committed(kafka, topic, 0) == []
    assert driver.end(0, first, second) == (0, 0)
    assert read_committed(kafka, topic, 0) == [b"a", b"b"] and read_committed(kafka, topic, 1) == [b"c", b"d"]
    assert driver.end(0, first, second) == (0, 0), "a repeated commit is answered the same"
    for late in (first, loser, idle):
        assert late.produce(topic, 1, b"late") == INVALID_PRODUCER_EPOCH, "its transaction is over"
    assert [fetch_committed(kafka, topic, index).last_stable_offset for index in range(2)] == [
        fetch_committed(kafka, topic, index).high_watermark for index in range(2)
    ]


def test_producer_ids_continue_with_the_next_epoch(kafka: KafkaConnection) -> None:
    topic, driver = topic_of(kafka), Driver(kafka)
    ids, epochs = set(), []
    for batch in range(5):
        child = driver.child(batch)
        ids.add(child.producer_id)
        epochs.append(child.epoch)
        write(child, topic, 0, f"{batch}".encode())
        assert driver.end(batch, child) == (0, batch)
    assert len(ids) == 1 and epochs == [0, 1, 2, 3, 4]
    assert read_committed(kafka, topic, 0) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_replayed_batch_is_recognized_from_any_sender(kafka: KafkaConnection) -> None:
    topic, driver = topic_of(kafka), Driver(kafka)
    child = driver.child(7)
    write(child, topic, 0, b"once")
    assert driver.end(7, child) == (0, 7)
    for run in ("run-1", "run-2"):
        again = Driver(kafka, driver.name, run)
        for batch in (3, 7):
            response = again.enlist(batch)
            assert (response.error_code, response.producer_id, response.joint.committed_batch_id) == (0, -1, 7)
            assert again.end(batch) == (0, 7)
    assert read_committed(kafka, topic, 0) == [b"once"]


def test_an_empty_batch_is_committed_too(kafka: KafkaConnection) -> None:
    driver = Driver(kafka)
    assert driver.end(0) == (0, 0)
    idle = driver.child(1)
    assert driver.end(1, idle) == (0, 1)
    assert driver.enlist(1).producer_id == -1


def test_an_aborted_batch_is_repeated_only_by_another_run(kafka: KafkaConnection) -> None:
    topic, driver = topic_of(kafka), Driver(kafka)
    child = driver.child(0)
    write(child, topic, 0, b"first try")
    assert driver.end(0, committed=False) == (0, -1)
    assert driver.end(0, committed=False) == (0, -1)
    assert driver.end(0, child)[0] == FENCED, "what it wrote is aborted"
    assert driver.enlist(0).error_code == FENCED, "a task that outlived the abort: nothing would end its transaction"
    found = fetch_committed(kafka, topic, 0)
    assert found.last_stable_offset == found.high_watermark
    later = Driver(kafka, driver.name, "run-2")
    again = later.child(0)
    write(again, topic, 0, b"second try")
    assert later.end(0, child)[0] == INVALID_PRODUCER_ID_MAPPING, "a winner of the previous transaction"
    assert later.end(0, again) == (0, 0)
    assert read_committed(kafka, topic, 0) == [b"second try"]


def test_another_run_takes_over_and_the_old_one_is_fenced(kafka: KafkaConnection) -> None:
    topic, old = topic_of(kafka), Driver(kafka)
    zombie = old.child(0)
    write(zombie, topic, 0, b"zombie")
    new = Driver(kafka, old.name, "run-2")
    child = new.child(0)
    assert zombie.produce(topic, 0, b"more") == INVALID_PRODUCER_EPOCH
    assert old.enlist(0).error_code == FENCED
    assert old.end(0, zombie)[0] == FENCED
    assert old.end(0, committed=False) == (0, -1), "nothing of its own is open"
    write(child, topic, 0, b"mine")
    assert new.end(0, child) == (0, 0)
    assert old.enlist(0).producer_id == -1, "the response says that the batch is committed"
    assert read_committed(kafka, topic, 0) == [b"mine"]


def test_a_driver_that_stops_enlisting_is_aborted(kafka: KafkaConnection) -> None:
    topic, driver = topic_of(kafka), Driver(kafka, timeout_ms=1_000)
    child = driver.child(0)
    write(child, topic, 0, b"x")
    until = time.monotonic() + 2 * driver.timeout_ms / 1000
    while time.monotonic() < until:
        response = driver.enlist_once(0, child.producer_id, child.epoch)
        assert (response.error_code, response.producer_id, response.producer_epoch) == (
            0,
            child.producer_id,
            child.epoch,
        )
    outcome = eventually(
        lambda: (found := fetch_committed(kafka, topic, 0)).last_stable_offset == found.high_watermark, "the timeout"
    )
    assert outcome and read_committed(kafka, topic, 0) == []
    assert driver.enlist_once(0, child.producer_id, child.epoch).error_code == FENCED
    assert driver.end(0, child)[0] == INVALID_TXN_STATE


def test_ordinary_and_joint_producers_do_not_interfere(kafka: KafkaConnection) -> None:
    driver = Driver(kafka)
    driver.child(0)
    plain = InitProducerIdRequest(transactional_id=driver.name, transaction_timeout_ms=10_000)
    assert kafka.call(INIT_PRODUCER_ID, 5, plain).error_code == INVALID_REQUEST
    other = Driver(kafka, fresh("ordinary"))
    assert other.enlist_once(0).error_code == INVALID_REQUEST
    assert other.end_once(0).error_code == INVALID_REQUEST
    assert driver.enlist_once(-1).error_code == INVALID_REQUEST
    driver.run = ""
    assert driver.enlist_once(1).error_code == INVALID_REQUEST
    assert driver.end_once(1).error_code == INVALID_REQUEST, "an administrator commits nothing"
    producer = RawProducer(kafka)
    response = producer.init()
    assert response.error_code == 0 and response.joint is None, "only a request with the field gets it"


@pytest.fixture
def mqd(
    shared_broker: Broker, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> CommandLine:
    return CommandLine(shared_broker, monkeypatch, capfdbinary)


def test_an_administrator_lists_and_aborts_it(mqd: CommandLine, kafka: KafkaConnection) -> None:
    topic, driver = topic_of(kafka), Driver(kafka)
    children = [driver.child(0) for _ in range(2)]
    for child in children:
        write(child, topic, 0, b"x")
    for child in children:
        (found,) = kafka.call(
            LIST_TRANSACTIONS, 1, ListTransactionsRequest(producer_id_filters=[child.producer_id])
        ).transaction_states
        assert (found.transactional_id, found.producer_id, found.transaction_state) == (
            driver.name,
            child.producer_id,
            "Ongoing",
        )
    assert driver.name in mqd("txn", "list")[1]
    assert mqd("txn", "abort", driver.name, "--execute")[0] == 0
    assert fetch_committed(kafka, topic, 0).last_stable_offset == fetch_committed(kafka, topic, 0).high_watermark
    assert driver.end(0, *children)[0] == FENCED, "it was aborted, so its run must not continue"

    again = Driver(kafka, driver.name, "run-2")
    child = again.child(0)
    write(child, topic, 0, b"y")
    marker = WriteTxnMarkersRequest.Marker(
        producer_id=child.producer_id,
        producer_epoch=child.epoch,
        transaction_result=False,
        topics=[WriteTxnMarkersRequest.Topic(name=topic, partition_indexes=[0])],
    )
    (response,) = kafka.call(WRITE_TXN_MARKERS, 1, WriteTxnMarkersRequest(markers=[marker])).markers
    assert response.topics[0].partitions[0].error_code == 0
    assert again.end(0, child)[0] == FENCED and read_committed(kafka, topic, 0) == []


# -- kill -9 between the steps ---------------------------------------------------------------------

STEPS = 6  # enlist, write, write elsewhere, a loser, commit, the batch again


class Run:
    """A batch of two children and a loser, over connections that may break: every request is
    retried until it gets a final response.
    """

    def __init__(self, broker: Broker, topic: str, name: str, batch: int) -> None:
        self.broker, self.topic, self.name, self.batch = broker, topic, name, batch
        self.kafka: KafkaConnection | None = None
        self.children: list[RawProducer] = []

    def until_final(self, request):
        def attempt():
            try:
                if self.kafka is None:
                    self.kafka = connect(self.broker)
                return request(self.kafka)
            except (OSError, ConnectionEnded):
                self.close()
                return None

        return eventually(attempt, "an answer")

    def close(self) -> None:
        if self.kafka is not None:
            self.kafka.close()
        self.kafka = None

    def child(self) -> RawProducer:
        def request(kafka: KafkaConnection):
            response = Driver(kafka, self.name).enlist_once(self.batch)
            return None if response.error_code in AGAIN else response

        response = self.until_final(request)
        assert response.error_code == 0 and response.producer_id >= 0, response
        child = RawProducer(None, self.name)
        child.adopt(response)
        return child

    def write(self, child: RawProducer, partition: int, value: bytes) -> None:
        request = child.request(self.topic, {partition: (value,)})

        def send_request(kafka: KafkaConnection):
            error = one_outcome(kafka.call(PRODUCE, 12, request)).error_code
            return None if error in PRODUCE_AGAIN else ("answered", error)

        assert self.until_final(send_request) == ("answered", 0)

    def end(self, *winners: RawProducer) -> tuple[int, int]:
        def request(kafka: KafkaConnection):
            response = Driver(kafka, self.name).end_once(self.batch, *winners)
            return None if response.error_code in AGAIN else (response.error_code, response.joint.committed_batch_id)

        return self.until_final(request)

    def step(self, number: int) -> None:
        value = f"{self.batch}".encode()
        if number == 0:
            self.children = [self.child(), self.child(), self.child()]
        elif number in (1, 2):
            self.write(self.children[number - 1], number - 1, value)
        elif number == 3:
            self.write(self.children[2], 0, b"lost")
        elif number == 4:
            assert self.end(*self.children[:2]) == (0, self.batch)
        else:
            assert self.end(*self.children[:2]) == (0, self.batch), "once more"


def kill(broker: Broker, role: str) -> None:
    before = broker.pids(role)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    if role == "acceptor":
        return  # the next request waits for the new process, or finds one that is starting
    eventually(
        lambda: len(broker.pids(role)) == len(before) and not set(before) & set(broker.pids(role)), f"another {role}"
    )


@pytest.mark.parametrize(
    "role",
    ["acceptor", pytest.param("worker", marks=pytest.mark.slow), pytest.param("everything", marks=pytest.mark.slow)],
)
def test_killed_between_every_two_steps(tmp_path, role: str) -> None:
    with Broker(tmp_path / "data", workers=2) as broker:
        name = joint_id()
        with connect(broker) as kafka:
            topic = topic_of(kafka, 2)
        for batch, kill_after in enumerate(range(STEPS) if role == "acceptor" else (0, 2, 4)):
            run = Run(broker, topic, name, batch)
            for number in range(STEPS):
                run.step(number)
                if number == kill_after:
                    if role == "everything":
                        broker.kill_all()
                        broker.start()
                    else:
                        kill(broker, role)
            run.close()
        batches = [f"{number}".encode() for number in range(batch + 1)]
        reader = Run(broker, topic, name, 0)
        for partition in range(2):
            assert reader.until_final(lambda kafka, index=partition: read_committed(kafka, topic, index)) == batches
        reader.close()


@pytest.mark.slow
def test_killed_while_the_commit_is_under_way(tmp_path) -> None:
    """The acceptor dies while it handles the request, at any point: the retry finds the same
    outcome in both partitions.
    """
    with Broker(tmp_path / "data", workers=2) as broker:
        name = joint_id()
        with connect(broker) as kafka:
            topic = topic_of(kafka, 2)
        for batch in range(4):
            run = Run(broker, topic, name, batch)
            for number in range(4):
                run.step(number)
            assert run.kafka is not None
            run.kafka.send(END_TXN, 5, end_request(run, batch))
            kill(broker, "acceptor")
            run.close()
            assert run.end(*run.children[:2]) == (0, batch)
            run.close()
        reader = Run(broker, topic, name, 0)
        for partition in range(2):
            found = eventually(
                lambda index=partition: reader.until_final(lambda kafka: read_committed(kafka, topic, index)),
                "what was committed",
            )
            assert found == [f"{number}".encode() for number in range(4)]
        reader.close()


def end_request(run: Run, batch: int):
    from mqd.protocol.messages import EndTxnRequest

    winners = [EndTxnRequest.Winner(producer_id=one.producer_id, producer_epoch=one.epoch) for one in run.children[:2]]
    joint = EndTxnRequest.Joint(batch_id=batch, run_id="run-1", winners=winners)
    return EndTxnRequest(transactional_id=run.name, producer_id=-1, producer_epoch=-1, committed=True, joint=joint)
