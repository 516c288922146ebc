"""Drives one quorum core by single events: its disk, its clock, and messages from other members."""

from __future__ import annotations

import random

from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import QuorumSettings, Stored
from mqd.cluster.raft.messages import (
    BeginEpoch,
    Fetch,
    FetchResponse,
    ReplicaKey,
    SnapshotMeta,
    Voter,
    VoteRequest,
    VoteResponse,
)

SECOND = 1_000_000_000


def key(node: int) -> ReplicaKey:
    return ReplicaKey(node, b"%016d" % node)


def voter(node: int) -> Voter:
    return Voter(key(node), f"h{node}", 9_000)


def meta(*nodes: int, offset: int = 0, epoch: int = 0, generation: int = 1) -> SnapshotMeta:
    return SnapshotMeta(offset, epoch, tuple(voter(node) for node in nodes), generation)


class Driver:
    """One core, a disk whose writes complete on request, and a clock."""

    def __init__(
        self,
        node: int = 1,
        stored: Stored = Stored(snapshot=meta(1)),
        settings: QuorumSettings = QuorumSettings(),
        start: bool = True,
    ) -> None:
        self.core = QuorumCore(key(node), stored, settings, random.Random(1))
        self.now = 100 * SECOND
        self.effects: list[events.Effect] = []
        if start:
            self(events.Start())

    def __call__(self, event: events.Event) -> list[events.Effect]:
        found = self.core.handle(event, self.now)
        self.core.check()
        self.effects += found
        return found

    def receive(self, sender: int, message) -> list[events.Effect]:
        return self(events.Received(sender, message))

    def disk(self) -> list[events.Effect]:
        """Completes everything written so far, and its consequences."""
        found: list[events.Effect] = []
        while (
            last := max((effect.sequence for effect in self.effects if hasattr(effect, "sequence")), default=0)
        ) > self.core._durable_sequence:
            found += self(events.DiskDone(last))
        return found

    def after(self, seconds: float) -> list[events.Effect]:
        """Ticks whenever one is due."""
        end, found = self.now + int(seconds * SECOND), []
        while (deadline := self.core.next_deadline_ns) <= end:
            self.now = max(self.now, deadline)
            found += self(events.Tick())
        self.now = end
        return found

    def elect(self) -> None:
        """In a quorum of three: node 2 grants its pre-vote, then its vote."""
        for is_pre_vote in (True, False):
            while not (
                requests := [
                    request for request in messages(self.effects, VoteRequest) if request.pre_vote == is_pre_vote
                ]
            ):
                self.after(0.01)
                self.disk()
            self.receive(2, VoteResponse(1, self.core.epoch, key(2), True, is_pre_vote, requests[-1].round, -1))
            self.disk()
        assert self.core.is_leader

    def fetch(self, node: int, offset: int | None = None, stamp: int = 0, sequence: int = 0) -> list[events.Effect]:
        """As a follower that has everything up to `offset`."""
        core = self.core
        offset = core.log.end_offset if offset is None else offset
        return self.receive(
            node,
            Fetch(
                1, core.epoch, key(node), sequence, offset, core.log.epoch_before(offset), core.high_watermark, stamp
            ),
        )


def of(effects: list[events.Effect], kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


def messages(effects: list[events.Effect], kind: type) -> list:
    return [effect.message for effect in of(effects, events.Send) if isinstance(effect.message, kind)]


def three(active: bool = True) -> Driver:
    driver = Driver(stored=Stored(snapshot=meta(1, 2, 3)))
    driver.elect()
    if active:
        driver.fetch(2)
        driver.disk()
        assert driver.core.is_active
    return driver


def follower(**changes) -> Driver:
    """Node 1, which follows node 2 in epoch 4."""
    driver = Driver(stored=Stored(**{"snapshot": meta(1, 2, 3), **changes}))
    driver.receive(2, BeginEpoch(1, 4, key(2)))
    driver.disk()
    return driver


def answer(driver: Driver, **content) -> list[events.Effect]:
    requested = messages(driver.effects, Fetch)[-1]
    return driver.receive(2, FetchResponse(1, 4, 2, key(2), requested.sequence, 77, **{"high_watermark": 0, **content}))
