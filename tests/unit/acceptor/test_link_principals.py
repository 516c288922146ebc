"""Principals between workers and the acceptor: the client that a request comes from, and the
message to a worker about an authenticated client. The test plays the worker's side.
"""

from pathlib import Path

import pytest

from mqd import native
from mqd.acceptor import client_identity, dispatch
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.client_identity import UNKNOWN, Identity
from mqd.native import Descriptor, DescriptorKind, PrincipalKind
from mqd.protocol.errors import ProtocolError
from mqd.security.principal import ANONYMOUS
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_link import ACCEPTOR, Wire, everything, run

ALICE = b"\x0a\0\1\0User:alice"
# SaslAuthenticate 0, correlation id 0, no client id, three bytes of token
TOKEN = bytes.fromhex("0024 0000 00000000 ffff 00000003") + b"abc"


def send_request(wire: Wire, data: bytes, flags: int, connection: int = 5) -> None:
    wire.arenas[0][: len(data)] = data  # type: ignore[index]
    assert wire.ends[0].send(
        ACCEPTOR, Descriptor(kind=DescriptorKind.REQUEST, flags=flags, token=7, size_bytes=len(data), a=1, b=connection)
    )
    wire.ends[0].flush()


def answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: dispatch.Outcome, data: bytes, flags: int = 0
) -> tuple[list[tuple[Origin, bytes]], Descriptor, bytes]:
    """(requests to the handlers, responses to the worker)"""
    requests: list[tuple[Origin, bytes]] = []
    found: list[tuple[Descriptor, bytes]] = []

    async def answer(_broker: object, origin: Origin, frame: bytes, *_: object) -> dispatch.Outcome:
        requests.append((origin, frame))
        return outcome

    async def scenario(_broker: HandlerBroker, wire: Wire) -> None:
        monkeypatch.setattr(dispatch, "respond", answer)
        send_request(wire, data, flags)
        (response,) = await wire.receive(0)
        found.append((response, wire.payload(response)))

    run(tmp_path, scenario)
    return requests, *found[0]


def test_a_request_names_its_principal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = dispatch.Outcome(b"response")
    ((origin, frame),), response, body = answered(
        tmp_path, monkeypatch, outcome, ALICE + everything(), native.REQUEST_PRINCIPAL
    )
    assert (origin.principal, origin.principal_kind, frame) == ("User:alice", PrincipalKind.SASL, everything())
    assert origin.connection == (0, 5), "no process before it had the link"
    assert (response.flags, body) == (0, b"response")


def test_a_listener_without_authentication(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ((origin, frame),), _, _ = answered(tmp_path, monkeypatch, dispatch.Outcome(b"response"), everything())
    assert (origin.principal, origin.principal_kind, frame) == (ANONYMOUS, PrincipalKind.ANONYMOUS, everything())


def test_an_address_of_ipv6_comes_with_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = b"\0\0\0\3::1"
    ((origin, frame),), _, _ = answered(
        tmp_path, monkeypatch, dispatch.Outcome(b"response"), block + everything(), native.REQUEST_PRINCIPAL
    )
    assert (origin.principal, origin.peer_ip, frame) == (ANONYMOUS, "::1", everything())


def test_a_client_that_has_authenticated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = dispatch.Outcome(b"response", authenticated_as=("User:alice", 3_600_000, PrincipalKind.TOKEN))
    _, response, body = answered(tmp_path, monkeypatch, outcome, everything())
    assert response.flags == native.RESPONSE_AUTHENTICATED
    assert (
        body
        == bytes([10, 0, PrincipalKind.TOKEN, 0, 0, 0, 0, 0])
        + (3_600_000).to_bytes(8, "little")
        + b"User:aliceresponse"
    )


def test_a_client_that_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, response, body = answered(
        tmp_path, monkeypatch, dispatch.Outcome(b"refused", ends_connection=True), everything()
    )
    assert (response.flags, body) == (native.RESPONSE_DISCONNECT, b"refused")


@pytest.mark.parametrize(
    ("answer", "flags", "body"),
    [
        ((0, b"", b"challenge"), 0, b"challenge"),
        ((0, b"", b""), 0, b""),
        ((0, b"no error", b"challenge"), 0, b"challenge"),
        ((58, b"wrong", b""), native.RESPONSE_NONE | native.RESPONSE_DISCONNECT, b""),
    ],
)
def test_a_bare_token_gets_a_bare_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: tuple[int, bytes, bytes], flags: int, body: bytes
) -> None:
    error, message, token = answer
    response = b"\0\0\0\0" + error.to_bytes(2, "big")
    response += len(message).to_bytes(2, "big") + message if message else b"\xff\xff"
    response += len(token).to_bytes(4, "big") + token
    outcome = dispatch.Outcome(response, ends_connection=error != 0)
    ((_, frame),), reported, got = answered(tmp_path, monkeypatch, outcome, b"abc", native.REQUEST_RAW_TOKEN)
    assert frame == TOKEN
    assert (reported.flags, got) == (flags, body)


def test_the_last_bare_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    response = bytes.fromhex("00000000 0000 ffff 00000004") + b"done"
    outcome = dispatch.Outcome(response, authenticated_as=("User:bob", 0, PrincipalKind.SASL))
    _, reported, body = answered(tmp_path, monkeypatch, outcome, b"abc", native.REQUEST_RAW_TOKEN)
    assert reported.flags == native.RESPONSE_AUTHENTICATED
    assert body == client_identity.authenticated_block("User:bob", 0, PrincipalKind.SASL) + b"done"


@pytest.mark.parametrize(
    "block", [b"", b"\x0a\0\1", b"\x0a\0\1\0User:alic", b"\0\0\1\2:", b"\1\0\1\0\xff", b"\1\0\x63\0U"]
)
def test_an_invalid_block_closes_the_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: bytes) -> None:
    with pytest.raises(ProtocolError):
        client_identity.split(native.REQUEST_PRINCIPAL, block)
    requested, reported, _ = answered(tmp_path, monkeypatch, dispatch.Outcome(b""), block, native.REQUEST_PRINCIPAL)
    assert not requested and reported.kind == DescriptorKind.CLOSE


def test_blocks() -> None:
    assert client_identity.split(0, b"frame") == (UNKNOWN, b"frame")
    assert client_identity.split(native.REQUEST_PRINCIPAL, ALICE) == (Identity("User:alice", PrincipalKind.SASL), b"")
    for principal in ("", "x" * (native.PRINCIPAL_BYTES_MAX + 1)):
        with pytest.raises(ValueError):
            client_identity.authenticated_block(principal, 0, PrincipalKind.SASL)
