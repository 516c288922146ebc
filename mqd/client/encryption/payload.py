"""Seals values before they leave the client, and opens them when they are read.

    sealer, opener = sealer_of(settings), opener_of(settings)       # settings: settings.Encryption
    opener.open(topic, key, sealer.seal(topic, key, value)) == value

    P1  only values are sealed; keys, headers and null values (tombstones) stay unchanged
    P2  a data key seals at most DATA_KEY_RECORDS values, with random nonces: the probability that
        two of 2^24 are equal is 2^-49. After DATA_KEY_S the next data key is used, so that a
        rotation of the key-encryption key takes effect
    P3  nonces come from the kernel at each call and are never kept, so that a copy of the process
        (fork) uses different ones
    P4  an opener caches up to DATA_KEYS_MAX data keys. After a failure to get a data key, it
        repeats the error for FAILED_S before it calls the provider again
Concurrency: any thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import lru_cache
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mqd.client.columns import Column
from mqd.client.encryption import envelope, keys
from mqd.client.encryption.envelope import DATA_KEY_BYTES, NONCE_BYTES, NotSealed, PayloadError
from mqd.client.encryption.keys import KeyProvider
from mqd.client.encryption.settings import Encryption

DATA_KEY_RECORDS = 1 << 24
DATA_KEY_S = 3600.0
RETRY_S = 60.0  # after a failure: time until the provider is called again for the next data key
DATA_KEYS_MAX, FAILED_S = 1024, 5.0
log = logging.getLogger("mqd.client")


def sealer_of(settings: Encryption) -> Sealer:
    """Raises ConfigError."""
    return Sealer(settings, keys.create_provider(settings.provider))


def opener_of(settings: Encryption) -> Opener:
    """Raises ConfigError."""
    return Opener(settings, keys.create_provider(settings.provider))


# cached, for processes that run many short tasks
shared_sealer, shared_opener = lru_cache(16)(sealer_of), lru_cache(16)(opener_of)


class Sealer:
    """See the module. `now`, `random_bytes`: for tests."""

    def __init__(
        self, settings: Encryption, provider: KeyProvider, now: Any = time.monotonic, random_bytes: Any = os.urandom
    ) -> None:
        self._settings, self._provider, self._now, self._random = settings, provider, now, random_bytes
        self._names_to_bind: dict[str, bytes | None] = {}  # by topic
        self._lock = threading.Lock()
        self._values_left, self._renew_at = 0, 0.0
        self._current: tuple[AESGCM, bytes, bytes] | None = None  # cipher, head, head of compressed values

    def name_to_bind(self, topic: str) -> bytes | None:
        """Like Encryption.name_to_bind(), cached."""
        if topic not in self._names_to_bind:
            self._names_to_bind[topic] = self._settings.name_to_bind(topic)
        return self._names_to_bind[topic]

    def seals(self, topic: str) -> bool:
        """Whether the topic is encrypted."""
        return self.name_to_bind(topic) is not None

    def seal(self, topic: str, key: bytes | None, value: bytes) -> bytes:
        """Returns the value unchanged if the topic is not encrypted. Raises PayloadError."""
        name = self.name_to_bind(topic)
        return value if name is None else self._seal(name, key, value, self._random(NONCE_BYTES))

    def seal_column(self, topic: str, values: Column, keys: Column | None) -> Column:
        """Raises PayloadError."""
        name = self.name_to_bind(topic)
        if name is None:
            return values
        record_keys = [None] * values.count if keys is None else keys.items()
        nonces = memoryview(self._random(NONCE_BYTES * values.count))
        data, position, sealed_values = memoryview(values.data).cast("B"), 0, []
        sizes = values.all_sizes().tolist()
        for index, size in enumerate(sizes):
            if size >= 0:
                nonce = bytes(nonces[NONCE_BYTES * index : NONCE_BYTES * (index + 1)])
                sealed = self._seal(name, record_keys[index], data[position : position + size], nonce)
                sealed_values.append(sealed)
                sizes[index], position = len(sealed), position + size
        return Column(values.count, b"".join(sealed_values), np.array(sizes, np.int32))

    def _seal(self, topic: bytes, key: bytes | None, value: bytes | memoryview, nonce: bytes) -> bytes:
        # concurrent threads may lose decrements; then a key seals a few more values than P2 says
        self._values_left -= 1
        if self._values_left < 0 or self._now() >= self._renew_at:
            self._renew()
        assert self._current is not None  # otherwise _renew() has raised
        cipher, plain_head, compressed_head = self._current
        if self._settings.codec and (packed := envelope.compress_value(self._settings.codec, value)) is not None:
            return envelope.seal(cipher, compressed_head, topic, key, packed, nonce)
        return envelope.seal(cipher, plain_head, topic, key, value, nonce)

    def _renew(self) -> None:
        """Gets the next data key. Raises PayloadError when the provider fails and there is no current
        key, or the current one has sealed DATA_KEY_RECORDS values.
        """
        with self._lock:
            now = self._now()
            if self._values_left >= 0 and now < self._renew_at:
                return  # another thread already got one
            data_key = self._random(DATA_KEY_BYTES)
            try:
                key_id, wrapped = self._provider.wrap(data_key)
                plain_head, compressed_head = (
                    envelope.encode_head(codec, key_id, wrapped) for codec in (0, self._settings.codec)
                )
            except Exception as error:  # providers raise exceptions of their own
                if self._values_left < 0 or self._current is None:
                    raise PayloadError(f"no key to seal values with: {error}") from error
                log.warning("the data key is older than an hour, but the next one cannot be obtained: %s", error)
                self._renew_at = now + RETRY_S
                return
            self._current = AESGCM(data_key), plain_head, compressed_head
            self._values_left, self._renew_at = DATA_KEY_RECORDS - 1, now + DATA_KEY_S


class Opener:
    """See the module."""

    def __init__(self, settings: Encryption, provider: KeyProvider, now: Any = time.monotonic) -> None:
        self._settings, self._provider, self._now = settings, provider, now
        self._names_to_bind: dict[str, bytes | None] = {}  # by topic
        self._ciphers: dict[bytes, AESGCM] = {}
        self._latest: tuple[bytes, AESGCM] | None = None
        self._failed: dict[bytes, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def open(self, topic: str, key: bytes | None, data: bytes) -> bytes:
        """Returns the opened value. Raises PayloadError if it cannot be opened, unless the
        settings allow such values to be returned unchanged.
        """
        if topic not in self._names_to_bind:
            self._names_to_bind[topic] = self._settings.name_to_bind(topic)
        name = self._names_to_bind[topic]
        if name is None:
            return data
        try:
            latest = self._latest  # most records have the same data key as the previous record
            if latest is None or not data.startswith(latest[0]) or len(data) < len(latest[0]) + envelope.REST_BYTES:
                head_size, key_reference = envelope.parse_head(data)
                latest = self._latest = (
                    data[:head_size],
                    self._ciphers.get(key_reference) or self._unwrap(key_reference),
                )
            return envelope.open_sealed(latest[1], data, len(latest[0]), name, key)
        except NotSealed as error:
            if self._settings.accepts_plain or self._settings.returns_raw:
                return data
            raise PayloadError(f"{error}; encryption.plaintext.allow=true returns such values unchanged") from None
        except PayloadError:
            if self._settings.returns_raw:
                return data
            raise

    def _unwrap(self, key_reference: bytes) -> AESGCM:
        """`key_reference`: the bytes that identify the data key (envelope.parse_head)."""
        with self._lock:  # the provider is called once, even if many threads need the same data key
            cipher = self._ciphers.get(key_reference)
            if cipher is not None:
                return cipher
            retry_at, problem = self._failed.get(key_reference, (0.0, ""))
            if problem and self._now() < retry_at:
                # a new exception for each caller: raising the old one again would keep earlier callers' frames alive
                raise PayloadError(problem)
            key_id, wrapped = envelope.split_key_reference(key_reference)
            try:
                cipher = AESGCM(self._provider.unwrap(key_id, wrapped))
            except Exception as error:  # providers raise exceptions of their own
                problem = f"its key {key_id!r} cannot be obtained: {error}"
                _remember(self._failed, key_reference, (self._now() + FAILED_S, problem))
                raise PayloadError(problem) from error
            _remember(self._ciphers, key_reference, cipher)
            return cipher


def _remember(cache: dict[bytes, Any], key_reference: bytes, entry: Any) -> None:
    cache.pop(key_reference, None)
    if len(cache) >= DATA_KEYS_MAX:
        del cache[next(iter(cache))]
    cache[key_reference] = entry
