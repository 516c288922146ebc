"""Peers with protocols of their own: one C program (native/stream_load.c) creates their streams, probes
whether they respond, and drives them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from perf.peers.driving import LoadFailed, build, run
from perf.peers.peer import Load, Peer
from perf.peers.processes import PeerFailed

# records in flight: the defaults of nats.go and of RabbitMQ's Java client; Redis's clients have
# none, so it gets that of NATS
WINDOWS = {"nats": 4000, "rabbitmq": 10_000, "redis": 4000}


def stream_load() -> Path:
    return build(
        "stream_load", ["common.c", "stream_load.c", "stream_nats.c", "stream_rabbitmq.c", "stream_redis.c"], []
    )


class StreamPeer(Peer):
    """The partitions of a load are separate streams, written in turn."""

    def _send_request(self, what: str, topic: str = "ping", partitions: int = 1) -> str:
        return run(
            [
                str(stream_load()),
                what,
                f"protocol={self.protocol}",
                f"port={self.port}",
                f"topic={topic}",
                f"partitions={partitions}",
            ],
            60,
        )

    def is_ready(self) -> bool:
        """Whether a client can log in (and JetStream, or the stream plugin, responds)."""
        words = [f"protocol={self.protocol}", f"port={self.port}"]
        return subprocess.run([str(stream_load()), "ping", *words], capture_output=True, timeout=10).returncode == 0

    def unsupported_reason(self, load: Load) -> str:
        if load.compression != "none" or load.acks != "all":
            return "has no choice of codecs and acks"
        return super().unsupported_reason(load)

    def make_topic(self, name: str, load: Load) -> None:
        self._partitions = {**getattr(self, "_partitions", {}), name: load.partitions}
        try:
            self._send_request("create", name, load.partitions)
        except LoadFailed as error:
            raise PeerFailed(f"{self.name}: {error}") from None

    def drop_topic(self, name: str) -> None:
        self._send_request("delete", name, self._partitions.pop(name))


class StreamLoad:
    """One publishing and one reading connection, one thread; see native/stream_load.h."""

    name = "stream_load"

    def __init__(self) -> None:
        self._program = str(stream_load())

    def version(self) -> str:
        return "stream_load"

    def _run(self, what: str, peer: Peer, topic: str, load: Load, timeout_s: float, **words: object) -> dict:
        common = {
            "protocol": peer.protocol,
            "port": peer.port,
            "topic": topic,
            "partitions": load.partitions,
            "record_bytes": load.record_bytes,
            "window": WINDOWS[peer.protocol],
        }
        return json.loads(
            run([self._program, what, *(f"{key}={value}" for key, value in {**common, **words}.items())], timeout_s)
        )

    def produce(
        self, peer: Peer, topic: str, load: Load, *, records: int, milliseconds: int, reading: bool = False
    ) -> dict:
        return self._run(
            "produce",
            peer,
            topic,
            load,
            60 + milliseconds / 1000,
            records=records,
            milliseconds=milliseconds,
            reading=int(reading),
        )

    def consume(self, peer: Peer, topic: str, load: Load, *, records: int) -> dict:
        return self._run("consume", peer, topic, load, 90, records=records)

    def latency(
        self, peer: Peer, topic: str, load: Load, *, rate: int, milliseconds: int, warm_milliseconds: int
    ) -> dict:
        timeout_s = 60 + (milliseconds + warm_milliseconds) / 1000
        return self._run(
            "latency",
            peer,
            topic,
            load,
            timeout_s,
            rate=rate,
            milliseconds=milliseconds,
            warm_milliseconds=warm_milliseconds,
        )
