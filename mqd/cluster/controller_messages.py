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


class Command(msgspec.Struct, tag=True, frozen=True):
    """To one worker: do this to a partition you own. Answered by CommandDone."""

    command_id: int
    kind: str  # "delete_records"
    slot: int
    offset: int


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


class AllocateProducerIds(msgspec.Struct, tag=True, frozen=True):
    """A block of producer ids, on disk before it is answered; never given twice."""

    count: int


Change = CreateTopic | DeleteTopic | AddPartitions | AlterConfig | DeleteRecords | AllocateProducerIds


class Answer(msgspec.Struct, tag=True, frozen=True):
    request_id: int
    error: int  # Kafka error code
    message: str | None = None
    topic: TopicImage | None = None  # CreateTopic (also when validate_only), AddPartitions
    offset: int = -1  # DeleteRecords: new log start. AllocateProducerIds: first id of the block
    count: int = 0


ToController = Subscribe | Applied | CommandDone | Request
FromController = Image | TopicPut | TopicRemoved | BrokerConfigPut | GroupConfigPut | Command | Answer
