"""TLS contexts for the reactor's listeners and for connections between hosts, made from
certificates with the system's OpenSSL.

The native side loads `libssl.so.3` at the first call; without it every call here raises NativeError
with the remedy. Contexts are immutable: reloading a certificate creates a new context.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

from mqd.native.core import bytes_of, check, failure, ffi, lib

TICKET_KEY_BYTES: int = lib.MQD_TLS_TICKET_KEY_BYTES
# pseudo listener id for Reactor.set_listener_tls: connections between hosts
LISTENER_ID_HOSTS: int = lib.MQD_LISTENER_ID_HOSTS
IDENTITY_COUNT_MAX: int = lib.MQD_TLS_IDENTITY_COUNT_MAX
TLS_1_2, TLS_1_3 = 0x303, 0x304
CIPHERS_BETWEEN_HOSTS = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256"


class ClientAuth(IntEnum):
    """enum mqd_tls_client_auth."""

    NONE = lib.MQD_TLS_CLIENT_AUTH_NONE
    REQUESTED = lib.MQD_TLS_CLIENT_AUTH_REQUESTED
    REQUIRED = lib.MQD_TLS_CLIENT_AUTH_REQUIRED


class TlsFile(msgspec.Struct, frozen=True):
    """The content of a file. The repr does not show it, because it may be a private key."""

    content: bytes
    password: str | None = None
    is_pkcs12: bool = False

    def __repr__(self) -> str:
        return f"TlsFile({len(self.content)} bytes)"


class TlsIdentity(msgspec.Struct, frozen=True):
    """A certificate with its chain, and its private key. With PKCS12, `chain` contains both."""

    chain: TlsFile
    key: TlsFile | None = None


class TlsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """struct mqd_tls_settings."""

    identities: tuple[TlsIdentity, ...]
    client_auth: int = 0  # ClientAuth
    trust: TlsFile | None = None  # certificates of the CAs whose peers are accepted
    version_min: int = TLS_1_2
    version_max: int = TLS_1_3
    ciphers_12: str  # OpenSSL's names, separated by colons
    ciphers_13: str
    ticket_key: bytes = bytes(TICKET_KEY_BYTES)  # zeros: sessions are not resumed
    between_hosts: bool = False


def tls_version() -> str:
    """The version of OpenSSL in use. Raises NativeError if no usable one is installed."""
    check(lib.mqd_tls_available())
    return ffi.string(lib.mqd_tls_version()).decode()


class TlsContext:
    """The TLS context of a listener, checked when it is created. Raises NativeError, which names the
    file and what is wrong with it.
    """

    def __init__(self, settings: TlsSettings):
        kept_alive: list[Any] = []
        native = ffi.new("struct mqd_tls_settings *")
        identities = ffi.new("struct mqd_tls_identity[]", len(settings.identities))
        for target, identity in zip(identities, settings.identities, strict=True):
            _fill(target.chain, identity.chain, kept_alive)
            if identity.key is not None:
                _fill(target.key, identity.key, kept_alive)
        native.identities, native.identity_count = identities, len(settings.identities)
        native.client_auth = settings.client_auth
        if settings.trust is not None:
            _fill(native.trust, settings.trust, kept_alive)
        native.version_min, native.version_max = settings.version_min, settings.version_max
        kept_alive += [ffi.new("char[]", settings.ciphers_12.encode()), ffi.new("char[]", settings.ciphers_13.encode())]
        native.ciphers_12, native.ciphers_13 = kept_alive[-2:]
        native.ticket_key = settings.ticket_key
        native.between_hosts = settings.between_hosts
        context = lib.mqd_tls_context_create(native)
        ffi.memmove(native.ticket_key, bytes(TICKET_KEY_BYTES), TICKET_KEY_BYTES)
        if context == ffi.NULL:
            raise failure()
        self._context = ffi.gc(context, lib.mqd_tls_context_free)

    def give_away(self) -> Any:
        """Releases the C context to the reactor, which frees it."""
        context, self._context = self._context, None
        ffi.gc(context, None)  # no longer freed by us
        return context


def context_between_hosts(certificate: bytes, key: bytes, ca: bytes) -> TlsContext:
    """A context for Reactor.set_listener_tls(LISTENER_ID_HOSTS), from PEM files. Raises NativeError."""
    return TlsContext(
        TlsSettings(
            identities=(TlsIdentity(TlsFile(certificate), TlsFile(key)),),
            client_auth=ClientAuth.REQUIRED,
            trust=TlsFile(ca),
            version_min=TLS_1_3,
            ciphers_12="",
            ciphers_13=CIPHERS_BETWEEN_HOSTS,
            between_hosts=True,
        )
    )


def _fill(target: Any, file: TlsFile, kept_alive: list[Any]) -> None:
    memory = bytes_of(file.content, writable=False)
    kept_alive.append(memory)
    target.bytes, target.size_bytes, target.pkcs12 = memory, len(file.content), file.is_pkcs12
    if file.password is not None:
        kept_alive.append(ffi.new("char[]", file.password.encode()))
        target.password = kept_alive[-1]
