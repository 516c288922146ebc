"""Error messages of commands for a port with something other than a Kafka broker."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mqd.cli import librdkafka
from mqd.cli import main as main_module
from mqd.cli.broker_lookup import Cluster
from mqd.cli.common import EXIT_UNREACHABLE, CliError
from mqd.cli.kafka_request import Broker
from tests.ports import free_port

Serve = Callable[[socket.socket], None]


@pytest.fixture
def port() -> Iterator[Callable[[Serve], str]]:
    """port(serve): the address of a server that runs `serve` on each connection."""
    with contextlib.ExitStack() as stack:

        def begin(serve: Serve) -> str:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", free_port())))
            stack.callback(listening.shutdown, socket.SHUT_RDWR)

            def accept() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = listening.accept()
                        with contextlib.suppress(OSError), connection:
                            serve(connection)

            threading.Thread(target=accept, daemon=True).start()
            return "127.0.0.1:%d" % listening.getsockname()[1]

        yield begin


def says(text: bytes) -> Serve:
    def serve(connection: socket.socket) -> None:
        connection.sendall(text)
        connection.recv(1024)

    return serve


def silent(connection: socket.socket) -> None:
    while connection.recv(1024):
        pass


@pytest.mark.parametrize(
    "serve, what",
    [
        (says(b"SSH-2.0-OpenSSH_9.6\r\n"), "it answered 'SSH-2.0-OpenSSH_9.6'"),
        (says(b"HTTP/1.0 400 Bad Request\r\n\r\n"), "it answered 'HTTP/1.0 400 Bad Request'"),
        (says(b"\x00\x00\x00\x06\x00\x00\x00\x07\x00\x00"), "it answered"),  # another request's response
        (silent, "it accepts connections, but sent nothing within 0.2 s"),
    ],
    ids=["ssh", "http", "another answer", "silent"],
)
@pytest.mark.parametrize(
    "arguments", [("topic", "list"), ("produce", "t"), ("cluster", "status")], ids=lambda arguments: arguments[0]
)
def test_a_port_without_kafka_is_reported_with_its_response(
    port, serve: Serve, what: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(librdkafka.require_broker, "__defaults__", (0.2, True, None))
    monkeypatch.setattr(librdkafka.base_config, "__defaults__", (0.2, None))
    address = port(serve)
    started = time.monotonic()
    assert main_module._run([*arguments, "-b", address]) == EXIT_UNREACHABLE
    assert time.monotonic() - started < 10.0  # librdkafka alone takes 15 s
    error = capsys.readouterr().err
    assert error.startswith(f"mqd: {address} is not a Kafka broker: {what}") and "-b HOST:PORT" in error


@pytest.mark.parametrize(
    "serve", [says(b"\x15\x03\x01\x00\x02\x02\x46"), lambda connection: None], ids=["alert", "closes"]
)
def test_a_port_that_probably_requires_tls(port, serve: Serve) -> None:
    with pytest.raises(CliError, match="it probably requires TLS: .* MQD_CLIENT_CONFIG"):
        librdkafka.require_broker(port(serve))


def test_the_time_limit_is_three_seconds_and_trickling_does_not_extend_it(port) -> None:
    assert librdkafka.CONNECT_TIMEOUT_S == 3.0

    def trickles(connection: socket.socket) -> None:
        for _ in range(7):  # never a complete header
            connection.sendall(b"\0")
            time.sleep(0.1)

    with pytest.raises(librdkafka.CliError, match="is not a Kafka broker"):
        librdkafka.require_broker(port(trickles), 0.3)


def kafka(connection: socket.socket) -> None:
    """Only responds to ApiVersions, of any version."""
    while len(frame := connection.recv(1024)) > 12:
        connection.sendall(b"\x00\x00\x00\x0a" + frame[8:12] + b"\x00\x00" + bytes(4))


def test_the_next_address_is_tried_when_one_is_not_kafka(port) -> None:
    stranger, broker = port(says(b"SSH-2.0-x\r\n")), port(kafka)
    host, number = broker.split(":")
    assert librdkafka.require_broker(f"{stranger},{broker}") == (host, int(number))


def test_requests_go_to_the_address_that_responded(port, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger, broker = port(says(b"SSH-2.0-x\r\n")), port(kafka)
    requests = []
    monkeypatch.setattr(Broker, "_call", lambda self, *_: requests.append(self._socket.getpeername()) or _Spoken)
    with Broker(f"{stranger},{broker}"):
        assert requests == [("127.0.0.1", int(broker.split(":")[1]))]


class _Spoken:
    api_keys = ()


def test_a_client_with_tls_is_not_checked_in_plaintext(port) -> None:
    address = port(says(b"\x15\x03\x01\x00\x02\x02\x46"))
    for protocol in ("ssl", "SASL_SSL"):
        settings = {"security.protocol": protocol, "sasl.mechanisms": "PLAIN"}
        with pytest.raises(CliError, match=r"no TLS connection to .*; check security\.protocol, ssl\.ca\.location"):
            librdkafka.base_config(address, properties=settings)
        # only librdkafka can use this one, and reports it
        assert librdkafka.base_config(address, properties=settings | {"ssl.cipher.suites": "x"})


@pytest.mark.parametrize("where", ["closed", "unresolved", "stranger"])
def test_an_advertised_address_that_does_not_reach_its_broker(port: Callable[[Serve], str], where: str) -> None:
    """For group, txn, quota and cluster, which connect to a broker that another one names."""
    address, reason = {
        "closed": ("127.0.0.1:1", "Connection refused"),
        "unresolved": ("nohost.invalid:9092", "Name or service not known"),
        "stranger": (port(says(b"SSH-2.0-OpenSSH_9.6\r\n")), "it answered 'SSH-2.0-OpenSSH_9.6'"),
    }[where]
    cluster = Cluster("127.0.0.1:9092")
    cluster._nodes = {1: "127.0.0.1:9092", 2: address}
    with pytest.raises(CliError) as error:
        cluster.node(2)
    assert error.value.exit_code == EXIT_UNREACHABLE
    assert error.value.message.startswith(
        f"cannot reach broker 2 at {address}, the address that it advertises ({reason})"
    )
    assert "advertised.listeners" in error.value.message
