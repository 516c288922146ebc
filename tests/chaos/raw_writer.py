"""Writes one acks=all record after another to partition 0 of topic "t" like a client, but without a
client library's own delays: to the host that Metadata names as its leader.

    python -m tests.chaos.raw_writer '["10.77.0.11:9092,...", PACE_MS]' FILE

A line for each response to Produce: CLOCK_MONOTONIC nanoseconds, Kafka's error code (0:
acknowledged). A line for every other event: the time, "#", a description.

Each host has a thread that writes while that host leads, and one that queries it for the leader,
every ASK_S, while there is no acknowledgement. So a host that accepts connections and does not
respond (its kernel runs, its processes do not) delays no other host: requests waiting there are
given up when another host claims leadership, as in clients.
"""

from __future__ import annotations

import json
import select
import sys
import threading
import time

from mqd.protocol.messages import MetadataRequest
from tests.crash.workload import produce
from tests.kafka_connection import ConnectionEnded, KafkaConnection

TOPIC = "t"
CONNECT_S, ANSWER_S = 0.25, 2.0
REQUEST_S = 0.01
QUIET_S = 0.02  # without an acknowledgement: the leader is looked up


def _has_ended(kafka: KafkaConnection) -> bool:
    """Although no request is pending."""
    return bool(select.select([kafka.socket], [], [], 0)[0])


class Writer:
    """State shared by the threads, protected by `changed`."""

    def __init__(self, hosts: list[tuple[str, int]], pace_s: float, path: str) -> None:
        self.hosts, self.pace_s = hosts, pace_s
        self.changed = threading.Condition()
        self.leader, self.epoch = ("", 0), -1
        self.acknowledged = 0.0  # time.monotonic() of the newest
        self.doubted = False  # the leader has refused, or its connection has ended
        self._log = open(path, "w", buffering=1)

    def log(self, text: object) -> None:
        self._log.write(f"{time.monotonic_ns()} {text}\n")

    # -- one thread for each host ------------------------------------------------------------------

    def send_request(self, host: tuple[str, int]) -> None:
        kafka = None
        while True:
            with self.changed:
                quiet = self.doubted or time.monotonic() - self.acknowledged > QUIET_S
            if quiet:
                try:
                    kafka = kafka or KafkaConnection(*host, timeout_s=CONNECT_S)
                    self._learn(host, kafka.call(3, 12, MetadataRequest(topics=[MetadataRequest.Topic(name=TOPIC)])))
                except (OSError, ConnectionEnded):
                    kafka = None
            with self.changed:
                self.changed.wait(REQUEST_S)

    def _learn(self, requested: tuple[str, int], response: object) -> None:
        brokers = {broker.node_id: (broker.host, broker.port) for broker in response.brokers}
        partitions = [one for topic in response.topics for one in topic.partitions]
        if not partitions or partitions[0].leader_id not in brokers:
            return
        leader, epoch = brokers[partitions[0].leader_id], partitions[0].leader_epoch
        with self.changed:
            if epoch > self.epoch:
                self.leader, self.epoch, self.doubted = leader, epoch, False
                self.log(f"# {requested[0]} says that {leader[0]} leads in epoch {epoch}")
                self.changed.notify_all()

    def write(self, host: tuple[str, int]) -> None:
        kafka = None
        while True:
            with self.changed:
                while self.leader != host:
                    self.changed.wait()
                epoch = self.epoch
            error = -1
            try:
                if kafka is None or _has_ended(kafka):
                    kafka = KafkaConnection(*host, timeout_s=CONNECT_S)
                    kafka.socket.settimeout(ANSWER_S)
                error, _ = produce(kafka, TOPIC, 0, b"x" * 100)
            except (OSError, ConnectionEnded) as problem:
                kafka = None
                self.log(f"# {host[0]}: {problem or type(problem).__name__}")
            else:
                self.log(error)
            with self.changed:
                if error == 0:
                    self.acknowledged = time.monotonic()
                elif self.epoch == epoch:
                    self.doubted = True
                    self.changed.notify_all()
                    self.changed.wait(REQUEST_S)
            if error == 0:
                time.sleep(self.pace_s)


def main() -> int:
    bootstrap, pace_ms = json.loads(sys.argv[1])
    hosts = [(host, int(port)) for host, port in (entry.rsplit(":", 1) for entry in bootstrap.split(","))]
    writer = Writer(hosts, pace_ms / 1000, sys.argv[2])
    for work in (writer.send_request, writer.write):
        for host in hosts:
            threading.Thread(target=work, args=(host,), daemon=True).start()
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
