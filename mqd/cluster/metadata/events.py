"""Events and actions of the metadata core (metadata/core.py)."""

from collections.abc import Hashable

import msgspec

from mqd.cluster.broker import messages as broker_messages
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import AclCreated, DelegationToken, Record, ScramCredential, TopicState
from mqd.cluster.metadata.rules.placement import Directory
from mqd.cluster.metadata.state import MetadataState

# -- events ----------------------------------------------------------------------------------------


class ProcessStarted(msgspec.Struct, frozen=True):
    """This host's controller process has started. If the incarnation is not the registered one, the
    whole host was restarted.
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


class Persisted(msgspec.Struct, frozen=True):
    version: int  # all batches up to this version are on disk


class PersistFailed(msgspec.Struct, frozen=True):
    """Batches passed to Persist will never be in the log."""

    reason: str
    kept_version: int = -1  # batches up to this version are still in flight; -1 = only committed ones remain
    # `attempt` of the failed Persist, -1 = the current one. The event is ignored if the attempt is over.
    attempt: int = -1


class AppliedByHost(msgspec.Struct, frozen=True):
    version: int  # every live worker of this host has applied it


class ClientGone(msgspec.Struct, frozen=True):
    client: Hashable


class Tick(msgspec.Struct, frozen=True):
    wall_ms: int = 0  # wall clock, by which tokens expire; 0 = not given


class Committed(msgspec.Struct, frozen=True):
    """The quorum has committed these records; `version` is the offset after them and after any control
    records of the quorum that follow. On the active controller these are the oldest of its own
    pending proposals (treated like Persisted); on other hosts they are applied and published.
    """

    records: tuple[Record, ...]
    version: int


class SnapshotInstalled(msgspec.Struct, frozen=True):
    """This host received the whole committed state, because the leader's log no longer has the records
    that this host lacked. Only while inactive. `MetadataCore.committed` stays the same object.
    """

    state: MetadataState


class BecameActive(msgspec.Struct, frozen=True):
    """The quorum has elected this host and committed a record of this epoch. Everything before `version`
    has already been delivered by Committed.
    """

    epoch: int
    version: int  # end of the log: offset of the next proposed record
    previous_epoch: int = -1  # the last earlier epoch in which a controller may have been active


class ClusterFounded(msgspec.Struct, frozen=True):
    """Sent to the active controller: gives the cluster its id, unless the metadata log already has one."""

    cluster_id: str
    created_ms: int  # wall clock


class Resigned(msgspec.Struct, frozen=True):
    """This host is no longer the quorum's leader. Uncommitted proposals are dropped; if another leader
    commits them, they arrive with Committed.
    """


class OffsetsTaken(msgspec.Struct, frozen=True):
    """The quorum has appended its own control records (voters); the next proposed record gets offset
    `version`.
    """

    version: int


class LeaseChanged(msgspec.Struct, frozen=True):
    """No other host can be the quorum's leader before `until_ms` (own CLOCK_BOOTTIME). From then on, this
    controller grants no lease and fences no broker.
    """

    until_ms: int


class PeerReceived(msgspec.Struct, frozen=True):
    """A message from the broker core of `node_id`, which can be this host's. The transport has
    authenticated the node.
    """

    node_id: int
    message: broker_messages.ToActiveController


Event = (
    ProcessStarted
    | DirectoriesSeen
    | ChangeRequested
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
    removed_topics: tuple[TopicState, ...] = ()
    broker_config: dict[str, str] | None = None
    brokers_changed: bool = False
    changed_groups: tuple[str, ...] = ()  # consumer groups whose configuration has changed
    client_quotas_changed: bool = False
    features_changed: bool = False
    # for some of `topics`, the only partitions that changed; the other topics changed as a whole
    changed_partitions: tuple[tuple[str, tuple[int, ...]], ...] = ()
    # topics, in their earlier state, whose partitions from this index on were removed; their new state is
    # in `topics`
    removed_partitions: tuple[tuple[TopicState, int], ...] = ()
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
    topic: TopicState | None = None  # mqd/controller puts it into the response, with slots and owners


class SendPeer(msgspec.Struct, frozen=True):
    """A message to the broker core of `node_id`, which can be this host's."""

    node_id: int
    message: broker_messages.FromActiveController
    # the resulting topic of a validate_only request; mqd/controller puts its image
    # (HostCore.topic_image) into the response
    topic: TopicState | None = None


Action = Persist | Publish | Reply | SendPeer
