"""The events of a consumer group (KIP-848), in addition to the classic requests of
classic/events.py, which its classic members send.
"""

from __future__ import annotations

import msgspec

from mqd.coordinator.group.consumer.cluster import ClientIdentity
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest


class ConsumerHeartbeat(msgspec.Struct, frozen=True, gc=False):
    """`new_member_id`: the id for a client of version 0 that sends none. It is random, so the
    caller supplies it. `authorized_as`: the client, if ACLs are enabled. The handler has already
    checked everything that needs no state.
    """

    request: int
    client_id: str
    client_host: str
    message: ConsumerGroupHeartbeatRequest
    new_member_id: str = ""
    authorized_as: ClientIdentity | None = None


class ConsumerDescribe(msgspec.Struct, frozen=True, gc=False):
    """Answered with a ConsumerGroupDescribeResponse.Group."""

    request: int
