"""`python -m perf queues`: mqd's work queues compared with those of its peers: the broker's CPU for each job.

A queue is filled with jobs of 1 KiB, each confirmed by the broker. Then one worker takes them all and
acknowledges each individually: many at a time (500 in flight), or one job at a time. The figure is the
CPU time of the broker's processes; the clients, in Python here, only set the pace. Rates only show that
no broker was idle: they depend on the clients as much as on the brokers.

    mqd, Apache Kafka        share groups, by librdkafka's ShareConsumer in explicit mode; one at a time by
                             mqd's, over TCP, because librdkafka's limit is soft
    RabbitMQ                 quorum and classic queues, durable, persistent messages, AMQP 0-9-1
    Redis Streams            a consumer group: XREADGROUP, XACK
    NATS JetStream           a stream with the retention `workqueue`, a pull consumer, explicit acknowledgements
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Producer, ShareConsumer

import mqd
from perf import loading
from perf.peers import amqp
from perf.peers.apache_kafka import ApacheKafka
from perf.peers.mqd_broker import Mqd
from perf.peers.nats_jetstream import NatsJetStream
from perf.peers.peer import Load, Peer, Unavailable
from perf.peers.processes import PeerFailed
from perf.peers.rabbitmq_streams import RabbitmqStreams
from perf.peers.redis_streams import RedisStreams
from tests.interaction.share_members import configure_group

JOB = bytes(1024)
IN_FLIGHT = 500
SECONDS = 120.0
GROUP = "workers"


class Queue:
    """`fill` returns when all jobs are confirmed. `work` takes and acknowledges `count` jobs, up to
    `at_a_time` of them at a time.
    """

    def __init__(self, peer: Any, name: str) -> None:
        self.peer, self.name = peer, name

    def fill(self, count: int) -> None:
        raise NotImplementedError

    def work(self, count: int, at_a_time: int) -> None:
        raise NotImplementedError


class ShareGroup(Queue):
    def __init__(self, peer: Any, name: str) -> None:
        super().__init__(peer, name)
        peer.make_topic(name, Load(partitions=1, durable=isinstance(peer, Mqd)))
        self._settings = {"bootstrap.servers": peer.address}
        configure_group(peer.address, f"{GROUP}-{name}", "share.auto.offset.reset", "earliest")

    def fill(self, count: int) -> None:
        failed: list[object] = []
        producer = Producer(
            {**self._settings, "acks": "all", "linger.ms": 5, "queue.buffering.max.messages": 1_000_000}
        )
        for _ in range(count):
            producer.produce(self.name, JOB, on_delivery=lambda error, _: failed.append(error) if error else None)
            producer.poll(0)
        if producer.flush(SECONDS) or failed:
            raise PeerFailed(f"jobs were not written: {failed[:1]}")

    def work(self, count: int, at_a_time: int) -> None:
        settings = {**self._settings, "group.id": f"{GROUP}-{self.name}", "share.acknowledgement.mode": "explicit"}
        consumer: Any = (
            mqd.ShareConsumer({**settings, "transport": "tcp"}) if at_a_time == 1 else ShareConsumer(settings)
        )
        consumer.subscribe([self.name])
        deadline = _deadline()
        done = 0
        while done < count:
            deadline()
            messages = consumer.consume(1, 1.0) if at_a_time == 1 else consumer.poll(1.0)
            for message in messages:
                if message.error() is None:
                    consumer.acknowledge(message)
                    done += 1
            if messages:
                consumer.commit_sync()
        consumer.close()


class RabbitQueue(Queue):
    kind = "classic"

    def fill(self, count: int) -> None:
        channel = amqp.Channel(self.peer.amqp_port, self.name, self.kind)
        channel.publish([JOB] * count)
        channel.close()

    def work(self, count: int, at_a_time: int) -> None:
        channel = amqp.Channel(self.peer.amqp_port, self.name, self.kind)
        tags = channel.consume(at_a_time)
        part = max(1, at_a_time // 2)  # the rest is on its way meanwhile
        while count:
            some = [next(tags) for _ in range(min(part, count))]
            channel.acknowledge(some)
            count -= len(some)
        channel.wait_until_read()
        channel.close()


class QuorumQueue(RabbitQueue):
    kind = "quorum"


class RedisGroup(Queue):
    def __init__(self, peer: Any, name: str) -> None:
        super().__init__(peer, name)
        self._socket = socket.create_connection(("127.0.0.1", peer.port), SECONDS)
        self._file = self._socket.makefile("rb")
        self._call([["XGROUP", "CREATE", name, GROUP, "0", "MKSTREAM"]])

    def fill(self, count: int) -> None:
        for begin in range(0, count, IN_FLIGHT):
            self._call([["XADD", self.name, "*", "job", JOB]] * min(IN_FLIGHT, count - begin))

    def work(self, count: int, at_a_time: int) -> None:
        while count:
            read: list[str | bytes] = [
                "XREADGROUP",
                "GROUP",
                GROUP,
                "one",
                "COUNT",
                str(at_a_time),
                "STREAMS",
                self.name,
                ">",
            ]
            ((_, entries),) = self._call([read])[0]
            self._call([["XACK", self.name, GROUP, identity] for identity, _ in entries])
            count -= len(entries)

    def _call(self, commands: list[list[str | bytes]]) -> list[Any]:
        """Sends the commands in a pipeline. Returns their replies."""
        self._socket.sendall(b"".join(map(_resp, commands)))
        return [self._reply() for _ in commands]

    def _reply(self) -> Any:
        line = self._file.readline()
        kind, text = line[:1], line[1:-2]
        if kind == b"-" or not kind:
            raise PeerFailed(f"Redis: {text.decode()}")
        if kind == b"*":
            return [self._reply() for _ in range(int(text))]
        return self._file.read(int(text) + 2)[:-2] if kind == b"$" else text


def _resp(words: list[str | bytes]) -> bytes:
    parts = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


class NatsQueue(Queue):
    def __init__(self, peer: Any, name: str) -> None:
        super().__init__(peer, name)
        self._socket = socket.create_connection(("127.0.0.1", peer.port), SECONDS)
        self._file = self._socket.makefile("rb")
        self._file.readline()  # INFO
        self._send(b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB _INBOX.one 1\r\n')
        stream = {"name": name, "subjects": [name], "retention": "workqueue", "storage": "file", "num_replicas": 1}
        self._request(f"$JS.API.STREAM.CREATE.{name}", stream)
        consumer = {"durable_name": GROUP, "ack_policy": "explicit", "max_ack_pending": 2 * IN_FLIGHT}
        self._request(f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.{GROUP}", {"stream_name": name, "config": consumer})

    def fill(self, count: int) -> None:
        publish = b"PUB %b _INBOX.one %d\r\n%b\r\n" % (self.name.encode(), len(JOB), JOB)
        for begin in range(0, count, IN_FLIGHT):
            some = min(IN_FLIGHT, count - begin)
            self._send(publish * some)
            for _ in range(some):
                if b'"error"' in (answer := self._message()[1]):
                    raise PeerFailed(f"NATS: {answer!r}")

    def work(self, count: int, at_a_time: int) -> None:
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self.name}.{GROUP}".encode()
        while count:
            wanted = min(at_a_time, count)
            ask = json.dumps({"batch": wanted, "expires": int(SECONDS * 1e9)}).encode()
            self._send(b"PUB %b _INBOX.one %d\r\n%b\r\n" % (subject, len(ask), ask))
            places = [self._message()[0] for _ in range(wanted)]
            self._send(b"".join(b"PUB %b 4\r\n+ACK\r\n" % place for place in places))
            count -= wanted
        self._send(b"PING\r\n")
        while not self._file.readline().startswith(b"PONG"):
            pass

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _request(self, subject: str, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._send(b"PUB %b _INBOX.one %d\r\n%b\r\n" % (subject.encode(), len(data), data))
        if b'"error"' in (answer := self._message()[1]):
            raise PeerFailed(f"NATS: {answer!r}")

    def _message(self) -> tuple[bytes, bytes]:
        """The subject to reply to, and the payload."""
        while True:
            words = self._file.readline().split()
            if not words or words[0] == b"-ERR":
                raise PeerFailed(f"NATS: {words}")
            if words[0] == b"PING":
                self._send(b"PONG\r\n")
            if words[0] in (b"MSG", b"HMSG"):
                data = self._file.read(int(words[-1]) + 2)[:-2]
                is_reply = len(words) > (4 if words[0] == b"MSG" else 5)
                return (words[3] if is_reply else b""), data


class Kind(NamedTuple):
    peer: type[Peer]
    queue: type[Queue]
    label: str


KINDS = {
    "mqd": Kind(Mqd, ShareGroup, "mqd, a share group"),
    "kafka": Kind(ApacheKafka, ShareGroup, "Apache Kafka, a share group"),
    "quorum": Kind(RabbitmqStreams, QuorumQueue, "RabbitMQ, a quorum queue"),
    "classic": Kind(RabbitmqStreams, RabbitQueue, "RabbitMQ, a classic queue"),
    "redis": Kind(RedisStreams, RedisGroup, "Redis Streams, a group"),
    "nats": Kind(NatsJetStream, NatsQueue, "NATS JetStream, a work queue"),
}


class Measured(NamedTuple):
    label: str
    what: str
    jobs: int
    seconds: float
    cpu_seconds: float

    def line(self) -> str:
        cpu_us = 1e6 * self.cpu_seconds / self.jobs
        return f"{self.label:30} {self.what:22} {cpu_us:8.2f} {self.jobs / self.seconds:12,.0f}"


def _deadline() -> Callable[[], None]:
    until = time.monotonic() + SECONDS

    def check() -> None:
        if time.monotonic() > until:
            raise PeerFailed(f"not all jobs arrived within {SECONDS:.0f} s")

    return check


def measure(kind: Kind, directory: Path, jobs: int) -> Iterator[Measured]:
    peer = kind.peer(directory)
    peer.prepare()
    peer.start()
    try:
        kind.queue(peer, "warm").fill(jobs // 10)
        for what, count, at_a_time in (
            (f"{IN_FLIGHT} in flight", jobs, IN_FLIGHT),
            ("one at a time", max(100, jobs // 10), 1),
        ):
            queue = kind.queue(peer, f"jobs-{at_a_time}")
            for name, action in (
                ("published", lambda queue=queue, count=count: queue.fill(count)),
                (what, lambda queue=queue, count=count, most=at_a_time: queue.work(count, most)),
            ):
                if name == "published" and at_a_time == 1:
                    action()
                    continue
                began, cpu = time.monotonic(), peer.cpu_spent()
                action()
                yield Measured(kind.label, name, count, time.monotonic() - began, (peer.cpu_spent() - cpu).total)
    finally:
        peer.drop()


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf queues", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=KINDS, metavar="PEER", help=", ".join(KINDS))
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--quick", action="store_true", help="20,000 jobs: to try the program, not to compare")
    arguments = parser.parse_args(words)
    jobs = 20_000 if arguments.quick else arguments.jobs
    place = Path(os.environ.get("MQD_PERF_DIR") or loading.BUILD)
    place.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="queues-", dir=place))
    failed = 0
    print(f"{'':30} {'':22} {'CPU-us/job':>10} {'jobs/s':>10}")
    try:
        for name in arguments.only or KINDS:
            try:
                for one in measure(KINDS[name], directory / name, jobs):
                    print(one.line(), flush=True)
            except (Unavailable, PeerFailed, OSError) as error:
                failed += 1
                print(f"{KINDS[name].label}: not measured: {error}", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if failed else 0
