"""The checks that workers request before they write a batch (CHECK, native/server/check/check.c):
may these partitions be written in this transaction, and does every record of this batch have a key?

The transaction coordinator decides the first question. A batch whose codec differs from its topic's
compression.type is recompressed on a thread and returned. Workers check compressed batches
themselves, unless the codec's library is missing: then this process decompresses them, checks their
records in C, and lists those without a key (KIP-467). The batch stays in the worker's arena and is
lent to this process until the response; if the worker dies in the meantime, the result is discarded.

Bounds: THREADS checks at a time, each of at most DECOMPRESSED_BYTES_MAX; the number of waiting
checks is bounded by the workers' lending limit.
"""

import asyncio
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from mqd import native
from mqd.base import logging
from mqd.log import schedule_headers
from mqd.protocol.compression import GZIP, LZ4, compress, decompress
from mqd.protocol.crc32c import crc32c
from mqd.protocol.errors import ErrorCode, ProtocolError
from mqd.protocol.records import COMPRESSION_MASK, HEADER_BYTES, BatchHeader, decode_batch_header

# From this version on, Produce itself adds its partitions to the transaction (KIP-890).
FIRST_PRODUCE_VERSION_THAT_ADDS = 12
# Like Kafka's add.partitions.to.txn.retry.backoff.ms and .max.ms: the first batch after a commit
# arrives while the markers are still being written.
CONCURRENT_RETRY_S = 0.02
CONCURRENT_RETRY_MAX_S = 0.1
THREADS = 2
MESSAGE_BYTES_MAX = 190

_REFUSAL = struct.Struct("=IHH")  # struct mqd_check_refusal
# offsets in a record batch's header
_LENGTH_AT, _LENGTH_END, _CRC_AT, _ATTRIBUTES_AT = 8, 12, 17, 21
_LZ4_FLAGS_AT, _LZ4_INDEPENDENT = 4, 0x20  # in an LZ4 frame's header
log = logging.get("acceptor.checks")


class CheckResult(NamedTuple):
    """`error` applies to the whole request; `payload` as described for CHECKED in struct
    mqd_descriptor.
    """

    error: int
    payload: bytes = b""


class Compression(NamedTuple):
    """A topic's codec and compression level (KIP-390), in which its batches are stored."""

    codec: int
    level: int
    batch_bytes_max: int


class Transactions(Protocol):
    async def check(self, payload: bytes) -> list[int] | int:
        """Handles the payload of a CHECK. Returns an error code for each partition, or one code for
        all.
        """
        ...


class Checks:
    """`transactions` None: there is no coordinator, and every transactional batch is refused with a
    non-retriable error.
    """

    def __init__(self, transactions: Transactions | None = None) -> None:
        self.transactions = transactions
        self._threads = ThreadPoolExecutor(THREADS, "check")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # -- transactions ------------------------------------------------------------------------------

    async def check_transaction(self, payload: bytes, version: int) -> CheckResult:
        if self.transactions is None:
            return CheckResult(int(ErrorCode.INVALID_TXN_STATE))
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + CONCURRENT_RETRY_MAX_S
        while True:
            errors = await self.transactions.check(payload)
            is_concurrent = (
                errors == ErrorCode.CONCURRENT_TRANSACTIONS
                if isinstance(errors, int)
                else ErrorCode.CONCURRENT_TRANSACTIONS in errors
            )
            if not is_concurrent or version < FIRST_PRODUCE_VERSION_THAT_ADDS:
                break
            if loop.time() + CONCURRENT_RETRY_S > deadline_s:
                break
            await asyncio.sleep(CONCURRENT_RETRY_S)
        if isinstance(errors, int):  # one code for all is always an error
            return CheckResult(errors) if errors else CheckResult(int(ErrorCode.NOT_ENOUGH_REPLICAS))
        return CheckResult(0, struct.pack(f"={len(errors)}h", *errors))

    # -- records -----------------------------------------------------------------------------------

    async def check_batch(self, batch: memoryview | bytes, kind: int, target: Compression | None = None) -> CheckResult:
        """`batch`: one whole record batch with a valid checksum and header; its records are
        unchecked. `kind`: CHECK_RECORDS (each needs a key), CHECK_PARSE, or CHECK_SCHEDULES (the
        headers of each must say when it is due). With `target`, the result's payload is the batch in
        that codec.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, check_records, batch, kind, target)


def check_records(
    batch: memoryview | bytes, kind: int = native.CHECK_RECORDS, target: Compression | None = None
) -> CheckResult:
    """Blocks during the decompression and compression."""
    try:
        header = decode_batch_header(batch)
        codec, body = header.attributes & COMPRESSION_MASK, memoryview(batch)[HEADER_BYTES:]
        if codec == LZ4 and len(body) > _LZ4_FLAGS_AT and not body[_LZ4_FLAGS_AT] & _LZ4_INDEPENDENT:
            raise ProtocolError("the LZ4 blocks depend on each other, and Java consumers cannot read such batches")
        records = decompress(codec, body)
        unkeyed_count, unkeyed = native.validate_records(records, header.record_count, native.RECORD_ERROR_COUNT_MAX)
    except (ProtocolError, ValueError) as error:
        message = str(error).encode()[:MESSAGE_BYTES_MAX]
        return CheckResult(int(ErrorCode.INVALID_RECORD), _REFUSAL.pack(0, 0, len(message)) + message)
    except MemoryError:
        return CheckResult(int(ErrorCode.REQUEST_TIMED_OUT))
    if kind == native.CHECK_SCHEDULES:
        refusal = _check_schedules(header, records)
        if refusal is not None:
            return refusal
    if not unkeyed_count or kind != native.CHECK_RECORDS:
        return CheckResult(0) if target is None else _compress(batch, records, target)
    return CheckResult(
        int(ErrorCode.INVALID_RECORD),
        _REFUSAL.pack(unkeyed_count, len(unkeyed), 0) + struct.pack(f"={len(unkeyed)}i", *unkeyed),
    )


def _check_schedules(header: BatchHeader, records: bytes) -> CheckResult | None:
    """Checks the scheduling headers of the records. Returns None if all are valid; otherwise the
    refusal, which lists the invalid records and describes the problem of the first one. The caller
    has already parsed `records` without an error.
    """
    now_ms, count, reason = time.time_ns() // 1_000_000, 0, ""
    if b"mqd-" not in records and header.max_timestamp_ms <= now_ms + schedule_headers.DELAY_MS_MAX:
        return None
    indexes: list[int] = []
    for index, (timestamp_delta, section) in enumerate(schedule_headers.header_sections(records, header.record_count)):
        try:
            schedule_headers.plan_delivery(section, header.base_timestamp_ms + timestamp_delta, 0, now_ms)
        except schedule_headers.InvalidScheduleHeader as error:
            count += 1
            reason = reason or f"record {index} of the batch cannot be scheduled: {error}"
            if len(indexes) < native.RECORD_ERROR_COUNT_MAX:
                indexes.append(index)
    if not count:
        return None
    message = reason.encode()[:MESSAGE_BYTES_MAX]
    packed = struct.pack(f"={len(indexes)}i", *indexes)
    return CheckResult(
        int(ErrorCode.INVALID_RECORD), _REFUSAL.pack(count, len(indexes), len(message)) + packed + message
    )


def _compress(batch: memoryview | bytes, records: bytes, target: Compression) -> CheckResult:
    """Returns the batch with its records in the target codec. Only header fields that depend on the
    codec or the compressed bytes change.
    """
    try:
        body = compress(target.codec, records, None if target.codec == GZIP and target.level < 0 else target.level)
    except MemoryError:
        return CheckResult(int(ErrorCode.REQUEST_TIMED_OUT))
    if HEADER_BYTES + len(body) > target.batch_bytes_max > 0:
        return CheckResult(int(ErrorCode.MESSAGE_TOO_LARGE))
    head = bytearray(batch[:HEADER_BYTES])
    struct.pack_into(">i", head, _LENGTH_AT, HEADER_BYTES - _LENGTH_END + len(body))
    (attributes,) = struct.unpack_from(">H", head, _ATTRIBUTES_AT)
    struct.pack_into(">H", head, _ATTRIBUTES_AT, attributes & ~COMPRESSION_MASK | target.codec)
    struct.pack_into(">I", head, _CRC_AT, crc32c(body, crc32c(head[_ATTRIBUTES_AT:])))
    return CheckResult(0, bytes(head) + body)
