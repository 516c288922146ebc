"""The encryption.* settings of producers, consumers, commands and Spark (docs/payload-encryption.md),
and the topics that they apply to.

Imports neither keys nor ciphers, because every client imports this module.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from mqd.base.property_values import ConfigError
from mqd.protocol.compression import CODECS

PREFIX = "encryption."
PROVIDER = "encryption.key.provider"


class Encryption(msgspec.Struct, frozen=True):
    """The settings. `provider`: a string or a KeyProvider. `names`: (copy, original) topic names, see
    encryption.topic.names. `returns_raw`: values that cannot be opened are returned sealed.
    `accepts_plain`: values that are not sealed are returned unchanged.
    """

    provider: Any
    topics: tuple[str, ...] = ("*",)
    names: tuple[tuple[str, str], ...] = ()
    codec: int = 0
    returns_raw: bool = False
    accepts_plain: bool = False

    def name_to_bind(self, topic: str) -> bytes | None:
        """The topic name that values are bound to; None: the topic is not encrypted."""
        if topic.startswith("__") or not any(fnmatchcase(topic, pattern) for pattern in self.topics):
            return None
        for pattern, name in self.names:
            head, star, tail = pattern.partition("*")
            if topic == pattern:
                return name.encode()
            if star and len(topic) >= len(head + tail) and topic.startswith(head) and topic.endswith(tail):
                return name.replace("*", topic[len(head) : len(topic) - len(tail)]).encode()
        return topic.encode()


def take(properties: MutableMapping[str, Any]) -> Encryption | None:
    """Removes the encryption.* settings from `properties` and returns them. Raises ConfigError."""
    given = {name: properties.pop(name) for name in list(properties) if str(name).startswith(PREFIX)}
    if not given:
        return None

    def text(name: str, default: str) -> str:
        return str(given.pop(PREFIX + name, default)).strip()

    def choice(name: str, allowed: tuple[str, ...]) -> str:
        value = text(name, allowed[0]).lower()
        if value not in allowed:
            raise ConfigError(f"{PREFIX}{name}={value} is not one of {', '.join(allowed)}", PREFIX + name, value)
        return value

    provider = given.pop(PROVIDER, None)
    settings = Encryption(
        provider,
        tuple(_split_list(text("topics", "*"))),
        tuple(map(_parse_copy, _split_list(text("topic.names", "")))),
        CODECS.index(choice("compression", CODECS)),
        choice("on.failure", ("error", "raw")) == "raw",
        choice("plaintext.allow", ("false", "true")) == "true",
    )
    if given:
        raise ConfigError(f'No such configuration property: "{min(given)}"', min(given))
    if not provider:
        raise ConfigError(f"{PROVIDER} is needed for encryption: it gives the source of the keys", PROVIDER)
    return settings


def _split_list(text: str) -> Iterable[str]:
    return filter(None, (part.strip() for part in text.split(",")))


def _parse_copy(text: str) -> tuple[str, str]:
    copied, _, name = (part.strip() for part in text.partition("="))
    if not copied or not name or copied.count("*") != name.count("*") or copied.count("*") > 1:
        raise ConfigError(f"encryption.topic.names: {text!r} is not COPY=ORIGINAL, such as copy.*=*", text)
    return copied, name
