"""What a broker says to the active controller and back: registration, heartbeats, in-sync sets,
forwarded changes, deaths. Part of the union of peer_messages.

Every message is best effort and may come late, twice or never; so each carries the epochs by which
its receiver refuses what is stale: the broker's (`broker_epoch`, the offset of its registration
record) and, downwards, the controller's. Times are milliseconds of the sender's CLOCK_BOOTTIME and
are only ever echoed to it.

Answers name the request they belong to by (incarnation | sent_ms | sequence | request_id); an
answer that matches nothing is dropped.
"""

import msgspec

from mqd.cluster.host import messages


class DirectoryReport(msgspec.Struct, frozen=True):
    """One entry of log.dirs of the sender."""

    directory_id: str
    path: str
    free_bytes: int
    usable: bool
    fresh: bool = False  # it held partitions, and holds none any more: what was counted on is gone (R9)


# -- a broker's life -------------------------------------------------------------------------------


class RegisterBroker(msgspec.Struct, tag=True, frozen=True):
    """Sent until it is answered. The same (node id, directory id, incarnation) registers once,
    however often it asks.
    """

    node_id: int
    directory_id: str  # of its metadata directory
    incarnation: int  # of its keeper: another one means that all its processes were restarted
    host: str
    port: int
    rack: str | None
    inter_broker_host: str
    inter_broker_port: int
    controller_host: str
    controller_port: int
    worker_count: int
    directories: list[DirectoryReport]
    clean_epoch: int  # broker epoch in its clean-shutdown marker; -1 = it did not end cleanly (R9)
    features: dict[str, tuple[int, int]]
    flush_on_ack: bool = False  # the host's own default for topics


class RegisterBrokerAnswer(msgspec.Struct, tag=True, frozen=True):
    controller_epoch: int
    node_id: int
    incarnation: int
    # 0; NOT_CONTROLLER; DUPLICATE_BROKER_REGISTRATION (its predecessor's session still lives: again
    # later); others are final
    error: int
    message: str = ""
    broker_epoch: int = -1


class Heartbeat(msgspec.Struct, tag=True, frozen=True):
    node_id: int
    broker_epoch: int
    sent_ms: int  # echoed
    metadata_version: int  # everything up to here is in force on the sender's workers
    want_shutdown: bool = False
    directories: list[DirectoryReport] = []  # when they have changed, and every now and then


class HeartbeatAnswer(msgspec.Struct, tag=True, frozen=True):
    controller_epoch: int
    node_id: int
    broker_epoch: int
    sent_ms: int
    lease_ms: int  # from sent_ms on: so long it may act as a leader; 0 = not at all
    fenced: bool
    should_shutdown: bool = False  # everybody knows that it leads nothing any more
    error: int = 0  # NOT_CONTROLLER | STALE_BROKER_EPOCH: register again | BROKER_ID_NOT_REGISTERED


class ProofOfDeath(msgspec.Struct, tag=True, frozen=True):
    """The sender's keeper saw all broker processes of its own host end (pidfd): nobody there acts
    for this broker epoch any more. Only the same host can prove it. It proves nothing after a
    heartbeat that was sent later: the host may be back and hold a lease; so nor to another
    controller than that of `controller_epoch`, who may have granted it, unless that one is `led`
    there: then it has ended with the others.
    """

    node_id: int
    broker_epoch: int
    controller_epoch: int = -1
    sent_ms: int = -1  # as in Heartbeat
    led: bool = False  # the active controller of that epoch was one of the processes that have ended


class WorkersDied(msgspec.Struct, tag=True, frozen=True):
    """The processes that led these partitions died: each needs a new leader epoch before anyone
    there serves it. Repeated until the sender sees the new epochs.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int, int]]  # topic id, index, the leader epoch that died
    # of the same processes: topic id, index, partition epoch in which they were in sync
    followed: list[tuple[bytes, int, int]] = []


# -- in-sync sets ----------------------------------------------------------------------------------


class InSyncProposal(msgspec.Struct, frozen=True):
    topic_id: bytes
    index: int
    leader_epoch: int
    partition_epoch: int
    # of this leader's proposals for the partition; rises with every proposal, and never within a
    # broker epoch falls (R6b)
    sequence: int
    in_sync: list[tuple[int, int]]  # (node id, broker epoch as seen in its fetches)
    recovered: bool = False  # the leader has done what an unclean election asks of it


class AlterPartition(msgspec.Struct, tag=True, frozen=True):
    """KIP-497, with R6b: one in flight of each partition; a repetition has the same sequence and
    the same contents.
    """

    controller_epoch: int  # of the controller that it is meant for; another one refuses it
    node_id: int
    broker_epoch: int
    proposals: list[InSyncProposal]


class InSyncResult(msgspec.Struct, frozen=True):
    """`error` 0: committed. Otherwise what is true instead (fields as committed; -1 where the
    partition is unknown).
    """

    topic_id: bytes
    index: int
    sequence: int
    # INVALID_UPDATE_VERSION, FENCED_LEADER_EPOCH, NOT_LEADER..., INELIGIBLE_REPLICA,
    # UNKNOWN_TOPIC_ID, OPERATION_NOT_ATTEMPTED = older than what was handled
    error: int
    leader: int = -1
    leader_epoch: int = -1
    partition_epoch: int = -1
    in_sync_replicas: list[int] = []
    proposed_in: int = -1  # leader epoch of the proposal: sequences begin anew with each


class AlterPartitionAnswer(msgspec.Struct, tag=True, frozen=True):
    controller_epoch: int
    node_id: int
    broker_epoch: int
    error: int  # NOT_CONTROLLER | STALE_BROKER_EPOCH | 0
    results: list[InSyncResult]


# -- changes ---------------------------------------------------------------------------------------


class ChangeForwarded(msgspec.Struct, tag=True, frozen=True):
    """A client of the sender's host asked for it. Not repeated: a change may not be made twice;
    when no answer comes the client is told REQUEST_TIMED_OUT.
    """

    node_id: int
    broker_epoch: int
    request_id: int  # of the sender's controller process
    incarnation: int  # of that process (broker_core.Started.process): answers to a predecessor are dropped
    request: messages.Request


class ChangeAnswered(msgspec.Struct, tag=True, frozen=True):
    """The answer rests on the log up to `version`: the asking host answers its client when its own
    workers have that in force.
    """

    controller_epoch: int
    node_id: int
    request_id: int
    incarnation: int
    version: int
    answer: messages.Answer
    topic_name: str | None = None  # the topic to show with it


class ReplicaPlaced(msgspec.Struct, tag=True, frozen=True):
    """The sender's replica lies in this log directory now (KIP-113, KIP-858). Repeated until the
    sender sees it in the metadata.
    """

    node_id: int
    broker_epoch: int
    topic_id: bytes
    index: int
    directory: str  # its id


class ReplicasFailed(msgspec.Struct, tag=True, frozen=True):
    """The sender cannot serve its replicas of these partitions: their disk failed, or what is on it
    is not sound. Others lead them, if there is anybody. Repeated until they do. `full`: it has all
    of them and can write nothing more to them at present. Others lead them, and nobody waits for
    it, where enough are in sync without it.
    """

    node_id: int
    broker_epoch: int
    partitions: list[tuple[bytes, int]]
    full: list[tuple[bytes, int]] = []


class PartitionsEmptied(msgspec.Struct, tag=True, frozen=True):
    """Retired partitions that the sender leads and whose log start has reached the log end.
    Repeated until they are hidden; of those that are, that nobody has written to them for the
    grace.
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
FromActiveController = RegisterBrokerAnswer | HeartbeatAnswer | AlterPartitionAnswer | ChangeAnswered
BrokerMessage = ToActiveController | FromActiveController
