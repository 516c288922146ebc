"""Any local user can connect to the metrics port: that must never affect the broker's clients."""

from __future__ import annotations

import contextlib
import resource
import socket
import threading
import urllib.request
from pathlib import Path

import pytest

from mqd.acceptor.metrics.server import CONNECTIONS_MAX
from mqd.protocol.messages import MetadataRequest
from tests.broker import Broker
from tests.interaction.traffic import METADATA, create_topic, eventually, must_produce, rss_bytes
from tests.kafka_connection import KafkaConnection

CONNECTIONS = 2000
DESCRIPTORS = 1024  # the acceptor's limit: a common default
GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture
def broker(start_broker) -> Broker:
    broker = start_broker()
    resource.prlimit(broker.pid("mqd-acceptor"), resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    return broker


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.read().decode()


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(b"", marks=pytest.mark.slow, id="silent"),
        pytest.param(GET[:-2], id="half"),
        pytest.param(GET, marks=pytest.mark.slow, id="never-read"),
    ],
)
def test_thousands_of_connections_to_the_metrics_port(broker: Broker, message: bytes) -> None:
    """They used to take all descriptors of the acceptor, or a thread each."""
    acceptor, port = broker.pid("mqd-acceptor"), broker.status()["metrics_port"]
    with KafkaConnection(port=broker.port) as kafka:
        create_topic(kafka, "t")
    assert "mqd_worker_running" in scrape(port)
    before = descriptors(acceptor), threads(acceptor), rss_bytes(acceptor)
    hostile: list[socket.socket] = []

    def flood() -> None:
        while len(hostile) < CONNECTIONS:
            connection = socket.socket()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(60)
            hostile.append(connection)
            with contextlib.suppress(OSError):
                connection.connect(("127.0.0.1", port))
                connection.sendall(message)

    flooding = threading.Thread(target=flood, daemon=True)
    flooding.start()
    most = [0, 0]
    while flooding.is_alive():
        with KafkaConnection(port=broker.port) as kafka:  # a new client
            must_produce(kafka, "t", 0, b"value")
            kafka.call(METADATA, 9, MetadataRequest(topics=None))
        most = [max(most[0], descriptors(acceptor)), max(most[1], threads(acceptor))]
        flooding.join(0.05)
    assert len(hostile) == CONNECTIONS
    assert "mqd_worker_running" in scrape(port)
    assert most[0] <= before[0] + CONNECTIONS_MAX + 8, (before, most)
    assert most[1] <= before[1] + 8, (before, most)
    assert rss_bytes(acceptor) <= before[2] + (32 << 20)
    for connection in hostile:
        connection.close()
    eventually(lambda: descriptors(acceptor) <= before[0] + 2, "their descriptors are kept")
    assert broker.pid("mqd-acceptor") == acceptor
