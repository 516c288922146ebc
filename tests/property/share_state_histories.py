"""Simulated share-partitions at the share coordinator: leaders that change, old ones that keep
writing, responses that are lost and requests that are repeated, administrators that set the start,
a coordinator that is restarted from its persisted state. One seed, one history.

Checked at each step
    the core's own invariants
    V1  the state equals a plain model: for each offset the highest (delivery count, state) written
        since the initialization, and nothing below the start, nor, after a READ in a new leader
        epoch, above its log's end
    V2  a writer with an older leader epoch or state epoch is refused, and changes nothing
    V3  acknowledged writes survive a restart; the log contains the state, both from the first
        record on and from the last snapshot on
    V4  each request gets one response, after the Persist on which it depends
    V5  there are never more updates than `updates_per_snapshot` after a snapshot
"""

from __future__ import annotations

import random

from mqd.coordinator.actions import KeyValue, Persist, Reply, Timer, TimerFired
from mqd.coordinator.share import core as share
from mqd.coordinator.share import records
from mqd.coordinator.share.runs import ACKNOWLEDGED, ARCHIVED, STATES, Run
from mqd.protocol.errors import ErrorCode

NAME = records.share_partition_name("g:1", bytes(range(16)), 3)
UPDATES, COLD_MS = 7, 1_000
FENCED_LEADER, FENCED_STATE, INVALID = (
    int(ErrorCode.FENCED_LEADER_EPOCH),
    int(ErrorCode.FENCED_STATE_EPOCH),
    int(ErrorCode.INVALID_REQUEST),
)


class Violation(AssertionError):
    """An invariant of the history does not hold."""


def demand(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


class Model:
    def __init__(self) -> None:
        self.exists = False
        self.state_epoch = self.leader_epoch = 0
        self.start = self.complete = -1
        self.offsets: dict[int, tuple[int, int]] = {}

    def write(self, start: int, complete: int, runs: tuple[Run, ...]) -> None:
        self.start = max(self.start, start)
        self.complete = complete
        for run in runs:
            for offset in range(run.first, run.last + 1):
                self.offsets[offset] = max((run.deliveries, run.state), self.offsets.get(offset, (-1, -1)))
        self.offsets = {offset: held for offset, held in self.offsets.items() if offset >= self.start}

    def cut(self, end: int) -> None:
        """The log has no records at or above this offset."""
        if self.start <= end and all(offset < end for offset in self.offsets):
            return
        self.start = min(self.start, end)
        self.offsets = {offset: held for offset, held in self.offsets.items() if offset < end}
        if self.complete >= 0:
            self.complete = sum(state in (ACKNOWLEDGED, ARCHIVED) for _, state in self.offsets.values())

    def durable_state(self) -> tuple[object, ...]:
        return (
            self.exists,
            self.state_epoch,
            self.leader_epoch,
            self.start,
            self.complete,
            dict(sorted(self.offsets.items())),
        )


def state_of(core: share.SharePartition) -> tuple[object, ...]:
    offsets = {
        offset: (run.deliveries, run.state) for run in core.runs.runs for offset in range(run.first, run.last + 1)
    }
    return core.exists, core.state_epoch, core.leader_epoch, core.start_offset, core.complete_count, offsets


class History:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_ms = 1_000_000
        self.settings = share.Settings(updates_per_snapshot=UPDATES, cold_ms=COLD_MS)
        self.core = share.SharePartition(NAME, self.settings)
        self.model = Model()
        self.log: list[KeyValue] = []
        self.timers: dict[str, int] = {}
        self.number = self.event_count = 0
        self.refused: set[int] = set()
        self.last_write: share.Write | None = None

    # -- the shell ---------------------------------------------------------------------------------

    def handle(self, event: object) -> object | None:
        self.event_count += 1
        reply = None
        for action in self.core.handle(event, self.now_ms):
            match action:
                case Persist():
                    demand(reply is None, "V4: a reply before the Persist it rests on")
                    self.log += action.records
                case Reply():
                    demand(reply is None, "V4: two replies")
                    reply = action.response
                case Timer(name, at_ms):
                    self.timers.pop(name, None)
                    if at_ms is not None:
                        self.timers[name] = at_ms
        self.core.check()
        demand(self.timers.keys() == ({share.SNAPSHOT_TIMER} if self.core._is_armed else set()), "P5: the timer")
        if reply is not None and not isinstance(event, share.Snapshot) and reply.error_code:
            self.refused.add(reply.error_code)
        asks = not isinstance(event, share.Forget | TimerFired)
        demand((reply is not None) == asks, "V4: answered or not")
        self.check()
        return reply

    def check(self) -> None:
        demand(
            state_of(self.core) == self.model.durable_state(),
            f"V1: {state_of(self.core)} is not {self.model.durable_state()}",
        )
        updates = 0
        for key, _ in reversed(self.log):
            if key[:2] != b"\0\1":
                break
            updates += 1
        demand(updates <= UPDATES, f"V5: {updates} updates")

    def loaded(self, log: list[KeyValue]) -> share.SharePartition:
        core = share.SharePartition(NAME, self.settings)
        for key, value in log:
            core.replay(key, value)
        return core

    def check_log(self) -> None:
        whole = self.loaded(self.log)
        demand(whole.durable_state() == self.core.durable_state(), "V3: the log is not the state")
        pruned = max((index for index, (key, _) in enumerate(self.log) if key[:2] == b"\0\0"), default=0)
        demand(
            self.loaded(self.log[pruned:]).durable_state() == whole.durable_state(), "V3: a snapshot is not the state"
        )

    def restart(self) -> None:
        """The log exists up to a point above all responses."""
        self.core = self.loaded(self.log)
        self.timers = {}
        for action in self.core.on_loaded(self.now_ms):
            demand(isinstance(action, Timer), "a load writes nothing")
            self.timers[action.name] = action.at_ms
        self.core.check()
        self.check()

    # -- requests ----------------------------------------------------------------------------------

    def send_request(self, kind: type, *fields: object) -> object:
        self.number += 1
        return self.handle(kind(self.number, *fields))

    def initialize(self) -> None:
        epoch = self.model.state_epoch + self.rng.choice((0, 1, 2, -1))
        if self.rng.random() < 0.02:
            epoch = -1
        start = self.rng.choice((-1, self.rng.randrange(200)))
        fenced = self.model.exists and -1 != epoch < self.model.state_epoch
        before = self.model
        repeated = self.model.exists and epoch == self.model.state_epoch and start == -1
        if not fenced and not repeated:
            self.model = Model()
            self.model.exists, self.model.state_epoch, self.model.start = True, epoch, start
        reply = self.send_request(share.Initialize, epoch, start)
        demand(
            reply.error_code == (FENCED_STATE if fenced else 0), f"V2: initialized at {epoch}: {before.durable_state()}"
        )

    def read(self) -> None:
        epoch = self.model.leader_epoch + self.rng.choice((0, 0, 1, 3, -1))
        error = INVALID if not self.model.exists else FENCED_LEADER if epoch < self.model.leader_epoch else 0
        log = ()
        if self.rng.random() < 0.5:  # it may have lost the newest records
            ends = sorted(max(self.model.start, 0) + self.rng.randrange(-6, 30) for _ in range(2))
            log = ((max(epoch, 0), max(ends[0], 0)), (records.LOG_END_EPOCH, max(ends[1], 0)))
        if not error:
            if log and epoch > self.model.leader_epoch:
                self.model.cut(log[0][1] if self.model.complete >= 0 else log[1][1])
            self.model.leader_epoch = epoch
        reply = self.send_request(share.Read, epoch, log)
        demand(reply.error_code == error, f"V2: read at {epoch}: {reply.error_code}, not {error}")
        if not error:
            found = {
                offset: (batch.delivery_count, batch.delivery_state)
                for batch in reply.state_batches
                for offset in range(batch.first_offset, batch.last_offset + 1)
            }
            demand((reply.start_offset, found) == (self.model.start, self.model.offsets), "V1: what a leader reads")

    def write(self) -> None:
        rng, model = self.rng, self.model
        state_epoch = model.state_epoch + rng.choice((0,) * 8 + (1, -1))
        leader_epoch = model.leader_epoch + rng.choice((0,) * 8 + (1, -1))
        base = max(model.start, 0)
        start = rng.choice((-1, -1, base, base + rng.randrange(12), base - 1))
        runs = []
        for _ in range(rng.randrange(5)):
            first = max(0, base + rng.randrange(-5, 24))
            runs.append(Run(first, first + rng.randrange(rng.choice((1, 9))), rng.choice(STATES), rng.randrange(4)))
        self.send(state_epoch, leader_epoch, start, rng.randrange(50), tuple(runs))

    def send(self, state_epoch: int, leader_epoch: int, start: int, complete: int, runs: tuple[Run, ...]) -> None:
        model = self.model
        error = (
            INVALID
            if not model.exists
            else FENCED_LEADER
            if -1 != leader_epoch < model.leader_epoch
            else FENCED_STATE
            if -1 != state_epoch < model.state_epoch
            else 0
        )
        if not error:
            model.write(start, complete, runs)
        self.number += 1
        event = share.Write(self.number, state_epoch, leader_epoch, start, complete, runs)
        reply = self.handle(event)
        demand(reply.error_code == error, f"V2: write at {state_epoch}, {leader_epoch}: {reply.error_code}")
        if not error:
            self.last_write = event

    def repeat(self) -> None:
        """A write whose response was lost: resent at once, it gives the same state."""
        event = self.last_write
        self.write()
        if self.last_write is not event and self.core.exists:
            event, before = self.last_write, state_of(self.core)
            self.send(event.state_epoch, event.leader_epoch, event.start_offset, event.complete_count, event.runs)
            demand(state_of(self.core) == before, "V1: a repeated write changes the state")

    def delete(self) -> None:
        self.model = Model()
        if self.rng.random() < 0.5:
            demand(self.send_request(share.Delete).error_code == 0, "a deletion fails")
        else:
            self.handle(share.Forget())

    def summary(self) -> None:
        reply, model = self.send_request(share.ReadSummary), self.model
        reported = reply.state_epoch, reply.leader_epoch, reply.start_offset, reply.delivery_complete_count
        demand(
            reported == (model.state_epoch, model.leader_epoch, model.start, model.complete), f"V1: summary {reported}"
        )

    # -- time --------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now_ms += self.rng.randrange(COLD_MS // 5)
        for name, at_ms in sorted(self.timers.items()):
            if at_ms <= self.now_ms:
                del self.timers[name]
                self.handle(TimerFired(name))
        dice = self.rng.random()
        if dice < 0.05 or not self.model.exists and dice < 0.5:
            self.initialize()
        elif dice < 0.15:
            self.read()
        elif dice < 0.80:
            self.write()
        elif dice < 0.86:
            self.repeat()
        elif dice < 0.90:
            self.summary()
        elif dice < 0.91:
            self.delete()
        elif dice < 0.93:
            self.handle(share.Snapshot(1))
        elif dice < 0.97:
            self.restart()
        else:
            self.check_log()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.check_log()


def run(seed: int, steps: int = 120) -> History:
    history = History(seed)
    history.run(steps)
    return history
