"""What the core of a transactional id is told, and what it answers.

`request` is the number under which the shell waits for the Reply. A partition is (topic name,
index). `client_version` is the transaction protocol that the request speaks: 2 where EndTxn 5,
Produce 12 and TxnOffsetCommit 5 are spoken (KIP-890 part 2), 0 below.
"""

import msgspec

from mqd.coordinator.actions import Effect

Partition = tuple[str, int]

NEED_PRODUCER_ID = -2  # in place of an error code: the same again, with `spare_producer_id`
VERSION_2 = 2


class InitProducerId(msgspec.Struct, frozen=True):
    """KIP-98; with the expected producer id and epoch it is a producer that recovers (KIP-360).
    Answer: Identity.
    """

    request: int
    timeout_ms: int
    expected_producer_id: int = -1
    expected_producer_epoch: int = -1
    spare_producer_id: int = -1


class AddPartitions(msgspec.Struct, frozen=True):
    """AddPartitionsToTxn, AddOffsetsToTxn, and the first Produce or TxnOffsetCommit of client
    version 2. Answer: an error code for all of them.
    """

    request: int
    producer_id: int
    producer_epoch: int
    partitions: tuple[Partition, ...]
    client_version: int = 0


class VerifyPartitions(msgspec.Struct, frozen=True):
    """Whether they were added (KIP-890 part 1). Answer: a tuple of error codes; INVALID_TXN_STATE
    for a partition that was not.
    """

    request: int
    producer_id: int
    producer_epoch: int
    partitions: tuple[Partition, ...]


class EndTransaction(msgspec.Struct, frozen=True):
    """EndTxn. Answer: Identity, with which the next transaction goes on."""

    request: int
    producer_id: int
    producer_epoch: int
    committed: bool
    client_version: int = 0
    spare_producer_id: int = -1


class AbortByAdministrator(msgspec.Struct, frozen=True):
    """Aborts the ongoing transaction of that producer, and fences it. Answer: an error code, when
    the markers are written.
    """

    request: int
    producer_id: int


class MarkersWritten(msgspec.Struct, frozen=True):
    """All markers of the WriteMarkers with that number are below their high watermarks (or their
    partitions are gone).
    """

    attempt: int


class Enlist(msgspec.Struct, frozen=True):
    """Joint transactions only (joint.py): a child producer for the transaction of this batch and
    run, which begins with the first one. With a producer id and epoch: that child says that it
    lives. Answer: JointAnswer, with NEED_PRODUCER_ID as for InitProducerId.
    """

    request: int
    batch_id: int
    run_id: str
    timeout_ms: int
    producer_id: int = -1
    producer_epoch: int = -1
    spare_producer_id: int = -1


class EndJoint(msgspec.Struct, frozen=True):
    """Ends the joint transaction of this batch and run: committed, of the winners alone (producer
    id, epoch). Without a run: an administrator aborts what is under way. Answer: JointAnswer.
    """

    request: int
    batch_id: int
    run_id: str
    committed: bool
    winners: tuple[tuple[int, int], ...] = ()


class Describe(msgspec.Struct, frozen=True):
    """Answer: Description, or None when there is no such transactional id."""

    request: int


Event = (
    InitProducerId
    | AddPartitions
    | VerifyPartitions
    | EndTransaction
    | AbortByAdministrator
    | MarkersWritten
    | Enlist
    | EndJoint
    | Describe
)


class Identity(msgspec.Struct, frozen=True):
    error: int
    producer_id: int = -1
    producer_epoch: int = -1


class JointAnswer(msgspec.Struct, frozen=True):
    """`committed_batch_id`: the last batch that was committed, -1 = none. An Enlist whose batch is
    not above it gets no producer id: there is nothing left to write.
    """

    error: int
    producer_id: int = -1
    producer_epoch: int = -1
    committed_batch_id: int = -1


class Description(msgspec.Struct, frozen=True):
    transactional_id: str
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    start_ms: int  # -1: none has begun
    partitions: tuple[Partition, ...]


class WriteMarkers(Effect, frozen=True):
    """To be carried out until it is done; then MarkersWritten with `attempt`. Writing one twice
    does no harm: a partition in which the producer has no transaction takes it without effect.
    `is_bumped`: the epoch is above the one that the transaction's records have, and the next
    transaction's will have it: a partition that knows it already has got the marker, and refuses to
    take it again (KIP-890).
    """

    partitions: tuple[Partition, ...]
    producer_id: int
    producer_epoch: int
    committed: bool
    attempt: int
    is_bumped: bool = False
