"""Compacted topics on a real broker: the last value of each key stays, despite concurrent reads,
kills, deletions or damage.
"""

from __future__ import annotations

import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from mqd.log import compaction_report
from mqd.protocol.records import Record, decode_records, encode_batch
from tests.broker import Broker
from tests.broker_files import bytes_of
from tests.crash.processes import kill_and_wait
from tests.interaction.traffic import create_topic, delete_records, delete_topic, eventually, fetch, log_end, produce
from tests.kafka_connection import ConnectionEnded, KafkaConnection

SEGMENT_BYTES = 8192
CONFIG = {"log.cleaner.backoff.ms": "50", "log.retention.check.interval.ms": "200"}
COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": str(SEGMENT_BYTES),
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
    "index.interval.bytes": "512",
}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
KEYS = 40


class Writer:
    """Writes random keys and remembers the last value of each. A batch whose response was lost is
    written again: the same records, so the same last values.
    """

    def __init__(self, port: int, topic: str, seed: int, partition: int = 0, codecs: tuple[str, ...] = CODECS):
        self.port, self.topic, self.partition = port, topic, partition
        self.last: dict[bytes, bytes | None] = {}
        self._random = random.Random(seed)
        self._codecs = codecs
        self._counter = 0

    def write(self, count: int) -> None:
        for _ in range(count):
            records = []
            for _ in range(self._random.randrange(1, 12)):
                key = b"key-%d" % self._random.randrange(KEYS)
                self._counter += 1
                value = (
                    None if self._random.random() < 0.1 else b"%d:" % self._counter + bytes(self._random.randrange(200))
                )
                records.append(
                    Record(value, key, timestamp_ms=time.time_ns() // 10**6, headers=[("n", b"%d" % self._counter)])
                )
                self.last[key] = value
            self._send(encode_batch(records, compression=self._random.choice(self._codecs)))

    def _send(self, batch: bytes) -> None:
        def sent() -> bool:
            try:
                with KafkaConnection(port=self.port) as kafka:
                    return produce(kafka, self.topic, self.partition, batch).error_code == 0
            except (ConnectionEnded, OSError):
                return False

        eventually(sent, "an answer to a Produce")

    @property
    def expected(self) -> dict[bytes, bytes]:
        return {key: value for key, value in self.last.items() if value is not None}


class Reader(threading.Thread):
    """Reads from the beginning, repeatedly; offsets must rise, and the records read must lead to
    the last values.
    """

    def __init__(self, port: int, topic: str):
        super().__init__(daemon=True)
        self.port, self.topic = port, topic
        self.problems: list[str] = []
        self.rounds = 0
        self.ending = threading.Event()

    def run(self) -> None:
        while not self.ending.is_set():
            try:
                with KafkaConnection(port=self.port) as kafka:
                    view(kafka, self.topic, problems=self.problems)
                self.rounds += 1
            except (ConnectionEnded, OSError):
                self.ending.wait(0.05)


def view(
    kafka: KafkaConnection, topic: str, partition: int = 0, problems: list[str] | None = None, bytes_max: int = 3000
) -> dict[bytes, bytes]:
    """The last value of each key, as a consumer reads it from the beginning to the end of the log."""
    found: dict[bytes, bytes] = {}
    problems = problems if problems is not None else []
    end, offset, last, empty = log_end(kafka, topic, partition), 0, -1, 0
    while offset < end:
        data = fetch(kafka, topic, partition, offset, bytes_max=bytes_max)
        if data.error_code in (6, 56, 5):  # restarting
            time.sleep(0.02)
            continue
        assert data.error_code == 0, data.error_code
        before = offset
        for header_offset, record in _records(bytes(data.records or b"")):
            offset = max(offset, header_offset)
            if record is None or record.offset < before:
                continue
            if record.offset <= last:
                problems.append(f"{topic}: offset {record.offset} after {last}")
            last = record.offset
            if record.value is None:
                found.pop(record.key, None)
            else:
                found[record.key] = record.value
        empty = empty + 1 if offset == before else 0
        assert empty < 200, f"no progress at {offset} of {end}"
    return found


def _records(data: bytes) -> Iterator[tuple[int, Record | None]]:
    """(offset after the batch, record), including batches without records."""
    from mqd.protocol.records import iterate_batches

    for header, batch in iterate_batches(data, allow_partial=True):
        for record in decode_records(batch):
            yield 0, record
        yield header.last_offset + 1, None


def runs(broker: Broker, topic: str) -> int:
    return sum(
        one.runs
        for worker in range(broker.workers)
        for one in compaction_report.read(broker.data_dir / "run", worker).partitions
        if one.topic == topic
    )


def uncleanable(broker: Broker) -> dict[tuple[str, int], str]:
    reports = [compaction_report.read(broker.data_dir / "run", worker) for worker in range(broker.workers)]
    return {
        (one.topic, one.partition): one.uncleanable
        for report in reports
        for one in report.partitions
        if one.uncleanable
    }


def worker_logs(broker: Broker) -> str:
    return "".join(path.read_text() for path in (broker.data_dir / "logs").glob("mqd-worker-*.log"))


def sealed_bytes(broker: Broker, topic: str, partition: int = 0) -> int:
    logs = sorted((broker.data_dir / "log" / f"{topic}-{partition}").glob("*.log"))
    return bytes_of(logs[:-1])


@contextmanager
def readers(broker: Broker, topic: str, count: int = 2) -> Iterator[list[Reader]]:
    threads = [Reader(broker.port, topic) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.ending.set()
        for thread in threads:
            thread.join(30)
    assert not [problem for thread in threads for problem in thread.problems]
    assert all(thread.rounds for thread in threads)


def wait_compacted(broker: Broker, topic: str, bytes_max: int = 4 * SEGMENT_BYTES) -> None:
    eventually(
        lambda: sealed_bytes(broker, topic) <= bytes_max and runs(broker, topic),
        lambda: f"{sealed_bytes(broker, topic)} bytes are sealed\n{broker.logs()}",
    )


def test_the_last_value_of_each_key_stays(start_broker, io_backend) -> None:
    broker = start_broker(workers=2, config={**CONFIG, "io.backend": io_backend})
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t", 1, **COMPACT)
        writer = Writer(broker.port, "t", 1)
        with readers(broker, "t"):
            for _ in range(12):
                writer.write(40)
                assert view(kafka, "t") == writer.expected
            wait_compacted(broker, "t")
        assert view(kafka, "t") == writer.expected
        end = log_end(kafka, "t", 0)
    broker.stop()
    broker.start()
    with KafkaConnection(port=broker.port) as kafka:
        assert view(kafka, "t") == writer.expected and log_end(kafka, "t", 0) == end
        writer.write(100)
        assert view(kafka, "t") == writer.expected


def test_kills_in_the_middle_lose_nothing(start_broker) -> None:
    broker = start_broker(workers=1, config=CONFIG)
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t", 1, **COMPACT)
    writer = Writer(broker.port, "t", 2)
    chance = random.Random(2)
    for _ in range(6):
        writer.write(80)
        time.sleep(chance.uniform(0, 0.15))  # at an arbitrary moment of a compaction
        kill_and_wait(broker, "mqd-worker-0")
        with KafkaConnection(port=broker.port) as kafka:
            eventually(lambda: fetch(kafka, "t", 0, 0).error_code in (0, 1), "the worker's return")
            assert view(kafka, "t") == writer.expected
    writer.write(40)
    wait_compacted(broker, "t")
    with KafkaConnection(port=broker.port) as kafka:
        assert view(kafka, "t") == writer.expected


def test_a_topic_deleted_during_compaction_and_created_again(start_broker) -> None:
    broker = start_broker(workers=1, config={**CONFIG, "log.cleaner.io.max.bytes.per.second": "65536"})
    with KafkaConnection(port=broker.port) as kafka:
        for turn in range(3):
            create_topic(kafka, "t", 1, **COMPACT)
            writer = Writer(broker.port, "t", turn)
            writer.write(60)
            assert view(kafka, "t") == writer.expected
            delete_topic(kafka, "t")
        create_topic(kafka, "t", 1, **COMPACT)
        assert log_end(kafka, "t", 0) == 0
    assert "Traceback" not in worker_logs(broker)


def test_compaction_beside_deletion_and_retention(start_broker) -> None:
    broker = start_broker(workers=1, config=CONFIG)
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(
            kafka, "t", 1, **{**COMPACT, "cleanup.policy": "compact,delete", "retention.bytes": str(6 * SEGMENT_BYTES)}
        )
        writer = Writer(broker.port, "t", 3)
        start = 0

        def keep_writing() -> bool:
            """A compaction that a deletion has overtaken is repeated: writes until three have
            completed.
            """
            nonlocal start
            writer.write(30)
            start = delete_records(kafka, "t", 0, max(start, log_end(kafka, "t", 0) - 300))
            return runs(broker, "t") >= 3

        for _ in range(20):
            keep_writing()
        eventually(keep_writing, lambda: broker.logs())
        found = {
            record.offset: record
            for offset in (start,)
            for _, record in _records(bytes(fetch(kafka, "t", 0, log_end(kafka, "t", 0) - 1).records))
            if record
        }
        assert found
    assert "Traceback" not in worker_logs(broker) and "compaction failed" not in worker_logs(broker)


def test_a_damaged_log_is_reported_and_left_unchanged(start_broker) -> None:
    broker = start_broker(workers=1, config={**CONFIG, "log.cleaner.backoff.ms": "300"})
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "bad", 1, **{**COMPACT, "cleanup.policy": "delete"})
        create_topic(kafka, "good", 1, **COMPACT)
        bad, good = Writer(broker.port, "bad", 4, codecs=("none",)), Writer(broker.port, "good", 5)
        bad.write(60)
        segment = sorted((broker.data_dir / "log" / "bad-0").glob("*.log"))[1]
        data = bytearray(segment.read_bytes())
        data[700] ^= 1
        with open(segment, "r+b") as file:  # the same file: it is open in the broker
            file.write(data)
        alter(kafka, "bad", "cleanup.policy", "compact")
        good.write(200)
        eventually(lambda: ("bad", 0) in uncleanable(broker), lambda: broker.logs())
        with urllib.request.urlopen(
            f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=60
        ) as response:
            assert 'mqd_compaction_uncleanable{partition="0",topic="bad"} 1.0' in response.read().decode()
        assert "CRC" in uncleanable(broker)["bad", 0] and segment.name in uncleanable(broker)["bad", 0]
        assert segment.read_bytes() == bytes(data)
        wait_compacted(broker, "good")
        assert view(kafka, "good") == good.expected
        lines = [line for line in worker_logs(broker).splitlines() if "cannot be compacted" in line]
        assert len(lines) == 1 and "partition=bad-0" in lines[0]


def alter(kafka: KafkaConnection, topic: str, name: str, value: str) -> None:
    from mqd.protocol.messages import IncrementalAlterConfigsRequest as Request

    change = Request.Resource(
        resource_type=2, resource_name=topic, configs=[Request.Config(name=name, config_operation=0, value=value)]
    )
    response = kafka.call(44, 1, Request(resources=[change], validate_only=False))
    assert response.responses[0].error_code == 0, response
