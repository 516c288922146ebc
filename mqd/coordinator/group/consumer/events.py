"""What happens to a consumer group (KIP-848), beside the classic requests of classic/events.py,
which its classic members send.
"""

from __future__ import annotations

import msgspec

from mqd.protocol.messages import ConsumerGroupHeartbeatRequest


class ConsumerHeartbeat(msgspec.Struct, frozen=True, gc=False):
    """`new_member_id`: what a client of version 0 gets that comes without one; random, so it comes
    from outside. What needs no state is checked by the handler.
    """

    request: int
    client_id: str
    client_host: str
    message: ConsumerGroupHeartbeatRequest
    new_member_id: str = ""


class ConsumerDescribe(msgspec.Struct, frozen=True, gc=False):
    """Answered with a ConsumerGroupDescribeResponse.Group."""

    request: int
