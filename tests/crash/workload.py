"""Clients that record every outcome: producers with every delivery report, consumers with every
record, and a reader of everything.

    # clients run, and continue while the broker is killed
    with Load(broker, ["t"], seed=1) as load:
        load.wait_for_progress()                  # for every producer and every consumer
        ...
        final = load.finish()                     # flushed, read to the end, and all logs
        assert not check(load.history(), final)

Producers and consumers are librdkafka with its own retries, or (`local`) mqd's own client over
shared memory; one Python thread each. Each thread appends to its own records, which are read after
the end (or by length, for progress). Times are CLOCK_MONOTONIC ns, as in the file layer's journal.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import mqd
from mqd.protocol.messages import FetchRequest, ListOffsetsRequest, ProduceRequest
from mqd.protocol.records import Record, decode_records, encode_batch
from tests.broker import Broker
from tests.crash.checker import Acknowledged, FinalLog, History, Seen, make_value
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S, eventually

PROGRESS_SECONDS = FINISH_SECONDS = PATIENCE_S
EARLIEST, LATEST = -2, -1
_PRODUCE, _FETCH, _LIST_OFFSETS = 0, 1, 2
_STATISTICS_MS = 100
_QUICK_RETRIES = {
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "log_level": 0,
    "topic.metadata.refresh.interval.ms": 2000,
}


def local_producer(settings: dict[str, Any]) -> Any:
    return mqd.Producer({**settings, "transport": "shm"})


def local_consumer(settings: dict[str, Any]) -> Any:
    return mqd.Consumer({**settings, "transport": "shm"})


def wait_until(condition: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    eventually(condition, what, seconds)


class ConnectionCount:
    """librdkafka's connection statistics: `opened` and `lost`, over all brokers that it knows."""

    def __init__(self) -> None:
        self.opened = self.lost = 0

    def on_statistics(self, text: str) -> None:
        brokers = json.loads(text).get("brokers", {}).values()  # none over shared memory
        self.opened = sum(broker.get("connects", 0) for broker in brokers)
        self.lost = sum(broker.get("disconnects", 0) for broker in brokers)


def create_topics(bootstrap: str, partitions: dict[str, int], config: dict[str, dict[str, str]] | None = None) -> None:
    """Returns when they exist and each partition has a leader."""
    admin = AdminClient({"bootstrap.servers": bootstrap, **_QUICK_RETRIES})
    futures = admin.create_topics(
        [NewTopic(name, count, 1, config=(config or {}).get(name, {})) for name, count in partitions.items()]
    )
    for future in futures.values():
        future.result(30)


class LoadProducer(threading.Thread):
    """Sends record after record to random partitions, at about `rate` a second, with bounded
    in-flight records; records each acknowledgement.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        topics: dict[str, int],
        seed: int,
        rate: int,
        settings: dict[str, Any],
        make: Callable[[dict[str, Any]], Any] = Producer,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.acknowledged: list[Acknowledged] = []
        self.failed: list[str] = []
        self.errors: list[str] = []
        self.connections = ConnectionCount()
        self.sent = 0
        self._rate = rate
        self._topics = [(topic, partition) for topic, count in topics.items() for partition in range(count)]
        self._random = random.Random(f"{seed} {name}")
        self._ending = threading.Event()
        self.idempotent = bool(settings.get("enable.idempotence"))
        self._producer = make(
            {
                "bootstrap.servers": bootstrap,
                "client.id": name,
                "linger.ms": 2,
                "batch.size": 16_000,
                "message.timeout.ms": 120_000,
                "request.timeout.ms": 5_000,
                "retry.backoff.ms": 20,
                "retry.backoff.max.ms": 200,
                "error_cb": self._on_error,
                "statistics.interval.ms": _STATISTICS_MS,
                "stats_cb": self.connections.on_statistics,
                **_QUICK_RETRIES,
                **settings,
            }
        )

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.errors.append(f"{self.name}: fatal: {error}")

    def run(self) -> None:
        due = time.monotonic()
        while not self._ending.is_set():
            burst = self._random.randrange(1, 40)
            for _ in range(burst):
                self._send()
            due = max(due + burst / self._rate, time.monotonic() - 0.2)
            while not self._ending.is_set() and (len(self._producer) > 2_000 or time.monotonic() < due):
                self._producer.poll(0.005)
        # len() counts librdkafka's events, too: for example a lost connection, right after the
        # flush
        if left := self._producer.flush(FINISH_SECONDS):
            self.errors.append(f"{self.name}: {left} records were neither acknowledged nor refused at the end")

    def _send(self) -> None:
        topic, partition = self._random.choice(self._topics)
        counter = self.sent
        self.sent += 1

        def on_delivery(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self.failed.append(f"{self.name} {counter}: {error}")
            else:
                self.acknowledged.append(
                    Acknowledged(self.name, counter, topic, message.partition(), message.offset(), time.monotonic_ns())
                )

        key = f"{self.name}-{counter % 50}"
        while True:
            try:
                self._producer.produce(topic, make_value(self.name, counter), key, partition, on_delivery=on_delivery)
                return
            except BufferError:
                self._producer.poll(0.05)
            except KafkaException as error:  # a fatal error of the idempotent producer ends it
                self.failed.append(f"{self.name} {counter}: {error}")
                return

    def end(self) -> None:
        self._ending.set()

    def leave(self) -> None:
        """After the end: no connection is left."""
        if hasattr(self._producer, "close"):
            self._producer.close()
        del self._producer


class LoadConsumer(threading.Thread):
    """Reads all partitions from the start, without a group; records each record."""

    def __init__(
        self, name: str, bootstrap: str, topics: dict[str, int], make: Callable[[dict[str, Any]], Any] = Consumer
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.seen: list[Seen] = []
        self.errors: list[str] = []
        self.positions: dict[tuple[str, int], int] = {}
        self.until: dict[tuple[str, int], int] | None = None  # set: end when these offsets are reached
        self._ending = threading.Event()
        self.connections = ConnectionCount()
        self._consumer = make(
            {
                "bootstrap.servers": bootstrap,
                "client.id": name,
                "group.id": name,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": 100,
                "fetch.error.backoff.ms": 20,
                "error_cb": lambda _error: None,
                "statistics.interval.ms": _STATISTICS_MS,
                "stats_cb": self.connections.on_statistics,
                **_QUICK_RETRIES,
            }
        )
        self._consumer.assign(
            [TopicPartition(topic, partition, 0) for topic, count in topics.items() for partition in range(count)]
        )

    def run(self) -> None:
        while not self._ending.is_set() and not self._at_end():
            for message in self._consumer.consume(500, 0.1):
                error = message.error()
                if error is not None:
                    if error.code() in (
                        KafkaError._AUTO_OFFSET_RESET,
                        KafkaError.OFFSET_OUT_OF_RANGE,
                        KafkaError._BAD_MSG,
                        KafkaError._BAD_COMPRESSION,
                    ):
                        self.errors.append(
                            f"{self.name}: {message.topic()}-{message.partition()} at {self.positions}: {error}"
                        )
                    continue
                self.seen.append(
                    Seen(
                        self.name,
                        message.topic(),
                        message.partition(),
                        message.offset(),
                        message.value(),
                        time.monotonic_ns(),
                    )
                )
                self.positions[message.topic(), message.partition()] = message.offset() + 1
        self._consumer.close()

    def _at_end(self) -> bool:
        return self.until is not None and all(self.positions.get(key, 0) >= end for key, end in self.until.items())

    def end(self) -> None:
        self._ending.set()


IDEMPOTENT = {"enable.idempotence": True, "acks": "all", "max.in.flight.requests.per.connection": 5}
ACKS_1 = {"acks": 1, "max.in.flight.requests.per.connection": 5}


class Load:
    """Producers and consumers over `topics` (name -> partition count). Topics of `relaxed` get
    producers with acks=1; the others idempotent ones with acks=all.
    """

    def __init__(
        self,
        broker: Broker,
        topics: dict[str, int],
        *,
        relaxed: dict[str, int] | None = None,
        seed: int = 0,
        producers: int = 3,
        consumers: int = 2,
        rate: int = 400,
        others: dict[str, int] | None = None,
        local: bool = False,
    ) -> None:
        """`others`: topics with other writers, which the consumers read too. `local`: every other
        client, from the first on, uses shared memory, and so does the relaxed one.
        """
        self.broker = broker
        self.topics = {**topics, **(relaxed or {}), **(others or {})}
        self.relaxed = dict(relaxed or {})
        makers = [(local_producer, local_consumer) if local else (Producer, Consumer), (Producer, Consumer)]
        self.producers = [
            LoadProducer(f"p{seed}.{n}", broker.bootstrap, topics, seed, rate, IDEMPOTENT, makers[n % 2][0])
            for n in range(producers)
        ]
        if relaxed:
            self.producers.append(
                LoadProducer(f"q{seed}", broker.bootstrap, self.relaxed, seed, rate, ACKS_1, makers[0][0])
            )
        self.consumers = [
            LoadConsumer(f"c{seed}.{n}", broker.bootstrap, self.topics, makers[n % 2][1]) for n in range(consumers)
        ]

    def __enter__(self) -> Load:
        for client in (*self.producers, *self.consumers):
            client.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for client in (*self.producers, *self.consumers):
            client.end()
        for client in (*self.producers, *self.consumers):
            client.join(FINISH_SECONDS + 10)

    def wait_for_progress(self, seconds: float = PROGRESS_SECONDS) -> None:
        """Until every producer has a new acknowledgement and every consumer a new record."""
        before = [(client, len(client.acknowledged)) for client in self.producers]
        seen = [(client, len(client.seen)) for client in self.consumers]

        def lagging() -> list[str]:
            return [one.name for one, count in before if len(one.acknowledged) <= count] + [
                one.name for one, count in seen if len(one.seen) <= count
            ]

        wait_until(
            lambda: not lagging(), seconds, lambda: f"no progress of {lagging()} {self.errors()}\n{self.broker.logs()}"
        )

    def history(self) -> History:
        return History(
            [ack for one in self.producers for ack in one.acknowledged],
            [seen for one in self.consumers for seen in one.seen],
            {one.name: one.sent for one in self.producers},
            {one.name for one in self.producers if one.idempotent},
        )

    def errors(self) -> list[str]:
        """Failures that a crash does not explain: a failed or fatal producer, a consumer whose
        offset was out of range.
        """
        return [text for one in self.producers for text in (*one.errors, *one.failed)] + [
            text for one in self.consumers for text in one.errors
        ]

    def finish(self) -> dict[tuple[str, int], FinalLog]:
        """Ends the producers, waits for the consumers to reach the end, and reads all logs."""
        for producer in self.producers:
            producer.end()
        for producer in self.producers:
            producer.join(FINISH_SECONDS + 10)
        final = read_all(self.broker.port, self.topics)
        for consumer in self.consumers:
            consumer.until = {key: log.log_end_offset for key, log in final.items()}
        for consumer in self.consumers:
            consumer.join(FINISH_SECONDS)
            if consumer.is_alive():
                behind = {
                    key: end for key, end in (consumer.until or {}).items() if consumer.positions.get(key, 0) < end
                }
                consumer.errors.append(
                    f"{consumer.name} does not reach {behind}, stands at"
                    f" { ({key: consumer.positions.get(key) for key in behind}) }"
                )
        return final


# -- without librdkafka ----------------------------------------------------------------------------


def produce(
    kafka: KafkaConnection, topic: str, partition: int, value: bytes, acks: int = -1, **batch
) -> tuple[int, int]:
    """One record in one batch. Returns (error code, base offset)."""
    data = [
        ProduceRequest.PartitionData(
            index=partition, records=encode_batch([Record(value, timestamp_ms=time.time_ns() // 10**6)], **batch)
        )
    ]
    response = kafka.call(
        _PRODUCE,
        9,
        ProduceRequest(
            acks=acks, timeout_ms=5000, topic_data=[ProduceRequest.TopicData(name=topic, partition_data=data)]
        ),
    )
    one = response.responses[0].partition_responses[0]
    return one.error_code, one.base_offset


def list_offset(kafka: KafkaConnection, topic: str, partition: int, timestamp: int) -> int:
    expected = ListOffsetsRequest.Topic(
        name=topic, partitions=[ListOffsetsRequest.Partition(partition_index=partition, timestamp=timestamp)]
    )
    response = (
        kafka.call(_LIST_OFFSETS, 7, ListOffsetsRequest(replica_id=-1, topics=[expected])).topics[0].partitions[0]
    )
    if response.error_code:
        raise AssertionError(f"ListOffsets of {topic}-{partition} says {response.error_code}")
    return response.offset


def fetch_records(
    kafka: KafkaConnection, topic: str, partition: int, offset: int
) -> tuple[list[tuple[int, bytes]], int]:
    """Records from `offset` on, as far as one response reaches, and the high watermark."""
    expected = FetchRequest.Topic(
        topic=topic,
        partitions=[FetchRequest.Partition(partition=partition, fetch_offset=offset, partition_max_bytes=4 << 20)],
    )
    request = FetchRequest(
        replica_id=-1, max_wait_ms=0, min_bytes=0, max_bytes=16 << 20, session_id=0, session_epoch=-1, topics=[expected]
    )
    response = kafka.call(_FETCH, 11, request)
    data = response.responses[0].partitions[0]
    if response.error_code or data.error_code:
        raise AssertionError(f"Fetch of {topic}-{partition} from {offset} says {response.error_code} {data.error_code}")
    found = [
        (record.offset, record.value or b"")
        for record in decode_records(bytes(data.records or b""), allow_partial=True)
        if record.offset >= offset
    ]
    return found, data.high_watermark


def read_log(kafka: KafkaConnection, topic: str, partition: int) -> FinalLog:
    start = position = list_offset(kafka, topic, partition, EARLIEST)
    end = list_offset(kafka, topic, partition, LATEST)
    records: list[tuple[int, bytes]] = []
    while position < end:
        found, _ = fetch_records(kafka, topic, partition, position)
        if not found:
            break  # the checker reports that the end was not reached
        records += found
        position = found[-1][0] + 1
    return FinalLog(start, end, [one for one in records if one[0] < end])


def read_all(port: int, topics: dict[str, int], only: Iterable[str] | None = None) -> dict[tuple[str, int], FinalLog]:
    with KafkaConnection("127.0.0.1", port, timeout_s=30) as kafka:
        return {
            (topic, partition): read_log(kafka, topic, partition)
            for topic in only or topics
            for partition in range(topics[topic])
        }
