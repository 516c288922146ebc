"""Simulated share-partitions whose log loses records that were acknowledged: power cuts where nothing
was flushed, and unclean elections. The owner is the broker's C state, the coordinator its core. One
seed, one history.

Checked
    E1  every record that the log has at the end was accepted by a member that got this very record,
        not an earlier one with its offset
    E2  no record that a member has accepted, and that the log still has, is delivered again
"""

from __future__ import annotations

import random
from typing import Any

from mqd.coordinator.actions import KeyValue, Persist, Reply
from mqd.coordinator.share.core import Initialize, Read, Settings, SharePartition, Write
from mqd.coordinator.share.records import LOG_END_EPOCH, share_partition_name
from mqd.coordinator.share.runs import Run
from tests.sim.share import share_core
from tests.sim.share.dead_letters_world import runs_of

NAME = share_partition_name("g", bytes(16), 0)
MEMBER, LOCK_MS = 7, 500


class World:
    def __init__(self, seed: int, core: type[SharePartition] = SharePartition) -> None:
        self.random = random.Random(seed)
        self.now_ms = 1_000
        self.core = core
        self.coordinator = core(NAME, Settings(updates_per_snapshot=5))
        self.journal: list[KeyValue] = []
        self.log: list[tuple[int, int]] = []  # (leader epoch, number of the record), by offset
        self.durable = 0
        self.leader_epoch = 0
        self.number = 0
        self.accepted: set[int] = set()  # numbers of records
        self.owner: share_core.Share | None = None
        self.state_epoch = 0
        self.settings = share_core.Settings(lock_ms=LOCK_MS, delivery_limit=30_000, open_max=20)
        self.losses = 0
        self.ask(Initialize(1, 0, self.random.choice([0, -1])))

    def ask(self, event: object) -> Any:
        response = None
        for action in self.coordinator.handle(event, self.now_ms):
            if isinstance(action, Persist):
                self.journal += action.records
            elif isinstance(action, Reply):
                response = action.response
        self.coordinator.check()
        loaded = self.core(NAME, self.coordinator.settings)
        for key, value in self.journal:
            loaded.replay(key, value)
        assert loaded.durable_state() == self.coordinator.durable_state(), "the journal is not the state"
        return response

    # -- the log -----------------------------------------------------------------------------------

    def append(self) -> None:
        for _ in range(self.random.randrange(1, 6)):
            self.log.append((self.leader_epoch, self.number))
            self.number += 1

    def flush(self) -> None:
        self.durable = len(self.log)

    def epochs(self) -> tuple[tuple[int, int], ...]:
        """As the owner sends them."""
        starts: dict[int, int] = {}
        for offset, (epoch, _) in enumerate(self.log):
            starts.setdefault(epoch, offset)
        return (*starts.items(), (LOG_END_EPOCH, len(self.log)))

    def lose(self) -> None:
        """The next leader has only what was flushed, at least."""
        kept = self.random.randint(self.durable, len(self.log))
        self.losses += len(self.log) - kept
        del self.log[kept:]
        self.move()

    def move(self) -> None:
        self.leader_epoch += self.random.choice([1, 2])
        self.die()

    def die(self) -> None:
        """The worker: what it has not written is forgotten."""
        if self.owner is not None:
            self.owner.destroy()
        self.owner = None

    # -- the owner ---------------------------------------------------------------------------------

    def load(self) -> None:
        response = self.ask(Read(1, self.leader_epoch, self.epochs()))
        assert response.error_code == 0
        start = response.start_offset if response.start_offset >= 0 else 0
        assert start <= len(self.log), "it begins beyond the log's end"
        self.owner = share_core.Share(self.settings, start)
        assert self.owner.load(self.settings, start, [share_core.Run(*run) for run in runs_of(response)]) == 0
        if response.start_offset < 0:
            self.owner.native.start_moved = 1
        self.state_epoch = response.state_epoch

    def consume(self) -> None:
        if self.owner is None:
            self.load()
        owner = self.owner
        assert owner is not None
        self.now_ms += self.random.choice([1, LOCK_MS + 1])
        owner.expire(self.now_ms)
        position = owner.next()
        if not 0 <= position < len(self.log):
            return
        batches = [share_core.Batch(position, len(self.log) - 1)]
        got: list[int] = []
        for run in owner.acquire(MEMBER, self.now_ms, 5, True, position, batches):
            for offset in range(run.first, run.last + 1):
                assert self.log[offset][1] not in self.accepted, "E2"
                kind = self.random.choice([share_core.ACCEPT, share_core.ACCEPT, share_core.RELEASE])
                if self.random.random() < 0.8:
                    ack = share_core.Ack(offset, offset, bytes([kind]))
                    assert owner.acknowledge(MEMBER, [ack], self.now_ms) == 0
                    got += [self.log[offset][1]] if kind == share_core.ACCEPT else []
        if self.random.random() < 0.2:
            self.die()  # nothing of it was confirmed
            return
        self.write()
        self.accepted.update(got)

    def write(self) -> None:
        assert self.owner is not None
        difference = self.owner.difference()
        if difference.start < 0 and not difference.runs:
            return
        runs = tuple(Run(*run) for run in difference.runs)
        write = Write(1, self.state_epoch, self.leader_epoch, difference.start, difference.finished_count, runs)
        assert self.ask(write).error_code == 0

    # -- a history ---------------------------------------------------------------------------------

    def run(self, steps: int) -> World:
        moves = [self.append, self.append, self.consume, self.consume, self.consume, self.flush, self.die, self.move]
        for _ in range(steps):
            self.random.choice(moves)() if self.random.random() < 0.9 else self.lose()
        for _ in range(40 * (len(self.log) + 5)):
            if all(number in self.accepted for _, number in self.log):
                break
            self.consume()
        missed = [offset for offset, (_, number) in enumerate(self.log) if number not in self.accepted]
        assert not missed, f"E1: the records at {missed} are never delivered"
        self.die()
        return self


# -- planted bugs ----------------------------------------------------------------------------------


class IgnoresTheLog(SharePartition):
    """As Kafka does."""

    def _drop_lost_state(self, epochs):
        return False


class LooksAtTheEndAlone(SharePartition):
    def _drop_lost_state(self, epochs):
        return super()._drop_lost_state(epochs[-1:])


class KeepsBatches(SharePartition):
    """Lowers the start, and keeps what was finished above."""

    def _drop_lost_state(self, epochs):
        end = next((start for epoch, start in epochs if epoch > self.leader_epoch), 0)
        if self.start_offset <= end:
            return False
        self.start_offset, self.complete_count = end, 0
        return True


class TakesTheNewEpoch(SharePartition):
    """Compares with the reader's leader epoch, not with that of the state."""

    def _drop_lost_state(self, epochs):
        was, self.leader_epoch = self.leader_epoch, epochs[-2][0] if len(epochs) > 1 else 0
        try:
            return super()._drop_lost_state(epochs)
        finally:
            self.leader_epoch = was


class WritesAnUpdate(SharePartition):
    """What is lowered is not persisted."""

    def _snapshot(self, now_ms):
        return self._persist((), self.start_offset, now_ms) if self.update_count < 5 else super()._snapshot(now_ms)


class CutsInEveryEpoch(SharePartition):
    """A record of the newest leader epoch counts as lost."""

    def _drop_lost_state(self, epochs):
        return super()._drop_lost_state(
            tuple((epoch - 1 if epoch != LOG_END_EPOCH else epoch, start) for epoch, start in epochs)
        ) or (self._shrink(epochs))

    def _shrink(self, epochs):
        starts = [start for epoch, start in epochs if epoch >= self.leader_epoch]
        return super()._drop_lost_state(((LOG_END_EPOCH, starts[0]),)) if starts else False


PLANTED: dict[str, type[SharePartition]] = {
    "ignores the log": IgnoresTheLog,
    "looks at the log's end alone": LooksAtTheEndAlone,
    "keeps batches beyond the end": KeepsBatches,
    "takes the reader's leader epoch": TakesTheNewEpoch,
    "writes an update": WritesAnUpdate,
    "forgets an epoch too many": CutsInEveryEpoch,
}
