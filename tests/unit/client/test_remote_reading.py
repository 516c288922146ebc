"""Readers of partitions on other hosts over a fake librdkafka: which records reach which reader,
which are dropped, and flow control.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from mqd.client.config import Settings
from mqd.client.messages import KafkaError
from mqd.client.shm import remote_reading
from mqd.client.shm.remote_reading import RemoteRecords
from mqd.protocol.errors import ErrorCode
from tests.polling import PATIENCE_S, eventually
from tests.unit.client.client_consumer import ConsumerWorld


class Error:
    def __init__(self, code: int) -> None:
        self._code = code

    def code(self) -> int:
        return self._code

    def str(self) -> str:
        return f"error {self._code}"


class Message:
    def __init__(self, partition: int, offset: int, error: int = 0) -> None:
        self._partition, self._offset, self._error = partition, offset, error

    def topic(self) -> str:
        return "t"

    def partition(self) -> int:
        return self._partition

    def offset(self) -> int:
        return self._offset

    def error(self) -> Error | None:
        return Error(self._error) if self._error else None

    def key(self) -> bytes | None:
        return None

    def value(self) -> bytes:
        return b"%d" % self._offset

    def timestamp(self) -> tuple[int, int]:
        return 1, 5

    def headers(self) -> None:
        return None

    def leader_epoch(self) -> int:
        return 3


class FakeConsumer:
    """librdkafka: returns the messages in `coming`; records its calls."""

    made: list[FakeConsumer] = []

    def __init__(self, config: dict[str, object]) -> None:
        self.config = config
        self.calls: list[tuple[object, ...]] = []
        self.coming: queue.Queue[list[Message]] = queue.Queue()
        self.closed = threading.Event()
        self.before_return: Callable[[], None] | None = None
        FakeConsumer.made.append(self)

    def consume(self, _count: int, timeout: float) -> list[Message]:
        try:
            found = self.coming.get(timeout=min(timeout, 0.005))
        except queue.Empty:
            return []
        if self.before_return is not None:
            self.before_return()
        return found

    def _note(self, name: str, partitions: list[object]) -> None:
        self.calls.append(
            (name, *((one.partition, one.offset) if name == "assign" else (one.partition,) for one in partitions))
        )

    def incremental_assign(self, partitions: list[object]) -> None:
        self._note("assign", partitions)

    def incremental_unassign(self, partitions: list[object]) -> None:
        self._note("unassign", partitions)

    def pause(self, partitions: list[object]) -> None:
        self._note("pause", partitions)

    def resume(self, partitions: list[object]) -> None:
        self._note("resume", partitions)

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteRecords]:
    monkeypatch.setattr(remote_reading.confluent_kafka, "Consumer", FakeConsumer)
    FakeConsumer.made = []
    given = {
        "bootstrap.servers": "a:1",
        "group.id": "g",
        "isolation.level": "read_committed",
        "error_cb": print,
        "enable.auto.commit": True,
        "client.rack": "r1",
        "session.timeout.ms": 9,
        "max.poll.interval.ms": 20,
    }
    made = RemoteRecords(Settings({}, given, None, None), 0)
    made.attach(lambda: None, SimpleNamespace(cluster=SimpleNamespace(brokers={7: ("b", 2)})))
    yield made
    made.close()
    assert all(one.closed.is_set() for one in FakeConsumer.made)


def consumer() -> FakeConsumer:
    return eventually(lambda: FakeConsumer.made)[0]


def offsets(reader: remote_reading.RemoteReader, count: int) -> list[int]:
    found: list[int] = []

    def read() -> bool:
        batch = reader.read(1000, 1 << 20)
        found.extend(batch.offsets.tolist() if batch is not None else ())
        return len(found) >= count

    eventually(read)
    return found


def test_its_configuration_is_the_applications_without_group_and_callbacks(records: RemoteRecords) -> None:
    records.open("t", 0, 5)
    config = consumer().config
    assert (
        config["bootstrap.servers"] == "a:1,b:2"
        and config["client.rack"] == "r1"
        and config["isolation.level"] == "read_uncommitted"
    )
    assert (
        config["enable.auto.commit"] is False
        and config["auto.offset.reset"] == "error"
        and "error_cb" not in config
        and "session.timeout.ms" not in config
        and "max.poll.interval.ms" not in config  # which librdkafka requires to be at least as long
    )


def test_records_in_order_and_the_end(records: RemoteRecords) -> None:
    one, other = records.open("t", 0, 5), records.open("t", 1, 0)
    eventually(lambda: len(consumer().calls) == 2)
    assert consumer().calls == [("assign", (0, 5)), ("assign", (1, 0))]
    assert one.lag_end() == -1
    consumer().coming.put([Message(0, 5), Message(1, 0), Message(0, 6), Message(0, 9, KafkaError._PARTITION_EOF)])
    assert offsets(one, 2) == [5, 6] and offsets(other, 1) == [0]
    assert one.lag_end() == 9 and other.lag_end() == -1
    assert one.read(10, 1) is None and one.position == 9  # after a transaction's markers
    consumer().coming.put([Message(0, 9)])
    assert offsets(one, 1) == [9] and one.lag_end() == -1


def test_messages_consumed_before_a_seek_are_dropped(records: RemoteRecords) -> None:
    """V1: the thread is handling the messages when the application seeks."""
    reader = records.open("t", 0, 100)
    eventually(lambda: consumer().calls)
    consumer().coming.put([Message(0, 100)])
    assert offsets(reader, 1) == [100]
    consumer().before_return = lambda: reader.seek(7)
    consumer().coming.put([Message(0, 101), Message(0, 102)])
    eventually(lambda: consumer().calls[-1:] == [("assign", (0, 7))])
    assert consumer().calls[-2] == ("unassign", (0,))
    consumer().before_return = None
    consumer().coming.put([Message(0, 7)])
    assert offsets(reader, 1) == [7] and reader.position == 8


def test_a_slow_reader_is_paused(records: RemoteRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_reading, "AHEAD_RECORDS", 10)
    reader = records.open("t", 0, 0)
    eventually(lambda: consumer().calls)
    consumer().coming.put([Message(0, offset) for offset in range(12)])
    eventually(lambda: consumer().calls[-1] == ("pause", (0,)))
    assert offsets(reader, 12) == list(range(12))
    eventually(lambda: consumer().calls[-1] == ("resume", (0,)))


@pytest.mark.parametrize(
    ("code", "kind", "reported"),
    [(KafkaError._AUTO_OFFSET_RESET, "range", 0), (1, "range", 0), (3, "gone", 3), (KafkaError._TRANSPORT, "gone", 6)],
)
def test_errors_of_a_partition(records: RemoteRecords, code: int, kind: str, reported: int) -> None:
    reader = records.open("t", 0, 0)
    eventually(lambda: consumer().calls)
    consumer().coming.put([Message(0, -1001, code)])
    problem = eventually(reader.take_problem)
    assert (problem.kind, problem.code) == (kind, reported) and reader.take_problem() is None


def test_closed_and_opened_again(records: RemoteRecords) -> None:
    first = records.open("t", 0, 0)
    eventually(lambda: consumer().calls)
    second = records.open("t", 0, 50)
    first.close()  # late: it takes nothing from the second
    eventually(lambda: ("assign", (0, 50)) in consumer().calls)
    consumer().coming.put([Message(0, 50)])
    assert offsets(second, 1) == [50] and first.read(10, 1) is None
    second.close()
    eventually(lambda: consumer().calls[-1] == ("unassign", (0,)))


def test_a_partition_that_was_paused_is_read_when_it_is_opened_again(
    records: RemoteRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    """librdkafka keeps the pause of a partition that is unassigned."""
    monkeypatch.setattr(remote_reading, "AHEAD_RECORDS", 10)
    reader = records.open("t", 0, 0)
    eventually(lambda: consumer().calls)
    consumer().coming.put([Message(0, offset) for offset in range(12)])
    eventually(lambda: consumer().calls[-1] == ("pause", (0,)))
    reader.close()
    records.open("t", 0, 0)
    eventually(lambda: consumer().calls[-1] == ("assign", (0, 0)))
    assert consumer().calls[2:] == [("resume", (0,)), ("unassign", (0,)), ("assign", (0, 0))]


def test_a_consumer_that_is_dropped_ends_the_thread(records: RemoteRecords) -> None:
    world = ConsumerWorld(5)
    world.consumer.remote = records
    records.attach(world.consumer._inbox.notify, world.consumer.control.metadata)
    records.open("t", 0, 0)
    eventually(lambda: consumer().calls)
    del world.consumer
    gc.collect()
    eventually(consumer().closed.is_set, seconds=10)


def test_the_thread_itself_may_collect_the_consumer(records: RemoteRecords) -> None:
    """At any time, even while it holds the lock."""
    records.open("t", 0, 0)

    def stop() -> None:
        with records.lock:
            records.stop()

    consumer().before_return = stop
    consumer().coming.put([Message(0, 0)])
    eventually(consumer().closed.is_set, seconds=10)


FAILED = ("gone", int(ErrorCode.UNKNOWN_SERVER_ERROR))


def failed(reader: remote_reading.RemoteReader) -> bool:
    problem = reader.take_problem()
    return problem is not None and problem[:2] == FAILED


def test_an_error_creating_librdkafka_is_reported_by_every_reader(
    records: RemoteRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, reported = threading.Event(), []

    def refuse(_config: dict[str, object]) -> FakeConsumer:
        assert opened.wait(PATIENCE_S)
        raise ValueError("no such setting")

    monkeypatch.setattr(remote_reading.confluent_kafka, "Consumer", refuse)
    records.attach(lambda: reported.append(True), None)
    readers = [records.open("t", partition, 0) for partition in range(2)]
    closed = records.open("t", 2, 0)
    closed.close()
    opened.set()
    eventually(lambda: reported)
    assert [failed(reader) for reader in readers] == [True, True] and closed.take_problem() is None
    reported.clear()
    later = records.open("t", 3, 0)
    readers[0].seek(7)
    assert failed(later) and failed(readers[0]) and len(reported) == 2
    later.close()


def test_an_error_assigning_a_partition_is_reported_by_every_reader(records: RemoteRecords) -> None:
    first = records.open("t", 0, 0)
    eventually(lambda: consumer().calls)
    both = threading.Event()
    assign = consumer().incremental_assign

    def refuse(partitions: list[object]) -> None:
        assert both.wait(PATIENCE_S)
        if partitions[0].partition == 1:  # type: ignore[attr-defined]
            raise ValueError("not this one")
        assign(partitions)

    consumer().incremental_assign = refuse  # type: ignore[method-assign]
    refused, behind = records.open("t", 1, 0), records.open("t", 2, 0)
    both.set()
    eventually(lambda: failed(behind))  # it is waiting, or was sent with the refused one
    assert failed(first) and failed(refused)
    eventually(consumer().closed.is_set)
