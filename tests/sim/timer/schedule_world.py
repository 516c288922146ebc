"""One partition of a schedule, its successive timers, and their invariants.

Real: mqd.timer's core and index. Simulated: the log, the committed progress, the files (unsynced
data may be lost at a crash), the clocks of two hosts, which jump.
"""

from __future__ import annotations

import random
from collections import Counter

from mqd.timer.core import START, Progress, Schedule, ScheduleRecord, Tick, take_over

MS_OF = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
BEGIN_MS = 1_800_000_000_123


class Files:
    """A Storage in memory: `crash` keeps synced data, and some of the rest."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.synced: dict[str, int] = {}

    def names(self) -> list[str]:
        return list(self.files)

    def size(self, name: str) -> int:
        return len(self.files[name])

    def append(self, name: str, data: bytes) -> None:
        self.files.setdefault(name, bytearray()).extend(data)

    def read(self, name: str, at: int, size_bytes: int) -> bytes:
        return bytes(self.files[name][at : at + size_bytes])

    def truncate(self, name: str, size_bytes: int) -> None:
        del self.files[name][size_bytes:]

    def sync(self, name: str) -> None:
        self.synced[name] = len(self.files[name])

    def replace(self, name: str, data: bytes) -> None:
        self.files[name] = bytearray(data)
        self.sync(name)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)
        self.synced.pop(name, None)

    def crash(self, rng: random.Random) -> None:
        for name in list(self.files):
            kept = self.synced.get(name, 0)
            del self.files[name][rng.randint(min(kept, len(self.files[name])), len(self.files[name])) :]


class World:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.log: list[ScheduleRecord | None] = []  # None: a marker, or an aborted record
        self.log_start = 0
        self.committed = Progress(0, START)
        self.delivered: dict[int, int] = {}
        self.now_ms = BEGIN_MS
        self.hosts = [Files(), Files()]
        self.skew_ms = [0, 0]
        self.shown_ms = [0, 0]
        self.host = 0
        self.entry_count_max = self.rng.choice([4, 16, 256])
        self.cancels: dict[int, list[int]] = {}
        self.schedule = self.take_over()

    # -- the timer's shell -------------------------------------------------------------------------

    def clock(self) -> int:
        now_ms = self.now_ms + self.skew_ms[self.host]
        self.shown_ms[self.host] = max(self.shown_ms[self.host], now_ms)
        return now_ms

    def take_over(self) -> Schedule:
        return take_over(self.hosts[self.host], self.log_start, self.committed, self.entry_count_max)

    def due_of(self, offset: int) -> int | None:
        row = self.log[offset] if offset >= self.log_start else None
        return row.due_ms if row is not None and row.due_ms >= 0 else None

    def read(self) -> None:
        begin = self.schedule.end_offset
        rows = self.log[begin : begin + self.rng.choice([1, 7, 60])]
        self.schedule.read([row for row in rows if row is not None], self.clock(), self.due_of)

    def tick(self) -> None:
        tick = self.schedule.tick(self.clock(), self.rng.choice([1, 5, 100]))
        if tick is None:
            return
        outcome = self.rng.random()
        if outcome < 0.85:
            self.commit(tick)
            self.schedule.on_committed(tick)
        else:  # the timer dies, and the coordinator decides whether the transaction was committed
            if outcome < 0.92:
                self.commit(tick)
            self.die()

    def commit(self, tick: Tick) -> None:
        before, after = self.committed, tick.progress
        assert after.end_offset >= before.end_offset and after.last >= before.last, "T3"
        assert tick.entries == sorted(tick.entries), "order"
        for entry in tick.entries:
            row = self.log[entry.offset]
            assert entry.offset >= self.log_start and row is not None, "T4: the record is gone"
            assert row.due_ms == entry.due_ms <= self.shown_ms[self.host], "T1"
            assert entry.offset not in self.delivered, "T2: twice"
            assert not self.is_cancelled(entry.offset, after.end_offset), "T2: cancelled and delivered"
            self.delivered[entry.offset] = entry.due_ms
        self.committed = after

    def is_cancelled(self, offset: int, end_offset: int) -> bool:
        return any(at < end_offset for at in self.cancels.get(offset, ()))

    def die(self) -> None:
        self.hosts[self.host].crash(self.rng)
        if self.rng.random() < 0.5:
            self.host ^= 1
        self.schedule = self.take_over()

    # -- the world ---------------------------------------------------------------------------------

    def append(self) -> None:
        rng = self.rng
        for _ in range(rng.choice([1, 1, 3, 20])):
            offset = len(self.log)
            kind = rng.random()
            if kind < 0.05:
                self.log.append(None)
                continue
            cancels = -1
            if kind < 0.25 and offset:
                cancels = max(0, offset - 1 - int(rng.expovariate(0.1)))
                self.cancels.setdefault(cancels, []).append(offset)
            due_ms = -1 if kind < 0.18 and cancels >= 0 else self.now_ms + self.delay()
            self.log.append(ScheduleRecord(offset, due_ms, cancels))

    def delay(self) -> int:
        unit = self.rng.choice(["", "", "s", "s", "m", "h", "d"])
        return self.rng.choice([-5, 0, 1, 2, self.rng.randint(0, 300)]) * MS_OF.get(unit, 1)

    def step(self) -> None:
        rng = self.rng
        kind = rng.choices(
            ("append", "read", "tick", "pass", "save", "trim", "jump", "die"), (20, 25, 30, 15, 4, 3, 2, 1)
        )[0]
        match kind:
            case "append":
                self.append()
            case "read":
                self.read()
            case "tick":
                self.tick()
            case "pass":
                self.now_ms += rng.choice([0, 1, 40, 900, 61_000, rng.choice([0, 0, 0, 4_000_000, 90_000_000])])
            case "save":
                if self.schedule.can_save:
                    self.schedule.save()
            case "trim":
                self.log_start = max(self.log_start, self.schedule.first_needed_offset())
            case "jump":
                self.skew_ms[rng.randrange(2)] = rng.choice([0, 0, 5, -5, 3_000, -3_000, 4_000_000, -4_000_000])
            case "die":
                self.die()

    def check_memory(self) -> None:
        index = self.schedule.index
        in_memory = len(index._front) - index._front_taken + len(index._recent)
        assert in_memory <= 3 * self.entry_count_max + max(Counter(self.dues()).values(), default=0), "I2"

    def dues(self) -> list[int]:
        """Due times of the entries in memory."""
        index = self.schedule.index
        return index._front[index._front_taken :, 0].tolist() + [entry.due_ms for entry in index._recent]

    def run(self, step_count: int) -> World:
        for number in range(step_count):
            self.step()
            if number % 20 == 0:
                self.check_memory()
        self.end()
        return self

    def end(self) -> None:
        """A year later everything has been delivered or cancelled."""
        self.skew_ms = [0, 0]
        self.now_ms += 400 * MS_OF["d"]
        for _ in range(10 * len(self.log) + 100):
            before = self.schedule.end_offset, self.committed
            self.schedule.read([row for row in self.log[before[0] :] if row is not None], self.clock(), self.due_of)
            tick = self.schedule.tick(self.clock(), 100)
            if tick is not None:
                self.commit(tick)
                self.schedule.on_committed(tick)
            elif self.schedule.end_offset == before[0]:
                break
        for row in self.log:
            if row is not None and row.due_ms >= 0 and row.offset not in self.delivered:
                assert row.offset in self.cancels, f"T2: lost: {row}"
        if not any(self.cancels):
            assert self.schedule.pending_count == 0
