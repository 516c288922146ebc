"""The events of a classic group. `request` is the number by which the runtime matches the Reply.

The handlers check everything that needs no state (group id, session timeout) before they create an
event.
"""

from __future__ import annotations

import msgspec

from mqd.protocol.messages import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest


class JoinGroup(msgspec.Struct, frozen=True, gc=False):
    """`new_member_id`: the id that this client gets if it needs one. It is random, so the caller
    supplies it. `message.rebalance_timeout_ms` is -1 if the request has none (version 0).
    """

    request: int
    version: int
    client_id: str
    client_host: str
    message: JoinGroupRequest
    new_member_id: str


class SyncGroup(msgspec.Struct, frozen=True, gc=False):
    request: int
    message: SyncGroupRequest


class Heartbeat(msgspec.Struct, frozen=True, gc=False):
    request: int
    message: HeartbeatRequest


class LeaveGroup(msgspec.Struct, frozen=True, gc=False):
    """`message.members` is filled in for every version."""

    request: int
    message: LeaveGroupRequest
