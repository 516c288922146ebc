"""The replication core in C against the model in Python: random histories must give the same
responses and the same state after each step; and a follower's log must become equal to its
leader's.
"""

from __future__ import annotations

import random

import pytest

from mqd.native.core import NativeError
from tests.sim.replica import replica_model
from tests.sim.replica.replica_core import (
    NO_RECORD_BOUND,
    REPLICA_COUNT_MAX,
    Action,
    Answer,
    Assignment,
    Change,
    Epochs,
    Fetch,
    Member,
    Planted,
    Replica,
    Role,
    epoch_end,
    truncation,
)
from tests.sim.replica.replica_model import ReplicaModel
from tests.tiers import quick

SELF = 1


def epochs_of(log: list[int], log_start: int = 0) -> list[tuple[int, int]]:
    """(epoch, first offset) for each epoch of a log, given as a list of its records' epochs."""
    return [
        (epoch, offset)
        for offset, epoch in enumerate(log)
        if offset >= log_start and (offset == log_start or log[offset - 1] != epoch)
    ]


class History:
    """One random history of a replica: the C core and the model side by side."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.core, self.model = Replica(), ReplicaModel()
        self.now_ms = 1000
        self.log: list[int] = [0] * self.random.randrange(4)
        self.log_start = 0
        self.durable = len(self.log)
        self.leader_epoch, self.partition_epoch, self.broker_epoch = 1, 1, 5
        self.flush_on_ack = self.random.random() < 0.5
        self.lag_records_max = self.random.choice([NO_RECORD_BOUND, NO_RECORD_BOUND, 2])
        self.broker_epochs = {node: 10 + node for node in range(2, 6)}
        self.members: tuple[Member, ...] = ()
        self.leader = -1
        self.acks_replicas = self.random.choice([0, 0, 1, 2, 2, 3])
        self.report_log()

    def step(self) -> None:
        kinds = [
            "assign",
            "append",
            "flush",
            "fetch",
            "fetch",
            "fetch",
            "propose",
            "propose",
            "answer",
            "send_request",
            "follow",
            "time",
            "start",
        ]
        getattr(self, self.random.choice(kinds))()
        self.compare()

    def compare(self) -> None:
        core, model = self.core, self.model
        assert core.role == model.role
        assert core.high_watermark == model.high_watermark
        assert core.epoch_start == model.epoch_start
        assert set(core.maximal_in_sync) == model.maximal
        assert core.proposing == (model.proposal is not None)
        assert [(state.node_id, state.position, state.broker_epoch) for state in core.followers] == [
            (node, received.position, received.broker_epoch) for node, received in model.received.items()
        ]

    def report_log(self) -> None:
        reported = self.log_start, len(self.log), self.durable, self.now_ms
        assert self.core.log(*reported) == self.model.log(*reported)

    def assign(self) -> None:
        rng = self.random
        moved = rng.random() < 0.4 or not self.members
        if moved:
            self.leader_epoch += rng.random() < 0.5
            self.partition_epoch += 1
        stale = not moved and rng.random() < 0.1
        if rng.random() < 0.2:
            node = rng.choice(list(self.broker_epochs))
            self.broker_epochs[node] += 10
        nodes = [SELF, *rng.sample(list(self.broker_epochs), rng.randrange(4))]
        rng.shuffle(nodes)
        if rng.random() < 0.05:
            nodes.remove(SELF)
        epochs = self.broker_epochs | {SELF: self.broker_epoch - (rng.random() < 0.05)}
        if not moved or (rng.random() < 0.7 and self.members):
            nodes = [member.node_id for member in self.members]
        in_sync = (
            {member.node_id for member in self.members if member.in_sync}
            if not moved
            else {node for node in nodes if rng.random() < 0.7}
        )
        moving = {node for node in nodes if rng.random() < 0.1}
        self.members = tuple(
            [Member(node, node in in_sync, rng.random() < 0.9, epochs[node], node in moving) for node in nodes]
        )
        if moved:
            self.leader = SELF if rng.random() < 0.7 else rng.choice([-1, *nodes] if nodes else [-1])
        leader = self.leader
        if rng.random() < 0.1:
            self.lag_records_max = rng.choice([NO_RECORD_BOUND, 2, 4])
        given = Assignment(
            SELF,
            self.broker_epoch,
            leader,
            self.leader_epoch - stale,
            self.partition_epoch - stale,
            rng.randrange(1, 4),
            100,
            self.lag_records_max,
            self.flush_on_ack,
            self.members,
            self.acks_replicas,
        )
        assert self.core.assign(given, self.now_ms) == self.model.assign(given, self.now_ms)

    def append(self) -> None:
        if self.model.role == Role.LEADER:
            self.log += [self.leader_epoch] * self.random.randrange(1, 4)
            if not self.flush_on_ack:
                self.durable = min(len(self.log), max(self.durable, self.random.randrange(len(self.log) + 1)))
            self.report_log()

    def flush(self) -> None:
        self.durable = len(self.log)
        self.report_log()

    def start(self) -> None:
        if self.random.random() < 0.1:
            self.log_start = min(self.log_start + 1, self.model.high_watermark)
            self.report_log()

    def time(self) -> None:
        self.now_ms += self.random.choice([1, 5, 40, 90, 150, 600, 600, 1500] + [400_000] * (self.acks_replicas > 0))

    def fetch(self) -> None:
        rng = self.random
        node = (
            rng.choice([member.node_id for member in self.members if member.node_id != SELF] or [2])
            if rng.random() < 0.95
            else rng.choice([SELF, 9])
        )
        offset = len(self.log) if rng.random() < 0.4 else rng.randrange(max(0, self.log_start - 1), len(self.log) + 3)
        epoch = self.log[offset - 1] if 0 < offset <= len(self.log) else -1
        if rng.random() < 0.2:
            epoch = rng.randrange(-1, self.leader_epoch + 2)
        fetch = Fetch(
            node,
            self.broker_epochs.get(node, 10) + rng.choice([0] * 8 + [10, -10]),
            self.leader_epoch + rng.choice([0] * 12 + [1, -1]),
            epoch,
            offset,
        )
        epochs = epochs_of(self.log, self.log_start)
        assert self.core.fetch(fetch, Epochs(epochs), self.now_ms) == self.model.fetch(fetch, epochs, self.now_ms)

    def propose(self) -> None:
        assert self.core.tick(self.now_ms) == self.model.tick(self.now_ms)
        assert self.core.propose(self.now_ms, 50) == self.model.propose(self.now_ms, 50)

    def answer(self) -> None:
        if self.model.proposal is not None:
            sequence = self.model.proposal.sequence - (self.random.random() < 0.1)
            error = self.random.choice([0, 0, 41, 55, 74, 95, 107])
            reported = sequence, self.leader_epoch - (self.random.random() < 0.1), error
            assert self.core.answered(*reported, self.now_ms + 20) == self.model.answered(*reported, self.now_ms + 20)

    def send_request(self) -> None:
        for acks_all in (False, True):
            reported = acks_all, 500, self.random.choice([499, 500, 501])
            assert self.core.may_append(*reported) == self.model.may_append(*reported)
        assert self.core.latest() == self.model.latest()

    def follow(self) -> None:
        if self.model.role != Role.FOLLOWER:
            return
        epochs = epochs_of(self.log, self.log_start)
        fetch = self.core.next_fetch(Epochs(epochs))
        assert fetch == self.model.next_fetch(epochs)
        if fetch is None:
            return
        rng, end = self.random, len(self.log)
        response = Answer(
            rng.choice([0, 0, 0, 1, 6, 75]),
            self.leader_epoch,
            rng.choice([-1, -1, rng.randrange(self.leader_epoch + 1)]),
            rng.randrange(end + 2),
            rng.randrange(end + 3),
            rng.randrange(end + 3),
            rng.choice([0, 0, 0, end + 1]),
            0,
        )
        if rng.random() < 0.1:
            fetch = fetch._replace(fetch_offset=fetch.fetch_offset + 1)
        step = self.core.step(fetch, response, Epochs(epochs))
        assert step == self.model.step(fetch, response, epochs)
        if step.action == Action.APPEND:
            self.log += [self.log[-1] if self.log else 0] * rng.randrange(3)
            self.durable = len(self.log) if rng.random() < 0.8 else self.durable
            self.report_log()
            reported = self.leader_epoch - (rng.random() < 0.1), response.high_watermark
            assert self.core.followed(*reported) == self.model.followed(*reported)
        elif step.action == Action.TRUNCATE and step.offset >= self.log_start:
            del self.log[step.offset :]
            self.durable = min(self.durable, len(self.log))
            self.report_log()


class SpareHistory(History):
    """A leader with acks.replicas, followers that are fast and slow in turn, and a controller that
    takes every proposal: exchanges, which are rare in other histories.
    """

    def __init__(self, seed: int):
        super().__init__(seed)
        rng = self.random
        self.flush_on_ack, self.lag_records_max = False, NO_RECORD_BOUND
        nodes = [SELF, 2, 3, 4, 5][: rng.randrange(3, 6)]
        rng.shuffle(nodes)
        self.leader, self.acks_replicas, self.slow = SELF, rng.randrange(1, len(nodes)), 2
        self.put({SELF, 2, 3}, nodes)

    def put(self, in_sync: set[int], nodes: list[int]) -> None:
        self.partition_epoch += 1
        epochs = self.broker_epochs | {SELF: self.broker_epoch}
        self.members = tuple([Member(node, node in in_sync, True, epochs[node]) for node in nodes])
        given = Assignment(
            SELF,
            self.broker_epoch,
            SELF,
            self.leader_epoch,
            self.partition_epoch,
            1,
            30_000,
            NO_RECORD_BOUND,
            False,
            self.members,
            self.acks_replicas,
        )
        assert self.core.assign(given, self.now_ms) == self.model.assign(given, self.now_ms)

    def step(self) -> None:
        rng = self.random
        kinds = ["append", "follow_on", "follow_on", "follow_on", "propose", "pause", "commit"]
        if rng.random() < 0.02:
            self.slow = rng.choice(list(self.broker_epochs))
        if rng.random() < 0.01:
            self.now_ms += 400_000
        getattr(self, rng.choice(kinds))()
        self.compare()

    def pause(self) -> None:
        self.now_ms += self.random.choice([1, 5, 20, 60])

    def follow_on(self) -> None:
        node = self.random.choice([member.node_id for member in self.members if member.node_id != SELF])
        end = len(self.log)
        if node == self.slow:
            end = max(self.model.received[node].position, 0)
        fetch = Fetch(node, self.broker_epochs[node], self.leader_epoch, self.log[end - 1] if end else -1, end)
        epochs = epochs_of(self.log)
        assert self.core.fetch(fetch, Epochs(epochs), self.now_ms) == self.model.fetch(fetch, epochs, self.now_ms)

    def commit(self) -> None:
        if self.model.proposal is not None:
            self.put({node for node, _ in self.model.proposal.in_sync}, [member.node_id for member in self.members])


def history_of(seed: int) -> History:
    return SpareHistory(seed) if seed % 3 == 0 else History(seed)


@pytest.mark.parametrize("block", quick(range(8), range(3)))
def test_histories(block: int) -> None:
    for seed in range(block * 60, block * 60 + 60):
        history = history_of(seed)
        try:
            for _ in range(150):
                history.step()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.slow
def test_long_histories() -> None:
    for seed in range(100_000, 120_000):
        history = history_of(seed)
        for _ in range(200):
            history.step()


@pytest.mark.parametrize("planted", [planted for planted in Planted if planted not in (Planted.TRUNCATE_TO_HW,)])
def test_every_planted_bug_is_detected(planted: Planted) -> None:
    """These histories detect every planted bug, because the model does not have it."""
    for seed in range(600):
        history = history_of(seed)
        native = history.core.native
        native.planted = planted
        try:
            for _ in range(150):
                history.step()
        except AssertionError:
            return
    raise AssertionError(f"{planted!r} makes no difference")


def test_epochs_against_the_model() -> None:
    rng = random.Random(7)
    for _ in range(4000):
        log = sorted([rng.randrange(6) for _ in range(rng.randrange(8))])
        log_start = rng.randrange(len(log) + 1)
        epochs, epoch, end = epochs_of(log, log_start), rng.randrange(-1, 8), rng.randrange(len(log) + 2)
        assert epoch_end(Epochs(epochs), len(log), epoch) == replica_model.epoch_end(epochs, len(log), epoch)
        assert truncation(Epochs(epochs), len(log), epoch, end) == replica_model.truncation(
            epochs, len(log), epoch, end
        )


def lineage(rng: random.Random) -> tuple[list[list[int]], int]:
    """Logs as after elections: in each epoch the log of one leader grows, and others copy part of
    it.
    """
    logs: list[list[int]] = [[] for _ in range(4)]
    last = rng.randrange(1, 9)
    for epoch in range(last):
        leader = rng.choice(logs)
        leader += [epoch] * rng.randrange(4)
        for log in logs:
            if log is not leader and rng.random() < 0.4:
                log[:] = leader[: rng.randrange(len(leader) + 1)]
    return logs, last


def test_following_ends_in_agreement() -> None:
    """However the logs differ, a follower truncates to exactly their common prefix, within as many
    responses as there are epochs, and then appends.
    """
    rng = random.Random(11)
    for _ in range(3000):
        logs, epoch = lineage(rng)
        ours, theirs = logs[0], list(logs[1])
        common = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
        )
        members = (Member(1, True, True, 5), Member(2, True, True, 6))
        leader, follower = Replica(), Replica()
        leader.log(0, len(ours), len(ours), 0)
        follower.log(0, len(theirs), len(theirs), 0)
        leader.assign(Assignment(1, 5, 1, epoch, 1, 1, 1000, -1, True, members), 0)
        follower.assign(Assignment(2, 6, 1, epoch, 1, 1, 1000, -1, True, members), 0)
        responses = 0
        while True:
            epochs = Epochs(epochs_of(theirs))
            fetch = follower.next_fetch(epochs)
            assert fetch is not None
            response = leader.fetch(fetch, Epochs(epochs_of(ours)), responses)
            step = follower.step(fetch, response, epochs)
            responses += 1
            if step.action == Action.APPEND:
                break
            assert step.action == Action.TRUNCATE and 0 <= step.offset < len(theirs)
            del theirs[step.offset :]
            follower.log(0, len(theirs), len(theirs), responses)
            assert responses <= epoch + 1
        assert len(theirs) == common
        assert leader.high_watermark <= common


def test_invalid_assignments_are_refused() -> None:
    replica = Replica()
    twice = (Member(1, True, True, 5), Member(1, True, True, 5))
    with pytest.raises(NativeError):
        replica.assign(Assignment(1, 5, 1, 0, 0, 1, 1000, -1, True, twice), 0)
    with pytest.raises(NativeError):
        replica.assign(
            Assignment(
                1,
                5,
                1,
                0,
                0,
                1,
                1000,
                -1,
                True,
                tuple([Member(i, True, True, 5) for i in range(REPLICA_COUNT_MAX + 1)]),
            ),
            0,
        )
    assert (
        replica.role == Role.NONE
        and replica.assign(Assignment(1, 5, 1, 0, 0, 1, 1000, -1, True, twice[:1]), 0) == Change.EPOCH | Change.ROLE
    )
