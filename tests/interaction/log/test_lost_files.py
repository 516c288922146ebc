"""Files of a partition are deleted or damaged while the broker is down: read_committed returns no
aborted record, no offset is assigned twice, and lost data is reported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.log.dump import verify_directory
from tests.broker import Broker
from tests.interaction.traffic import batch, create_topic, eventually, log_end, must_produce, produce, read_batches
from tests.interaction.transactional import RawProducer, connect, read_committed
from tests.kafka_connection import KafkaConnection
from tests.tiers import quick

SEGMENTS = {"log.segment.bytes": "4096"}


def stop(broker: Broker, clean: bool) -> None:
    if clean:
        broker.stop()
    else:
        broker.kill_all()


def errors(broker: Broker, text: str) -> list[str]:
    logs = sorted((broker.data_dir / "logs").glob("mqd-worker-*.log"))
    return [line for path in logs for line in path.read_text().splitlines() if text in line and " ERROR " in line]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[20] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("clean", quick([True, False], [True]))
@pytest.mark.parametrize(
    "damage", [Path.unlink, flip, lambda path: os.truncate(path, 0)], ids=["deleted", "flipped", "emptied"]
)
def test_no_aborted_record_is_returned_when_the_index_is_lost(
    start_broker, clean: bool, damage: Callable[[Path], None]
) -> None:
    broker: Broker = start_broker(workers=1, config=SEGMENTS)
    with connect(broker) as kafka:
        create_topic(kafka, "t", 1)
        for number in range(8):
            transaction = RawProducer(kafka)
            transaction.init()
            transaction.add("t", 0)
            transaction.produce("t", 0, b"%s %d " % (b"aborted" if number % 2 else b"good", number) + b"v" * 900)
            transaction.end(number % 2 == 0)
        expected = eventually(
            lambda: found if len(found := read_committed(kafka, "t", 0)) == 4 else None, "committed records"
        )
    directory = broker.data_dir / "log" / "t-0"
    stop(broker, clean)
    assert not verify_directory(directory).damaged
    indexes = sorted(directory.glob("*.txnindex"))
    assert len(indexes) >= 2
    for path in indexes:
        damage(path)
    assert verify_directory(directory).damaged
    broker.start()
    with connect(broker) as kafka:
        assert read_committed(kafka, "t", 0) == expected
    stop(broker, True)
    assert not verify_directory(directory).damaged


@pytest.mark.parametrize("clean", quick([True, False], [False]))
@pytest.mark.parametrize("lost", ["middle", "end"])
def test_a_deleted_segment_is_reported_and_no_offset_is_assigned_twice(start_broker, clean: bool, lost: str) -> None:
    broker: Broker = start_broker(workers=1, config=SEGMENTS)
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t", 1)
        for _ in range(20):
            must_produce(kafka, "t", 0, b"v" * 900)
        end = log_end(kafka, "t", 0)
    if not clean:
        broker.stop()  # only the checkpoint on disk is used
        broker.start()
    stop(broker, clean)
    segments = sorted((broker.data_dir / "log" / "t-0").glob("*.log"))
    segments[2 if lost == "middle" else -1].unlink()
    if lost == "middle":
        assert verify_directory(segments[0].parent).damaged
    broker.start()
    with KafkaConnection(port=broker.port) as kafka:
        base = must_produce(kafka, "t", 0, b"new")
        assert base == end
    (line,) = errors(broker, "records are missing")
    assert "t-0" in line and f"from_offset={int(segments[2 if lost == 'middle' else -1].stem)}" in line


@pytest.mark.parametrize("clean", quick([True, False], [False]))
def test_lost_partition_metadata_is_reported_with_a_remedy(start_broker, clean: bool) -> None:
    broker: Broker = start_broker(workers=1, config=SEGMENTS)
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t", 1)
        for _ in range(5):
            must_produce(kafka, "t", 0, b"v" * 900)
    directory = broker.data_dir / "log" / "t-0"
    if not clean:
        broker.stop()  # its checkpoints are written
        broker.start()
    stop(broker, clean)
    metadata = (directory / "partition.metadata").read_bytes()
    (directory / "partition.metadata").unlink()
    broker.start()
    (line,) = eventually(lambda: errors(broker, "partition cannot be opened"), "the line")
    assert "partition.metadata is lost" in line and metadata.decode().split()[3] in line
    with KafkaConnection(port=broker.port) as kafka:
        assert produce(kafka, "t", 0, batch(b"x")).error_code != 0
    broker.stop()
    assert not list(directory.parent.glob("*-stray")) and list(directory.glob("*.log"))
    (directory / "partition.metadata").write_bytes(metadata)
    broker.start()
    with KafkaConnection(port=broker.port) as kafka:
        assert must_produce(kafka, "t", 0, b"x") == 5 and len(list(read_batches(kafka, "t", 0))) == 6
