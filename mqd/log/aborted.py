"""Computes the required contents of a partition's .txnindex files from its log, and compares them
with the files and their checksums (.txnsum): for `mqd log verify`. Formats: native/log/txn_index.h.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct

from mqd.log.batches import HEADER_BYTES, BatchInfo
from mqd.log.segments import segment_path

_ENTRY = Struct(">hqqqq")
_SUM = Struct(">I")
_BASE_OFFSET = Struct(">q")
_MARKER = Struct(">hh")  # version and type of the control record's key, after its length and deltas
_ABORT = 0

AbortedTransaction = tuple[int, int, int]  # producer id, first offset, offset of the abort marker


class AbortedTransactions:
    """Receives the batches of all segments in order. Memory: one entry for each open transaction,
    and for each aborted one of the current segment.
    """

    def __init__(self) -> None:
        self._open_transactions: dict[int, int] = {}  # producer id -> first offset
        self._pending: list[AbortedTransaction] = []  # those that end in the current segment
        # (producer id, offset) of every abort marker of the current segment
        self._markers: set[tuple[int, int]] = set()

    def take(self, batch: BatchInfo, data: bytes) -> None:
        if not batch.is_control:
            if batch.is_transactional:
                self._open_transactions.setdefault(batch.producer_id, batch.base_offset)
            return
        first = self._open_transactions.pop(batch.producer_id, -1)
        if _marker_type(data) != _ABORT:
            return
        self._markers.add((batch.producer_id, batch.base_offset))
        if first >= 0:
            self._pending.append((batch.producer_id, first, batch.base_offset))

    def compare(self, directory: Path, base_offset: int, next_offset: int) -> list[str]:
        """Returns the problems of the segment whose batches were taken since the last call. Entries
        at or beyond next_offset are still being written.
        """
        pending, markers = self._pending, self._markers
        self._pending, self._markers = [], set()
        sums = _contents(directory, base_offset, ".txnsum")  # first: a running broker writes it last
        data = _contents(directory, base_offset, ".txnindex")
        entries = [
            _ENTRY.unpack_from(data, position)[1:4] for position in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size)
        ]
        first_offsets = {(producer_id, last): first for producer_id, first, last in entries}
        for producer_id, first, last in pending:
            first_offset = first_offsets.get((producer_id, last))
            if first_offset is None or not 0 <= first_offset <= first:
                return [
                    f"transaction index: the transaction of producer {producer_id} from offset {first}, aborted at"
                    f" {last}, is not in it"
                ]
        for producer_id, _, last in entries:
            if (producer_id, last) not in markers and last < next_offset:
                return [
                    f"transaction index: has an abort of producer {producer_id} at offset {last}, which the segment"
                    " does not contain"
                ]
        return _compare_sums(base_offset, data, sums, [last for _, _, last in entries], next_offset)


def _contents(directory: Path, base_offset: int, suffix: str) -> bytes:
    try:
        return segment_path(directory, base_offset, suffix).read_bytes()
    except FileNotFoundError:
        return b""


def _compare_sums(base_offset: int, data: bytes, sums: bytes, marker_offsets: list[int], next_offset: int) -> list[str]:
    """`marker_offsets`: the offsets of the abort markers, one for each entry of the index."""
    from mqd import native  # hardware CRC-32C

    expected = 0
    for number, last in enumerate(marker_offsets):
        if len(sums) < (number + 1) * _SUM.size:
            if last >= next_offset:
                return []
            return [f"transaction index: the checksum of the abort at offset {last} is missing in .txnsum"]
        entry = data[number * _ENTRY.size : (number + 1) * _ENTRY.size]
        expected = native.crc32c(_BASE_OFFSET.pack(base_offset) + entry, expected)
        if _SUM.unpack_from(sums, number * _SUM.size)[0] != expected:
            return [f"transaction index: the checksum of the abort at offset {last} is wrong"]
    extra = len(sums) // _SUM.size - len(marker_offsets)
    return [f"transaction index: .txnsum has {extra} checksums without an entry"] if extra > 0 else []


def _marker_type(data: bytes) -> int:
    """The type of a control batch's marker; -1: invalid. The batch's single record has attributes,
    two deltas and a key of 4 bytes.
    """
    position = HEADER_BYTES
    for skipped in ("length", "attributes", "timestamp delta", "offset delta", "key length"):
        if skipped == "attributes":
            position += 1
            continue
        while position < len(data) and data[position] & 0x80:
            position += 1
        position += 1
    return _MARKER.unpack_from(data, position)[1] if position + _MARKER.size <= len(data) else -1
