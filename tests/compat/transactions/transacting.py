"""Transactional producers, one for each Python client behind one small interface, and the loop that
copies a topic exactly once.

`script` is a list of transactions: (values by partition, whether it is committed). `copy` reads
committed records, in transactions of at most `most` records that include the group's offsets; every
third of them is aborted and repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import aiokafka
import aiokafka.structs
import confluent_kafka
import kafka
from kafka.structs import OffsetAndMetadata

from tests.compat.clients import DEADLINE_SECONDS

Script = Iterable[tuple[dict[int, list[bytes]], bool]]

ROUND_RECORDS = 7
POLL_SECONDS = 0.05
THROWN_AWAY = 3


class _Rounds:
    """Which rounds are aborted, and when everything is copied. AssertionError when that takes too
    long. Without a count it continues forever; `begin` is called at the beginning of each.
    """

    def __init__(self, count: int | None, begin: Callable[[], object]) -> None:
        self.count, self.begin, self.copied, self.number = count, begin, 0, 0
        self.deadline = time.monotonic() + DEADLINE_SECONDS

    def more(self) -> bool:
        self.begin()
        if self.count is None:
            return True
        assert self.copied <= self.count, f"{self.copied} copied of {self.count}"
        assert time.monotonic() < self.deadline, f"{self.copied} of {self.count} copied after {DEADLINE_SECONDS} s"
        return self.copied < self.count

    def keep(self, records: int) -> bool:
        self.number += 1
        if self.number % THROWN_AWAY == 0:
            return False
        self.copied += records
        return True


class Confluent:
    def __init__(self, protocol: str = "classic") -> None:
        self.protocol = protocol

    @staticmethod
    def producer(bootstrap: str, name: str) -> confluent_kafka.Producer:
        producer = confluent_kafka.Producer({"bootstrap.servers": bootstrap, "transactional.id": name, "linger.ms": 1})
        producer.init_transactions(DEADLINE_SECONDS)
        return producer

    def transact(self, bootstrap: str, name: str, topic: str, script: Script) -> None:
        producer = self.producer(bootstrap, name)
        for partitions, committed in script:
            producer.begin_transaction()
            for partition, values in partitions.items():
                for value in values:
                    producer.produce(topic, value, partition=partition)
            if committed:
                producer.commit_transaction(DEADLINE_SECONDS)
            else:
                producer.flush(DEADLINE_SECONDS)
                producer.abort_transaction(DEADLINE_SECONDS)

    def fenced(self, bootstrap: str, name: str, topic: str) -> None:
        """Of two with one transactional id the older is refused."""
        elder = self.producer(bootstrap, name)
        elder.begin_transaction()
        elder.produce(topic, b"elder", partition=0)
        elder.flush(DEADLINE_SECONDS)
        younger = self.producer(bootstrap, name)
        younger.begin_transaction()
        younger.produce(topic, b"younger", partition=0)
        younger.commit_transaction(DEADLINE_SECONDS)
        try:
            elder.commit_transaction(DEADLINE_SECONDS)
        except confluent_kafka.KafkaException as refused:
            assert refused.args[0].code() in (
                confluent_kafka.KafkaError._FENCED,
                confluent_kafka.KafkaError.INVALID_PRODUCER_EPOCH,
                confluent_kafka.KafkaError._STATE,
            ), refused
        else:
            raise AssertionError("who was fenced could commit")

    def copy(
        self,
        bootstrap: str,
        name: str,
        group: str,
        source: str,
        target: str,
        count: int | None,
        most: int = ROUND_RECORDS,
        begin: Callable[[], object] = bool,
    ) -> None:
        producer = self.producer(bootstrap, name)
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "group.protocol": self.protocol,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 50,
            }
        )
        try:
            consumer.subscribe([source])
            rounds = _Rounds(count, begin)
            while rounds.more():
                records = consumer.consume(most, POLL_SECONDS)
                if not records:
                    continue
                producer.begin_transaction()
                for record in records:
                    assert record.error() is None, record.error()
                    producer.produce(target, record.value(), partition=record.partition())
                producer.send_offsets_to_transaction(
                    consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), DEADLINE_SECONDS
                )
                if rounds.keep(len(records)):
                    producer.commit_transaction(DEADLINE_SECONDS)
                    continue
                producer.abort_transaction(DEADLINE_SECONDS)
                for place in consumer.committed(consumer.assignment(), DEADLINE_SECONDS):
                    place.offset = max(place.offset, 0)
                    consumer.seek(place)
        finally:
            consumer.close()


class KafkaPython:
    @staticmethod
    def producer(bootstrap: str, name: str) -> kafka.KafkaProducer:
        producer = kafka.KafkaProducer(bootstrap_servers=bootstrap, transactional_id=name, linger_ms=1)
        producer.init_transactions()
        return producer

    def transact(self, bootstrap: str, name: str, topic: str, script: Script) -> None:
        producer = self.producer(bootstrap, name)
        try:
            for partitions, committed in script:
                producer.begin_transaction()
                futures = [
                    producer.send(topic, value, partition=partition)
                    for partition, values in partitions.items()
                    for value in values
                ]
                if committed:
                    producer.commit_transaction()
                else:
                    producer.flush(DEADLINE_SECONDS)
                    producer.abort_transaction()
                for future in futures:
                    future.get(DEADLINE_SECONDS)
        finally:
            producer.close(DEADLINE_SECONDS)

    def fenced(self, bootstrap: str, name: str, topic: str) -> None:
        elder = self.producer(bootstrap, name)
        elder.begin_transaction()
        elder.send(topic, b"elder", partition=0).get(DEADLINE_SECONDS)
        younger = self.producer(bootstrap, name)
        younger.begin_transaction()
        younger.send(topic, b"younger", partition=0).get(DEADLINE_SECONDS)
        younger.commit_transaction()
        younger.close(DEADLINE_SECONDS)
        try:
            elder.commit_transaction()
        except kafka.errors.KafkaError as refused:
            assert isinstance(refused, kafka.errors.ProducerFencedError | kafka.errors.InvalidProducerEpochError), (
                refused
            )
        else:
            raise AssertionError("who was fenced could commit")
        finally:
            elder.close(0)

    def copy(
        self,
        bootstrap: str,
        name: str,
        group: str,
        source: str,
        target: str,
        count: int | None,
        most: int = ROUND_RECORDS,
        begin: Callable[[], object] = bool,
    ) -> None:
        producer = self.producer(bootstrap, name)
        consumer = kafka.KafkaConsumer(
            source,
            bootstrap_servers=bootstrap,
            group_id=group,
            isolation_level="read_committed",
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            fetch_max_wait_ms=50,
        )
        try:
            rounds = _Rounds(count, begin)
            while rounds.more():
                batches = consumer.poll(POLL_SECONDS * 1000, max_records=most)
                records = [record for batch in batches.values() for record in batch]
                if not records:
                    continue
                producer.begin_transaction()
                for record in records:
                    producer.send(target, record.value, partition=record.partition)
                offsets = {
                    partition: OffsetAndMetadata(batch[-1].offset + 1, "", -1) for partition, batch in batches.items()
                }
                producer.send_offsets_to_transaction(offsets, consumer.group_metadata())
                if rounds.keep(len(records)):
                    producer.commit_transaction()
                    continue
                producer.abort_transaction()
                for partition in consumer.assignment():
                    consumer.seek(partition, consumer.committed(partition) or 0)
        finally:
            consumer.close()
            producer.close(DEADLINE_SECONDS)


class Aiokafka:
    @staticmethod
    def producer(bootstrap: str, name: str) -> aiokafka.AIOKafkaProducer:
        return aiokafka.AIOKafkaProducer(bootstrap_servers=bootstrap, transactional_id=name, linger_ms=1)

    def transact(self, bootstrap: str, name: str, topic: str, script: Script) -> None:
        async def run() -> None:
            async with self.producer(bootstrap, name) as producer:
                for partitions, committed in script:
                    await producer.begin_transaction()
                    for partition, values in partitions.items():
                        for value in values:
                            await producer.send(topic, value, partition=partition)
                    await producer.flush()
                    await (producer.commit_transaction() if committed else producer.abort_transaction())

        asyncio.run(run())

    def fenced(self, bootstrap: str, name: str, topic: str) -> None:
        async def run() -> None:
            elder = self.producer(bootstrap, name)
            await elder.start()
            await elder.begin_transaction()
            await elder.send_and_wait(topic, b"elder", partition=0)
            async with self.producer(bootstrap, name) as younger, younger.transaction():
                await younger.send_and_wait(topic, b"younger", partition=0)
            try:
                await elder.commit_transaction()
            except aiokafka.errors.ProducerFenced:
                pass
            else:
                raise AssertionError("who was fenced could commit")
            finally:
                try:
                    await elder.stop()
                except aiokafka.errors.ProducerFenced:
                    pass  # it reports again

        asyncio.run(run())

    def copy(
        self,
        bootstrap: str,
        name: str,
        group: str,
        source: str,
        target: str,
        count: int | None,
        most: int = ROUND_RECORDS,
        begin: Callable[[], object] = bool,
    ) -> None:
        async def run() -> None:
            consumer = aiokafka.AIOKafkaConsumer(
                source,
                bootstrap_servers=bootstrap,
                group_id=group,
                isolation_level="read_committed",
                auto_offset_reset="earliest",
                enable_auto_commit=False,
                fetch_max_wait_ms=50,
            )
            async with self.producer(bootstrap, name) as producer, consumer:
                rounds = _Rounds(count, begin)
                while rounds.more():
                    batches = await consumer.getmany(timeout_ms=int(POLL_SECONDS * 1000), max_records=most)
                    records = [record for batch in batches.values() for record in batch]
                    if not records:
                        continue
                    await producer.begin_transaction()
                    for record in records:
                        await producer.send(target, record.value, partition=record.partition)
                    offsets = {partition: batch[-1].offset + 1 for partition, batch in batches.items()}
                    await producer.send_offsets_to_transaction(offsets, group)
                    if rounds.keep(len(records)):
                        await producer.commit_transaction()
                        continue
                    await producer.abort_transaction()
                    for partition in consumer.assignment():
                        consumer.seek(partition, await consumer.committed(partition) or 0)

        asyncio.run(run())


TRANSACTING = {
    "confluent-kafka": Confluent(),
    "confluent-kafka consumer": Confluent("consumer"),
    "kafka-python": KafkaPython(),
    "aiokafka": Aiokafka(),
}
