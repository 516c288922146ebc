"""A partition owner's knowledge of producers and their transactions: the broker's own tables
(native/log/producers.h, native/log/transactions.h) over a log of the simulator.

The tables are not part of the core's Python interface; they are called in the loaded library, with
the declarations of their headers. Only mqd_partition_stage() (native/log/partition.c) is
reimplemented here: its calls to the tables, and their order.

Invariants
    N1  the state is derived from the log's batches below its end; after a truncation it is rebuilt,
        as by recovery
    N2  guards are forgotten with the state, and at the next batch of their producer's transaction
        or its marker
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import mqd._native
from cffi import FFI

from mqd.log.batches import BatchInfo, parse_header
from mqd.log.records import records
from tests.sim.disks import PartitionLog

NATIVE = Path(__file__).resolve().parents[3] / "native"
VERIFY = -2  # MQD_STAGE_VERIFY
INVALID_RECORD, NOT_ENOUGH_REPLICAS, OUT_OF_ORDER, COORDINATOR_FENCED = 87, 19, 45, 52
INT64_MAX = (1 << 63) - 1
BEGUN, ENDED = 1, 2  # enum mqd_transaction_change


def _declarations() -> str:
    text = (NATIVE / "native.h").read_text()
    parts = [re.search(r"^struct mqd_batch \{.*?^\};", text, re.M | re.S)[0]]  # type: ignore[index]
    for name in ("log/transactions.h", "log/producers.h"):
        part = re.sub(r"/\*.*?\*/", "", (NATIVE / name).read_text(), flags=re.S)
        part = re.sub(r"^static inline .*?^\}", "", part, flags=re.M | re.S)
        parts.append(re.sub(r"^#(?!define \w+ \d+\s*$).*$", "", part, flags=re.M))
    return "struct mqd_producer_view;\n" + "\n".join(parts)


ffi = FFI()
ffi.cdef(_declarations())
lib = ffi.dlopen(mqd._native.__file__)

# One thread, and the tables keep no pointers: these are filled and read within a call.
_batch = ffi.new("struct mqd_batch *")
_marker = ffi.new("struct mqd_marker *")
_undo = ffi.new("struct mqd_producer_undo *")
_duplicate = ffi.new("bool *")
_base_offset = ffi.new("int64_t *")


class Carried(NamedTuple):
    """The value of a record within an encoded batch: the batch, and the index of the record."""

    batch: bytes
    place: int


class Parsed(NamedTuple):
    info: BatchInfo
    commit: bool | None  # of a marker
    coordinator_epoch: int
    records: tuple[tuple[bytes | None, bytes | None], ...]


@lru_cache(maxsize=1 << 14)
def parsed(data: bytes) -> Parsed:
    """Raises CorruptBatch."""
    info = parse_header(data, 0, 0)
    if info.is_control:
        _fill(info, 0)
        assert lib.mqd_marker_parse(data, _batch, _marker) == 0, "a control batch that is no marker"
        return Parsed(info, bool(_marker.commit), _marker.coordinator_epoch, ())
    return Parsed(info, None, -1, tuple([(record.key, record.value) for record in records(info, data)]))


def _fill(info: BatchInfo, base_offset: int) -> Any:
    out = _batch
    out.base_offset, out.size_bytes, out.attributes, out.record_count = (
        base_offset,
        info.size_bytes,
        info.attributes,
        info.record_count,
    )
    out.last_offset_delta = info.last_offset - info.base_offset
    out.producer_id, out.producer_epoch, out.base_sequence = info.producer_id, info.producer_epoch, info.base_sequence
    return out


class Verdict(NamedTuple):
    error: int  # 0, a Kafka error code, or VERIFY
    duplicate_of: int = -1  # base offset of the batch that it repeats
    guard: int = 0


class Aborted(NamedTuple):
    """As in a .txnindex."""

    producer_id: int
    first_offset: int
    last_offset: int


class ProducerState:
    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self._begin()

    def _begin(self) -> None:
        self._producers = ffi.gc(ffi.new("struct mqd_producers *"), lib.mqd_producers_free)
        self._transactions = ffi.addressof(self._producers[0], "transactions")
        self._verifications = ffi.gc(ffi.new("struct mqd_verifications *"), lib.mqd_verifications_free)
        self._changes, self._end = self._log.changes, 0
        self.aborted: list[Aborted] = []

    def sync(self) -> None:
        """N1."""
        log = self._log
        if log.changes != self._changes or log.end < self._end:
            self._begin()
        entries = log.entries
        while self._end < len(entries):
            entry = entries[self._end]
            if isinstance(entry.value, Carried):
                self._add(parsed(entry.value.batch), self._end)
            self._end += 1 + entry.left

    def _add(self, one: Parsed, offset: int) -> None:
        info = one.info
        if info.producer_id < 0:
            return
        batch = _fill(info, offset)
        marker = ffi.NULL
        if one.commit is not None:
            marker = _marker
            marker.commit, marker.coordinator_epoch = one.commit, one.coordinator_epoch
        assert lib.mqd_producers_add(self._producers, batch, marker, offset, 0, _undo) == 0
        if info.is_transactional:
            lib.mqd_verifications_revoke(self._verifications, info.producer_id)
        if one.commit is False and _undo.change == ENDED:
            self.aborted.append(
                Aborted(info.producer_id, self._transactions.entries[_undo.transaction - 1].first_offset, offset)
            )

    def stage(
        self, data: bytes, coordinator: bool, bumped: bool, guard: int, now_ms: int, off: frozenset[str]
    ) -> Verdict:
        """As mqd_partition_stage(): whether the batch may be appended. Rules that can be off:
        `fence`, `verify`.
        """
        self.sync()
        one = parsed(data)
        info = one.info
        if info.producer_id < 0:
            return Verdict(INVALID_RECORD if info.is_control or info.is_transactional else 0)
        if info.is_control and not coordinator:
            return Verdict(INVALID_RECORD)
        marker = ffi.NULL
        if one.commit is not None:
            marker = _marker
            marker.commit, marker.coordinator_epoch = one.commit, one.coordinator_epoch
        batch = _fill(info, 0)
        kind = ffi.new(
            "struct mqd_producer_batch_kind *",
            {"marker": marker, "from_coordinator": coordinator, "bumps_epoch": bumped, "require_known": False},
        )
        error = lib.mqd_producers_check(self._producers, batch, kind[0], _duplicate, _base_offset)
        if error == COORDINATOR_FENCED and "fence" in off:
            error = 0
        if not error and _duplicate[0]:
            return Verdict(0, duplicate_of=_base_offset[0])
        if (
            error
            or coordinator
            or not info.is_transactional
            or "verify" in off
            or lib.mqd_producers_continues_transaction(self._producers, batch)
        ):
            return Verdict(error)
        return self._verified(batch, guard, now_ms)

    def _verified(self, batch: Any, guard: int, now_ms: int) -> Verdict:
        """check_verified() of native/log/partition.c."""
        if guard == 0:
            return Verdict(VERIFY, guard=lib.mqd_verifications_begin(self._verifications, batch, now_ms))
        found = lib.mqd_verifications_find(self._verifications, batch, guard)
        if found == ffi.NULL:
            return Verdict(NOT_ENOUGH_REPLICAS)
        return Verdict(OUT_OF_ORDER if batch.base_sequence > found.lowest_sequence else 0)

    def last_stable_offset(self, high_watermark: int) -> int:
        """last_stable_offset() of native/log/partition.c, of a log that begins at 0."""
        self.sync()
        lib.mqd_transactions_forget_decided(self._transactions, high_watermark)
        return min(lib.mqd_transactions_first_unstable(self._transactions), high_watermark)

    def aborted_between(self, start: int, end: int) -> tuple[Aborted, ...]:
        return tuple([one for one in self.aborted if one.first_offset < end and one.last_offset >= start])

    def first_ongoing(self) -> int:
        """-1: none."""
        self.sync()
        found = lib.mqd_transactions_first_ongoing(self._transactions)
        return -1 if found == INT64_MAX else found
