"""Scrubbing: periodically reads every sealed segment, verifies every checksum, and reports the
position of damage. A damaged segment is still served, because the rest of it is sound, and
consumers verify checksums themselves.

When a segment is due
    found when its partition was opened     at a random time within FIRST_PASS_MS, so that a start
                                            does not read the whole disk. Random, not by name:
                                            if the broker restarts often, each run begins with
                                            different segments
    sealed after that                       at a random time within SEALED_MS
    verified                                log.scrub.interval.ms later
    damaged                                 at most a day later, and it is then logged again
    found damaged by an earlier run         immediately
None of these waits is longer than log.scrub.interval.ms. The longest overdue segment comes first;
if log.scrub.bytes.per.second is too low to read all segments in an interval, all are still read in
turn, but less often. The due times are kept only in memory, one number for each segment.

S1  one piece (PIECE_BYTES, a copy in memory) is read and checked at a time, on the low-priority
    thread of its log directory, where checkpoints and deletions get their turn between any two
    pieces. After each piece the scrubber sleeps as long as the rate requires. A stop waits for at
    most one piece.
S2  reading leaves the page cache unchanged if the kernel supports it (6.14 and later). Cached pages
    are checked in the cache, in the form that consumers receive.
S3  apparent damage is checked again CONFIRM_S later, and reported only if the segment still exists
    and is sealed, and its partition is still open: a concurrent write or deletion is not damage.

The active segment is not checked before it is sealed. Everything here runs on the event loop; the
functions at the end block and run in Background.
"""

import asyncio
import errno
import heapq
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import msgspec

from mqd import native
from mqd.base import clock, logging
from mqd.base.config import broker_number
from mqd.log import damage, segments
from mqd.log.batches import HEADER_BYTES, BatchInfo, CorruptBatch, parse_header, read_batch
from mqd.log.damage import Damage
from mqd.worker.background import NO_LOG_DIR, Background
from mqd.worker.catalog import Key
from mqd.worker.open_partitions import OpenPartition
from mqd.worker.partitions import PartitionSet
from mqd.worker.periodic_work import Pace, PeriodicWork

DAY_MS = 86_400_000
FIRST_PASS_MS = DAY_MS
SEALED_MS = 3_600_000
RETRY_MS = 60_000  # after a piece that could not be read for lack of descriptors or memory
PIECE_BYTES = 4 << 20
CONFIRM_S = 1.0
PAUSE_S_MIN = 0.001
SURVEY_S_MAX = 5.0  # how often to look for newly opened partitions and newly sealed segments
_RWF_DONTCACHE = 0x80  # Linux 6.14: drops the pages that this read brought in
_CRC_START = 21

SegmentKey = tuple[Key, int]  # partition, base offset


class ScrubPlan:
    """Determines which segment is due next. Pure: times and random numbers are passed in. Bound:
    one entry for each sealed segment of the open partitions.
    """

    def __init__(self, interval_ms: int, random_share: Callable[[], float] = random.random):
        self._interval_ms = interval_ms
        self._random = random_share  # [0, 1)
        self._sealed: dict[Key, set[int]] = {}
        self._due: dict[SegmentKey, int] = {}
        self._heap: list[tuple[int, SegmentKey]] = []  # entries that differ from _due are stale

    def set_sealed(self, key: Key, bases: Iterable[int], now_ms: int) -> set[int]:
        """Sets the sealed segments of a partition. Returns those that no longer exist."""
        bases = set(bases)
        previous = self._sealed.get(key)
        within_ms = min(self._interval_ms, FIRST_PASS_MS if previous is None else SEALED_MS)
        for base in bases - (previous or set()):
            self._put((key, base), now_ms + int(self._random() * within_ms))
        removed = (previous or set()) - bases
        for base in removed:
            del self._due[key, base]
        self._sealed[key] = bases
        return removed

    def forget(self, key: Key) -> None:
        for base in self._sealed.pop(key, ()):
            del self._due[key, base]

    def partitions(self) -> list[Key]:
        return list(self._sealed)

    def sealed_after(self, segment: SegmentKey) -> list[int]:
        return [base for base in self._sealed.get(segment[0], ()) if base > segment[1]]

    def due(self, now_ms: int) -> SegmentKey | None:
        """The segment to check now, or None. It stays due until one of the following three
        methods reschedules it, or it no longer exists.
        """
        while self._heap:
            when_ms, segment = self._heap[0]
            if self._due.get(segment) == when_ms:
                return segment if when_ms <= now_ms else None
            heapq.heappop(self._heap)
        return None

    def on_verified(self, segment: SegmentKey, now_ms: int) -> None:
        self._reschedule(segment, now_ms + self._interval_ms)

    def on_damaged(self, segment: SegmentKey, now_ms: int) -> None:
        self._reschedule(segment, now_ms + min(self._interval_ms, DAY_MS))

    def check_again(self, segment: SegmentKey, now_ms: int, after_ms: int) -> None:
        self._reschedule(segment, now_ms + min(self._interval_ms, after_ms))

    def _reschedule(self, segment: SegmentKey, when_ms: int) -> None:
        if segment in self._due:  # otherwise it no longer exists
            self._put(segment, when_ms)

    def _put(self, segment: SegmentKey, when_ms: int) -> None:
        self._due[segment] = when_ms
        heapq.heappush(self._heap, (when_ms, segment))
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = [(when, listed) for listed, when in self._due.items()]
            heapq.heapify(self._heap)


def sealed_bases(bases: list[int], log_start_offset: int, active_base: int) -> list[int]:
    """The segments of a listing below the active one, except those wholly below the log start
    (which are about to be deleted).
    """
    first = max((base for base in bases if base <= log_start_offset), default=0)
    return [base for base in bases if first <= base < active_base]


class _Piece(msgspec.Struct):
    """The result of checking one piece: the segment is checked up to `position`. `problem`: what is
    wrong with the batch at that position.
    """

    position: int
    next_offset: int
    read_bytes: int
    is_at_end: bool
    problem: str | None = None


class _SegmentChanged(Exception):
    """The segment was closed, deleted or truncated in the meantime."""


class Scrubber:
    def __init__(
        self,
        worker: int,
        control: native.Control,
        partitions: PartitionSet,
        background: Background,
        run_dir: Path,
        config: dict[str, str],
        periodic_work: PeriodicWork,
    ):
        self._worker = worker
        self._control = control
        self._partitions = partitions
        self._background = background
        self._run_dir = run_dir
        self._pace = Pace(periodic_work, lambda: bool(self._damage))
        self._interval_ms = broker_number(config, "log.scrub.interval.ms")
        self._bytes_per_second = broker_number(config, "log.scrub.bytes.per.second")
        self._plan = ScrubPlan(self._interval_ms)
        # partition -> its log start and active segment at the last listing
        self._surveyed: dict[Key, tuple[int, int]] = {}
        self._damage: dict[SegmentKey, Damage] = {}
        # found by an earlier run, in partitions that are not open yet
        self._earlier_damage: dict[SegmentKey, Damage] = {}
        self._published_ms: dict[SegmentKey, int] = {}
        # how often compaction has replaced a partition's segments
        self._replacement_counts: dict[Key, int] = {}
        self._log = logging.get("worker.scrub")

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Returns coroutines to run until they are cancelled."""
        return [self._run()]

    async def _run(self) -> None:
        if self._interval_ms < 0:
            await self._background.urgent(NO_LOG_DIR, self._write, [])
            await asyncio.Event().wait()
        for found in await self._background.urgent(NO_LOG_DIR, damage.read, self._run_dir, self._worker):
            self._earlier_damage[(found.topic_id, found.partition), found.segment] = found
        survey_s = min(self._interval_ms / 5000, SURVEY_S_MAX)
        next_survey = 0.0
        while True:
            try:
                if time.monotonic() >= next_survey:
                    await self._survey()
                    next_survey = time.monotonic() + self._survey_pause_s(survey_s)
                segment = self._plan.due(clock.monotonic_ms())
                if segment is None:
                    await asyncio.sleep(max(PAUSE_S_MIN, next_survey - time.monotonic()))
                else:
                    await self._visit(segment)
            except Exception:  # a failed scrub must not end the worker
                self._log.exception("checking of stored segments failed; retrying")
                await asyncio.sleep(RETRY_MS / 1000)

    def _survey_pause_s(self, survey_s: float) -> float:
        """While the reactor is idle, a segment may be checked a minute late, unless the interval is
        below 25 s.
        """
        return self._pace.wait_s(survey_s) if survey_s == SURVEY_S_MAX else survey_s

    # -- survey ------------------------------------------------------------------------------------

    def _find_open(self, key: Key) -> OpenPartition | None:
        opened = self._partitions.open.get(key)
        return (
            None
            if opened is None or opened.closing or self._partitions.log_dirs[opened.owned.log_dir].failure
            else opened
        )

    async def _survey(self) -> None:
        """Lists the directories of the partitions whose first or last segment may have changed."""
        changed = False
        for key in self._plan.partitions():
            if self._find_open(key) is None:
                self._plan.forget(key)
                self._surveyed.pop(key, None)
                self._replacement_counts.pop(key, None)
                for segment in [segment for segment in self._damage if segment[0] == key]:
                    changed |= self._drop(segment)
        for key in list(self._partitions.open):
            changed |= await self._survey_partition(key)
        if changed:
            await self._publish()

    async def _survey_partition(self, key: Key) -> bool:
        """Returns whether the set of known damage changed."""
        opened = self._find_open(key)
        if opened is None:
            return False
        view = self._control.slot_view(opened.owned.slot)
        ends = (view.log_start_offset, view.log_end_segment)
        if self._surveyed.get(key) == ends:
            return False
        try:
            bases = await self._background.slow(opened.owned.log_dir, segments.base_offsets, opened.path)
        except OSError:
            return False  # being deleted; if not, the next survey fails in the same way
        if self._find_open(key) is not opened:
            return False
        now_ms = clock.monotonic_ms()
        self._surveyed[key] = ends
        sealed = sealed_bases(bases, *ends)
        removed = self._plan.set_sealed(key, sealed, now_ms)
        changed = any([self._drop((key, base)) for base in removed])
        for segment in [
            segment
            for segment, found in self._damage.items()
            if segment[0] == key and found.next_sound_offset <= view.log_start_offset
        ]:
            self._plan.check_again(segment, now_ms, 0)  # the damage was skipped: check what follows it
        for segment in [segment for segment in self._earlier_damage if segment[0] == key]:
            earlier = self._earlier_damage.pop(segment)
            changed = True
            if segment[1] in sealed:
                self._damage[segment] = earlier
                self._plan.check_again(segment, now_ms, 0)
        return changed

    def _drop(self, segment: SegmentKey) -> bool:
        self._published_ms.pop(segment, None)
        return self._damage.pop(segment, None) is not None

    def on_replaced(self, key: Key) -> None:
        """Compaction is about to replace some segments, or has done so."""
        self._replacement_counts[key] = self._replacement_counts.get(key, 0) + 1
        self._surveyed.pop(key, None)

    # -- one segment -------------------------------------------------------------------------------

    async def _visit(self, segment: SegmentKey) -> None:
        opened = self._find_open(segment[0])
        if opened is None:
            self._plan.check_again(segment, clock.monotonic_ms(), RETRY_MS)  # the next survey removes the partition
            return
        path = segments.segment_path(opened.path, segment[1])
        try:
            first_damage = await self._verify(segment, opened, path)
        except (FileNotFoundError, _SegmentChanged):
            # the next survey removes the segment if it is gone
            self._plan.check_again(segment, clock.monotonic_ms(), RETRY_MS)
        except OSError as error:
            self._log.warning(
                "stored segment cannot be checked; retrying",
                partition=opened.owned.name,
                segment=path.name,
                reason=str(error),
            )
            self._plan.check_again(segment, clock.monotonic_ms(), RETRY_MS)
        else:
            await self._record(segment, opened, path, first_damage)

    async def _verify(self, segment: SegmentKey, opened: OpenPartition, path: Path) -> Damage | None:
        """Returns the first damage at or above the log start; None: there is none. Raises OSError;
        _SegmentChanged.
        """
        piece = _Piece(0, segment[1], 0, False)
        suspect_position = -1
        replacement_count = self._replacement_counts.get(segment[0])
        while not piece.is_at_end:
            began = time.monotonic()
            piece = await self._background.slow(
                opened.owned.log_dir, check_piece, path, piece.position, piece.next_offset
            )
            if self._replacement_counts.get(segment[0]) != replacement_count:
                raise _SegmentChanged  # not the file that the check started with
            await asyncio.sleep(
                max(PAUSE_S_MIN, piece.read_bytes / self._bytes_per_second - (time.monotonic() - began))
            )
            if piece.problem is not None and piece.position != suspect_position:  # S3
                suspect_position = piece.position
                piece.is_at_end = False
                await asyncio.sleep(CONFIRM_S)
            elif piece.problem is not None:
                result = await self._describe(segment, opened, path, piece)
                if isinstance(result, Damage):
                    return result
                piece = result
            if self._find_open(segment[0]) is not opened or not self._is_sealed(opened, segment[1]):
                raise _SegmentChanged
        return None

    async def _describe(
        self, segment: SegmentKey, opened: OpenPartition, path: Path, bad_piece: _Piece
    ) -> Damage | _Piece:
        """Describes the damage. If the bad batch is below the log start, where no consumer can read
        it, returns the _Piece from which to continue.
        """
        view = self._control.slot_view(opened.owned.slot)
        following_base = min(self._plan.sealed_after(segment), default=view.log_end_segment)
        offset, position = await self._background.slow(
            opened.owned.log_dir, next_sound, path, bad_piece.position, following_base
        )
        if self._find_open(segment[0]) is not opened or not self._is_sealed(opened, segment[1]):
            raise _SegmentChanged
        if offset <= view.log_start_offset and position >= 0:
            return _Piece(position, offset, 0, False)
        owned = opened.owned
        return Damage(
            owned.topic,
            owned.topic_id,
            owned.index,
            segment[1],
            bad_piece.position,
            bad_piece.problem or "",
            offset,
            clock.now_ms(),
        )

    def _is_sealed(self, opened: OpenPartition, base: int) -> bool:
        """Whether the segment is still sealed: a failed write may have truncated the log."""
        return base < self._control.slot_view(opened.owned.slot).log_end_segment

    async def _record(self, segment: SegmentKey, opened: OpenPartition, path: Path, new_damage: Damage | None) -> None:
        now_ms = clock.monotonic_ms()
        if new_damage is None:
            self._plan.on_verified(segment, now_ms)
            if self._drop(segment):
                self._log.info(
                    "a damaged segment is sound again or was deleted", partition=opened.owned.name, segment=path.name
                )
                await self._publish()
            return
        self._plan.on_damaged(segment, now_ms)
        published_ms = self._published_ms.get(segment)
        if published_ms is None or now_ms - published_ms >= DAY_MS:
            self._published_ms[segment] = now_ms
            self._log.error(
                "stored segment is damaged: restore it from a copy while the broker is down, or delete its records with"
                " DeleteRecords up to next_sound_offset; everything else is served",
                partition=opened.owned.name,
                segment=path.name,
                position=new_damage.position,
                reason=new_damage.reason,
                next_sound_offset=new_damage.next_sound_offset,
                see=f"mqd log verify {path}",
            )
        old_damage = self._damage.get(segment)
        if old_damage is None or msgspec.structs.replace(new_damage, found_ms=old_damage.found_ms) != old_damage:
            self._damage[segment] = new_damage
            await self._publish()

    async def _publish(self) -> None:
        await self._background.urgent(NO_LOG_DIR, self._write, [*self._damage.values(), *self._earlier_damage.values()])

    def _write(self, known_damage: list[Damage]) -> None:
        """Blocking."""
        try:
            damage.write(self._run_dir, self._worker, known_damage)
        except OSError as error:
            self._log.warning("the metrics of damaged segments cannot be written", reason=str(error))


# -- blocking --------------------------------------------------------------------------------------


def check_piece(path: Path, position: int, next_offset: int) -> _Piece:
    """Copies the PIECE_BYTES at `position`, where a batch begins, and checks the complete batches of
    the copy. If no batch is complete, or the first looks bad, or the disk cannot read the bytes,
    checks the file itself, to its end or to the first bad batch. `next_offset`: no batch may begin
    below it. Raises OSError, except for EIO, which becomes the `problem` of the result.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        if position >= size:
            return _Piece(position, next_offset, 0, True)
        data = _read(fd, position, min(PIECE_BYTES, size - position))
        if data is not None:
            scan = _scan_copy(data, next_offset)
            # the rest of the piece is checked with the next one
            if scan.reason is None or scan.valid_bytes:
                end = position + scan.valid_bytes
                return _Piece(end, scan.next_offset, len(data), end >= size)
    finally:
        os.close(fd)
    try:
        scan = native.segment_scan(path, next_offset, position, check_crc=True)
    except native.NativeError as error:
        if error.errno != errno.EIO:
            raise
        return _Piece(position, next_offset, PIECE_BYTES, True, f"the disk cannot read it: {error.strerror}")
    end = scan.valid_bytes  # counted from the file's start here
    return _Piece(end, scan.next_offset, min(size, end + PIECE_BYTES) - position, True, scan.reason)


def _read(fd: int, position: int, size: int) -> memoryview | None:
    """Returns fewer than `size` bytes at the end of the file, and None if the disk cannot read
    them.
    """
    data = memoryview(bytearray(size))
    read_bytes, flags = 0, _RWF_DONTCACHE
    while read_bytes < size:
        try:
            count = os.preadv(fd, [data[read_bytes:]], position + read_bytes, flags)
        except OSError as error:
            if error.errno == errno.EIO:
                return None
            if not flags or error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            flags = 0  # an older kernel, or a file system without support
            continue
        if count == 0:
            break
        read_bytes += count
    return data[:read_bytes]


def _scan_copy(data: memoryview, next_offset: int) -> native.ScanResult:
    """Scans a copy in a memory file, because the native scan needs a file."""
    copy = os.memfd_create("mqd-scrub", os.MFD_CLOEXEC)
    try:
        done = 0
        while done < len(data):
            done += os.write(copy, data[done:])
        return native.segment_scan(f"/proc/self/fd/{copy}", next_offset, 0, check_crc=True)
    finally:
        os.close(copy)


def next_sound(path: Path, position: int, following_base: int) -> tuple[int, int]:
    """Returns (offset, position) at which reading can continue after the bad batch at `position`:
    those of the batch to which the bad batch's length leads, if that batch is sound; otherwise the
    base offset of the next segment, and -1.
    """
    try:
        with open(path, "rb") as file:
            bad = _header(file.fileno(), position)
            after = _header(file.fileno(), position + bad.size_bytes)
            data = read_batch(file.fileno(), after)
        if native.crc32c(memoryview(data)[_CRC_START:]) == after.crc and after.base_offset < following_base:
            return after.base_offset, after.position
    except (OSError, CorruptBatch):
        pass
    return following_base, -1


def _header(fd: int, position: int) -> BatchInfo:
    data = os.pread(fd, HEADER_BYTES, position)
    if len(data) < HEADER_BYTES:
        raise CorruptBatch(f"the file ends at position {position}")
    return parse_header(data, 0, position)
