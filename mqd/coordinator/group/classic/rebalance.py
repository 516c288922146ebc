"""The transition of a classic group from one generation to the next: the join phase, its end, and
the responses to waiting members. The invariants are those of core.py.
"""

from __future__ import annotations

from mqd.coordinator.actions import Action, Reply, Timer
from mqd.coordinator.group.classic.members import NEVER, Member
from mqd.coordinator.group.classic.state import (
    COMPLETING,
    EMPTY,
    NONE,
    PREPARING,
    REBALANCE_IN_PROGRESS,
    STABLE,
    UNKNOWN_MEMBER_ID,
    ClassicState,
    State,
)
from mqd.protocol.messages import JoinGroupResponse, SyncGroupResponse

JOIN_TIMER, SYNC_TIMER, SESSION_TIMER = TIMERS = ("classic.join", "classic.sync", "classic.session")
# A join phase that no member has joined is checked again after at least this time, even if its
# absent members requested a shorter timeout.
JOIN_RECHECK_MS_MIN = 1_000
VERSION_SKIP_ASSIGNMENT = 9  # KIP-814


class Rebalancing(ClassicState):
    """The steps of a rebalance. ClassicGroup decides which events trigger them."""

    def _touch(self, member: Member, now_ms: int) -> None:
        member.seen_ms = now_ms
        self.members.deadlines.move(member, now_ms + member.session_timeout_ms)

    def _join_response(
        self, member: Member, leader: str | None = None, skip_assignment: bool = False
    ) -> JoinGroupResponse:
        reported_leader = leader if leader is not None else self.leader
        assert reported_leader is not None  # G1: the group is CompletingRebalance or Stable
        return JoinGroupResponse(
            generation_id=self.generation,
            protocol_type=self.protocol_type,
            protocol_name=self.protocol,
            leader=reported_leader,
            member_id=member.member_id,
            skip_assignment=skip_assignment,
            members=self._joined_members() if reported_leader == member.member_id else [],
        )

    def _joined_members(self) -> list[JoinGroupResponse.Member]:
        """The members to which the leader assigns partitions."""
        make_member, protocol = JoinGroupResponse.Member, self.protocol
        assert protocol is not None  # a group with a leader has a protocol
        return [
            make_member(
                member_id=member.member_id, group_instance_id=member.instance_id, metadata=member.protocols[protocol]
            )
            for member in self.members.by_id.values()
        ]

    # -- rebalancing -------------------------------------------------------------------------------

    def _enter(self, state: State, now_ms: int) -> None:
        self.state, self.state_since_ms = state, now_ms
        if state is STABLE or state is EMPTY:
            self.rebalance_since_ms = -1
        elif self.rebalance_since_ms < 0:
            self.rebalance_since_ms = now_ms

    def _rebalance_or_complete(self, reason: str, now_ms: int, actions: list[Action]) -> None:
        if self.state is PREPARING:
            self._maybe_complete_join(now_ms, actions)
        else:
            self._prepare_rebalance(reason, now_ms, actions)

    def _rebalance_after_loss(self, reason: str, now_ms: int, actions: list[Action]) -> None:
        """Called when a member has left or died. A group's initial rebalance still waits out its
        delay, and may end with fewer members or none.
        """
        if self.state is PREPARING:
            self._maybe_complete_join(now_ms, actions)
        elif self.state is not EMPTY:
            self._prepare_rebalance(reason, now_ms, actions)

    def _prepare_rebalance(self, reason: str, now_ms: int, actions: list[Action]) -> None:
        """Begins a join phase; members that wait for an assignment must join again. The phase lasts
        until all have joined, but not longer than the longest rebalance timeout. The first join
        phase after Empty waits for more members: it ends group.initial.rebalance.delay.ms after the
        last new member has joined.
        """
        if self.state is COMPLETING:
            for member in self.members.by_id.values():
                self.members.set_assignment(member, b"")
                if member.sync_request is not None:
                    self._respond_sync(member, REBALANCE_IN_PROGRESS, actions)
                    self.members.deadlines.move(member, now_ms + member.session_timeout_ms)
        if self.pending_sync:
            self.pending_sync.clear()
            actions.append(Timer(SYNC_TIMER, None))
        is_first = self.state is EMPTY
        self.rebalance_reason = reason
        self._enter(PREPARING, now_ms)
        timeout_ms = self.members.rebalance_timeout_ms
        if is_first:
            self._initial_join_end_max_ms = now_ms + max(timeout_ms, self.settings.initial_rebalance_delay_ms)
            self._initial_join_end_ms = now_ms + self.settings.initial_rebalance_delay_ms
            actions.append(Timer(JOIN_TIMER, self._initial_join_end_ms))
        elif self.members.all_joined:
            self._complete_join(now_ms, actions)
        else:
            actions.append(Timer(JOIN_TIMER, now_ms + timeout_ms))

    def _maybe_complete_join(self, now_ms: int, actions: list[Action]) -> None:
        if self.state is PREPARING and self._initial_join_end_ms == NEVER and self.members.all_joined:
            self._complete_join(now_ms, actions)

    def _complete_join(self, now_ms: int, actions: list[Action]) -> None:
        """Starts the next generation. Dynamic members that have not joined are removed. Static
        members stay and keep their assignment until their sessions end. If only absent static
        members are left, there is no new generation yet: each of them will either come back and
        join, or be removed when its session ends.
        """
        for member in [
            member
            for member in self.members.by_id.values()
            if member.join_request is None and member.instance_id is None
        ]:
            self._remove_member(member, actions)
        self._initial_join_end_ms = self._initial_join_end_max_ms = NEVER
        if self.members.by_id and not self._elect_leader():
            actions.append(Timer(JOIN_TIMER, now_ms + max(self.members.rebalance_timeout_ms, JOIN_RECHECK_MS_MIN)))
            return
        actions.append(Timer(JOIN_TIMER, None))
        self.generation += 1
        if self.members.by_id:
            self._begin_sync(now_ms, actions)
        else:
            self.leader = self.protocol = None
            self._enter(EMPTY, now_ms)
            self._persist(actions)

    def _elect_leader(self) -> bool:
        """Keeps the leader if it has joined, otherwise chooses the first member that has. Returns
        False if no member has joined.
        """
        if self.leader is not None and self.members.by_id[self.leader].join_request is not None:
            return True
        new_leader = next((member for member in self.members.by_id.values() if member.join_request is not None), None)
        if new_leader is not None:
            self.leader = new_leader.member_id
        return new_leader is not None

    def _begin_sync(self, now_ms: int, actions: list[Action]) -> None:
        self.protocol = self.members.elect_protocol()
        self._enter(COMPLETING, now_ms)
        self.pending_sync = set(self.members.by_id)
        for member in self.members.by_id.values():
            request = self.members.take_join_request(member)
            member.is_new = False
            if request is not None:
                actions.append(Reply(request, self._join_response(member)))
            self.members.deadlines.move(member, now_ms + member.session_timeout_ms)
        actions.append(Timer(SYNC_TIMER, now_ms + self.members.rebalance_timeout_ms))

    def _complete_sync(self, member_id: str, actions: list[Action]) -> None:
        if member_id in self.pending_sync:
            self.pending_sync.remove(member_id)
            if not self.pending_sync:
                actions.append(Timer(SYNC_TIMER, None))

    def _sync_response(self, member: Member) -> SyncGroupResponse:
        return SyncGroupResponse(
            protocol_type=self.protocol_type, protocol_name=self.protocol, assignment=member.assignment
        )

    def _respond_sync(self, member: Member, error: int, actions: list[Action]) -> None:
        request, member.sync_request = member.sync_request, None
        assert request is not None
        actions.append(
            Reply(request, SyncGroupResponse(error_code=error) if error != NONE else self._sync_response(member))
        )

    def _remove_member(self, member: Member, actions: list[Action]) -> None:
        """Removes a member and answers its waiting requests with UNKNOWN_MEMBER_ID: if it is alive
        it joins again. The caller triggers the rebalance.
        """
        self._respond_waiting(member, UNKNOWN_MEMBER_ID, actions, "")
        self.members.remove(member.member_id)
        if member.member_id in self.pending_sync:
            self._complete_sync(member.member_id, actions)
        if self.leader == member.member_id:
            self.leader = next(iter(self.members.by_id), None)

    def _respond_waiting(self, member: Member, error: int, actions: list[Action], member_id: str) -> None:
        request = self.members.take_join_request(member)
        if request is not None:
            actions.append(Reply(request, JoinGroupResponse(error_code=error, member_id=member_id, protocol_name=None)))
        if member.sync_request is not None:
            self._respond_sync(member, error, actions)
