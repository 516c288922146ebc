"""Messages between a broker and the active controller: registration, heartbeats, in-sync sets,
forwarded changes, deaths. Part of the union in peer_messages.

Every message is best effort and may come late, twice or never. Each one therefore carries the
epochs by which its receiver refuses stale ones: the broker's (`broker_epoch`, the offset of its
registration record) and, in messages to the broker, the controller's. Times are milliseconds of the
sender's CLOCK_BOOTTIME; the receiver only echoes them.

Responses identify their request by (incarnation | sent_ms | sequence | request_id); a response
without a matching request is dropped.
"""

import msgspec

from mqd.cluster.host import messages


class DirectoryReport(msgspec.Struct, frozen=True):
    """One entry of log.dirs of the sender."""

    directory_id: str
    path: str
    free_bytes: int
    usable: bool
    # it held partitions and is empty now: data that others relied on is lost (R9)
    fresh: bool = False


# -- registration and sessions ---------------------------------------------------------------------


class RegisterBroker(msgspec.Struct, tag=True, frozen=True):
    """Sent until it is answered. The same (node id, directory id, incarnation) registers only once,
    however often it is sent.
    """

    node_id: int
    directory_id: str  # of its metadata directory
    incarnation: int  # of its keeper: a new one means that all processes of the host were restarted
    host: str
    port: int
    rack: str | None
    inter_broker_host: str
    inter_broker_port: int
    controller_host: str
    controller_port: int
    worker_count: int
    directories: list[DirectoryReport]
    clean_epoch: int  # broker epoch in its clean-shutdown marker; -1 = no clean shutdown (R9)
    features: dict[str, tuple[int, int]]
    flush_on_ack: bool = False  # the host's own default for topics
    # by listener name, where its clients reach this host; the first listener's is `host`, `port`
    endpoints: dict[str, tuple[str, int]] = {}


class RegisterBrokerResponse(msgspec.Struct, tag="RegisterBrokerAnswer", frozen=True):
    controller_epoch: int
    node_id: int
    incarnation: int
    # 0; NOT_CONTROLLER; DUPLICATE_BROKER_REGISTRATION (its predecessor's session is still valid:
    # try again later); other codes are final
    error: int
    message: str = ""
    broker_epoch: int = -1


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    node_id: int
    broker_epoch: int
    sent_ms: int  # echoed
    metadata_version: int  # the sender's workers have applied everything up to here
    want_shutdown: bool = False
    directories: list[DirectoryReport] = []  # when they have changed, and periodically


class BrokerHeartbeatResponse(msgspec.Struct, tag="HeartbeatAnswer", frozen=True):
    controller_epoch: int
    node_id: int
    broker_epoch: int
    sent_ms: int
    # lease duration from sent_ms on, during which it may act as a leader; 0 = no lease
    lease_ms: int
    fenced: bool
    should_shutdown: bool = False  # every broker knows that it leads nothing any more
    error: int = 0  # NOT_CONTROLLER | STALE_BROKER_EPOCH: register again | BROKER_ID_NOT_REGISTERED


class ProofOfDeath(msgspec.Struct, tag=True, frozen=True):
    """The sender's keeper saw all broker processes of its own host end (pidfd): no process acts for
    this broker epoch any more. Only the same host can prove it. The proof is void after a heartbeat
    that was sent later, because the host may be back and hold a lease. For the same reason it is
    void for a controller other than that of `controller_epoch`, unless `led` says that this
    controller ended with the broker.
    """

    node_id: int
    broker_epoch: int
    controller_epoch: int = -1
    sent_ms: int = -1  # as in Heartbeat
    led: bool = False  # the active controller of that epoch was one of the processes that ended


class WorkersDied(msgspec.Struct, tag=True, frozen=True):
    """The processes that led these partitions died. Each partition needs a new leader epoch before
    a process there serves it again. Repeated until the sender sees the new epochs.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int, int]]  # topic id, index, the leader epoch that died
    # partitions that these processes followed: topic id, index, partition epoch in which in sync
    followed: list[tuple[bytes, int, int]] = []


# -- in-sync sets ----------------------------------------------------------------------------------


class InSyncProposal(msgspec.Struct, frozen=True):
    topic_id: bytes
    index: int
    leader_epoch: int
    partition_epoch: int
    # Number of this leader's proposal for the partition. It rises with every proposal and never
    # falls within a broker epoch (R6b).
    sequence: int
    in_sync: list[tuple[int, int]]  # (node id, broker epoch as seen in its fetches)
    recovered: bool = False  # the leader has done what an unclean election requires


class AlterPartition(msgspec.Struct, tag=True, frozen=True):
    """KIP-497 with R6b: at most one in flight per partition; a repetition has the same sequence and
    the same contents.
    """

    controller_epoch: int  # of the intended controller; any other one refuses it
    node_id: int
    broker_epoch: int
    proposals: list[InSyncProposal]


class InSyncResult(msgspec.Struct, frozen=True):
    """`error` 0: committed. Otherwise the fields carry the committed state instead (-1 if the
    partition is unknown).
    """

    topic_id: bytes
    index: int
    sequence: int
    # INVALID_UPDATE_VERSION, FENCED_LEADER_EPOCH, NOT_LEADER..., INELIGIBLE_REPLICA,
    # UNKNOWN_TOPIC_ID, OPERATION_NOT_ATTEMPTED = older than one already handled
    error: int
    leader: int = -1
    leader_epoch: int = -1
    partition_epoch: int = -1
    in_sync_replicas: list[int] = []
    proposed_in: int = -1  # leader epoch of the proposal: sequences restart with each


class AlterPartitionResponse(msgspec.Struct, tag="AlterPartitionAnswer", frozen=True):
    controller_epoch: int
    node_id: int
    broker_epoch: int
    error: int  # NOT_CONTROLLER | STALE_BROKER_EPOCH | 0
    results: list[InSyncResult]


# -- changes ---------------------------------------------------------------------------------------


class ChangeForwarded(msgspec.Struct, tag=True, frozen=True):
    """A request of a client of the sender's host. Never repeated, because a change must not be made
    twice; without a response the client gets REQUEST_TIMED_OUT.
    """

    node_id: int
    broker_epoch: int
    request_id: int  # of the sender's controller process
    incarnation: int  # of that process (Started.process in events.py): responses to a predecessor are dropped
    request: messages.Request


class ChangeResponse(msgspec.Struct, tag="ChangeAnswered", frozen=True):
    """The response depends on the log up to `version`: the requesting host answers its client once
    its own workers have applied that.
    """

    controller_epoch: int
    node_id: int
    request_id: int
    incarnation: int
    version: int
    response: messages.Response = msgspec.field(name="answer")
    topic_name: str | None = None  # the topic to show with it


class ReplicaPlaced(msgspec.Struct, tag=True, frozen=True):
    """The sender's replica is in this log directory now (KIP-113, KIP-858). Repeated until the
    sender sees it in the metadata.
    """

    node_id: int
    broker_epoch: int
    topic_id: bytes
    index: int
    directory: str  # its id


class ReplicasFailed(msgspec.Struct, tag=True, frozen=True):
    """The sender cannot serve its replicas of these partitions: their disk failed, or their data is
    damaged. Other replicas lead them if there are any. Repeated until they do. `full`: the replicas
    are complete but cannot take more writes at present. Others lead them and do not wait for this
    one, where enough are in sync without it.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int]]
    full: list[tuple[bytes, int]] = []


class PartitionsEmptied(msgspec.Struct, tag=True, frozen=True):
    """Retired partitions that the sender leads and whose log start has reached the log end.
    Repeated until they are hidden. For hidden ones: no client has written to them for the grace
    period.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int, int]]  # topic id, index, leader epoch


ToActiveController = (
    RegisterBroker
    | Heartbeat
    | ProofOfDeath
    | WorkersDied
    | AlterPartition
    | ChangeForwarded
    | ReplicaPlaced
    | ReplicasFailed
    | PartitionsEmptied
)
FromActiveController = RegisterBrokerResponse | BrokerHeartbeatResponse | AlterPartitionResponse | ChangeResponse
BrokerMessage = ToActiveController | FromActiveController
