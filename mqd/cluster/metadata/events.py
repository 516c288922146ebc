"""Events and actions of the metadata core (metadata/core.py): what its shell tells it, and what it
is to carry out.
"""

from collections.abc import Hashable

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import Record, TopicState
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.metadata.state import MetadataState

# -- events ----------------------------------------------------------------------------------------


class BrokerStarted(msgspec.Struct, frozen=True):
    """This host's controller process started. Another incarnation than the registered one: the
    whole host was restarted.
    """

    host: str
    port: int
    rack: str | None
    incarnation: int
    new_cluster_id: str  # taken when the log is empty


class DirectoriesSeen(msgspec.Struct, frozen=True):
    directories: tuple[Directory, ...]


class ChangeRequested(msgspec.Struct, frozen=True):
    client: Hashable
    request: messages.Request


class MoveCompleted(msgspec.Struct, frozen=True):
    """A worker of this host has moved a partition's files to another log directory and waits to
    hear that they count.
    """

    topic_id: bytes
    index: int
    directory: str  # its id


class LeadershipsLost(msgspec.Struct, frozen=True):
    """The process that led these partitions died: they need a new leader epoch before anyone serves
    them.
    """

    partitions: tuple[tuple[bytes, int], ...]  # (topic id, index)


class Persisted(msgspec.Struct, frozen=True):
    version: int  # everything up to here is on disk


class PersistFailed(msgspec.Struct, frozen=True):
    """What was handed to Persist and is not in the log, and never will be."""

    reason: str
    kept: int = -1  # what ends at this version or before is still under way; -1 = nothing that is not committed is
    # of the Persist that failed; nothing happens when that attempt is over already; -1 = whatever
    # is under way
    attempt: int = -1


class AppliedByHost(msgspec.Struct, frozen=True):
    version: int  # every worker that takes part has it in force


class ClientGone(msgspec.Struct, frozen=True):
    client: Hashable


class Tick(msgspec.Struct, frozen=True):
    pass


class Committed(msgspec.Struct, frozen=True):
    """The quorum has committed these records; `version` is the offset after the last of them, and
    after control records of the quorum's own that follow. On the active controller they are the
    next ones that it proposed (as Persisted); elsewhere they are applied and published.
    """

    records: tuple[Record, ...]
    version: int


class SnapshotInstalled(msgspec.Struct, frozen=True):
    """This host was behind the log's beginning: the whole committed state instead. Only while
    inactive. `MetadataCore.committed` stays the same object.
    """

    state: MetadataState


class BecameActive(msgspec.Struct, frozen=True):
    """The quorum made this host its leader and has committed a record of its own in this epoch:
    everything before `version` has been given by Committed.
    """

    epoch: int
    version: int  # the log's end: the next proposed record gets this offset
    before: int = -1  # the last epoch before this one whose controller can have been active


class ClusterFounded(msgspec.Struct, frozen=True):
    """To the active controller of a metadata log that has no cluster id yet: this is it. Nothing
    where there is one.
    """

    cluster_id: str
    created_ms: int  # wall clock


class Resigned(msgspec.Struct, frozen=True):
    """Not the quorum's leader any more: what was proposed and not committed is forgotten (another
    leader may still commit it, then it comes by Committed).
    """


class OffsetsTaken(msgspec.Struct, frozen=True):
    """The quorum appended control records of its own (voters): the next proposed record gets this
    offset.
    """

    version: int


class LeaseChanged(msgspec.Struct, frozen=True):
    """How long nobody else can be the quorum's leader (own CLOCK_BOOTTIME). Past it, no broker gets
    a lease and none is fenced.
    """

    until_ms: int


class PeerReceived(msgspec.Struct, frozen=True):
    """From the broker core of `node_id` (authenticated by the transport; this host's own core among
    them).
    """

    node_id: int
    message: broker_messages.ToActiveController


Event = (
    BrokerStarted
    | DirectoriesSeen
    | ChangeRequested
    | MoveCompleted
    | LeadershipsLost
    | Persisted
    | PersistFailed
    | AppliedByHost
    | ClientGone
    | Tick
    | Committed
    | SnapshotInstalled
    | BecameActive
    | ClusterFounded
    | Resigned
    | OffsetsTaken
    | LeaseChanged
    | PeerReceived
)

# -- actions ---------------------------------------------------------------------------------------


class Persist(msgspec.Struct, frozen=True):
    """Append and flush these records; answered by Persisted(version) or PersistFailed. `attempt`
    differs after a failure: older ones are not to be written.
    """

    records: tuple[Record, ...]
    base_offset: int
    version: int
    attempt: int


class Publish(msgspec.Struct, frozen=True):
    """Committed: new states of topics, removed topics, whether a broker's configuration or
    registration changed.
    """

    version: int
    topics: tuple[TopicState, ...] = ()
    removed: tuple[TopicState, ...] = ()
    broker_config: dict[str, str] | None = None
    brokers_changed: bool = False
    groups: tuple[str, ...] = ()  # consumer groups whose configuration has changed
    client_quotas_changed: bool = False
    features_changed: bool = False
    # of topics in `topics` of which only these partitions changed; a topic that is not here changed
    # as a whole
    partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # topics that lost their partitions from this index on; as they were before (also in `topics`)
    vanished: tuple[tuple[TopicState, int], ...] = ()

    @property
    def settings_changed(self) -> bool:
        return self.client_quotas_changed or self.features_changed


class Reply(msgspec.Struct, frozen=True):
    client: Hashable
    answer: messages.Answer
    topic: TopicState | None = None  # the shell adds slots and owners and puts it into the answer


class SendPeer(msgspec.Struct, frozen=True):
    """To the broker core of `node_id`; when that is this host, to its own."""

    node_id: int
    message: broker_messages.FromActiveController
    # a validated topic: the shell puts its image (HostCore.topic_image) into the message's answer
    topic: TopicState | None = None


Action = Persist | Publish | Reply | SendPeer
