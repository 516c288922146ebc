"""Access to the metrics page: TLS, the token, and addresses where it may be served."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqd.acceptor.metrics import token as tokens
from mqd.acceptor.metrics.server import MetricsServer, listen
from mqd.acceptor.metrics.token import Token
from mqd.base import listeners
from mqd.base.config import load_broker
from mqd.base.listeners import Listener
from mqd.base.property_values import ConfigError
from mqd.security import python_tls, tls_files
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.acceptor.metrics.test_metrics_server import Decided

SECRET = "0123456789abcdef-token"
PAGE = b"# page\n" * 50_000  # larger than a TLS record, and than a socket's buffer
GET = b"GET /metrics HTTP/1.1\r\nHost: here\r\n"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority("ca")


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    return written(tmp_path / "token", SECRET)


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    beside = path.with_suffix(".new")
    beside.write_text(text + "\n")
    beside.chmod(mode)
    beside.replace(path)
    return path


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[str, int]]]:
    monkeypatch.setattr(tokens, "POLL_S", 0.0)
    monkeypatch.setattr(python_tls, "POLL_S", 0.0)
    servers = []

    def start(before: Callable[[tuple[str, int]], None] = lambda address: None, **config: str) -> tuple[str, int]:
        loaded = load_broker(None, {}, {name.replace("_", "."): value for name, value in config.items()})
        expected = listeners.metrics_listener(loaded)
        assert expected is not None
        listener = listen(expected, 65536, is_fixed=True)
        assert listener is not None
        token = Token(Path(loaded["metrics.token.file"])) if loaded["metrics.token.file"] else None
        tls = python_tls.ServerTls(loaded, expected) if expected.has_tls else None
        servers.append(MetricsServer(listener, lambda: PAGE, Decided({"/health/ready": ["no"]}), token, tls))
        before(listener.getsockname())  # these connections wait to be accepted
        servers[-1].start()
        return listener.getsockname()

    yield start
    for server in servers:
        server.stop()


def send_request(address: tuple[str, int], tls: ssl.SSLContext | None, *headers: str, request: bytes = GET) -> bytes:
    with socket.create_connection(address, timeout=20) as connection:
        if tls is not None:
            connection = tls.wrap_socket(connection, server_hostname="localhost")
        connection.sendall(request + b"".join(f"{line}\r\n".encode() for line in headers) + b"\r\n")
        found = b""
        while data := connection.recv(1 << 20):
            found += data
        return found


def trusting(ca: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(ca))


def test_a_scrape_without_the_token_is_refused(serve, token_file) -> None:
    address = serve(metrics_listener="http://127.0.0.1:0", metrics_token_file=str(token_file))
    assert send_request(address, None, f"authorization:  bearer  {SECRET}").endswith(PAGE)
    for headers in (
        (),
        (f"Authorization: Bearer {SECRET}x",),
        ("Authorization: Bearer",),
        (f"Authorization: {SECRET}",),
    ):
        response = send_request(address, None, *headers)
        assert response.startswith(b"HTTP/1.1 401 ") and b"\r\nWWW-Authenticate: Bearer\r\n" in response
    assert send_request(address, None, request=b"DELETE /other HTTP/1.1\r\n").startswith(b"HTTP/1.1 401 ")
    written(token_file, "fedcba9876543210")
    assert send_request(address, None, "Authorization: Bearer fedcba9876543210").endswith(PAGE)
    assert send_request(address, None, f"Authorization: Bearer {SECRET}").startswith(b"HTTP/1.1 401 ")
    written(token_file, "short")
    assert send_request(address, None, "Authorization: Bearer fedcba9876543210").endswith(PAGE)


def test_a_token_file_whose_mode_is_corrected_is_read_again(serve, token_file) -> None:
    address = serve(metrics_token_file=str(token_file))
    new = "Authorization: Bearer fedcba9876543210"
    written(token_file, "fedcba9876543210", 0o644)
    assert send_request(address, None, new).startswith(b"HTTP/1.1 401 ")
    token_file.chmod(0o600)
    assert send_request(address, None, new).endswith(PAGE)


def test_a_probe_needs_no_token(serve, token_file) -> None:
    address = serve(metrics_token_file=str(token_file))
    assert send_request(address, None, request=GET.replace(b"/metrics", b"/health/ready")).startswith(b"HTTP/1.1 503 ")
    assert send_request(address, None, request=GET.replace(b"/metrics", b"/health")).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize("store", ["PEM", "PKCS12"])
def test_the_page_over_tls_and_its_certificate_replaced(serve, authority, tmp_path, store) -> None:
    ca, keystore = authority.write(tmp_path / "ca.pem"), tmp_path / "keystore"

    def replace() -> None:
        identity = authority.issue("broker")
        made = tmp_path / "made"
        identity.write_pkcs12(made, "secret") if store == "PKCS12" else identity.write(made, "secret")
        made.replace(keystore)

    replace()
    own = {"listener.name.metrics.ssl.keystore.location": str(keystore)}
    own[f"listener.name.metrics.ssl.{'keystore' if store == 'PKCS12' else 'key'}.password"] = "secret"
    address = serve(metrics_listener="https://127.0.0.1:0", **own)

    def serial() -> str:
        with socket.create_connection(address, timeout=20) as plain:
            return trusting(ca).wrap_socket(plain, server_hostname="localhost").getpeercert()["serialNumber"]

    assert send_request(address, trusting(ca)).endswith(PAGE)
    first = serial()
    replace()
    second = serial()
    assert second != first
    keystore.write_bytes(b"nonsense")
    assert serial() == second and send_request(address, trusting(ca)).endswith(PAGE)


def test_the_wrong_protocol_gets_an_error(serve, authority, tmp_path) -> None:
    keystore = authority.issue("broker").write(tmp_path / "keystore")
    secured = serve(metrics_listener="https://127.0.0.1:0", ssl_keystore_location=str(keystore))
    assert b"this port expects https" in send_request(secured, None)
    plain = serve(metrics_listener="http://127.0.0.1:0")
    with pytest.raises(ssl.SSLError, match="(?i)wrong.version.number|record layer failure"):
        send_request(plain, ssl.create_default_context())


def test_silent_handshakes_are_cut_off(serve, authority, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("mqd.acceptor.metrics.server.REQUEST_S", 0.3)
    keystore = authority.issue("broker").write(tmp_path / "keystore")
    address = serve(metrics_listener="https://127.0.0.1:0", ssl_keystore_location=str(keystore))
    for begun in (b"", b"\x16", b"\x16\x03\x01\x02\x00\x01"):
        with socket.create_connection(address, timeout=20) as connection:
            connection.sendall(begun)
            assert connection.recv(100) == b""


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"metrics.listener": "http://0.0.0.0:9644"}, "needs metrics.token.file"),
        ({"metrics.listener": "https://:9644"}, "needs metrics.token.file"),
        (
            {"metrics.listener": "http://10.0.0.1:9644", "metrics.token.file": "/t"},
            "use https://, or set listeners.ins",
        ),
        ({"metrics.listener": "ftp://127.0.0.1:9644"}, "neither http://HOST:PORT nor https://HOST:PORT"),
        ({"metrics.listener": "127.0.0.1:9644"}, "metrics.listener` contains '127.0.0.1:9644'"),
    ],
)
def test_an_unprotected_page_off_loopback_is_refused(config, why) -> None:
    with pytest.raises(ConfigError, match="metrics.listener") as error:
        load_broker(None, {}, config)
    assert why in str(error.value)


def test_where_the_page_is_served() -> None:
    def listener(**config: str) -> Listener | None:
        return listeners.metrics_listener(load_broker(None, {}, {k.replace("_", "."): v for k, v in config.items()}))

    assert listener() == Listener("METRICS", "127.0.0.1", 0)
    assert listener(admin_port="-1") is None
    assert listener(metrics_listener="https://127.0.0.1:1") == Listener("METRICS", "127.0.0.1", 1, "SSL")
    open_to_all = {"metrics_listener": "http://[::]:1", "metrics_token_file": "/t", "listeners_insecure_allow": "true"}
    assert listener(**open_to_all) == Listener("METRICS", "::", 1)


def test_a_connection_reset_before_its_handshake_ends_only_itself(serve, authority, tmp_path) -> None:
    ca, keystore = authority.write(tmp_path / "ca.pem"), authority.issue("broker").write(tmp_path / "keystore")

    def reset(address: tuple[str, int]) -> None:
        for _ in range(3):
            with socket.create_connection(address) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.sendall(b"\x16")

    address = serve(reset, metrics_listener="https://127.0.0.1:0", ssl_keystore_location=str(keystore))
    assert send_request(address, trusting(ca)).startswith(b"HTTP/1.1 200")


def test_tls_and_tokens_are_checked_before_the_start(token_file, tmp_path, authority) -> None:
    config = load_broker(None, {}, {"metrics.listener": "https://127.0.0.1:0"})
    with pytest.raises(ConfigError, match="listener METRICS: SSL needs a certificate"):
        tls_files.check(config)
    other = authority.issue("a")
    (tmp_path / "odd").write_bytes(other.key_pem() + authority.issue("b").chain_pem())
    with pytest.raises(ConfigError, match="listener METRICS cannot use"):
        tls_files.check({**config, "ssl.keystore.location": str(tmp_path / "odd")})
    assert tokens.read(token_file) == SECRET.encode()
    with pytest.raises(ConfigError, match="chmod 600"):
        tokens.read(written(tmp_path / "open", SECRET, 0o644))
    for text in ("short", "two words of sixteen", "", "x" * 5000):
        with pytest.raises(ConfigError, match="openssl rand -hex 32"):
            tokens.read(written(tmp_path / "bad", text))
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens.read(tmp_path / "none")
    assert os.path.isabs(tls_files.with_absolute_paths({"metrics.token.file": "token"})["metrics.token.file"])


def test_a_fixed_port_that_is_taken_is_not_replaced() -> None:
    with socket.create_server(("127.0.0.1", free_port())) as taken:
        port = taken.getsockname()[1]
        assert listen(Listener("METRICS", "127.0.0.1", port), 0, is_fixed=True) is None
        other = listen(Listener("METRICS", "127.0.0.1", port), 0, is_fixed=False)
        assert other is not None and other.getsockname()[1] != port
        other.close()
