"""The events of a share group (KIP-932), and its requests to the share coordinator."""

from __future__ import annotations

import msgspec

from mqd.coordinator.actions import Effect
from mqd.protocol.messages import ShareGroupHeartbeatRequest

StartOffsets = dict[bytes, dict[int, int]]  # topic id -> partition -> start offset
PartitionErrors = dict[tuple[bytes, int], int]  # (topic id, partition) -> error code


class ShareHeartbeat(msgspec.Struct, frozen=True, gc=False):
    """The request handler has checked everything that does not depend on the group's state."""

    request: int
    client_id: str
    client_host: str
    message: ShareGroupHeartbeatRequest


class ShareDescribe(msgspec.Struct, frozen=True, gc=False):
    """Answered with a ShareGroupDescribeResponse.Group."""

    request: int


class AlterOffsets(msgspec.Struct, frozen=True, gc=False):
    """`offsets`: topic -> partition -> start offset. Answered with an
    AlterShareGroupOffsetsResponse.
    """

    request: int
    offsets: dict[str, dict[int, int]]


class DeleteOffsets(msgspec.Struct, frozen=True, gc=False):
    """Answered with a DeleteShareGroupOffsetsResponse."""

    request: int
    topics: tuple[str, ...]


class InitializeStates(Effect, frozen=True):
    """Sends InitializeShareGroupState for each share-partition; the outcome arrives as a
    StatesChanged with this token.
    """

    token: int
    state_epoch: int
    offsets: StartOffsets


class DeleteStates(Effect, frozen=True):
    """Sends DeleteShareGroupState for each share-partition; the outcome arrives as a StatesChanged
    with this token.
    """

    token: int
    partitions: dict[bytes, tuple[int, ...]]


class StatesChanged(msgspec.Struct, frozen=True, gc=False):
    """`errors`: one for each share-partition whose request failed or has an unknown outcome."""

    token: int
    errors: PartitionErrors
