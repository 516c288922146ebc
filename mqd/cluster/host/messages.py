"""What the controller says to the acceptor and the workers of its host, over `run/controller.sock`
(stream; 4-byte big-endian length, then msgpack).

Subscribers get the whole metadata image first, then every change in order; each answers Applied
when the change is in force (a worker: when its reactor serves the partitions, or follows their
leaders). A change is acknowledged to its requester after it is on disk and every subscribed worker
has applied it: whoever was told that a topic exists can produce to it.
"""

import msgspec

# -- the metadata image ----------------------------------------------------------------------------


class PartitionImage(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    # in the control segment; assigned by the controller at run time, not part of the log. -1: this
    # host has no replica (or no slot for it yet)
    slot: int
    owner: int  # worker index; OWNER_NONE without a usable replica here
    log_dir: int  # index in log.dirs
    leader: int  # node id, -1 = none
    leader_epoch: int
    replicas: list[int]  # node ids, the preferred leader first; during a reassignment: target and current ones
    in_sync_replicas: list[int]
    partition_epoch: int = 0
    adding: list[int] = []  # replicas that a reassignment brings (KIP-455)
    removing: list[int] = []  # replicas that it takes away once the others are in sync
    eligible: list[int] = []  # eligible leader replicas (KIP-966); none while enough are in sync
    last_known_eligible: list[int] = []
    recovering: bool = False  # its leader was chosen uncleanly and has not yet said that it is in order
    retiring: int = 0  # RETIRE_* of mqd.cluster.metadata.records
    redirect: int = -1  # partition that takes what producers send here


class TopicImage(msgspec.Struct, frozen=True):
    name: str
    topic_id: bytes  # 16 bytes
    partitions: list[PartitionImage]
    config: dict[str, str]  # only what was set on the topic; broker defaults are merged by mqd.base.topic_config
    internal: bool = False
    # of the topic; its last partitions may not be told yet (they wait for slots). -1 = not said
    partition_count: int = -1
    first_leader_epoch: int = 0  # as in TopicState; 0 = none of its partitions was ever retired and is gone


class BrokerImage(msgspec.Struct, frozen=True):
    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int  # of its registration
    fenced: bool = False
    in_controlled_shutdown: bool = False  # leads nothing any more
    draining: bool = False
    inter_broker_host: str = ""  # where other hosts' workers and acceptors connect; "" = nowhere
    inter_broker_port: int = 0
    worker_count: int = 0  # owner_of() of its partitions
    # keeper's generation that is registered: a host whose own one is not there yet has not reached
    # its registration in the log (R10)
    incarnation: int = 0
    directory_id: str = ""  # of its metadata directory: another one is another host, whatever its node id says


class ClientQuota(msgspec.Struct, frozen=True):
    entity: tuple[tuple[str, str | None], ...]  # (type, name), name None = the default of that type
    quotas: dict[str, float]


# -- controller to subscriber ----------------------------------------------------------------------


class Image(msgspec.Struct, tag=True, frozen=True):
    version: int
    cluster_id: str
    controller_id: int
    brokers: list[BrokerImage]
    topics: list[TopicImage]
    broker_config: dict[str, str]  # set at run time (IncrementalAlterConfigs on the broker), in force on this broker
    broker_default_config: dict[str, str] = {}  # the part of it that was set for all brokers (resource name "")
    # the newest: a worker that was down when they were removed deletes what it still has of them
    removed_topic_ids: list[bytes] = []
    group_configs: dict[str, dict[str, str]] = {}  # of consumer groups that have one of their own
    client_quotas: list[ClientQuota] = []
    features: dict[str, int] = {}  # levels that were set; mqd.cluster.metadata.features.levels() adds the defaults
    node_id: int = -1  # this host
    withheld: list[str] = []  # as in SettingsPut


class TopicPut(msgspec.Struct, tag=True, frozen=True):
    """Created, more partitions, or new configuration: the whole new state of one topic."""

    version: int
    topic: TopicImage


class PartitionsPut(msgspec.Struct, tag=True, frozen=True):
    """The new state of some partitions of a topic that the receiver knows; the topic itself and its
    other partitions are as they were.
    """

    version: int
    topic_id: bytes
    partitions: list[PartitionImage]


class TopicRemoved(msgspec.Struct, tag=True, frozen=True):
    version: int
    name: str
    topic_id: bytes
    slots: list[int]


class BrokerConfigPut(msgspec.Struct, tag=True, frozen=True):
    version: int
    config: dict[str, str]
    default_config: dict[str, str] = {}


class GroupConfigPut(msgspec.Struct, tag=True, frozen=True):
    """To the acceptor alone: the whole configuration of one consumer group. The version is the one
    in force: nothing that workers know has changed.
    """

    version: int
    group_id: str
    config: dict[str, str]


class SettingsPut(msgspec.Struct, tag=True, frozen=True):
    """Quotas, features, what is not told: each whole, None = as it was. `withheld` to the acceptor
    alone, and with the version in force.
    """

    version: int
    client_quotas: list[ClientQuota] | None = None
    features: dict[str, int] | None = None
    # topics that exist and are not told, or not with all their partitions: those wait for slots of
    # this host
    withheld: list[str] | None = None


class BrokersPut(msgspec.Struct, tag=True, frozen=True):
    """All registered brokers, fenced ones too, and who is the active controller (-1 = not known).
    The version is the one in force when only the controller changed.
    """

    version: int
    brokers: list[BrokerImage]
    controller_id: int = -1


class Several(msgspec.Struct, tag=True, frozen=True):
    """News of one version that belong together: taken in order, answered by one Applied."""

    version: int
    parts: list["TopicPut | PartitionsPut | TopicRemoved | BrokersPut | BrokerConfigPut | SettingsPut"]


class InSyncAnswer(msgspec.Struct, tag=True, frozen=True):
    """To the worker that proposed: what became of ProposeInSync (mqd_replica_answered). `error` 0:
    committed; the TopicPut with the new partition epoch is on its way or was sent before. Otherwise
    Kafka's code.
    """

    topic_id: bytes
    index: int
    leader_epoch: int  # as proposed
    sequence: int  # as proposed
    error: int


class Command(msgspec.Struct, tag=True, frozen=True):
    """To one worker: do this to a partition you own. Answered by CommandDone."""

    command_id: int
    kind: str  # "delete_records" | "move_replica"
    slot: int
    offset: int  # move_replica: index in log.dirs; answered when the move has begun


# -- subscriber to controller ----------------------------------------------------------------------


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    role: str  # "acceptor" | "worker"
    index: int
    generation: int


class Applied(msgspec.Struct, tag=True, frozen=True):
    version: int
    failures: dict[int, str]  # slot -> why it is not served


class CommandDone(msgspec.Struct, tag=True, frozen=True):
    command_id: int
    error: int  # Kafka error code
    offset: int
    message: str = ""


class MoveCompleted(msgspec.Struct, tag=True, frozen=True):
    """From a worker: the partition's files lie whole and flushed in another log directory, nobody
    writes to the old ones. It serves the new ones when the TopicPut (or Image) that follows says
    so; until then neither. Said again after every reconnection.
    """

    topic_id: bytes
    index: int
    log_dir: int


class FullDirectories(msgspec.Struct, tag=True, frozen=True):
    """From a worker: the log directories that it writes nothing to until there is space again; all
    of them, each time. Said after every subscription and whenever it changes.
    """

    worker: int
    log_dirs: list[int]  # indexes in log.dirs


class PartitionEmptied(msgspec.Struct, tag=True, frozen=True):
    """From the worker that leads it: a retiring partition has no record any more. Said again until
    it is hidden. In the epoch in which it is hidden the same says that nobody has written to it for
    the grace (partition.retire.grace.ms): said every second while that is so.
    """

    topic_id: bytes
    index: int
    leader_epoch: int


class ProposeInSync(msgspec.Struct, tag=True, frozen=True):
    """From the worker that leads the partition: this set is to be the in-sync one (AlterPartition,
    KIP-497). Before this was sent, the worker counts both the committed and the proposed set (R5).
    Answered by InSyncAnswer, or not; the worker sends it again with the same sequence, at most one
    is under way for a partition.
    """

    topic_id: bytes
    index: int
    leader_epoch: int
    partition_epoch: int  # compare-and-set
    in_sync: list[tuple[int, int]]  # (node id, broker epoch it fetched with); the leader itself with its own
    sequence: int  # rises with each new proposal for the partition in this leader epoch (R6b)
    recovered: bool = False  # the leader has done what an unclean election asks of it


class Request(msgspec.Struct, tag=True, frozen=True):
    """From the acceptor: a change that a client asked for."""

    request_id: int
    change: "Change"
    validate_only: bool = False


class CreateTopic(msgspec.Struct, tag=True, frozen=True):
    name: str
    partition_count: int  # -1 = num.partitions
    replication_factor: int  # -1 = default.replication.factor
    assignments: dict[int, list[int]]  # empty = the controller places
    config: dict[str, str | None]


class DeleteTopic(msgspec.Struct, tag=True, frozen=True):
    name: str | None
    topic_id: bytes | None


class AddPartitions(msgspec.Struct, tag=True, frozen=True):
    name: str
    partition_count: int  # the new total
    assignments: list[list[int]] | None
    # of the topic, as it was known to whoever has asked that no transaction is open which wrote to
    # partitions that are gone
    first_leader_epoch: int = 0


class ConfigOperation(msgspec.Struct, frozen=True):
    name: str
    operation: str  # set | delete | append | subtract
    value: str | None


class AlterConfig(msgspec.Struct, tag=True, frozen=True):
    resource_type: int  # Kafka's: 2 topic, 4 broker, 32 group
    resource_name: str
    operations: list[ConfigOperation]
    replace: bool  # AlterConfigs: forget what is not named


class DeleteRecords(msgspec.Struct, tag=True, frozen=True):
    name: str
    partition: int
    offset: int  # -1 = high watermark


class MoveReplica(msgspec.Struct, tag=True, frozen=True):
    """AlterReplicaLogDirs: begin to move a partition of this host to another of its log
    directories.
    """

    name: str
    partition: int
    log_dir: int  # index in log.dirs


class QuotaOperation(msgspec.Struct, frozen=True):
    key: str
    value: float | None  # None = remove


class AlterClientQuota(msgspec.Struct, tag=True, frozen=True):
    """One entity of AlterClientQuotas (KIP-546)."""

    entity: list[tuple[str, str | None]]
    operations: list[QuotaOperation]


class FeatureUpdate(msgspec.Struct, frozen=True):
    name: str
    level: int
    upgrade_type: int  # Kafka's: 1 upgrade, 2 safe downgrade, 3 unsafe downgrade


class UpdateFeatures(msgspec.Struct, tag=True, frozen=True):
    """All of them or none (KIP-584, version 2 of the request)."""

    updates: list[FeatureUpdate]


class AllocateProducerIds(msgspec.Struct, tag=True, frozen=True):
    """A block of producer ids, on disk before it is answered; never given twice."""

    count: int


class PartitionReassignment(msgspec.Struct, frozen=True):
    name: str
    partition: int
    replicas: list[int] | None  # the target; None = cancel what is under way


class AlterReassignments(msgspec.Struct, tag=True, frozen=True):
    """AlterPartitionReassignments (KIP-455): each partition by itself; one result for each, in this
    order.
    """

    partitions: list[PartitionReassignment]
    allow_replication_factor_change: bool = True


class ElectLeaders(msgspec.Struct, tag=True, frozen=True):
    """KIP-460. One result for each partition; with None (all that need it) for those that were
    tried.
    """

    election_type: int  # Kafka's: 0 preferred, 1 unclean
    partitions: list[tuple[str, int]] | None


class UnregisterBroker(msgspec.Struct, tag=True, frozen=True):
    """KIP-185: refused while it is alive."""

    node_id: int


class DrainBroker(msgspec.Struct, tag=True, frozen=True):
    """Moves all replicas of a host elsewhere, and places none there; `cancel`: it takes part again."""

    node_id: int
    cancel: bool = False


class BalanceReplicas(msgspec.Struct, tag=True, frozen=True):
    """Spreads replicas and leaderships evenly over the hosts, by reassignments; with validate_only
    the answer's results say which.
    """

    topics: list[str] | None = None


class RetirePartitions(msgspec.Struct, tag=True, frozen=True):
    """The partitions from `partition_count` on take no new records and vanish when retention has
    emptied them.
    """

    name: str
    partition_count: int  # that remain
    # also when the number does not divide the present one: keys of remaining partitions move
    allow_moved_keys: bool = False


class ReleaseRetired(msgspec.Struct, tag=True, frozen=True):
    """Consumers have read what is in the sealed partitions: producers need not wait any longer. By
    itself it happens after a while (ControllerOptions.retire_barrier_ms).
    """

    name: str


class AddVoter(msgspec.Struct, tag=True, frozen=True):
    """AddRaftVoter (KIP-853)."""

    node_id: int
    directory_id: bytes  # 16 bytes; empty = the one it is registered with


class RemoveVoter(msgspec.Struct, tag=True, frozen=True):
    node_id: int
    directory_id: bytes


class DescribeQuorum(msgspec.Struct, tag=True, frozen=True):
    """No change: the active controller's view of the quorum, in the answer's `quorum`."""


Change = (
    CreateTopic
    | DeleteTopic
    | AddPartitions
    | AlterConfig
    | DeleteRecords
    | AllocateProducerIds
    | MoveReplica
    | AlterClientQuota
    | UpdateFeatures
    | AlterReassignments
    | ElectLeaders
    | UnregisterBroker
    | DrainBroker
    | BalanceReplicas
    | RetirePartitions
    | ReleaseRetired
    | AddVoter
    | RemoveVoter
    | DescribeQuorum
)


class PartitionResult(msgspec.Struct, frozen=True):
    """What became of one partition of a change that names many."""

    name: str
    partition: int
    error: int = 0
    message: str | None = None
    replicas: list[int] = []  # BalanceReplicas: the target


class QuorumReplica(msgspec.Struct, frozen=True):
    node_id: int
    directory_id: bytes  # 16 bytes
    log_end_offset: int
    last_fetch_ms: int = -1  # wall clock, -1 = not known
    last_caught_up_ms: int = -1
    host: str = ""  # its controller listener
    port: int = 0


class QuorumImage(msgspec.Struct, frozen=True):
    leader_id: int
    leader_epoch: int
    high_watermark: int
    voters: list[QuorumReplica]
    observers: list[QuorumReplica]
    fetch_timeout_ms: int = 0  # controller.quorum.fetch.timeout.ms of the leader; 0 = not said


class Answer(msgspec.Struct, tag=True, frozen=True):
    request_id: int
    error: int  # Kafka error code
    message: str | None = None
    topic: TopicImage | None = None  # CreateTopic (also when validate_only), AddPartitions
    offset: int = -1  # DeleteRecords: new log start. AllocateProducerIds: first id of the block
    count: int = 0
    results: list[PartitionResult] = []  # AlterReassignments, ElectLeaders, BalanceReplicas
    quorum: QuorumImage | None = None  # DescribeQuorum


ToController = (
    Subscribe | Applied | CommandDone | MoveCompleted | FullDirectories | PartitionEmptied | ProposeInSync | Request
)
FromController = (
    Image
    | TopicPut
    | PartitionsPut
    | TopicRemoved
    | BrokersPut
    | BrokerConfigPut
    | GroupConfigPut
    | SettingsPut
    | Several
    | InSyncAnswer
    | Command
    | Answer
)
