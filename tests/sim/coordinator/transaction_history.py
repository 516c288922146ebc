"""Invariants of transactions on a whole cluster. The outcome of a transaction in a partition is the
one that readers of committed records use: the first marker of its producer after its records, in
the committed log.

Checked
    T1  all parts of a transaction, records in partitions and offsets of its group, share one
        outcome; it is the one reported to its producer, and all acknowledged records are included
    T2  no reader of committed records gets one of a transaction that was not committed before in
        that partition
    T3  after everything has been repaired every transaction ends, at most LATE after its timeout:
        the last stable offset of each partition is its high watermark
    T4  a transaction is committed only if its producer requested it, and only that one; in the log
        of __transaction_state a transaction is ended by an EndTxn that named its own producer id
        and epoch, or by fencing
    FENCE  coordinator epochs in a partition's records of one producer never decrease
Partitions of __consumer_offsets are treated alike: the number of the transaction is the offset that
it commits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqd.coordinator.group.records import decode_offset_value
from mqd.coordinator.transaction.records import State, TransactionValue, decode_key, decode_value
from tests.sim.disks import Entry
from tests.sim.kernel import SECOND, Violation
from tests.sim.replica.native_producers import Carried, Parsed, parsed

Part = tuple[Any, int]  # (partition, number of the record in its transaction)
RECORD_KEY = b"record"
OFFSET = -1  # instead of a record's number: an offset that the transaction commits
LATE = 20 * SECOND  # markers are retried once a second; leaders move back to the preferred replica


class Fate:
    """One transaction, as its producer sees it."""

    __slots__ = ("number", "transactional_id", "requested", "confirmed", "acknowledged")

    def __init__(self, number: int, transactional_id: str) -> None:
        self.number = number
        self.transactional_id = transactional_id
        self.requested: bool | None = None  # commit or abort; None: not yet
        self.confirmed: bool | None = None
        self.acknowledged: set[Part] = set()


class _Log:
    """The state derived from a partition's committed records."""

    def __init__(self) -> None:
        self.end = 0
        # producer id -> (transaction, number in it, offset, key)
        self.open: dict[int, list[tuple[int, int, int, bytes | None]]] = {}
        self.outcomes: dict[tuple[int, int], bool] = {}  # (transaction, number in it) -> committed
        self.offset_outcomes: dict[int, bool] = {}  # by offset
        self.coordinator_epochs: dict[int, int] = {}
        self.offsets: dict[bytes, int] = {}  # committed offsets by key
        self.states: dict[str, TransactionValue] = {}  # by transactional id


class TransactionHistory:
    def __init__(self, committed: Callable[[Any], list[Entry]], name: Callable[[Any], str]) -> None:
        """committed: the ghost of a partition, of history.py."""
        self._committed = committed
        self._name = name
        self.fates: dict[int, Fate] = {}
        self.logs: dict[Any, _Log] = {}
        self.outcome: dict[int, tuple[bool, Any]] = {}  # transaction -> committed, where that was first seen
        self.ends: set[tuple[int, int, bool]] = set()  # EndTxn requests sent: producer id, epoch, commit
        self.counts = {
            "begun": 0,
            "committed": 0,
            "aborted": 0,
            "delivered": 0,
            "left out": 0,
            "fenced": 0,
            "markers": 0,
        }

    def begin(self, transactional_id: str) -> Fate:
        number = len(self.fates) + 1
        fate = self.fates[number] = Fate(number, transactional_id)
        self.counts["begun"] += 1
        return fate

    # -- what partitions hold ----------------------------------------------------------------------

    def look(self, partition: Any) -> _Log:
        """Reads the log as far as it is committed now."""
        log = self.logs.get(partition)
        if log is None:
            log = self.logs[partition] = _Log()
        entries = self._committed(partition)
        while log.end < len(entries):
            entry = entries[log.end]
            if isinstance(entry.value, Carried):
                one = parsed(entry.value.batch)
                if one.commit is not None:
                    self._on_marker(partition, log, one)
                elif one.info.is_transactional:
                    self._on_records(log, one)
                else:
                    self._on_states(partition, log, one)
            log.end += 1 + entry.left
        return log

    def _on_states(self, partition: Any, log: _Log, one: Parsed) -> None:
        for key, data in one.records:
            name = decode_key(key) if key is not None else None
            if name is None:
                continue
            if data is None:
                log.states.pop(name, None)
                continue
            state, before = decode_value(data), log.states.get(name)
            log.states[name] = state
            if (
                state.state in (State.PREPARE_COMMIT, State.PREPARE_ABORT)
                and before is not None
                and before.state == State.ONGOING
            ):
                self._on_decision(partition, name, before, state)

    def _on_decision(self, partition: Any, name: str, before: TransactionValue, state: TransactionValue) -> None:
        commit, moved = state.state == State.PREPARE_COMMIT, state.producer_epoch - before.producer_epoch
        if moved > 1 and not commit:
            self.counts["fenced"] += 1
        elif (before.producer_id, before.producer_epoch, commit) not in self.ends:
            raise Violation(
                "T4",
                f"{self._name(partition)}: the transaction of {name} with producer id {before.producer_id} and epoch"
                f" {before.producer_epoch} is {_report(commit)}; no EndTxn with these asked for that",
            )

    def _on_records(self, log: _Log, one: Parsed) -> None:
        held = log.open.setdefault(one.info.producer_id, [])
        for place, (key, value) in enumerate(one.records):
            held.append((*transaction_of(key, value), log.end + place, key))

    def _on_marker(self, partition: Any, log: _Log, one: Parsed) -> None:
        producer_id, commit = one.info.producer_id, bool(one.commit)
        epoch = log.coordinator_epochs.get(producer_id, -1)
        if one.coordinator_epoch < epoch:
            raise Violation(
                "FENCE",
                f"{self._name(partition)}: offset {log.end} is a marker of producer {producer_id} by the coordinator of"
                f" epoch {one.coordinator_epoch}, after one of epoch {epoch}",
            )
        log.coordinator_epochs[producer_id] = one.coordinator_epoch
        held = log.open.pop(producer_id, [])
        numbers = dict.fromkeys(number for number, _, _, _ in held)
        self.counts["markers"] += 1
        if commit and len(numbers) > 1:
            raise Violation(
                "T4",
                f"{self._name(partition)}: the marker at offset {log.end} commits transactions {list(numbers)}"
                " together",
            )
        for number in numbers:
            self._on_outcome(partition, number, commit)
        for number, serial, offset, key in held:
            log.outcomes[number, serial] = commit
            log.offset_outcomes[offset] = commit
            if commit and serial == OFFSET and key is not None:
                log.offsets[key] = number

    def _on_outcome(self, partition: Any, number: int, commit: bool) -> None:
        fate = self.fates[number]
        known = self.outcome.setdefault(number, (commit, partition))
        if known[0] != commit:
            raise Violation(
                "T1",
                f"transaction {number} is {_report(known[0])} in {self._name(known[1])} and {_report(commit)} in"
                f" {self._name(partition)}",
            )
        if known[1] is partition:
            self.counts["committed" if commit else "aborted"] += 1
        if commit and fate.requested is not True:
            raise Violation(
                "T4",
                f"{self._name(partition)}: transaction {number} of {fate.transactional_id} is committed; its producer"
                f" has asked for {'nothing' if fate.requested is None else 'an abort'}",
            )
        if fate.confirmed is not None and fate.confirmed != commit:
            raise Violation(
                "T1",
                f"{self._name(partition)}: transaction {number} is {_report(commit)}, its producer was told that it is"
                f" {_report(fate.confirmed)}",
            )

    # -- readers -----------------------------------------------------------------------------------

    def delivered(self, partition: Any, offset: int, entry: Entry) -> None:
        """T2. For a reader of committed records."""
        if not isinstance(entry.value, Carried) or not parsed(entry.value.batch).info.is_transactional:
            return
        outcome = self.look(partition).offset_outcomes.get(offset)
        if not outcome:
            number, _ = transaction_of(*parsed(entry.value.batch).records[entry.value.place])
            what = "not ended" if outcome is None else "aborted"
            raise Violation(
                "T2",
                f"{self._name(partition)}: offset {offset}, of transaction {number}, is given to a reader of committed"
                f" records; it is {what} there",
            )
        self.counts["delivered"] += 1

    def left_out(self, partition: Any, offset: int) -> None:
        """A reader of committed records has skipped a record: it must belong to an aborted
        transaction.
        """
        if self.look(partition).offset_outcomes.get(offset) is not False:
            raise Violation(
                "T1",
                f"{self._name(partition)}: offset {offset} is left out by a reader of committed records; its"
                " transaction was not aborted",
            )
        self.counts["left out"] += 1

    # -- the end -----------------------------------------------------------------------------------

    def check_end(self, excused: Callable[[Any], bool]) -> None:
        """excused: partitions that no host may lead."""
        for partition, log in self.logs.items():
            self.look(partition)
            left = [number for held in log.open.values() for number, _, _, _ in held]
            if left and not excused(partition):
                raise Violation("T3", f"{self._name(partition)}: transactions {sorted(set(left))} have not ended")
        for fate in self.fates.values():
            for partition, serial in fate.acknowledged if fate.confirmed else ():
                if not excused(partition) and not self.logs[partition].outcomes.get((fate.number, serial)):
                    raise Violation(
                        "T1",
                        f"transaction {fate.number} was confirmed as committed; its record {serial} in"
                        f" {self._name(partition)} was acknowledged and is not there",
                    )


def _report(commit: bool) -> str:
    return "committed" if commit else "aborted"


def transaction_of(key: bytes | None, value: bytes | None) -> tuple[int, int]:
    """(transaction, number of the record in it, or OFFSET)."""
    assert value is not None
    if key is not None and key != RECORD_KEY:
        return decode_offset_value(value).offset, OFFSET
    number, serial = value.split()
    return int(number), int(serial)


def record_of(number: int, serial: int) -> tuple[bytes, bytes]:
    return RECORD_KEY, b"%d %d" % (number, serial)
