"""Encodes what acceptor and worker tell each other about principals: the worker passes the principal
of each request, and the acceptor tells the worker which principal a client has authenticated as.

A worker puts a block before the frame of a request (struct mqd_request_principal), so a restarted
acceptor knows every connection's principal without a query. The response that ends an exchange begins
with another block (struct mqd_authenticated).

A client that sent SaslHandshake 0 continues with raw SASL tokens, which have no request header. Each
token is converted to a SaslAuthenticate, and the response is converted back to a raw token, so that
handlers see only one form.
"""

import struct
from socket import inet_ntoa
from typing import Any

import msgspec

from mqd import native
from mqd.acceptor.broker_state import LISTENER_LOCAL, Origin
from mqd.native import Descriptor
from mqd.protocol.errors import ProtocolError
from mqd.security.principal import ANONYMOUS

PRINCIPAL_BYTES_MAX = native.PRINCIPAL_BYTES_MAX
_PRINCIPAL = struct.Struct("<HBB")
_AUTHENTICATED = struct.Struct("<HB5xQ")
_TOKEN = struct.Struct(">hhihi")  # API key, version, correlation id, client id (null), size of the token
_RESPONSE = struct.Struct(">ihh")  # correlation id, error, size of the message
_SASL_AUTHENTICATE = 36


class Identity(msgspec.Struct, frozen=True):
    principal: str
    kind: int  # native.PrincipalKind
    host: str = ""  # the client's address, if the descriptor has no room for it (IPv6)


UNKNOWN = Identity(ANONYMOUS, native.PrincipalKind.ANONYMOUS)


def split(flags: int, data: bytes) -> tuple[Identity, bytes]:
    """Splits the bytes of a REQUEST into the client's identity and the request's frame. Raises
    ProtocolError."""
    identity, at = UNKNOWN, 0
    if flags & native.REQUEST_PRINCIPAL:
        if len(data) < _PRINCIPAL.size:
            raise ProtocolError("cut off", "principal of a request", position=len(data))
        principal_bytes, kind, host_bytes = _PRINCIPAL.unpack_from(data)
        end = _PRINCIPAL.size + principal_bytes
        at = end + host_bytes
        try:
            principal, host = data[_PRINCIPAL.size : end].decode(), data[end:at].decode()
            identity = Identity(principal or ANONYMOUS, native.PrincipalKind(kind), host)
        except ValueError as error:
            raise ProtocolError(str(error), "principal of a request", position=0) from None
        if at > len(data):
            raise ProtocolError("cut off", "principal of a request", position=len(data))
    frame = data[at:]
    if flags & native.REQUEST_RAW_TOKEN:
        frame = _TOKEN.pack(_SASL_AUTHENTICATE, 0, 0, -1, len(frame)) + frame
    return identity, frame


def origin(descriptor: Descriptor, identity: Identity) -> Origin:
    """The origin of the client's requests. The descriptor has IP addresses laid out as in a
    sockaddr; for a local client it has the uid and pid instead.
    """
    identity_fields: dict[str, Any] = {
        "principal": identity.principal,
        "principal_kind": identity.kind,
        "connection": (descriptor.generation, descriptor.b),
    }
    if descriptor.a == LISTENER_LOCAL:
        uid = descriptor.c >> 32 & 0xFFFFFFFF
        return Origin(LISTENER_LOCAL, peer_ip="127.0.0.1", uid=uid, pid=descriptor.slot, **identity_fields)
    local_ip = inet_ntoa(struct.pack("=I", descriptor.c & 0xFFFFFFFF)) if descriptor.c else ""
    peer_ip = inet_ntoa(struct.pack("=I", descriptor.c >> 32 & 0xFFFFFFFF)) if descriptor.c >> 32 else ""
    return Origin(descriptor.a, local_ip, descriptor.slot, identity.host or peer_ip, **identity_fields)


def raw_response(body: bytes) -> bytes | None:
    """Returns the token in a SaslAuthenticate response of version 0, or None if the client's token
    was refused: there is no raw response for a refusal.
    """
    _, error, message_bytes = _RESPONSE.unpack_from(body)
    return None if error else body[_RESPONSE.size + max(message_bytes, 0) + 4 :]


def authenticated_block(principal: str, session_ms: int, kind: native.PrincipalKind) -> bytes:
    """The block before the response that authenticates a client. If `session_ms` is 0, the client
    never has to authenticate again. `kind`: SASL or TOKEN.
    """
    name = principal.encode()
    if not 0 < len(name) <= PRINCIPAL_BYTES_MAX:
        raise ValueError(f"a principal has 1 to {PRINCIPAL_BYTES_MAX} bytes, not {len(name)}")
    return _AUTHENTICATED.pack(len(name), kind, session_ms) + name
