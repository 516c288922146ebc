"""Request and response headers, and the table of supported APIs.

Frames here exclude the 4-byte length word. Request header v1: api_key int16, api_version int16,
correlation_id int32, client_id nullable string (int16 length, in flexible versions too); v2 adds
tagged fields. Response header v0: correlation_id; v1 adds tagged fields. The response to
ApiVersions has header v0 in every version (KIP-511), so that a client that does not know the
version can read the error.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import msgspec

from mqd.protocol.codec_decoder import Malformed, skip_tagged_fields
from mqd.protocol.errors import ProtocolError
from mqd.protocol.schema import APIS, SUPPORTED_KEYS
from mqd.protocol.schema.language import NEWEST, Versions

API_VERSIONS_KEY = 18
# JoinGroup and SyncGroup: their responses may wait for other members of the group for minutes
MEMBER_WAIT_APIS = frozenset((11, 14))


class ApiSpec(msgspec.Struct, frozen=True):
    """One API: its key, name, the supported versions (both inclusive) and the first version with
    flexible encoding.
    """

    key: int
    name: str
    min_version: int
    max_version: int
    flexible_from: int

    def is_flexible(self, version: int) -> bool:
        return version >= self.flexible_from


def _spec(key: int) -> ApiSpec:
    api = APIS[key]
    versions = Versions.parse(api.versions)
    assert versions.last < NEWEST
    return ApiSpec(key, api.name, versions.first, versions.last, api.flexible_from)


# KNOWN: all APIs of the codec. SUPPORTED: those that a broker handles and advertises;
# decode_request_header accepts only these unless it is passed another table.
KNOWN: dict[int, ApiSpec] = {key: _spec(key) for key in APIS}
SUPPORTED: dict[int, ApiSpec] = {key: spec for key, spec in KNOWN.items() if key in SUPPORTED_KEYS}


class RequestHeader(msgspec.Struct, gc=False):
    """`body_position`: where the body begins in the frame."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None = None
    body_position: int = 0


class UnsupportedVersion(ProtocolError):
    """A valid header of an unsupported API or version. `header` has the key, version, correlation
    id and, if it could be read, the client id.

    Only ApiVersions has a response for an unsupported version: error 35 in a body of version 0
    (KIP-511).
    """

    def __init__(self, problem: str, header: RequestHeader) -> None:
        super().__init__(problem)
        self.header = header


_FIXED_FIELDS = struct.Struct(">hhih")


def decode_request_header(frame: bytes, supported: Mapping[int, ApiSpec] = SUPPORTED) -> RequestHeader:
    """Raises UnsupportedVersion (with the fields of the header that could be read) for an API or
    version not in `supported`, ProtocolError for a malformed header.
    """
    if len(frame) < 8:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not a request", "request header", position=len(frame))
    if len(frame) < 10:
        return _refuse(RequestHeader(*struct.unpack_from(">hhi", frame)), None, supported)
    api_key, api_version, correlation_id, size = _FIXED_FIELDS.unpack_from(frame)
    header = RequestHeader(api_key, api_version, correlation_id)
    spec = supported.get(api_key)
    position = 10
    if size >= 0:
        position += size
        if position > len(frame):
            return _refuse(header, f"a length of {size} where {len(frame) - 10} bytes remain", supported)
        try:
            header.client_id = frame[10:position].decode()
        except UnicodeDecodeError:
            return _refuse(header, "not UTF-8", supported)
    elif size != -1:
        return _refuse(header, f"a length of {size}", supported)
    if spec is None or not spec.min_version <= api_version <= spec.max_version:
        return _refuse(header, None, supported)
    if spec.is_flexible(api_version):
        try:
            count = frame[position]
            position = skip_tagged_fields(frame, position + 1, count, len(frame)) if count else position + 1
        except (Malformed, IndexError) as error:
            problem = str(error) if isinstance(error, Malformed) else "cut off"
            raise ProtocolError(
                problem, f"{spec.name} request header", "tagged fields", min(position, len(frame))
            ) from None
    header.body_position = position
    return header


def _refuse(header: RequestHeader, problem: str | None, supported: Mapping[int, ApiSpec]) -> RequestHeader:
    """Always raises. An unsupported API or version is reported rather than `problem`, because the
    rest of its header may have another layout.
    """
    spec = supported.get(header.api_key)
    if spec is None:
        raise UnsupportedVersion(f"api key {header.api_key} is not supported", header)
    if not spec.min_version <= header.api_version <= spec.max_version:
        versions = f"{spec.min_version} to {spec.max_version}"
        raise UnsupportedVersion(
            f"{spec.name} version {header.api_version} is not supported; the supported versions are {versions}", header
        )
    raise ProtocolError(problem or "cut off", f"{spec.name} request header", "client_id", 8)


def encode_request_header(header: RequestHeader, flexible: bool) -> bytes:
    client_id = None if header.client_id is None else header.client_id.encode()
    fixed = _FIXED_FIELDS.pack(
        header.api_key, header.api_version, header.correlation_id, -1 if client_id is None else len(client_id)
    )
    return fixed + (client_id or b"") + (b"\0" if flexible else b"")


def response_header_is_flexible(api_key: int, api_version: int) -> bool:
    return api_key != API_VERSIONS_KEY and KNOWN[api_key].is_flexible(api_version)


def encode_response_header(api_key: int, api_version: int, correlation_id: int) -> bytes:
    return struct.pack(">i", correlation_id) + (b"\0" if response_header_is_flexible(api_key, api_version) else b"")


def decode_response_header(frame: bytes, api_key: int, api_version: int) -> tuple[int, int]:
    """(correlation id, where the body begins). Raises ProtocolError."""
    try:
        (correlation_id,) = struct.unpack_from(">i", frame)
        position = 4
        if response_header_is_flexible(api_key, api_version):
            position = skip_tagged_fields(frame, 5, frame[4], len(frame))
        return correlation_id, position
    except (Malformed, IndexError, struct.error) as error:
        raise ProtocolError(
            str(error) if isinstance(error, Malformed) else "cut off", "response header", position=min(4, len(frame))
        ) from None
