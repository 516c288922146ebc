"""Simulated histories of joint transactions. Each planted bug must be found; the real core must
survive them all.
"""

from __future__ import annotations

import msgspec
import pytest

from mqd.coordinator.actions import Action, Persist
from mqd.coordinator.transaction import events, joint, joint_state
from mqd.coordinator.transaction.events import JointResponse, WriteMarkers
from mqd.coordinator.transaction.joint import JointTransaction
from mqd.coordinator.transaction.records import State
from mqd.coordinator.transaction.state import HeldRequest
from tests.sim.coordinator.joint_world import JointWorld
from tests.tiers import quick

STEPS = 4_000


def history(seed: int, make=JointTransaction, peaceful: bool = False, steps: int = STEPS) -> JointWorld:
    world = JointWorld(seed, make, peaceful)
    world.run(steps)
    return world


@pytest.mark.parametrize("first_seed", range(0, 24, 6))
def test_histories_hold_the_invariants(first_seed: int) -> None:
    worlds = [history(seed) for seed in range(first_seed, first_seed + 6)]
    assert sum(world.confirmed_max + 1 for world in worlds) > 40, "too little happens to prove anything"
    assert sum(world.runs for world in worlds) > 12


@pytest.mark.parametrize("seed", range(3))
def test_a_driver_alone_is_never_refused(seed: int) -> None:
    assert history(seed, peaceful=True).confirmed_max > 10


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_million_events(block: int) -> None:
    for seed in range(1_000 + block * 40, 1_040 + block * 40):
        history(seed)


def test_runs_are_deterministic() -> None:
    first, second = history(3), history(3)
    assert first.log == second.log and first.confirmed_max == second.confirmed_max


def test_children_whose_epochs_run_out_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "RETIREMENT_EPOCH", 2)
    monkeypatch.setattr(joint_state, "RETIREMENT_EPOCH", 2)
    world = history(1, peaceful=True)
    assert max(epoch for _, epoch in world.given) < 2 and world.confirmed_max > 10


# -- planted bugs ----------------------------------------------------------------------------------


class EverybodyWins(JointTransaction):
    def _decide(self, state, now_ms, actions, winners=frozenset()):
        super()._decide(state, now_ms, actions, frozenset(self._active_ids) if winners else winners)


class WinnersUnchecked(JointTransaction):
    """J2: the ids named in a commit are trusted."""

    def _producer_error(self, producer_id, epoch):
        return (
            0
            if producer_id in self.children and self.state == State.ONGOING
            else super()._producer_error(producer_id, epoch)
        )


class ForgetsWhatWasCommitted(JointTransaction):
    def _replay_transaction(self, found):
        super()._replay_transaction(msgspec.structs.replace(found, committed_batch_id=-1))


class WritesAgain(JointTransaction):
    """J1: a committed batch is carried out again."""

    def _enlist(self, event, now_ms, actions):
        response = super()._enlist(event, now_ms, actions)
        if (
            response is not None
            and event.batch_id <= self.committed_batch_id
            and self.state not in joint_state.IN_PROGRESS
            and event.spare_producer_id < 0
            and self._idle_ids
        ):
            self.committed_batch_id = event.batch_id - 1
            return self._add_child(event, now_ms, actions)
        return response


class EpochStays(JointTransaction):
    def _current_epoch(self, child):
        return child.epoch


class MarkersBeforeDecision(JointTransaction):
    def handle(self, event, now_ms) -> list[Action]:
        return sorted(super().handle(event, now_ms), key=lambda action: not isinstance(action, WriteMarkers))


class CompletesTooEarly(JointTransaction):
    """The first child's markers count for all."""

    def _on_markers_written(self, event, now_ms, actions):
        if event.attempt in self._pending_attempts:
            self._pending_attempts = {event.attempt}
        super()._on_markers_written(event, now_ms, actions)


class ForgetsLosers(JointTransaction):
    def _write_markers(self, actions):
        super()._write_markers(actions)
        dropped = [
            action for action in actions if isinstance(action, WriteMarkers) and self.winners and not action.committed
        ]
        self._pending_attempts -= {action.attempt for action in dropped}
        actions[:] = [action for action in actions if action not in dropped]


class ForgetsToPersistPartitions(JointTransaction):
    def _on_add_partitions(self, event, now_ms, actions):
        super()._on_add_partitions(event, now_ms, actions)
        actions[:] = [action for action in actions if not isinstance(action, Persist)]


class AddIgnoresEpoch(JointTransaction):
    def _on_add_partitions(self, event, now_ms, actions):
        child = self.children.get(event.producer_id)
        super()._on_add_partitions(
            msgspec.structs.replace(event, producer_epoch=child.epoch) if child else event, now_ms, actions
        )


class LoadedAndDone(JointTransaction):
    def on_loaded(self, now_ms):
        return [action for action in super().on_loaded(now_ms) if not isinstance(action, WriteMarkers)]


class NoTimeout(JointTransaction):
    def _due_ms(self):
        return None if self.state == State.ONGOING else super()._due_ms()


class ForgetsWaiting(JointTransaction):
    def _on_markers_written(self, event, now_ms, actions):
        self._held = [held for held in self._held if type(held.event) is not events.Enlist]
        super()._on_markers_written(event, now_ms, actions)


class AnswersTwice(JointTransaction):
    def _response_without_markers(self, event):
        self._held.append(HeldRequest(1 << 40, event))
        return super()._response_without_markers(event)


class SharesAChild(JointTransaction):
    """W7: two attempts get the same child."""

    def _add_child(self, event, now_ms, actions):
        if self.state == State.ONGOING and self._active_ids:
            child = self.children[self._active_ids[0]]
            return JointResponse(0, self._active_ids[0], child.epoch, self.committed_batch_id)
        return super()._add_child(event, now_ms, actions)


class OvertakenGoesOn(JointTransaction):
    """J5, and two runs alternately abort each other's transaction; a commit finds its winners
    nevertheless.
    """

    def _fence_predecessor_of(self, successor):
        pass

    def _commit(self, event, now_ms, actions):
        self.run_id = event.run_id if self.state == State.ONGOING and event.batch_id == self.batch_id else self.run_id
        return super()._commit(event, now_ms, actions)

    def _producer_error(self, producer_id, epoch):
        return (
            0
            if self.state == State.ONGOING and producer_id in self.children
            else super()._producer_error(producer_id, epoch)
        )


class AbortedGoesOn(JointTransaction):
    """W9: a task that outlives its run's abort enlists, and begins a transaction."""

    def _abort(self, event, now_ms, actions):
        if (event.batch_id, event.run_id) == (self.batch_id, self.run_id) and event.batch_id > self.committed_batch_id:
            return self._abort_any(event, now_ms, actions)
        return super()._abort(event, now_ms, actions)


class AbortOfNothingForgotten(JointTransaction):
    """W9: the abort arrives before the first task."""

    def _abort(self, event, now_ms, actions):
        if (event.batch_id, event.run_id) == (self.batch_id, self.run_id) or event.batch_id <= self.committed_batch_id:
            return super()._abort(event, now_ms, actions)
        return self._response()


class AbortForgottenInACrash(JointTransaction):
    """W9: its timeout aborted it before, and the log does not record that its run is over."""

    def _abort(self, event, now_ms, actions):
        state = self.state
        response = super()._abort(event, now_ms, actions)
        if state != State.ONGOING:
            actions[:] = [action for action in actions if not isinstance(action, Persist)]
        return response


BUGS = (
    EverybodyWins,
    WinnersUnchecked,
    ForgetsWhatWasCommitted,
    WritesAgain,
    EpochStays,
    MarkersBeforeDecision,
    CompletesTooEarly,
    ForgetsLosers,
    ForgetsToPersistPartitions,
    AddIgnoresEpoch,
    LoadedAndDone,
    NoTimeout,
    ForgetsWaiting,
    AnswersTwice,
    SharesAChild,
    OvertakenGoesOn,
    AbortedGoesOn,
    AbortOfNothingForgotten,
    AbortForgottenInACrash,
)


@pytest.mark.parametrize("bug", quick(BUGS, [MarkersBeforeDecision]), ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: type[JointTransaction]) -> None:
    for seed in range(60):
        try:
            history(seed, bug)
        except (AssertionError, IndexError, KeyError):
            return
    pytest.fail(f"{bug.__doc__ or bug.__name__}: not found in 60 histories")
