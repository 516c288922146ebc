"""What the controllers of two hosts say to each other, and how it is framed: 4-byte big-endian
length, then msgpack of one tagged struct.

The structs belong to the cores that speak them; here they become one union. A tag is the name of
its class, so a name is used once among all of them; a message never changes its meaning, fields are
only added at the end, with a default (hosts of two versions live together during a rolling upgrade:
unknown fields are passed over, an unknown message is reported by decode() and passed over by the
transport).

Bounds: MESSAGE_BYTES_MAX. The sender is who proved it in the handshake
(mqd/cluster/membership/handshake.py); nothing in a message is believed about that.
"""

from typing import Union, get_args

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.membership import formation
from mqd.cluster.raft.messages import QuorumMessage

MESSAGE_BYTES_MAX = 16 << 20
LENGTH_BYTES = 4

# Each core's messages, in the order in which the cores came.
MESSAGES: tuple[type[msgspec.Struct], ...] = (
    formation.FormationAsk,
    formation.FormationAnswer,
    *get_args(QuorumMessage),
    *get_args(broker_messages.ToActiveController),
    *get_args(broker_messages.FromActiveController),
)

PeerMessage = Union[MESSAGES]  # type: ignore[valid-type]  # noqa: UP007

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerMessage)


class PeerProtocolError(ValueError):
    """What a peer sent is no message, or too long. Its connection ends."""


def encode(message: msgspec.Struct) -> bytes:
    """The whole frame. Raises PeerProtocolError when the message is too long: the caller's core
    must send less at a time.
    """
    body = _encoder.encode(message)
    if len(body) > MESSAGE_BYTES_MAX:
        raise PeerProtocolError(
            f"a {type(message).__name__} of {len(body)} bytes; at most {MESSAGE_BYTES_MAX} are allowed"
        )
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def body_bytes(head: bytes) -> int:
    """Size of the body that LENGTH_BYTES bytes announce. Raises PeerProtocolError."""
    size = int.from_bytes(head, "big")
    if not 0 < size <= MESSAGE_BYTES_MAX:
        raise PeerProtocolError(f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX} are allowed")
    return size


def decode(body: bytes | memoryview) -> msgspec.Struct | None:
    """The message; None when it is one that this version does not know. Raises PeerProtocolError."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        if str(error).startswith("Invalid value"):  # a tag that this version does not know, here or in a union inside
            return None
        raise PeerProtocolError(f"not a message between hosts: {error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerProtocolError(f"not a message between hosts: {error}") from error
