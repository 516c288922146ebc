"""Key-encryption keys: where a client gets them, and how they wrap data keys.

    encryption.key.provider    file:PATH            a key file (`mqd key create`)
                               env:NAME             the same text in an environment variable
                               PACKAGE.MODULE:NAME  a provider of your own: NAME() returns a KeyProvider
                               a KeyProvider        in Python

A key file has one key per line, `ID:BASE64` of 32 bytes. The first key wraps; every key can unwrap.
Lines that begin with # are comments. In an environment variable commas may separate the lines.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives.keywrap import InvalidUnwrap, aes_key_unwrap, aes_key_wrap

from mqd.base.property_values import ConfigError
from mqd.client.encryption.envelope import KEY_ID_BYTES_MAX
from mqd.client.encryption.settings import PROVIDER

KEY_BYTES = 32
log = logging.getLogger("mqd.client")


class KeyProvider(Protocol):
    """Wraps and unwraps data keys; the key-encryption keys may stay in a key management service.

    Both methods are called from any thread; their exceptions are passed to the application. A client
    wraps one data key an hour and caches unwrapped keys, so a provider needs no cache.
    """

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        """Wraps the 32 bytes of `data_key`. Returns (id of the key-encryption key, wrapped key). The id
        has at most 255 bytes and is not encrypted; the wrapped key has at most 4096 bytes.
        """

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """Returns the data key. Raises LookupError when there is no such key-encryption key."""


def parse(text: str, source: str) -> dict[str, bytes]:
    """Keys by id, in the order of the text. Raises ConfigError, which never contains a key."""
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key_id, _, encoded = line.strip().rpartition(":")
        try:
            key = base64.b64decode(encoded.strip(), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_BYTES or not is_key_id(key_id):
            raise ConfigError(
                f"{source}, line {number}: a key is ID:BASE64 of {KEY_BYTES} bytes; mqd key create makes one", PROVIDER
            )
        if key_id in keys:
            raise ConfigError(f"{source}, line {number}: there are two keys {key_id!r}", PROVIDER)
        keys[key_id] = key
    if not keys:
        raise ConfigError(f"{source} has no key; mqd key create makes one", PROVIDER)
    return keys


def format_keys(keys: Mapping[str, bytes]) -> str:
    return "".join(f"{key_id}:{base64.b64encode(key).decode()}\n" for key_id, key in keys.items())


def is_key_id(text: str) -> bool:
    """Whether a key in a key file can have this id."""
    return 1 <= len(text.encode()) <= KEY_ID_BYTES_MAX and not re.search(r"[\s,]|^#", text)


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


class InProcessKeys:
    """A provider with keys in this process: AES key wrap (RFC 3394)."""

    def __init__(self, keys: Mapping[str, bytes], source: str) -> None:
        self._keys, self._source = keys, source

    def keys(self) -> Mapping[str, bytes]:
        return self._keys

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        key_id, key = next(iter(self.keys().items()))
        return key_id, aes_key_wrap(key, data_key)

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        keys = self.keys()
        if key_id not in keys:
            raise LookupError(f"{self._source} has no key {key_id!r}; it has {', '.join(keys)}")
        try:
            return aes_key_unwrap(keys[key_id], wrapped)
        except (InvalidUnwrap, ValueError):
            raise LookupError(
                f"the key {key_id!r} of {self._source} does not unwrap the data key: the value was changed, or sealed"
                " with another key of that id"
            ) from None


class KeyFile(InProcessKeys):
    """Reads its file again when it has changed, so a rotation needs no restart."""

    def __init__(self, path: Path) -> None:
        super().__init__({}, str(path))
        self._path, self._lock = path, threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self.keys()

    def keys(self) -> Mapping[str, bytes]:
        """If the file cannot be read, returns the keys that were read earlier, or raises ConfigError if
        there are none.
        """
        with self._lock:
            try:
                file_stat = os.stat(self._path)
                stamp = (file_stat.st_ino, file_stat.st_mtime_ns, file_stat.st_size)
                if stamp != self._stamp:
                    self._keys, self._stamp = parse(self._path.read_text("utf-8"), self._source), stamp
                    if file_stat.st_mode & stat.S_IROTH:
                        log.warning("%s: every user of this machine may read these keys; chmod o-r", self._path)
            except (OSError, ValueError) as error:
                problem = error if isinstance(error, ConfigError) else f"cannot read the keys in {self._path}: {error}"
                if not self._keys:
                    raise ConfigError(str(problem), PROVIDER) from None
                log.warning("using the keys that were read earlier: %s", problem)
            return self._keys


def create_provider(option: object) -> KeyProvider:
    """Creates the provider that encryption.key.provider names. Raises ConfigError."""
    if not isinstance(option, str):
        return _check_provider(option)
    source, _, name = option.partition(":")
    if source == "file" and name:
        return KeyFile(Path(name))
    if source == "env" and name:
        text = os.environ.get(name, "").replace(",", "\n")
        return InProcessKeys(parse(text, f"the environment variable {name}"), f"the environment variable {name}")
    try:
        custom = getattr(importlib.import_module(source), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{PROVIDER}={option} is not file:PATH, env:NAME, or PACKAGE.MODULE:NAME of a function that makes a"
            f" provider ({error})",
            PROVIDER,
        ) from None
    return _check_provider(custom)


def _check_provider(candidate: Any) -> KeyProvider:
    if callable(getattr(candidate, "wrap", None)) and callable(getattr(candidate, "unwrap", None)):
        return candidate
    raise ConfigError(f"{PROVIDER}: {type(candidate).__name__} has no methods wrap and unwrap", PROVIDER)
