"""One partition's timer on a log in memory: what it delivers when schedule.delay.ms has changed,
which records it keeps in memory, and how it ends.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqd.base.schedule_files import ScheduleTopic
from mqd.client.messages import Message, TopicPartition
from mqd.client.record_batch import RecordBatchView
from mqd.timer import partition
from mqd.timer.partition import PartitionTimer
from tests.polling import PATIENCE_S

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
NOON = 20_000 * DAY + 12 * HOUR
IDLE_COUNT = 3  # fruitless reads after which a timer is stopped


class Log:
    """A schedule's partition, the progress of its group, and what was delivered."""

    def __init__(self) -> None:
        self.now_ms = NOON
        self.start = 0
        self.records: list[Message] = []
        self.committed = TopicPartition("later", 0, -1001)
        self.delivered: list[str] = []
        self.kept: dict[int, Any] = {}
        self.is_full = False  # the producer's queue
        self.poll_count = 0

    def write(self, value: str, **headers: int) -> int:
        """Returns the record's offset."""
        named = [(name.replace("_", "-"), b"%d" % number) for name, number in headers.items()]
        offset = len(self.records)
        stamp = 1, self.now_ms
        self.records.append(Message("later", 0, offset, None, value.encode(), named, None, stamp, None, 0))
        return offset

    def serve(self, data_dir: Path, delay_ms: int, at_ms: int) -> list[str]:
        """Runs a timer on a host until it has nothing to do. Returns all values delivered so far."""
        self.now_ms = at_ms
        topic = ScheduleTopic("later", b"t" * 16, "orders", delay_ms, {0: 1})
        self.timer = PartitionTimer(topic, 0, Path("unused"), data_dir, 1 << 20)
        self.idle = 0
        self.timer.start()
        assert self.timer.join(PATIENCE_S)
        return self.delivered


class Consumer:
    def __init__(self, log: Log) -> None:
        self._log, self._at = log, 0
        self._implementation = self

    def consumer_group_metadata(self) -> object:
        return None

    def committed(self, _: object, timeout: float) -> list[TopicPartition]:
        return [self._log.committed]

    def get_watermark_offsets(self, _: object, timeout: float) -> tuple[int, int]:
        return self._log.start, len(self._log.records)

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._at = partitions[0].offset

    def seek(self, to: TopicPartition) -> None:
        self._at = to.offset

    def consume_batch(self, count_max: int, wait_s: float) -> RecordBatchView | None:
        found = self._log.records[max(self._at, self._log.start) :][:count_max]
        if not found:
            self._log.idle += 1
            if self._log.idle == IDLE_COUNT:
                self._log.timer.stop()
            return None
        self._at = found[-1].offset() + 1
        return RecordBatchView.from_messages("later", 0, found)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class Producer:
    def __init__(self, log: Log) -> None:
        self._log = log
        self._sent: list[str] = []

    def init_transactions(self, timeout: float) -> None:
        pass

    def begin_transaction(self) -> None:
        self._sent = []

    def produce(self, topic: str, value: bytes, key: bytes | None, headers: object) -> None:
        if self._log.is_full:
            self._log.timer.stop()
            raise BufferError
        self._sent.append(value.decode())

    def poll(self, timeout: float) -> None:
        self._log.poll_count += 1
        self._log.is_full = self._log.poll_count < 10

    def send_offsets_to_transaction(self, positions: list[TopicPartition], group: object, timeout: float) -> None:
        self._position = positions[0]

    def commit_transaction(self, timeout: float) -> None:
        self._log.delivered += self._sent
        self._log.committed = self._position

    def broker_request(self, api: int, request: Any, timeout: float) -> object:
        self._log.start = request.topics[0].partitions[0].offset
        return SimpleNamespace(topics=[SimpleNamespace(partitions=[SimpleNamespace(error_code=0)])])

    def close(self) -> None:
        self._log.kept = dict(self._log.timer._kept)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found = Log()
    monkeypatch.setattr(partition, "Consumer", lambda config: Consumer(found))
    monkeypatch.setattr(partition, "Producer", lambda config: Producer(found))
    monkeypatch.setattr(partition, "_now_ms", lambda: found.now_ms)
    for name in ("COMMIT_S", "SAVE_S", "TRIM_S"):
        monkeypatch.setattr(partition, name, 0)
    return found


def test_a_pending_record_is_not_lost_when_the_delay_is_shortened(log: Log, tmp_path: Path) -> None:
    log.write("first")
    log.now_ms += 50 * MINUTE
    log.write("second")
    assert log.serve(tmp_path / "one", HOUR, NOON + 61 * MINUTE) == ["first"]
    log.write("third")
    assert log.serve(tmp_path / "two", 5 * MINUTE, NOON + 65 * MINUTE) == ["first"]
    assert log.serve(tmp_path / "two", 5 * MINUTE, NOON + 66 * MINUTE) == ["first", "third"]
    assert log.serve(tmp_path / "one", 5 * MINUTE, NOON + 109 * MINUTE) == ["first", "third"]
    assert log.serve(tmp_path / "one", 5 * MINUTE, NOON + 110 * MINUTE) == ["first", "third", "second"]


def test_a_delivered_record_is_not_delivered_again_when_the_delay_is_lengthened(log: Log, tmp_path: Path) -> None:
    log.write("pending", mqd_delay_ms=DAY)  # it holds the log's start
    log.write("first")
    assert log.serve(tmp_path / "one", 5 * MINUTE, NOON + 5 * MINUTE) == ["first"]
    log.write("second")
    assert log.serve(tmp_path / "two", HOUR, NOON + 64 * MINUTE) == ["first"]
    assert log.serve(tmp_path / "two", HOUR, NOON + 65 * MINUTE) == ["first", "second"]
    assert log.serve(tmp_path / "one", MINUTE, NOON + DAY) == ["first", "second", "pending"]


def test_a_record_can_be_cancelled_after_the_delay_has_changed(log: Log, tmp_path: Path) -> None:
    cancelled = log.write("cancelled")
    assert log.serve(tmp_path, HOUR, NOON) == []
    log.write("cancellation", mqd_cancel=cancelled)
    assert log.serve(tmp_path, 3 * DAY, NOON + MINUTE) == []
    assert log.serve(tmp_path, 3 * DAY, NOON + 4 * DAY) == []


def test_delivered_records_are_not_kept_when_the_log_is_read_again(log: Log, tmp_path: Path) -> None:
    log.write("pending", mqd_delay_ms=DAY)  # it holds the log's start
    log.write("delivered")
    assert log.serve(tmp_path / "one", 0, NOON) == ["delivered"]
    soon = log.write("soon", mqd_delay_ms=2 * MINUTE)
    assert log.serve(tmp_path / "two", 0, NOON + MINUTE + 1) == ["delivered"]
    assert list(log.kept) == [soon]


def test_a_timer_that_is_stopped_does_not_wait_for_its_target(log: Log, tmp_path: Path) -> None:
    """Its successor waits for it, maybe with another target."""
    log.write("due")
    log.is_full = True
    assert log.serve(tmp_path, 0, NOON) == []
    log.is_full = False
    assert log.serve(tmp_path, 0, NOON) == ["due"]
