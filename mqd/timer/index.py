"""The pending records of one partition, ordered by (due, offset), in bounded memory.

An entry is 16 bytes: when it is due, and the record's offset. An entry with the bitwise complement
of an offset cancels the entry of that offset. Entries that are due before `loaded_end` are in
memory. Later ones are in files, one for each day. The file of the next day, hour, minute or second
is split into files of the next finer level when it is needed and too large to be loaded as a whole.

    level             day         hour        minute      second      millisecond
    due before:
    in files          any time    < ends[0]   < ends[1]   < ends[2]   < ends[3]
    in memory                                                         < loaded_end

I1  loaded_end <= ends[3] <= ends[2] <= ends[1] <= ends[0]; an entry is in the file of the finest
    level that reaches its due time.
I2  Memory holds at most 2 * entry_count_max entries, plus those that are due in one millisecond.
    The write buffers of all files together hold at most entry_count_max entries.
I3  The manifest names files and sizes that are on disk. A file is removed only once a manifest
    that does not name it is on disk. So open() always finds the state that a single save() wrote.

The index can be rebuilt from the log at any time, but that takes minutes for 10^8 records; the
files make that unnecessary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from mqd.timer.storage import Storage

WIDTHS_MS = (86_400_000, 3_600_000, 60_000, 1_000, 1)
ENTRY_COUNT_MAX = 1 << 18
MANIFEST = "manifest"
_ENTRY_BYTES = 16
_VERSION = 1
_FIRST_MS = 0  # nothing is due before the epoch
_NO_ENTRIES: NDArray[np.int64] = np.empty((0, 2), np.int64)


class Entry(NamedTuple):
    due_ms: int
    offset: int


class Manifest(msgspec.Struct):
    version: int
    end_offset: int  # every record below it is in the index, delivered or cancelled
    loaded_end: int
    ends: list[int]
    files: list[tuple[int, int, str, int, int]]  # level, start, name, size, first offset
    loaded: str  # name of the file of the entries in memory
    loaded_bytes: int
    serial: int
    count: int


class _File:
    """A file of entries, with a name that was never used before. `first_offset`: the lowest offset
    in it.
    """

    __slots__ = ("buffer", "dirty", "first_offset", "name", "size_bytes")

    def __init__(self, name: str, size_bytes: int = 0, first_offset: int = 1 << 62) -> None:
        self.name, self.size_bytes, self.first_offset = name, size_bytes, first_offset
        self.buffer: list[int] = []
        self.dirty = False


class Index:
    """`count`: the number of pending entries. It may be one too low for each record cancelled
    twice.
    """

    def __init__(self, storage: Storage, entry_count_max: int = ENTRY_COUNT_MAX) -> None:
        self._storage = storage
        self._entry_count_max = entry_count_max
        self._ends = [_FIRST_MS] * (len(WIDTHS_MS) - 1)
        self._loaded_end = _FIRST_MS
        self._files: dict[tuple[int, int], _File] = {}  # by level and start
        self._buffered_count = 0
        # in memory: sorted entries (the first `_front_taken` were taken), and a heap of entries added
        # later
        self._front, self._front_taken = _NO_ENTRIES, 0
        self._recent: list[Entry] = []
        self._cancelled: set[int] = set()  # offsets of cancelled entries in memory
        self._floor = 0  # entries with lower offsets are ignored
        self._garbage: list[str] = []  # files to remove after the next save()
        self._serial = 0
        self._loaded_name = ""
        self.count = 0

    @classmethod
    def open(cls, storage: Storage, entry_count_max: int = ENTRY_COUNT_MAX) -> tuple[Index, int]:
        """Returns the saved index and the offset up to which it was built; an empty index and -1 if
        there is none that can be used.
        """
        index = cls(storage, entry_count_max)
        names = set(storage.names())
        manifest = None
        if MANIFEST in names:
            try:
                manifest = msgspec.json.decode(storage.read(MANIFEST, 0, storage.size(MANIFEST)), type=Manifest)
            except msgspec.MsgspecError:
                manifest = None
        if manifest is not None and not index._adopt(manifest, names):
            index, manifest = cls(storage, entry_count_max), None
        kept = {MANIFEST, manifest.loaded, *(row[2] for row in manifest.files)} if manifest is not None else set()
        for name in names - kept:
            storage.remove(name)
        return index, manifest.end_offset if manifest is not None else -1

    def _adopt(self, manifest: Manifest, names: set[str]) -> bool:
        sizes = {row[2]: row[3] for row in manifest.files} | {manifest.loaded: manifest.loaded_bytes}
        if manifest.version != _VERSION or any(
            name not in names or self._storage.size(name) < size for name, size in sizes.items()
        ):
            return False
        for level, start, name, size_bytes, first_offset in manifest.files:
            self._storage.truncate(name, size_bytes)
            self._files[level, start] = _File(name, size_bytes, first_offset)
        self._ends, self._loaded_end = list(manifest.ends), manifest.loaded_end
        self._front = self._read_entries(manifest.loaded, 0, manifest.loaded_bytes)
        self._loaded_name, self._serial, self.count = manifest.loaded, manifest.serial, manifest.count
        return True

    # -- adding ------------------------------------------------------------------------------------

    def add(self, due_ms: int, offset: int) -> None:
        self.count += 1
        if due_ms < self._loaded_end:
            heapq.heappush(self._recent, Entry(due_ms, offset))
            if len(self._recent) > self._entry_count_max:
                self._sort_memory()
        else:
            self._write(due_ms, offset)

    def cancel(self, due_ms: int, offset: int) -> None:
        """Cancels the pending entry of `offset`, which is due at `due_ms`."""
        self.count = max(self.count - 1, 0)
        if due_ms < self._loaded_end:
            self._cancelled.add(offset)
        else:
            self._write(due_ms, ~offset)

    def _write(self, due_ms: int, offset: int) -> None:
        level = self._level_of(due_ms)
        file = self._file((level, due_ms - due_ms % WIDTHS_MS[level]))
        file.buffer += (due_ms, offset)
        if 0 <= offset < file.first_offset:
            file.first_offset = offset
        self._buffered_count += 1
        if self._buffered_count >= self._entry_count_max:
            self._flush()

    def _level_of(self, due_ms: int) -> int:
        return next((level for level in range(len(WIDTHS_MS) - 1, 0, -1) if due_ms < self._ends[level - 1]), 0)

    def _file(self, key: tuple[int, int]) -> _File:
        file = self._files.get(key)
        if file is None:
            file = self._files[key] = _File(self._new_name())
        return file

    def _new_name(self) -> str:
        self._serial += 1
        return str(self._serial)

    def _flush(self) -> None:
        for file in self._files.values():
            if file.buffer:
                self._append(file, np.array(file.buffer, np.int64).tobytes())
                file.buffer = []
        self._buffered_count = 0

    def _append(self, file: _File, data: bytes) -> None:
        self._storage.append(file.name, data)
        file.size_bytes += len(data)
        file.dirty = True

    def _sort_memory(self) -> None:
        """Sorts the entries in memory, and moves the excess back into files."""
        rows = self._entries_in_memory()
        if len(rows) > 2 * self._entry_count_max:
            cut = int(rows[self._entry_count_max, 0])
            self._lower_end(cut)
            kept_count = int(np.searchsorted(rows[:, 0], cut))
            for due_ms, offset in rows[kept_count:].tolist():
                self._write(due_ms, offset)
            rows = rows[:kept_count]
        self._front, self._front_taken, self._recent = rows, 0, []

    def _lower_end(self, cut: int) -> None:
        """Lowers loaded_end to `cut`, and the ends of the levels with it. The entries of files
        whose level has changed are rewritten.
        """
        self._loaded_end = cut
        self._ends = [(cut // width + 1) * width for width in WIDTHS_MS[:-1]]
        for key in [key for key in self._files if key[0] != self._level_of(key[1])]:
            file = self._take_out(key)
            for rows in self._read_all(file):
                for due_ms, offset in rows.tolist():
                    self._write(due_ms, offset)

    def _take_out(self, key: tuple[int, int]) -> _File:
        file = self._files.pop(key)
        self._buffered_count -= len(file.buffer) // 2
        if file.size_bytes:
            self._garbage.append(file.name)
        return file

    def _entries_in_memory(self) -> NDArray[np.int64]:
        """The entries in memory, without cancelled ones."""
        rest = self._front[self._front_taken :]
        rows = np.concatenate([rest, np.array(self._recent, np.int64)]) if self._recent else rest
        if self._cancelled:
            rows = rows[~np.isin(rows[:, 1], np.fromiter(self._cancelled, np.int64))]
            self._cancelled = set()
        return _sort_rows(rows) if self._recent else rows

    # -- taking ------------------------------------------------------------------------------------

    def take(self, now_ms: int, count_max: int) -> list[Entry]:
        """Removes and returns the next entries that are due, in order, at most `count_max`."""
        while True:
            taken = self._take(now_ms, count_max)
            pending = taken
            if self._cancelled or self._floor:
                pending = [
                    entry for entry in taken if entry.offset not in self._cancelled and entry.offset >= self._floor
                ]
                self._cancelled.difference_update(entry.offset for entry in taken)
            if pending or not taken:
                break
        self.count = max(self.count - len(pending), 0)
        return pending

    def _take(self, now_ms: int, count_max: int) -> list[Entry]:
        self._load(now_ms)
        end = min(self._front_taken + count_max, len(self._front))
        due_end = self._front_taken + int(np.searchsorted(self._front[self._front_taken : end, 0], now_ms, "right"))
        taken = [Entry(*row) for row in self._front[self._front_taken : due_end].tolist()]
        self._front_taken = due_end
        recent: list[Entry] = []
        while self._recent and len(recent) < count_max and self._recent[0].due_ms <= now_ms:
            recent.append(heapq.heappop(self._recent))
        if recent:
            taken = list(heapq.merge(taken, recent))
            for entry in taken[count_max:]:
                heapq.heappush(self._recent, entry)
            del taken[count_max:]
        return taken

    def forget_below(self, offset: int) -> None:
        """Ignores entries below `offset`, the log's start: none of them is pending any more,
        because the start does not move past a pending record (T4 in core.py).
        """
        self._floor = offset

    def next_due_ms(self) -> int | None:
        """When the next entry is due, or an earlier time: for entries in files, only the file's
        start is known.
        """
        times_ms = [start for _, start in self._files]
        if self._front_taken < len(self._front):
            times_ms.append(int(self._front[self._front_taken, 0]))
        if self._recent:
            times_ms.append(self._recent[0].due_ms)
        return min(times_ms, default=None)

    def first_offset(self) -> int | None:
        """A lower bound of the offsets of pending records; None: there are none."""
        offsets = [file.first_offset for file in self._files.values()]
        if self._front_taken < len(self._front):
            offsets.append(int(self._front[self._front_taken :, 1].min()))
        offsets += [entry.offset for entry in self._recent]
        return min(offsets, default=None)

    def drop_delivered(self, last: Entry) -> None:
        """Drops the entries up to `last`, which have been delivered."""
        while self.take(last.due_ms - 1, self._entry_count_max):
            pass
        # of the entries that are due in the same millisecond as `last`, drop only those up to its
        # offset
        self._load(last.due_ms)
        rows = _sort_rows(np.array(self._recent, np.int64)) if self._recent else _NO_ENTRIES
        rows = _sort_rows(np.concatenate([self._front[self._front_taken :], rows]))
        delivered = (rows[:, 0] < last.due_ms) | (rows[:, 0] == last.due_ms) & (rows[:, 1] <= last.offset)
        self.count = max(self.count - int(delivered.sum()), 0)
        self._front, self._front_taken, self._recent = rows[~delivered], 0, []

    def _load(self, now_ms: int) -> None:
        """Loads due entries into memory, until all are loaded or entry_count_max is reached."""
        while (
            self._loaded_end <= now_ms
            and len(self._front) - self._front_taken + len(self._recent) < self._entry_count_max
        ):
            if not self._files:
                # nothing is stored: no need to look at each day that has passed
                self._advance_to(max(self._loaded_end, now_ms - now_ms % WIDTHS_MS[0] + WIDTHS_MS[0]))
                return
            level = max(i for i in range(len(WIDTHS_MS)) if i == 0 or self._loaded_end < self._ends[i - 1])
            first = min(start for _, start in self._files)
            to = min(first, now_ms) if level == 0 else min(first, now_ms, self._ends[level - 1])
            to -= to % WIDTHS_MS[level]
            if to > self._loaded_end:  # nothing is in between
                self._advance_to(to)
                continue
            key = level, self._loaded_end
            file = self._files.get(key)
            end = self._loaded_end + WIDTHS_MS[level]
            is_finest = level == len(WIDTHS_MS) - 1
            if file is not None and not is_finest and self._count_in(file) > self._entry_count_max:
                self._split(key, level + 1)
                continue
            if file is not None:
                self._load_file(key)
            self._advance_to(end)

    def _advance_to(self, end: int) -> None:
        self._loaded_end = end
        self._ends = [max(level_end, end) for level_end in self._ends]

    def _count_in(self, file: _File) -> int:
        return file.size_bytes // _ENTRY_BYTES + len(file.buffer) // 2

    def _read_all(self, file: _File) -> Iterable[NDArray[np.int64]]:
        step = self._entry_count_max * _ENTRY_BYTES
        for at in range(0, file.size_bytes, step):
            yield self._read_entries(file.name, at, min(step, file.size_bytes - at))
        if file.buffer:
            yield np.array(file.buffer, np.int64).reshape(-1, 2)

    def _split(self, key: tuple[int, int], level: int) -> None:
        width = WIDTHS_MS[level]
        file = self._take_out(key)
        self._ends[level - 1] = key[1] + WIDTHS_MS[level - 1]
        for rows in self._read_all(file):
            starts = rows[:, 0] - rows[:, 0] % width
            for start in np.unique(starts).tolist():
                part = np.ascontiguousarray(rows[starts == start])
                finer = self._file((level, start))
                self._append(finer, part.tobytes())
                offsets = part[part[:, 1] >= 0, 1]
                if len(offsets):
                    finer.first_offset = min(finer.first_offset, int(offsets.min()))

    def _load_file(self, key: tuple[int, int]) -> None:
        rows = np.concatenate([_NO_ENTRIES, *self._read_all(self._take_out(key))])
        is_cancel = rows[:, 1] < 0
        if is_cancel.any():
            is_cancelled = np.isin(rows[:, 1], ~rows[is_cancel, 1])
            rows = rows[~(is_cancelled | is_cancel)]
        self._front, self._front_taken = np.concatenate([self._front[self._front_taken :], _sort_rows(rows)]), 0

    def _read_entries(self, name: str, at: int, size_bytes: int) -> NDArray[np.int64]:
        data = self._storage.read(name, at, size_bytes) if size_bytes else b""
        if len(data) != size_bytes:
            raise OSError(f"{name} of a timer's index is shorter than it was")
        return np.frombuffer(data, np.int64).reshape(-1, 2)

    # -- saving ------------------------------------------------------------------------------------

    def save(self, end_offset: int) -> None:
        """Saves the index. Every record below `end_offset` is in it, or was delivered or cancelled."""
        self._sort_memory()
        self._flush()
        rows = np.ascontiguousarray(self._front[self._front_taken :])
        loaded = self._new_name()
        self._storage.append(loaded, rows.tobytes())
        self._storage.sync(loaded)
        for file in self._files.values():
            if file.dirty:
                self._storage.sync(file.name)
                file.dirty = False
        files = [
            (level, start, file.name, file.size_bytes, file.first_offset)
            for (level, start), file in self._files.items()
        ]
        manifest = Manifest(
            _VERSION, end_offset, self._loaded_end, self._ends, files, loaded, rows.nbytes, self._serial, self.count
        )
        self._storage.replace(MANIFEST, msgspec.json.encode(manifest))
        for name in (*self._garbage, self._loaded_name):
            if name:
                self._storage.remove(name)
        self._garbage, self._loaded_name = [], loaded


def _sort_rows(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return rows[np.lexsort((rows[:, 1], rows[:, 0]))]
