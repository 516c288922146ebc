"""Replies to requests for a group that does not exist, or is of another kind: GROUP_ID_NOT_FOUND,
with Kafka's texts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from mqd.coordinator.actions import Reply
from mqd.coordinator.group.consumer.events import ConsumerDescribe, ConsumerHeartbeat
from mqd.coordinator.group.share.events import AlterOffsets, DeleteOffsets, ShareDescribe, ShareHeartbeat
from mqd.coordinator.group.streams.core import refusal
from mqd.coordinator.group.streams.events import StreamsDescribe, StreamsHeartbeat
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    AlterShareGroupOffsetsResponse,
    ConsumerGroupDescribeResponse,
    ConsumerGroupHeartbeatResponse,
    DeleteShareGroupOffsetsResponse,
    ShareGroupDescribeResponse,
    ShareGroupHeartbeatResponse,
    StreamsGroupDescribeResponse,
)


class _Request(NamedTuple):
    kind: str
    response_class: Any
    is_description: bool = False
    names_kind: bool = False  # a member that has joined gets "Share group g not found."


_REQUESTS: dict[type, _Request] = {
    ConsumerHeartbeat: _Request("consumer", ConsumerGroupHeartbeatResponse),
    ConsumerDescribe: _Request("consumer", ConsumerGroupDescribeResponse.Group, is_description=True),
    ShareHeartbeat: _Request("share", ShareGroupHeartbeatResponse, names_kind=True),
    ShareDescribe: _Request("share", ShareGroupDescribeResponse.Group, is_description=True),
    AlterOffsets: _Request("share", AlterShareGroupOffsetsResponse),
    DeleteOffsets: _Request("share", DeleteShareGroupOffsetsResponse),
    StreamsHeartbeat: _Request("streams", None, names_kind=True),
    StreamsDescribe: _Request("streams", StreamsGroupDescribeResponse.Group, is_description=True),
}


def not_found(event: Any, group_id: str, exists: bool) -> Reply:
    """`exists`: a group of another kind has this id."""
    request = _REQUESTS[type(event)]
    text = f"Group {group_id} not found."
    if exists:
        text = f"Group {group_id} is not a {request.kind} group."
    elif request.names_kind and event.message.member_epoch > 0:
        text = f"{request.kind.capitalize()} group {group_id} not found."
    error = int(ErrorCode.GROUP_ID_NOT_FOUND)
    if request.response_class is None:
        return Reply(event.request, refusal(error, text))
    group_field = {"group_id": group_id} if request.is_description else {}
    return Reply(event.request, request.response_class(error_code=error, error_message=text, **group_field))
