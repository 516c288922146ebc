"""The Kafka wire protocol, sans I/O: bytes in, structs out, and back.

schema/      every message, defined once
messages/    their classes
codec.py     decodes and encodes messages
headers.py   request and response headers; KNOWN and SUPPORTED APIs with their versions
api.py       whole frames, as broker and as client
errors.py    ProtocolError; the table of Kafka's error codes
records.py   record batches (magic 2)
table.py     the protocol page of the documentation
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqd.protocol.api import decode_request, decode_response, encode_request, encode_response, with_length
    from mqd.protocol.errors import ERRORS, ErrorCode, ProtocolError
    from mqd.protocol.headers import KNOWN, SUPPORTED, ApiSpec, RequestHeader, UnsupportedVersion

# Imported on first use: users of the error codes alone should not pay for the codec.
_MODULE_EXPORTS = {
    "api": ("decode_request", "decode_response", "encode_request", "encode_response", "with_length"),
    "errors": ("ERRORS", "ErrorCode", "ProtocolError"),
    "headers": ("KNOWN", "SUPPORTED", "ApiSpec", "RequestHeader", "UnsupportedVersion"),
}
_MODULE_OF = {name: module for module, names in _MODULE_EXPORTS.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


__all__ = [
    "ERRORS",
    "KNOWN",
    "SUPPORTED",
    "ApiSpec",
    "ErrorCode",
    "ProtocolError",
    "RequestHeader",
    "UnsupportedVersion",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "with_length",
]
