"""Computes the required contents of a partition's .txnindex files from its log: for `mqd log
verify`. Format: native/log/txn_index.h.
"""

from __future__ import annotations

from pathlib import Path
from struct import Struct

from mqd.log.batches import HEADER_BYTES, BatchInfo
from mqd.log.segments import segment_path

_ENTRY = Struct(">hqqqq")
_MARKER = Struct(">hh")  # version and type of the control record's key, after its length and deltas
_ABORT = 0

Aborted = tuple[int, int, int]  # producer id, first offset, offset of the abort marker


class AbortedTransactions:
    """Takes the batches of all segments in order. Bound: one entry for each open transaction and
    for each aborted one of the current segment.
    """

    def __init__(self) -> None:
        self._begun: dict[int, int] = {}  # producer id -> first offset
        self._pending: list[Aborted] = []  # of the current segment
        # producer id, offset: every abort marker of the current segment
        self._markers: set[tuple[int, int]] = set()

    def take(self, batch: BatchInfo, data: bytes) -> None:
        if not batch.control:
            if batch.transactional:
                self._begun.setdefault(batch.producer_id, batch.base_offset)
            return
        first = self._begun.pop(batch.producer_id, -1)
        if _marker_type(data) != _ABORT:
            return
        self._markers.add((batch.producer_id, batch.base_offset))
        if first >= 0:
            self._pending.append((batch.producer_id, first, batch.base_offset))

    def compare(self, directory: Path, base_offset: int, next_offset: int) -> list[str]:
        """Problems of the last segment; the next one may follow. Entries at or beyond next_offset
        are still being written.
        """
        pending, markers = self._pending, self._markers
        self._pending, self._markers = [], set()
        try:
            data = segment_path(directory, base_offset, ".txnindex").read_bytes()
        except FileNotFoundError:
            data = b""
        found = [_ENTRY.unpack_from(data, at)[1:4] for at in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size)]
        firsts = {(producer_id, last): first for producer_id, first, last in found}
        for producer_id, first, last in pending:
            first_offset = firsts.get((producer_id, last))
            if first_offset is None or not 0 <= first_offset <= first:
                return [
                    f"transaction index: the transaction of producer {producer_id} from offset {first}, aborted at"
                    f" {last}, is not in it"
                ]
        for producer_id, _, last in found:
            if (producer_id, last) not in markers and last < next_offset:
                return [
                    f"transaction index: has an abort of producer {producer_id} at offset {last}, which the segment"
                    " does not contain"
                ]
        return []


def _marker_type(data: bytes) -> int:
    """For a control batch, whose single record has attributes, two deltas and a key of 4 bytes; -1:
    invalid.
    """
    at = HEADER_BYTES
    for skipped in ("length", "attributes", "timestamp delta", "offset delta", "key length"):
        if skipped == "attributes":
            at += 1
            continue
        while at < len(data) and data[at] & 0x80:
            at += 1
        at += 1
    return _MARKER.unpack_from(data, at)[1] if at + _MARKER.size <= len(data) else -1
