"""Messages between the controller and the acceptor and workers of its host, over
`run/controller.sock` (stream; 4-byte big-endian length, then msgpack).

Subscribers get the whole metadata image first, then all changes in order. A subscriber sends Applied
when it has applied a change (a worker: when its reactor serves the partitions or follows their
leaders). A change is acknowledged to its requester when it is on disk and all subscribed workers have
applied it, so that a client that knows of a topic can produce to it.
"""

import msgspec

from mqd.cluster.host.results import PartitionResult as PartitionResult
from mqd.cluster.host.results import QuorumImage as QuorumImage
from mqd.cluster.host.results import QuorumReplica as QuorumReplica
from mqd.cluster.host.results import UserResult as UserResult
from mqd.cluster.metadata.records import DelegationToken, ScramCredential
from mqd.security.acl import AclBinding, AclFilter

# -- the metadata image ----------------------------------------------------------------------------


class PartitionImage(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    # in the control segment; assigned by the controller at run time, not logged. -1: this host has no
    # replica, or no slot for it yet
    slot: int
    owner: int  # worker index; OWNER_NONE if there is no usable replica here
    log_dir: int  # index in log.dirs
    leader: int  # node id, -1 = none
    leader_epoch: int
    # node ids, the preferred leader first; during a reassignment: the target, then the leaving replicas
    replicas: list[int]
    in_sync_replicas: list[int]
    partition_epoch: int = 0
    adding: list[int] = []  # replicas that a reassignment adds (KIP-455)
    removing: list[int] = []  # replicas that a reassignment removes once the others are in sync
    eligible: list[int] = []  # eligible leader replicas (KIP-966); none while enough are in sync
    last_known_eligible: list[int] = []
    # its leader was elected uncleanly and has not yet reported that it has recovered
    recovering: bool = False
    retiring: int = 0  # RETIRE_* of mqd.cluster.metadata.records
    redirect: int = -1  # partition that takes the records that producers send here


class TopicImage(msgspec.Struct, frozen=True):
    name: str
    topic_id: bytes  # 16 bytes
    partitions: list[PartitionImage]
    config: dict[str, str]  # only what was set on the topic; topic_effective() in mqd.base.config adds the broker's
    internal: bool = False
    # The topic's number of partitions; `partitions` can lack the last partitions, which wait for slots. -1 =
    # not given.
    partition_count: int = -1
    # as in TopicState; 0 = none of its partitions was ever removed
    first_leader_epoch: int = 0


class BrokerImage(msgspec.Struct, frozen=True):
    node_id: int
    host: str
    port: int
    rack: str | None
    epoch: int  # epoch of its registration
    fenced: bool = False
    in_controlled_shutdown: bool = False  # it no longer leads any partition
    draining: bool = False
    inter_broker_host: str = ""  # address for other hosts' workers and acceptors; "" = none
    inter_broker_port: int = 0
    worker_count: int = 0  # determines the owners of its partitions (owner_of)
    # The registered generation of its keeper. While this host's own entry differs from its keeper's
    # generation, this host has not received its current registration yet (R10).
    incarnation: int = 0
    # id of its metadata directory: another id is another host, even with the same node id
    directory_id: str = ""
    endpoints: dict[str, tuple[str, int]] = {}  # by listener name; empty: not known


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
    # effective dynamic configuration of this broker (IncrementalAlterConfigs on the broker)
    broker_config: dict[str, str]
    # the part of it that is set for all brokers (resource name "")
    broker_default_config: dict[str, str] = {}
    # the topics that were removed last: a worker that was down when they were removed deletes their files
    removed_topic_ids: list[bytes] = []
    group_configs: dict[str, dict[str, str]] = {}  # groups with a configuration of their own
    client_quotas: list[ClientQuota] = []
    # explicit levels; mqd.cluster.metadata.features.levels() adds the defaults
    features: dict[str, int] = {}
    node_id: int = -1  # this host
    withheld: list[str] = []  # as in SettingsPut
    acls: list[tuple[bytes, AclBinding]] = []  # id and rule
    scram_credentials: list[ScramCredential] = []  # only to the acceptor
    client_metrics: dict[str, dict[str, str]] = {}  # only to the acceptor: subscription -> configuration
    delegation_tokens: list[DelegationToken] = []  # only to the acceptor
    broker_own_config: dict[str, str] = {}  # the part of broker_config that is set for this broker


class TopicPut(msgspec.Struct, tag=True, frozen=True):
    """The complete state of one topic, which was created or extended or has a new configuration."""

    version: int
    topic: TopicImage


class PartitionsPut(msgspec.Struct, tag=True, frozen=True):
    """The new state of some partitions of a topic that the receiver knows. The topic itself and its
    other partitions are unchanged.
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
    """As in Image: broker_config, its part for all brokers, and its part for this broker. Both parts may
    set the same property.
    """

    version: int
    config: dict[str, str]
    default_config: dict[str, str] = {}
    own_config: dict[str, str] = {}


class ClientMetricsPut(msgspec.Struct, tag=True, frozen=True):
    """Like GroupConfigPut, for one client metrics subscription (KIP-714)."""

    version: int
    name: str
    config: dict[str, str]


class GroupConfigPut(msgspec.Struct, tag=True, frozen=True):
    """Only to the acceptor: the whole configuration of one consumer group. The version is unchanged,
    because workers do not get this change.
    """

    version: int
    group_id: str
    config: dict[str, str]


class SettingsPut(msgspec.Struct, tag=True, frozen=True):
    """Quotas, features, withheld topics: each complete, or None = unchanged. `withheld` goes only to the
    acceptor, with an unchanged version.
    """

    version: int
    client_quotas: list[ClientQuota] | None = None
    features: dict[str, int] | None = None
    # existing topics that subscribers have not received yet, or have received without the last
    # partitions, because partitions wait for slots on this host
    withheld: list[str] | None = None


class AclsPut(msgspec.Struct, tag=True, frozen=True):
    """New rules, and the ids of removed rules."""

    version: int
    put: list[tuple[bytes, AclBinding]]
    removed: list[bytes]


class CredentialsPut(msgspec.Struct, tag=True, frozen=True):
    """Only to the acceptor: changed credentials, and (user, mechanism) of removed credentials. The version is
    unchanged, because workers do not get this change.
    """

    version: int
    put: list[ScramCredential]
    removed: list[tuple[str, int]]


class TokensPut(msgspec.Struct, tag=True, frozen=True):
    """Like CredentialsPut, for delegation tokens; `removed` has their ids."""

    version: int
    put: list[DelegationToken]
    removed: list[str]


class BrokersPut(msgspec.Struct, tag=True, frozen=True):
    """All registered brokers, including fenced ones, and the active controller (-1 = not known). The
    version is unchanged if only the controller changed.
    """

    version: int
    brokers: list[BrokerImage]
    controller_id: int = -1


class MessageList(msgspec.Struct, tag=True, frozen=True):
    """The changes of one version: applied in order, with one Applied for all."""

    version: int
    parts: list["Part"]


class InSyncResponse(msgspec.Struct, tag="InSyncAnswer", frozen=True):
    """To the worker that sent ProposeInSync: the result (mqd_replica_on_proposal_response). `error`:
    Kafka's error code; 0 = committed. In that case a PartitionsPut or TopicPut with the new partition
    epoch is sent before or after this response.
    """

    topic_id: bytes
    index: int
    leader_epoch: int  # as proposed
    sequence: int  # as proposed
    error: int


class Command(msgspec.Struct, tag=True, frozen=True):
    """To one worker: an operation on a partition that it owns. CommandDone is the response."""

    command_id: int
    kind: str  # "delete_records" | "move_replica"
    slot: int
    # delete_records: the new log start, -1 = the high watermark; move_replica: the index in log.dirs,
    # and the response comes when the move has begun
    offset: int


# -- subscriber to controller ----------------------------------------------------------------------


class Subscribe(msgspec.Struct, tag=True, frozen=True):
    role: str  # "acceptor" | "worker"
    index: int
    generation: int


class Applied(msgspec.Struct, tag=True, frozen=True):
    version: int
    failures: dict[int, str]  # slot -> reason why it is not served


class CommandDone(msgspec.Struct, tag=True, frozen=True):
    command_id: int
    error: int  # Kafka error code
    offset: int
    message: str = ""


class MoveCompleted(msgspec.Struct, tag=True, frozen=True):
    """From a worker: the partition's files are complete and flushed in another log directory, and the old
    files are no longer written. The worker serves the new files once a PartitionsPut, TopicPut or
    Image has the new directory, and does not serve the partition until then. Repeated after every
    reconnection.
    """

    topic_id: bytes
    index: int
    log_dir: int


class FullDirectories(msgspec.Struct, tag=True, frozen=True):
    """From a worker: the complete set of log directories to which it does not write until there is space
    again. Sent after every subscription and after each change.
    """

    worker: int
    log_dirs: list[int]  # indexes in log.dirs


class PartitionEmptied(msgspec.Struct, tag=True, frozen=True):
    """From the worker that leads it: a retired partition no longer has any records. Repeated until
    it is hidden. While it is hidden, the same message means that no client has written to it for the grace
    period (partition.retire.grace.ms); then it is repeated every second.
    """

    topic_id: bytes
    index: int
    leader_epoch: int


class ProposeInSync(msgspec.Struct, tag=True, frozen=True):
    """From the worker that leads the partition: the proposed in-sync set (AlterPartition, KIP-497).
    Before it sends this, the worker begins to use the union of the committed and the proposed set
    (R5). There may be no response; then the worker repeats it with the same sequence. At most one
    proposal is in flight per partition.
    """

    topic_id: bytes
    index: int
    leader_epoch: int
    partition_epoch: int  # compare-and-set
    # (node id, broker epoch with which it fetched); the leader's entry has its own epoch
    in_sync: list[tuple[int, int]]
    sequence: int  # rises with each new proposal for the partition in this leader epoch (R6b)
    recovered: bool = False  # the leader has completed the recovery after an unclean election


class Request(msgspec.Struct, tag=True, frozen=True):
    """From the acceptor: a client's change."""

    request_id: int
    change: "Change"
    validate_only: bool = False


class CreateTopic(msgspec.Struct, tag=True, frozen=True):
    name: str
    partition_count: int  # -1 = num.partitions
    replication_factor: int  # -1 = default.replication.factor
    assignments: dict[int, list[int]]  # empty = the controller chooses
    config: dict[str, str | None]


class DeleteTopic(msgspec.Struct, tag=True, frozen=True):
    name: str | None
    topic_id: bytes | None


class AddPartitions(msgspec.Struct, tag=True, frozen=True):
    name: str
    partition_count: int  # the new total
    assignments: list[list[int]] | None
    # as it was when the requester checked that no open transaction has written to removed partitions
    first_leader_epoch: int = 0


class ConfigOperation(msgspec.Struct, frozen=True):
    name: str
    operation: str  # set | delete | append | subtract
    value: str | None


class AlterConfig(msgspec.Struct, tag=True, frozen=True):
    resource_type: int  # Kafka's: 2 topic, 4 broker, 16 client metrics, 32 group
    resource_name: str
    operations: list[ConfigOperation]
    replace: bool  # AlterConfigs: reset all configurations that are not listed


class DeleteRecords(msgspec.Struct, tag=True, frozen=True):
    name: str
    partition: int
    offset: int  # -1 = high watermark


class MoveReplica(msgspec.Struct, tag=True, frozen=True):
    """AlterReplicaLogDirs: start moving a partition of this host to another of its log directories."""

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
    """All updates or none (KIP-584, version 2 of the request)."""

    updates: list[FeatureUpdate]


class AllocateProducerIds(msgspec.Struct, tag=True, frozen=True):
    """Allocates a block of producer ids. The allocation is on disk before the response, so no id is
    assigned twice.
    """

    count: int


class PartitionReassignment(msgspec.Struct, frozen=True):
    name: str
    partition: int
    replicas: list[int] | None  # the target; None = cancel the current reassignment


class AlterReassignments(msgspec.Struct, tag=True, frozen=True):
    """AlterPartitionReassignments (KIP-455). Partitions are independent; there is one result for each, in
    this order.
    """

    partitions: list[PartitionReassignment]
    allow_replication_factor_change: bool = True


class ElectLeaders(msgspec.Struct, tag=True, frozen=True):
    """KIP-460. There is one result for each partition or, with None (all partitions that need an election),
    for each partition for which an election was tried.
    """

    election_type: int  # Kafka's: 0 preferred, 1 unclean
    partitions: list[tuple[str, int]] | None


class UnregisterBroker(msgspec.Struct, tag=True, frozen=True):
    """Removes a broker's registration (KIP-185); refused while the broker is alive."""

    node_id: int


class DrainBroker(msgspec.Struct, tag=True, frozen=True):
    """Moves all replicas of a host to other hosts and places none on it; `cancel`: the host takes
    replicas again.
    """

    node_id: int
    cancel: bool = False


class BalanceReplicas(msgspec.Struct, tag=True, frozen=True):
    """Spreads replicas and leaderships evenly across the hosts by reassignments; with validate_only, only
    returns these in the results.
    """

    topics: list[str] | None = None


class RetirePartitions(msgspec.Struct, tag=True, frozen=True):
    """Retires all partitions except the first `partition_count`: they take no new records, and are
    removed when retention has emptied them.
    """

    name: str
    partition_count: int  # the number that remains
    # allow a number that does not divide the current one, so that keys of remaining partitions move
    allow_moved_keys: bool = False


class ReleaseRetired(msgspec.Struct, tag=True, frozen=True):
    """Ends the seal of retired partitions, because consumers have read them. Happens automatically after
    ControllerOptions.retire_barrier_ms.
    """

    name: str


class CreateAcls(msgspec.Struct, tag=True, frozen=True):
    """Adds rules; existing rules are not changed."""

    bindings: list[AclBinding]


class DeleteAcls(msgspec.Struct, tag=True, frozen=True):
    """Removes rules. The response's `removed_acls` has the matching rules of each filter."""

    filters: list[AclFilter]


class AlterScramCredentials(msgspec.Struct, tag=True, frozen=True):
    """KIP-554. Users are independent; the response's `users` has one result for each."""

    removals: list[tuple[str, int]]  # user, mechanism
    settings: list[ScramCredential]
    decoy_secret: str = ""  # random; becomes the cluster's sasl.scram.decoy.secret if it has none yet


class CreateDelegationToken(msgspec.Struct, tag=True, frozen=True):
    """KIP-48."""

    token: DelegationToken


class SetTokenExpiry(msgspec.Struct, tag=True, frozen=True):
    """Renews or expires a delegation token. A refusal is in the response's `token_error`: like a success,
    it is sent when the sender's processes have applied the metadata on which it is based.
    """

    token_id: str  # "": unknown to the sender
    requester: str  # a principal
    now_ms: int  # wall clock of the sender
    period_ms: int  # from `now_ms` until the expiry; -1 = remove the token
    is_renewal: bool


class AddVoter(msgspec.Struct, tag=True, frozen=True):
    """AddRaftVoter (KIP-853)."""

    node_id: int
    directory_id: bytes  # 16 bytes; empty = the registered one


class RemoveVoter(msgspec.Struct, tag=True, frozen=True):
    node_id: int
    directory_id: bytes


class DescribeQuorum(msgspec.Struct, tag=True, frozen=True):
    """Not a change: the response's `quorum` has the active controller's view of the quorum."""


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
    | CreateAcls
    | DeleteAcls
    | AlterScramCredentials
    | CreateDelegationToken
    | SetTokenExpiry
)


class Response(msgspec.Struct, tag="Answer", frozen=True):
    request_id: int
    error: int  # Kafka error code
    message: str | None = None
    topic: TopicImage | None = None  # CreateTopic (also when validate_only), AddPartitions
    offset: int = -1  # DeleteRecords: new log start. AllocateProducerIds: first id of the block
    count: int = 0
    results: list[PartitionResult] = []  # AlterReassignments, ElectLeaders, BalanceReplicas
    quorum: QuorumImage | None = None  # DescribeQuorum
    removed_acls: list[list[AclBinding]] = []  # DeleteAcls
    users: list[UserResult] = []  # AlterScramCredentials
    expires_ms: int = -1  # SetTokenExpiry
    token_error: int = 0  # SetTokenExpiry


ToController = (
    Subscribe | Applied | CommandDone | MoveCompleted | FullDirectories | PartitionEmptied | ProposeInSync | Request
)
Part = TopicPut | PartitionsPut | TopicRemoved | BrokersPut | BrokerConfigPut | SettingsPut | AclsPut
FromController = (
    Image
    | TopicPut
    | PartitionsPut
    | TopicRemoved
    | BrokersPut
    | BrokerConfigPut
    | GroupConfigPut
    | ClientMetricsPut
    | SettingsPut
    | AclsPut
    | CredentialsPut
    | TokensPut
    | MessageList
    | InSyncResponse
    | Command
    | Response
)
