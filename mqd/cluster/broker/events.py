"""Events and actions of the broker core (broker/core.py)."""

from collections.abc import Hashable

import msgspec

from mqd.cluster.broker import messages as peer
from mqd.cluster.host import messages

# -- events ----------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """The first event. `registration`: complete, with the directories; its incarnation is the keeper's
    generation. `process_number`: a number that no earlier controller process of this host had (its start time,
    CLOCK_BOOTTIME in ns). The lease of the previous process stays valid, so that clients do not notice
    that the process has ended.
    """

    registration: peer.RegisterBroker
    process_number: int = 0
    # the values of the previous process of this incarnation in the control segment; broker_epoch
    # -1 = none
    broker_epoch: int = -1
    lease_until_ms: int = 0


class ControllerKnown(msgspec.Struct, frozen=True):
    """The leader of the quorum that is known on this host; -1 = none. `is_only_voter`: no other host
    votes, so no host can ever fence this one.
    """

    node_id: int
    epoch: int
    is_only_voter: bool = False


class PeerReceived(msgspec.Struct, frozen=True):
    node_id: int
    message: peer.FromActiveController


class MetadataApplied(msgspec.Struct, frozen=True):
    """This host's workers have applied the committed metadata up to `version` (HostCore's
    AppliedEverywhere).
    """

    version: int


class MetadataCommitted(msgspec.Struct, frozen=True):
    """MetadataCore.committed has advanced to `version`. Sent after each Publish, once HostCore has handled
    it. `known_version`: HostCore.version, the version of the newest change that concerns the workers;
    workers that have applied it have applied all changes up to `version`.
    """

    version: int
    known_version: int


class InSyncProposed(msgspec.Struct, frozen=True):
    client: Hashable
    proposal: messages.ProposeInSync


class ChangeRequested(msgspec.Struct, frozen=True):
    """A client's change, while this host is not the active controller."""

    client: Hashable
    request: messages.Request


class ClientGone(msgspec.Struct, frozen=True):
    client: Hashable


class LeadershipsLost(msgspec.Struct, frozen=True):
    """The workers of this host that led these partitions died (HostCore's RaiseEpochs): each partition
    needs a new leader epoch.
    """

    partitions: tuple[tuple[bytes, int], ...]


class ReplicaMoved(msgspec.Struct, frozen=True):
    """HostCore's ReportReplicaMoved."""

    topic_id: bytes
    index: int
    directory: str


class ReplicasFailed(msgspec.Struct, frozen=True):
    """The complete set of partitions that one worker does not serve because their disk failed or their
    data is damaged (HostCore's ReportFailures).
    """

    worker: int
    partitions: tuple[tuple[bytes, int], ...]


class DirectoriesFull(msgspec.Struct, frozen=True):
    """The complete set of log directories (ids) to which one worker cannot write now."""

    worker: int
    directories: frozenset[str]


class PartitionEmptied(msgspec.Struct, frozen=True):
    """A worker reports that a retired partition that it leads no longer has any records or, if the
    partition is hidden already, that no client has written to it for the grace period.
    """

    topic_id: bytes
    index: int
    leader_epoch: int


class DirectoriesSeen(msgspec.Struct, frozen=True):
    directories: tuple[peer.DirectoryReport, ...]


class HostDied(msgspec.Struct, frozen=True):
    """The keeper has proven that all processes of this host except keeper and controller have ended: the
    host is fenced immediately, before its lease ends. `dead` False: the processes are running again.
    """

    dead: bool = True


class ShutdownRequested(msgspec.Struct, frozen=True):
    """Controlled shutdown (R15)."""


class Tick(msgspec.Struct, frozen=True):
    """Sent at least every heartbeat interval / 4."""


Event = (
    Started
    | ControllerKnown
    | PeerReceived
    | MetadataApplied
    | MetadataCommitted
    | InSyncProposed
    | ChangeRequested
    | ClientGone
    | LeadershipsLost
    | ReplicaMoved
    | ReplicasFailed
    | DirectoriesFull
    | PartitionEmptied
    | DirectoriesSeen
    | HostDied
    | ShutdownRequested
    | Tick
)

# -- actions ---------------------------------------------------------------------------------------


class SendPeer(msgspec.Struct, frozen=True):
    """A message to the metadata core of `node_id`, which can be this host's
    (mqd.cluster.metadata.events.PeerReceived).
    """

    node_id: int
    message: peer.ToActiveController


class SetBroker(msgspec.Struct, frozen=True):
    """Write this to the control segment. Until `lease_until_ms` (own CLOCK_BOOTTIME; INT64_MAX = no end;
    0 = no lease) this host may act as a leader. With `ready` False (R10) it does not lead and serves no
    produce and no replica fetch, even if it leads according to the metadata.
    """

    broker_epoch: int  # -1 = not registered
    incarnation: int
    lease_until_ms: int
    ready: bool
    fenced: bool


class ToWorker(msgspec.Struct, frozen=True):
    client: Hashable
    response: messages.InSyncResponse


class Reply(msgspec.Struct, frozen=True):
    client: Hashable
    response: messages.Response
    topic_name: str | None = None  # mqd/controller adds this topic's image


class ShutDown(msgspec.Struct, frozen=True):
    """This host no longer leads any partition, and all brokers know it. Flush, write the clean-shutdown
    marker with this broker epoch, exit. `broker_epoch` -1: not registered, so no marker.
    """

    broker_epoch: int
    reason: str


class Refused(msgspec.Struct, frozen=True):
    """The cluster refuses this broker permanently. The process exits with this message."""

    message: str


class NotYetRegistered(msgspec.Struct, frozen=True):
    """Another host is registered with this node id. Registration is retried until that host's session
    ends, which is never if it stays alive. Logged once per wait.
    """

    message: str


Action = SendPeer | SetBroker | ToWorker | Reply | ShutDown | Refused | NotYetRegistered
