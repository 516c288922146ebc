"""Appends records to partitions on behalf of coordinators: records to their own internal topics,
and transaction markers to users' partitions.

A batch goes over the link to the worker that owns the partition, like a client's produce request
with acks=all. The response comes when the batch is below the high watermark.

Invariants
    L1  appends to one partition reach its owner in the order of the calls
    L2  every append completes exactly once: with the owner's response, with an error when the owner
        dies, or with an immediate error when it cannot be sent
    L3  an error says whether the batch may be in the log (`is_outcome_unknown`), for example
        because the owner died
    L4  an append that names a leader epoch is sent only while the partition is served in that
        epoch; it also names the owner's generation, so a successor never accepts it
    L5  when the owner reports that a marker's partition is being retired and its records go to
        another partition, the append completes only after the marker has been written to both
Bounds: BYTES_MAX and COUNT_MAX in flight. Further appends are refused with
COORDINATOR_NOT_AVAILABLE, which is retriable, and nothing is written.

Concurrency: the event loop's thread only.
"""

import asyncio
import struct
from typing import NamedTuple, Protocol

from mqd.base import logging
from mqd.base.tasks import PromptFuture
from mqd.native import PRODUCE_ACKS_ALL, PRODUCE_CONTROL, PRODUCE_MARKER_BUMPED, crc32c
from mqd.protocol.errors import ErrorCode, error_name
from mqd.protocol.records import CONTROL, HEADER, HEADER_BYTES, LOG_OVERHEAD, TRANSACTIONAL
from mqd.protocol.redirected import origin_of, redirected_producer_id

BYTES_MAX = 64 << 20
COUNT_MAX = 100_000
BATCH_BYTES_MAX = 4 << 20  # one batch must fit in one run of the arena
RECORDS_MAX = 1 << 20  # per batch

log = logging.get("coordinator.log")
_CRC = struct.Struct(">I")


class AppendError(Exception):
    """`is_outcome_unknown`: the batch may be in the log in spite of the error."""

    def __init__(self, error: int, is_outcome_unknown: bool = False) -> None:
        super().__init__(error_name(error) + (" (outcome unknown)" if is_outcome_unknown else ""))
        self.error = int(error)
        self.is_outcome_unknown = is_outcome_unknown


async def outcome(append: asyncio.Future[int]) -> int | Exception:
    """The base offset of an append, or its error."""
    try:
        return await append
    except Exception as error:
        return error


class Served(NamedTuple):
    """A partition as its owner serves it now."""

    slot: int
    owner: int
    owner_generation: int
    leader_epoch: int


class Partitions(Protocol):
    def served(self, topic: str, partition: int) -> Served:
        """Raises AppendError if the topic or partition is unknown or not served at the moment."""


class Sender(Protocol):
    """The acceptor's link. It passes `token` back to on_produced()."""

    def send_batch(
        self, owner: int, token: int, slot: int, batch: bytes, flags: int, leader_epoch: int, owner_generation: int
    ) -> None: ...


class Marker(NamedTuple):
    """The end of a producer's transaction in one partition. `is_bumped`: as in append_nowait."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    commit: bool
    timestamp_ms: int
    is_bumped: bool = False


class _Append(NamedTuple):
    future: asyncio.Future[int]
    owner: int
    owner_generation: int
    size_bytes: int
    marker: Marker | None


class LogAppender:
    """`token_base` (bits 48 and up) is OR-ed into every token, so that the tokens differ from those
    of other users of the link.
    """

    def __init__(self, partitions: Partitions, sender: Sender, token_base: int) -> None:
        self._partitions = partitions
        self._sender = sender
        self._token_base = token_base
        self._last_number = 0
        self._pending: dict[int, _Append] = {}
        self._pending_bytes = 0

    @property
    def pending_count(self) -> int:
        return len(self._pending)

    def append_nowait(
        self,
        topic: str,
        partition: int,
        batch: bytes,
        leader_epoch: int = -1,
        allows_control: bool = True,
        is_bumped: bool = False,
        marker: Marker | None = None,
    ) -> asyncio.Future[int]:
        """Queues one record batch. The future resolves to its base offset once the batch is below
        the high watermark, or raises AppendError. `leader_epoch` -1 accepts any epoch.
        `allows_control`: the batch may be a control batch. `is_bumped`: a marker of
        transactions v2; a partition that already has the marker refuses it with
        INVALID_PRODUCER_EPOCH.
        """
        future: asyncio.Future[int] = PromptFuture(loop=asyncio.get_running_loop())
        try:
            self._send(
                topic,
                partition,
                batch,
                leader_epoch,
                (PRODUCE_CONTROL if allows_control else 0) | (PRODUCE_MARKER_BUMPED if is_bumped else 0),
                future,
                marker,
            )
        except AppendError as error:
            future.set_exception(error)
        return future

    async def append(
        self, topic: str, partition: int, batch: bytes, leader_epoch: int = -1, allows_control: bool = True
    ) -> int:
        """Awaits append_nowait. Cancelling the caller does not cancel the append."""
        return await asyncio.shield(self.append_nowait(topic, partition, batch, leader_epoch, allows_control))

    def append_marker_nowait(self, marker: Marker, leader_epoch: int = -1) -> asyncio.Future[int]:
        """Appends a marker, like append_nowait(). For partitions of __consumer_offsets call the
        group coordinator instead: the marker also changes its state.
        """
        batch = marker_batch(
            marker.producer_id, marker.producer_epoch, marker.coordinator_epoch, marker.commit, marker.timestamp_ms
        )
        return self.append_nowait(
            marker.topic, marker.partition, batch, leader_epoch, is_bumped=marker.is_bumped, marker=marker
        )

    def _send(
        self,
        topic: str,
        partition: int,
        batch: bytes,
        leader_epoch: int,
        flags: int,
        future: asyncio.Future[int],
        marker: Marker | None,
    ) -> None:
        size = len(batch)
        if size > BATCH_BYTES_MAX:
            raise AppendError(ErrorCode.RECORD_LIST_TOO_LARGE)
        if self._pending_bytes + size > BYTES_MAX or len(self._pending) >= COUNT_MAX:
            raise AppendError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        served = self._partitions.served(topic, partition)
        if leader_epoch >= 0 and leader_epoch != served.leader_epoch:
            raise AppendError(ErrorCode.NOT_LEADER_OR_FOLLOWER)  # L4
        self._last_number += 1
        token = self._token_base | self._last_number
        self._pending[token] = _Append(future, served.owner, served.owner_generation, size, marker)
        self._pending_bytes += size
        self._sender.send_batch(
            served.owner, token, served.slot, batch, PRODUCE_ACKS_ALL | flags, leader_epoch, served.owner_generation
        )

    # -- from the link -----------------------------------------------------------------------------

    def on_produced(self, token: int, error: int, base_offset: int, redirect: int = -1) -> bool:
        """Handles the owner's response. `redirect`: the partition is being retired, and its records
        go to this partition. Returns False if the token belongs to another user of the link.
        """
        append = self._pending.pop(token, None)
        if append is None:
            return False
        self._pending_bytes -= append.size_bytes
        if append.future.done():
            return True
        if redirect >= 0 and append.marker is not None and _needs_redirect(append.marker, error):
            self._redirect(append.future, append.marker, error, base_offset, redirect)
        elif error:
            # After a failed write or flush the disk may or may not hold the batch. The next process
            # that loads the log will find out.
            append.future.set_exception(AppendError(error, is_outcome_unknown=error == ErrorCode.KAFKA_STORAGE_ERROR))
        else:
            append.future.set_result(base_offset)
        return True

    def _redirect(
        self, future: asyncio.Future[int], marker: Marker, error: int, base_offset: int, redirect: int
    ) -> None:
        """Writes the marker to the other partition, too (L5). `error` and `base_offset` are the
        result in the retired partition.
        """

        def on_written(second_append: asyncio.Future[int]) -> None:
            failure = None if second_append.cancelled() else second_append.exception()
            if future.done():
                return
            if second_append.cancelled():
                future.cancel()
            elif failure is not None or error:
                future.set_exception(failure or AppendError(error))
            else:
                future.set_result(base_offset)

        redirected = marker._replace(
            partition=redirect, producer_id=redirected_producer_id(marker.producer_id, marker.partition)
        )
        self.append_marker_nowait(redirected).add_done_callback(on_written)

    def on_owner_death(self, owner: int) -> None:
        """Ends the appends in flight to this owner: their outcome is unknown (L3)."""
        for token in [token for token, append in self._pending.items() if append.owner == owner]:
            append = self._pending.pop(token)
            self._pending_bytes -= append.size_bytes
            if not append.future.done():
                append.future.set_exception(AppendError(ErrorCode.REQUEST_TIMED_OUT, is_outcome_unknown=True))

    def close(self) -> None:
        for append in self._pending.values():
            append.future.cancel()
        self._pending.clear()
        self._pending_bytes = 0


def _needs_redirect(marker: Marker, error: int) -> bool:
    """Whether a marker for a retired partition must also be written to the partition that takes its
    records. INVALID_PRODUCER_EPOCH means that the retired partition has the marker already; the
    other partition may not have it. Records are redirected only once (D3 of
    native/server/redirect.h), so a marker whose producer id was rewritten for a redirect is not
    written a second time.
    """
    return error in (0, ErrorCode.INVALID_PRODUCER_EPOCH) and origin_of(marker.producer_id)[1] < 0


# -- batches ---------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    """Zigzag encoding of a non-negative number."""
    value <<= 1
    if value < 0x80:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


_ONE_BYTE = [bytes([value]) for value in range(0x80)]


def record_size_max(key: bytes, value: bytes | None) -> int:
    """Upper bound on the bytes that one record takes in a batch."""
    return len(key) + len(value or b"") + 22


def records_batch(
    records: list[tuple[bytes, bytes | None]], timestamp_ms: int, producer_id: int = -1, producer_epoch: int = -1
) -> bytes:
    """One uncompressed batch, transactional if there is a producer id. As in Kafka, coordinators
    use no sequence numbers (-1).
    """
    parts: list[bytes] = []
    for delta, (key, value) in enumerate(records):
        value_and_headers = b"\x01\x00" if value is None else _varint(len(value)) + value + b"\x00"  # no headers
        body = b"\x00\x00" + _varint(delta) + _varint(len(key)) + key + value_and_headers  # attributes, timestamp delta
        parts += (_varint(len(body)), body)
    return _with_header(
        b"".join(parts),
        len(records),
        TRANSACTIONAL if producer_id >= 0 else 0,
        timestamp_ms,
        producer_id,
        producer_epoch,
    )


def _with_header(
    body: bytes, count: int, attributes: int, timestamp_ms: int, producer_id: int, producer_epoch: int
) -> bytes:
    header = HEADER.pack(
        0,
        HEADER_BYTES - LOG_OVERHEAD + len(body),
        -1,
        2,
        0,
        attributes,
        count - 1,
        timestamp_ms,
        timestamp_ms,
        producer_id,
        producer_epoch,
        -1,
        count,
    )
    return header[:17] + _CRC.pack(crc32c(body, crc32c(header[21:]))) + header[21:] + body


_MARKER = struct.Struct(">hi")
_MARKER_KEYS = {False: struct.pack(">hh", 0, 0), True: struct.pack(">hh", 0, 1)}


def marker_batch(
    producer_id: int, producer_epoch: int, coordinator_epoch: int, commit: bool, timestamp_ms: int
) -> bytes:
    """The control batch that ends a transaction (KIP-98): key version 0 and type (0 abort, 1
    commit), value version 0 and the coordinator's epoch.
    """
    key, value = _MARKER_KEYS[commit], _MARKER.pack(0, coordinator_epoch)
    body = b"\x00\x00\x00" + _varint(len(key)) + key + _varint(len(value)) + value + b"\x00"
    return _with_header(
        _varint(len(body)) + body, 1, TRANSACTIONAL | CONTROL, timestamp_ms, producer_id, producer_epoch
    )
