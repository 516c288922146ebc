"""One loaded partition of a coordinator: its cores, and what they want written. Sans-I/O: the
runtime writes units and says how it went.

A unit is what is written together: Persists that wait at the same time, in few record batches, one
behind the other. One unit is under way at a time; what cores persist meanwhile gathers in the next
one. So the rate of writes follows the disk, and a write carries what a thousand requests wanted.

Invariants (check())
    H1  units are written in the order in which their Persists were made; at most one is under way
    H2  a reply (or another effect) leaves after everything that the same core has persisted before
        it, but for what is lazy, is written, and those of one core leave in their order
    H3  a unit has at most one batch without a producer id: batches of a unit that fails in part
        never split what one batch would have kept together
    H4  a core that is_empty and has nothing under way is not kept; nor are its timers
    H5  a marker ends what is open of its producer only if that is of the marker's epoch or before;
        a bumped one (KIP-890): only of an epoch before. Else it is refused, and it has been written
        before
"""

from collections.abc import Callable, Iterable

from mqd.coordinator.actions import Action, Core, Cores, Effect, KeyValue, Persist, Reply, Timer, TransactionEnded
from mqd.coordinator.log import BATCH_BYTES_MAX, RECORDS_MAX, marker_batch, record_size_max, records_batch
from mqd.coordinator.timers import Timers
from mqd.protocol.errors import ErrorCode

_OVERHEAD_BYTES = 128


class TooLarge(Exception):
    """One Persist alone is more than a batch may hold: it cannot be written, and the core that
    wants it has changed already.
    """


class Batch:
    """What becomes one record batch."""

    __slots__ = (
        "done",
        "ends_something",
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
        # of a marker: called with None when written, or with the error's code
        self.done: Callable[[int | None], None] | None = None
        self.ends_something = False  # cores have changed by this marker
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


class Unit:
    """`is_due`: it holds something that somebody waits for, not only what is lazy."""

    __slots__ = ("batches", "held", "is_due", "names")

    def __init__(self) -> None:
        self.is_due = False
        self.batches: list[Batch] = []
        self.names: dict[str, None] = {}
        self.held: list[tuple[str, Reply | Effect]] = []

    @property
    def offset_count(self) -> int:
        return sum(batch.offset_count for batch in self.batches)

    def take(self, persist: Persist) -> bool:
        """False: it must wait for the next unit (H3)."""
        size = sum(record_size_max(key, value) for key, value in persist.records)
        last = self.batches[-1] if self.batches else None
        fits = (
            last is not None
            and last.size_bytes + size <= BATCH_BYTES_MAX
            and len(last.records) + len(persist.records) <= RECORDS_MAX
        )
        same = (
            last is not None
            and last.marker is None
            and (last.producer_id, last.producer_epoch) == (persist.producer_id, persist.producer_epoch)
        )
        if not (fits and same):
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


class Loaded:
    """What the log of a partition adds up to."""

    __slots__ = ("cores", "end_offset", "epochs", "record_count", "skipped_count", "transactions")

    def __init__(self, end_offset: int) -> None:
        self.end_offset = end_offset
        self.cores: dict[str, Core] = {}
        # producer id -> cores that hold something of its open transaction
        self.transactions: dict[int, dict[str, None]] = {}
        self.epochs: dict[int, int] = {}  # of these producers
        self.record_count = 0
        self.skipped_count = 0


class _Entry:
    __slots__ = ("core", "timers", "unit")

    def __init__(self, core: Core) -> None:
        self.core = core
        self.unit: Unit | None = None  # the newest that is not written and holds something of this core
        self.timers: set[str] = set()


class Shard:
    """`reply(number, response)` answers a request; `carry_out(name, effect)` does what else a core
    wants done; `wake()` says that there is a unit to write, `armed(at_ms)` that there is a timer.
    """

    def __init__(
        self,
        cores: Cores,
        loaded: Loaded,
        leader_epoch: int,
        reply: Callable[[int, object], None],
        carry_out: Callable[[str, Effect], None],
        wake: Callable[[], None],
        armed: Callable[[int], None],
    ) -> None:
        self.leader_epoch = leader_epoch
        self.end_offset = loaded.end_offset  # where the next batch must land: nobody else writes here
        self.timers = Timers()
        self._cores = cores
        self._entries = {name: _Entry(core) for name, core in loaded.cores.items()}
        self._transactions = loaded.transactions
        self._epochs = loaded.epochs
        self._reply = reply
        self._carry_out = carry_out
        self._wake = wake
        self._armed = armed
        self._units: list[Unit] = []  # the first one may be under way
        self.under_way = False
        self.written_count = 0  # units

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
        """Raises TooLarge: the core has changed and cannot be kept."""
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = _Entry(self._cores.make(name))
        self._run(name, entry, entry.core.handle(event, now_ms))

    def handle_known(self, name: str, event: object, now_ms: int) -> None:
        """As handle, but for a core that is gone nothing happens: its timers are void."""
        if name in self._entries:
            self.handle(name, event, now_ms)

    def fire(self, timer: tuple[str, str]) -> str | None:
        """A due timer's core, or None."""
        name, what = timer
        entry = self._entries.get(name)
        if entry is None or what not in entry.timers:
            return None
        entry.timers.discard(what)
        return name

    def end_transaction(
        self,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int,
        commit: bool,
        now_ms: int,
        done: Callable[[int | None], None],
        is_bumped: bool = False,
    ) -> None:
        """Writes the marker; every core that has something pending of that producer learns of it. A
        unit keeps its order, so what was written before is before (H5).
        """
        if producer_epoch < self._epochs.get(producer_id, -1) + is_bumped:
            done(int(ErrorCode.INVALID_PRODUCER_EPOCH))
            return
        unit = self._gathering()
        batch = Batch(producer_id, producer_epoch, (coordinator_epoch, commit))
        batch.done = done
        unit.batches.append(batch)
        unit.is_due = True
        event = TransactionEnded(producer_id, producer_epoch, commit)
        self._epochs.pop(producer_id, None)
        names = self._transactions.pop(producer_id, {})
        batch.ends_something = bool(names)
        for name in names:
            entry = self._entries.get(name)
            if entry is None:
                continue
            entry.unit = unit
            unit.names[name] = None
            self._run(name, entry, entry.core.handle(event, now_ms))
        self._wake()

    def _run(self, name: str, entry: _Entry, actions: list[Action]) -> None:
        for action in actions:
            kind = type(action)
            if kind is Timer:
                self._arm(name, entry, action)
            elif kind is Persist:
                if action.records:
                    self._persist(name, entry, action)
            elif entry.unit is None:
                self._say(name, action)
            else:
                entry.unit.held.append((name, action))  # H2
        if entry.unit is None and entry.core.is_empty:
            self._drop(name, entry)

    def _say(self, name: str, action: Reply | Effect) -> None:
        if type(action) is Reply:
            self._reply(action.request, action.response)
        else:
            self._carry_out(name, action)

    def _arm(self, name: str, entry: _Entry, timer: Timer) -> None:
        self.timers.set((name, timer.name), timer.at_ms)
        if timer.at_ms is None:
            entry.timers.discard(timer.name)
        else:
            entry.timers.add(timer.name)
            self._armed(timer.at_ms)

    def _drop(self, name: str, entry: _Entry) -> None:
        for timer in entry.timers:
            self.timers.set((name, timer), None)
        del self._entries[name]

    # -- units -------------------------------------------------------------------------------------

    def _gathering(self) -> Unit:
        """The unit that what comes now goes into."""
        if len(self._units) == (1 if self.under_way else 0):
            self._units.append(Unit())
        return self._units[-1]

    def _persist(self, name: str, entry: _Entry, persist: Persist) -> None:
        unit = self._gathering()
        if not unit.take(persist):
            unit.is_due = True
            unit = Unit()
            self._units.append(unit)
            unit.take(persist)
        if not persist.is_lazy:
            unit.is_due = True
            entry.unit = unit
            unit.names[name] = None
        if persist.producer_id >= 0:
            self._transactions.setdefault(persist.producer_id, {})[name] = None
            self._epochs[persist.producer_id] = max(persist.producer_epoch, self._epochs.get(persist.producer_id, -1))
        self._wake()

    def next_unit(self, is_late: bool = False) -> Unit | None:
        """To be written now; None: nothing waits, or one is under way (H1), or only what is lazy
        waits and it is not late. The caller answers with written() or drops the shard.
        """
        if self.under_way or not self._units or not (is_late or self._units[0].is_due):
            return None
        self.under_way = self._units[0].is_due = True
        return self._units[0]

    def refuse(self, batch: Batch, error: int) -> bool:
        """A batch of the unit under way was refused by the partition's owner, and takes no offset.
        False: cores rest on it, they are to be loaded anew.
        """
        if batch.marker is None:
            return False
        batch.refusal = error
        return not batch.ends_something

    def written(self) -> None:
        """The unit under way is below the high watermark: what rests on it may be said."""
        unit = self._units.pop(0)
        self.under_way = False
        self.written_count += 1
        self.end_offset += unit.offset_count
        for name in unit.names:
            entry = self._entries.get(name)
            if entry is not None and entry.unit is unit:
                entry.unit = None
                if entry.core.is_empty:
                    self._drop(name, entry)
        _tell(unit, None)
        for name, action in unit.held:
            self._say(name, action)

    def fail(self, error: int) -> None:
        """Whoever waits for a marker is told; requests are the runtime's to answer. The shard is
        not used afterwards.
        """
        units, self._units = self._units, []
        for unit in units:
            _tell(unit, error)
        self._entries.clear()

    @property
    def waiting_count(self) -> int:
        return len(self._units)

    @property
    def is_lazy(self) -> bool:
        """Something is to be written, but nobody waits for it."""
        return len(self._units) == 1 and not self.under_way and not self._units[0].is_due

    def check(self) -> None:
        assert not self.under_way or self._units, "H1"
        for unit in self._units:
            assert sum(batch.producer_id < 0 for batch in unit.batches) <= 1, "H3"
            assert unit.batches, "H1"
        assert all(unit.is_due for unit in self._units[:-1]), "H1: what is lazy holds up what is not"
        for name, entry in self._entries.items():
            assert entry.unit is None or (entry.unit in self._units and name in entry.unit.names), "H2"
            assert entry.unit is not None or not entry.core.is_empty, "H4"


def _tell(unit: Unit, error: int | None) -> None:
    """Whoever waits for a marker."""
    for batch in unit.batches:
        if batch.done is not None:
            batch.done(error if batch.refusal is None else batch.refusal)
