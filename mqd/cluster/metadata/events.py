"""Events and actions of the metadata core (metadata/core.py)."""

from collections.abc import Hashable

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import AclCreated, DelegationToken, Record, ScramCredential, TopicState
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.metadata.state import MetadataState

# -- events ----------------------------------------------------------------------------------------


class BrokerStarted(msgspec.Struct, frozen=True):
    """This host's controller process started. A different incarnation from the registered one means
    that the whole host was restarted.
    """

    host: str
    port: int
    rack: str | None
    incarnation: int
    new_cluster_id: str  # used if the log is empty


class DirectoriesSeen(msgspec.Struct, frozen=True):
    directories: tuple[Directory, ...]


class ChangeRequested(msgspec.Struct, frozen=True):
    client: Hashable
    request: messages.Request


class MoveCompleted(msgspec.Struct, frozen=True):
    """A worker of this host has moved a partition's files to another log directory and waits for
    the confirmation.
    """

    topic_id: bytes
    index: int
    directory: str  # its id


class LeadershipsLost(msgspec.Struct, frozen=True):
    """The process that led these partitions died: they need a new leader epoch before a process
    serves them.
    """

    partitions: tuple[tuple[bytes, int], ...]  # (topic id, index)


class Persisted(msgspec.Struct, frozen=True):
    version: int  # everything up to here is on disk


class PersistFailed(msgspec.Struct, frozen=True):
    """Batches passed to Persist that are not in the log and never will be."""

    reason: str
    kept: int = -1  # batches up to this version are still in flight; -1 = none but committed ones
    # `attempt` of the failed Persist. Ignored if that attempt is already over; -1 = the current
    # one.
    attempt: int = -1


class AppliedByHost(msgspec.Struct, frozen=True):
    version: int  # every participating worker has applied it


class ClientGone(msgspec.Struct, frozen=True):
    client: Hashable


class Tick(msgspec.Struct, frozen=True):
    wall_ms: int = 0  # wall clock, by which tokens expire; 0 = not given


class Committed(msgspec.Struct, frozen=True):
    """The quorum has committed these records; `version` is the offset after the last of them and
    after any control records of the quorum that follow. On the active controller they are its own
    next proposals (treated like Persisted); elsewhere they are applied and published.
    """

    records: tuple[Record, ...]
    version: int


class SnapshotInstalled(msgspec.Struct, frozen=True):
    """This host was behind the start of the log and received the whole committed state instead.
    Only while inactive. `MetadataCore.committed` stays the same object.
    """

    state: MetadataState


class BecameActive(msgspec.Struct, frozen=True):
    """The quorum elected this host and has committed one of its records in this epoch. Everything
    before `version` has already been delivered by Committed.
    """

    epoch: int
    version: int  # end of the log: offset of the next proposed record
    before: int = -1  # the last earlier epoch whose controller can have been active


class ClusterFounded(msgspec.Struct, frozen=True):
    """Gives a cluster id to the active controller of a metadata log without one. Otherwise has no
    effect.
    """

    cluster_id: str
    created_ms: int  # wall clock


class Resigned(msgspec.Struct, frozen=True):
    """No longer the quorum's leader: uncommitted proposals are dropped (another leader may still
    commit them; then they arrive by Committed).
    """


class OffsetsTaken(msgspec.Struct, frozen=True):
    """The quorum appended control records of its own (voters): the next proposed record gets this
    offset.
    """

    version: int


class LeaseChanged(msgspec.Struct, frozen=True):
    """Time until which no other host can be the quorum's leader (own CLOCK_BOOTTIME). After it, no
    broker gets a lease and none is fenced.
    """

    until_ms: int


class PeerReceived(msgspec.Struct, frozen=True):
    """From the broker core of `node_id` (authenticated by the transport; includes this host's own
    core).
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
    changes after a failure: records of older attempts must not be written.
    """

    records: tuple[Record, ...]
    base_offset: int
    version: int
    attempt: int


class Publish(msgspec.Struct, frozen=True):
    """Committed changes: new states of topics, removed topics, and whether a broker's configuration
    or registration changed.
    """

    version: int
    topics: tuple[TopicState, ...] = ()
    removed: tuple[TopicState, ...] = ()
    broker_config: dict[str, str] | None = None
    brokers_changed: bool = False
    groups: tuple[str, ...] = ()  # consumer groups whose configuration has changed
    client_quotas_changed: bool = False
    features_changed: bool = False
    # For topics in `topics` if only these of their partitions changed; a topic that is missing here
    # changed as a whole.
    partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # Topics that lost their partitions from this index on, in their earlier state (also in
    # `topics`).
    vanished: tuple[tuple[TopicState, int], ...] = ()
    acls_put: tuple[AclCreated, ...] = ()
    acls_removed: tuple[bytes, ...] = ()
    credentials_put: tuple[ScramCredential, ...] = ()
    credentials_removed: tuple[tuple[str, int], ...] = ()

    @property
    def settings_changed(self) -> bool:
        return self.client_quotas_changed or self.features_changed

    client_metrics: tuple[str, ...] = ()  # subscriptions whose configuration has changed
    tokens_put: tuple[DelegationToken, ...] = ()
    tokens_removed: tuple[str, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    client: Hashable
    response: messages.Response
    topic: TopicState | None = None  # the shell adds slots and owners and puts it into the response


class SendPeer(msgspec.Struct, frozen=True):
    """To the broker core of `node_id`. For this host's own id, to its own core."""

    node_id: int
    message: broker_messages.FromActiveController
    # A validated topic: the shell puts its image (HostCore.topic_image) into the message's
    # response.
    topic: TopicState | None = None


Action = Persist | Publish | Reply | SendPeer
