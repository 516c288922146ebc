"""`mqd cluster invite` and `mqd up --join`: a new host gets its certificates from a host that has
the key of the certificate authority (CA), which stays there; the new host's own keys never leave
it.

    invite: prints a token, listens          token: address, node id, CA, secret, expiry
    join:   connects by TLS, which only a host with a certificate of that CA can accept
            -> the secret, two certificate requests, names and addresses of the broker
            <- two certificates, the cluster's key, the admin's settings, the metrics pages' token;
               the token of the invitation is used up

Invariants
    J1  the secret is sent only to a host with a certificate of the token's CA
    J2  a token works once, for one node id, until it expires or the inviting command ends
Bounds: MESSAGE_BYTES_MAX, CONNECTION_TIMEOUT_S, CONNECTION_COUNT_MAX at a time.
"""

import base64
import datetime
import hmac
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mqd.cli import secure
from mqd.cli.common import CliError
from mqd.security import host_identity, pki
from mqd.security.pki import CertifiedKey

MESSAGE_BYTES_MAX = 256 << 10
CONNECTION_TIMEOUT_S = 10.0
CONNECTION_COUNT_MAX = 16
HOST_COUNT_MAX = 64
POLL_S = 0.5  # how often the expiry of the token is checked
_PREFIX = "mqd1-"


class Token(msgspec.Struct, array_like=True, frozen=True):
    address: str  # where the inviting command listens
    port: int
    node_id: int  # of the new host
    seeds: str  # cluster.seeds
    secret: bytes
    expires_s: int
    authority: bytes  # the CA's certificate, DER

    def __str__(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


class _Request(msgspec.Struct, frozen=True):
    secret: bytes
    host: bytes  # certificate request for connections between hosts, PEM
    broker: bytes  # certificate request for clients' connections, PEM
    names: list[str]  # of the broker, for clients


class _Granted(msgspec.Struct, frozen=True):
    authority: bytes  # the CA's certificate; PEM, like the other two certificates
    host: bytes
    broker: bytes
    key: bytes  # the cluster's key file
    admin: str  # client settings; ssl.ca.location is the inviting host's
    metrics_token: bytes = b""  # empty: the inviting host has none, or runs an earlier release


class _Response(msgspec.Struct, frozen=True):
    granted: _Granted | None
    refusal: str = ""


def parse(text: str) -> Token:
    """Raises CliError."""
    text = text.strip()
    try:
        if not text.startswith(_PREFIX):
            raise ValueError(f"it does not begin with {_PREFIX}")
        encoded = text.removeprefix(_PREFIX)
        return msgspec.msgpack.decode(base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)), type=Token)
    except (ValueError, msgspec.MsgspecError) as error:
        raise CliError(f"--join: this is not a token of `mqd cluster invite`: {error}") from None


def _receive(connection: ssl.SSLSocket) -> bytes:
    """Reads a whole message within CONNECTION_TIMEOUT_S. Raises OSError."""
    data, deadline_s = b"", time.monotonic() + CONNECTION_TIMEOUT_S
    while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
        if int.from_bytes(data[:4], "big") > MESSAGE_BYTES_MAX:
            raise OSError("the message is too long")
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError(f"its message is not complete after {CONNECTION_TIMEOUT_S:.0f} s")
        connection.settimeout(remaining_s)
        part = connection.recv(1 << 16)
        if not part:
            raise OSError("the connection ended")
        data += part
    return data[4:]


def _send(connection: ssl.SSLSocket, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    connection.sendall(len(body).to_bytes(4, "big") + body)


# -- the inviting host -----------------------------------------------------------------------------


class Invitation:
    """`print_line` gets a line about each attempt. Raises CliError if this host cannot invite."""

    def __init__(
        self,
        files: secure.Files,
        node_id: int,
        seeds: str,
        listen: tuple[str, int],
        seconds: float,
        print_line: Callable[[str], None],
    ) -> None:
        self._files, self._print = files, print_line
        try:
            self._authority = CertifiedKey(files.ca.read_bytes(), files.ca_key.read_bytes())
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._context.load_cert_chain(files.host)
            authority = ssl.PEM_cert_to_DER_cert(self._authority.certificate.decode())
            self._listener = socket.create_server(
                listen, family=socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
            )
        except (OSError, ValueError) as error:
            raise CliError(
                f"cannot invite: {error}; use a host that `mqd up --secure` has started and that has {files.ca_key}"
            ) from error
        self._listener.settimeout(POLL_S)
        self._until_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._is_used = self._has_joined = False
        self._granting: threading.Thread | None = None  # the last that took the token
        self._free_connections = threading.Semaphore(CONNECTION_COUNT_MAX)
        port = self._listener.getsockname()[1]
        secret = secrets.token_bytes(32)
        self.token = Token(listen[0], port, node_id, seeds, secret, int(time.time() + seconds), authority)

    def run(self) -> bool:
        """Waits until the host has joined or the time has run out. Returns whether it has joined."""
        with self._listener:
            while not self._has_joined and time.monotonic() < self._until_s:
                try:
                    connection, address = self._listener.accept()
                except TimeoutError:
                    continue
                if not self._free_connections.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._serve, args=(connection, address[0]), daemon=True).start()
        with self._lock:  # from now on the token is refused
            granting = self._granting
        if granting is not None:
            granting.join()  # a grant that is under way when the time runs out counts
        return self._has_joined

    def _serve(self, connection: socket.socket, address: str) -> None:
        try:
            connection.settimeout(CONNECTION_TIMEOUT_S)
            with self._context.wrap_socket(connection, server_side=True) as secured:
                request = msgspec.msgpack.decode(_receive(secured), type=_Request)
                response = self._respond(request)
                self._deliver(secured, response)
            if response.granted is not None:
                self._has_joined = True  # before a print that may fail
                self._print(f"host {self.token.node_id} at {address} has its certificates")
            else:
                self._print(f"a host at {address} is refused: {response.refusal}")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._print(f"a connection from {address} failed: {host_identity.reason_of(error)}")
        finally:
            connection.close()
            self._free_connections.release()

    def _deliver(self, secured: ssl.SSLSocket, response: _Response) -> None:
        try:
            _send(secured, response)
        except Exception:
            # The host lacks its certificates and may try again, even as soon as the connection ends.
            if response.granted is not None:
                with self._lock:
                    self._is_used = False
            raise

    def _respond(self, request: _Request) -> _Response:
        if not hmac.compare_digest(request.secret, self.token.secret):
            return _Response(None, "the token has a wrong secret")
        with self._lock:
            if self._is_used or time.monotonic() >= self._until_s:
                return _Response(None, "the token was used already, or has expired; make another: mqd cluster invite")
            self._is_used, self._granting = True, threading.current_thread()
        now, node_id, files = datetime.datetime.now(datetime.UTC), self.token.node_id, self._files
        try:
            host = pki.sign_host(self._authority, request.host, node_id, now)
            names = request.names[:HOST_COUNT_MAX]
            broker = pki.sign(self._authority, request.broker, f"mqd broker {node_id}", names, now)
            token = files.metrics_token.read_bytes() if files.metrics_token.exists() else b""
            ca, key, admin = self._authority.certificate, files.key.read_bytes(), files.admin.read_text()
            return _Response(_Granted(ca, host, broker, key, admin, token))
        except (OSError, ValueError) as error:
            with self._lock:
                self._is_used = False
            return _Response(None, f"the inviting host cannot make certificates: {error}")


# -- the new host ----------------------------------------------------------------------------------


def has_joined(token: Token, data_dir: Path) -> bool:
    """Whether this directory already has the files that the token grants: if the same command is run
    again, it starts the broker with them. False if the certificates expire soon and the token is
    still valid, so that they are fetched again. Raises CliError if the directory has other files.
    """
    files = secure.files(data_dir)
    if not secure.is_secured(data_dir):
        return False
    try:
        is_same_authority = ssl.PEM_cert_to_DER_cert(files.ca.read_text()) == token.authority
        host = files.host.read_bytes()
        if is_same_authority and pki.is_for_host(host, token.node_id):
            valid_for = pki.expiry_time(host) - datetime.datetime.now(datetime.UTC)
            return valid_for >= datetime.timedelta(days=pki.RENEW_DAYS) or time.time() >= token.expires_s
    except (OSError, ValueError):
        pass
    raise CliError(f"{data_dir} already belongs to another cluster or host; --join takes an empty --data-dir")


def join(token: Token, data_dir: Path, names: Sequence[str]) -> None:
    """Raises CliError."""
    if time.time() >= token.expires_s:
        raise CliError("the token has expired; make another: mqd cluster invite")
    (host, host_key), (broker, broker_key) = pki.make_signing_request(), pki.make_signing_request()
    request = _Request(token.secret, host, broker, list(names))
    inviter_address = f"{token.address}:{token.port}"
    try:
        with (
            socket.create_connection((token.address, token.port), CONNECTION_TIMEOUT_S) as connection,
            _tls_context(token).wrap_socket(connection) as secured,
        ):
            _check_inviter(secured)
            _send(secured, request)
            response = msgspec.msgpack.decode(_receive(secured), type=_Response)
    except (OSError, msgspec.MsgspecError) as error:
        raise CliError(
            f"cannot join through {inviter_address}: {host_identity.reason_of(error)}; `mqd cluster invite` must"
            " still be running there"
        ) from error
    if response.granted is None:
        raise CliError(f"cannot join through {inviter_address}: {response.refusal}")
    granted = response.granted
    if ssl.PEM_cert_to_DER_cert(granted.authority.decode()) != token.authority:
        raise CliError(f"{inviter_address} sent a CA certificate other than the one in the token")
    secure.receive(
        data_dir,
        {
            "ca": granted.authority,
            "key": granted.key,
            "host": host_key + granted.host,
            "admin": granted.admin.encode(),
            **({"metrics_token": granted.metrics_token} if granted.metrics_token else {}),
            "broker": broker_key + granted.broker,  # last: it marks the directory as secured
        },
    )


def _tls_context(token: Token) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # _check_inviter
    context.load_verify_locations(cadata=token.authority)
    return context


def _check_inviter(connection: ssl.SSLSocket) -> None:
    """J1: the certificate must be a host's; clients have certificates of this CA, too. Raises
    OSError.
    """
    if not any(name.startswith(pki.NODE_URI) for name in host_identity.uris(connection.getpeercert())):
        raise OSError("it is not a host of the cluster")
