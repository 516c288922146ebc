"""Records of the metadata log: one versioned struct per kind of change, encoded as msgpack in the
record's value.

A record is a decision, not a request: applying the same records in the same order gives the same
MetadataState, on every host and in every later version of mqd. Therefore the meaning of a struct
never changes. A new meaning gets a new class with the next number in its tag, and records of the old
class can still be read.
"""

import msgspec

from mqd.security.acl import AclBinding


# gc=False: there are hundreds of thousands of these objects, and they are never part of a cycle
class PartitionState(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    index: int
    replicas: tuple[int, ...]  # node ids, the preferred leader first
    # id of the log directory of each replica; "" = the host has not chosen it yet
    directories: tuple[str, ...]
    in_sync_replicas: tuple[int, ...]
    leader: int  # node id, -1 = none
    leader_epoch: int
    partition_epoch: int = 0  # +1 on every change to this partition (compare-and-set, KIP-497)
    # the current reassignment (KIP-455): replicas that it adds, already in `replicas`
    adding_replicas: tuple[int, ...] = ()
    removing_replicas: tuple[int, ...] = ()  # still in `replicas`, until the reassignment is done
    # replicas that left the in-sync set when it fell below min.insync.replicas, but have all
    # committed records (KIP-966)
    eligible_leader_replicas: tuple[int, ...] = ()
    # replicas that were eligible until an unclean restart, in which they may have lost records; an
    # operator may still elect one
    last_known_eligible: tuple[int, ...] = ()
    # its leader was elected uncleanly and has not reported its recovery yet
    recovering: bool = False
    # RETIRE_*: the phase, if this partition is being removed (`redirect` >= 0)
    retiring: int = 0
    redirect: int = -1  # index of the partition that takes the records that producers send here
    # mqd itself started the current reassignment, to replace the replica on this lost or drained node
    replacing: int = -1
    # replicas in removing_replicas that this reassignment itself had added, before its target
    # changed: the partition did not have them originally; stored under the field's former name
    superseded_replicas: tuple[int, ...] = msgspec.field(default=(), name="astray_replicas")


RETIRE_UNSEALED, RETIRE_SEALED, RETIRE_REDIRECTED, RETIRE_HIDDEN = 0, 1, 2, 3
"""Phases of a partition that is being retired. 0: it is not sealed yet (or not being retired). 1: it
refuses new records with a retriable error. 2: it redirects them to `redirect`. 3: it is also hidden
from Metadata."""


class TopicState(msgspec.Struct, frozen=True, gc=False):
    name: str
    topic_id: bytes  # 16 bytes
    partitions: tuple[PartitionState, ...]  # by index
    config: dict[str, str]  # only what was set on the topic; never mutated
    # The first leader epoch of an added partition. It is above all epochs of the topic's removed
    # partitions, because clients, groups and files may still hold those epochs.
    first_leader_epoch: int = 0


class BrokerState(msgspec.Struct, frozen=True):
    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int  # offset of its registration in this log
    incarnation: int  # the keeper's generation: changes only when the whole host is restarted
    directories: dict[str, str]  # directory id -> last known path
    fenced: bool = False  # neither leads nor is in any in-sync set; hidden from clients
    in_controlled_shutdown: bool = False  # is not made a leader, nor added to an in-sync set
    draining: bool = False  # its replicas move to other brokers, and it gets no new ones
    inter_broker_host: str = ""  # for data between hosts; "" = none
    inter_broker_port: int = 0
    controller_host: str = ""  # for the quorum and heartbeats
    controller_port: int = 0
    worker_count: int = 0
    # the id of the metadata directory: a different id means a different host, even with the same
    # node id
    directory_id: str = ""
    features: dict[str, tuple[int, int]] = {}  # supported levels, first and last
    # flush.on.ack for topics that do not set it: only flushed records are acknowledged (R9)
    flush_on_ack: bool = False
    # by listener name; if empty, clients of every listener get `host` and `port`
    endpoints: dict[str, tuple[str, int]] = {}


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
    """The process that serves these partitions of one topic on their leader was replaced: the leader
    stays the same, in a new epoch.
    """

    topic_id: bytes
    partitions: tuple[int, ...]


class TopicRemoved(msgspec.Struct, frozen=True, tag="topic_removed/1"):
    topic_id: bytes


class TopicConfigured(msgspec.Struct, frozen=True, tag="topic_configured/1"):
    """The topic's whole configuration, not only what has changed."""

    topic_id: bytes
    config: dict[str, str]


class BrokerConfigured(msgspec.Struct, frozen=True, tag="broker_configured/1"):
    """The whole dynamic configuration of one broker (its id, such as "0"), or of all brokers
    ("").
    """

    resource_name: str
    config: dict[str, str]


class GroupConfigured(msgspec.Struct, frozen=True, tag="group_configured/1"):
    """The whole configuration of one consumer group."""

    group_id: str
    config: dict[str, str]


class ClientMetricsConfigured(msgspec.Struct, frozen=True, tag="client_metrics_configured/1"):
    """The whole configuration of one client metrics subscription."""

    name: str
    config: dict[str, str]


class ProducerIdsAllocated(msgspec.Struct, frozen=True, tag="producer_ids_allocated/1"):
    next_producer_id: int


# (type, name), ordered by type; name None = the default of that type
Entity = tuple[tuple[str, str | None], ...]


class ClientQuotaSet(msgspec.Struct, frozen=True, tag="client_quota_set/1"):
    """All quotas of one entity (KIP-546), not only the changed ones; empty = the entity no longer has any."""

    entity: Entity
    quotas: dict[str, float]


class FeatureLevelSet(msgspec.Struct, frozen=True, tag="feature_level_set/1"):
    """The level of one feature for the cluster from here on (KIP-584); 0 = switched off."""

    name: str
    level: int


class ReplicaMoved(msgspec.Struct, frozen=True, tag="replica_moved/1"):
    """The replica of one broker was moved to another of its log directories (KIP-113), where its files
    were complete and flushed before this record.
    """

    topic_id: bytes
    index: int
    node_id: int
    directory: str


class PartitionChange(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A change to one partition; None = unchanged. The partition epoch rises by one. The leader epoch
    rises by one if `raises_leader_epoch` is set: for every change of leader, and when the leader must
    discard its state about the followers. It is stored under the field's former name.
    """

    index: int
    raises_leader_epoch: bool = msgspec.field(default=False, name="new_epoch")
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
    superseded_replicas: tuple[int, ...] | None = msgspec.field(default=None, name="astray_replicas")


class PartitionsChanged(msgspec.Struct, frozen=True, tag="partitions_changed/1"):
    topic_id: bytes
    changes: tuple[PartitionChange, ...]  # applied in this order; a partition can have several


class BrokerChanged(msgspec.Struct, frozen=True, tag="broker_changed/1"):
    """A change to a registered broker; None = unchanged. The changes to its partitions are in the
    same batch.
    """

    node_id: int
    epoch: int  # epoch of the registration that this record changes
    fenced: bool | None = None
    in_controlled_shutdown: bool | None = None
    draining: bool | None = None


class BrokerUnregistered(msgspec.Struct, frozen=True, tag="broker_unregistered/1"):
    """The registration is removed; the broker has no replicas."""

    node_id: int


class RetiredPartitionsRemoved(msgspec.Struct, frozen=True, tag="partitions_vanished/1"):
    """The retired partitions of the topic are removed; `partition_count` remain."""

    topic_id: bytes
    partition_count: int


class AclCreated(msgspec.Struct, frozen=True, tag="acl_created/1"):
    """A new rule."""

    acl_id: bytes  # 16 bytes
    binding: AclBinding


class AclRemoved(msgspec.Struct, frozen=True, tag="acl_removed/1"):
    acl_id: bytes


class ScramCredential(msgspec.Struct, frozen=True):
    """The verifier of a user's password for one mechanism (KIP-554)."""

    user: str
    mechanism: int  # Kafka's: 1 SCRAM-SHA-256, 2 SCRAM-SHA-512
    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes


class ScramCredentialSet(msgspec.Struct, frozen=True, tag="scram_credential_set/1"):
    credential: ScramCredential


class ScramCredentialRemoved(msgspec.Struct, frozen=True, tag="scram_credential_removed/1"):
    user: str
    mechanism: int


class DelegationToken(msgspec.Struct, frozen=True):
    """A token with which a client authenticates as `owner` (KIP-48). Its password, the HMAC of
    `token_id`, is not here: each host computes it from delegation.token.secret.key. Times: wall
    clock.
    """

    token_id: str
    owner: str  # principals: "User:alice"
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    renewable_until_ms: int = msgspec.field(name="max_ms")  # stored under its former name
    expires_ms: int


class DelegationTokenSet(msgspec.Struct, frozen=True, tag="delegation_token_set/1"):
    """A new token, or a new expiry of an old one."""

    token: DelegationToken


class DelegationTokenRemoved(msgspec.Struct, frozen=True, tag="delegation_token_removed/1"):
    token_id: str


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
    | ClientMetricsConfigured
    | ProducerIdsAllocated
    | ClientQuotaSet
    | FeatureLevelSet
    | ReplicaMoved
    | PartitionsChanged
    | BrokerChanged
    | BrokerUnregistered
    | RetiredPartitionsRemoved
    | AclCreated
    | AclRemoved
    | ScramCredentialSet
    | ScramCredentialRemoved
    | DelegationTokenSet
    | DelegationTokenRemoved
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def encode_record(record: Record) -> bytes:
    return _encoder.encode(record)


def decode_record(value: bytes) -> Record:
    """Raises ValueError if the bytes are not a record of this version of mqd (msgspec names the
    field).
    """
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a metadata record that this version of mqd knows: {error}") from error
