"""The state of a share-partition as one plain array of records with all their state: slow, and
short enough to be obviously correct. See native/share/state.h for the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.share.share_core import (
    ACCEPT,
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    DELAYED,
    GAP,
    INVALID_RECORD_STATE,
    INVALID_REQUEST,
    NEVER,
    RELEASE,
    RENEW,
    RUN_COUNT_MAX,
    SPAN_MAX,
    WAITING,
    Ack,
    Batch,
    Run,
    Settings,
)

UNKNOWN = -1


class Record:
    __slots__ = ("count", "deadline_ms", "key_hash", "member", "state")

    def __init__(self, state: int = AVAILABLE, count: int = 0) -> None:
        self.state, self.count, self.member, self.deadline_ms = state, count, -1, NEVER
        self.key_hash = 0  # 0: no key, or unknown

    @property
    def key(self) -> tuple[int, int]:
        """As persisted."""
        if self.state == ACQUIRED:
            return AVAILABLE, self.count - 1
        return AVAILABLE if self.state == DELAYED else self.state, self.count

    @property
    def is_finished(self) -> bool:
        return self.state in (ACKNOWLEDGED, ARCHIVED)


def runs_of(keys: Sequence[tuple[int, int]], start: int) -> list[Run]:
    runs: list[Run] = []
    for offset, (state, count) in enumerate(keys, start):
        if runs and runs[-1][1:] == (offset - 1, state, count):
            runs[-1] = runs[-1]._replace(last=offset)
        else:
            runs.append(Run(offset, offset, state, count))
    return runs


class ShareModel:
    def __init__(self, settings: Settings, start: int) -> None:
        self.settings, self.start, self.log_start_offset = settings, start, 0
        self.fifo, self.hashed_to = 0, start
        self.records: list[Record] = []  # from start to end

    @property
    def end(self) -> int:
        return self.start + len(self.records)

    def at(self, offset: int) -> Record:
        return self.records[offset - self.start]

    def keys(self) -> list[tuple[int, int]]:
        return [record.key for record in self.records]

    def snapshot(self) -> list[Run]:
        return [run for run in runs_of(self.keys(), self.start) if (run.state, run.count) != (AVAILABLE, 0)]

    def run_count(self) -> int:
        return len(runs_of(self.keys(), self.start))

    def open_count(self) -> int:
        return sum(not record.is_finished for record in self.records)

    # -- FIFO --------------------------------------------------------------------------------------

    @property
    def hashed(self) -> int:
        return max(self.hashed_to, self.start) if self.fifo else NEVER

    def follow(self) -> None:
        """The settings select another key."""
        if self.fifo != self.settings.fifo:
            self.fifo, self.hashed_to = self.settings.fifo, self.start
            for record in self.records:
                record.key_hash = 0

    def blocked(self) -> set[int]:
        """The offsets that have an earlier open record of their key."""
        found, keys = set(), set()
        for offset, record in enumerate(self.records, self.start):
            if record.key_hash and not record.is_finished:
                if record.key_hash in keys:
                    found.add(offset)
                keys.add(record.key_hash)
        return found

    def state_of(self, offset: int) -> int:
        """As in the core."""
        state = self.at(offset).state
        return WAITING if state == AVAILABLE and self.fifo and offset in self.blocked() else state

    def skip(self, first: int, last: int) -> bool:
        if not self.archive(first, last):
            return False
        self.hashed_to = max(self.hashed_to, last + 1)
        return True

    def offsets_of(self, batch: Batch, first: int) -> list[tuple[int, int | None]]:
        """The batch's offsets, each with the hash of its key if that is needed: None = the log does not
        have it, UNKNOWN = nothing from here on is acquired.
        """
        if batch.records is None and batch.last >= self.hashed:
            return [(offset, 0) for offset in range(first, self.hashed)] + [(self.hashed, UNKNOWN)]
        keys = {batch.first + delta: key_hash for delta, key_hash in batch.records or ()}
        return [
            (offset, keys.get(offset) if offset >= self.hashed else 0)
            for offset in range(max(first, self.start), batch.last + 1)
        ]

    def positions(self) -> tuple[int, int, int, int, int, int]:
        acquired = [record for record in self.records if record.state == ACQUIRED]
        deadline_ms = min((record.deadline_ms for record in self.records), default=NEVER)
        return self.start, self.end, self.open_count(), len(acquired), self.run_count(), deadline_ms

    def advance(self) -> None:
        while self.records and self.records[0].is_finished:
            self.records.pop(0)
            self.start += 1

    # -- acquiring ---------------------------------------------------------------------------------

    def has_room(self) -> bool:
        size = len(self.records)  # above the number of runs, so these are rarely counted
        return size < SPAN_MAX and (size < RUN_COUNT_MAX or self.run_count() < RUN_COUNT_MAX)

    def may_open(self) -> bool:
        open_max = self.settings.open_max
        return (len(self.records) < open_max or self.open_count() < open_max) and self.has_room()

    def next(self) -> int:
        self.follow()
        blocked = self.blocked() if self.fifo else ()
        found = self.end
        for offset, record in enumerate(self.records, self.start):
            if record.state == AVAILABLE and offset not in blocked:
                found = offset
                break
        found = min(found, self.hashed)
        return found if found < self.end or self.may_open() else -1

    def deadline_ms(self, now_ms: int) -> int:
        """For records locked now: not before those locked earlier."""
        held = [record.deadline_ms for record in self.records if record.state == ACQUIRED]
        return max([now_ms + self.settings.lock_ms, *held])

    def archive(self, first: int, last: int) -> bool:
        self.advance()
        for offset in range(max(first, self.start), last + 1):
            if not self.records:
                self.start = last + 1
                return True
            if offset == self.end:
                if not self.has_room():
                    return False
                self.records.append(Record())
            if self.at(offset).state == AVAILABLE:
                self.at(offset).state = ARCHIVED
        return True

    def together_max(self, count: int, records_max: int) -> int:
        limit = self.settings.delivery_limit
        half = max(2, (limit + 1) // 2)
        if count > 0 and count + 1 >= limit:
            return 1
        return SPAN_MAX if count < half else max(1, records_max >> (count - half + 1))

    def acquire(
        self, member: int, now_ms: int, records_max: int, strict: bool, from_: int, batches: Sequence[Batch]
    ) -> list[tuple[int, int]]:
        """(offset, count) of the acquired records."""
        self.follow()
        acquired: list[tuple[int, int]] = []
        blocked = self.blocked() if self.fifo else set()
        keys = {record.key_hash for record in self.records if not record.is_finished}
        most = records_max if strict else SPAN_MAX
        deadline_ms = self.deadline_ms(now_ms)
        position = max(from_, self.start)
        for batch in batches:
            if len(acquired) >= records_max:
                break
            if batch.last < position:
                continue
            first = max(batch.first, position)
            if position < first and not self.skip(position, first - 1):
                break
            if batch.skipped:
                if not self.skip(first, batch.last):
                    break
                position = batch.last + 1
                continue
            for offset, key_hash in self.offsets_of(batch, first):
                if key_hash == UNKNOWN:
                    break
                if key_hash is None:
                    self.skip(offset, offset)
                if offset < self.start or key_hash is None:
                    continue
                if len(acquired) >= most:
                    break
                if offset == self.end:
                    if not self.may_open():
                        break
                    self.records.append(Record())
                record = self.at(offset)
                if self.fifo and offset >= self.hashed:
                    self.hashed_to = offset + 1
                    record.key_hash = key_hash
                    if key_hash and not record.is_finished:
                        blocked |= {offset} if key_hash in keys else set()
                        keys.add(key_hash)
                if record.state != AVAILABLE or offset in blocked:
                    continue
                if record.count >= self.settings.delivery_limit:
                    record.state = self.archived_state()
                    continue
                most = min(most, self.together_max(record.count, records_max))
                if len(acquired) >= most:
                    break
                record.state, record.member, record.deadline_ms = ACQUIRED, member, deadline_ms
                record.count += 1
                acquired.append((offset, record.count))
            else:
                position = batch.last + 1
                continue
            break
        self.advance()
        return acquired

    # -- ending acquisitions -----------------------------------------------------------------------

    def backoff_ms(self, count: int) -> int:
        return min(self.settings.backoff_ms << (count - 1), self.settings.backoff_ms_max)

    def finish(self, record: Record, kind: int, now_ms: int) -> None:
        record.member, record.deadline_ms = -1, NEVER
        if kind == ACCEPT:
            record.state = ACKNOWLEDGED
        elif kind == RELEASE and record.count < self.settings.delivery_limit:
            record.state = AVAILABLE
            if backoff_ms := self.backoff_ms(record.count):
                record.state = DELAYED
                # not before records released earlier after as many deliveries
                waiting = [
                    one.deadline_ms for one in self.records if one.state == DELAYED and one.count == record.count
                ]
                record.deadline_ms = max([now_ms + backoff_ms, *(time for time in waiting if time < NEVER)])
        else:
            record.state = ARCHIVED if kind == GAP else self.archived_state()

    def archived_state(self) -> int:
        return ARCHIVING if self.settings.dead_letters else ARCHIVED

    def archive_lettered(self, first: int, last: int) -> int:
        found = [
            one for one in self.records[max(first - self.start, 0) : last + 1 - self.start] if one.state == ARCHIVING
        ]
        for record in found:
            record.state = ARCHIVED
        self.advance()
        return len(found)

    def acknowledge(self, member: int, acks: Sequence[Ack], now_ms: int) -> int:
        before = -1
        for ack in acks:
            if ack.first < before or ack.last < ack.first or len(ack.types) not in (1, ack.last - ack.first + 1):
                return INVALID_REQUEST
            if any(kind > RENEW for kind in ack.types):
                return INVALID_REQUEST
            before = ack.last
        before = -1
        for ack in acks:
            if ack.first == before >= self.start:
                return INVALID_RECORD_STATE  # it is no longer held by then
            before = ack.last
            if ack.last >= self.start and not self.records:
                return INVALID_RECORD_STATE
            if ack.last >= max(self.start, self.end):
                return INVALID_REQUEST
            for offset in range(max(ack.first, self.start), ack.last + 1):  # all records below have ended
                record = self.at(offset)
                if record.state != ACQUIRED or record.member != member or record.deadline_ms <= now_ms:
                    return INVALID_RECORD_STATE
        for ack in acks:
            deadline_ms = self.deadline_ms(now_ms)
            for offset in range(max(ack.first, self.start), ack.last + 1):
                kind = ack.types[0 if len(ack.types) == 1 else offset - ack.first]
                if kind == RENEW:
                    self.at(offset).deadline_ms = deadline_ms
                else:
                    self.finish(self.at(offset), kind, now_ms)
        self.advance()
        return 0

    def release_member(self, member: int, now_ms: int) -> int:
        mine = [record for record in self.records if record.state == ACQUIRED and record.member == member]
        for record in mine:
            self.finish(record, RELEASE, now_ms)
        self.advance()
        return len(mine)

    def expire(self, now_ms: int) -> int:
        due = [record for record in self.records if record.state == ACQUIRED and record.deadline_ms <= now_ms]
        for record in due:
            self.finish(record, RELEASE, now_ms)
        ready = [record for record in self.records if record.state == DELAYED and record.deadline_ms <= now_ms]
        for record in ready:
            record.state, record.deadline_ms = AVAILABLE, NEVER
        self.advance()
        return len(due) + len(ready)

    def log_start(self, offset: int) -> None:
        if offset <= self.log_start_offset:
            return
        self.log_start_offset = offset
        if offset > self.start:
            self.records = self.records[offset - self.start :]
            self.start = offset
        self.advance()
