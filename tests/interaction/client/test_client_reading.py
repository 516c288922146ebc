"""Readers of mapped segments while the broker changes its logs: rolls, compaction, deletion,
transactions, the death of its worker.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from mqd.client.offsets import positions_request, read_positions
from mqd.client.record_batch import RecordBatchView
from mqd.client.shm.reading import PartitionReader
from mqd.native import NativeError
from mqd.native.client import Client
from mqd.protocol.api import decode_response, encode_request
from tests.broker import Broker
from tests.crash.processes import kill_and_wait
from tests.interaction.log.test_compaction import COMPACT, Writer, runs
from tests.interaction.traffic import (
    batch,
    create_topic,
    delete_records,
    delete_topic,
    eventually,
    must_produce,
    produce,
    topic_name,
)
from tests.interaction.transactional import fresh
from tests.kafka_connection import KafkaConnection

CONFIG = {"log.cleaner.backoff.ms": "50", "log.retention.check.interval.ms": "200", "log.segment.delete.delay.ms": "0"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
FETCH = 1


@pytest.fixture(scope="module")
def broker(io_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp(f"client-reading-{io_backend}"),
        config={**CONFIG, "io.backend": io_backend, "log.flush.on.ack": "false"},
    ) as broker:
        yield broker


@pytest.fixture
def kafka(broker: Broker) -> Iterator[KafkaConnection]:
    with KafkaConnection(port=broker.port) as connection:
        yield connection


def attach(broker: Broker) -> Client:
    return Client(broker.data_dir / "run" / "client.sock", "reading", timeout_ms=60_000)


@pytest.fixture
def client(broker: Broker) -> Iterator[Client]:
    client = attach(broker)
    yield client
    client.close()


def drain(reader: PartitionReader, records_max: int = 10_000) -> list[RecordBatchView]:
    found = []
    while (view := reader.read(records_max)) is not None:
        found.append(view)
    return found


def values(views: list[RecordBatchView]) -> list[bytes | None]:
    return [value for view in views for value in view.values.to_list()]


def positions(client: Client, reader: PartitionReader, topic_id: bytes, max_wait_ms: int = 0):
    """The response to a Fetch for positions only, for partition 0."""
    request = positions_request([(topic_id, 0, reader.position)], 1, max_wait_ms, "")
    assert client.submit(encode_request(request, 13, 5, "reading"))
    client.flush()
    deadline = time.monotonic() + 60
    while (frame := client.next_response()) is None:
        assert time.monotonic() < deadline and client.wait(1_000_000) >= 0
        client.poll()
    (one,) = read_positions(decode_response(frame, FETCH, 13)[1])
    assert one[2].error_code == 0 and not one[2].records
    return one[2]


def test_follows_through_rolls_and_codecs(broker: Broker, kafka: KafkaConnection, client: Client, request) -> None:
    topic = topic_name(request.node.name)
    topic_id = create_topic(kafka, topic, 1, segment_bytes="16384")
    reader = PartitionReader(client, topic, topic_id, 0, 0)
    assert (
        reader.read() is None
        and reader.take_problem() is None
        and (reader.lag_end(), reader.log_start(), reader.lag()) == (0, 0, 0)
    )
    written: list[bytes | None] = []
    found: list[bytes | None] = []
    for round_number in range(40):
        for codec in CODECS:
            some = [b"%d.%s.%d." % (round_number, codec.encode(), i) + bytes(40) for i in range(17)]
            assert produce(kafka, topic, 0, batch(*some, compression=codec)).error_code == 0
            written += some
        if round_number % 3 == 0:
            assert reader.lag() == len(written) - reader.position
            found += values(drain(reader, 5 + round_number))
            assert found == written and reader.lag() == 0
    assert values(drain(PartitionReader(client, topic, topic_id, 0, 0))) == written
    assert values(drain(PartitionReader(client, topic, topic_id, 0, 1234))) == written[1234:]
    assert len(list((broker.data_dir / "log" / f"{topic}-0").glob("*.log"))) > 3


def test_deleted_records_under_a_view(broker: Broker, kafka: KafkaConnection, client: Client, request) -> None:
    topic = topic_name(request.node.name)
    topic_id = create_topic(kafka, topic, 1, segment_bytes="16384")
    for i in range(60):
        must_produce(kafka, topic, 0, *(b"%d " % i + bytes(100) for _ in range(10)))
    reader = PartitionReader(client, topic, topic_id, 0, 0)
    held = reader.read(50)
    directory = broker.data_dir / "log" / f"{topic}-0"
    files = set(directory.glob("*.log"))
    assert delete_records(kafka, topic, 0, 590) == 590
    eventually(lambda: len(set(directory.glob("*.log")) & files) == 1, "the old segments' end")
    assert reader.read(50) is None
    assert reader.take_problem().kind == "range" and reader.log_start() == 590
    assert [value[:2] for value in held.values] == [b"%d " % (i // 10) for i in range(50)]
    reader.seek(590)
    assert len(values(drain(reader))) == 10
    reader.seek(601)
    assert reader.read() is None and reader.take_problem().kind == "range"


def test_compaction_under_a_reader(broker: Broker, kafka: KafkaConnection, client: Client, request) -> None:
    """A reader sees rising offsets while segments are replaced, and has the last values in the end."""
    topic = topic_name(request.node.name)
    topic_id = create_topic(kafka, topic, 1, **COMPACT)
    writer = Writer(broker.port, topic, 5)
    reader = PartitionReader(client, topic, topic_id, 0, 0)
    found: dict[bytes, bytes | None] = {}
    last, held = -1, []

    def take(views: list[RecordBatchView]) -> None:
        nonlocal last
        for view in views:
            for offset, _, key, value in view.records():
                assert offset > last
                last, found[key] = offset, value

    for _ in range(10):
        writer.write(40)
        views = []
        for _ in range(3):
            if (view := reader.read(20, 1)) is not None:
                views.append(view)
                held.append((view, [bytes(one) if one is not None else None for one in view.values.views()]))
        take(views)
    eventually(lambda: runs(broker, topic) >= 2, "compaction")
    take(drain(reader))
    assert {key: value for key, value in found.items() if value is not None} == writer.expected
    for view, copied in held:
        assert view.values.to_list() == copied
    again: dict[bytes, bytes | None] = {}
    for view in drain(PartitionReader(client, topic, topic_id, 0, 0)):
        again.update({key: value for _, _, key, value in view.records()})
    assert {key: value for key, value in again.items() if value is not None} == writer.expected


def test_a_topic_deleted_and_created_again_with_the_same_name(
    broker: Broker, kafka: KafkaConnection, client: Client, request
) -> None:
    topic = topic_name(request.node.name)
    old_id = create_topic(kafka, topic)
    must_produce(kafka, topic, 0, b"old", b"older")
    reader = PartitionReader(client, topic, old_id, 0, 0)
    held = reader.read(1)
    delete_topic(kafka, topic)
    new_id = create_topic(kafka, topic)
    must_produce(kafka, topic, 0, b"new")

    def gone() -> bool:
        assert reader.read() is None or reader.position == 2
        problem = reader.take_problem()
        return problem is not None and problem.kind == "gone" and problem.code in (3, 100)

    eventually(gone, "the broker's word that the topic is gone")
    assert held.values.to_list() == [b"old"] and reader.lag_end() == -1
    assert values(drain(PartitionReader(client, topic, new_id, 0, 0))) == [b"new"]
    stranger = PartitionReader(client, topic, bytes(15) + b"\1", 0, 0)
    assert stranger.read() is None and stranger.take_problem().code == 100
    beyond = PartitionReader(client, topic, new_id, 7, 0)
    assert beyond.read() is None and beyond.take_problem().code == 3


def test_committed_and_aborted_transactions(broker: Broker, kafka: KafkaConnection, client: Client) -> None:
    topic = fresh("reading")
    topic_id = create_topic(kafka, topic)
    uncommitted, committed = (PartitionReader(client, topic, topic_id, 0, 0, isolation_level=level) for level in (0, 1))
    expected: list[bytes] = []
    producers = [
        confluent_kafka.Producer(
            {"bootstrap.servers": broker.bootstrap, "transactional.id": fresh("tx"), "linger.ms": 0}
        )
        for _ in range(2)
    ]
    for producer in producers:
        producer.init_transactions(30)
    for turn in range(6):
        for number, producer in enumerate(producers):
            producer.begin_transaction()
            for i in range(3):
                producer.produce(topic, b"%d.%d.%d" % (turn, number, i), partition=0)
                producer.flush()
        must_produce(kafka, topic, 0, b"plain %d" % turn)
        for number, producer in enumerate(producers):
            if (turn + number) % 2:
                producer.commit_transaction(30)
            else:
                producer.abort_transaction(30)

    def read_on() -> list[bytes]:
        found: list[bytes] = []
        while True:
            found += values(drain(committed, 4))
            problem = committed.take_problem()
            if problem is None:
                return found
            assert problem.kind == "aborted"
            data = positions(client, committed, topic_id)
            committed.set_aborted(
                [(one.producer_id, one.first_offset) for one in data.aborted_transactions or ()],
                data.last_stable_offset,
            )

    for turn in range(6):
        expected += [
            b"%d.%d.%d" % (turn, number, i) for number in range(2) if (turn + number) % 2 for i in range(3)
        ] + [b"plain %d" % turn]
    assert read_on() == expected
    assert committed.position == committed.lag_end()
    assert len(values(drain(uncommitted))) == 6 * 7
    producers[0].begin_transaction()
    producers[0].produce(topic, b"open", partition=0)
    producers[0].flush()
    must_produce(kafka, topic, 0, b"behind it")
    assert read_on() == [] and values(drain(uncommitted)) == [b"open", b"behind it"]
    producers[0].commit_transaction(30)
    assert read_on() == [b"open", b"behind it"]


def test_a_fetch_for_positions_waits_for_records(
    broker: Broker, kafka: KafkaConnection, client: Client, request
) -> None:
    topic = topic_name(request.node.name)
    topic_id = create_topic(kafka, topic)
    reader = PartitionReader(client, topic, topic_id, 0, 0)
    assert reader.read() is None
    with KafkaConnection(port=broker.port) as other:
        timer = threading.Timer(0.2, must_produce, (other, topic, 0, b"x"))
        timer.start()
        try:
            response = positions(client, reader, topic_id, 20_000)
        finally:
            timer.join()
    assert response.high_watermark == 1
    assert values(drain(reader)) == [b"x"]


def test_the_worker_dies_and_the_reader_moves(start_broker, tmp_path: Path) -> None:
    broker = start_broker(workers=1)
    with KafkaConnection(port=broker.port) as kafka:
        topic_id = create_topic(kafka, "t", 1, segment_bytes="16384")
        for i in range(50):
            must_produce(kafka, "t", 0, *(b"%d " % i + bytes(100) for _ in range(10)))
    client = attach(broker)
    reader = PartitionReader(client, "t", topic_id, 0, 0)
    held = reader.read(15)
    kill_and_wait(broker, "mqd-worker-0")
    with pytest.raises(NativeError) as ended:  # only after the mapped segment has been read
        while True:
            reader.read(10_000)
            reader.seek(100)
    assert ended.value.errno in (errno.EPIPE, errno.ECONNRESET)
    client.close()
    with pytest.raises(NativeError, match="attach again"):
        reader.read()
    assert reader.lag_end() == -1
    successor = attach(broker)
    reader.move(successor)
    reader.seek(15)

    def all_there() -> bool:
        try:
            drain(reader)
        except NativeError:
            return False
        return reader.position == 500

    eventually(all_there, "the rest of the log")
    assert [value[:2] for value in held.values] == [b"0 "] * 10 + [b"1 "] * 5
    reader.close()
    successor.close()


def test_closing_an_attachment_under_busy_readers(broker: Broker, kafka: KafkaConnection, request) -> None:
    """Readers in other threads end with EPIPE at any point; their records stay valid."""
    topic = topic_name(request.node.name)
    topic_id = create_topic(kafka, topic, 1, segment_bytes="16384")
    for i in range(30):
        must_produce(kafka, topic, 0, *(b"%d " % i + bytes(100) for _ in range(20)))
    client = attach(broker)
    outcomes: list[object] = []
    begun = threading.Barrier(4)

    def read() -> None:
        reader = PartitionReader(client, topic, topic_id, 0, 0)
        held = None
        begun.wait()
        try:
            while True:
                reader.seek(0)
                while (view := reader.read(7)) is not None:
                    held = view
        except NativeError as error:
            outcomes.append((error.errno, held is None or held.values[0] is not None))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    time.sleep(0.1)  # at an arbitrary moment of their reading
    client.close()
    for thread in threads:
        thread.join(30)
    assert outcomes == [(errno.EPIPE, True)] * 3
