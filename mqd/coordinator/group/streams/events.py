"""The events of a streams group (KIP-1071)."""

from __future__ import annotations

import msgspec

from mqd.coordinator.group.streams.topology import NewTopic
from mqd.protocol.messages import StreamsGroupHeartbeatRequest, StreamsGroupHeartbeatResponse


class StreamsHeartbeat(msgspec.Struct, frozen=True, gc=False):
    """The request handler checks everything that needs no state. Answered with a
    StreamsHeartbeatOutcome.
    """

    request: int
    client_id: str
    client_host: str
    message: StreamsGroupHeartbeatRequest


class StreamsHeartbeatOutcome(msgspec.Struct, frozen=True):
    """`missing_topics`: internal topics that the handler must create."""

    response: StreamsGroupHeartbeatResponse
    missing_topics: tuple[NewTopic, ...] = ()

    @property
    def error_code(self) -> int:
        return self.response.error_code


class StreamsDescribe(msgspec.Struct, frozen=True, gc=False):
    """Answered with a StreamsGroupDescribeResponse.Group."""

    request: int
