"""Clients of a second library, kafka-python: the same histories from another implementation of the
protocol, with its own handling of retries, leaders and aborted records.

    python-producer   idempotent, acks=all, like "producer" of client.py
    python-consumer   reads committed records of all partitions from the start, without a group,
                      like "consumer" there
"""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Any

from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError, MessageSizeTooLargeError
from kafka.structs import TopicPartition

from tests.chaos.client import FINISH_SECONDS, IN_FLIGHT_MAX, STEP_SECONDS, Client, report
from tests.crash.checker import make_value

QUICK = {
    "request_timeout_ms": 5_000,
    "retry_backoff_ms": 50,
    "reconnect_backoff_ms": 50,
    "reconnect_backoff_max_ms": 500,
    "metadata_max_age_ms": 2_000,
}
NAMES = {  # of librdkafka's settings
    "security.protocol": "security_protocol",
    "ssl.ca.location": "ssl_cafile",
    "sasl.mechanisms": "sasl_mechanism",
    "sasl.username": "sasl_plain_username",
    "sasl.password": "sasl_plain_password",
}


def common(settings: dict[str, Any]) -> dict[str, Any]:
    login = {NAMES[name]: value for name, value in settings.get("login", {}).items()}
    return {"bootstrap_servers": settings["bootstrap"].split(","), "client_id": settings["name"], **login, **QUICK}


class PythonProducer(Client):
    """Numbers increase over all lives of the library's producer. Its callbacks run in its own
    thread: their results are recorded in this one.
    """

    number = 0
    producer: Any = None
    # why this life's records are refused permanently: after such an error the library accepts
    # records and fails them all
    refused = ""

    def begin(self) -> None:
        while not self.ending and self.producer is None:
            with contextlib.suppress(KafkaError):
                self.producer = KafkaProducer(
                    enable_idempotence=True,
                    acks="all",
                    linger_ms=2,
                    delivery_timeout_ms=3_600_000,
                    max_block_ms=STEP_SECONDS * 1000,
                    **common(self.settings),
                )

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.fates: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.under_way: dict[int, dict[str, Any]] = {}

    def run(self) -> int:
        due = time.monotonic()
        while not self.ending:
            self.begin()
            burst = self.chance.randrange(1, 20)
            if self.producer is not None and (not all(self.send() for _ in range(burst)) or self.refused):
                self.note(self.refused)
                self.end_producer(STEP_SECONDS)
            due = max(due + burst / self.settings["rate"], time.monotonic() - 0.2)
            while not self.ending and (len(self.under_way) > IN_FLIGHT_MAX or time.monotonic() < due):
                self.take_fates(0.02)
        self.end_producer(FINISH_SECONDS)
        self.writer.flush()
        return 0

    def end_producer(self, seconds: float) -> None:
        """Records that are neither acknowledged nor refused by then have an unknown outcome."""
        if self.producer is not None:
            with contextlib.suppress(KafkaError):
                self.producer.flush(timeout=seconds)
            self.producer.close(timeout=1.0)
            self.producer, self.refused = None, ""
        self.take_fates(0.0)
        for fate in self.under_way.values():
            self.writer.write("send", **fate, end_ns=time.monotonic_ns())
        self.under_way.clear()

    def send(self) -> bool:
        """False: this producer accepts no more records."""
        topic, partition = self.chance.choice(self.places)
        fate = {
            "number": self.number,
            "topic": topic,
            "partition": partition,
            "status": "info",
            "offset": -1,
            "begin_ns": time.monotonic_ns(),
            "txn": None,
        }
        self.number += 1
        life = self.producer

        def done(metadata: Any) -> None:
            self.fates.put(fate | {"status": "ok", "offset": metadata.offset, "end_ns": time.monotonic_ns()})

        def failed(error: BaseException) -> None:
            if self.producer is life and not isinstance(error, MessageSizeTooLargeError):
                self.refused = f"{type(error).__name__}: {error}"
            self.fates.put(
                fate
                | {
                    "status": "fail" if isinstance(error, MessageSizeTooLargeError) else "info",
                    "end_ns": time.monotonic_ns(),
                }
            )

        self.under_way[fate["number"]] = fate
        value, key = make_value(self.name, fate["number"]), f"{self.name}-{fate['number'] % 20}".encode()
        try:
            self.producer.send(topic, value, key, partition=partition).add_callback(done).add_errback(failed)
        except KafkaError as error:
            self.fates.put(fate | {"end_ns": time.monotonic_ns()})
            self.refused = f"{type(error).__name__}: {error}"
            return False
        return True

    def take_fates(self, seconds: float) -> None:
        with contextlib.suppress(queue.Empty):
            one = self.fates.get(timeout=seconds) if seconds else self.fates.get_nowait()
            while True:
                if self.under_way.pop(one["number"], None) is not None:
                    self.writer.write("send", **one)
                    self.writer.worked(one["status"] == "ok")
                one = self.fates.get_nowait()


class PythonConsumer(Client):
    def run(self) -> int:
        consumer = None
        while not self.ending and consumer is None:
            with contextlib.suppress(KafkaError):
                consumer = KafkaConsumer(
                    group_id=None,
                    isolation_level="read_committed",
                    enable_auto_commit=False,
                    auto_offset_reset="none",
                    check_crcs=True,
                    fetch_max_wait_ms=100,
                    **common(self.settings),
                )
        if consumer is None:
            return 0
        assigned = [TopicPartition(topic, partition) for topic, partition in self.places]
        consumer.assign(assigned)
        for partition in assigned:
            consumer.seek(partition, 0)
        while not self.ending:
            try:
                found = consumer.poll(timeout_ms=200, max_records=500)
            except KafkaError as error:
                self.note(f"{type(error).__name__}: {error}")
                self.writer.worked(False)
                continue
            for records in found.values():
                for record in records:
                    self.writer.write(
                        "poll",
                        epoch=0,
                        topic=record.topic,
                        partition=record.partition,
                        offset=record.offset,
                        value=report(record.value),
                        at_ns=time.monotonic_ns(),
                    )
            self.writer.worked(bool(found))
        self.writer.flush()
        consumer.close()
        return 0


ROLES = {"python-producer": PythonProducer, "python-consumer": PythonConsumer}
