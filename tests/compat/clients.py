"""The Python clients behind one small interface. Each produces and consumes with explicit
partitions, and without a group.

`consume` reads every partition from its beginning until `counts` records of each have arrived,
checks that offsets rise, and returns the messages by partition. `produce` waits for every
acknowledgement and raises the error of any failed record.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import aiokafka
import confluent_kafka
import kafka

from tests.compat.kcat import Kcat, find_kcat, joined
from tests.compat.messages import Message

DEADLINE_SECONDS = 60
REQUEST_BYTES = 1_000_000
NAMES = ("confluent-kafka", "kafka-python", "aiokafka", "kcat")

Read = dict[int, list[tuple[int, Message]]]  # partition -> (offset, message)


class Confluent:
    name = "confluent-kafka"

    def produce(
        self, bootstrap: str, topic: str, messages: list[Message], compression: str = "none", **options: object
    ) -> None:
        settings = {
            "bootstrap.servers": bootstrap,
            "compression.type": compression,
            "linger.ms": 2,
            "message.max.bytes": REQUEST_BYTES,
        }
        producer = confluent_kafka.Producer({**settings, **options})
        failures: list[str] = []
        reported = 0

        def on_delivery(error: confluent_kafka.KafkaError | None, _message: confluent_kafka.Message) -> None:
            nonlocal reported
            reported += 1
            if error is not None:
                failures.append(str(error))

        for message in messages:
            producer.produce(
                topic,
                message.value,
                message.key,
                message.partition,
                on_delivery=on_delivery,
                timestamp=message.timestamp_ms or 0,
                headers=list(message.headers) or None,
            )
        left = producer.flush(DEADLINE_SECONDS)
        assert left == 0 and reported == len(messages) and not failures, (left, reported, failures[:3])

    def consume(self, bootstrap: str, topic: str, counts: dict[int, int], **options: object) -> Read:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "by hand",
                "enable.auto.commit": False,
                "check.crcs": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,  # closing waits for the last long poll
                **options,
            }
        )
        try:
            consumer.assign(
                [
                    confluent_kafka.TopicPartition(topic, partition, confluent_kafka.OFFSET_BEGINNING)
                    for partition in counts
                ]
            )

            def poll() -> Iterable[tuple[int, Message]]:
                for message in consumer.consume(100, 0.05):
                    assert message.error() is None, message.error()
                    headers = tuple((name, value) for name, value in message.headers() or ())
                    yield (
                        message.offset(),
                        Message(message.partition(), message.key(), message.value(), headers, message.timestamp()[1]),
                    )

            return _gather(poll, counts)
        finally:
            consumer.close()


class KafkaPython:
    name = "kafka-python"

    def produce(
        self, bootstrap: str, topic: str, messages: list[Message], compression: str = "none", **options: object
    ) -> None:
        settings = {
            "bootstrap_servers": bootstrap,
            "compression_type": None if compression == "none" else compression,
            "linger_ms": 2,
            "enable_idempotence": False,
        }
        producer = kafka.KafkaProducer(**{**settings, **options})
        try:
            futures = [
                producer.send(
                    topic, message.value, message.key, list(message.headers), message.partition, message.timestamp_ms
                )
                for message in messages
            ]
            for future in futures:
                future.get(DEADLINE_SECONDS)
        finally:
            producer.close(DEADLINE_SECONDS)

    def consume(self, bootstrap: str, topic: str, counts: dict[int, int], **options: object) -> Read:
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=bootstrap,
            group_id=None,
            enable_auto_commit=False,
            check_crcs=True,
            auto_offset_reset="none",
            **options,
        )
        try:
            partitions = [kafka.TopicPartition(topic, partition) for partition in counts]
            consumer.assign(partitions)
            consumer.seek_to_beginning(*partitions)

            def poll() -> Iterable[tuple[int, Message]]:
                for records in consumer.poll(500).values():
                    for record in records:
                        yield (
                            record.offset,
                            Message(
                                record.partition, record.key, record.value, tuple(record.headers), record.timestamp
                            ),
                        )

            return _gather(poll, counts)
        finally:
            consumer.close()


class Aiokafka:
    name = "aiokafka"

    def produce(
        self, bootstrap: str, topic: str, messages: list[Message], compression: str = "none", **options: object
    ) -> None:
        settings = {
            "bootstrap_servers": bootstrap,
            "compression_type": None if compression == "none" else compression,
            "linger_ms": 2,
        }

        async def run() -> None:
            async with aiokafka.AIOKafkaProducer(**{**settings, **options}) as producer:
                acknowledgements = [
                    await producer.send(
                        topic,
                        message.value,
                        message.key,
                        message.partition,
                        message.timestamp_ms,
                        list(message.headers),
                    )
                    for message in messages
                ]
                await asyncio.wait_for(asyncio.gather(*acknowledgements), DEADLINE_SECONDS)

        asyncio.run(run())

    def consume(self, bootstrap: str, topic: str, counts: dict[int, int], **options: object) -> Read:
        async def run() -> Read:
            consumer = aiokafka.AIOKafkaConsumer(
                bootstrap_servers=bootstrap,
                group_id=None,
                enable_auto_commit=False,
                check_crcs=True,
                auto_offset_reset="none",
                **options,
            )
            consumer.assign([aiokafka.TopicPartition(topic, partition) for partition in counts])
            async with consumer:
                await consumer.seek_to_beginning()
                found: Read = {partition: [] for partition in counts}
                deadline = time.monotonic() + DEADLINE_SECONDS
                while not _is_complete(found, counts, deadline):
                    for records in (await consumer.getmany(timeout_ms=500)).values():
                        for record in records:
                            _put(
                                found,
                                record.offset,
                                Message(
                                    record.partition, record.key, record.value, tuple(record.headers), record.timestamp
                                ),
                            )
                return found

        return asyncio.run(run())


class KcatClient:
    name = "kcat"

    def __init__(self, kcat: Kcat) -> None:
        self.kcat = kcat

    def produce(
        self, bootstrap: str, topic: str, messages: list[Message], compression: str = "none", **options: object
    ) -> None:
        self.kcat.produce(bootstrap, topic, messages, compression, **options)

    def consume(self, bootstrap: str, topic: str, counts: dict[int, int], **options: object) -> Read:
        """Headers are joined, as one named "joined": compare with as_read()."""
        found: Read = {partition: [] for partition in counts}
        settings = [word for name, setting in options.items() for word in ("-X", f"{name}={setting}")]
        for partition, offset, timestamp_ms, key, value, headers in self.kcat.consume(bootstrap, topic, *settings):
            _put(found, offset, Message(partition, key, value, (("joined", headers),), timestamp_ms))
        assert _is_complete(found, counts, time.monotonic() + 1), {
            partition: len(records) for partition, records in found.items()
        }
        return found


Client = Confluent | KafkaPython | Aiokafka | KcatClient


def client_of(name: str, cache: Path) -> Client:
    """Skips the test when the client cannot be obtained. `cache` is for files to be unpacked."""
    if name == "kcat":
        return KcatClient(find_kcat(cache))
    return {"confluent-kafka": Confluent, "kafka-python": KafkaPython, "aiokafka": Aiokafka}[name]()


def as_written(writer: str, message: Message) -> Message:
    """The nearest message that this client can write: kafka-python refuses headers without a value."""
    if writer == "kafka-python":
        return dataclasses.replace(
            message, headers=tuple((name, value) for name, value in message.headers if value is not None)
        )
    return Kcat.writable(message) if writer == "kcat" else message


def as_read(reader: str, message: Message) -> Message:
    """A message in the form in which this client returns it."""
    if reader != "kcat":
        return message
    return Message(
        message.partition, message.key, message.value, (("joined", joined(message.headers)),), message.timestamp_ms
    )


# -- gathering -------------------------------------------------------------------------------------


def _put(found: Read, offset: int, message: Message) -> None:
    records = found[message.partition]
    assert not records or offset > records[-1][0], (
        f"partition {message.partition}: offset {offset} after {records[-1][0]}"
    )
    records.append((offset, message))


def _is_complete(found: Read, counts: dict[int, int], deadline: float) -> bool:
    got = {partition: len(records) for partition, records in found.items()}
    assert all(got[partition] <= count for partition, count in counts.items()), (
        f"more than was written: {got} of {counts}"
    )
    assert got == counts or time.monotonic() < deadline, f"{got} of {counts} records after {DEADLINE_SECONDS} s"
    return got == counts


def _gather(poll: Callable[[], Iterable[tuple[int, Message]]], counts: dict[int, int]) -> Read:
    found: Read = {partition: [] for partition in counts}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not _is_complete(found, counts, deadline):
        for offset, message in poll():
            _put(found, offset, message)
    return found
