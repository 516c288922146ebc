"""FIFO in a share-partition (F1) under everything that ends an acquisition: members that accept,
release, reject, are late or die, letters that are written late, retention, leaders that fail
between two writes, settings that change, and memory that runs out. An event is one call of the core
(native/share/).

Checked only by what members see: a record is delivered only when every earlier one of its key has
ended, and in the end every record has ended.
"""

from __future__ import annotations

import random
from collections.abc import Collection

from tests.sim.share.share_core import (
    ACCEPT,
    ACKNOWLEDGED,
    ARCHIVED,
    ARCHIVING,
    REJECT,
    RELEASE,
    RENEW,
    Ack,
    Batch,
    Run,
    Settings,
    Share,
)

MEMBERS = range(1, 6)
ENDED = (ACKNOWLEDGED, ARCHIVED)


class Key:
    """The offsets of the records of a key, and how many of the first ones have ended."""

    def __init__(self) -> None:
        self.offsets: list[int] = []
        self.ended = 0


class World:
    def __init__(self, seed: int, planted: Collection[str] = ()) -> None:
        self.random = random.Random(seed)
        self.planted = planted
        self.now_ms, self.events = 1_000, 0
        self.settings = Settings(
            lock_ms=200,
            delivery_limit=self.random.choice([2, 5, 50]),
            open_max=self.random.choice([20, 300, 3_000]),
            backoff_ms=self.random.choice([0, 0, 30]),
            dead_letters=self.random.random() < 0.4,
            fifo=1,
        )
        self.pool_bytes = self.random.choice([12, 40, 2_000]) * 8_192
        self.key_count = self.random.choice([1, 7, 60, 10_000])
        self.log: list[Batch] = []
        self.keys: dict[int, tuple[int, int]] = {}  # of each offset in the log, by each setting; 0: none
        self.by_hash: list[dict[int, Key]] = [{}, {}]
        self.log_start = self.log_end = self.first = self.random.choice([0, 1_000, (1 << 21) - 30, (1 << 32) - 5])
        self.written: dict[int, tuple[int, int]] = {}
        self.written_start = self.first
        self.held: dict[int, list[int]] = {member: [] for member in MEMBERS}
        self.ended: set[int] = set()
        self.core = Share(self.settings, self.first, planted, self.pool_bytes)
        self.passed = 0  # batches of the log that are below the start

    # -- what happens ------------------------------------------------------------------------------

    def append(self) -> None:
        if self.log_end - self.core.start > 2_000:
            return
        first = self.log_end + self.random.choice([0, 0, 0, 2])
        last = first + self.random.choice([0, 3, 30, 200])
        skipped = self.random.random() < 0.1
        records = []
        for offset in range(first, last + 1):
            if skipped or self.random.random() < 0.05:
                continue
            pair = self.key(), self.key()
            records.append((offset - first, pair[0]))
            self.keys[offset] = pair
            for found, key_hash in zip(self.by_hash, pair, strict=True):
                if key_hash:
                    found.setdefault(key_hash, Key()).offsets.append(offset)
        self.log.append(Batch(first, last, skipped, records))
        self.log_end = last + 1

    def key(self) -> int:
        number = self.random.randrange(-self.key_count // 8, self.key_count)
        return 0 if number < 0 else (number + 1) * 2_654_435_761 & 0xFFFFFFFF

    def batches(self, position: int, count: int) -> list[Batch]:
        while self.passed < len(self.log) and self.log[self.passed].last < self.core.start:
            self.passed += 1
        found = [one for one in self.log[self.passed :] if one.last >= position][:count]
        if self.settings.fifo == 1:
            return found
        return [
            one._replace(records=[(delta, self.keys[one.first + delta][1]) for delta, _ in one.records or ()])
            for one in found
        ]

    def acquire(self) -> None:
        position = self.core.next()
        if position < 0:
            return
        member, most = self.random.choice(MEMBERS), self.random.choice([1, 10, 500])
        batches = self.batches(position, self.random.choice([1, 4]))
        for run in self.core.acquire(member, self.now_ms, most, self.random.random() < 0.7, position, batches):
            for offset in range(run.first, run.last + 1):
                self.delivered(offset)
                self.held[member].append(offset)

    def delivered(self, offset: int) -> None:
        assert offset not in self.ended, "S2"
        key_hash = self.keys.get(offset, (0, 0))[self.settings.fifo - 1] if self.settings.fifo else 0
        if not key_hash:
            return
        key = self.by_hash[self.settings.fifo - 1][key_hash]
        while key.offsets[key.ended] in self.ended or key.offsets[key.ended] < self.core.start:
            key.ended += 1
        assert key.offsets[key.ended] == offset, f"F1: {offset} comes before {key.offsets[key.ended]}"

    def saw(self, offsets: list[int]) -> None:
        self.ended.update(one for one in offsets if one < self.core.start or self.core.at(one)[0] in ENDED)

    def acknowledge(self) -> None:
        member = self.random.choice(MEMBERS)
        held, self.held[member] = self.held[member], []
        for offset in held:
            kind = self.random.choice([ACCEPT] * 6 + [RELEASE, RELEASE, REJECT, RENEW])
            error = self.core.acknowledge(member, [Ack(offset, offset, bytes([kind]))], self.now_ms)
            self.events += 1
            if not error and kind == RENEW:
                self.held[member].append(offset)
        self.saw(held)

    def expire(self) -> None:
        self.now_ms += self.random.choice([1, 20, 100])
        self.core.expire(self.now_ms)
        for offsets in self.held.values():
            self.saw(offsets)

    def leave(self) -> None:
        member = self.random.choice(MEMBERS)
        self.core.release_member(member, self.now_ms)
        self.saw(self.held[member])
        self.held[member] = []

    def write_letters(self) -> None:
        if not self.core.native.archiving_count:
            return
        for run in self.core.snapshot():
            if run.state == ARCHIVING and self.random.random() < 0.6:
                self.core.archive(run.first, run.last)
                self.ended.update(range(run.first, run.last + 1))

    def trim(self) -> None:
        if self.random.random() < 0.1:
            self.log_start = self.core.start + self.random.choice([1, 30])
            self.core.log_start(min(self.log_start, self.log_end))

    def set(self) -> None:
        if self.random.random() < 0.02:
            fifo = self.random.choice([0, 1, 1, 2])
            self.settings = self.settings._replace(fifo=fifo)
            self.core.set(self.settings)

    def write(self) -> None:
        difference = self.core.difference(self.random.choice([3, 2_000]))
        if difference.start >= 0:
            self.written_start = difference.start
        for run in difference.runs:
            for offset in range(run.first, run.last + 1):
                self.written[offset] = (run.state, run.count)

    def fail_over(self) -> None:
        """Loses state that was not written."""
        if self.random.random() > 0.05:
            return
        self.written = {offset: key for offset, key in self.written.items() if offset >= self.written_start}
        runs = [Run(offset, offset, *self.written[offset]) for offset in sorted(self.written)]
        if self.core.load(self.settings, self.written_start, runs) < 0:  # out of memory: a new core has enough
            self.core.destroy()
            self.core = Share(self.settings, self.written_start, self.planted)
            assert self.core.load(self.settings, self.written_start, runs) == 0
        self.core.log_start(min(self.log_start, self.log_end))
        self.ended = {offset for offset, (state, _) in self.written.items() if state in ENDED}
        self.held = {member: [] for member in MEMBERS}
        self.passed = 0
        for key in (key for found in self.by_hash for key in found.values()):
            key.ended = 0

    STEPS = (append, append, acquire, acquire, acquire, acquire, acknowledge, acknowledge) + (
        (expire, leave, write_letters, trim, set) + (write, write, fail_over)
    )

    def run(self, steps: int) -> int:
        """Returns the number of events."""
        for step in range(steps):
            self.random.choice(self.STEPS)(self)
            self.events += 1
            if step % 500 == 0:
                self.core.check()
        self.finish()
        return self.events

    def finish(self) -> None:
        """Accepts everything, and checks that no record waits forever."""
        for _ in range(20 * len(self.keys) + 1_000):
            self.expire()
            self.write_letters()
            if self.core.start >= self.log_end:
                break
            position = self.core.next()
            if 0 <= position < self.log_end:
                for run in self.core.acquire(9, self.now_ms, 500, True, position, self.batches(position, 8)):
                    for offset in range(run.first, run.last + 1):
                        self.delivered(offset)
                        assert self.core.acknowledge(9, [Ack(offset, offset, bytes([ACCEPT]))], self.now_ms) == 0
                        self.ended.add(offset)
            self.events += 4
        self.core.check()
        assert self.core.start >= self.log_end, f"{self.core.start} of {self.log_end}: something waits forever"
        assert self.core.destroy() == 0
