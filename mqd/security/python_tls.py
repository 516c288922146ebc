"""The TLS context of the metrics page, whose connections Python serves itself. It is made from the
same `ssl.*` settings as the contexts of the workers' listeners (tls_files.py).

Concurrency: one thread. Changed files are noticed within POLL_S; if they are unusable, the previous
certificate stays in use and the error is logged once.
"""

import os
import ssl
import time
from collections.abc import Mapping

from mqd.base import logging
from mqd.base.listeners import Listener
from mqd.base.property_values import ConfigError
from mqd.native.tls import ClientAuth, TlsFile, TlsIdentity
from mqd.security import tls_files

POLL_S = 2.0
_VERIFY = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.REQUESTED: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRED: ssl.CERT_REQUIRED,
}
log = logging.get("tls")


def context(config: Mapping[str, str], listener: Listener) -> ssl.SSLContext:
    """The context of the listener. Raises ConfigError."""
    settings = tls_files.read(config, listener)
    try:
        ssl_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ssl_context.minimum_version = ssl.TLSVersion(settings.version_min)
        ssl_context.maximum_version = ssl.TLSVersion(settings.version_max)
        ssl_context.set_ciphers(settings.ciphers_12)
        ssl_context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        for identity in settings.identities:
            _load(ssl_context, identity)
        if settings.trust is not None:
            ssl_context.load_verify_locations(cadata=_certificates(settings.trust))
        ssl_context.verify_mode = _VERIFY[ClientAuth(settings.client_auth)]
    except (ssl.SSLError, ValueError) as error:
        sources = " and ".join(map(str, tls_files.files(config, listener))) or "its ssl.* properties"
        raise ConfigError(
            f"listener {listener.name} cannot use {sources}: {error}: check the password, and that key and"
            " certificate belong together",
            "ssl.keystore.location",
        ) from None
    return ssl_context


def _load(ssl_context: ssl.SSLContext, identity: TlsIdentity) -> None:
    """Raises ssl.SSLError, ValueError."""
    password: str | None = None
    if identity.key is None:
        content = pem_of_pkcs12(identity.chain)
    else:
        content, password = identity.key.content + b"\n" + identity.chain.content, identity.key.password
    fd = os.memfd_create("mqd-tls", os.MFD_CLOEXEC)  # load_cert_chain takes only file names
    try:
        os.write(fd, content)
        ssl_context.load_cert_chain(f"/proc/self/fd/{fd}", password=lambda: password or _no_password())
    finally:
        os.close(fd)


def _no_password() -> str:
    """Without this callback, OpenSSL would prompt for a password at the terminal."""
    raise ValueError("the key is encrypted; set ssl.key.password")


def pem_of_pkcs12(store: TlsFile) -> bytes:
    """Key, certificate and chain as PEM. Raises ValueError."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import pkcs12

    key, certificate, chain = pkcs12.load_key_and_certificates(store.content, (store.password or "").encode())
    if key is None or certificate is None:
        raise ValueError("it has no private key with a certificate")
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    text = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    return text + b"".join(each.public_bytes(pem) for each in (certificate, *chain))


def _certificates(trust: TlsFile) -> str:
    if not trust.is_pkcs12:
        return trust.content.decode("ascii", "replace")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.serialization import pkcs12

    store = pkcs12.load_pkcs12(trust.content, (trust.password or "").encode())
    certificates = [entry.certificate for entry in store.additional_certs]
    return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in certificates).decode()


class ServerTls:
    """Loads the listener's context, and loads it again when its files have changed. The constructor
    raises ConfigError if the files are unusable.
    """

    def __init__(self, config: Mapping[str, str], listener: Listener) -> None:
        self._config, self._listener = config, listener
        self._last_state, self._checked_s = self._state(), time.monotonic()
        self._context = context(config, listener)

    def current(self) -> ssl.SSLContext:
        now = time.monotonic()
        if now >= self._checked_s + POLL_S:
            self._checked_s = now
            state = self._state()
            if state != self._last_state:
                self._last_state = state
                self._reload()
        return self._context

    def _reload(self) -> None:
        try:
            self._context = context(self._config, self._listener)
        except ConfigError as error:
            log.error("a changed certificate cannot be used; the previous one stays in use", reason=str(error))
        else:
            log.info("certificate reloaded", listener=self._listener.name)

    def _state(self) -> list[tuple[int, int, int]]:
        return [tls_files.file_state(path) for path in tls_files.files(self._config, self._listener)]
