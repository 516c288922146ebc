"""Events and actions of the broker core (broker/core.py): what its shell tells it, and what it is
to carry out.
"""

from collections.abc import Hashable

import msgspec

from mqd.cluster.broker import messages as peer
from mqd.cluster.host import messages

# -- events ----------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """First event. `registration`: as it is to be sent, directories included; its incarnation is
    the keeper's generation. `process`: a number that no earlier controller process of this host had
    (its start, CLOCK_BOOTTIME in ns). A predecessor's lease goes on, so that clients do not notice
    its end.
    """

    registration: peer.RegisterBroker
    process: int = 0
    broker_epoch: int = -1  # what the control segment holds of a predecessor in the same incarnation; -1 = nothing
    lease_until_ms: int = 0


class ControllerKnown(msgspec.Struct, frozen=True):
    """Who leads the quorum, as far as this host knows: -1 = nobody. `alone`: this host is the only
    voter, so nobody else can ever fence it.
    """

    node_id: int
    epoch: int
    alone: bool = False


class PeerReceived(msgspec.Struct, frozen=True):
    node_id: int
    message: peer.FromActiveController


class MetadataApplied(msgspec.Struct, frozen=True):
    """This host's workers have the committed metadata up to here in force (HostCore's
    AppliedEverywhere).
    """

    version: int


class MetadataCommitted(msgspec.Struct, frozen=True):
    """MetadataCore.committed has moved (given after each Publish, and after HostCore has handled
    it). `told_version`: of the newest news that concerned the workers (HostCore's version): once
    they have that, they have everything up to `version`.
    """

    version: int
    told_version: int


class InSyncProposed(msgspec.Struct, frozen=True):
    client: Hashable
    proposal: messages.ProposeInSync


class ChangeRequested(msgspec.Struct, frozen=True):
    """A client's change; the shell gives it here when this host is not the active controller."""

    client: Hashable
    request: messages.Request


class ClientGone(msgspec.Struct, frozen=True):
    client: Hashable


class LeadershipsLost(msgspec.Struct, frozen=True):
    """A worker of this host died (HostCore's RaiseEpochs): these need a new leader epoch."""

    partitions: tuple[tuple[bytes, int], ...]


class ReplicaMoved(msgspec.Struct, frozen=True):
    """HostCore's RecordMove."""

    topic_id: bytes
    index: int
    directory: str


class ReplicasFailed(msgspec.Struct, frozen=True):
    """All partitions that one worker does not serve, because their disk failed or what is on it is
    not sound (HostCore's Report).
    """

    worker: int
    partitions: tuple[tuple[bytes, int], ...]


class DirectoriesFull(msgspec.Struct, frozen=True):
    """The log directories (ids) that one worker writes nothing to at present: all of them, each
    time.
    """

    worker: int
    directories: frozenset[str]


class PartitionEmptied(msgspec.Struct, frozen=True):
    """A worker says that a retired partition that it leads has no records any more; when it is
    hidden, that nobody has written to it for the grace.
    """

    topic_id: bytes
    index: int
    leader_epoch: int


class DirectoriesSeen(msgspec.Struct, frozen=True):
    directories: tuple[peer.DirectoryReport, ...]


class HostDied(msgspec.Struct, frozen=True):
    """All processes but keeper and controller of this host ended (the keeper's proof): fenced at
    once, before a lease runs out. `dead` False: they are back.
    """

    dead: bool = True


class ShutdownRequested(msgspec.Struct, frozen=True):
    """Controlled shutdown (R15)."""


class Tick(msgspec.Struct, frozen=True):
    """At least every heartbeat interval / 4."""


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
    """To the metadata core of `node_id`; when that is this host, to its own
    (metadata_core.PeerReceived).
    """

    node_id: int
    message: peer.ToActiveController


class SetBroker(msgspec.Struct, frozen=True):
    """Into the control segment. Until `lease_until_ms` (own CLOCK_BOOTTIME; INT64_MAX = without
    end; 0 = not at all) this host may act as a leader. `ready` False (R10): it serves no produce,
    no leadership and no replica fetch, whatever the metadata says.
    """

    broker_epoch: int  # -1 = not registered
    incarnation: int
    lease_until_ms: int
    ready: bool
    fenced: bool


class ToWorker(msgspec.Struct, frozen=True):
    client: Hashable
    answer: messages.InSyncAnswer  # `partition` is set by the shell from HostCore


class Reply(msgspec.Struct, frozen=True):
    client: Hashable
    answer: messages.Answer
    topic_name: str | None = None  # the shell adds this topic's image


class ShutDown(msgspec.Struct, frozen=True):
    """Nothing is led here any more and everybody knows; flush, write the clean marker with this
    broker epoch, end. -1: not registered, there is nothing to mark.
    """

    broker_epoch: int
    reason: str


class Refused(msgspec.Struct, frozen=True):
    """The cluster will not have this broker; asking again changes nothing. The process ends with
    this message.
    """

    message: str


class NotYetRegistered(msgspec.Struct, frozen=True):
    """Another one is registered under this node id. It is asked for again until that one's session
    has ended, or for ever if it lives: said once for each wait.
    """

    message: str


Action = SendPeer | SetBroker | ToWorker | Reply | ShutDown | Refused | NotYetRegistered
