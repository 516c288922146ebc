"""The Kafka wire protocol, sans I/O: bytes in, structs out, and back.

    schema/      every message written down once          messages.py   the classes made of it
    codec.py     (message, version) compiled on first use   framing.py    headers, and SUPPORTED: what is spoken
    api.py       whole frames, as broker and as client      errors.py     ProtocolError; the table of Kafka's error codes
    records.py   record batches (magic 2)                   table.py      SUPPORTED as Markdown
"""

from mqd.protocol.api import decode_request, decode_response, encode_request, encode_response, with_length
from mqd.protocol.errors import ERRORS, ErrorCode, ProtocolError, UnsupportedVersion
from mqd.protocol.framing import SUPPORTED, ApiSpec, RequestHeader

__all__ = [
    "ERRORS",
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
