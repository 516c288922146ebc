"""One share-partition at the share coordinator (KIP-932): the state that its leader needs after a
failover. Sans-I/O.

The group coordinator initializes and deletes the state. The partition's leader reads it, stating
its leader epoch, and then writes only changes. Every write is one record, an update of the last
snapshot. After `updates_per_snapshot` updates, the next record is a snapshot. `cold_ms` after the
first update, a snapshot is written in any case. The records before a snapshot can be pruned.

Invariants (check())
    P1  nothing below the start offset is kept
    P2  neither the state epoch nor the leader epoch falls while the share-partition exists: a writer
        with an older one is refused, and changes nothing. Exception: an initialization resets the
        leader epoch. Only an initialization or P6 lowers the start offset
    P3  a reply depends only on records persisted before it
    P4  the records from the last snapshot on suffice to rebuild the state (`durable_state()`)
    P5  while there are updates since the last snapshot, the timer for the next one is armed
    P6  a read in a newer leader epoch drops the state of records that the log has lost: all offsets
        at or above the end of the state's leader epoch in the reader's log. The log will give these
        offsets to other records
Bounds: RUNS_MAX runs. A write that might exceed this is refused, because a snapshot is one record.

Source: Kafka's own behaviour, including the precedence of errors. Differences: Kafka keeps the
state of lost records, and skips the records that get their offsets (P6); here, a start offset that
is lower than the current one is ignored (P2), and so are state batches below it; an initialization
without a start offset in the current state epoch changes nothing, because it is a repetition, and
the state may have been used since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mqd.coordinator.actions import Action, KeyValue, Persist, Reply, Timer, TimerFired
from mqd.coordinator.share import records
from mqd.coordinator.share.runs import Run, Runs
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.messages import (
    DeleteShareGroupStateResponse,
    InitializeShareGroupStateResponse,
    ReadShareGroupStateResponse,
    ReadShareGroupStateSummaryResponse,
    WriteShareGroupStateResponse,
)

SNAPSHOT_TIMER = "share.snapshot"
UNINITIALIZED = -1  # as a start offset
NOT_SENT = -1  # a leader or state epoch, or a start offset, that a request does not name
RUNS_MAX = 20_000  # twice the worker's bound
# Memory of a share-partition and of a run: measured, rounded up.
CORE_BYTES, RUN_BYTES = 1_200, 200
READ_UNINITIALIZED = "The read operation on uninitialized share partition is not allowed."
WRITE_UNINITIALIZED = "The write operation on uninitialized share partition is not allowed."

_Initialized, _Read, _Written, _Deleted, _Summary = (
    InitializeShareGroupStateResponse.Partition,
    ReadShareGroupStateResponse.Partition,
    WriteShareGroupStateResponse.Partition,
    DeleteShareGroupStateResponse.Partition,
    ReadShareGroupStateSummaryResponse.Partition,
)
_StateBatch = ReadShareGroupStateResponse.StateBatch


class Settings(msgspec.Struct, frozen=True):
    updates_per_snapshot: int = 500
    cold_ms: int = 300_000


class Initialize(msgspec.Struct, frozen=True, gc=False):
    """The reply to this and the following requests is the Partition of the API's response."""

    request: int
    state_epoch: int
    start_offset: int


class Read(msgspec.Struct, frozen=True, gc=False):
    """`epochs`: (leader epoch, its first offset) of the reader's log, ascending; the last pair is
    (records.LOG_END_EPOCH, the log's end). () if the reader has no log to compare the state with.
    """

    request: int
    leader_epoch: int
    epochs: tuple[tuple[int, int], ...] = ()


class Write(msgspec.Struct, frozen=True, gc=False):
    """The caller has validated `runs` (records.runs_of)."""

    request: int
    state_epoch: int
    leader_epoch: int
    start_offset: int
    complete_count: int
    runs: tuple[Run, ...]


class ReadSummary(msgspec.Struct, frozen=True, gc=False):
    request: int
    includes_deliveries: bool = False


class Delete(msgspec.Struct, frozen=True, gc=False):
    request: int


class Forget(msgspec.Struct, frozen=True, gc=False):
    """The topic was deleted. No reply."""


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """Answered with 0 when this share-partition no longer needs the log before its snapshot."""

    request: int


class SharePartition:
    """`handle` is the only mutator once it is loaded."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.group_id, self.topic_id, self.partition = records.split_name(name)
        self.settings = settings
        self._snapshot_key, self._update_key = records.encode_keys(self.group_id, self.topic_id, self.partition)
        self._reset()
        self._handlers: dict[type, Callable[[Any, int], list[Action]]] = {
            Initialize: self._on_initialize,
            Read: self._on_read,
            Write: self._on_write,
            ReadSummary: self._on_read_summary,
            Delete: self._on_delete,
            Forget: self._on_forget,
            Snapshot: self._on_snapshot,
            TimerFired: self._on_cold,
        }

    def _reset(self) -> None:
        self.exists = False
        self.snapshot_epoch = self.state_epoch = self.leader_epoch = 0
        self.start_offset = self.complete_count = -1
        self.create_ms = self.write_ms = 0
        self.runs = Runs()
        self.update_count = 0  # since the snapshot
        self._is_armed = False

    # -- queries ----------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self.exists

    @property
    def size_bytes(self) -> int:
        return CORE_BYTES + 2 * len(self.name) + RUN_BYTES * len(self.runs)

    def durable_state(self) -> tuple[object, ...]:
        return (
            self.exists,
            self.snapshot_epoch,
            self.state_epoch,
            self.leader_epoch,
            self.start_offset,
            self.complete_count,
            tuple(self.runs.runs),
        )

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        return self._handlers[type(event)](event, now_ms)

    def _on_initialize(self, event: Initialize, now_ms: int) -> list[Action]:
        if self.exists and NOT_SENT != event.state_epoch < self.state_epoch:
            return [self._error_reply(event.request, _Initialized, ErrorCode.FENCED_STATE_EPOCH)]
        if self.exists and event.state_epoch == self.state_epoch and event.start_offset == UNINITIALIZED:
            return [self._reply(event.request, _Initialized)]
        snapshot_epoch = self.snapshot_epoch + 1 if self.exists else 0
        self._reset()
        self.exists = True
        self.snapshot_epoch, self.state_epoch = snapshot_epoch, event.state_epoch
        self.start_offset = event.start_offset
        self.create_ms = self.write_ms = now_ms
        return [Persist((self._snapshot_record(),)), self._disarm(), self._reply(event.request, _Initialized)]

    def _on_read(self, event: Read, now_ms: int) -> list[Action]:
        if not self.exists:
            return [self._error_reply(event.request, _Read, ErrorCode.INVALID_REQUEST, READ_UNINITIALIZED)]
        if event.leader_epoch < self.leader_epoch:
            return [self._error_reply(event.request, _Read, ErrorCode.FENCED_LEADER_EPOCH)]
        if event.leader_epoch == self.leader_epoch:
            return [self._read_response(event.request)]
        has_lost_state = self._drop_lost_state(event.epochs)
        self.leader_epoch = event.leader_epoch
        # an update cannot lower the start offset
        actions = self._snapshot(now_ms) if has_lost_state else self._persist((), self.start_offset, now_ms)
        return [*actions, self._read_response(event.request)]

    def _read_response(self, request: int) -> Reply:
        return Reply(
            request,
            _Read(
                partition=self.partition,
                state_epoch=self.state_epoch,
                start_offset=self.start_offset,
                state_batches=[_StateBatch(*run) for run in self.runs.runs],
            ),
        )

    def _drop_lost_state(self, epochs: tuple[tuple[int, int], ...]) -> bool:
        """Drops the state of records that the log has lost (P6). Returns whether there were any."""
        if not epochs:
            return False
        # whether an owner has written the state, in self.leader_epoch or earlier; if not, the only
        # bound is the log's end
        is_written = self.complete_count != -1
        log_end = epochs[-1][1]
        end = next((start for epoch, start in epochs if epoch > self.leader_epoch), log_end) if is_written else log_end
        if self.start_offset <= end and not self.runs.truncate(end):
            return False
        if self.start_offset > end:
            self.start_offset, self.runs = end, Runs()
        if is_written:
            self.complete_count = self.runs.finished_count()
        return True

    def _on_write(self, event: Write, now_ms: int) -> list[Action]:
        error = self._write_error(event)
        if error:
            message = WRITE_UNINITIALIZED if not self.exists else None
            return [self._error_reply(event.request, _Written, error, message)]
        start_offset = event.start_offset if event.start_offset > self.start_offset else NOT_SENT
        if start_offset != NOT_SENT:
            self.start_offset = start_offset
            self.runs.advance(start_offset)
        applied_runs = []
        for run in event.runs:
            if run.last < self.start_offset:
                continue
            if run.first < self.start_offset:
                run = run._replace(first=self.start_offset)
            self.runs.merge(run)
            applied_runs.append(run)
        self.complete_count = event.complete_count
        return [*self._persist(applied_runs, start_offset, now_ms), self._reply(event.request, _Written)]

    def _write_error(self, event: Write) -> int:
        if not self.exists:
            return int(ErrorCode.INVALID_REQUEST)
        if NOT_SENT != event.leader_epoch < self.leader_epoch:
            return int(ErrorCode.FENCED_LEADER_EPOCH)
        if NOT_SENT != event.state_epoch < self.state_epoch:
            return int(ErrorCode.FENCED_STATE_EPOCH)
        # a run splits at most one other, and then adds two
        return int(ErrorCode.INVALID_REQUEST) if len(self.runs) + 2 * len(event.runs) > RUNS_MAX else 0

    def _on_read_summary(self, event: ReadSummary, now_ms: int) -> list[Action]:
        if not self.exists:
            return [
                Reply(
                    event.request,
                    _Summary(
                        partition=self.partition,
                        state_epoch=0,
                        leader_epoch=0,
                        start_offset=UNINITIALIZED,
                        delivery_complete_count=-1,
                    ),
                )
            ]
        return [
            Reply(
                event.request,
                _Summary(
                    partition=self.partition,
                    state_epoch=self.state_epoch,
                    leader_epoch=self.leader_epoch,
                    start_offset=self.start_offset,
                    delivery_complete_count=self.complete_count,
                    deliveries=[
                        ReadShareGroupStateSummaryResponse.Delivered(*counts) for counts in self.runs.retried_counts()
                    ]
                    if event.includes_deliveries
                    else [],
                ),
            )
        ]

    def _on_delete(self, event: Delete, now_ms: int) -> list[Action]:
        return [*self._on_forget(event, now_ms), self._reply(event.request, _Deleted)]

    def _on_forget(self, event: object, now_ms: int) -> list[Action]:
        if not self.exists:
            return []
        self._reset()
        return [Persist(((self._snapshot_key, None),)), self._disarm()]

    def _on_snapshot(self, event: Snapshot, now_ms: int) -> list[Action]:
        return [*self._on_cold(event, now_ms), Reply(event.request, 0)]

    def _on_cold(self, event: object, now_ms: int) -> list[Action]:
        self._is_armed = False
        return self._snapshot(now_ms) if self.exists else []

    # -- records -----------------------------------------------------------------------------------

    def _persist(self, runs: tuple[Run, ...] | list[Run], start_offset: int, now_ms: int) -> list[Action]:
        """Persists a change of the state: the difference, or a snapshot when one is due."""
        if self.update_count >= self.settings.updates_per_snapshot:
            return self._snapshot(now_ms)
        self.update_count += 1
        # two runs of one request can overlap; they are merged before they are written (runs.py)
        difference = Runs(list(runs)).runs if len(runs) > 1 else list(runs)
        record = records.update_record(
            self._update_key, self.snapshot_epoch, self.leader_epoch, start_offset, self.complete_count, difference
        )
        if self._is_armed:
            return [Persist((record,))]
        self._is_armed = True
        return [Persist((record,)), Timer(SNAPSHOT_TIMER, now_ms + self.settings.cold_ms)]

    def _snapshot(self, now_ms: int) -> list[Action]:
        self.snapshot_epoch += 1
        self.update_count = 0
        self.create_ms = self.write_ms = now_ms
        return [Persist((self._snapshot_record(),)), self._disarm()]

    def _disarm(self) -> Timer:
        self._is_armed = False
        return Timer(SNAPSHOT_TIMER, None)

    def _snapshot_record(self) -> KeyValue:
        return records.snapshot_record(
            self._snapshot_key,
            self.snapshot_epoch,
            self.state_epoch,
            self.leader_epoch,
            self.start_offset,
            self.complete_count,
            self.create_ms,
            self.write_ms,
            self.runs.runs,
        )

    def _reply(self, request: int, response_class: type) -> Reply:
        return Reply(request, response_class(partition=self.partition))

    def _error_reply(self, request: int, response_class: type, error: int, message: str | None = None) -> Reply:
        code = int(error)
        return Reply(
            request,
            response_class(partition=self.partition, error_code=code, error_message=message or error_message(code)),
        )

    # -- loading -----------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Applies one record; they come in the order of the log. Raises ValueError."""
        if records.key_type_of(key) == records.UPDATE:
            if value is not None and self.exists:  # otherwise the state that it updates was deleted
                self._replay_update(records.SHARE_UPDATE.decode_value(value))
            return
        if value is None:
            self._reset()
            return
        record = records.SHARE_SNAPSHOT.decode_value(value)
        runs = Runs(records.runs_of(record.state_batches))
        self._reset()
        self.exists, self.runs = True, runs
        self.snapshot_epoch, self.state_epoch = record.snapshot_epoch, record.state_epoch
        self.leader_epoch, self.start_offset = record.leader_epoch, record.start_offset
        self.complete_count = record.delivery_complete_count
        self.create_ms, self.write_ms = record.create_timestamp, record.write_timestamp
        if self.start_offset > 0:
            self.runs.advance(self.start_offset)

    def _replay_update(self, record: Any) -> None:
        runs = records.runs_of(record.state_batches)
        self.leader_epoch = max(self.leader_epoch, record.leader_epoch)
        if record.start_offset > self.start_offset:
            self.start_offset = record.start_offset
            self.runs.advance(self.start_offset)
        self.complete_count = record.delivery_complete_count
        for run in runs:
            if run.last >= self.start_offset:
                self.runs.merge(run._replace(first=max(run.first, self.start_offset)))
        self.update_count += 1

    def on_loaded(self, now_ms: int) -> list[Action]:
        if not self.update_count:
            return []
        self._is_armed = True
        return [Timer(SNAPSHOT_TIMER, now_ms + self.settings.cold_ms)]

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        self.runs.check()
        assert not self.runs.firsts or self.runs.firsts[0] >= self.start_offset, "P1"
        assert self._is_armed or not self.update_count, "P5"
        assert self.exists or not (self.update_count or len(self.runs)), "P4"


class SharePartitions:
    """An actions.CoreFactory. For `replays_every_record` see load.py."""

    replays_every_record = True

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def core_name_of(self, key: bytes) -> str | None:
        return records.name_of_key(key)

    def make(self, name: str) -> SharePartition:
        return SharePartition(name, self._settings)
