"""A host joins with a token: over real sockets on loopback, both sides in this process."""

import contextlib
import datetime
import socket
import ssl
import stat
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from mqd.cli import joining, secure
from mqd.cli.common import CliError
from mqd.cli.joining import Invitation, Token
from mqd.security import client, pki
from tests.polling import eventually
from tests.unit.security.host_files import authority

SEEDS = "127.0.0.1:9094"
NAMES = ["localhost", "10.0.0.4"]


@pytest.fixture
def first(tmp_path) -> secure.Files:
    return secure.prepare(tmp_path / "first", 1, ["localhost"])


@contextlib.contextmanager
def invitation(first: secure.Files, seconds: float = 30.0) -> Iterator[tuple[Token, list[str], list[bool]]]:
    """(token, its description, its result once it is over)"""
    message: list[str] = []
    results: list[bool] = []
    made = Invitation(first, 4, SEEDS, ("127.0.0.1", 0), seconds, message.append)
    thread = threading.Thread(target=lambda: results.append(made.run()))
    thread.start()
    try:
        yield joining.parse(str(made.token)), message, results
    finally:
        made._until_s = 0.0
        thread.join(10)


def test_a_host_gets_exactly_the_files_it_needs(first, tmp_path):
    data_dir = tmp_path / "fourth"
    with invitation(first) as (token, message, results):
        assert not joining.has_joined(token, data_dir)
        joining.join(token, data_dir, NAMES)
        assert joining.has_joined(token, data_dir)
    places = secure.files(data_dir)
    assert results == [True] and message == ["host 4 at 127.0.0.1 has its certificates"]
    assert places.ca.read_bytes() == first.ca.read_bytes() and places.key.read_bytes() == first.key.read_bytes()
    assert not places.ca_key.exists() and not places.pending.exists()
    host, broker = places.host.read_bytes(), places.broker.read_bytes()
    assert pki.is_for_host(host, 4) and not pki.is_for_host(broker, 4) and pki.covers(broker, NAMES)
    theirs, mine = (client.read_properties(one.admin)[0].settings for one in (first, places))
    assert mine == {**theirs, "ssl.ca.location": str(places.ca)}
    assert places.metrics_token.read_bytes() == first.metrics_token.read_bytes(), "one token for all metrics pages"
    for file in (places.host, places.broker, places.key, places.admin, places.metrics_token):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    before = {file: file.read_bytes() for file in places if file.is_file()}
    secure.prepare(data_dir, 4, NAMES)  # the next step of `mqd up`
    assert {file: file.read_bytes() for file in before} == before and not places.ca_key.exists()
    assert secure.settings(data_dir)["cluster.tls"] == "required"


def test_a_token_survives_certificates_that_cannot_be_made(first, tmp_path, monkeypatch):
    data_dir, sign_host, failures = tmp_path / "fourth", pki.sign_host, [OSError(28, "No space left on device")]

    def fail_once(*what):
        if failures:
            raise failures.pop()
        return sign_host(*what)

    monkeypatch.setattr(pki, "sign_host", fail_once)
    with invitation(first) as (token, _, results):
        with pytest.raises(CliError, match="cannot make certificates"):
            joining.join(token, data_dir, NAMES)
        joining.join(token, data_dir, NAMES)
    assert results == [True] and joining.has_joined(token, data_dir)


def test_a_token_survives_a_lost_response(first, tmp_path, monkeypatch):
    data_dir, send, failures = tmp_path / "fourth", joining._send, [ConnectionResetError(104, "reset")]

    def fail_once(connection, message):
        if failures and isinstance(message, joining._Response):
            raise failures.pop()
        send(connection, message)

    monkeypatch.setattr(joining, "_send", fail_once)
    with invitation(first) as (token, _, results):
        with pytest.raises(CliError, match="must still be running there"):
            joining.join(token, data_dir, NAMES)
        joining.join(token, data_dir, NAMES)
    assert not failures and results == [True] and joining.has_joined(token, data_dir)


def test_a_token_is_free_again_before_the_lost_connection_ends(first, tmp_path, monkeypatch):
    """Otherwise the token would seem used to a host that tries again at once."""
    made, used = Invitation(first, 4, SEEDS, ("127.0.0.1", 0), 30.0, lambda line: None), []

    def fail(connection, message):
        if isinstance(message, joining._Response):
            close = connection.close
            connection.close = lambda: (used.append(made._is_used), close())
            raise ConnectionResetError(104, "reset")
        send(connection, message)

    send = joining._send
    monkeypatch.setattr(joining, "_send", fail)
    thread = threading.Thread(target=made.run)
    thread.start()
    with pytest.raises(CliError, match="must still be running there"):
        joining.join(made.token, tmp_path / "fourth", NAMES)
    made._until_s = 0.0
    thread.join(10)
    assert used == [False]


def test_a_grant_under_way_when_the_time_runs_out_counts(first, tmp_path, monkeypatch):
    made, results = Invitation(first, 4, SEEDS, ("127.0.0.1", 0), 30.0, lambda line: None), []

    def send_late(connection, message):
        if isinstance(message, joining._Response):
            made._until_s = 0.0
            eventually(lambda: made._listener.fileno() < 0)
        send(connection, message)

    send = joining._send
    monkeypatch.setattr(joining, "_send", send_late)
    thread = threading.Thread(target=lambda: results.append(made.run()))
    thread.start()
    joining.join(made.token, tmp_path / "fourth", NAMES)
    thread.join(10)
    assert results == [True]


def test_certificates_that_expire_soon_are_fetched_again(first, tmp_path):
    data_dir = tmp_path / "fourth"
    with invitation(first) as (token, _, _):
        joining.join(token, data_dir, NAMES)
    places = secure.files(data_dir)
    own = pki.CertifiedKey(first.ca.read_bytes(), first.ca_key.read_bytes())
    pair = pki.issue_host(own, 4, datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=61))
    places.host.write_bytes(pair.key + pair.certificate)
    assert joining.has_joined(msgspec.structs.replace(token, expires_s=1), data_dir), (
        "an expired token does not matter then"
    )
    with invitation(first) as (token, _, results):
        assert not joining.has_joined(token, data_dir)
        joining.join(token, data_dir, NAMES)
        assert joining.has_joined(token, data_dir) and pki.expiry_time(places.host.read_bytes()) > pki.expiry_time(
            pair.certificate
        )
    assert results == [True]


def test_a_token_works_once(first, tmp_path):
    with invitation(first) as (token, message, _):
        made = Invitation(first, 4, SEEDS, ("127.0.0.1", 0), 30.0, message.append)
        made.token = msgspec.structs.replace(token)
        (host, _), (broker, _) = pki.make_signing_request(), pki.make_signing_request()
        request = joining._Request(token.secret, host, broker, NAMES)
        assert made._respond(request).granted is not None
        assert "was used already" in made._respond(request).refusal
        made._listener.close()
        joining.join(token, tmp_path / "fourth", NAMES)
    with pytest.raises(CliError, match="cannot join through 127.0.0.1:.*must still be running there"):
        joining.join(token, tmp_path / "fifth", NAMES)


def test_an_invitation_needs_the_secret(first, tmp_path):
    with invitation(first) as (token, message, results):
        with pytest.raises(CliError, match="the token has a wrong secret"):
            joining.join(msgspec.structs.replace(token, secret=b"x" * 32), tmp_path / "a", NAMES)
        with pytest.raises(CliError, match="has expired"):
            joining.join(msgspec.structs.replace(token, expires_s=1), tmp_path / "a", NAMES)
        assert not (tmp_path / "a").exists() and results == []
        joining.join(token, tmp_path / "b", NAMES)  # a wrong one does not use it up
    assert results == [True] and "is refused" in message[0]


def test_the_secret_is_only_sent_to_a_host_of_the_authority(first, tmp_path):
    """J1: neither to another authority, nor to a client of this one."""
    stranger = secure.prepare(tmp_path / "stranger", 1, ["localhost"])
    own = pki.CertifiedKey(first.ca.read_bytes(), first.ca_key.read_bytes())
    pair = pki.issue(own, "alice", ("localhost",), datetime.datetime.now(datetime.UTC))
    for inviter, words in ((stranger, "peer's certificate is refused"), (first, "it is not a host of the cluster")):
        if inviter is first:
            first.host.write_bytes(pair.key + pair.certificate)
        with invitation(inviter) as (token, message, _):
            honest = ssl.PEM_cert_to_DER_cert(first.ca.read_text())
            with pytest.raises(CliError, match=words):
                joining.join(msgspec.structs.replace(token, authority=honest), tmp_path / "a", NAMES)
        assert len(message) == 1 and "failed" in message[0]


def test_a_malformed_request_ends_that_connection_only(first, tmp_path):
    with invitation(first) as (token, message, results):
        for data in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"):
            with (
                socket.create_connection((token.address, token.port), 10) as raw,
                joining._tls_context(token).wrap_socket(raw) as connection,
            ):
                connection.sendall(data)
                with contextlib.suppress(OSError):
                    assert connection.recv(10) == b""
        with socket.create_connection((token.address, token.port), 10) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        joining.join(token, tmp_path / "b", NAMES)
    assert results == [True] and len(message) == 4


def test_a_client_that_sends_byte_by_byte_is_cut_off(first, tmp_path, monkeypatch):
    """A few of them would occupy all connections for as long as the token is valid."""
    monkeypatch.setattr(joining, "CONNECTION_TIMEOUT_S", 0.5)
    with invitation(first) as (token, message, results):
        with (
            socket.create_connection((token.address, token.port), 10) as raw,
            joining._tls_context(token).wrap_socket(raw) as connection,
        ):
            connection.sendall((1000).to_bytes(4, "big"))
            end_s = time.monotonic() + 20
            with pytest.raises(OSError):
                while time.monotonic() < end_s:
                    connection.sendall(b"x")
                    time.sleep(0.05)  # each byte is in time
        monkeypatch.undo()
        joining.join(token, tmp_path / "b", NAMES)
    assert results == [True] and ("timed out" in message[0] or "not complete" in message[0])


def test_invalid_tokens_and_directories_are_refused(first, tmp_path):
    for text in ("", "mqd1-", "mqd1-AAAA", "nonsense", "mqd1-%%%"):
        with pytest.raises(CliError, match="not a token of `mqd cluster invite`"):
            joining.parse(text)
    token = Token("127.0.0.1", 1, 4, SEEDS, b"s" * 32, 1, ssl.PEM_cert_to_DER_cert(authority().certificate.decode()))
    assert joining.parse(f" {token}\n") == token
    with pytest.raises(CliError, match="takes an empty --data-dir"):
        joining.has_joined(token, tmp_path / "first")
    first.ca_key.unlink()
    with pytest.raises(CliError, match="cannot invite"):
        Invitation(first, 4, SEEDS, ("127.0.0.1", 0), 30.0, print)
