"""Shared helpers of the hostile-client and trap tests: requests in one line, a broker's counters
and memory. Connections are blocking and hide nothing (tests/kafka_connection.py).
"""

from __future__ import annotations

import contextlib
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from mqd.protocol.messages import (
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    FetchRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    MetadataRequest,
    ProduceRequest,
)
from mqd.protocol.records import Record, encode_batch, iterate_batches
from mqd.shm.tools import KeeperConnection
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S, eventually

PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS, CREATE_TOPICS, DELETE_TOPICS, DELETE_RECORDS, INIT_PRODUCER_ID = (
    0,
    1,
    2,
    3,
    18,
    19,
    20,
    21,
    22,
)
PRODUCE_VERSION, FETCH_VERSION = 9, 12  # the newest versions that identify topics by name
(
    CORRUPT_MESSAGE,
    UNKNOWN_TOPIC,
    NOT_LEADER,
    TIMED_OUT,
    TOO_LARGE,
    UNSUPPORTED_FOR_MESSAGE_FORMAT,
    STORAGE_ERROR,
    INVALID_RECORD,
    UNKNOWN_TOPIC_ID,
) = (2, 3, 6, 7, 10, 43, 56, 87, 100)
_OF_A_WORKER = re.compile(r'^(mqd_\w+)\{worker="(\d+)"\} (\S+)$', re.MULTILINE)


# -- requests --------------------------------------------------------------------------------------


def batch(
    *values: bytes, producer_id: int = -1, producer_epoch: int = -1, base_sequence: int = -1, compression: str = "none"
) -> bytes:
    now_ms = int(time.time() * 1000)
    records = [Record(value=value, timestamp_ms=now_ms) for value in values]
    return encode_batch(
        records,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        compression=compression,
    )


def produce_request(
    topic: str,
    partitions: dict[int, bytes | None],
    acks: int = -1,
    timeout_ms: int = 30_000,
    topic_id: bytes = bytes(16),
) -> ProduceRequest:
    data = [ProduceRequest.PartitionData(index=index, records=records) for index, records in partitions.items()]
    return ProduceRequest(
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[ProduceRequest.TopicData(name=topic, topic_id=topic_id, partition_data=data)],
    )


def send_produce(
    kafka: KafkaConnection,
    topic: str,
    partition: int,
    records: bytes,
    acks: int = -1,
    timeout_ms: int = 30_000,
    version: int = PRODUCE_VERSION,
) -> int:
    return kafka.send(
        PRODUCE, version, produce_request(topic, {partition: records}, acks, timeout_ms), expect_response=acks != 0
    )


def one_outcome(body):
    """The only partition of a Produce or Fetch response."""
    (topic,) = body.responses
    (partition,) = topic.partition_responses if hasattr(topic, "partition_responses") else topic.partitions
    return partition


def produce(
    kafka: KafkaConnection,
    topic: str,
    partition: int,
    records: bytes,
    acks: int = -1,
    timeout_ms: int = 30_000,
    version: int = PRODUCE_VERSION,
):
    """Returns the partition's outcome."""
    send_produce(kafka, topic, partition, records, acks, timeout_ms, version)
    return one_outcome(kafka.receive().body)


def must_produce(kafka: KafkaConnection, topic: str, partition: int, *values: bytes) -> int:
    """Returns the base offset."""
    outcome = produce(kafka, topic, partition, batch(*values))
    assert outcome.error_code == 0, outcome
    return outcome.base_offset


def fetch_request(
    topic: str,
    offsets: dict[int, int],
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    bytes_max: int = 1 << 20,
    topic_id: bytes = bytes(16),
) -> FetchRequest:
    partitions = [
        FetchRequest.Partition(partition=index, fetch_offset=offset, partition_max_bytes=bytes_max)
        for index, offset in offsets.items()
    ]
    topics = [FetchRequest.Topic(topic=topic, topic_id=topic_id, partitions=partitions)]
    return FetchRequest(max_wait_ms=max_wait_ms, min_bytes=min_bytes, max_bytes=50 << 20, topics=topics)


def fetch(kafka: KafkaConnection, topic: str, partition: int, offset: int, **options):
    """Returns the partition's outcome."""
    return one_outcome(kafka.call(FETCH, FETCH_VERSION, fetch_request(topic, {partition: offset}, **options)))


def read_batches(kafka: KafkaConnection, topic: str, partition: int, offset: int = 0) -> Iterator[bytes]:
    """Every whole batch from `offset` to the high watermark, as stored."""
    while True:
        outcome = fetch(kafka, topic, partition, offset)
        assert outcome.error_code == 0, outcome
        if offset >= outcome.high_watermark:
            return
        before = offset
        for header, data in iterate_batches(outcome.records, allow_partial=True):
            yield bytes(data)
            offset = header.last_offset + 1
        assert offset > before, f"nothing at offset {before} below the high watermark {outcome.high_watermark}"


def create_topic(kafka: KafkaConnection, name: str, partitions: int = 1, **configs: str) -> bytes:
    """Returns the topic id. Config names have _ instead of the dot."""
    settings = [CreateTopicsRequest.Config(name=key.replace("_", "."), value=value) for key, value in configs.items()]
    topic = CreateTopicsRequest.Topic(name=name, num_partitions=partitions, replication_factor=1, configs=settings)
    (result,) = kafka.call(CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic], timeout_ms=30_000)).topics
    assert result.error_code == 0, result
    return result.topic_id


def delete_topic(kafka: KafkaConnection, name: str) -> None:
    (result,) = kafka.call(
        DELETE_TOPICS, 6, DeleteTopicsRequest(topics=[DeleteTopicsRequest.TopicState(name=name)], timeout_ms=30_000)
    ).responses
    assert result.error_code == 0, result


def delete_records(kafka: KafkaConnection, topic: str, partition: int, offset: int) -> int:
    """The new log start offset."""
    expected = DeleteRecordsRequest.Topic(
        name=topic, partitions=[DeleteRecordsRequest.Partition(partition_index=partition, offset=offset)]
    )
    (result,) = kafka.call(DELETE_RECORDS, 2, DeleteRecordsRequest(topics=[expected], timeout_ms=30_000)).topics
    (outcome,) = result.partitions
    assert outcome.error_code == 0, outcome
    return outcome.low_watermark


def log_end(kafka: KafkaConnection, topic: str, partition: int) -> int:
    requested = ListOffsetsRequest.Topic(
        name=topic, partitions=[ListOffsetsRequest.Partition(partition_index=partition, timestamp=-1)]
    )
    (result,) = kafka.call(LIST_OFFSETS, 5, ListOffsetsRequest(topics=[requested])).topics
    assert result.partitions[0].error_code == 0, result
    return result.partitions[0].offset


def new_producer_id(kafka: KafkaConnection) -> tuple[int, int]:
    response = kafka.call(INIT_PRODUCER_ID, 4, InitProducerIdRequest(transaction_timeout_ms=60_000))
    assert response.error_code == 0, response
    return response.producer_id, response.producer_epoch


def topic_name(test_name: str) -> str:
    """A name that no other test uses."""
    return re.sub(r"[^a-z0-9]+", "-", test_name.lower())[-100:]


def topic_names(kafka: KafkaConnection) -> set[str]:
    return {topic.name for topic in kafka.call(METADATA, 9, MetadataRequest(topics=None)).topics}


# -- a broker seen from outside ------------------------------------------------------------------


class Watch:
    """Counters, memory and files of a broker's processes."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        with KeeperConnection(broker.data_dir) as tool:
            self.metrics_port = tool.status().metrics_port

    def connect(self, timeout_s: float = PATIENCE_S) -> KafkaConnection:
        return KafkaConnection("127.0.0.1", self.broker.port, timeout_s=timeout_s)

    def counters(self) -> dict[str, dict[str, float]]:
        """name -> worker -> value; without mqd_ and _total."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=PATIENCE_S) as response:
            text = response.read().decode()
        found: dict[str, dict[str, float]] = {}
        # a parser of the whole text takes ten times as long, and this is called thousands of times
        for name, worker, value in _OF_A_WORKER.findall(text):
            found.setdefault(name.removeprefix("mqd_").removesuffix("_total"), {})[worker] = float(value)
        return found

    def total(self, name: str) -> int:
        return int(sum(self.counters()[name].values()))

    def worker_pids(self) -> list[int]:
        """The pids of running workers, in order."""
        with KeeperConnection(self.broker.data_dir) as tool:
            return [
                process.pid
                for process in sorted(tool.status().processes, key=lambda process: process.name)
                if process.role == "worker" and process.pid is not None
            ]

    def worker_rss_bytes(self) -> int:
        """Resident memory of all workers, shared pages of the arenas included."""
        return sum(rss_bytes(pid) for pid in self.worker_pids())

    def worker_of(self, kafka: KafkaConnection) -> int:
        """The worker that serves this connection, found by its receive counter. No other client may
        send meanwhile.
        """
        before = self.counters()["bytes_in"]
        for _ in range(20):
            kafka.call(API_VERSIONS, 0)
        grown = {worker: value - before[worker] for worker, value in self.counters()["bytes_in"].items()}
        return int(max(grown, key=grown.__getitem__))

    @contextlib.contextmanager
    def connection_to_each_worker(self, timeout_s: float = PATIENCE_S) -> Iterator[list[KafkaConnection]]:
        """One connection to each worker, in order."""
        opened: list[KafkaConnection] = []
        by_worker: dict[int, KafkaConnection] = {}
        try:
            while len(by_worker) < self.broker.workers:
                assert len(opened) < 32, f"32 connections reached only workers {sorted(by_worker)}"
                opened.append(self.connect(timeout_s))
                by_worker.setdefault(self.worker_of(opened[-1]), opened[-1])
            yield [by_worker[worker] for worker in sorted(by_worker)]
        finally:
            for kafka in opened:
                kafka.close()

    def owner_of(self, connections: list[KafkaConnection], topic: str, partition: int) -> int:
        """The worker that owns the partition: its connection forwards nothing. Writes one record
        through each connection.
        """
        owners = []
        for worker, kafka in enumerate(connections):
            before = self.total("batches_forwarded")
            must_produce(kafka, topic, partition, b"who owns this")
            if self.total("batches_forwarded") == before:
                owners.append(worker)
        assert len(owners) == 1, f"{topic}-{partition} is owned by {owners}"
        return owners[0]

    def wait_quiet(self, connections: int = 0) -> None:
        """Waits until there are at most `connections`, and the arena is empty except for each
        worker's receive window.
        """

        def quiet() -> bool:
            counters = self.counters()
            return sum(counters["connections"].values()) <= connections and all(
                used <= 1 for used in counters["arena_extents_used"].values()
            )

        def seen() -> str:
            counters = self.counters()
            return (
                f"connections {counters['connections']} (at most {connections}), extents"
                f" {counters['arena_extents_used']}"
            )

        eventually(quiet, seen)

    def worker_log(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")
            for path in sorted((self.broker.data_dir / "logs").glob("mqd-worker-*.log"))
        )

    def wait_logged(self, *parts: str, logs: str = "*.log") -> str:
        """The newest line of the broker's logs that contains all parts."""

        def look() -> str:
            for path in (self.broker.data_dir / "logs").glob(logs):
                for line in reversed(path.read_text(errors="replace").splitlines()):
                    if all(part in line for part in parts):
                        return line
            return ""

        return eventually(look, lambda: f"a log line with {parts}\n{self.broker.logs()}")


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no memory: it ended")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def deleted_files_open(pid: int) -> list[str]:
    """Files below a log directory that are deleted but still held."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(descriptor.readlink())
            if target.endswith("(deleted)") and any(
                kind in target for kind in (".log", ".index", ".timeindex", ".snapshot")
            ):
                found.append(target)
    return found


def allocated_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file():
                total += path.stat().st_blocks * 512
    return total
