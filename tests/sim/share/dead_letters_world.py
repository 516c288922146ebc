"""Dead letters in a simulated cluster: the share-partition's state in C at its leader, the real
core of the share coordinator, the real writers (mqd/coordinator/share/dead_letter_writer.py), and a model of
transactions. Acceptors and workers die, leaders move and lose the end of the log, where other records are
then written, responses are lost, and an administrator resets the offsets. Checked: L1, every rejected or exhausted record has one committed letter.

Planted bugs: PLANTED of this file, in the writer or in its use, and the rules of
native/share/planted_bugs.h.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

from mqd.coordinator.actions import Reply
from mqd.coordinator.share.core import Initialize, Read, SharePartition, Write
from mqd.coordinator.share.core import Settings as StateSettings
from mqd.coordinator.share.dead_letter_writer import (
    COMMITTING,
    FENCING,
    IDLE,
    LOADING,
    READING,
    WRITING,
    WRITING_PROGRESS,
    Archive,
    DeadLetterWriter,
    LoadedState,
    ObservedWrite,
    Outcome,
    Step,
    Wake,
    Woken,
    parse_progress,
)
from mqd.coordinator.share.records import LOG_END_EPOCH, share_partition_name
from mqd.coordinator.share.runs import Run
from tests.sim.share import share_core

NAME = share_partition_name("g", bytes(16), 0)
RECORDS = 60
LIMIT = 3


class AcceptsEarly(DeadLetterWriter):
    """The owner archives before the commit."""

    def _on_done(self, event, now_ms):
        early = [] if self.phase != WRITING_PROGRESS else [self._archive_now()]
        return early + super()._on_done(event, now_ms)

    def _archive_now(self):
        return Archive(self.state_epoch, self.leader_epoch, tuple((one.offset, one.offset) for one in self.batch))


class IgnoresProgress(DeadLetterWriter):
    def _offsets_in_progress(self, text, end):
        return set()


class Reordered(DeadLetterWriter):
    ORDER: tuple[str, ...]

    def _step(self, kind, letters=(), progress=""):
        self.place = self.ORDER.index(kind) if kind in self.ORDER else -1
        return super()._step(self.ORDER[0] if kind == FENCING else kind, letters, progress)

    def _on_done(self, event, now_ms):
        if self.phase not in self.ORDER:
            return super()._on_done(event, now_ms)
        place = self.ORDER.index(self.phase)
        if event.loaded is not None:
            self.state_epoch = event.loaded.state_epoch
            self.pending.clear()
            self._observe(-1, event.loaded.runs, now_ms)
        if self.phase == READING:
            self.early = event
        if place + 1 < len(self.ORDER):
            return [DeadLetterWriter._step(self, self.ORDER[place + 1])]
        self.phase = READING
        return super()._on_done(
            Outcome(event.token, progress=self.early.progress, progress_end=self.early.progress_end), now_ms
        )


class ReadsBeforeFencing(Reordered):
    ORDER = (READING, FENCING, LOADING)


class LoadsBeforeFencing(Reordered):
    ORDER = (LOADING, FENCING, READING)


class BelievesAnyEpoch(DeadLetterWriter):
    def _offsets_in_progress(self, text, end):
        progress = parse_progress(text or "")
        return super()._offsets_in_progress(
            progress._replace(state_epoch=self.state_epoch).encode() if progress else text, end
        )


class BelievesProgressOfLostRecords(DeadLetterWriter):
    def _offsets_in_progress(self, text, end):
        return super()._offsets_in_progress(text, None)


class TwoAtATime(DeadLetterWriter):
    """The next transaction begins before the records of the previous one are archived."""

    def _archive(self, now_ms):
        actions = super()._archive(now_ms)
        done = {offset: self.pending.pop(offset) for offset in self.to_archive}
        self.to_archive, self.phase, self._due_ms = set(), IDLE, None
        self.done = done
        return [action for action in actions if not isinstance(action, Wake)] + self._next_step()


class MixesEpochs(DeadLetterWriter):
    """Records rejected after a reset of the offsets count for the old state epoch."""

    def handle(self, event, now_ms):
        if isinstance(event, ObservedWrite) and self.state_epoch >= 0:
            event = ObservedWrite(self.state_epoch, event.start_offset, event.runs)
        return super().handle(event, now_ms)


class GivesUp(DeadLetterWriter):
    """As in Kafka: after repeated failures a record is archived without a letter."""

    def _on_failure(self, now_ms):
        self.failures = getattr(self, "failures", 0) + 1
        if self.failures < 2 or self.phase != WRITING:
            return super()._on_failure(now_ms)
        self.phase = IDLE
        self.to_archive = {letter.offset for letter in self.batch} & self.pending.keys()
        return self._archive(now_ms) if self.to_archive else []


PLANTED: dict[str, type[DeadLetterWriter]] = {
    "accepts before the commit": AcceptsEarly,
    "ignores the progress record": IgnoresProgress,
    "reads the progress record before it fences": ReadsBeforeFencing,
    "loads before it fences": LoadsBeforeFencing,
    "believes a progress record of another state epoch": BelievesAnyEpoch,
    "believes a progress record of lost records": BelievesProgressOfLostRecords,
    "two transactions at a time": TwoAtATime,
    "mixes state epochs": MixesEpochs,
    "gives up": GivesUp,
}


class Dead(NamedTuple):
    """`loss`: how often the log has lost the record at that offset before."""

    state_epoch: int
    offset: int
    loss: int


class Transactions:
    """One transactional id: its epoch, the open and the committed letters."""

    def __init__(self) -> None:
        self.epoch = 0
        self.open: list[Dead] = []
        self.open_progress: str | None = None
        self.letters: list[Dead] = []
        self.progress: str | None = None

    def fence(self) -> int:
        self.epoch += 1
        self.open, self.open_progress = [], None
        return self.epoch

    def commit(self) -> None:
        self.letters += self.open
        self.progress = self.open_progress or self.progress
        self.open, self.open_progress = [], None


def runs_of(response) -> list[Run]:
    return [
        Run(one.first_offset, one.last_offset, one.delivery_state, one.delivery_count) for one in response.state_batches
    ]


class Sent(NamedTuple):
    """The state when a step began."""

    number: int
    epoch: int
    state_epoch: int
    losses: tuple[int, ...]


class Host:
    """The acceptor: a writer, and its knowledge of its transactions."""

    def __init__(self) -> None:
        self.writer: DeadLetterWriter | None = None
        self.number = 0  # of the writer
        self.epoch = -1  # of its producer
        self.wake_ms: int | None = None


class World:
    def __init__(
        self, seed: int, writer: type[DeadLetterWriter] = DeadLetterWriter, planted: Collection[str] = ()
    ) -> None:
        self.random = random.Random(seed)
        self.writer, self.planted = writer, planted
        self.now_ms = 1_000
        self.coordinator = SharePartition(NAME, StateSettings())
        self.state_epoch = 1
        self.coordinator.handle(Initialize(1, 1, 0), 0)
        self.transactions = Transactions()
        self.hosts = [Host(), Host()]
        self.leader, self.leader_epoch = 0, 0
        self.owner: share_core.Share | None = None
        self.owner_epochs = (-1, -1)
        self.settings = share_core.Settings(lock_ms=500, delivery_limit=LIMIT, open_max=30, dead_letters=True)
        self.epochs = [(0, 0)]  # of the log: where each leader epoch begins
        self.losses = [0] * RECORDS  # by offset, how often the log has lost the record there
        self.losses_at = [tuple(self.losses)]  # by leader epoch
        self.dead: set[Dead] = set()  # persisted as Archiving
        self.waiting: list[tuple[int, Callable[[], None]]] = []  # (time, action)
        self.outage_ms = 0  # how long the dead-letter topic cannot be written
        self.is_calm = False

    # -- the owner and its acceptor -----------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return not self.is_calm and self.random.random() < probability

    def ask(self, event: Read | Write) -> Any:
        actions = self.coordinator.handle(event, self.now_ms)
        return next(action.response for action in actions if isinstance(action, Reply))

    def read(self) -> None:
        """READ: at a takeover, and when a new acceptor needs the records in state Archiving."""
        response = self.ask(Read(1, self.leader_epoch, (*self.epochs, (LOG_END_EPOCH, RECORDS))))
        assert response.error_code == 0
        runs = runs_of(response)
        if self.owner is None:
            self.owner = share_core.Share(self.settings, response.start_offset, self.planted)
            assert self.owner.load(self.settings, response.start_offset, [share_core.Run(*run) for run in runs]) == 0
            self.owner_epochs = response.state_epoch, self.leader_epoch
        if any(run.state == share_core.ARCHIVING for run in runs):
            self.ensure_writer()

    def ensure_writer(self) -> DeadLetterWriter:
        host = self.hosts[self.leader]
        if host.writer is None or host.writer.leader_epoch != self.leader_epoch:
            host.writer = self.writer(self.leader_epoch, self.random.choice([10, 40, 4_000]))
            host.number += 1
            host.wake_ms = None
            self.act(self.leader, host.writer.start())
        return host.writer

    def write(self) -> None:
        if self.owner is None:
            return
        difference = self.owner.difference()
        if difference.start < 0 and not difference.runs:
            return
        runs = tuple(Run(*run) for run in difference.runs)
        state_epoch, leader_epoch = self.owner_epochs
        write = Write(1, state_epoch, leader_epoch, difference.start, difference.finished_count, runs)
        if self.ask(write).error_code:
            self.lose_owner()
            self.read()
            return
        for run in runs:
            if run.state == share_core.ARCHIVING:
                self.dead.update(
                    Dead(state_epoch, offset, self.losses[offset]) for offset in range(run.first, run.last + 1)
                )
        writer = self.hosts[self.leader].writer
        if any(run.state == share_core.ARCHIVING for run in runs):
            writer = self.ensure_writer()
        if writer is not None:
            self.act(self.leader, writer.handle(ObservedWrite(state_epoch, difference.start, runs), self.now_ms))
            writer.check()

    def lose_owner(self) -> None:
        if self.owner is not None:
            self.owner.destroy()
        self.owner = None

    # -- what writers do ----------------------------------------------------------------------------

    def act(self, index: int, actions: list) -> None:
        host = self.hosts[index]
        for action in actions:
            if isinstance(action, Wake):
                host.wake_ms = action.at_ms
            else:
                assert host.writer is not None
                sent = Sent(host.number, host.epoch, host.writer.state_epoch, self.losses_at[host.writer.leader_epoch])
                self.later(partial(self.carry_out, index, sent, action))

    def later(self, work: Callable[[], None]) -> None:
        at_ms = self.now_ms + (
            0 if self.is_calm else self.random.choice([900, 4_000] if self.chance(0.06) else [0, 1, 5, 40])
        )
        self.waiting.append((at_ms, work))

    def carry_out(self, index: int, sent: Sent, action: Step | Archive) -> None:
        """An action in flight arrives, whether its writer still lives or not."""
        if isinstance(action, Archive):
            if self.owner is not None and self.owner_epochs == (action.state_epoch, action.leader_epoch):
                for first, last in action.ranges:
                    self.owner.archive(first, last)
            return
        host = self.hosts[index]
        outcome = self.step(host, sent, action)
        if action.kind == LOADING:  # at once: no WRITE arrives in between
            self.answered(index, sent.number, outcome)
            return
        if self.chance(0.1):
            outcome = Outcome(action.token, succeeded=False)  # its response is lost
        self.later(partial(self.answered, index, sent.number, outcome))

    def step(self, host: Host, sent: Sent, action: Step) -> Outcome:
        transactions, token = self.transactions, action.token
        if action.kind == FENCING:
            epoch = transactions.fence()
            if host.number == sent.number:
                host.epoch = epoch
            return Outcome(token)
        if action.kind == READING:
            return Outcome(token, progress=transactions.progress, progress_end=self.progress_end(transactions.progress))
        if action.kind == LOADING:
            if host.writer is None or host.number != sent.number:
                return Outcome(token, succeeded=False)
            leader_epoch = host.writer.leader_epoch
            if leader_epoch < self.coordinator.leader_epoch:
                return Outcome(token, is_superseded=True)
            response = self.ask(Read(1, leader_epoch))
            return Outcome(token, loaded=LoadedState(response.state_epoch, tuple(runs_of(response))))
        if sent.epoch != transactions.epoch:
            return Outcome(token, succeeded=False)  # fenced
        if action.kind == WRITING:
            if self.chance(0.15) or (self.now_ms < self.outage_ms and not self.is_calm):
                return Outcome(token, succeeded=False)
            transactions.open += [
                Dead(sent.state_epoch, letter.offset, sent.losses[letter.offset]) for letter in action.letters
            ]
        elif action.kind == WRITING_PROGRESS:
            transactions.open_progress = action.progress
        else:
            assert action.kind == COMMITTING
            transactions.commit()
        return Outcome(token)

    def progress_end(self, text: str | None) -> int | None:
        progress = parse_progress(text or "")
        if progress is None:
            return None
        return next((start for epoch, start in self.epochs if epoch > progress.leader_epoch), None)

    def answered(self, index: int, number: int, outcome: Outcome) -> None:
        host = self.hosts[index]
        if host.writer is not None and host.number == number:
            self.act(index, host.writer.handle(outcome, self.now_ms))
            host.writer.check()

    # -- what happens ------------------------------------------------------------------------------

    def consume(self) -> None:
        """A member acquires, and rejects, releases or accepts."""
        owner = self.owner
        if owner is None:
            return
        position = owner.next()
        if 0 <= position < RECORDS:
            runs = owner.acquire(7, self.now_ms, 5, True, position, [share_core.Batch(position, RECORDS - 1)])
            for run in runs:
                kinds = bytes(
                    self.random.choice([1, 2, 2, 3, 3, 0]) if run.count < LIMIT else self.random.choice([1, 2, 3])
                    for _ in range(run.last - run.first + 1)
                )
                if self.random.random() < 0.8:
                    assert owner.acknowledge(7, [share_core.Ack(run.first, run.last, kinds)], self.now_ms) == 0
        owner.expire(self.now_ms)

    def kill_acceptor(self) -> None:
        host = self.hosts[self.leader]
        host.writer, host.wake_ms = None, None
        host.number += 1
        if self.owner is not None and self.owner.native.archiving_count:
            self.write()
            if host.writer is None and self.owner is not None:
                self.read()

    def kill_worker(self) -> None:
        self.lose_owner()
        self.read()

    def move(self) -> None:
        """The earlier leader's writer continues until it is fenced."""
        self.lead(RECORDS)

    def lose(self) -> None:
        """The next leader has lost the end of the log, and gets other records."""
        end = self.random.randrange(RECORDS)
        for offset in range(end, RECORDS):
            self.losses[offset] += 1
        self.lead(end)

    def lead(self, end: int) -> None:
        self.lose_owner()
        self.leader, self.leader_epoch = 1 - self.leader, self.leader_epoch + 1
        self.epochs = [one for one in self.epochs if one[1] < end] + [(self.leader_epoch, end)]
        self.losses_at.append(tuple(self.losses))
        self.read()

    def reset(self) -> None:
        self.state_epoch += 1
        self.coordinator.handle(Initialize(1, self.state_epoch, self.random.randrange(RECORDS // 2)), self.now_ms)
        # records that were Archiving no longer are; their letters may have been written
        self.dead -= {one for one in self.dead if one not in self.transactions.letters}

    def fail(self) -> None:
        self.outage_ms = self.now_ms + 3_000

    def turn(self) -> None:
        self.now_ms += self.random.choice([1, 10, 100])
        ready = [work for at_ms, work in self.waiting if at_ms <= self.now_ms]
        self.waiting = [one for one in self.waiting if one[0] > self.now_ms]
        for work in ready:
            work()
        for index, host in enumerate(self.hosts):
            if host.writer is not None and host.wake_ms is not None and host.wake_ms <= self.now_ms:
                host.wake_ms = None
                self.act(index, host.writer.handle(Woken(), self.now_ms))
                host.writer.check()

    def run(self, steps: int) -> None:
        self.read()
        for _ in range(steps):
            self.consume()
            if self.random.random() < 0.7:
                self.write()
            self.turn()
            if self.random.random() < 0.06:
                self.random.choice(
                    [self.kill_acceptor, self.kill_worker, self.move, self.lose, self.reset, self.fail]
                )()
            self.judge()
        self.is_calm = True
        for _ in range(2_000):
            self.write()
            self.turn()
            if self.owner is not None and not self.owner.native.archiving_count and not self.waiting:
                break
        self.write()
        self.judge()
        missing = {one for one in self.dead if one.loss == self.losses[one.offset]} - set(self.transactions.letters)
        assert not missing, f"L1: no letter for {sorted(missing)}"
        self.lose_owner()

    def judge(self) -> None:
        twice = [one for one, count in Counter(self.transactions.letters).items() if count > 1]
        assert not twice, f"L1: a second letter for {twice}"
        stray = set(self.transactions.letters) - self.dead
        assert not {one for one in stray if one.state_epoch == self.state_epoch}, (
            f"L1: a letter for what is not dead: {stray}"
        )
