"""Every client reads what every client wrote, in every compression, byte for byte: one topic of six
partitions for each compression, written by all in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.protocol.records import decode_batch, iterate_batches
from tests.broker import Broker
from tests.compat import topics
from tests.compat.clients import NAMES, as_read, as_written, client_of
from tests.compat.messages import COMPRESSIONS, PARTITION_COUNT, Message, messages_of

NOW_TOLERANCE_MS = 600_000


class Written:
    """A topic and its expected records, by partition and in order."""

    def __init__(self, broker: Broker, compression: str, cache: Path) -> None:
        self.topic = topics.create_topic(broker, f"matrix-{compression}", PARTITION_COUNT)
        self.messages: dict[int, list[Message]] = {partition: [] for partition in range(PARTITION_COUNT)}
        self.writers: dict[int, list[str]] = {partition: [] for partition in range(PARTITION_COUNT)}
        for writer in NAMES:
            expected = [as_written(writer, message) for message in messages_of(writer, compression)]
            client_of(writer, cache).produce(broker.bootstrap, self.topic, expected, compression)
            for message in expected:
                self.messages[message.partition].append(message)
                self.writers[message.partition].append(writer)

    @property
    def counts(self) -> dict[int, int]:
        return {partition: len(messages) for partition, messages in self.messages.items()}


@pytest.fixture(scope="session")
def written(shared_broker: Broker, unpacked_clients: Path) -> Callable[[str], Written]:
    made: dict[str, Written] = {}

    def get(compression: str) -> Written:
        if compression not in made:
            made[compression] = Written(shared_broker, compression, unpacked_clients)
        return made[compression]

    return get


@pytest.mark.parametrize("reader", NAMES)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_client_reads_what_every_client_wrote(
    shared_broker: Broker, written: Callable[[str], Written], unpacked_clients: Path, compression: str, reader: str
) -> None:
    client = client_of(reader, unpacked_clients)
    topic = written(compression)
    found = client.consume(shared_broker.bootstrap, topic.topic, topic.counts)
    now_ms = time.time() * 1000
    for partition, expected in topic.messages.items():
        assert [offset for offset, _ in found[partition]] == list(range(len(expected)))
        for (offset, got), message, writer in zip(found[partition], expected, topic.writers[partition], strict=True):
            if message.timestamp_ms is None:  # the writer could not choose one
                assert got.timestamp_ms is not None and abs(now_ms - got.timestamp_ms) < NOW_TOLERANCE_MS
                got = Message(got.partition, got.key, got.value, got.headers, None)
            assert got == as_read(reader, message), (
                f"{reader} read at {partition}:{offset} something else than {writer} wrote"
            )


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_the_log_keeps_the_writers_compression(
    shared_broker: Broker, written: Callable[[str], Written], compression: str
) -> None:
    """Every writer sent this compression (KAFKA-18659: older librdkafka silently sends none when
    the advertised versions mislead it), and the broker did not change it.
    """
    topic = written(compression)
    compressed_by: set[str] = set()
    with topics.connect(shared_broker) as kafka:
        for partition, expected in topic.messages.items():
            offset = 0
            while offset < len(expected):
                records = topics.fetch(
                    kafka, topic.topic, offset, partition, partition_max_bytes=8 << 20, max_bytes=16 << 20
                ).records
                assert records
                for header, batch in iterate_batches(records):
                    inside = list(decode_batch(batch))
                    assert [record.offset for record in inside] == list(range(offset, offset + len(inside)))
                    # clients leave data uncompressed that compression would make longer
                    assert header.compression in (compression, "none")
                    if header.compression == compression:
                        compressed_by.update(topic.writers[partition][record.offset] for record in inside)
                    offset += len(inside)
    assert compressed_by == set(NAMES)
