"""`mqd up --secure`: the files that a broker needs before it is exposed to a network, created once
and kept in DATA_DIR/secure.

    ca.pem, ca.key     the cluster's certificate authority, the same on all of its hosts
    broker.pem         this broker's key and certificates, renewed at a start if they expire soon
    host.pem           the same for connections between the hosts of its cluster
    hosts.allowed      exists if a broker has run here without host.pem; other hosts may not have one
                       yet either, so unencrypted connections are still allowed
    admin.properties   the client settings of the user `admin`, with its password
    admin.pending      exists until the cluster knows that user
    cluster.key        the key with which the cluster's hosts authenticate to each other
    metrics.token      the token that scrapers of the metrics page must send
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mqd.base.paths import Layout, layout
from mqd.cli.common import CliError
from mqd.protocol.errors import ERRORS

if TYPE_CHECKING:
    from mqd.security.pki import CertifiedKey

ADMIN = "admin"
ADMIN_TIMEOUT_S = 30.0
MECHANISM = "SCRAM-SHA-512"
LISTENER = "SASL_SSL"
LISTENERS = f"{LISTENER}://0.0.0.0:9092"
# with less time left, the operator must act: a restart would already have renewed the certificate
WARN_DAYS = 10
_ANYWHERE = ("", "0.0.0.0", "::")


class Files(NamedTuple):
    directory: Path
    ca: Path
    ca_key: Path
    broker: Path
    admin: Path
    pending: Path  # exists until the cluster knows the admin
    key: Path  # the cluster's key, with which hosts authenticate to each other
    metrics_token: Path
    host: Path
    plaintext_allowed: Path  # hosts.allowed


def files(data_dir: Path) -> Files:
    folder = data_dir.absolute() / "secure"
    names = ("ca.pem", "ca.key", "broker.pem", "admin.properties", "admin.pending", "cluster.key", "metrics.token")
    return Files(folder, *(folder / name for name in (*names, "host.pem", "hosts.allowed")))


def is_secured(data_dir: Path) -> bool:
    return files(data_dir).broker.exists()


def settings(data_dir: Path) -> dict[str, str]:
    """Returns properties for the broker; a configuration file or --set takes precedence."""
    paths = files(data_dir)
    return {
        "listeners": LISTENERS,
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(paths.broker),
        "cluster.key.file": str(paths.key),
        "metrics.token.file": str(paths.metrics_token),
        "cluster.tls": _tls_between_hosts(paths),
        "cluster.tls.certificate.file": str(paths.host),
        "cluster.tls.ca.file": str(paths.ca),
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": f"User:{ADMIN}",
    }


def _tls_between_hosts(paths: Files) -> str:
    """The value of cluster.tls, even before prepare() has created missing files."""
    if paths.host.exists():
        return "allowed" if paths.plaintext_allowed.exists() else "required"
    if paths.broker.exists() and not paths.ca_key.exists():
        return "off"  # created by an earlier release, and nothing here can make a certificate
    return "allowed" if _has_been_used(paths) else "required"


def _has_been_used(paths: Files) -> bool:
    """Whether a broker has run in this directory. If it ran without a host certificate, other hosts
    of its cluster may have none either.
    """
    return paths.broker.exists() or layout(paths.directory.parent).meta_properties.exists()


def hosts_of(config: Mapping[str, str]) -> list[str]:
    """The names and addresses by which clients may reach a broker of this configuration."""
    from mqd.base.listeners import advertised_listeners, parse_listeners

    named = [listener.host for listener in (*parse_listeners(config), *advertised_listeners(config).values())]
    own_hosts = [socket.gethostname(), socket.getfqdn(), *_own_addresses()]
    hosts = ["localhost", "127.0.0.1", "::1", *(host for host in named if host not in _ANYWHERE), *own_hosts]
    return list(dict.fromkeys(host for host in hosts if host))


def _own_addresses() -> list[str]:
    """The addresses that this host's name resolves to; [] if the name cannot be resolved."""
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]).split("%")[0] for entry in addresses]


def prepare(
    data_dir: Path, node_id: int, hosts: Iterable[str], now: datetime.datetime | None = None, has_peers: bool = True
) -> Files:
    """Creates missing files, renews old ones, and keeps the rest. `has_peers`: the broker
    listens for other hosts. Raises CliError.
    """
    paths, now = files(data_dir), now or datetime.datetime.now(datetime.UTC)
    try:
        with _locked(paths):
            _prepare(paths, node_id, list(hosts), now, has_peers)
    except OSError as error:
        raise CliError(f"cannot make certificates: {error.filename}: {error.strerror}") from error
    except ValueError as error:
        raise CliError(
            f"the files in {paths.directory} are damaged ({error}); copy ca.pem and ca.key from another host of the"
            " cluster, or remove broker.pem"
        ) from error
    return paths


@contextlib.contextmanager
def _locked(paths: Files) -> Iterator[None]:
    """Keeps other starts and renewals from changing the directory, because its files must match
    each other. Raises OSError.
    """
    paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths.directory.chmod(0o700)
    fd = os.open(paths.directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _prepare(paths: Files, node_id: int, hosts: list[str], now: datetime.datetime, has_peers: bool) -> None:
    """Raises OSError, ValueError."""
    from mqd.security import pki  # imports cryptography, which a broker without --secure does not need

    if not paths.key.exists():
        _write(paths.key, base64.urlsafe_b64encode(secrets.token_bytes(32)) + b"\n")
    if not paths.metrics_token.exists():
        _write(paths.metrics_token, secrets.token_urlsafe(32).encode() + b"\n")
    authority = _ensure_authority(paths, now)
    if _has_been_used(paths) and not paths.host.exists() and has_peers:
        _write(paths.plaintext_allowed, b"")
    if authority.key and _host_needs_renewal(paths, node_id, now):
        pair = pki.issue_host(authority, node_id, now)
        _write(paths.host, pair.key + pair.certificate)
    if not paths.broker.exists() or (authority.key and _needs_renewal(paths, hosts, now)):
        pair = pki.issue(authority, f"mqd broker {node_id}", hosts, now)
        _write(paths.broker, pair.key + pair.certificate)
    if not paths.admin.exists():
        _write(paths.pending, b"")
        _write(paths.admin, _admin_settings(paths).encode())


def renew(paths: Files, now: datetime.datetime) -> list[Path]:
    """Issues new certificates for the broker and its host, with the same names. Returns their
    files. Raises CliError.
    """
    from mqd.security import pki

    renewed = []

    try:
        with _locked(paths):
            for file in (paths.broker, paths.host):
                if file is paths.broker or file.exists():
                    pair = pki.renew(_ensure_authority(paths, now), file.read_bytes(), now)
                    _write(file, pair.key + pair.certificate)
                    renewed.append(file)
    except (OSError, ValueError) as error:
        raise CliError(f"the certificate in {paths.directory} cannot be renewed: {error}") from error
    return renewed


def describe_certificate(name: str, hosts: Iterable[str]) -> str:
    names = ", ".join(hosts)
    return f"the broker {name} ({names})" if names else f"the client {name}"


def _ensure_authority(paths: Files, now: datetime.datetime) -> CertifiedKey:
    from mqd.security import pki
    from mqd.security.pki import CertifiedKey

    if not paths.ca.exists():
        authority = pki.make_authority("mqd", now)
        _write(paths.ca_key, authority.key)
        _write(paths.ca, authority.certificate)
    if not paths.ca_key.exists():
        return CertifiedKey(paths.ca.read_bytes(), b"")
    return CertifiedKey(paths.ca.read_bytes(), paths.ca_key.read_bytes())


def _needs_renewal(paths: Files, hosts: list[str], now: datetime.datetime) -> bool:
    """Whether the broker's certificate expires soon or lacks a name."""
    from mqd.security import pki

    content = paths.broker.read_bytes()
    valid_for = pki.expiry_time(content) - now
    return valid_for < datetime.timedelta(days=pki.RENEW_DAYS) or not pki.covers(content, hosts)


def _host_needs_renewal(paths: Files, node_id: int, now: datetime.datetime) -> bool:
    from mqd.security import pki

    if not paths.host.exists():
        return True
    content = paths.host.read_bytes()
    valid_for = pki.expiry_time(content) - now
    return valid_for < datetime.timedelta(days=pki.RENEW_DAYS) or not pki.is_for_host(content, node_id)


def _admin_settings(paths: Files) -> str:
    return "".join(
        f"{name}={value}\n"
        for name, value in {
            "security.protocol": LISTENER,
            "sasl.mechanisms": MECHANISM,
            "sasl.username": ADMIN,
            "sasl.password": secrets.token_urlsafe(24),
            "ssl.ca.location": str(paths.ca),
        }.items()
    )


def share(source: Path, data_dir: Path) -> None:
    """Copies the files that the brokers of a cluster share, from the data directory `source` of one
    broker to that of another. Raises CliError.
    """
    source_files, target_files = files(source), files(data_dir)
    try:
        target_files.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("ca", "ca_key", "key", "metrics_token"):
            _write(getattr(target_files, name), getattr(source_files, name).read_bytes())
        admin = source_files.admin.read_text().replace(str(source_files.ca), str(target_files.ca))
        _write(target_files.admin, admin.encode())
    except OSError as error:
        raise CliError(f"cannot share certificates: {error.filename}: {error.strerror}") from error


def receive(data_dir: Path, contents: Mapping[str, bytes]) -> None:
    """Stores the files that another host has sent (field of Files -> content), in the given order.
    Raises CliError.
    """
    paths = files(data_dir)
    try:
        paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.directory.chmod(0o700)
        for name, content in contents.items():
            if name == "admin":
                content = _with_ca(content, paths.ca)
            _write(getattr(paths, name), content)
    except OSError as error:
        raise CliError(f"cannot store the certificates: {error.filename}: {error.strerror}") from error


def _with_ca(settings: bytes, ca: Path) -> bytes:
    lines = settings.decode().splitlines()
    return "".join(
        f"ssl.ca.location={ca}\n" if line.startswith("ssl.ca.location=") else f"{line}\n" for line in lines
    ).encode()


def make_admin(paths: Layout) -> None:
    """Creates the first user of a broker that has just become ready. Raises CliError."""
    from mqd.cli import local_controller
    from mqd.cluster.host import messages
    from mqd.cluster.metadata.records import ScramCredential
    from mqd.security import client, scram

    secure_files = files(paths.data_dir)
    if not secure_files.pending.exists():
        return
    password = client.read_properties(secure_files.admin)[0].settings["sasl.password"]
    verifiers = {name: scram.make_verifier(name, password) for name in scram.MECHANISMS}
    credentials = [
        ScramCredential(
            ADMIN,
            scram.MECHANISM_NUMBERS[name],
            verifier.salt,
            verifier.iterations,
            verifier.stored_key,
            verifier.server_key,
        )
        for name, verifier in verifiers.items()
    ]
    response = local_controller.change(
        paths.controller_socket,
        messages.AlterScramCredentials([], credentials, scram.new_decoy_secret()),
        ADMIN_TIMEOUT_S,
    )
    for error, message in [
        (response.error, response.message),
        *((user.error, user.message) for user in response.users),
    ]:
        if error:
            raise CliError(f"the user {ADMIN} could not be created: {message or ERRORS[error].message}")
    secure_files.pending.unlink(missing_ok=True)


def hint(data_dir: Path) -> str:
    """Returns the next steps, as a message for the terminal."""
    return (
        f"mqd secure: user {ADMIN}; for commands: export MQD_CLIENT_CONFIG={files(data_dir).admin}; for other clients:"
        " mqd client-config java|librdkafka|kcat|python|spark"
    )


def hosts_hint(data_dir: Path) -> str:
    """Returns the steps that remain until all traffic between hosts is encrypted; "": none."""
    paths = files(data_dir)
    mode = _tls_between_hosts(paths)
    if mode == "off":
        return (
            "mqd secure: connections between this host and others are not encrypted; on the host that has ca.key, run"
            f" mqd cert host NODE_ID -o FILE, copy FILE to {paths.host} on this host and start again"
        )
    if mode == "allowed":
        return (
            "mqd secure: hosts without a certificate are still accepted, unencrypted; once all hosts run this release,"
            " run mqd cert require on each of them and restart its broker"
        )
    return ""


def _write(file: Path, content: bytes) -> None:
    """Writes the file atomically, readable only by this user."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())
    temporary.replace(file)
