"""One loaded partition of a coordinator: its cores and their pending writes. Sans-I/O: the runtime
writes the units and reports the result.

A unit is a group commit: the Persists that wait at the same time, in a few consecutive record
batches. One unit is in flight at a time; later Persists gather in the next one. The write rate
therefore follows the disk, and one write can carry the Persists of a thousand requests.

Invariants (check())
    H1  units are written in the order in which their Persists were made; at most one is in flight
    H2  a reply (or another effect) leaves only after every earlier non-lazy Persist of the same
        core is written; replies and effects of one core leave in order
    H3  a unit has at most one batch without a producer id, so that its records without a producer
        id are written together or not at all, even if other batches of the unit fail
    H4  a core that is_empty and has nothing in flight is dropped with its timers
    H5  a marker ends its producer's open transaction only if the transaction's epoch is at
        most the marker's (below it for a bumped marker, KIP-890). Otherwise the marker was written
        before and is refused
    H6  with a budget, every core's bytes are charged to it, and returned when the core is dropped
"""

from collections.abc import Callable, Iterable
from typing import cast

from mqd.coordinator.actions import (
    Action,
    Core,
    CoreFactory,
    Effect,
    KeyValue,
    MeasuredCore,
    Persist,
    Reply,
    Timer,
    TransactionEnded,
)
from mqd.coordinator.budget import Budget
from mqd.coordinator.log import BATCH_BYTES_MAX, RECORDS_MAX, marker_batch, record_size_max, records_batch
from mqd.coordinator.timers import Timers
from mqd.protocol.errors import ErrorCode

_OVERHEAD_BYTES = 128


class TooLarge(Exception):
    """A Persist exceeds the size of a batch and cannot be written, but its core has already changed."""


class Batch:
    """What one record batch will contain: records of one producer, or a marker."""

    __slots__ = (
        "on_done",
        "changes_cores",
        "marker",
        "producer_epoch",
        "producer_id",
        "records",
        "refusal",
        "size_bytes",
    )

    def __init__(self, producer_id: int, producer_epoch: int, marker: tuple[int, bool] | None = None) -> None:
        self.producer_id, self.producer_epoch = producer_id, producer_epoch
        self.marker = marker  # (coordinator epoch, commit)
        # for a marker: called with None once written, or with the error code
        self.on_done: Callable[[int | None], None] | None = None
        self.changes_cores = False  # this marker ends a transaction in which cores have records
        self.refusal: int | None = None
        self.records: list[KeyValue] = []
        self.size_bytes = _OVERHEAD_BYTES

    def encode(self, timestamp_ms: int) -> bytes:
        if self.marker is not None:
            return marker_batch(self.producer_id, self.producer_epoch, *self.marker, timestamp_ms)
        return records_batch(self.records, timestamp_ms, self.producer_id, self.producer_epoch)

    @property
    def offset_count(self) -> int:
        if self.refusal is not None:
            return 0
        return 1 if self.marker is not None else len(self.records)


class WriteUnit:
    """`is_due`: is written without the delay for lazy Persists, because it has a marker or a
    Persist that is not lazy, or because another unit waits behind it. `core_names`: the cores with
    records that are not lazy. `waiting`: replies and effects that wait until the unit is written.
    """

    __slots__ = ("batches", "core_names", "is_due", "waiting")

    def __init__(self) -> None:
        self.is_due = False
        self.batches: list[Batch] = []
        self.core_names: dict[str, None] = {}
        self.waiting: list[tuple[str, Reply | Effect]] = []

    @property
    def offset_count(self) -> int:
        return sum(batch.offset_count for batch in self.batches)

    def try_add(self, persist: Persist) -> bool:
        """Adds the Persist to this unit. False: it must go to the next unit (H3)."""
        size = sum(record_size_max(key, value) for key, value in persist.records)
        last = self.batches[-1] if self.batches else None
        has_room = (
            last is not None
            and last.size_bytes + size <= BATCH_BYTES_MAX
            and len(last.records) + len(persist.records) <= RECORDS_MAX
        )
        is_same_producer = (
            last is not None
            and last.marker is None
            and (last.producer_id, last.producer_epoch) == (persist.producer_id, persist.producer_epoch)
        )
        if last is None or not (has_room and is_same_producer):
            if size + _OVERHEAD_BYTES > BATCH_BYTES_MAX or len(persist.records) > RECORDS_MAX:
                raise TooLarge(f"{len(persist.records)} records of {size} bytes; a batch holds {BATCH_BYTES_MAX}")
            if persist.producer_id < 0 and any(batch.producer_id < 0 for batch in self.batches):
                return False
            if sum(batch.size_bytes for batch in self.batches) + size > BATCH_BYTES_MAX:
                return False
            last = Batch(persist.producer_id, persist.producer_epoch)
            self.batches.append(last)
        last.records += persist.records
        last.size_bytes += size
        return True


class LoadedPartition:
    """The result of reading the log of a partition."""

    __slots__ = ("cores", "end_offset", "transaction_epochs", "record_count", "skipped_count", "transactions")

    def __init__(self, end_offset: int) -> None:
        self.end_offset = end_offset
        self.cores: dict[str, Core] = {}
        # producer id -> cores with records of its open transaction
        self.transactions: dict[int, dict[str, None]] = {}
        self.transaction_epochs: dict[int, int] = {}  # producer id -> epoch of its open transaction
        self.record_count = 0
        self.skipped_count = 0


class _CoreEntry:
    __slots__ = ("core", "size_bytes", "timers", "unit")

    def __init__(self, core: Core) -> None:
        self.core = core
        self.unit: WriteUnit | None = None  # the newest unwritten unit that holds records of this core
        self.timers: set[str] = set()
        self.size_bytes = 0  # as charged to the budget


class Shard:
    """`reply(number, response)` answers a request. `carry_out(name, effect)` runs any other effect
    of a core. `wake()` signals that a unit is ready to write, `on_armed(at_ms)` that a timer is
    set.
    """

    def __init__(
        self,
        cores: CoreFactory,
        loaded: LoadedPartition,
        leader_epoch: int,
        reply: Callable[[int, object], None],
        carry_out: Callable[[str, Effect], None],
        wake: Callable[[], None],
        on_armed: Callable[[int], None],
        budget: Budget | None = None,
    ) -> None:
        self.leader_epoch = leader_epoch
        # expected base offset of the next batch: there is no other writer
        self.end_offset = loaded.end_offset
        self.timers = Timers()
        self._cores = cores
        self._entries = {name: _CoreEntry(core) for name, core in loaded.cores.items()}
        self._transactions = loaded.transactions
        self._transaction_epochs = loaded.transaction_epochs
        self._reply = reply
        self._carry_out = carry_out
        self._wake = wake
        self._on_armed = on_armed
        self._budget = budget
        self._units: list[WriteUnit] = []  # the first one may be in flight
        self.is_writing = False
        self.written_count = 0  # number of units written

    # -- cores -------------------------------------------------------------------------------------

    def core(self, name: str) -> Core | None:
        entry = self._entries.get(name)
        return entry.core if entry is not None else None

    def items(self) -> Iterable[tuple[str, Core]]:
        return [(name, entry.core) for name, entry in self._entries.items()]

    def __len__(self) -> int:
        return len(self._entries)

    def on_loaded(self, now_ms: int) -> None:
        for name, entry in list(self._entries.items()):
            self._run(name, entry, entry.core.on_loaded(now_ms))

    def handle(self, name: str, event: object, now_ms: int) -> None:
        """Raises TooLarge; the core has then changed and must be discarded."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _CoreEntry(self._cores.make(name))
        self._run(name, entry, entry.core.handle(event, now_ms))

    def handle_existing(self, name: str, event: object, now_ms: int) -> None:
        """Like handle(), but ignores an event for a core that does not exist."""
        if name in self._entries:
            self.handle(name, event, now_ms)

    def fire(self, timer: tuple[str, str]) -> str | None:
        """Marks a due timer as fired. Returns its core's name; None: the timer was disarmed."""
        name, timer_name = timer
        entry = self._entries.get(name)
        if entry is None or timer_name not in entry.timers:
            return None
        entry.timers.discard(timer_name)
        return name

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        now_ms: int,
        on_done: Callable[[int | None], None],
        is_bumped: bool = False,
    ) -> None:
        """Writes the marker, unless H5 refuses it, and notifies every core with pending records of
        that producer. A unit keeps its order, so earlier Persists stay ahead of the marker.
        """
        if producer_epoch < self._transaction_epochs.get(producer_id, -1) + is_bumped:
            on_done(int(ErrorCode.INVALID_PRODUCER_EPOCH))
            return
        unit = self._open_unit()
        batch = Batch(producer_id, producer_epoch, (coordinator_epoch, commit))
        batch.on_done = on_done
        unit.batches.append(batch)
        unit.is_due = True
        event = TransactionEnded(producer_id, producer_epoch, commit)
        self._transaction_epochs.pop(producer_id, None)
        names = self._transactions.pop(producer_id, {})
        batch.changes_cores = bool(names)
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                continue
            entry.unit = unit
            unit.core_names[name] = None
            self._run(name, entry, entry.core.handle(event, now_ms))
        self._wake()

    def _run(self, name: str, entry: _CoreEntry, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Timer):
                self._arm(name, entry, action)
            elif isinstance(action, Persist):
                if action.records:
                    self._persist(name, entry, action)
            elif entry.unit is None:
                self._send(name, action)
            else:
                entry.unit.waiting.append((name, action))  # H2
        if self._budget is not None:
            self._charge(self._budget, entry, cast(MeasuredCore, entry.core).size_bytes)
        if entry.unit is None and entry.core.is_empty:
            self._drop(name, entry)

    @staticmethod
    def _charge(budget: Budget, entry: _CoreEntry, size_bytes: int) -> None:
        budget.used_bytes += size_bytes - entry.size_bytes
        entry.size_bytes = size_bytes

    def _send(self, name: str, action: Reply | Effect) -> None:
        if isinstance(action, Reply):
            self._reply(action.request, action.response)
        else:
            self._carry_out(name, action)

    def _arm(self, name: str, entry: _CoreEntry, timer: Timer) -> None:
        self.timers.set((name, timer.name), timer.at_ms)
        if timer.at_ms is None:
            entry.timers.discard(timer.name)
        else:
            entry.timers.add(timer.name)
            self._on_armed(timer.at_ms)

    def _drop(self, name: str, entry: _CoreEntry) -> None:
        for timer in entry.timers:
            self.timers.set((name, timer), None)
        if self._budget is not None:
            self._charge(self._budget, entry, 0)
        del self._entries[name]

    # -- units -------------------------------------------------------------------------------------

    def _open_unit(self) -> WriteUnit:
        """The unit that takes new Persists."""
        if len(self._units) == (1 if self.is_writing else 0):
            self._units.append(WriteUnit())
        return self._units[-1]

    def _persist(self, name: str, entry: _CoreEntry, persist: Persist) -> None:
        unit = self._open_unit()
        if not unit.try_add(persist):
            unit.is_due = True
            unit = WriteUnit()
            self._units.append(unit)
            unit.try_add(persist)
        if not persist.is_lazy:
            unit.is_due = True
            entry.unit = unit
            unit.core_names[name] = None
        if persist.producer_id >= 0:
            self._transactions.setdefault(persist.producer_id, {})[name] = None
            self._transaction_epochs[persist.producer_id] = max(
                persist.producer_epoch, self._transaction_epochs.get(persist.producer_id, -1)
            )
        self._wake()

    def next_unit(self, is_lazy_due: bool = False) -> WriteUnit | None:
        """The next unit to write. None: nothing waits, or one is in flight (H1), or only lazy
        Persists wait and `is_lazy_due` is false. `is_lazy_due`: the delay for lazy Persists has
        passed. The caller must call finish_write() or drop the shard.
        """
        if self.is_writing or not self._units or not (is_lazy_due or self._units[0].is_due):
            return None
        self.is_writing = self._units[0].is_due = True
        return self._units[0]

    def on_refused(self, batch: Batch, error: int) -> bool:
        """Handles the owner's refusal of a batch of the unit in flight; the batch takes no offset.
        Returns False if cores depend on the batch and must be reloaded.
        """
        if batch.marker is None:
            return False
        batch.refusal = error
        return not batch.changes_cores

    def finish_write(self) -> None:
        """Sends the replies that wait for the unit in flight, which is now below the high
        watermark.
        """
        unit = self._units.pop(0)
        self.is_writing = False
        self.written_count += 1
        self.end_offset += unit.offset_count
        for name in unit.core_names:
            entry = self._entries.get(name)
            if entry is not None and entry.unit is unit:
                entry.unit = None
                if entry.core.is_empty:
                    self._drop(name, entry)
        _notify(unit, None)
        for name, action in unit.waiting:
            self._send(name, action)

    def fail(self, error: int) -> None:
        """Reports the error to callers that wait for a marker; the runtime answers requests. The
        shard is not used afterwards.
        """
        units, self._units = self._units, []
        for unit in units:
            _notify(unit, error)
        if self._budget is not None:
            for entry in self._entries.values():
                self._charge(self._budget, entry, 0)
        self._entries.clear()

    @property
    def unwritten_count(self) -> int:
        """The number of units that are not written yet, including the one in flight."""
        return len(self._units)

    @property
    def has_only_lazy(self) -> bool:
        """Whether only lazy Persists wait to be written."""
        return len(self._units) == 1 and not self.is_writing and not self._units[0].is_due

    def check(self) -> None:
        assert not self.is_writing or self._units, "H1"
        for unit in self._units:
            assert sum(batch.producer_id < 0 for batch in unit.batches) <= 1, "H3"
            assert unit.batches, "H1"
        assert all(unit.is_due for unit in self._units[:-1]), "H1: lazy writes delay others"
        for name, entry in self._entries.items():
            assert entry.unit is None or (entry.unit in self._units and name in entry.unit.core_names), "H2"
            assert entry.unit is not None or not entry.core.is_empty, "H4"
            assert self._budget is None or entry.size_bytes == cast(MeasuredCore, entry.core).size_bytes, "H6"


def _notify(unit: WriteUnit, error: int | None) -> None:
    """Reports the result to callers that wait for a marker."""
    for batch in unit.batches:
        if batch.on_done is not None:
            batch.on_done(error if batch.refusal is None else batch.refusal)
