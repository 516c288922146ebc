"""Required responses of a TLS server to clients that break the protocol, after the tests of
tlsfuzzer and testssl: old versions and ciphers, records that are empty, split, interleaved, too
long or of an unknown type, messages out of order, wrong proofs, renegotiation, heartbeat,
compression, downgrades, early data, damaged tickets. The client is tlslite-ng, or raw bytes. Alerts
have the names of RFC 8446.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from tests.broker import Broker
from tests.certificates import Authority
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S
from tests.ports import free_port

tlslite = pytest.importorskip("tlslite", reason="tlslite-ng is not installed (pip install tlslite-ng)")
from tlslite import messages  # noqa: E402
from tlslite.api import HandshakeSettings, TLSConnection  # noqa: E402
from tlslite.constants import ExtensionType  # noqa: E402
from tlslite.errors import TLSAbruptCloseError, TLSClosedConnectionError, TLSRemoteAlert  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

API_VERSIONS = struct.pack(">ihhih", 10, 18, 0, 7, -1)  # a request of version 0
CHANGE_CIPHER_SPEC, ALERT, HANDSHAKE, APPLICATION_DATA, HEARTBEAT = 20, 21, 22, 23, 24
ALERTS = {
    10: "unexpected_message",
    20: "bad_record_mac",
    22: "record_overflow",
    40: "handshake_failure",
    47: "illegal_parameter",
    50: "decode_error",
    51: "decrypt_error",
    70: "protocol_version",
    80: "internal_error",
    86: "inappropriate_fallback",
    100: "no_renegotiation",
    109: "missing_extension",
}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a listener with TLS; after all tests the broker must still be intact."""
    folder, tls_port = tmp_path_factory.mktemp("tls"), free_port()
    config = {
        "listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{tls_port}",
        "ssl.keystore.location": str(Authority().issue("broker").write(folder / "broker.pem")),
    }
    with Broker(folder / "data", workers=2, config=config) as broker:
        before = {process["name"]: process["pid"] for process in broker.running()}
        yield tls_port
        assert {process["name"]: process["pid"] for process in broker.running()} == before
        with KafkaConnection(port=broker.port) as kafka:
            assert kafka.call(18, 3).error_code == 0


@pytest.fixture(autouse=True)
def served_afterwards(port: int) -> Iterator[None]:
    """After each test another client is served."""
    yield
    with secured(port) as connection:
        assert is_served(connection)


# -- clients ---------------------------------------------------------------------------------------


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


def settings(version: tuple[int, int] | None = None, **changed: object) -> HandshakeSettings:
    made = HandshakeSettings()
    if version is not None:
        made.minVersion = made.maxVersion = version
    for name, value in changed.items():
        setattr(made, name, value)
    return made


TLS_1_2, TLS_1_3 = (3, 3), (3, 4)


@contextlib.contextmanager
def secured(
    port: int, version: tuple[int, int] | None = None, session=None, **changed: object
) -> Iterator[TLSConnection]:
    connection = TLSConnection(connected(port))
    try:
        connection.handshakeClientCert(settings=settings(version, **changed), session=session)
        yield connection
    finally:
        connection.sock.close()


def is_served(connection: TLSConnection) -> bool:
    connection.sendall(API_VERSIONS)
    return len(connection.recv(8)) > 0


def alert_of(work: Callable[[], object]) -> str:
    """The broker's response to what `work` does: an alert's name, or "closed"."""
    try:
        work()
    except TLSRemoteAlert as alert:
        return ALERTS.get(alert.description, str(alert.description))
    except (TLSAbruptCloseError, TLSClosedConnectionError, ConnectionError):
        return "closed"
    return "nothing"


def send(connection: TLSConnection, kind: int, body: bytes) -> None:
    """One record, sealed."""
    for _ in connection._recordLayer.sendRecord(messages.Message(kind, bytearray(body))):
        pass


def handshake_refused(port: int, version: tuple[int, int] | None = None, **changed: object) -> str:
    def shake() -> None:
        with secured(port, version, **changed):
            pass

    return alert_of(shake)


# -- bytes -----------------------------------------------------------------------------------------


def record(kind: int, body: bytes, version: tuple[int, int] = (3, 3)) -> bytes:
    return struct.pack(">BBBH", kind, *version, len(body)) + body


def client_hello(
    ciphers: tuple[int, ...] = (0xC02B, 0x1301), compression: tuple[int, ...] = (0,), extensions: bytes | None = None
) -> bytes:
    """A ClientHello of TLS 1.2, unless its extensions say more."""
    if extensions is None:
        extensions = ec_extensions()
    body = struct.pack(">BB", 3, 3) + bytes(range(32)) + b"\0"
    body += struct.pack(">H", 2 * len(ciphers)) + b"".join(struct.pack(">H", one) for one in ciphers)
    body += bytes([len(compression), *compression]) + struct.pack(">H", len(extensions)) + extensions
    return b"\x01" + len(body).to_bytes(3, "big") + body


def extension(kind: int, body: bytes) -> bytes:
    return struct.pack(">HH", kind, len(body)) + body


def ec_extensions() -> bytes:
    groups = extension(10, struct.pack(">HHH", 4, 0x001D, 0x0017))
    algorithms = extension(13, struct.pack(">HHHH", 6, 0x0403, 0x0804, 0x0401))
    return groups + algorithms + extension(11, b"\x01\0")


def answer_to(port: int, *sent: bytes) -> tuple[str, bytes]:
    """The first record in the response: (an alert's name, "handshake", "closed" ...; its body)."""
    with connected(port) as connection:
        with contextlib.suppress(ConnectionError):
            for part in sent:
                connection.sendall(part)
        try:
            head = connection.recv(5, socket.MSG_WAITALL)
            if len(head) < 5:
                return "closed", b""
            body = connection.recv(struct.unpack_from(">H", head, 3)[0], socket.MSG_WAITALL)
        except ConnectionError:
            return "closed", b""
    if head[0] == ALERT:
        return ALERTS.get(body[1], str(body[1])), body
    return {HANDSHAKE: "handshake", APPLICATION_DATA: "data"}.get(head[0], str(head[0])), body


# -- versions and ciphers --------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(3, 0), (3, 1), (3, 2)])
def test_old_versions_are_refused(port: int, version: tuple[int, int]) -> None:
    assert handshake_refused(port, version) in ("protocol_version", "handshake_failure")


def test_supported_versions(port: int) -> None:
    for version in (TLS_1_2, TLS_1_3):
        with secured(port, version) as connection:
            assert connection.version == version and is_served(connection)


@pytest.mark.parametrize("names", [["rc4"], ["3des"], ["null"], ["aes128"], ["aes256"]])
def test_ciphers_that_do_not_authenticate_are_refused(port: int, names: list[str]) -> None:
    assert handshake_refused(port, TLS_1_2, cipherNames=names) == "handshake_failure"


@pytest.mark.parametrize("names", [["rsa"], ["dh_anon"], ["ecdh_anon"], ["srp_sha"]])
def test_key_exchanges_without_forward_secrecy_or_proof_are_refused(port: int, names: list[str]) -> None:
    ciphers = {"rsa": (0x009C, 0x002F), "dh_anon": (0x00A6, 0x0034), "ecdh_anon": (0xC018,), "srp_sha": (0xC01D,)}
    assert answer_to(port, record(HANDSHAKE, client_hello(ciphers[names[0]])))[0] == "handshake_failure"


@pytest.mark.parametrize("cipher", [0x0003, 0x0006, 0x0008, 0x0014, 0x0062, 0x0001, 0xC006, 0x0005, 0x000A])
def test_export_and_null_ciphers_are_refused(port: int, cipher: int) -> None:
    assert answer_to(port, record(HANDSHAKE, client_hello((cipher,))))[0] == "handshake_failure"


def test_weak_signatures_are_refused(port: int) -> None:
    md5_and_sha1 = extension(13, struct.pack(">HHHHH", 8, 0x0101, 0x0201, 0x0203, 0x0202))
    groups = extension(10, struct.pack(">HH", 2, 0x0017))
    hello = client_hello((0xC02B,), extensions=groups + md5_and_sha1)
    assert answer_to(port, record(HANDSHAKE, hello))[0] in ("handshake_failure", "internal_error")


def test_weak_groups_are_refused(port: int) -> None:
    weak = extension(10, struct.pack(">HHHH", 6, 0x0001, 0x0013, 0x000F))  # sect163k1, secp192r1, secp160k1
    hello = client_hello((0xC02B,), extensions=weak + extension(13, struct.pack(">HH", 2, 0x0403)))
    assert answer_to(port, record(HANDSHAKE, hello))[0] == "handshake_failure"


@pytest.mark.parametrize("group", [0x0100, 0x0104])  # ffdhe2048, ffdhe8192
def test_groups_that_cost_a_server_more_than_a_client_are_refused(port: int, group: int) -> None:
    """CVE-2002-20001: the client need not compute the key share that it sends."""
    share = bytes([1]) * (256 if group == 0x0100 else 1024)
    shares = extension(51, struct.pack(">HHH", 4 + len(share), group, len(share)) + share)
    algorithms = extension(13, struct.pack(">HH", 2, 0x0403))
    extensions = extension(10, struct.pack(">HH", 2, group)) + algorithms + extension(43, b"\x02\x03\x04") + shares
    hello = client_hello((0x1301,), extensions=extensions)
    assert answer_to(port, record(HANDSHAKE, hello))[0] == "handshake_failure"


# -- downgrades ------------------------------------------------------------------------------------


def test_a_downgrade_is_marked_in_server_hello(port: int) -> None:
    """The sentinel in ServerHello's random (RFC 8446 4.1.3)."""
    kind, body = answer_to(port, record(HANDSHAKE, client_hello((0xC02B,))))
    assert kind == "handshake" and body[0] == 2
    assert body[6 + 24 : 6 + 32] == b"DOWNGRD\x01"


def test_a_fallback_is_refused(port: int) -> None:
    hello = client_hello((0xC02B, 0x5600))
    assert answer_to(port, record(HANDSHAKE, hello))[0] == "inappropriate_fallback"


# -- extensions ------------------------------------------------------------------------------------


def test_compression_is_never_chosen(port: int) -> None:
    kind, body = answer_to(port, record(HANDSHAKE, client_hello((0xC02B,), (1, 0))))
    session_bytes = body[38]
    assert kind == "handshake" and body[39 + session_bytes + 2] == 0
    assert answer_to(port, record(HANDSHAKE, client_hello((0xC02B,), (1,))))[0] in ("illegal_parameter", "decode_error")


def test_heartbeat_is_not_offered_and_gets_no_response(port: int) -> None:
    hello = client_hello((0xC02B,), extensions=ec_extensions() + extension(ExtensionType.heartbeat, b"\x01"))
    kind, body = answer_to(port, record(HANDSHAKE, hello))
    (message_bytes,) = struct.unpack(">I", b"\0" + body[1:4])
    offered = body[39 + body[38] + 3 : 4 + message_bytes]
    assert kind == "handshake" and extension(ExtensionType.heartbeat, b"\x01") not in offered
    bleeding = record(HEARTBEAT, b"\x01\x40\x00" + b"x")
    kind, _ = answer_to(port, bleeding)
    assert kind in ("unexpected_message", "closed", "protocol_version")
    with secured(port, TLS_1_2) as connection:
        send(connection, HEARTBEAT, b"\x01\x40\x00x")
        assert alert_of(lambda: connection.recv(100)) in ("unexpected_message", "closed")


def test_a_duplicate_extension_is_refused(port: int) -> None:
    hello = client_hello((0xC02B,), extensions=ec_extensions() + extension(10, struct.pack(">HH", 2, 0x0017)))
    assert answer_to(port, record(HANDSHAKE, hello))[0] in ("illegal_parameter", "decode_error")


@pytest.mark.parametrize("kind", [0x0A0A, 0x2A2A, 0x4469, 0xFAFA])
def test_unknown_extensions_are_ignored(port: int, kind: int) -> None:
    hello = client_hello((0x0A0A, 0xC02B), extensions=extension(kind, b"anything") + ec_extensions())
    assert answer_to(port, record(HANDSHAKE, hello))[0] == "handshake"


def test_wrong_lengths_are_refused(port: int) -> None:
    hello = client_hello((0xC02B,))
    for changed in (
        hello[:1] + (len(hello) - 5).to_bytes(3, "big") + hello[4:-1],  # shorter than its content
        hello[:38] + b"\xff" + hello[39:],  # the length of the session id
        client_hello((0xC02B,), extensions=extension(10, b"\xff\xff\0\x17")),
        client_hello((0xC02B,), extensions=struct.pack(">HH", 0, 0xFFFF)),
        client_hello((0xC02B,), ()),
        client_hello(()),
    ):
        kind, _ = answer_to(port, record(HANDSHAKE, changed))
        assert kind in ("decode_error", "illegal_parameter", "handshake_failure", "unexpected_message"), (kind, changed)


# -- records ---------------------------------------------------------------------------------------


def test_a_message_in_many_records(port: int) -> None:
    """Split to single bytes it is still the same message."""
    pieces = [record(HANDSHAKE, bytes([byte])) for byte in client_hello((0xC02B,))]
    assert answer_to(port, b"".join(pieces))[0] == "handshake"


def test_records_without_content(port: int) -> None:
    assert answer_to(port, record(HANDSHAKE, b""))[0] in ("unexpected_message", "decode_error", "closed")
    hello = client_hello((0xC02B,))
    between = record(HANDSHAKE, hello[:20]) + record(HANDSHAKE, b"") * 3 + record(HANDSHAKE, hello[20:])
    assert answer_to(port, between)[0] in ("unexpected_message", "handshake")
    with secured(port, TLS_1_2) as connection:
        for _ in range(8):
            send(connection, APPLICATION_DATA, b"")
        assert is_served(connection)
    with secured(port, TLS_1_2) as connection:  # a flood of them ends its connection, or is served

        def flood() -> None:
            for _ in range(5000):
                send(connection, APPLICATION_DATA, b"")
            is_served(connection)

        assert alert_of(flood) in ("unexpected_message", "closed", "nothing")


@pytest.mark.parametrize("kind", [0, 19, 25, 99, 255])
def test_records_of_unknown_types(port: int, kind: int) -> None:
    assert answer_to(port, record(kind, b"x" * 20))[0] not in ("handshake", "data")
    with secured(port, TLS_1_2) as connection:
        send(connection, kind, b"x" * 20)
        assert alert_of(lambda: connection.recv(10)) in ("unexpected_message", "closed")


def test_records_that_are_too_long(port: int) -> None:
    head = struct.pack(">BBBH", HANDSHAKE, 3, 3, 0xFFFF)
    assert answer_to(port, head + bytes(0xFFFF))[0] in ("record_overflow", "decode_error", "closed")
    with secured(port, TLS_1_2) as connection:
        connection.sock.sendall(struct.pack(">BBBH", APPLICATION_DATA, 3, 3, (1 << 14) + 2049) + bytes(100))
        assert alert_of(lambda: connection.recv(10)) in ("record_overflow", "closed")


@pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3])
def test_a_modified_record_is_refused(port: int, version: tuple[int, int]) -> None:
    with secured(port, version) as connection:
        connection.sock.sendall(record(APPLICATION_DATA, bytes(60)))
        assert alert_of(lambda: connection.recv(10)) == "bad_record_mac"


def test_interleaved_messages_are_refused(port: int) -> None:
    hello = client_hello((0xC02B,))
    for kind, body in ((APPLICATION_DATA, b"GET /"), (CHANGE_CIPHER_SPEC, b"\x01"), (ALERT, b"\x01")):
        sent = record(HANDSHAKE, hello[:30]) + record(kind, body) + record(HANDSHAKE, hello[30:])
        assert answer_to(port, sent)[0] not in ("data", "handshake"), kind


def test_early_change_cipher_spec_is_refused(port: int) -> None:
    """CVE-2014-0224: the keys would be empty ones."""
    with connected(port) as connection:
        connection.sendall(record(HANDSHAKE, client_hello((0xC02B,))))
        assert connection.recv(1, socket.MSG_PEEK) == bytes([HANDSHAKE])
        connection.sendall(record(CHANGE_CIPHER_SPEC, b"\x01") + record(HANDSHAKE, bytes(40)))
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := connection.recv(1 << 16):
                received += part
    assert received.endswith(record(ALERT, b"\x02\x0a")) or not received


# -- messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [TLS_1_2, TLS_1_3])
def test_a_wrong_finished_is_refused(port: int, version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    create = messages.Finished.create

    def wrong(self, verify_data):
        return create(self, bytearray([verify_data[0] ^ 1]) + verify_data[1:])

    monkeypatch.setattr(messages.Finished, "create", wrong)

    def shake() -> None:
        with secured(port, version) as connection:  # a client of TLS 1.3 learns it with its first response
            is_served(connection)

    assert alert_of(shake) in ("decrypt_error", "closed")
    monkeypatch.undo()


def test_renegotiation_is_refused(port: int) -> None:
    with secured(port, TLS_1_2) as connection:
        send(connection, HANDSHAKE, client_hello((0xC02B,)))
        assert alert_of(lambda: connection.recv(10)) in ("no_renegotiation", "handshake_failure", "closed")


@pytest.mark.parametrize("body", [b"\x18\0\0\x01\x02", b"\x18\0\0\0", b"\x18\0\0\x02\0\0", b"\x18\0\0\x01\xff"])
def test_invalid_key_updates_are_refused(port: int, body: bytes) -> None:
    with secured(port, TLS_1_3) as connection:
        send(connection, HANDSHAKE, body)
        assert alert_of(lambda: connection.recv(10)) in ("illegal_parameter", "decode_error", "unexpected_message")


def test_key_updates_between_requests(port: int) -> None:
    with secured(port, TLS_1_3) as connection:
        for number in range(40):
            for _ in connection.send_keyupdate_request(number % 2):
                pass
            assert is_served(connection), number


@pytest.mark.parametrize("kind", [0, 2, 4, 11, 20, 99])
def test_messages_that_only_servers_send_are_refused(port: int, kind: int) -> None:
    message = bytes([kind]) + b"\0\0\x04abcd"
    assert answer_to(port, record(HANDSHAKE, message))[0] in ("unexpected_message", "decode_error", "closed")
    with secured(port, TLS_1_3) as connection:
        send(connection, HANDSHAKE, message)
        assert alert_of(lambda: connection.recv(10)) in ("unexpected_message", "decode_error", "closed")


# -- sessions --------------------------------------------------------------------------------------


def test_tickets_offer_no_early_data_and_serve_at_any_worker(port: int) -> None:
    with secured(port, TLS_1_3) as connection:
        assert is_served(connection)
        session = connection.session
        assert session.tickets
        for ticket in session.tickets:
            assert all(one.extType != ExtensionType.early_data for one in ticket.extensions)
    for _ in range(4):  # connections alternate between the workers
        with secured(port, TLS_1_3, session) as connection:
            assert connection.resumed and is_served(connection)


def test_a_damaged_ticket_is_a_new_session(port: int) -> None:
    with secured(port, TLS_1_3) as connection:
        assert is_served(connection)
        session = connection.session
    for ticket in session.tickets:
        ticket.ticket[len(ticket.ticket) // 2] ^= 1
    with secured(port, TLS_1_3, session) as connection:
        assert not connection.resumed and is_served(connection)


def test_early_data_is_not_taken(port: int) -> None:
    """Early data that is sent regardless is not processed."""
    versions = extension(43, b"\x02\x03\x04")
    early = extension(ExtensionType.early_data, b"")
    hello = client_hello((0x1301,), extensions=ec_extensions() + versions + early)
    sent = record(HANDSHAKE, hello) + record(APPLICATION_DATA, API_VERSIONS)
    assert answer_to(port, sent)[0] != "data"
