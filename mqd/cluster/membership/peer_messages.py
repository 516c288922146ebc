"""The messages between the controllers of two hosts, and their framing: 4-byte big-endian length,
then msgpack of one tagged struct.

The structs belong to the sans-I/O cores that use them; here they form one union. A struct's tag is
its class name, so class names must be unique. The meaning of a message never changes, and fields
are only added at the end with a default. Hosts of two versions coexist during a rolling upgrade:
unknown fields are ignored, and so are unknown messages, for which decode() returns None.

Bounds: MESSAGE_BYTES_MAX. The sender's identity is the one that the handshake authenticated
(mqd/cluster/membership/handshake.py), whatever a message says.
"""

from typing import Union, get_args

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.membership import formation
from mqd.cluster.raft.messages import QuorumMessage

MESSAGE_BYTES_MAX = 16 << 20
LENGTH_BYTES = 4

# The messages of each core.
MESSAGES: tuple[type[msgspec.Struct], ...] = (
    formation.FormationQuery,
    formation.FormationResponse,
    *get_args(QuorumMessage),
    *get_args(broker_messages.ToActiveController),
    *get_args(broker_messages.FromActiveController),
)

PeerMessage = Union[MESSAGES]  # type: ignore[valid-type]  # noqa: UP007

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerMessage)


class PeerProtocolError(ValueError):
    """A peer sent an invalid or oversized message. The connection to that peer is closed."""


def encode(message: msgspec.Struct) -> bytes:
    """Returns the whole frame. Raises PeerProtocolError if the message is longer than
    MESSAGE_BYTES_MAX; a core must not send such a message.
    """
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise PeerProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes; at most {MESSAGE_BYTES_MAX} are allowed"
        )
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_size(head: bytes) -> int:
    """The size of the body, from the first LENGTH_BYTES bytes. Raises PeerProtocolError."""
    size = int.from_bytes(head, "big")
    if not 0 < size <= MESSAGE_BYTES_MAX:
        raise PeerProtocolError(f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    return size


def decode(body: bytes | memoryview) -> msgspec.Struct | None:
    """Returns the message; None if this version does not know it. Raises PeerProtocolError."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        # a tag that this version does not know, here or in a nested union
        if str(error).startswith("Invalid value"):
            return None
        raise PeerProtocolError(f"not a message between hosts: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerProtocolError(f"not a message between hosts: {error}") from error
