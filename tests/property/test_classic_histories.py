"""Histories of classic groups (classic_histories.py), and the proof that they are effective: each
planted bug below must be found.

The quick share is 60,000 events; the long tier's more than a million.
"""

from __future__ import annotations

import pytest

from mqd.coordinator.actions import Persist, Reply, Timer
from mqd.coordinator.group.classic import core as classic
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.classic.members import NEVER
from mqd.protocol.messages import HeartbeatResponse
from tests.property.classic_histories import History
from tests.tiers import quick

SEEDS_MAX = 60  # a planted bug must be found within this many histories of EVENTS events
EVENTS = 3_000


@pytest.mark.parametrize("seed", quick(range(20), range(6)))
def test_histories_hold_the_invariants(seed: int) -> None:
    assert History(seed).run(EVENTS) >= EVENTS


@pytest.mark.parametrize("seed", range(1_000, 1_004))
def test_large_groups(seed: int) -> None:
    History(seed, clients=25).run(EVENTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_a_million_events(seed: int) -> None:
    History(10_000 + seed, clients=4 + seed % 9).run(12_000)


# -- planted bugs ----------------------------------------------------------------------------------


class ForgetsToPersist(ClassicGroup):
    def _persist(self, actions: list) -> bool:
        actions_before = len(actions)
        done = super()._persist(actions)
        if self.generation % 3 == 0:
            del actions[actions_before:]
        return done


class RespondsBeforeItPersists(ClassicGroup):
    def _assign(self, *arguments) -> None:
        super()._assign(*arguments)
        actions = arguments[-1]
        actions.sort(key=lambda action: isinstance(action, Persist))


class DoesNotFence(ClassicGroup):
    """A replaced static member's id stays valid beside its successor's."""

    def validate_member(self, member_id: str, instance_id: str | None) -> int:
        return (
            classic.NONE
            if instance_id in self.members.static_member_ids
            else super().validate_member(member_id, instance_id)
        )


class KeepsItsGeneration(ClassicGroup):
    def _begin_sync(self, *arguments) -> None:
        if self.rebalance_reason.startswith("the leader"):
            self.generation -= 1
        super()._begin_sync(*arguments)


class NeverExpiresSessions(ClassicGroup):
    def _on_session_timer(self, now_ms: int, actions: list) -> None:
        self._session_armed_ms = None
        for watched in self.members.deadlines.take_expired(now_ms):
            self.members.deadlines.move(watched, now_ms + 10_000)


class WaitsForMembersThatNeverSync(ClassicGroup):
    def _on_sync_timer(self, now_ms: int, actions: list) -> None:
        if self.pending_sync:
            actions.append(Timer(classic.SYNC_TIMER, now_ms + 5_000))


class ForgetsTheSupersededRequest(ClassicGroup):
    def _update_member(self, event, member, protocols, now_ms, actions) -> None:
        super()._update_member(event, member, protocols, now_ms, [])


class SwapsAssignments(ClassicGroup):
    def _assign(self, assignment: dict, now_ms: int, actions: list) -> None:
        names = list(assignment)
        super()._assign({name: assignment[names[position - 1]] for position, name in enumerate(names)}, now_ms, actions)


class LosesTheAssignmentOfAReplacedMember(ClassicGroup):
    def _rename(self, old, event, actions):
        member = super()._rename(old, event, actions)
        member.assignment = b"" if self.generation % 2 else member.assignment
        return member


class MiscountsVotes(ClassicGroup):
    def _update_member(self, event, member, protocols, now_ms, actions) -> None:
        member.protocols = protocols
        super()._update_member(event, member, protocols, now_ms, actions)


class HidesTheRebalanceInHeartbeats(ClassicGroup):
    def _on_heartbeat(self, event, now_ms: int, actions: list) -> None:
        super()._on_heartbeat(event, now_ms, actions)
        reply = actions[-1]
        if reply.response.error_code == classic.REBALANCE_IN_PROGRESS:
            actions[-1] = Reply(reply.request, HeartbeatResponse())


class LeavesTheRemovedWaiting(ClassicGroup):
    def _respond_waiting(self, member, error, actions, member_id) -> None:
        self.members.take_join_request(member)
        member.sync_request = None


class ForgetsTheLeaderInTheLog(ClassicGroup):
    def replay(self, value: bytes | None) -> None:
        super().replay(value)
        if self.leader is not None:
            self.leader = next(iter(self.members.by_id))


class KeepsMembersThatDidNotRejoin(ClassicGroup):
    def _complete_join(self, now_ms: int, actions: list) -> None:
        for member in self.members.by_id.values():
            if member.join_request is None and member.instance_id is None:
                self.members.set_join_request(member, -7)
        super()._complete_join(now_ms, actions)


class LetsPendingMembersStay(ClassicGroup):
    def _on_join(self, event, now_ms: int, actions: list) -> None:
        super()._on_join(event, now_ms, actions)
        for pending in self.members.pending.values():
            self.members.deadlines.drop(pending)


class OverlooksTheMaximum(ClassicGroup):
    def _has_room_for(self, member_id: str) -> bool:
        return True


class DoesNotRearmTheSession(ClassicGroup):
    """A member that waited for an assignment has no session timer afterwards."""

    def _assign(self, assignment: dict, now_ms: int, actions: list) -> None:
        super()._assign(assignment, now_ms, actions)
        for member in self.members.by_id.values():
            if member.session_timeout_ms == 6_000:
                member.deadline_ms = NEVER


class LeavesTheJoinTimerArmed(ClassicGroup):
    def _complete_join(self, now_ms: int, actions: list) -> None:
        super()._complete_join(now_ms, actions)
        actions[:] = [action for action in actions if action != Timer(classic.JOIN_TIMER, None)]


class TellsEveryFollowerItLeads(ClassicGroup):
    def _join_response(self, member, leader=None, skip_assignment=False):
        return super()._join_response(member, leader or member.member_id, skip_assignment)


PLANTED = [
    ForgetsToPersist,
    RespondsBeforeItPersists,
    DoesNotFence,
    KeepsItsGeneration,
    NeverExpiresSessions,
    WaitsForMembersThatNeverSync,
    ForgetsTheSupersededRequest,
    SwapsAssignments,
    LosesTheAssignmentOfAReplacedMember,
    MiscountsVotes,
    HidesTheRebalanceInHeartbeats,
    LeavesTheRemovedWaiting,
    ForgetsTheLeaderInTheLog,
    KeepsMembersThatDidNotRejoin,
    LetsPendingMembersStay,
    OverlooksTheMaximum,
    DoesNotRearmTheSession,
    LeavesTheJoinTimerArmed,
    TellsEveryFollowerItLeads,
]


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_planted_bug_is_found(planted: type[ClassicGroup]) -> None:
    for seed in range(SEEDS_MAX):
        try:
            History(seed, planted).run(EVENTS)
        except (AssertionError, KeyError, ValueError, StopIteration):
            return
    pytest.fail(f"{SEEDS_MAX} histories did not notice {planted.__name__}")
