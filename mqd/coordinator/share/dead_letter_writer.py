"""Writes the dead letters (KIP-1191) of one share-partition, on the host that leads the partition.
Sans-I/O.

The share-partition's owner persists rejected and exhausted records as Archiving. This core sees
them in the WRITEs that pass its host on their way to the share coordinator, has the letters
written, and then asks the owner to archive the records; the owner's next WRITE confirms that.

A letter is written once, by a transaction that also commits a progress record: the offsets of the
records that its letters are for, in the metadata of a committed offset. One transaction at a time,
in this order:

    FENCING     InitProducerId ends an open transaction of an earlier writer of this share-partition,
                whose later steps then fail
    LOADING     the records that are Archiving, from the share coordinator, which refuses the writer
                of an earlier leader; that writer then stops
    READING     the progress record of the last transaction that was committed
    IDLE        nothing is Archiving
    WRITING     letters into the dead-letter topic
    WRITING_PROGRESS
                the progress record, in the same transaction
    COMMITTING  EndTxn
    ARCHIVING   the owner has been asked to archive the records; ends with the owner's WRITE

After a failed step, for example because another writer has fenced this one, the writer backs off
and starts again with FENCING, indefinitely. LOADING comes after FENCING: in the other order, a
writer that was delayed between the two would write letters for records that another writer has
finished in the meantime.

Invariants (check())
    L1  each record that is Archiving gets one committed letter, unless the log loses the record or
        dead letters are switched off
    L2  a transaction begins only when all records of the last progress record are archived, so one
        progress record is enough
    L3  a progress record is valid only for its own state epoch, because after AlterShareGroupOffsets
        a record may be rejected again. It is valid only for offsets at which the log still has the
        records of its leader epoch, because other records may have taken the offsets of lost ones
    L4  only records that have a committed letter, or need none, are reported to the owner
Bounds: LETTERS_MAX letters and a progress record of at most `progress_bytes_max` bytes per
transaction.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from mqd.coordinator.share.runs import ARCHIVING as ARCHIVING_STATE
from mqd.coordinator.share.runs import Run

FENCING, LOADING, READING, IDLE, WRITING, WRITING_PROGRESS, COMMITTING, ARCHIVING, STOPPED = (
    "fencing",
    "loading",
    "reading",
    "idle",
    "writing",
    "writing progress",
    "committing",
    "archiving",
    "stopped",
)
STEPS = frozenset((FENCING, LOADING, READING, WRITING, WRITING_PROGRESS, COMMITTING))  # phases that end with an outcome
LETTERS_MAX = 500
BACKOFF_MS, BACKOFF_MS_MAX = 1_000, 30_000  # as in Kafka, which gives up after five attempts
ARCHIVE_TIMEOUT_MS = 2_000  # without the owner's WRITE, start again: there may be a new owner
PROGRESS_VERSION = "2"


class Letter(NamedTuple):
    offset: int
    deliveries: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """A step to be carried out; its outcome is Outcome(token)."""

    token: int
    kind: str  # one of STEPS
    letters: tuple[Letter, ...] = ()
    progress: str = ""


class Archive(msgspec.Struct, frozen=True, gc=False):
    """Asks the owner to archive these offsets if it is still in these epochs."""

    state_epoch: int
    leader_epoch: int
    ranges: tuple[tuple[int, int], ...]


class Wake(msgspec.Struct, frozen=True, gc=False):
    """Asks the caller to call handle(Woken()) at that time. Replaces the previous Wake."""

    at_ms: int


class LoadedState(msgspec.Struct, frozen=True, gc=False):
    state_epoch: int
    runs: tuple[Run, ...]


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """`loaded`: result of LOADING. `progress`: result of READING, None if there is none.
    `progress_end`: the offset from which the log no longer has the records that the progress
    record refers to (they were lost in an unclean election); None if it has all of them.
    `is_unwanted`: WRITING has written nothing, because these records must not have letters.
    """

    token: int
    succeeded: bool = True
    is_superseded: bool = False  # a result of LOADING: another host leads
    loaded: LoadedState | None = None
    progress: str | None = None
    progress_end: int | None = None
    is_unwanted: bool = False


class ObservedWrite(msgspec.Struct, frozen=True, gc=False):
    """A WRITE has succeeded. `start_offset` -1: it has not moved."""

    state_epoch: int
    start_offset: int
    runs: tuple[Run, ...]


class Woken(msgspec.Struct, frozen=True, gc=False):
    pass


Action = Step | Archive | Wake


class DeadLetterWriter:
    """`handle` is the only mutator. A writer is created, and started, when a READ or WRITE of this
    leader epoch has records that are Archiving.
    """

    def __init__(self, leader_epoch: int, progress_bytes_max: int = 4_000) -> None:
        self.state_epoch, self.leader_epoch = -1, leader_epoch
        self.progress_bytes_max = progress_bytes_max
        self.phase = IDLE
        self.pending: dict[int, int] = {}  # offset -> deliveries, of the records that are Archiving
        self.pending_since_ms: dict[int, int] = {}  # offset -> when it was first seen as Archiving
        self.batch: tuple[Letter, ...] = ()
        self.to_archive: set[int] = set()  # offsets that the owner is asked to archive
        self._token = 0
        self._backoff_ms = BACKOFF_MS
        self._due_ms: int | None = None
        self._is_ready = False  # FENCING, LOADING and READING have succeeded since the last failure
        self.letter_count = 0  # letters committed so far

    # -- events ------------------------------------------------------------------------------------

    @property
    def token(self) -> int:
        """The token of the step in progress."""
        return self._token

    def start(self) -> list[Action]:
        return [self._step(FENCING)]

    def handle(self, event: ObservedWrite | Outcome | Woken, now_ms: int) -> list[Action]:
        if self.phase == STOPPED:
            return []
        if isinstance(event, ObservedWrite):
            if self.state_epoch not in (-1, event.state_epoch):  # AlterShareGroupOffsets
                self.to_archive.clear()
                self.state_epoch, self._due_ms = -1, None
                return [self._step(FENCING)]
            self._observe(event.start_offset, event.runs, now_ms)
            if self.phase == ARCHIVING and not self.to_archive:
                self.phase, self._due_ms = IDLE, None
            return self._next_step()
        if isinstance(event, Woken):
            return self._on_woken(now_ms)
        if event.token != self._token or self.phase not in STEPS or self._due_ms is not None:
            return []
        if event.is_superseded:
            self.phase = STOPPED
            return []
        if not event.succeeded:
            return self._on_failure(now_ms)
        return self._on_done(event, now_ms)

    def _observe(self, start_offset: int, runs: Iterable[Run], now_ms: int) -> None:
        for first, last, state, deliveries in runs:
            for offset in range(first, last + 1):
                if state == ARCHIVING_STATE:
                    self.pending[offset] = deliveries
                    self.pending_since_ms.setdefault(offset, now_ms)
                elif self.pending.pop(offset, None) is not None:
                    del self.pending_since_ms[offset]
        for offset in [offset for offset in self.pending if offset < start_offset]:
            del self.pending[offset], self.pending_since_ms[offset]
        self.to_archive &= self.pending.keys()

    def _on_woken(self, now_ms: int) -> list[Action]:
        if self._due_ms is None or now_ms < self._due_ms:
            return []
        self._due_ms = None
        self.to_archive.clear()
        return [self._step(FENCING)]

    def _on_done(self, event: Outcome, now_ms: int) -> list[Action]:
        if self.phase == FENCING:
            return [self._step(LOADING)]
        if self.phase == LOADING:
            assert event.loaded is not None
            self.state_epoch = event.loaded.state_epoch
            old_since_ms, self.pending_since_ms = self.pending_since_ms, {}
            self.pending.clear()
            self._observe(-1, event.loaded.runs, now_ms)
            self.pending_since_ms.update(
                (offset, old_since_ms[offset]) for offset in old_since_ms.keys() & self.pending_since_ms.keys()
            )
            return [self._step(READING)]
        if self.phase == READING:
            self._is_ready = True
            self.phase = IDLE
            self.to_archive = self._offsets_in_progress(event.progress, event.progress_end)
            return self._archive(now_ms) if self.to_archive else self._next_step()
        if self.phase == WRITING and event.is_unwanted:
            self.to_archive = {letter.offset for letter in self.batch} & self.pending.keys()
            self.phase = IDLE
            return self._archive(now_ms) if self.to_archive else self._next_step()
        if self.phase == WRITING:
            return [self._step(WRITING_PROGRESS, progress=self._progress(self.batch))]
        if self.phase == WRITING_PROGRESS:
            return [self._step(COMMITTING)]
        self._backoff_ms = BACKOFF_MS
        self.letter_count += len(self.batch)
        self.to_archive = {letter.offset for letter in self.batch} & self.pending.keys()  # L4
        self.phase = IDLE
        return self._archive(now_ms) if self.to_archive else self._next_step()

    def _on_failure(self, now_ms: int) -> list[Action]:
        self._is_ready = False
        self._due_ms = now_ms + self._backoff_ms
        self._backoff_ms = min(self._backoff_ms * 2, BACKOFF_MS_MAX)
        return [Wake(self._due_ms)]

    # -- steps -------------------------------------------------------------------------------------

    def _next_step(self) -> list[Action]:
        if self.phase != IDLE or not self.pending:
            return []
        if not self._is_ready:
            return [self._step(FENCING)]
        self.batch = self._next_batch()
        return [self._step(WRITING, self.batch)]

    def _step(self, kind: str, letters: tuple[Letter, ...] = (), progress: str = "") -> Step:
        self.phase = kind
        self._token += 1
        return Step(self._token, kind, letters, progress)

    def _archive(self, now_ms: int) -> list[Action]:
        self.phase = ARCHIVING
        self._due_ms = now_ms + ARCHIVE_TIMEOUT_MS
        ranges = tuple(ranges_of(sorted(self.to_archive)))
        return [Archive(self.state_epoch, self.leader_epoch, ranges), Wake(self._due_ms)]

    def _next_batch(self) -> tuple[Letter, ...]:
        """The next letters: as many as the progress record has room for."""
        chosen = [Letter(offset, self.pending[offset]) for offset in sorted(self.pending)[:LETTERS_MAX]]
        while len(chosen) > 1 and len(self._progress(chosen)) > self.progress_bytes_max:
            del chosen[len(chosen) // 2 :]
        return tuple(chosen)

    # -- the progress record -----------------------------------------------------------------------

    def _progress(self, letters: Iterable[Letter]) -> str:
        return Progress(self.state_epoch, self.leader_epoch, ranges_of(letter.offset for letter in letters)).encode()

    def _offsets_in_progress(self, text: str | None, end: int | None) -> set[int]:
        """The pending offsets that have a letter according to the progress record."""
        progress = parse_progress(text or "")
        if progress is None or progress.state_epoch != self.state_epoch:  # L3
            return set()
        recorded = {
            offset for offset in self.pending if any(first <= offset <= last for first, last in progress.ranges)
        }
        return recorded if end is None else {offset for offset in recorded if offset < end}

    def check(self) -> None:
        assert self.to_archive <= self.pending.keys(), "L4"
        assert not self.to_archive or self.phase in (ARCHIVING, STOPPED), "L2"
        assert self.phase != IDLE or not self.pending or self._due_ms is not None, "pending, and no step is due"


def ranges_of(offsets: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending offsets as ranges (first, last)."""
    ranges: list[tuple[int, int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset - 1:
            ranges[-1] = (ranges[-1][0], offset)
        else:
            ranges.append((offset, offset))
    return ranges


class Progress(NamedTuple):
    """The letters of a transaction. `leader_epoch`: the epoch in which they were written; -1 in
    version 1.
    """

    state_epoch: int
    leader_epoch: int
    ranges: list[tuple[int, int]]

    def encode(self) -> str:
        """`2;state epoch;leader epoch;first-length,...`. `first` is relative to the end of the
        previous range; `-length` (the last offset minus the first) is absent for a single offset.
        """
        parts, previous = [], 0
        for first, last in self.ranges:
            parts.append(f"{first - previous}" if first == last else f"{first - previous}-{last - first}")
            previous = last
        return f"{PROGRESS_VERSION};{self.state_epoch};{self.leader_epoch};{','.join(parts)}"


def parse_progress(text: str) -> Progress | None:
    """The progress record in the text. None: there is none, or this version does not know its
    format.
    """
    try:
        version, *epochs, parts = text.split(";")
        if (version, len(epochs)) not in (("1", 1), (PROGRESS_VERSION, 2)):
            return None
        ranges, previous = [], 0
        for part in parts.split(","):
            first, _, length = part.partition("-")
            begin = previous + int(first)
            previous = begin + int(length or 0)
            ranges.append((begin, previous))
        return Progress(int(epochs[0]), int(epochs[1]) if len(epochs) > 1 else -1, ranges)
    except ValueError:
        return None
