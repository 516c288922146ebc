"""Messages between a broker and the active controller: registration, heartbeats, in-sync sets,
forwarded changes, deaths. Part of the union in peer_messages.

Every message is best effort and may arrive late, twice or never. So each has epochs by which its
receiver refuses stale messages: the broker's (`broker_epoch`, the offset of its registration record)
and, in messages to the broker, the controller's. Times are milliseconds of the sender's
CLOCK_BOOTTIME; the receiver only echoes them.

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
    # it had partitions and is empty now: records on which other replicas relied are lost (R9)
    fresh: bool = False


# -- registration and sessions ---------------------------------------------------------------------


class RegisterBroker(msgspec.Struct, tag=True, frozen=True):
    """Repeated until there is a response. Each (node id, directory id, incarnation) is registered only
    once, even if the message arrives several times.
    """

    node_id: int
    directory_id: str  # id of its metadata directory
    incarnation: int  # incarnation of its keeper: changes when all processes of the host are restarted
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
    # listener name -> its address for clients; the first listener's is also in `host` and `port`
    endpoints: dict[str, tuple[str, int]] = {}


class RegisterBrokerResponse(msgspec.Struct, tag="RegisterBrokerAnswer", frozen=True):
    controller_epoch: int
    node_id: int
    incarnation: int
    # 0; NOT_CONTROLLER; DUPLICATE_BROKER_REGISTRATION (the session of another incarnation is still
    # valid: try again later); other codes are permanent
    error: int
    message: str = ""
    broker_epoch: int = -1


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    node_id: int
    broker_epoch: int
    sent_ms: int  # echoed
    metadata_version: int  # the version that the sender's workers have applied
    want_shutdown: bool = False
    directories: list[DirectoryReport] = []  # sent after changes, and periodically


class BrokerHeartbeatResponse(msgspec.Struct, tag="HeartbeatAnswer", frozen=True):
    controller_epoch: int
    node_id: int
    broker_epoch: int
    sent_ms: int
    # how long after sent_ms the broker may act as a leader; 0 = no lease
    lease_ms: int
    fenced: bool
    should_shutdown: bool = False  # all brokers know that it no longer leads any partition
    error: int = 0  # NOT_CONTROLLER; STALE_BROKER_EPOCH or BROKER_ID_NOT_REGISTERED: register again


class ProofOfDeath(msgspec.Struct, tag=True, frozen=True):
    """The sender's keeper has seen all broker processes of its host end (pidfd): no process acts for this
    broker epoch any longer. Only the same host can prove this. The proof is not valid after a heartbeat
    that was sent later, because the host may be back and have a lease. For the same reason only the
    controller of `controller_epoch` accepts the proof or, if `led` is set, the next controller.
    """

    node_id: int
    broker_epoch: int
    controller_epoch: int = -1
    sent_ms: int = -1  # as in Heartbeat
    led: bool = False  # the active controller of that epoch was one of the processes that ended


class WorkersDied(msgspec.Struct, tag=True, frozen=True):
    """The processes that led these partitions have died. Each partition needs a new leader epoch before
    another process of the host serves it. Repeated until the metadata has the new epochs.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int, int]]  # topic id, index, the leader epoch that has ended
    # partitions that these processes followed in sync: topic id, index, partition epoch
    followed: list[tuple[bytes, int, int]] = []


# -- in-sync sets ----------------------------------------------------------------------------------


class InSyncProposal(msgspec.Struct, frozen=True):
    topic_id: bytes
    index: int
    leader_epoch: int
    partition_epoch: int
    # number of this leader's proposal for the partition: rises with every proposal, and never falls
    # within a broker epoch (R6b)
    sequence: int
    in_sync: list[tuple[int, int]]  # (node id, broker epoch as seen in its fetches)
    recovered: bool = False  # the leader has completed the recovery after an unclean election


class AlterPartition(msgspec.Struct, tag=True, frozen=True):
    """KIP-497 with R6b: at most one proposal in flight per partition; a repeated proposal has the same
    sequence and the same contents.
    """

    controller_epoch: int  # epoch of the intended controller; other controllers refuse the message
    node_id: int
    broker_epoch: int
    proposals: list[InSyncProposal]


class InSyncResult(msgspec.Struct, frozen=True):
    """The result of one proposal, and the partition's state: the new one if `error` is 0 (committed),
    otherwise the unchanged committed one (-1 if the partition is unknown).
    """

    topic_id: bytes
    index: int
    sequence: int
    # INVALID_UPDATE_VERSION, FENCED_LEADER_EPOCH, NOT_LEADER..., INELIGIBLE_REPLICA,
    # UNKNOWN_TOPIC_ID, OPERATION_NOT_ATTEMPTED = older than a proposal already handled
    error: int
    leader: int = -1
    leader_epoch: int = -1
    partition_epoch: int = -1
    in_sync_replicas: list[int] = []
    proposed_in: int = -1  # leader epoch of the proposal: sequences restart in each epoch


class AlterPartitionResponse(msgspec.Struct, tag="AlterPartitionAnswer", frozen=True):
    controller_epoch: int
    node_id: int
    broker_epoch: int
    error: int  # NOT_CONTROLLER | STALE_BROKER_EPOCH | 0
    results: list[InSyncResult]


# -- changes ---------------------------------------------------------------------------------------


class ChangeForwarded(msgspec.Struct, tag=True, frozen=True):
    """A client's request to the sender's host. Never repeated, because the change could then be made twice;
    without a response the client gets REQUEST_TIMED_OUT.
    """

    node_id: int
    broker_epoch: int
    request_id: int  # number within the sender's controller process
    # number of that process (Started.process_number in events.py): responses to a predecessor are dropped
    incarnation: int
    request: messages.Request


class ChangeResponse(msgspec.Struct, tag="ChangeAnswered", frozen=True):
    """The response depends on the log up to `version`: the requesting host passes it to its client once
    its own workers have applied that version.
    """

    controller_epoch: int
    node_id: int
    request_id: int
    incarnation: int
    version: int
    response: messages.Response = msgspec.field(name="answer")
    topic_name: str | None = None  # the topic to return with the response


class ReplicaPlaced(msgspec.Struct, tag=True, frozen=True):
    """The sender's replica is in this log directory now (KIP-113, KIP-858). Repeated until the metadata
    shows it there.
    """

    node_id: int
    broker_epoch: int
    topic_id: bytes
    index: int
    directory: str  # its id


class ReplicasFailed(msgspec.Struct, tag=True, frozen=True):
    """The sender cannot serve its replicas of these partitions, because their disk failed or their data
    is damaged. Repeated until other replicas, if there are any, lead them. `full`: partitions whose
    replica on the sender's host is complete, but cannot take records now. If enough other replicas
    are in sync, one of them leads, and the leader does not wait for this replica.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int]]
    full: list[tuple[bytes, int]] = []


class PartitionsEmptied(msgspec.Struct, tag=True, frozen=True):
    """Retired partitions that the sender leads and that no longer have any records (repeated until they
    are hidden), or hidden partitions to which no client has written for the grace period.
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
