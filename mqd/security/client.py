"""Authentication of mqd's own clients: their settings, which are named as in the Java client or
librdkafka, and the first steps of a new connection.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import socket
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mqd.base.property_values import ConfigError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.messages import SaslAuthenticateRequest, SaslHandshakeRequest
from mqd.security.scram import ITERATIONS_MIN, MECHANISMS, salted_password

ITERATIONS_MAX = 1 << 20  # more would let a server keep this client busy for seconds
HANDSHAKE, AUTHENTICATE = 17, 36  # API keys
# mqd's own property: user and password are the id and HMAC of a delegation token. Java clients set
# tokenauth in sasl.jaas.config instead.
TOKEN_AUTH = "sasl.tokenauth"
# Java's name, or an alias -> librdkafka's
_LIBRDKAFKA_NAMES = {
    "sasl.mechanism": "sasl.mechanisms",
    "ssl.truststore.location": "ssl.ca.location",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
}
_TLS_FILES = ("ssl.ca.location", "ssl.certificate.location", "ssl.key.location")
# the ssl.* settings that this client supports
_TLS_SETTINGS = frozenset({*_TLS_FILES, "ssl.ca.pem", "ssl.key.password", "ssl.endpoint.identification.algorithm"})
# Java's settings for the file format; only PEM is supported here
_STORE_TYPES = {"ssl.truststore.type": "PEM", "ssl.keystore.type": "PEM"}
_JAAS = re.compile(
    r"\s*(?:org\.apache\.kafka\.common\.security\.(?:plain\.PlainLoginModule|scram\.ScramLoginModule))\s+required"
    r"((?:\s+\w+\s*=\s*\"(?:[^\"\\]|\\.)*\")*)\s*;\s*"
)
_JAAS_OPTION = re.compile(r"(\w+)\s*=\s*\"((?:[^\"\\]|\\.)*)\"")

# sends one request, by API key and version, and returns its response
Send = Callable[[int, object, int], Any]


class NotAuthenticated(Exception):
    """The broker refused our credentials, or did not prove that it knows their verifier."""


class ClientSecurity(msgspec.Struct, frozen=True):
    """Settings by librdkafka's names: security.protocol, sasl.* and ssl.*."""

    settings: Mapping[str, str] = {}

    @property
    def protocol(self) -> str:
        return self.settings.get("security.protocol", "PLAINTEXT").upper()

    @property
    def has_tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def has_sasl(self) -> bool:
        return self.protocol.startswith("SASL_")

    @property
    def is_supported(self) -> bool:
        """Whether secure() and authenticate() support these settings; librdkafka supports more."""
        mechanisms = ("PLAIN", *MECHANISMS)
        return all(name in _TLS_SETTINGS for name in self.settings if name.startswith("ssl.")) and (
            not self.has_sasl or self.settings.get("sasl.mechanisms") in mechanisms
        )

    def check(self) -> None:
        """Raises ConfigError for certificates that cannot be used. secure() reads them again."""
        if self.has_tls:
            self._context()

    def secure(self, connection: socket.socket, host: str) -> socket.socket:
        """Returns the connection to use: if the protocol requires TLS, `connection` wrapped in it.
        Raises ConfigError, and OSError (ssl.SSLError for a failed handshake).
        """
        return self._context().wrap_socket(connection, server_hostname=host) if self.has_tls else connection

    def authenticate(self, send: Send) -> None:
        """Authenticates on a new connection. Raises NotAuthenticated."""
        if not self.has_sasl:
            return
        mechanism = self.settings.get("sasl.mechanisms", "")
        response = send(HANDSHAKE, SaslHandshakeRequest(mechanism=mechanism), 1)
        if response.error_code == ErrorCode.UNSUPPORTED_SASL_MECHANISM:
            offered = ", ".join(response.mechanisms)
            raise NotAuthenticated(
                f"the broker does not support sasl.mechanism={mechanism or '(none)'}; it supports {offered}"
            )
        if response.error_code:
            raise NotAuthenticated(f"the SASL handshake failed: {error_message(response.error_code)}")
        step = lambda token: self._step(send, token)
        user, password = self.settings.get("sasl.username", ""), self.settings.get("sasl.password", "")
        if mechanism == "PLAIN":
            step(f"\0{user}\0{password}".encode())
        elif mechanism in MECHANISMS:
            scram(mechanism, user, password, step, self.settings.get(TOKEN_AUTH, "").lower() == "true")
        else:
            raise NotAuthenticated(
                f"sasl.mechanism={mechanism} is not supported; use PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512"
            )

    def _step(self, send: Send, token: bytes) -> bytes:
        response = send(AUTHENTICATE, SaslAuthenticateRequest(auth_bytes=token), 2)
        code = response.error_code
        if code:
            message = response.error_message or error_message(code)
            raise NotAuthenticated(f"{message} (user {self.settings.get('sasl.username', '')})")
        return bytes(response.auth_bytes)

    def _context(self) -> ssl.SSLContext:
        get = self.settings.get
        if get("ssl.certificate.pem") or get("ssl.key.pem"):
            raise ConfigError(
                "this client does not support an inline client certificate; put it into a file and set"
                " ssl.certificate.location and ssl.key.location",
                "ssl.certificate.pem",
            )
        location = get("ssl.ca.location") or None
        if location == "probe":  # librdkafka's name for the system's certificates
            location = None
        for name in _TLS_FILES:
            file = get(name) or ""
            if file not in ("", "probe") and not Path(file).exists():
                raise ConfigError(f"{name}={file}: there is no such file", name, file)
        try:
            is_directory = location is not None and Path(location).is_dir()
            context = ssl.create_default_context(
                cafile=None if is_directory else location,
                capath=location if is_directory else None,
                cadata=get("ssl.ca.pem") or None,
            )
            if get("ssl.certificate.location"):
                context.load_cert_chain(
                    get("ssl.certificate.location") or "", get("ssl.key.location"), get("ssl.key.password") or ""
                )
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificates of this client cannot be read: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if get("ssl.endpoint.identification.algorithm", "https") in ("", "none"):
            context.check_hostname = False
        return context


def security_from_properties(properties: Mapping[str, str]) -> ClientSecurity:
    """The security settings among a client's properties, in Java's or librdkafka's names. Raises
    ConfigError for a setting that this client cannot honour.
    """
    settings: dict[str, str] = {}
    for name, value in properties.items():
        if name == "sasl.jaas.config":
            settings.update(_parse_jaas_config(value))
        elif name in _STORE_TYPES:
            if value.upper() != _STORE_TYPES[name]:
                raise ConfigError(
                    f"{name}={value} is not supported by this client; convert the file to PEM", name, value
                )
        elif name == "security.protocol" or name.startswith(("ssl.", "sasl.")):
            # "" disables the check of the host's name in Java's settings, "none" in librdkafka's
            skips_host_check = name == "ssl.endpoint.identification.algorithm" and not value
            settings[_LIBRDKAFKA_NAMES.get(name, name)] = "none" if skips_host_check else value
    protocol = settings.get("security.protocol", "PLAINTEXT").upper()
    if protocol not in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"):
        raise ConfigError(f"security.protocol={protocol} is not known", "security.protocol", protocol)
    if settings.get("ssl.key.location") and not settings.get("ssl.certificate.location"):
        raise ConfigError("ssl.key.location needs ssl.certificate.location", "ssl.key.location")
    return ClientSecurity(settings)


def read_properties(file: Path) -> tuple[ClientSecurity, dict[str, str]]:
    """The security settings of a client's properties file (Java's syntax), and its other
    properties. Raises ConfigError.
    """
    from mqd.base.properties_file import parse_properties

    try:
        properties = {name: value for name, (value, _) in parse_properties(file.read_text("utf-8")).items()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the client's settings {file}: {error}") from error
    security = security_from_properties(properties)
    rest = {
        name: value
        for name, value in properties.items()
        if name != "security.protocol" and not name.startswith(("ssl.", "sasl."))
    }
    return security, rest


def _parse_jaas_config(text: str) -> dict[str, str]:
    match = _JAAS.fullmatch(text)
    if match is None:
        raise ConfigError(
            "sasl.jaas.config must be PlainLoginModule or ScramLoginModule with username and password",
            "sasl.jaas.config",
        )
    options = {name: re.sub(r"\\(.)", r"\1", value) for name, value in _JAAS_OPTION.findall(match[1])}
    return {f"sasl.{name}": options[name] for name in ("username", "password", "tokenauth") if name in options}


def jaas_config(module: str, user: str, password: str, is_token: bool = False) -> str:
    """The value of sasl.jaas.config for Java clients."""
    quoted = ['"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in (user, password)]
    token = ' tokenauth="true"' if is_token else ""
    return f"org.apache.kafka.common.security.{module} required username={quoted[0]} password={quoted[1]}{token};"


# -- SCRAM, the client's side ----------------------------------------------------------------------


def scram(mechanism: str, user: str, password: str, step: Callable[[bytes], bytes], is_token: bool = False) -> None:
    """Authenticates with SCRAM. `step` sends a token and returns the server's. `is_token`: user and
    password are the id and HMAC of a delegation token. Raises NotAuthenticated, including when the
    server does not prove that it knows the password's verifier.
    """
    hash_name, nonce = MECHANISMS[mechanism], secrets.token_urlsafe(24)
    bare = f"n={user.replace('=', '=3D').replace(',', '=2C')},r={nonce}{',tokenauth=true' if is_token else ''}"
    first = step(f"n,,{bare}".encode()).decode("utf-8", "replace")
    match = re.fullmatch(r"r=([\x21-\x2b\x2d-\x7e]+),s=([A-Za-z0-9+/]+=*),i=([0-9]{1,9})(?:,.*)?", first)
    if match is None or not match[1].startswith(nonce) or len(match[1]) <= len(nonce):
        raise NotAuthenticated("the broker's first message is not a valid SCRAM message")
    iterations = int(match[3])
    if not ITERATIONS_MIN <= iterations <= ITERATIONS_MAX:
        raise NotAuthenticated(
            f"the broker requires {iterations} iterations; this client accepts {ITERATIONS_MIN} to {ITERATIONS_MAX}"
        )
    try:
        salt = base64.b64decode(match[2], validate=True)
    except binascii.Error:
        raise NotAuthenticated("the broker's salt is not base64") from None
    salted = salted_password(mechanism, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    without_proof = f"c=biws,r={match[1]}"
    signed = f"{bare},{first},{without_proof}".encode()
    signature = hmac.digest(hashlib.new(hash_name, client_key).digest(), signed, hash_name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    final = step(f"{without_proof},p={base64.b64encode(proof).decode()}".encode())
    expected = b"v=" + base64.b64encode(hmac.digest(hmac.digest(salted, b"Server Key", hash_name), signed, hash_name))
    if not hmac.compare_digest(final.split(b",")[0], expected):
        raise NotAuthenticated(
            "the server did not prove that it knows this user's password: it may not be the real broker"
        )
