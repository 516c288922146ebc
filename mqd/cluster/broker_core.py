"""This host as a broker: registers, keeps its lease by heartbeats, fences itself, and carries what its processes ask to the active controller. Sans-I/O.

Every host has one, the active controller's too: what it sends to its own node id the shell gives to its own metadata core. Nothing is remembered across a restart of the
controller process but what the shell gives with Started: (node id, directory id, incarnation), and what the metadata log says.

Invariants (check())
    B1  the lease deadline is at most sent_ms + lease of a heartbeat that was answered for the registration in force; it never rests on when an answer came
    B2  ready (R10) only while the committed metadata holds this incarnation's own registration, and this host's workers have applied it
    B3  a proposal for a partition is the newest that its worker made; an answer is given for the sequence it names, once
    B4  a change of a client is sent at most once; its client hears of it exactly once
Bounds: CHANGES_WAITING_MAX changes under way; more are refused with a retriable error. One proposal per partition.
"""

from collections.abc import Hashable

import msgspec

from mqd.cluster import broker_messages as peer
from mqd.cluster import controller_messages as messages
from mqd.cluster.controller_options import DEFAULTS, ControllerOptions
from mqd.cluster.metadata_state import MetadataState

INT64_MAX = (1 << 63) - 1
CHANGES_WAITING_MAX = 10_000

# -- events --------------------------------------------------------------------------------------------------------------------


class Started(msgspec.Struct, frozen=True):
    """First event. `registration`: as it is to be sent, directories included; its incarnation is the keeper's generation."""

    registration: peer.RegisterBroker


class ControllerKnown(msgspec.Struct, frozen=True):
    """Who leads the quorum, as far as this host knows: -1 = nobody. `alone`: this host is the only voter, so nobody else can ever fence it."""

    node_id: int
    epoch: int
    alone: bool = False


class PeerReceived(msgspec.Struct, frozen=True):
    node_id: int
    message: peer.FromActiveController


class MetadataApplied(msgspec.Struct, frozen=True):
    """This host's workers have the committed metadata up to here in force (HostCore's AppliedEverywhere)."""

    version: int


class MetadataCommitted(msgspec.Struct, frozen=True):
    """MetadataCore.committed has moved (given after each Publish)."""

    version: int


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


class PartitionEmptied(msgspec.Struct, frozen=True):
    """A worker says that a retired partition that it leads has no records any more."""

    topic_id: bytes
    index: int
    leader_epoch: int


class DirectoriesSeen(msgspec.Struct, frozen=True):
    directories: tuple[peer.DirectoryReport, ...]


class HostDied(msgspec.Struct, frozen=True):
    """All processes but keeper and controller of this host ended (the keeper's proof): fenced at once, before a lease runs out."""


class ShutdownRequested(msgspec.Struct, frozen=True):
    """Controlled shutdown (R15)."""


class Tick(msgspec.Struct, frozen=True):
    """At least every heartbeat interval / 4."""


Event = (
    Started | ControllerKnown | PeerReceived | MetadataApplied | MetadataCommitted | InSyncProposed | ChangeRequested | ClientGone | LeadershipsLost | ReplicaMoved | PartitionEmptied
    | DirectoriesSeen | HostDied | ShutdownRequested | Tick
)  # fmt: skip

# -- actions -------------------------------------------------------------------------------------------------------------------


class SendPeer(msgspec.Struct, frozen=True):
    """To the metadata core of `node_id`; when that is this host, to its own (metadata_core.PeerReceived)."""

    node_id: int
    message: peer.ToActiveController


class SetBroker(msgspec.Struct, frozen=True):
    """Into the control segment. Until `lease_until_ms` (own CLOCK_BOOTTIME; INT64_MAX = without end; 0 = not at all) this host may act as a leader. `ready` False (R10): it serves no
    produce, no leadership and no replica fetch, whatever the metadata says."""

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
    """Nothing is led here any more and everybody knows; flush, write the clean marker with this broker epoch, end. -1: not registered, there is nothing to mark."""

    broker_epoch: int
    reason: str


class Refused(msgspec.Struct, frozen=True):
    """The cluster will not have this broker; asking again changes nothing. The process ends with this message."""

    message: str


Action = SendPeer | SetBroker | ToWorker | Reply | ShutDown | Refused


class BrokerCore:
    """`state`: MetadataCore.committed, only read (and always the same object)."""

    def __init__(self, node_id: int, state: MetadataState, options: ControllerOptions = DEFAULTS) -> None:
        self.node_id = node_id
        self._state = state
        self._options = options

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """`now_ms`: CLOCK_BOOTTIME, which goes on while the machine sleeps."""
        return []  # the bodies follow in the next commit
