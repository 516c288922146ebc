"""The requests that a connection of a SASL listener may send, in which order; others close it."""

from __future__ import annotations

import base64
import os
import signal
import socket
import struct
import time
from collections.abc import Callable

import pytest

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import MetadataRequest, SaslAuthenticateRequest, SaslHandshakeRequest
from mqd.security import client
from tests.broker import Broker
from tests.interaction.security.secured import PASSWORDS, Secured
from tests.interaction.traffic import eventually
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S

HANDSHAKE, AUTHENTICATE, METADATA, API_VERSIONS = 17, 36, 3, 18


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory):
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path_factory.mktemp("secured"), **options))
        return brokers[-1].start()

    yield Secured(start)
    for broker in brokers:
        broker.stop()


def authenticate(kafka: KafkaConnection, user: str = "alice", password: str | None = None) -> None:
    settings = {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": user,
        "sasl.password": PASSWORDS.get(user, "") if password is None else password,
    }
    client.security_from_properties(settings).authenticate(
        lambda key, request, version: kafka.call(key, version, request)
    )


def plain(user: str = "alice", password: str | None = None) -> bytes:
    return f"\0{user}\0{PASSWORDS[user] if password is None else password}".encode()


def test_requests_before_authentication_are_refused(secured: Secured) -> None:
    with secured.connect() as kafka:
        assert kafka.call(API_VERSIONS, 3).error_code == 0
        with pytest.raises(ConnectionEnded):
            kafka.call(METADATA, 12, MetadataRequest())
    for key, version in ((0, 9), (1, 12), (2, 7), (19, 7), (29, 3), (44, 1), (37, 3)):
        with secured.connect() as kafka, pytest.raises(ConnectionEnded):
            kafka.call(key, version)


def test_requests_pipelined_behind_the_authentication_wait_for_it(secured: Secured) -> None:
    with secured.connect() as kafka:
        kafka.send(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
        kafka.send(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=plain()))
        kafka.send(METADATA, 12, MetadataRequest())
        assert kafka.receive().body.error_code == 0
        assert kafka.receive().body.error_code == 0
        assert kafka.receive().body.brokers


def test_requests_pipelined_behind_a_failed_authentication_are_not_answered(secured: Secured) -> None:
    with secured.connect() as kafka:
        kafka.send(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
        kafka.send(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=plain(password="wrong")))
        kafka.send(METADATA, 12, MetadataRequest())
        assert kafka.receive().body.error_code == 0
        refused = kafka.receive().body
        assert refused.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED and "PLAIN" in refused.error_message
        with pytest.raises(ConnectionEnded):
            kafka.receive()


def test_mechanisms_are_named(secured: Secured) -> None:
    with secured.connect() as kafka:
        found = kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="GSSAPI"))
        assert found.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM
        assert sorted(found.mechanisms) == ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


def test_a_token_without_a_handshake(secured: Secured) -> None:
    with secured.connect() as kafka:
        kafka.send(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=plain()))
        try:
            assert kafka.receive().body.error_code == ErrorCode.ILLEGAL_SASL_STATE
        except ConnectionEnded:
            pass
        with pytest.raises(ConnectionEnded):
            kafka.call(METADATA, 12, MetadataRequest())


def test_a_plain_listener_has_no_sasl(secured: Secured) -> None:
    with KafkaConnection(port=secured.broker.port) as kafka:
        found = kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
        assert found.error_code == ErrorCode.ILLEGAL_SASL_STATE
        found = kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=plain()))
        assert found.error_code == ErrorCode.ILLEGAL_SASL_STATE
        assert kafka.call(METADATA, 12, MetadataRequest()).brokers


def is_closed(kafka: KafkaConnection) -> bool:
    """Waits for the broker to say anything."""
    try:
        return kafka.socket.recv(1) == b""
    except ConnectionResetError:
        return True


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def bare(kafka: KafkaConnection) -> bytes:
    """A token of the old form, without a Kafka header."""
    head = kafka.socket.recv(4, socket.MSG_WAITALL)
    if len(head) < 4:
        raise ConnectionEnded("closed")
    (size,) = struct.unpack(">i", head)
    return kafka.socket.recv(size, socket.MSG_WAITALL) if size else b""


def test_the_old_form_with_bare_tokens(secured: Secured) -> None:
    with secured.connect() as kafka:
        assert kafka.call(HANDSHAKE, 0, SaslHandshakeRequest(mechanism="PLAIN")).error_code == 0
        kafka.send_raw(frame(plain()))
        assert bare(kafka) == b""
        assert kafka.call(METADATA, 12, MetadataRequest()).brokers
    with secured.connect() as kafka:
        assert kafka.call(HANDSHAKE, 0, SaslHandshakeRequest(mechanism="SCRAM-SHA-512")).error_code == 0

        def step(token: bytes) -> bytes:
            kafka.send_raw(frame(token))
            return bare(kafka)

        client.scram("SCRAM-SHA-512", "alice", PASSWORDS["alice"], step)
        assert kafka.call(METADATA, 12, MetadataRequest()).brokers
    with secured.connect() as kafka:
        kafka.call(HANDSHAKE, 0, SaslHandshakeRequest(mechanism="PLAIN"))
        kafka.send_raw(frame(plain(password="wrong")))
        with pytest.raises((ConnectionEnded, ConnectionError)):
            bare(kafka)


def test_a_giant_token_and_a_truncated_one(secured: Secured) -> None:
    with secured.connect() as kafka:
        kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
        kafka.send_raw(struct.pack(">i", 1 << 24) + bytes(1000))
        assert is_closed(kafka)
    with secured.connect() as kafka:
        kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
        found = kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=b"\0" + b"a" * 400_000 + b"\0b"))
        assert found.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED


def test_a_replayed_proof_is_refused(secured: Secured) -> None:
    tokens: list[bytes] = []
    with secured.connect() as kafka:
        kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="SCRAM-SHA-256"))

        def step(token: bytes) -> bytes:
            tokens.append(token)
            return bytes(kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=token)).auth_bytes)

        client.scram("SCRAM-SHA-256", "alice", PASSWORDS["alice"], step)
    with secured.connect() as kafka:
        kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="SCRAM-SHA-256"))
        assert kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=tokens[0])).error_code == 0
        found = kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=tokens[1]))
        assert found.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED


def test_a_client_re_authenticates_only_as_the_same_user(secured: Secured) -> None:
    with secured.connect() as kafka:
        authenticate(kafka)
        authenticate(kafka)
        assert kafka.call(METADATA, 12, MetadataRequest()).brokers
        with pytest.raises((client.NotAuthenticated, ConnectionEnded)):
            authenticate(kafka, "bob")
        with pytest.raises((ConnectionEnded, OSError)):
            kafka.call(METADATA, 12, MetadataRequest())


def test_a_session_expires(start_broker: Callable[..., Broker]) -> None:
    """KIP-368: the connection of a client that ignores the session lifetime is closed."""
    port = Secured(start_broker, **{"connections.max.reauth.ms": "3000"})
    with port.connect() as kafka:
        kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
        found = kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=plain()))
        began = time.monotonic()
        assert found.session_lifetime_ms == 3000
        assert kafka.call(METADATA, 12, MetadataRequest()).brokers
        with pytest.raises(ConnectionEnded):
            while time.monotonic() < began + PATIENCE_S:
                kafka.call(METADATA, 12, MetadataRequest())
        assert time.monotonic() - began >= 2.9
    with port.connect() as kafka:
        authenticate(kafka)
        end = time.monotonic() + 4.5
        while time.monotonic() < end:
            authenticate(kafka)
            assert kafka.call(METADATA, 12, MetadataRequest()).brokers


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_the_acceptor_dies(secured: Secured, when: str) -> None:
    """An exchange in progress is lost, an authenticated connection is not."""
    with secured.connect(timeout_s=20) as kafka:
        if when == "before":
            # once a worker has responded it has the connection; until then the acceptor may still have it
            kafka.call(API_VERSIONS, 3)
            _kill_acceptor(secured)
            authenticate(kafka)
        elif when == "between":
            kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="PLAIN"))
            _kill_acceptor(secured)
            found = kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=plain()))
            assert found.error_code == ErrorCode.ILLEGAL_SASL_STATE
            return
        else:
            authenticate(kafka)
            _kill_acceptor(secured)
        assert kafka.call(METADATA, 12, MetadataRequest()).brokers


def _kill_acceptor(secured: Secured) -> None:
    (before,) = secured.broker.pids("acceptor")
    os.kill(before, signal.SIGKILL)
    eventually(lambda: secured.broker.pids("acceptor") not in ([], [before]), "another acceptor")


def test_a_silent_connection_is_closed(secured: Secured) -> None:
    with secured.connect(timeout_s=30) as kafka:
        began = time.monotonic()
        assert is_closed(kafka)
        assert 5 < time.monotonic() - began < 25


def test_invalid_requests_do_not_disturb_others(secured: Secured) -> None:
    with secured.connect() as bystander:
        authenticate(bystander)
        for size in (1, 8, 100, 5000):
            with secured.connect() as kafka:
                kafka.call(HANDSHAKE, 1, SaslHandshakeRequest(mechanism="SCRAM-SHA-256"))
                found = kafka.call(AUTHENTICATE, 2, SaslAuthenticateRequest(auth_bytes=os.urandom(size)))
                assert found.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert bystander.call(METADATA, 12, MetadataRequest()).brokers


def test_the_log_names_no_password(secured: Secured) -> None:
    with secured.connect() as kafka:
        authenticate(kafka)
    with secured.connect() as kafka, pytest.raises(client.NotAuthenticated):
        authenticate(kafka, "alice", "a wrong p4ssword")
    logs = "".join(path.read_text(errors="replace") for path in (secured.broker.data_dir / "logs").glob("*.log"))
    assert "authentication failed" in logs and "User:alice" in logs
    for secret in (*PASSWORDS.values(), "a wrong p4ssword", base64.b64encode(plain()).decode()):
        assert secret not in logs
