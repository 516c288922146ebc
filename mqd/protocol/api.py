"""Whole frames: a broker decodes requests and encodes responses, a client does the reverse. Sans
I/O.

A frame excludes the 4-byte length word; `with_length` puts the word in front.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from mqd.protocol import codec
from mqd.protocol.headers import (
    KNOWN,
    SUPPORTED,
    ApiSpec,
    RequestHeader,
    decode_request_header,
    decode_response_header,
    encode_request_header,
    encode_response_header,
)
from mqd.protocol.messages import message_class


def decode_request(
    frame: bytes | bytearray | memoryview, supported: Mapping[int, ApiSpec] = SUPPORTED
) -> tuple[RequestHeader, object]:
    """Returns the header and the request struct. A frame that is not bytes is copied first. Raises
    ProtocolError, or its subclass UnsupportedVersion if the API or version is not supported.
    """
    data = frame if type(frame) is bytes else bytes(frame)
    header = decode_request_header(data, supported)
    return header, codec.decode(
        message_class(header.api_key, "Request"), header.api_version, data, header.body_position
    )


def encode_response(header: RequestHeader, response: object, *, version: int | None = None) -> bytes:
    """The response frame to a request. `version`: the version of the body, if it is not the
    request's (ApiVersions' error 35 has a body of version 0).
    """
    if version is None:
        version = header.api_version
    out = bytearray(encode_response_header(header.api_key, version, header.correlation_id))
    codec.encode_into(out, response, version)
    return bytes(out)


def encode_request(request: object, version: int, correlation_id: int, client_id: str | None = "mqd") -> bytes:
    """The request frame of a client."""
    spec = KNOWN[codec.message_of(type(request))[0].api_key]
    out = bytearray(
        encode_request_header(RequestHeader(spec.key, version, correlation_id, client_id), spec.is_flexible(version))
    )
    codec.encode_into(out, request, version)
    return bytes(out)


def decode_response(frame: bytes | bytearray | memoryview, api_key: int, version: int) -> tuple[int, Any]:
    """(correlation id, response struct). Raises ProtocolError."""
    data = frame if type(frame) is bytes else bytes(frame)
    correlation_id, position = decode_response_header(data, api_key, version)
    return correlation_id, codec.decode(message_class(api_key, "Response"), version, data, position)


def with_length(frame: bytes) -> bytes:
    """The frame with its length word, as it is sent over a socket."""
    return struct.pack(">i", len(frame)) + frame
