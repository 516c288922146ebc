import datetime
import socket
import ssl
import threading

import pytest

from mqd.security import pki
from mqd.security.pki import CertifiedKey

NOW = datetime.datetime.now(datetime.UTC)
HOSTS = ("localhost", "127.0.0.1", "::1", "broker.example")


@pytest.fixture(scope="module")
def authority() -> CertifiedKey:
    return pki.make_authority("mqd test", NOW)


def context(tmp_path, pair: CertifiedKey, trusted: bytes, server: bool) -> ssl.SSLContext:
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    (tmp_path / "chain.pem").write_bytes(pair.certificate)
    (tmp_path / "key.pem").write_bytes(pair.key)
    found.load_cert_chain(tmp_path / "chain.pem", tmp_path / "key.pem")
    found.load_verify_locations(cadata=trusted.decode())
    found.verify_mode = ssl.CERT_REQUIRED
    return found


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str:
    """Returns the client's name as the server sees it. Raises the client's error."""
    ours, theirs = socket.socketpair()
    seen: list[str] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as connection:
                seen.append(str(connection.getpeercert()["subject"]))
        except (OSError, ssl.SSLError) as error:
            seen.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=host) as connection:
            connection.do_handshake()
    finally:
        ours.close()
        thread.join(10)
    return seen[0]


@pytest.mark.parametrize("host", HOSTS)
def test_both_sides_authenticate(tmp_path, authority, host):
    server = context(tmp_path, pki.issue(authority, "node 1", HOSTS, NOW), authority.certificate, True)
    client = context(tmp_path, pki.issue(authority, "alice", (), NOW), authority.certificate, False)
    assert "alice" in shake_hands(server, client, host)


def test_another_host_another_authority_and_the_wrong_kind_are_refused(tmp_path, authority):
    server = context(tmp_path, pki.issue(authority, "node 1", HOSTS, NOW), authority.certificate, True)
    alice = pki.issue(authority, "alice", (), NOW)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(server, context(tmp_path, alice, authority.certificate, False), "evil.example")
    other = pki.make_authority("mqd test", NOW)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, context(tmp_path, alice, other.certificate, False), "localhost")
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake_hands(
            context(tmp_path, alice, authority.certificate, True),
            context(tmp_path, alice, authority.certificate, False),
            "localhost",
        )


def test_expiry_and_names_of_a_certificate(authority):
    pair = pki.issue(authority, "node 1", HOSTS, NOW)
    left = pki.expiry_time(pair.certificate) - NOW
    assert left.days in (pki.CERTIFICATE_DAYS - 1, pki.CERTIFICATE_DAYS)
    assert pki.covers(pair.certificate, HOSTS) and not pki.covers(pair.certificate, ["other"])
    assert not pki.covers(pki.issue(authority, "alice", (), NOW).certificate, ["localhost"])
    with pytest.raises(ValueError):
        pki.expiry_time(b"nonsense")


def test_files_of_two_authorities_are_not_mixed(authority):
    other = pki.make_authority("other", NOW)
    with pytest.raises(ValueError, match="does not match its certificate"):
        pki.issue(CertifiedKey(authority.certificate, other.key), "node 1", HOSTS, NOW)
