"""The checked options of `mqd console`: who can reach it, and with whose permissions it acts."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

import msgspec

from mqd.cli.common import EXIT_USAGE, CliError
from mqd.security.client import ClientSecurity

LISTEN = "127.0.0.1:9180"


class Options(msgspec.Struct, frozen=True):
    """`host`, `port`: the address to listen on. `allowed_hosts`: names and addresses that a browser may
    request; others are refused (DNS rebinding). `has_login`: users log in, and each acts with their
    own credentials.
    """

    bootstrap: str
    security: ClientSecurity
    host: str
    port: int
    allowed_hosts: frozenset[str]
    has_login: bool = False
    is_read_only: bool = False
    certificate: Path | None = None
    key: Path | None = None
    metrics: tuple[str, ...] = ()
    metrics_token_file: Path | None = None
    metrics_ca_file: Path | None = None
    audit: Path | None = None

    @property
    def has_tls(self) -> bool:
        return self.certificate is not None


def parse_listen(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(?:\[(?P<six>[0-9a-fA-F:]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})", text)
    if match is None or int(match["port"]) > 65535:
        raise CliError(f"--listen {text}: give ADDRESS:PORT, such as {LISTEN}", EXIT_USAGE)
    return match["six"] or match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def checked(options: Options) -> Options:
    """Returns the options, with the loopback names added to `allowed_hosts` if the console listens on
    loopback. Raises CliError for options that would let anyone use the console's own permissions, or
    that would send passwords in plaintext.
    """
    security = options.security
    if not security.has_sasl and security.settings.get("ssl.certificate.location"):
        raise CliError(
            "the client's settings have a certificate: each user of this host who opens the page would have that"
            " certificate's permissions; use a listener with SASL, so that users log in as themselves",
            EXIT_USAGE,
        )
    mechanism = security.settings.get("sasl.mechanisms", "SCRAM-SHA-512")
    if security.has_sasl and mechanism not in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        raise CliError(
            f"sasl.mechanism={mechanism} is not possible here, because users log in with a password; use PLAIN,"
            " SCRAM-SHA-256 or SCRAM-SHA-512",
            EXIT_USAGE,
        )
    if (options.certificate is None) != (options.key is None):
        raise CliError("--tls-key goes with --tls-certificate", EXIT_USAGE)
    is_local = is_loopback(options.host)
    if not is_local and not (security.has_sasl and options.has_tls):
        missing = " and ".join(
            text
            for text, present in (
                ("a login (--client-config FILE with security.protocol=SASL_SSL)", security.has_sasl),
                ("TLS (--tls-certificate, --tls-key)", options.has_tls),
            )
            if not present
        )
        raise CliError(
            f"--listen {options.host}: on an address other than loopback the page needs {missing}", EXIT_USAGE
        )
    hosts = set(options.allowed_hosts)
    if is_local:
        hosts |= {"localhost", "127.0.0.1", "::1", options.host}
    elif options.host not in ("0.0.0.0", "::"):
        hosts.add(options.host)
    if not hosts:
        raise CliError(
            f"--listen {options.host}: give the names that browsers use for the page: --allow-host NAME", EXIT_USAGE
        )
    if security.has_sasl:
        shared_settings = {name: value for name, value in security.settings.items() if name not in _USER_SETTINGS}
        security = ClientSecurity({**shared_settings, "sasl.mechanisms": mechanism})
    return msgspec.structs.replace(
        options, security=security, allowed_hosts=frozenset(name.lower() for name in hosts), has_login=security.has_sasl
    )


_USER_SETTINGS = ("sasl.username", "sasl.password", "sasl.tokenauth")


def user_security(security: ClientSecurity, name: str, password: str) -> ClientSecurity:
    return ClientSecurity({**security.settings, "sasl.username": name, "sasl.password": password})
