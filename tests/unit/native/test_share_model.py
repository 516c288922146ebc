"""The state of share-partitions in C against a plain array in Python: random histories give the
same responses and the same state after each step, and hold the invariants S1 to S9, L1 and F1; each
planted bug is found.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Sequence

import pytest

from tests.sim.share.share_core import (
    ACCEPT,
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVED,
    ARCHIVING,
    AVAILABLE,
    PLANTED,
    REJECT,
    RELEASE,
    RENEW,
    RUN_COUNT_MAX,
    SPAN_MAX,
    WAITING,
    Ack,
    Batch,
    Run,
    Settings,
    Share,
)
from tests.sim.share.share_model import Record, ShareModel
from tests.tiers import quick

MEMBERS = (11, 12, 13, 14)


class History:
    """One random history of a share-partition: C, the model, and a coordinator that persists."""

    def __init__(self, seed: int, planted: Collection[str] = (), sizes: Sequence[int] = (1, 5, 40, 700)) -> None:
        self.random = random.Random(seed)
        self.now_ms = 1_000
        self.settings = Settings(
            self.random.choice([50, 200]),
            self.random.choice([1, 2, 3, 5, 8]),
            self.random.choice([7, 60, 2_000]),
            *self.backoff(),
            self.random.random() < 0.5,
            self.random.choice([0, 1, 1]),
        )
        # near the end of a page, or with pages that share a slot of the directory
        start = self.random.choice([0, 1_000, 1_020, (1 << 21) - 9, (1 << 33) + 1_023])
        self.core, self.model = Share(self.settings, start, planted), ShareModel(self.settings, start)
        self.size_max = self.random.choice(sizes)
        self.key_count = self.random.choice([2, 9, 5_000])
        self.keys: dict[int, tuple[int, int]] = {}  # by the settings 1 and 2; 0: none
        self.log: list[Batch] = []
        self.log_end = start
        self.persisted: dict[int, tuple[int, int]] = {}
        self.persisted_start = start
        self.accepted: set[int] = set()
        self.counts: dict[int, int] = {}
        self.earliest: dict[int, int] = {}  # when it may be acquired again
        self.start_max = start
        self.dead: set[int] = set()  # they were Archiving
        self.lettered: set[int] = set()

    def backoff(self) -> tuple[int, int]:
        return self.random.choice([(0, 60_000), (10, 25), (30, 1_000), (100, 100)])

    # -- steps -------------------------------------------------------------------------------------

    def append(self) -> None:
        for _ in range(self.random.randrange(4)):
            hole = self.random.choice([0, 0, 0, 1, 3, 1_500 if self.size_max > 40 else 2])
            first = self.log_end + hole
            self.log_end = first + self.random.randint(1, self.size_max)
            batch = Batch(first, self.log_end - 1, self.random.random() < 0.15)
            self.log.append(batch)
            for offset in range(batch.first, self.log_end):
                if not batch.skipped and self.random.random() < 0.98:
                    self.keys[offset] = (self.key(), self.key())

    def key(self) -> int:
        return self.random.choice([0, *[(self.random.randrange(self.key_count) + 1) * 2_654_435_761 & 0xFFFFFFFF] * 9])

    def with_keys(self, batch: Batch) -> Batch:
        fifo, hashed = self.settings.fifo, self.model.hashed
        if not fifo or batch.skipped or batch.last < hashed or self.random.random() < 0.02:
            return batch
        first = max(batch.first, self.random.choice([batch.first, hashed]))
        offsets = [offset for offset in range(first, batch.last + 1) if offset in self.keys]
        return batch._replace(records=[(offset - batch.first, self.keys[offset][fifo - 1]) for offset in offsets])

    def check_order(self, got: Sequence[int]) -> None:
        """F1. Checks the open records below the end of the last batch read."""
        fifo = self.settings.fifo
        if not fifo or not got:
            return
        open_keys = set()
        for offset in range(self.core.start, max(got) + 1):
            key = self.keys.get(offset, (0, 0))[fifo - 1]
            assert not key or offset not in got or key not in open_keys, "F1"
            if key and self.core.at(offset)[0] not in (ACKNOWLEDGED, ARCHIVED):
                open_keys.add(key)

    def check_reach(self, offsets: int, got: Sequence[object], beyond: Sequence[object]) -> None:
        """Batches above reach() add nothing, unless holes, skipped batches or records that are not
        available are among the `offsets` below it: then the next pass continues, from a later position.
        """
        assert got == beyond or (got == beyond[: len(got)] and len(got) < offsets), "reach"

    def acquire(self) -> None:
        position = self.core.next()
        assert position == self.model.next()
        if position < 0:
            return
        batches = [batch for batch in self.log if batch.last >= position][: self.random.choice([1, 3, 20])]
        batches = [self.with_keys(batch) for batch in batches]
        member, records_max = self.random.choice(MEMBERS), self.random.choice([1, 4, 100, 500])
        strict = self.random.random() < 0.5
        beyond = copy.deepcopy(self.model) if self.random.random() < 0.1 else None
        requested = (member, self.now_ms, records_max, strict, position)
        reach = self.core.reach(records_max)
        reached = [batch for batch in batches[1:] if batch.first < reach]
        runs = self.core.acquire(*requested, batches[:1] + reached)
        got = [(offset, run.count) for run in runs for offset in range(run.first, run.last + 1)]
        assert got == self.model.acquire(*requested, batches[:1] + reached)
        if beyond is not None:
            self.check_reach(reach - position, got, beyond.acquire(*requested, batches))
        skipped = {offset for batch in batches if batch.skipped for offset in range(batch.first, batch.last + 1)}
        for offset, count in got:
            assert offset not in self.accepted, "S2"
            assert offset not in self.dead, "L1"
            assert offset not in skipped, "S8"
            assert self.counts.get(offset, 0) < count <= self.settings.delivery_limit, "S3"
            assert self.earliest.get(offset, 0) <= self.now_ms, "S9"
            self.counts[offset] = count
        self.check_order([offset for offset, _ in got])
        assert not strict or len(got) <= records_max
        if len(got) > 1 and self.settings.delivery_limit > 1:
            assert all(count < self.settings.delivery_limit for _, count in got), "the last delivery is alone"

    def acks(self) -> tuple[int, list[Ack]]:
        """Acknowledgements of records held by some member, mostly well-formed."""
        member = self.random.choice(MEMBERS)
        held = [
            (offset, record.member)
            for offset, record in enumerate(self.model.records, self.model.start)
            if record.member == member or (record.member >= 0 and self.random.random() < 0.01)
        ]
        acks: list[Ack] = []
        for run in runs_of_offsets([offset for offset, _ in held]):
            if self.random.random() < 0.4:
                continue
            first = self.random.randint(*run)
            last = min(run[1], first + self.random.choice([0, 2, 1_000]))
            if self.random.random() < 0.02:
                last += 1
            count = last - first + 1 if self.random.random() < 0.5 else 1
            kinds = self.random.choice([[ACCEPT], [0, 1, 2, 3, 4], [RELEASE], [RENEW, ACCEPT], [RELEASE, RENEW]])
            acks.append(Ack(first, last, bytes(self.random.choice(kinds) for _ in range(count))))
        if acks and self.random.random() < 0.03:
            acks.append(self.random.choice([acks[0], Ack(acks[-1].last + 1, acks[-1].last + 1, b"\x05")]))
        return member, acks

    def released(self, offset: int) -> None:
        settings = self.settings
        backoff_ms = settings.backoff_ms * 2 ** (self.counts[offset] - 1)
        self.earliest[offset] = self.now_ms + min(backoff_ms, settings.backoff_ms_max)

    def held(self, member: int | None = None) -> list[int]:
        return [
            offset
            for offset, record in enumerate(self.model.records, self.model.start)
            if record.state == ACQUIRED and (record.member == member if member else record.deadline_ms <= self.now_ms)
        ]

    def acknowledge(self) -> None:
        member, acks = self.acks()
        error = self.core.acknowledge(member, acks, self.now_ms)
        assert error == self.model.acknowledge(member, acks, self.now_ms)
        if not error:
            for ack in acks:
                for offset in range(ack.first, ack.last + 1):
                    kind = ack.types[0 if len(ack.types) == 1 else offset - ack.first]
                    if kind == ACCEPT:
                        self.accepted.add(offset)
                    elif kind == RELEASE and offset in self.counts:
                        self.released(offset)
                    if self.settings.dead_letters and offset >= self.core.start:
                        is_dead = self.core.at(offset)[0] == ARCHIVING
                        assert kind != REJECT or is_dead, "L1"
                        assert kind in (REJECT, RELEASE) or not is_dead, "L1"

    def expire(self) -> None:
        self.now_ms += self.random.choice([1, 20, 60, 300])
        if self.random.random() < 0.7:
            for offset in self.held():
                self.released(offset)
            assert self.core.expire(self.now_ms) == self.model.expire(self.now_ms)

    def release_member(self) -> None:
        member = self.random.choice(MEMBERS)
        for offset in self.held(member):
            self.released(offset)
        assert self.core.release_member(member, self.now_ms) == self.model.release_member(member, self.now_ms)

    def write_letters(self) -> None:
        archiving = [
            offset
            for run in self.core.snapshot()
            if run.state == ARCHIVING
            for offset in range(run.first, run.last + 1)
        ]
        assert not self.lettered & set(archiving), "L1: a second letter"
        self.dead.update(archiving)
        for first, last in runs_of_offsets(archiving):
            last = self.random.randint(first, last)
            reach = self.random.choice([0, 0, 5, 3_000])
            assert self.core.archive(first - reach, last) == self.model.archive_lettered(first - reach, last)
            self.lettered.update(offset for offset in archiving if first - reach <= offset <= last)

    def trim(self) -> None:
        offset = self.random.randint(self.model.start, max(self.model.start, self.log_end))
        if self.random.random() < 0.3:
            self.core.log_start(offset)
            self.model.log_start(offset)
            self.log = [batch for batch in self.log if batch.last >= offset]
            self.log_end = max(self.log_end, offset)

    def set(self) -> None:
        self.settings = self.settings._replace(
            lock_ms=self.random.choice([50, 200]), open_max=self.random.choice([7, 60, 2_000])
        )
        if self.random.random() < 0.3:
            backoff_ms, backoff_ms_max = self.backoff()
            self.settings = self.settings._replace(backoff_ms=backoff_ms, backoff_ms_max=backoff_ms_max)
        if self.random.random() < 0.1:
            self.settings = self.settings._replace(dead_letters=not self.settings.dead_letters)
        if self.random.random() < 0.1:
            self.settings = self.settings._replace(fifo=self.random.choice([0, 1, 1, 2]))
        self.core.set(self.settings)
        self.model.settings = self.settings

    def persist(self) -> None:
        difference = self.core.difference(self.random.choice([1, 3, 20_000]))
        if difference.start >= 0:
            self.persisted_start = difference.start
        for run in difference.runs:
            for offset in range(run.first, run.last + 1):
                self.persisted[offset] = (run.state, run.count)
        assert difference.finished_count == sum(record.is_finished for record in self.model.records)
        if difference.is_whole:
            kept = [self.persisted.get(offset, (AVAILABLE, 0)) for offset in range(self.model.start, self.model.end)]
            assert kept == self.model.keys(), "S6"
            assert self.persisted_start == self.model.start, "S6"

    def fail_over(self) -> None:
        """A new leader reads the persisted state, without backoffs."""
        self.earliest.clear()
        while not self.core.difference().is_whole:
            pass
        self.core.check()
        snapshot = self.model.snapshot()
        assert self.core.load(self.settings, self.model.start, snapshot) == 0
        end = snapshot[-1].last + 1 if snapshot else self.model.start
        model = ShareModel(self.settings, self.model.start)
        model.records = [Record(*self.model.at(offset).key) for offset in range(model.start, end)]
        model.advance()
        self.model = model
        self.persisted = {run: key for run, key in zip(range(model.start, model.end), model.keys(), strict=True)}
        self.persisted_start = model.start
        self.counts = {offset: record.count for offset, record in enumerate(model.records, model.start)}
        self.core.difference()

    STEPS = (
        (append, acquire, acquire, acquire, acknowledge, acknowledge)
        + (expire, release_member, trim, set, persist)
        + (write_letters,)
    )

    def step(self) -> None:
        if self.random.random() < 0.01:
            self.fail_over()
        else:
            self.random.choice(self.STEPS)(self)
        self.compare()

    def compare(self) -> None:
        assert self.core.positions() == self.model.positions()
        assert self.core.snapshot() == self.model.snapshot()
        assert self.core.next() == self.model.next()
        assert self.core.hashed == self.model.hashed
        blocked = self.model.blocked()
        for offset, record in enumerate(self.model.records[:20], self.model.start):
            assert self.core.at(offset) == (
                WAITING if offset in blocked and record.state == AVAILABLE else record.state,
                record.count,
            )
        assert self.core.start >= self.start_max, "S4"
        self.start_max = self.core.start

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.core.check()
        assert self.core.destroy() == 0


def runs_of_offsets(offsets: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for offset in offsets:
        if runs and runs[-1][1] == offset - 1:
            runs[-1] = (runs[-1][0], offset)
        else:
            runs.append((offset, offset))
    return runs


@pytest.mark.parametrize("seed", quick(range(120), range(2)))
def test_histories_agree(seed: int) -> None:
    History(seed).run(250)


def test_nothing_new_is_acquired_above_the_number_of_runs() -> None:
    """S7: every other record is accepted, the others are released, so that runs are one offset
    long.
    """
    core, now_ms = Share(Settings(open_max=SPAN_MAX), 0), 0
    while (position := core.next()) >= 0:
        last = position + 999
        for run in core.acquire(1, now_ms, 1_000, True, position, [Batch(position, last)]):
            for offset in range(run.first, run.last + 1):
                kind = ACCEPT if offset % 2 else RELEASE
                assert core.acknowledge(1, [Ack(offset, offset, bytes([kind]))], now_ms) == 0
        core.acquire(2, now_ms, 1_000, True, position, [Batch(position, last)])
    assert RUN_COUNT_MAX <= core.positions()[4] <= RUN_COUNT_MAX + 1_000
    assert core.acquire(1, now_ms, 10, True, core.end, [Batch(core.end, core.end + 9)]) == []
    assert core.positions()[2] == core.positions()[3], "all that is open is acquired"
    core.check()
    assert core.release_member(2, now_ms) == core.positions()[2], "releasing is possible"
    assert core.destroy() == 0


@pytest.mark.parametrize(
    "runs",
    [
        [Run(10, 20, AVAILABLE, 1), Run(20, 30, ACKNOWLEDGED, 1)],
        [Run(20, 10, ARCHIVED, 1)],
        [Run(-5, 10, ARCHIVED, 1)],
        [Run(10, 11, ACQUIRED, 1)],
        [Run(10, 11, 6, 1)],
        [Run(10, 11, AVAILABLE, -1)],
        [Run(10, (1 << 63) - 1, AVAILABLE, 1)],
        [Run(10 + SPAN_MAX, 10 + SPAN_MAX, AVAILABLE, 1)],
    ],
)
def test_invalid_states_are_refused(runs: list[Run]) -> None:
    core = Share(Settings(), 10)
    assert core.load(Settings(), 10, runs) == -1
    assert core.destroy() == 0


@pytest.mark.parametrize("rule", quick(sorted(PLANTED), ["LATE", "ONE_QUEUE", "PARTLY"]))
def test_a_planted_bug_is_found(rule: str) -> None:
    for seed in range(200):
        try:
            history = History(seed, [rule], (1, 5, 40))
            for _ in range(150):
                history.step()
        except AssertionError:
            return
    pytest.fail(f"no history found {rule}")
