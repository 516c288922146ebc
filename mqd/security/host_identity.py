"""The certificates by which the hosts of a cluster prove their node ids to each other:
`cluster.tls` and the files that it names.

    identity = load(config)          None: cluster.tls=off
    identity.server, .client         contexts for the connections that Python accepts or opens
    identity.files                   the certificates and key as PEM bytes, for native contexts
    identity.reload()                reads changed files again, and replaces all of the above
    check_peer(certificate, node)    after the TLS handshake: checks that the peer's certificate is
                                     that node's

A connection between hosts is authenticated by the cluster's key first
(mqd/cluster/membership/handshake.py), then by these certificates. A stolen cluster key is useless
without a certificate, and a stolen certificate is valid for one host only.

Invariant: if new files are unusable, the previous ones stay in use. Errors are ConfigErrors that
name the property, the file and the remedy. Concurrency: load() and reload() read files and may be
called by any thread, one at a time; each attribute is replaced as a whole.
"""

import datetime
import os
import ssl
from collections.abc import Mapping
from typing import Any

import msgspec

from mqd.base.config import broker_number, broker_value
from mqd.base.property_values import ConfigError

MODES = ("off", "allowed", "required")  # in the order of handshake.TLS_OFF, ...
CERTIFICATE, KEY, CA = "cluster.tls.certificate.file", "cluster.tls.key.file", "cluster.tls.ca.file"
NAMES = (CERTIFICATE, KEY, CA)
FILE_BYTES_MAX = 1 << 20


class WrongHost(ConnectionError):
    """The peer's certificate does not belong to the node that the peer claims to be."""


class PemFiles(msgspec.Struct, frozen=True):
    """All in PEM. `certificate`: this host's, followed by those that lead to a CA. The repr shows
    no contents.
    """

    certificate: bytes
    key: bytes
    ca: bytes

    def __repr__(self) -> str:
        return "PemFiles()"


def load(config: Mapping[str, str]) -> "HostIdentity | None":
    """Returns None if cluster.tls=off. Raises ConfigError."""
    mode = MODES.index(str(broker_value(config, "cluster.tls")))
    return HostIdentity(config, mode) if mode else None


def check(config: Mapping[str, str]) -> None:
    """Checks that other hosts would accept this host's certificate. Raises ConfigError."""
    identity = load(config)
    if identity is None:
        return
    from mqd.security import pki  # imports cryptography, which a broker without host TLS does not need

    expiry_time = pki.expiry_time(identity.files.certificate)
    if expiry_time < datetime.datetime.now(datetime.UTC):
        path = config[CERTIFICATE]
        raise ConfigError(
            f"the host certificate {path} expired on {expiry_time:%Y-%m-%d}: replace it (`mqd cert renew`"
            " creates one with the authority of `mqd up --secure`)",
            CERTIFICATE,
        )


def with_absolute_paths(config: Mapping[str, str]) -> dict[str, str]:
    """The configuration with absolute paths for `cluster.tls.*`; see
    tls_files.with_absolute_paths().
    """
    return {
        name: os.path.abspath(value) if name in NAMES and value.strip() else value for name, value in config.items()
    }


class HostIdentity:
    def __init__(self, config: Mapping[str, str], mode: int) -> None:
        self.mode = mode  # handshake.TLS_ALLOWED or TLS_REQUIRED
        self.node_id = broker_number(config, "node.id")
        self._paths = {name: config.get(name, "").strip() for name in NAMES}
        self._paths[KEY] = self._paths[KEY] or self._paths[CERTIFICATE]
        for name, path in self._paths.items():
            if not path:
                raise ConfigError(
                    f"cluster.tls={MODES[mode]} needs {name}; `mqd up --secure` makes the files and sets it", name
                )
        self._last_state = self._state()
        self.files, self.server, self.client = self._read()

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        """Returns a value that differs when the files have changed."""
        states = []
        for path in self._paths.values():
            try:
                status = os.stat(path)
            except OSError:
                states.append((0, 0, 0))
            else:
                states.append((status.st_ino, status.st_size, status.st_ctime_ns))
        return tuple(states)

    def reload(self) -> bool:
        """Returns whether the files had changed and are now in use. Raises ConfigError if they have
        changed and are unusable; the previous ones stay in use.
        """
        state = self._state()
        if state == self._last_state:
            return False
        self._last_state = state
        self.files, self.server, self.client = self._read()
        return True

    def _read(self) -> tuple[PemFiles, ssl.SSLContext, ssl.SSLContext]:
        """Raises ConfigError."""
        files = PemFiles(*(_read_file(name, self._paths[name]) for name in NAMES))
        _check_node(files.certificate, self._paths[CERTIFICATE], self.node_id)
        try:
            return files, _context(files, ssl.PROTOCOL_TLS_SERVER), _context(files, ssl.PROTOCOL_TLS_CLIENT)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{self._paths[CERTIFICATE]}, {self._paths[KEY]} and {self._paths[CA]} cannot be used together:"
                f" {reason_of(error)}; all must be PEM, and the key must be unencrypted and match the certificate",
                CERTIFICATE,
            ) from None


def _read_file(name: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror}", name) from None
    if not content or len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{name}={path} is {'empty' if not content else 'too large'}", name)
    if name == KEY and mode & 0o077:
        raise ConfigError(f"{name}={path} can be read by others on this machine: chmod 600 {path}", name)
    return content


def _check_node(certificate: bytes, path: str, node_id: int) -> None:
    from mqd.security import pki

    try:
        if pki.is_for_host(certificate, node_id):
            return
    except ValueError as error:
        raise ConfigError(f"{path} has no certificate: {error}", CERTIFICATE) from None
    raise ConfigError(
        f"the certificate in {path} is not for this host: it needs the URI {pki.node_uri(node_id)} as a subject"
        " alternative name (`mqd up --secure` makes one)",
        CERTIFICATE,
    )


def _context(files: PemFiles, protocol: int) -> ssl.SSLContext:
    """Raises ssl.SSLError, ValueError."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # check_peer() checks the node id instead: addresses change
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are few and long-lived; a resumed session would skip the certificate
    context.load_verify_locations(cadata=files.ca.decode("ascii"))
    # load_cert_chain takes only file names, and the file may have changed since it was read
    fd = os.memfd_create("mqd-host", os.MFD_CLOEXEC)
    try:
        os.write(fd, files.key + b"\n" + files.certificate)
        context.load_cert_chain(f"/proc/self/fd/{fd}", password=_no_password)
    finally:
        os.close(fd)
    return context


def _no_password() -> str:
    """Without this callback, OpenSSL would prompt for a password at the terminal."""
    raise ValueError("the key is encrypted")


def check_peer(certificate: Mapping[str, Any] | None, node_id: int) -> None:
    """`certificate`: the result of ssl's getpeercert(). Raises WrongHost."""
    from mqd.security.pki import node_uri

    names = uris(certificate)
    if node_uri(node_id) not in names:
        raise WrongHost(
            f"node {node_id} has a certificate of {' and '.join(names) or 'no host'}; install on each host the one"
            " that was created for its node id"
        )


def uris(certificate: Mapping[str, Any] | None) -> list[str]:
    """The URIs among the certificate's subject alternative names."""
    return [str(value) for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "URI"]


def reason_of(error: BaseException) -> str:
    """The reason for a failed TLS handshake, as text."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        words = (error.reason or "").lower().replace("_", " ")
        return f"the peer refuses TLS or this host's certificate: {words}" if "alert" in words else words or str(error)
    return str(error) or type(error).__name__
