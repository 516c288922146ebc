"""What the metadata log holds: one versioned struct per kind of change, msgpack in the value of a
record.

A record is a fact that was decided, never a wish: applying the same records in the same order gives
the same MetadataState, on every host and in every later version of mqd. So a struct here never
changes its meaning; a new meaning gets a new class with the next number in its tag, and the old one
stays readable.
"""

import msgspec


# hundreds of thousands, and never part of a cycle
class PartitionState(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    index: int
    replicas: tuple[int, ...]  # node ids, the preferred leader first
    directories: tuple[str, ...]  # by replica: id of the log directory; "" = that host has not chosen yet
    in_sync_replicas: tuple[int, ...]
    leader: int  # node id, -1 = none
    leader_epoch: int
    partition_epoch: int = 0  # +1 on every change of this partition (compare-and-set, KIP-497)
    # a reassignment under way (KIP-455): in `replicas` already, not yet all in sync
    adding_replicas: tuple[int, ...] = ()
    removing_replicas: tuple[int, ...] = ()  # in `replicas` still, and no more when it is done
    # left the in-sync set below min.insync.replicas: they have every committed record (KIP-966)
    eligible_leader_replicas: tuple[int, ...] = ()
    # were eligible, then came back without their memory: a human may still choose one
    last_known_eligible: tuple[int, ...] = ()
    recovering: bool = False  # its leader was chosen uncleanly; until the leader has said that it is in order
    retiring: int = 0  # RETIRE_*: this partition of a topic that gets fewer
    redirect: int = -1  # index of the partition that takes what producers send here
    # the reassignment under way is mqd's own: it takes the replica of this node away, which is lost
    # or drained
    replacing: int = -1
    # of the removing ones, those that an earlier goal of this reassignment has brought: they were
    # not there before
    astray_replicas: tuple[int, ...] = ()


RETIRE_NOT, RETIRE_SEALED, RETIRE_REDIRECTED, RETIRE_HIDDEN = 0, 1, 2, 3
"""A partition that is to go: no; refuses new records, retriably; gives them to `redirect`; the same, and Metadata does not show it any more."""


class TopicState(msgspec.Struct, frozen=True, gc=False):
    name: str
    topic_id: bytes  # 16 bytes
    partitions: tuple[PartitionState, ...]  # by index
    config: dict[str, str]  # only what was set on the topic; never mutated
    # in which a partition that is added begins: above every one that a vanished partition of this
    # topic had. Clients, groups and files may remember that one
    first_leader_epoch: int = 0


class BrokerState(msgspec.Struct, frozen=True):
    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int  # offset of the registration in this log
    incarnation: int  # the keeper's generation: another one means that the whole host was restarted
    directories: dict[str, str]  # directory id -> path where it was last seen
    fenced: bool = False  # neither leads nor is in any in-sync set; clients are not told of it
    in_controlled_shutdown: bool = False  # gets no leadership, is not taken into an in-sync set
    draining: bool = False  # its replicas go to others, it gets no new ones
    inter_broker_host: str = ""  # for data between hosts; "" = none
    inter_broker_port: int = 0
    controller_host: str = ""  # for the quorum and heartbeats
    controller_port: int = 0
    worker_count: int = 0
    directory_id: str = ""  # of the metadata directory: another one is another host, whatever its node id says
    features: dict[str, tuple[int, int]] = {}  # levels that it can do, first and last
    flush_on_ack: bool = False  # for topics that do not say: only what it has flushed counts (R9)


class ClusterCreated(msgspec.Struct, frozen=True, tag="cluster_created/1"):
    cluster_id: str
    created_ms: int


class BrokerRegistered(msgspec.Struct, frozen=True, tag="broker_registered/1"):
    broker: BrokerState


class TopicCreated(msgspec.Struct, frozen=True, tag="topic_created/1"):
    topic: TopicState


class PartitionsAdded(msgspec.Struct, frozen=True, tag="partitions_added/1"):
    topic_id: bytes
    partitions: tuple[PartitionState, ...]


class LeaderEpochsRaised(msgspec.Struct, frozen=True, tag="leader_epochs_raised/1"):
    """The leader's process was replaced: the same leader, in a new epoch, for these partitions of
    one topic.
    """

    topic_id: bytes
    partitions: tuple[int, ...]


class TopicRemoved(msgspec.Struct, frozen=True, tag="topic_removed/1"):
    topic_id: bytes


class TopicConfigured(msgspec.Struct, frozen=True, tag="topic_configured/1"):
    """The whole configuration of the topic, not a difference."""

    topic_id: bytes
    config: dict[str, str]


class BrokerConfigured(msgspec.Struct, frozen=True, tag="broker_configured/1"):
    """The whole dynamic configuration of one broker ("0"), or of all ("")."""

    resource_name: str
    config: dict[str, str]


class GroupConfigured(msgspec.Struct, frozen=True, tag="group_configured/1"):
    """The whole configuration of one consumer group."""

    group_id: str
    config: dict[str, str]


class ProducerIdsAllocated(msgspec.Struct, frozen=True, tag="producer_ids_allocated/1"):
    next_producer_id: int


Entity = tuple[tuple[str, str | None], ...]  # (type, name) in order of the type; name None = the default of that type


class ClientQuotaSet(msgspec.Struct, frozen=True, tag="client_quota_set/1"):
    """All quotas of one entity (KIP-546), not a difference; none = the entity has none any more."""

    entity: Entity
    quotas: dict[str, float]


class FeatureLevelSet(msgspec.Struct, frozen=True, tag="feature_level_set/1"):
    """The level of one feature that is in force in the cluster from here on (KIP-584); 0 = switched
    off.
    """

    name: str
    level: int


class ReplicaMoved(msgspec.Struct, frozen=True, tag="replica_moved/1"):
    """The replica of one broker lies in another of its log directories (KIP-113): its files there
    were complete and flushed before.
    """

    topic_id: bytes
    index: int
    node_id: int
    directory: str


class PartitionChange(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What becomes of one partition; None = as it was. The partition epoch rises by one. A leader
    epoch rises when `new_epoch` is set: always with another leader, and when whoever leads must
    forget what it knows of its followers.
    """

    index: int
    new_epoch: bool = False
    leader: int | None = None
    in_sync_replicas: tuple[int, ...] | None = None
    eligible_leader_replicas: tuple[int, ...] | None = None
    last_known_eligible: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None  # always with directories
    directories: tuple[str, ...] | None = None
    adding_replicas: tuple[int, ...] | None = None
    removing_replicas: tuple[int, ...] | None = None
    recovering: bool | None = None
    retiring: int | None = None
    redirect: int | None = None
    replacing: int | None = None
    astray_replicas: tuple[int, ...] | None = None


class PartitionsChanged(msgspec.Struct, frozen=True, tag="partitions_changed/1"):
    topic_id: bytes
    changes: tuple[PartitionChange, ...]  # at most one of a partition


class BrokerChanged(msgspec.Struct, frozen=True, tag="broker_changed/1"):
    """Of a registered broker; None = as it was. The changes of its partitions are in the same
    batch.
    """

    node_id: int
    epoch: int  # of the registration that this is about
    fenced: bool | None = None
    in_controlled_shutdown: bool | None = None
    draining: bool | None = None


class BrokerUnregistered(msgspec.Struct, frozen=True, tag="broker_unregistered/1"):
    """It holds no replica any more."""

    node_id: int


class PartitionsVanished(msgspec.Struct, frozen=True, tag="partitions_vanished/1"):
    """The retired partitions of the topic are empty and gone: this many are left."""

    topic_id: bytes
    partition_count: int


Record = (
    ClusterCreated
    | BrokerRegistered
    | TopicCreated
    | PartitionsAdded
    | LeaderEpochsRaised
    | TopicRemoved
    | TopicConfigured
    | BrokerConfigured
    | GroupConfigured
    | ProducerIdsAllocated
    | ClientQuotaSet
    | FeatureLevelSet
    | ReplicaMoved
    | PartitionsChanged
    | BrokerChanged
    | BrokerUnregistered
    | PartitionsVanished
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(value: bytes) -> Record:
    """Raises ValueError when the bytes are no record of this version of mqd (msgspec names the
    field).
    """
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a metadata record that this version of mqd knows: {error}") from error
