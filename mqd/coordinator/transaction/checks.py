"""The check that a partition's owner requests, with a CHECK descriptor, before it begins a
producer's transaction in the partition: is the partition in the transaction, or must it be added?

For Produce 12 and TxnOffsetCommit 5 (transactions of version 2), the check adds the partition. With
older versions, the producer must add it first, by AddPartitionsToTxn or AddOffsetsToTxn, and the
check verifies that it did (KIP-890). The responses are error codes for the producer, chosen so that
clients react correctly. A transient failure is NOT_ENOUGH_REPLICAS, which every client retries
without refreshing its metadata. A fenced producer gets INVALID_PRODUCER_EPOCH, as from the
partition itself.
"""

from collections.abc import Callable
from typing import Protocol

from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.transaction.events import TRANSACTIONS_V2, AddPartitions, Partition, VerifyPartitions
from mqd.protocol.errors import ErrorCode

FIRST_PRODUCE_VERSION_THAT_ADDS = 12
FIRST_PRODUCE_VERSION_WITH_ABORTABLE = 11  # its clients know TRANSACTION_ABORTABLE
REQUEST_TIMEOUT_S = 10.0

_RETRIABLE = int(ErrorCode.NOT_ENOUGH_REPLICAS)
_TRANSLATED = {
    int(ErrorCode.PRODUCER_FENCED): int(ErrorCode.INVALID_PRODUCER_EPOCH),
    int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS): _RETRIABLE,
    int(ErrorCode.COORDINATOR_NOT_AVAILABLE): _RETRIABLE,
    int(ErrorCode.NOT_COORDINATOR): _RETRIABLE,
}


class Requester(Protocol):
    """The part of runtime.Coordinator that is needed here."""

    async def request(
        self, name: str, make_event: Callable[[int], object], timeout_s: float | None = None
    ) -> object: ...


async def add(
    transactions: Requester, transactional_id: str, producer_id: int, epoch: int, partitions: tuple[Partition, ...]
) -> int:
    """Adds the partitions to a transaction of version 2. Returns the coordinator's error code, one
    for all partitions.
    """
    try:
        response = await transactions.request(
            transactional_id,
            lambda number: AddPartitions(number, producer_id, epoch, partitions, TRANSACTIONS_V2),
            REQUEST_TIMEOUT_S,
        )
    except CoordinatorError as error:
        return error.error_code
    assert isinstance(response, int)
    return response


async def verify(
    transactions: Requester, transactional_id: str, producer_id: int, epoch: int, partitions: tuple[Partition, ...]
) -> tuple[int, ...]:
    """Returns one error code per partition, from the coordinator."""
    try:
        response = await transactions.request(
            transactional_id, lambda number: VerifyPartitions(number, producer_id, epoch, partitions), REQUEST_TIMEOUT_S
        )
    except CoordinatorError as error:
        return (error.error_code,) * len(partitions)
    assert isinstance(response, tuple)
    return response


async def check_produce(
    transactions: Requester,
    transactional_id: str,
    producer_id: int,
    epoch: int,
    version: int,
    partitions: list[tuple[str, int] | None],
    is_verification_enabled: bool = True,
) -> list[int]:
    """Returns an error code for each partition of a Produce of that version, as its producer
    expects it. A partition is None if its topic id is unknown. If `is_verification_enabled` is
    False (transaction.partition.verification.enable), partitions that need only verification are
    accepted without it; partitions that must be added are still added.
    """
    if not transactional_id:
        return [int(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)] * len(partitions)
    known_partitions = tuple(partition for partition in partitions if partition is not None)
    if version >= FIRST_PRODUCE_VERSION_THAT_ADDS:
        error = (
            translate(await add(transactions, transactional_id, producer_id, epoch, known_partitions), version)
            if known_partitions
            else 0
        )
        errors = dict.fromkeys(known_partitions, error)
    else:
        codes = (
            await verify(transactions, transactional_id, producer_id, epoch, known_partitions)
            if known_partitions and is_verification_enabled
            else (0,) * len(known_partitions)
        )
        errors = {partition: translate(code, version) for partition, code in zip(known_partitions, codes, strict=True)}
    return [int(ErrorCode.UNKNOWN_TOPIC_ID) if partition is None else errors[partition] for partition in partitions]


def translate(error: int, version: int) -> int:
    """Translates a coordinator's error code for a Produce of that version."""
    if error == ErrorCode.CONCURRENT_TRANSACTIONS:
        return error if version >= FIRST_PRODUCE_VERSION_THAT_ADDS else _RETRIABLE
    if error == ErrorCode.INVALID_TXN_STATE and version >= FIRST_PRODUCE_VERSION_WITH_ABORTABLE:
        return int(ErrorCode.TRANSACTION_ABORTABLE)
    return _TRANSLATED.get(error, error)
