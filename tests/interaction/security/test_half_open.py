"""Ten thousand clients begin a TLS handshake and do not finish it: they are disconnected in time,
and other clients are not slowed down meanwhile.
"""

from __future__ import annotations

import resource
import selectors
import socket
import ssl
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.certificates import Authority
from tests.interaction.traffic import eventually
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port

COUNT = 10_000
HANDSHAKE_S = 10.0  # the time limit of a handshake
API_VERSIONS, METADATA = 18, 3
ROUND_TRIPS = 200


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[Broker, int, ssl.SSLContext]]:
    authority, port = Authority(), free_port()
    config = {
        "listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}",
        "ssl.keystore.location": str(authority.issue("broker").write(tmp_path / "keystore.pem")),
        "max.connections": str(3 * COUNT),  # each worker has half, with room for some of the other's
    }
    context = ssl.create_default_context(cafile=str(authority.write(tmp_path / "ca.pem")))
    with Broker(tmp_path / "data", config=config) as broker:
        yield broker, port, context


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < COUNT + 1000:
        pytest.skip(f"this user may have {hard} descriptors, and {COUNT} connections are made")
    resource.setrlimit(resource.RLIMIT_NOFILE, (COUNT + 1000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def client_hello(context: ssl.SSLContext) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


def latencies(kafka: KafkaConnection) -> list[float]:
    found = []
    for _ in range(ROUND_TRIPS):
        began = time.monotonic()
        assert kafka.call(METADATA, 12).brokers
        found.append(time.monotonic() - began)
    return found


def p99(found: list[float]) -> float:
    return statistics.quantiles(found, n=100)[98]


def connection_count(broker: Broker) -> int:
    return sum(worker["connections"] for worker in broker.status()["workers"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_half_open_handshakes(secured, many_descriptors) -> None:
    broker, port, context = secured
    hello = client_hello(context)
    begun = (b"", hello[:1], hello[: len(hello) // 2], hello)  # the last makes the broker sign
    with KafkaConnection("127.0.0.1", broker.port) as bystander, selectors.DefaultSelector() as selector:
        before = latencies(bystander)
        during: list[float] = []
        ends_s: list[float] = []
        open_max = 0
        for number in range(COUNT):
            connection = socket.create_connection(("127.0.0.1", port), timeout=60)
            connection.sendall(begun[number % len(begun)])
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, time.monotonic())
            if number % 1000 == 999:
                open_max = max(open_max, connection_count(broker))
                during += latencies(bystander)
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as newcomer,
        ):
            assert newcomer.version() == "TLSv1.3"
        while selector.get_map():
            during += latencies(bystander)
            for key, _ in selector.select(0.1):
                try:
                    if key.fileobj.recv(1 << 16):
                        continue  # the broker's half of the handshake
                except ConnectionError:
                    pass
                ends_s.append(time.monotonic() - key.data)
                selector.unregister(key.fileobj)
                key.fileobj.close()
            assert time.monotonic() - max(key.data for key in selector.get_map().values() or [key]) < 6 * HANDSHAKE_S
        assert len(ends_s) == COUNT and min(ends_s) > HANDSHAKE_S / 2
        eventually(lambda: connection_count(broker) == 1, "all of them are closed")
        assert bystander.call(API_VERSIONS, 3).error_code == 0
    print(
        f"{COUNT} half-open handshakes, {open_max} at once, ended after {statistics.median(ends_s):.1f} s (median),"
        f" {max(ends_s):.1f} s at most; p99 of others {1000 * p99(before):.1f} ms before,"
        f" {1000 * p99(during):.1f} ms meanwhile, {1000 * max(during):.1f} ms at most"
    )
    assert p99(during) < max(10 * p99(before), 0.1)
