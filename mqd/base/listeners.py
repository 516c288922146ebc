"""Where clients connect: the listeners of a broker, their security protocols, and settings for a
single listener (`listener.name.NAME.PROPERTY`).
"""

import re
import socket
from collections.abc import Mapping

import msgspec

from mqd.base.host_names import parse_ip_counts
from mqd.base.property_values import ConfigError

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
OVERRIDE_PREFIX = "listener.name."
LISTENER_COUNT_MAX = 64  # MQD_LISTENER_COUNT_MAX
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1")
_LISTENER = re.compile(r"([A-Za-z0-9_.-]+)://(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/]*)):([0-9]{1,5})")


class Listener(msgspec.Struct, frozen=True):
    name: str
    host: str  # "" = all interfaces
    port: int  # 0 = a free one
    protocol: str = "PLAINTEXT"  # one of PROTOCOLS

    @property
    def has_tls(self) -> bool:
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def has_sasl(self) -> bool:
        return self.protocol.startswith("SASL_")


def _parse_entry(name: str, text: str) -> Listener:
    match = _LISTENER.fullmatch(text)
    if match is None or int(match[4]) > 65535:
        raise ConfigError(
            f"`{name}` contains {text!r}, which is not NAME://HOST:PORT (IPv6: NAME://[::1]:PORT)", name, text
        )
    return Listener(match[1].upper(), match[2] or match[3] or "", int(match[4]))


def _client_listeners(config: Mapping[str, str], name: str) -> list[Listener]:
    controllers = {member.strip().upper() for member in config.get("controller.listener.names", "").split(",")}
    entries = [_parse_entry(name, member.strip()) for member in config.get(name, "").split(",") if member.strip()]
    return [listener for listener in entries if listener.name not in controllers]


def _protocols(config: Mapping[str, str]) -> dict[str, str]:
    """Listener name -> security protocol; names that are protocols need no entry."""
    protocols = {}
    for pair in config.get("listener.security.protocol.map", "").split(","):
        name, _, protocol = pair.strip().partition(":")
        protocols[name.upper()] = protocol.upper()
    return protocols


def parse_listeners(config: Mapping[str, str]) -> list[Listener]:
    """The listeners for clients. Raises ConfigError if one is malformed, has a duplicate name or
    address or an unknown protocol, or if other hosts can reach it although the configuration does
    not allow that.
    """
    protocols = _protocols(config)
    listeners: list[Listener] = []
    for listener in _client_listeners(config, "listeners"):
        listener = _check_listener(config, listener, protocols.get(listener.name, listener.name))
        for other in listeners:
            if other.name == listener.name or (
                listener.port and (other.host, other.port) == (listener.host, listener.port)
            ):
                duplicate = listener.name if other.name == listener.name else f"{listener.host}:{listener.port}"
                raise ConfigError(f"`listeners` contains {duplicate} twice", "listeners", config["listeners"])
        listeners.append(listener)
    if len(listeners) > LISTENER_COUNT_MAX:
        raise ConfigError(
            f"`listeners` contains {len(listeners)} listeners; at most {LISTENER_COUNT_MAX} are possible",
            "listeners",
            config["listeners"],
        )
    if not listeners:
        raise ConfigError(
            "`listeners` contains no listener for clients, such as PLAINTEXT://127.0.0.1:9092",
            "listeners",
            config.get("listeners"),
        )
    return listeners


METRICS = "METRICS"  # in listener.name.metrics.ssl...


def metrics_listener(config: Mapping[str, str]) -> Listener | None:
    """The listener of the metrics page; its protocol is PLAINTEXT (http) or SSL (https). None:
    the page is disabled. Raises ConfigError.
    """
    text, port = config.get("metrics.listener", ""), int(config.get("admin.port", "0"))
    if not text:
        return Listener(METRICS, "127.0.0.1", port) if port >= 0 else None
    name = "metrics.listener"
    entry = _parse_entry(name, text)
    if entry.name not in ("HTTP", "HTTPS"):
        raise ConfigError(
            f"`{name}` contains {text!r}, which is neither http://HOST:PORT nor https://HOST:PORT", name, text
        )
    listener = Listener(METRICS, entry.host, entry.port, "SSL" if entry.name == "HTTPS" else "PLAINTEXT")
    if listener.host and _LOOPBACK.fullmatch(listener.host):
        return listener
    if not config.get("metrics.token.file"):
        raise ConfigError(
            f"{name}={text}, which other hosts can reach, needs metrics.token.file: a file with the token that"
            " scrapers must send",
            name,
            text,
        )
    if not listener.has_tls and config.get("listeners.insecure.allow") != "true":
        raise ConfigError(
            f"with {name}={text}, others can read the token; use https://, or set listeners.insecure.allow=true",
            name,
            text,
        )
    return listener


def _entry_text(listener: Listener) -> str:
    return f"`listeners` contains {listener.name}://{listener.host}:{listener.port}"


def _check_listener(config: Mapping[str, str], listener: Listener, protocol: str) -> Listener:
    """Returns the listener with its protocol. A listener without a host gets the loopback address,
    unless it is protected (TLS and authentication) or insecure listeners are allowed. Raises
    ConfigError.
    """
    entry = _entry_text(listener)
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"{entry}, whose protocol {protocol} is not one of {', '.join(PROTOCOLS)}; add {listener.name}:PROTOCOL to"
            " listener.security.protocol.map",
            "listeners",
            config["listeners"],
        )
    listener = msgspec.structs.replace(listener, protocol=protocol)
    is_protected = protocol == "SASL_SSL" or (
        protocol == "SSL" and listener_settings(config, listener.name).get("ssl.client.auth") == "required"
    )
    if is_protected or config.get("listeners.insecure.allow") == "true":
        return listener
    if not listener.host:
        return msgspec.structs.replace(listener, host="127.0.0.1")
    if not _LOOPBACK.fullmatch(listener.host):
        danger = "over which passwords and records from other hosts are not encrypted" if listener.has_sasl else ""
        danger = danger or "which other hosts can reach without authentication"
        remedy = "ssl.client.auth=required, or " if protocol == "SSL" else ""
        raise ConfigError(
            f"{entry}, {danger}; use 127.0.0.1, or set {remedy}listeners.insecure.allow=true",
            "listeners",
            config["listeners"],
        )
    return listener


def advertised_listeners(config: Mapping[str, str]) -> dict[str, Listener]:
    """Returns listener name -> the address announced to clients. For a listener that is not
    in the result, the broker announces the address that the client connected to.
    """
    advertised: dict[str, Listener] = {}
    for listener in _client_listeners(config, "advertised.listeners"):
        if listener.host in ("", "0.0.0.0", "::") or not listener.port:
            raise ConfigError(
                f"`advertised.listeners` contains {listener.name}://{listener.host}:{listener.port}, to which no"
                " client can connect; give a host and a port",
                "advertised.listeners",
                config["advertised.listeners"],
            )
        advertised[listener.name] = listener
    return advertised


def endpoints(config: Mapping[str, str], bound: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Listener name -> this host's address for it, in the order of `listeners`. Other brokers give
    this address to clients that are connected to their own listener of the same name. `bound`: the
    bound addresses, by listener id.
    """
    advertised = advertised_listeners(config)
    addresses: dict[str, tuple[str, int]] = {}
    for listener, (_, port) in zip(parse_listeners(config), bound, strict=True):
        entry = advertised.get(listener.name)
        if entry is not None:
            addresses[listener.name] = entry.host, entry.port
        else:
            host = socket.getfqdn() if listener.host in ("", "0.0.0.0", "::") else listener.host
            addresses[listener.name] = host, port
    return addresses


# -- settings of one listener ----------------------------------------------------------------------


def override_of(name: str) -> tuple[str, str] | None:
    """Splits `listener.name.NAME.property` into ("NAME", "property"); NAME has no dot. Returns None
    for any other name.
    """
    listener, _, key = name.removeprefix(OVERRIDE_PREFIX).partition(".")
    return (listener.upper(), key) if name.startswith(OVERRIDE_PREFIX) and listener and key else None


def override_name(listener: str, key: str) -> str:
    return f"{OVERRIDE_PREFIX}{listener.lower()}.{key}"


def own_settings(config: Mapping[str, str], name: str) -> dict[str, str]:
    """The settings made for this listener alone, without their prefix."""
    prefix = override_name(name, "")
    return {key.removeprefix(prefix): value for key, value in config.items() if key.startswith(prefix)}


def listener_settings(config: Mapping[str, str], name: str) -> dict[str, str]:
    """The effective configuration for connections of this listener."""
    shared = {key: value for key, value in config.items() if not key.startswith(OVERRIDE_PREFIX)}
    return {**shared, **own_settings(config, name)}


def check_overrides(config: Mapping[str, str], listeners: list[Listener]) -> None:
    """Raises ConfigError for a setting of a listener that does not exist."""
    names = {METRICS, *(listener.name for listener in listeners)}
    for key in config:
        override = override_of(key)
        if override is not None and override[0] not in names:
            raise ConfigError(
                f"{key} names listener {override[0]}, which is not in `listeners`: {config['listeners']}",
                key,
                config[key],
            )


def check_address_limits(config: Mapping[str, str]) -> None:
    """Raises ConfigError if max.connections.per.ip and its overrides are malformed, or exclude
    every client.
    """
    name = "max.connections.per.ip.overrides"
    try:
        counts = parse_ip_counts(config[name])
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", name, config[name]) from None
    if config["max.connections.per.ip"] == "0" and not counts:
        raise ConfigError(
            f"max.connections.per.ip=0 lets no client connect, because {name} is empty", "max.connections.per.ip", "0"
        )


_OAUTH_REQUIRED = ("jwks.endpoint.url", "expected.issuer", "expected.audience")


def check_authentication(config: Mapping[str, str], listener: Listener) -> None:
    """Raises ConfigError if a mechanism of this listener lacks a required setting."""
    effective = listener_settings(config, listener.name)
    if not listener.has_sasl or "OAUTHBEARER" not in effective["sasl.enabled.mechanisms"].split(","):
        return
    for key in _OAUTH_REQUIRED:
        name = f"sasl.oauthbearer.{key}"
        if not effective.get(name):
            raise ConfigError(
                f"{name} is not set, and listener {listener.name} accepts OAUTHBEARER: tokens of any issuer, for any"
                " audience, would be accepted",
                name,
            )
    url = effective["sasl.oauthbearer.jwks.endpoint.url"]
    if not url.startswith(("https://", "file:///")):
        raise ConfigError(
            f"sasl.oauthbearer.jwks.endpoint.url={url} is neither https:// nor file:///: keys sent in plain text"
            " can be replaced in transit",
            "sasl.oauthbearer.jwks.endpoint.url",
            url,
        )
