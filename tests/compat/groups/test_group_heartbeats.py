"""Heartbeats of the consumer protocol under load: librdkafka waits for a response only as long as
the heartbeat interval, so with a short one a busy broker's responses are too late.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.protocol.messages import ConsumerGroupDescribeRequest
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually

pytestmark = pytest.mark.slow

MEMBERS = 20
SECONDS = 60.0
LATE_S = 0.5  # allowed delay of a response; librdkafka checks for late ones once a second
DESCRIBE = 69


class Member(logging.Handler):
    """A loaded consumer: it reads its partition, and records the intervals that it receives."""

    def __init__(self, bootstrap: str, group: str, topic: str) -> None:
        super().__init__()
        self.troubles: list[str] = []
        self._logger = logging.Logger("member")
        self._logger.addHandler(self)
        self.held: list[int] = []
        self.read = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._live, args=(bootstrap, group, topic), daemon=True)
        self._thread.start()

    def _live(self, bootstrap: str, group: str, topic: str) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": group,
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
                "logger": self._logger,
                "error_cb": lambda error: self.troubles.append(str(error)),
            }
        )
        consumer.subscribe(
            [topic],
            on_assign=lambda _, given: self.held.extend(one.partition for one in given),
            on_revoke=lambda _, taken: [self.held.remove(one.partition) for one in taken],
            on_lost=lambda _, lost: self.troubles.append(f"lost {lost}"),
        )
        while not self._left.is_set():
            message = consumer.poll(0.1)
            if message is not None and message.error():
                self.troubles.append(str(message.error()))
            self.read += message is not None
        consumer.close()

    def emit(self, record: logging.LogRecord) -> None:
        self.troubles.append(record.getMessage())

    def leave(self) -> None:
        self._left.set()
        self._thread.join(SECONDS)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path) as broker:
        yield broker


def until(what: str, holds: Callable[[], bool], seconds: float = SECONDS) -> None:
    eventually(holds, what, seconds)


def epochs(broker: Broker, group: str) -> dict[str, int]:
    """Of each member, by its id."""
    with KafkaConnection.connect("127.0.0.1", int(broker.bootstrap.rpartition(":")[2])) as kafka:
        response = kafka.call(DESCRIBE, 0, ConsumerGroupDescribeRequest(group_ids=[group]))
    return {member.member_id: member.member_epoch for member in response.groups[0].members}


def test_twenty_loaded_members_are_not_fenced(broker: Broker) -> None:
    topic, group = f"busy-{uuid.uuid4().hex[:8]}", f"group-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(topic, MEMBERS)])[topic].result(SECONDS)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 5})
    members = [Member(broker.bootstrap, group, topic) for _ in range(MEMBERS)]

    def write(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for partition in range(MEMBERS):
                producer.produce(topic, bytes(1000), partition=partition)
            producer.poll(0.001)

    try:
        until("each member holds a partition", lambda: all(len(member.held) == 1 for member in members))
        before = epochs(broker, group)
        assert len(before) == MEMBERS
        acceptor = broker.pid("mqd-acceptor")
        for _ in range(5):
            write(0.5)
            os.kill(acceptor, signal.SIGSTOP)  # like a load that takes all its CPU
            try:
                write(LATE_S)
            finally:
                os.kill(acceptor, signal.SIGCONT)
        written = producer.flush(SECONDS)
        assert written == 0
        until("all is read", lambda: all(member.read for member in members))
        assert [trouble for member in members for trouble in member.troubles] == []
        assert epochs(broker, group) == before, "the fenced member has joined again"
        assert all(len(member.held) == 1 for member in members)
    finally:
        for member in members:
            member.leave()
