"""Simulated histories of a transactional id. Each planted bug must be found; the real core must
survive them all.
"""

from __future__ import annotations

import msgspec
import pytest

from mqd.coordinator.actions import Action, Persist, Reply
from mqd.coordinator.transaction import core as transaction
from mqd.coordinator.transaction import events
from mqd.coordinator.transaction.core import Transaction
from mqd.coordinator.transaction.events import Identity, WriteMarkers
from mqd.coordinator.transaction.records import State
from mqd.coordinator.transaction.state import EPOCH_MAX, HeldRequest, Settings
from tests.sim.coordinator.transaction_world import SETTINGS, World
from tests.tiers import quick

# (versions of the clients, first epoch): alone, rivals, old and new clients mixed, and producer ids
# near their last epoch
SCENES = (((2, 2), -1), ((2,), 32_740), ((0, 0), -1), ((2, 0), -1), ((2, 2, 2), 32_700), ((0,), 32_720))
STEPS = 1_500


def history(seed: int, make=Transaction, peaceful: bool = False, steps: int = STEPS) -> World:
    versions, first_epoch = SCENES[seed % len(SCENES)]
    world = World(seed, versions[:1] if peaceful else versions, make, first_epoch, peaceful)
    world.run(steps)
    return world


@pytest.mark.parametrize("first_seed", range(0, 36, 6))
def test_histories_hold_the_invariants(first_seed: int) -> None:
    """54,000 steps."""
    worlds = [history(seed) for seed in range(first_seed, first_seed + 6)]
    assert sum(len(world.confirmed) for world in worlds) > 50, "too little happens to prove anything"


@pytest.mark.parametrize("seed", range(6))
def test_a_client_alone_is_never_refused(seed: int) -> None:
    assert len(history(seed, peaceful=True).confirmed) > 20


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_a_million_events(block: int) -> None:
    for seed in range(1_000 + block * 70, 1_070 + block * 70):
        history(seed)


def test_runs_are_deterministic() -> None:
    first, second = history(3), history(3)
    assert first.log == second.log and first.confirmed == second.confirmed


# -- planted bugs ----------------------------------------------------------------------------------


class EpochStays(Transaction):
    """The end of a version 2 transaction does not bump the epoch."""

    def _prepare(self, event, now_ms, actions):
        return super()._prepare(msgspec.structs.replace(event, client_version=0), now_ms, actions)


class EndIgnoresEpoch(Transaction):
    """T4: an EndTxn ends the current transaction, whatever epoch it names."""

    def _end_version_2(self, event, now_ms, actions):
        if self.state == State.ONGOING:
            event = msgspec.structs.replace(event, producer_epoch=self.producer_epoch)
        return super()._end_version_2(event, now_ms, actions)


class AddIgnoresEpoch(Transaction):
    def _on_add_partitions(self, event, now_ms, actions):
        if event.producer_id == self.producer_id:
            event = msgspec.structs.replace(event, producer_epoch=self.producer_epoch)
        super()._on_add_partitions(event, now_ms, actions)


class FenceByOne(Transaction):
    """A fenced producer is mistaken for one that repeats its EndTxn, and continues beside its
    successor.
    """

    def _fence(self, now_ms, actions, last_epoch=-1):
        self.producer_epoch -= 1
        super()._fence(now_ms, actions, last_epoch)
        self.last_producer_epoch = last_epoch

    def _on_repetition(self, event, now_ms, actions):
        return 0  # and the outcome is not compared


class MarkersBeforeDecision(Transaction):
    def handle(self, event, now_ms) -> list[Action]:
        return sorted(super().handle(event, now_ms), key=lambda action: not isinstance(action, WriteMarkers))


class BumpedWithoutEpoch(Transaction):
    """Clients of version 0 end a transaction with its own epoch: partitions mistake its markers for
    repetitions.
    """

    def _write_markers(self, actions):
        super()._write_markers(actions)
        actions[-1] = msgspec.structs.replace(actions[-1], is_bumped=True)


class CompletesTooEarly(Transaction):
    """The decision is mistaken for the end."""

    def _decide(self, state, now_ms, actions):
        super()._decide(state, now_ms, actions)
        self._on_markers_written(events.MarkersWritten(self._attempt), now_ms, actions)


class AnyAttempt(Transaction):
    """Markers of an earlier transaction complete this one. With clients of version 0 the epochs are
    the same.
    """

    def _on_markers_written(self, event, now_ms, actions):
        super()._on_markers_written(events.MarkersWritten(self._attempt), now_ms, actions)

    def _write_markers(self, actions):
        super()._write_markers(actions)
        actions.append(actions[-1])


class ForgetsPartition(Transaction):
    def _write_markers(self, actions):
        super()._write_markers(actions)
        actions[-1] = msgspec.structs.replace(actions[-1], partitions=actions[-1].partitions[:2])


class ForgetsToPersistPartitions(Transaction):
    def _add(self, added, client_version, now_ms, actions):
        begun = self.state == State.ONGOING
        super()._add(added, client_version, now_ms, actions)
        if begun:
            actions[:] = [action for action in actions if not isinstance(action, Persist)]


class NoWaiting(Transaction):
    """Partitions are added while the previous transaction is being ended."""

    def _producer_error(self, producer_id, epoch):
        error = super()._producer_error(producer_id, epoch)
        return 0 if error == transaction.CONCURRENT else error


class VerifiesAnything(Transaction):
    def _on_verify_partitions(self, event, now_ms, actions):
        actions.append(Reply(event.request, (0,) * len(event.partitions)))


class LastEpochIsUsed(Transaction):
    """The producer id is not replaced when its epochs run out."""

    def _init_idle(self, event, now_ms, actions):
        self._initialize(event, now_ms, actions, self.producer_id, min(self.producer_epoch + 1, EPOCH_MAX), -1)


class ReplayForgetsNext(Transaction):
    def replay(self, key, value):
        super().replay(key, value)
        self.next_producer_id = -1


class LoadedAndDone(Transaction):
    """After a restart the markers of decided transactions are not written."""

    def on_loaded(self, now_ms):
        return [action for action in super().on_loaded(now_ms) if not isinstance(action, WriteMarkers)]


class NoTimeout(Transaction):
    def _due_ms(self):
        return None if self.state == State.ONGOING else super()._due_ms()


class ForgetsWaiting(Transaction):
    def _on_markers_written(self, event, now_ms, actions):
        self._held = [held for held in self._held if type(held.event) is not events.InitProducerId]
        super()._on_markers_written(event, now_ms, actions)


class AnswersTwice(Transaction):
    def _give_up(self, event, actions):
        super()._give_up(event, actions)
        self._held.append(HeldRequest(1 << 40, event))


class OtherOutcome(Transaction):
    """A retry gets a success, whatever the outcome was."""

    def _on_repetition(self, event, now_ms, actions):
        return super()._on_repetition(
            msgspec.structs.replace(event, committed=self.state in (State.PREPARE_COMMIT, State.COMPLETE_COMMIT)),
            now_ms,
            actions,
        )


BUGS = (
    EpochStays,
    BumpedWithoutEpoch,
    EndIgnoresEpoch,
    AddIgnoresEpoch,
    FenceByOne,
    MarkersBeforeDecision,
    CompletesTooEarly,
    AnyAttempt,
    ForgetsPartition,
    ForgetsToPersistPartitions,
    NoWaiting,
    VerifiesAnything,
    LastEpochIsUsed,
    ReplayForgetsNext,
    LoadedAndDone,
    NoTimeout,
    ForgetsWaiting,
    AnswersTwice,
)


@pytest.mark.parametrize("bug", quick(BUGS, [ReplayForgetsNext]), ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: type[Transaction]) -> None:
    for seed in range(60):
        try:
            history(seed, bug)
        except (AssertionError, IndexError):
            return
    pytest.fail(f"{bug.__name__} survives 60 histories")


def test_the_settings_are_those_of_the_core() -> None:
    assert SETTINGS.response_ms == Settings().response_ms and Identity(0).producer_epoch == -1
