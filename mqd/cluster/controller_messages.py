"""What the controller says to the acceptor and the workers of its host, over `run/controller.sock` (stream; 4-byte big-endian length, then msgpack).

Subscribers get the whole metadata image first, then every change in order; each answers Applied when the change is in force (a worker: when its reactor
serves the partitions). A change is acknowledged to its requester after it is on disk and every subscribed worker has applied it: whoever was told that
a topic exists can produce to it.
"""

import msgspec

# -- the metadata image ------------------------------------------------------------------------------------------------------


class PartitionImage(msgspec.Struct, frozen=True):
    index: int
    slot: int  # in the control segment; assigned by the controller at run time, not part of the log
    owner: int  # worker index
    log_dir: int  # index in log.dirs
    leader: int  # node id
    leader_epoch: int
    replicas: list[int]
    in_sync_replicas: list[int]


class TopicImage(msgspec.Struct, frozen=True):
    name: str
    topic_id: bytes  # 16 bytes
    partitions: list[PartitionImage]
    config: dict[str, str]  # only what was set on the topic; broker defaults are merged by mqd.base.topic_config
    internal: bool = False


class BrokerImage(msgspec.Struct, frozen=True):
    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int


class ClientQuota(msgspec.Struct, frozen=True):
    entity: tuple[tuple[str, str | None], ...]  # (type, name), name None = the default of that type
    quotas: dict[str, float]


# -- controller to subscriber ---------------------------------------------------------------------------------------------


class Image(msgspec.Struct, tag=True, frozen=True):
    version: int
    cluster_id: str
    controller_id: int
    brokers: list[BrokerImage]
    topics: list[TopicImage]
    broker_config: dict[str, str]  # set at run time (IncrementalAlterConfigs on the broker), in force on this broker
    broker_default_config: dict[str, str] = {}  # the part of it that was set for all brokers (resource name "")
    removed_topic_ids: list[bytes] = []  # the newest: a worker that was down when they were removed deletes what it still has of them
    group_configs: dict[str, dict[str, str]] = {}  # of consumer groups that have one of their own
    client_quotas: list[ClientQuota] = []
    features: dict[str, int] = {}  # levels that were set; mqd.cluster.features.levels() adds the defaults


class TopicPut(msgspec.Struct, tag=True, frozen=True):
    """Created, more partitions, or new configuration: the whole new state of one topic."""

    version: int
    topic: TopicImage


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
    """To the acceptor alone: the whole configuration of one consumer group. The version is the one in force: nothing that workers know has changed."""

    version: int
    group_id: str
    config: dict[str, str]


class SettingsPut(msgspec.Struct, tag=True, frozen=True):
    """Quotas, features: each whole, None = as it was."""

    version: int
    client_quotas: list[ClientQuota] | None = None
    features: dict[str, int] | None = None


class Command(msgspec.Struct, tag=True, frozen=True):
    """To one worker: do this to a partition you own. Answered by CommandDone."""

    command_id: int
    kind: str  # "delete_records" | "move_replica"
    slot: int
    offset: int  # move_replica: index in log.dirs; answered when the move has begun


# -- subscriber to controller ---------------------------------------------------------------------------------------------


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
    """From a worker: the partition's files lie whole and flushed in another log directory, nobody writes to the old ones. It serves the new ones when the
    TopicPut (or Image) that follows says so; until then neither. Said again after every reconnection."""

    topic_id: bytes
    index: int
    log_dir: int


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
    """AlterReplicaLogDirs: begin to move a partition of this host to another of its log directories."""

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


Change = CreateTopic | DeleteTopic | AddPartitions | AlterConfig | DeleteRecords | AllocateProducerIds | MoveReplica | AlterClientQuota | UpdateFeatures


class Answer(msgspec.Struct, tag=True, frozen=True):
    request_id: int
    error: int  # Kafka error code
    message: str | None = None
    topic: TopicImage | None = None  # CreateTopic (also when validate_only), AddPartitions
    offset: int = -1  # DeleteRecords: new log start. AllocateProducerIds: first id of the block
    count: int = 0


ToController = Subscribe | Applied | CommandDone | MoveCompleted | Request
FromController = Image | TopicPut | TopicRemoved | BrokerConfigPut | GroupConfigPut | SettingsPut | Command | Answer
