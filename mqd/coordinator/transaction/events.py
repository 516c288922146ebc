"""The events of a transactional id's state machine, and its responses.

`request` is not the request itself, but the number by which the runtime matches the Reply. A
partition is (topic name, index). `client_version` is the version of the transaction protocol that
the client uses: 2 for EndTxn 5, Produce 12, TxnOffsetCommit 5 and later versions (KIP-890 part 2), 0
for earlier versions of these requests.
"""

import msgspec

from mqd.coordinator.actions import Effect

Partition = tuple[str, int]

NEED_PRODUCER_ID = -2  # in place of an error code: send the event again with `spare_producer_id`
TRANSACTIONS_V2 = 2  # the client version of KIP-890 part 2


class InitProducerId(msgspec.Struct, frozen=True):
    """KIP-98. A producer that recovers from an error states the producer id and epoch that it
    expects to be current (KIP-360). Response: Identity.
    """

    request: int
    timeout_ms: int
    expected_producer_id: int = -1
    expected_producer_epoch: int = -1
    spare_producer_id: int = -1


class AddPartitions(msgspec.Struct, frozen=True):
    """AddPartitionsToTxn, AddOffsetsToTxn, and (client version 2) the first Produce or
    TxnOffsetCommit to a partition. Response: one error code for all partitions.
    """

    request: int
    producer_id: int
    producer_epoch: int
    partitions: tuple[Partition, ...]
    client_version: int = 0


class VerifyPartitions(msgspec.Struct, frozen=True):
    """Checks that the partitions were added (KIP-890 part 1). Response: a tuple of error codes;
    INVALID_TXN_STATE for a partition that was not added.
    """

    request: int
    producer_id: int
    producer_epoch: int
    partitions: tuple[Partition, ...]


class EndTransaction(msgspec.Struct, frozen=True):
    """EndTxn. Response: the Identity for the next transaction."""

    request: int
    producer_id: int
    producer_epoch: int
    committed: bool
    client_version: int = 0
    spare_producer_id: int = -1


class AbortByAdministrator(msgspec.Struct, frozen=True):
    """Aborts the ongoing transaction of that producer, and fences the producer. Response: an error
    code, sent when the markers have been written.
    """

    request: int
    producer_id: int


class MarkersWritten(msgspec.Struct, frozen=True):
    """All markers of the WriteMarkers with that attempt number are below the high watermarks of
    their partitions (or the partitions were deleted).
    """

    attempt: int


class Enlist(msgspec.Struct, frozen=True):
    """Joint transactions only (joint.py): requests a producer id for a new child, that is, for
    one attempt of a task of this Spark batch and run. The first such request begins the
    transaction. A request with a producer id and epoch is a heartbeat of that child. Response:
    JointResponse; its error may be NEED_PRODUCER_ID.
    """

    request: int
    batch_id: int
    run_id: str
    timeout_ms: int
    producer_id: int = -1
    producer_epoch: int = -1
    spare_producer_id: int = -1


class EndJoint(msgspec.Struct, frozen=True):
    """Ends the joint transaction of this batch and run. A commit covers only the winners (producer
    id, epoch). An empty `run_id` means that an administrator requested an abort of the current
    transaction. Response: JointResponse.
    """

    request: int
    batch_id: int
    run_id: str
    committed: bool
    winners: tuple[tuple[int, int], ...] = ()


class Describe(msgspec.Struct, frozen=True):
    """Response: Description, or None if there is no such transactional id."""

    request: int


Request = (
    InitProducerId
    | AddPartitions
    | VerifyPartitions
    | EndTransaction
    | AbortByAdministrator
    | Enlist
    | EndJoint
    | Describe
)
Event = Request | MarkersWritten


class Identity(msgspec.Struct, frozen=True):
    error: int
    producer_id: int = -1
    producer_epoch: int = -1


class JointResponse(msgspec.Struct, frozen=True):
    """`committed_batch_id`: the last committed batch, -1 = none. An Enlist for that batch
    or an earlier one gets no producer id: there is nothing left to write.
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
    start_ms: int  # -1: no transaction has begun
    partitions: tuple[Partition, ...]


class WriteMarkers(Effect, frozen=True):
    """Retried until all markers are written; then MarkersWritten is posted with `attempt`. Writing
    a marker twice is harmless: a partition without an open transaction of the producer accepts it
    without effect. `is_bumped`: the epoch is one above that of the transaction's records, and the
    next transaction will use it. If a partition has already seen this epoch, it has the marker, and
    refuses to write it again (KIP-890).
    """

    partitions: tuple[Partition, ...]
    producer_id: int
    producer_epoch: int
    committed: bool
    attempt: int
    is_bumped: bool = False
