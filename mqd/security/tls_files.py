"""The TLS settings of a listener, read from its properties and the files that they name: Kafka's
`ssl.*` names, PEM or PKCS12.

Errors are ConfigErrors that name the property, the file and the remedy. mqd.native.tls.TlsContext
checks the contents of the files (`check` below does both).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mqd.base.config import broker_value
from mqd.base.listeners import Listener, listener_settings, metrics_listener, override_name, parse_listeners
from mqd.base.property_values import ConfigError
from mqd.native import NativeError
from mqd.native.tls import (
    IDENTITY_COUNT_MAX,
    TICKET_KEY_BYTES,
    TLS_1_2,
    TLS_1_3,
    ClientAuth,
    TlsContext,
    TlsFile,
    TlsIdentity,
    TlsSettings,
)
from mqd.security.principal import MappingRule, mapping_rules

FILE_BYTES_MAX = 16 << 20
LOCATIONS = ("ssl.keystore.location", "ssl.truststore.location")
_PATH_PROPERTIES = (*LOCATIONS, "metrics.token.file")
_VERSIONS = {"TLSv1.2": TLS_1_2, "TLSv1.3": TLS_1_3}
# IANA's names, as in Kafka and Java -> OpenSSL's. Only suites with forward secrecy and
# authenticated encryption.
CIPHERS_12 = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
CIPHERS_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]*(?:PRIVATE KEY|CERTIFICATE))-----.*?-----END \1-----", re.DOTALL)
_JKS_MAGIC = (b"\xfe\xed\xfe\xed", b"\xce\xce\xce\xce")  # JKS, JCEKS
# A ticket is not accepted in a later epoch: the client then does a full handshake.
TICKET_EPOCH_S = 12 * 3600


def listeners_with_tls(config: Mapping[str, str]) -> list[tuple[int, Listener]]:
    """The (listener id, listener) pairs of the listeners that use TLS."""
    return [(index, listener) for index, listener in enumerate(parse_listeners(config)) if listener.has_tls]


def with_absolute_paths(config: Mapping[str, str]) -> dict[str, str]:
    """The configuration with absolute paths: the broker's processes have a different working
    directory from the command line.
    """
    return {
        name: os.path.abspath(value) if name.endswith(_PATH_PROPERTIES) and value.strip() else value
        for name, value in config.items()
    }


def files(config: Mapping[str, str], listener: Listener) -> list[Path]:
    """The files that the listener's settings are read from."""
    settings = listener_settings(config, listener.name)
    return [Path(settings[name]) for name in LOCATIONS if settings.get(name, "").strip()]


def file_state(path: str | os.PathLike[str]) -> tuple[int, int, int]:
    """Returns a value that differs when the file, or who may read it, has changed."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_ino, status.st_size, status.st_ctime_ns)


def check(config: Mapping[str, str]) -> None:
    """Checks that all TLS listeners could start with this configuration. Raises ConfigError."""
    for _, listener in listeners_with_tls(config):
        context(config, listener)
        principal_rules(config, listener)
    metrics = metrics_listener(config)
    if metrics is not None and metrics.has_tls:
        from mqd.security import python_tls  # not at the top: it imports this module

        python_tls.context(config, metrics)


def principal_rules(config: Mapping[str, str], listener: Listener) -> tuple[MappingRule, ...]:
    """Raises ConfigError."""
    settings, name = _ListenerSettings(config, listener), "ssl.principal.mapping.rules"
    try:
        return mapping_rules(str(settings.value(name)))
    except ValueError as error:
        raise settings.error(name, f"{name}: {error}") from None


def context(config: Mapping[str, str], listener: Listener, secret: bytes = b"", now_s: float = 0.0) -> TlsContext:
    """`secret`: shared by all processes that may resume each other's sessions; if empty, no session
    is resumed. Raises ConfigError.
    """
    settings = read(config, listener, ticket_key(secret, listener, config, now_s) if secret else None)
    try:
        return TlsContext(settings)
    except NativeError as error:
        sources = " and ".join(map(str, files(config, listener))) or "its ssl.* properties"
        raise ConfigError(
            f"listener {listener.name} cannot use {sources}: {error.strerror}", "ssl.keystore.location"
        ) from None


def ticket_key(secret: bytes, listener: Listener, config: Mapping[str, str], now_s: float) -> bytes:
    """Returns the key that encrypts session tickets. It depends on the listener and its client
    authentication, so that a ticket is not valid on another listener.
    """
    settings = listener_settings(config, listener.name)
    scope = [listener.name, settings.get("ssl.client.auth", ""), settings.get("ssl.truststore.location", "")]
    text = "\0".join(["mqd TLS tickets", *scope, str(int(now_s) // TICKET_EPOCH_S)]).encode()
    blocks = [hmac.digest(secret, bytes([number]) + text, hashlib.sha512) for number in range(2)]
    return b"".join(blocks)[:TICKET_KEY_BYTES]


def read(config: Mapping[str, str], listener: Listener, session_ticket_key: bytes | None = None) -> TlsSettings:
    """Raises ConfigError."""
    settings = _ListenerSettings(config, listener)
    client_auth = ClientAuth[str(settings.value("ssl.client.auth")).upper()]
    trust = settings.trust()
    if client_auth and trust is None:
        raise settings.error(
            "ssl.truststore.location",
            f"ssl.client.auth={client_auth.name.lower()} needs the CAs of the clients' certificates: set"
            " ssl.truststore.location to a PEM or PKCS12 file",
        )
    versions, ciphers_12, ciphers_13 = settings.versions_and_ciphers()
    return TlsSettings(
        identities=settings.identities(),
        client_auth=client_auth,
        trust=trust,
        version_min=min(versions),
        version_max=max(versions),
        ciphers_12=ciphers_12,
        ciphers_13=ciphers_13,
        ticket_key=session_ticket_key or bytes(TICKET_KEY_BYTES),
    )


class _ListenerSettings:
    """The properties of one listener."""

    def __init__(self, config: Mapping[str, str], listener: Listener):
        self._config = listener_settings(config, listener.name)
        self._broker_config = config
        self._listener = listener

    def value(self, name: str):
        return broker_value(self._config, name)

    def text(self, name: str) -> str | None:
        return self._config.get(name, "").strip() or None

    def error(self, name: str, message: str) -> ConfigError:
        override = override_name(self._listener.name, name)
        return ConfigError(
            f"listener {self._listener.name}: {message}", override if override in self._broker_config else name
        )

    def _content(self, name: str) -> bytes | None:
        path = self.text(name)
        if path is None:
            return None
        try:
            with open(path, "rb") as file:
                content = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise self.error(name, f"{name}={path} cannot be read: {error.strerror}") from None
        if not content or len(content) > FILE_BYTES_MAX:
            raise self.error(name, f"{name}={path} is {'empty' if not content else 'too large'}")
        return content

    def _is_pkcs12(self, store: str, content: bytes) -> bool:
        """`store`: ssl.keystore or ssl.truststore."""
        types = {"ssl.keystore": "ssl.keystore.type", "ssl.truststore": "ssl.truststore.type"}
        configured_type, path = str(self.value(types[store]) or ""), self.text(f"{store}.location")
        if content.startswith(_JKS_MAGIC):
            raise self.error(
                f"{store}.location",
                f"{path} is a Java keystore (JKS), which only Java can read. Convert it: keytool -importkeystore"
                f" -srckeystore {path} -destkeystore {path}.p12 -deststoretype PKCS12",
            )
        actual_type = "PEM" if b"-----BEGIN " in content else "PKCS12" if content.startswith(b"\x30") else ""
        if not actual_type:
            raise self.error(f"{store}.location", f"{path} is neither PEM nor PKCS12")
        if configured_type and configured_type != actual_type:
            raise self.error(
                f"{store}.type",
                f"{path} is {actual_type}, but {store}.type={configured_type}; correct or remove {store}.type",
            )
        return actual_type == "PKCS12"

    def identities(self) -> tuple[TlsIdentity, ...]:
        chain, key = self.text("ssl.keystore.certificate.chain"), self.text("ssl.keystore.key")
        password = self.text("ssl.key.password")
        if chain or key:
            if not chain or not key:
                raise self.error(
                    "ssl.keystore.key",
                    "ssl.keystore.certificate.chain and ssl.keystore.key belong together: set both, as PEM text",
                )
            return (TlsIdentity(TlsFile(_pem(chain)), TlsFile(_pem(key), password)),)
        content = self._content("ssl.keystore.location")
        if content is None:
            raise self.error(
                "ssl.keystore.location",
                f"{self._listener.protocol} needs a certificate and its key: set ssl.keystore.location to a PEM file"
                " with both (or a PKCS12 file)",
            )
        if self._is_pkcs12("ssl.keystore", content):
            store_password = self.text("ssl.keystore.password")
            if password and password != store_password:
                raise self.error("ssl.key.password", "a PKCS12 file has one password: ssl.keystore.password")
            return (TlsIdentity(TlsFile(content, store_password, is_pkcs12=True)),)
        identities = tuple(
            TlsIdentity(TlsFile(certificates), TlsFile(key_text, password))
            for certificates, key_text in split_by_key(content)
        )
        path = self.text("ssl.keystore.location")
        if not identities:
            raise self.error(
                "ssl.keystore.location",
                f"{path} needs a private key and its certificate chain, both as PEM, in one file",
            )
        if len(identities) > IDENTITY_COUNT_MAX:
            raise self.error("ssl.keystore.location", f"{path} has more than {IDENTITY_COUNT_MAX} private keys")
        return identities

    def trust(self) -> TlsFile | None:
        text = self.text("ssl.truststore.certificates")
        if text:
            return TlsFile(_pem(text))
        content = self._content("ssl.truststore.location")
        if content is None:
            return None
        is_pkcs12 = self._is_pkcs12("ssl.truststore", content)
        return TlsFile(content, self.text("ssl.truststore.password") if is_pkcs12 else None, is_pkcs12)

    def versions_and_ciphers(self) -> tuple[list[int], str, str]:
        """The versions, and the suites of TLS 1.2 and 1.3 by OpenSSL's names. A version for which
        no suite is left is not offered.
        """
        versions = {_VERSIONS[name] for name in self.value("ssl.enabled.protocols")}
        requested_suites = list(self.value("ssl.cipher.suites") or [])
        suites_12 = [CIPHERS_12[name] for name in requested_suites if name in CIPHERS_12]
        suites_13 = [name for name in requested_suites if name in CIPHERS_13]
        if requested_suites:
            versions &= ({TLS_1_2} if suites_12 else set()) | ({TLS_1_3} if suites_13 else set())
        if not versions:
            raise self.error(
                "ssl.cipher.suites", "ssl.cipher.suites has no suite for the versions of ssl.enabled.protocols"
            )
        return sorted(versions), ":".join(suites_12 or CIPHERS_12.values()), ":".join(suites_13 or CIPHERS_13)


def _pem(text: str) -> bytes:
    """Restores the line breaks of PEM text: a properties file has it on one line, with spaces or
    \\n instead.
    """
    text = text.replace("\\n", "\n")
    return re.sub(
        r"(-----BEGIN [A-Z0-9 ]+-----)\s+(.*?)\s+(-----END [A-Z0-9 ]+-----)",
        # an encrypted key in the traditional format has headers with colons: its lines stay as they are
        lambda match: "\n".join([match[1], *match[2].split(), match[3], ""]) if ":" not in match[2] else match[0],
        text,
        flags=re.DOTALL,
    ).encode()


def split_by_key(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(certificates, key) for each private key in a PEM file. A key's certificates follow it, or
    precede it if the file begins with a certificate. Other blocks, such as EC PARAMETERS, are
    ignored.
    """
    blocks = [(match[1].endswith(b"PRIVATE KEY"), match[0] + b"\n") for match in _BLOCK.finditer(content)]
    if blocks and not blocks[0][0]:
        # read backwards, each key comes before its certificates
        blocks.reverse()
        for certificates, key in list(_group_by_key(blocks))[::-1]:
            yield b"".join(reversed(certificates)), key
        return
    for certificates, key in _group_by_key(blocks):
        yield b"".join(certificates), key


def _group_by_key(blocks: list[tuple[bool, bytes]]) -> Iterator[tuple[list[bytes], bytes]]:
    key = b""
    certificates: list[bytes] = []
    for is_key, block in blocks:
        if is_key:
            if key:
                yield certificates, key
            key, certificates = block, []
        elif key:
            certificates.append(block)
    if key:
        yield certificates, key
