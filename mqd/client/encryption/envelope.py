"""The envelope of a sealed value, version 1. docs/payload-encryption.md is its specification.

    0       3   magic ff 6d 71
    3       1   version 01
    4       1   codec of the value, Kafka's number: 0 none, 1 gzip, 2 snappy, 3 lz4, 4 zstd
    5       1   K, length of the key id in bytes, at least 1
    6       2   W, length of the wrapped data key in bytes, 1 to 4096, big endian
    8       K   key id, UTF-8: the key-encryption key that wraps the data key
    8+K     W   the data key, wrapped by the provider
            16  SHA-256 of the record's key, cut to 16 bytes; zeros without a key
            12  nonce
            n   AES-256-GCM of the value, or, if the codec is not 0, of its size (4 bytes, big endian)
                and the compressed value
            16  tag

Associated data: everything before the nonce, then the topic's name in UTF-8.

    E1  until the tag has been checked, the envelope is only parsed and its data key looked up; the
        value is not decompressed
    E2  a value decompresses to exactly its stated size, at most VALUE_BYTES_MAX bytes
"""

from __future__ import annotations

import hashlib
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mqd.protocol.compression import CODECS, compress, decompress
from mqd.protocol.errors import ProtocolError

MAGIC, VERSION = b"\xffmq", 1
DATA_KEY_BYTES, NONCE_BYTES, TAG_BYTES, DIGEST_BYTES = 32, 12, 16, 16
REST_BYTES = DIGEST_BYTES + NONCE_BYTES + TAG_BYTES  # size after the wrapped key, for an empty value
KEY_ID_BYTES_MAX, WRAPPED_BYTES_MAX = 255, 4096
VALUE_BYTES_MAX = 128 << 20
_HEAD = struct.Struct(">3sBBBH")
_SIZE = struct.Struct(">I")
_MAGIC_AND_VERSION = MAGIC + bytes([VERSION])
_NO_KEY = bytes(DIGEST_BYTES)


class PayloadError(ValueError):
    """A value cannot be sealed or opened; the text gives the cause and the remedy."""


class NotSealed(PayloadError):
    """The bytes do not begin with the magic of an envelope."""


def encode_head(codec: int, key_id: str, wrapped: bytes) -> bytes:
    """Encodes the head of the envelope, the same for all values with this data key and codec. Raises
    PayloadError.
    """
    name = key_id.encode()
    if not 1 <= len(name) <= KEY_ID_BYTES_MAX:
        raise PayloadError(f"a key id has 1 to {KEY_ID_BYTES_MAX} bytes, not {len(name)}: {key_id!r}")
    if not 1 <= len(wrapped) <= WRAPPED_BYTES_MAX:
        raise PayloadError(f"a wrapped data key has 1 to {WRAPPED_BYTES_MAX} bytes, not {len(wrapped)}")
    return _HEAD.pack(MAGIC, VERSION, codec, len(name), len(wrapped)) + name + wrapped


def key_digest(key: bytes | None) -> bytes:
    return _NO_KEY if key is None else hashlib.sha256(key).digest()[:DIGEST_BYTES]


def compress_value(codec: int, value: bytes | memoryview) -> bytes | None:
    """Returns the value's size followed by the compressed value, as seal() takes them; None if
    compression does not make the value smaller.
    """
    if len(value) > VALUE_BYTES_MAX:  # readers would refuse it
        return None
    sized = _SIZE.pack(len(value)) + compress(codec, bytes(value))
    return sized if len(sized) < len(value) else None


def seal(
    cipher: AESGCM, head: bytes, topic: bytes, key: bytes | None, plaintext: bytes | memoryview, nonce: bytes
) -> bytes:
    """Returns the envelope. `head`: from encode_head(); `plaintext`: the value, or the result of
    compress_value() if the head has a codec.
    """
    authenticated = head + key_digest(key)
    return authenticated + nonce + cipher.encrypt(nonce, plaintext, authenticated + topic)


def parse_head(data: bytes) -> tuple[int, bytes]:
    """Returns the size of the envelope's head (all that precedes the digest of the record's key),
    and the bytes that identify the data key, for split_key_reference(). Raises NotSealed, PayloadError.
    """
    if data[:4] != _MAGIC_AND_VERSION:
        if data[:3] != MAGIC:
            raise NotSealed("it is not sealed")
        raise PayloadError(
            f"its envelope has version {data[3]}, this client knows {VERSION}: use a newer client"
            if len(data) > 3
            else "its envelope is cut off"
        )
    if len(data) < _HEAD.size:
        raise PayloadError("its envelope is cut off")
    _, _, codec, id_size, wrapped_size = _HEAD.unpack_from(data)
    if codec >= len(CODECS) or not id_size or not 1 <= wrapped_size <= WRAPPED_BYTES_MAX:
        raise PayloadError(
            f"its envelope is damaged: codec {codec}, a key id of {id_size} bytes, a wrapped key of {wrapped_size}"
        )
    head_size = _HEAD.size + id_size + wrapped_size
    if len(data) < head_size + REST_BYTES:
        raise PayloadError("its envelope is cut off")
    return head_size, data[5:head_size]


def split_key_reference(key_reference: bytes) -> tuple[str, bytes]:
    """Splits the bytes from parse_head() into key id and wrapped data key. Raises PayloadError."""
    end = 3 + key_reference[0]
    try:
        return key_reference[3:end].decode(), key_reference[end:]
    except UnicodeDecodeError:
        raise PayloadError("its envelope is damaged: the key id is not UTF-8") from None


def open_sealed(cipher: AESGCM, data: bytes, head_size: int, topic: bytes, key: bytes | None) -> bytes:
    """Returns the value. `head_size`: from parse_head(). Raises PayloadError."""
    digest_end = head_size + DIGEST_BYTES
    if data[head_size:digest_end] != key_digest(key):
        raise PayloadError("it was sealed for another record key")
    start = digest_end + NONCE_BYTES
    try:
        plaintext = cipher.decrypt(data[digest_end:start], memoryview(data)[start:], data[:digest_end] + topic)
    except InvalidTag:
        raise PayloadError(
            "it was changed, or sealed for another topic (if this topic is a copy, map it to the original topic's name"
            " with encryption.topic.names)"
        ) from None
    return plaintext if not data[4] else _decompress_value(data[4], plaintext)


def _decompress_value(codec: int, plaintext: bytes) -> bytes:
    """Decompresses a value (E2)."""
    if len(plaintext) < _SIZE.size:
        raise PayloadError("it is cut off in the size of the value")
    size = _SIZE.unpack_from(plaintext)[0]
    if size > VALUE_BYTES_MAX:
        raise PayloadError(f"its stated size is {size} bytes, more than the maximum of {VALUE_BYTES_MAX}")
    try:
        value = decompress(codec, memoryview(plaintext)[_SIZE.size :], size)
    except ProtocolError as error:
        raise PayloadError(f"it cannot be decompressed: {error}") from None
    if len(value) != size:
        raise PayloadError(f"its stated size is {size} bytes, but it decompresses to {len(value)}")
    return value
