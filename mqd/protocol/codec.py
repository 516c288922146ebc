"""Decodes and encodes message structs with code that is generated for each (message, version) on
first use.

Decoding treats its input as untrusted:
 1. The frame is copied once, before anything is checked: a peer that shares the memory cannot
    change it between check and use.
 2. A length is checked against the remaining bytes before it is used. Likewise the count of an
    array, times the smallest size of an element, before the list is created.
 3. Unknown tagged fields are skipped (KIP-482); known ones must fill exactly the size they claim;
    bytes left over after the message raise TrailingBytes (the acceptor then ignores them).
 4. Every failure raises ProtocolError, which names the message, field and position. This costs
    nothing unless it fails: the failing line of the generated code identifies the field.

Encoding omits fields that the version lacks, and tagged fields with their default value.

The generated code is straight-line: loops for arrays, runs of fixed-size fields folded into one
struct call together with the length that follows them. Concurrency: if two threads compile the same
code at once, the later result is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from mqd.protocol.codec_decoder import DecoderWriter, Malformed
from mqd.protocol.codec_encoder import EncoderWriter, Unencodable
from mqd.protocol.errors import ProtocolError
from mqd.protocol.messages import message_class, message_of

_decoders: dict[tuple[type, int], Callable] = {}
_encoders: dict[tuple[type, int], Callable] = {}


def decode(cls: type, version: int, buffer: bytes | bytearray | memoryview, position: int = 0):
    """Reads one message of `cls`, from `position` to the end of `buffer`. Raises ProtocolError."""
    data = buffer if type(buffer) is bytes else bytes(buffer)
    decoder = _decoders.get((cls, version)) or _compile_decoder(cls, version)
    return decoder(data, position)


def encode(message: object, version: int) -> bytes:
    """The bytes of one message, without header. Raises ProtocolError when a value does not fit its
    field.
    """
    out = bytearray()
    encode_into(out, message, version)
    return bytes(out)


def encode_into(out: bytearray, message: object, version: int) -> None:
    """Appends a message, or one nested struct of it, so that elements of an array can be encoded
    separately, kept and joined. On ProtocolError `out` holds an incomplete message.
    """
    cls = type(message)
    encoder = _encoders.get((cls, version)) or _compile_encoder(cls, version)
    encoder(message, out)


def _check_version(cls: type, version: int) -> None:
    message = message_of(cls)[0]
    if version not in message.versions:
        first, last = message.versions.first, message.versions.last
        raise ProtocolError(
            f"version {version} is not supported; the supported versions are {first} to {last}", message.name
        )


def _compile_decoder(cls: type, version: int) -> Callable:
    _check_version(cls, version)
    message, root = message_of(cls)
    writer = DecoderWriter(message, version, message_class)
    run = writer.compile(root)
    title = f"{message.name} v{version}"

    def decoder(data: bytes, position: int):
        try:
            return run(data, position)
        except (Malformed, struct.error, IndexError, UnicodeDecodeError) as error:
            raise writer.explain(error, run, title, len(data)) from None

    _decoders[cls, version] = decoder
    return decoder


def _compile_encoder(cls: type, version: int) -> Callable:
    _check_version(cls, version)
    message, root = message_of(cls)
    writer = EncoderWriter(message, version)
    run = writer.compile(root)
    title = f"{message.name} v{version}"

    def encoder(value: object, out: bytearray) -> None:
        try:
            run(value, out)
        except (Unencodable, struct.error, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise writer.explain(error, run, title) from error

    _encoders[cls, version] = encoder
    return encoder
