"""What happens to a classic group: requests, by the number under which the shell keeps them, and
what the cluster asks of every group.

The handlers check what needs no state (group id, session time-out) before they make one of these.
"""

from __future__ import annotations

import msgspec

from mqd.protocol.messages import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest


class JoinGroup(msgspec.Struct, frozen=True, gc=False):
    """`new_member_id`: the id this client gets if it needs one; random, so it comes from outside.
    `rebalance_timeout_ms` is the session's where the request has none.
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
