"""A consumer group of the classic protocol: JoinGroup 0-9, SyncGroup 0-5, Heartbeat 0-4, LeaveGroup
0-5. Sans-I/O.

    Empty                        first join -> PreparingRebalance
    PreparingRebalance           all joined, or time is up -> CompletingRebalance; no member left ->
                                 Empty
    CompletingRebalance          the leader's SyncGroup -> Stable
    CompletingRebalance, Stable  a member joins, leaves, dies, never syncs, or the leader joins
                                 again -> PreparingRebalance

The end of a join phase creates a new generation: the members that joined, one of them the leader,
and one protocol that all of them support. The leader's SyncGroup brings the assignment. It is
persisted (one GroupMetadata record) before any member receives it. A group whose members have all
left is persisted as an empty generation.

Invariants (check(), in addition to those of members.py and classic/records.py)
    G1  Empty: no members, no leader, no protocol. CompletingRebalance and Stable: members, one of
        them the leader, all of them supporting the protocol
    G2  a JoinGroup waits only in PreparingRebalance, a SyncGroup only in CompletingRebalance; a
        change of state answers the requests of the previous one immediately
    G3  the generation never falls, and rises by one with each join phase that ends
    G4  a member without a waiting request has a deadline, and so have a new member's first
        JoinGroup and every pending member: no member stays forever without a heartbeat or request
    G5  the join timer is armed exactly in PreparingRebalance, the sync timer while members of this
        generation have not synced: no phase lasts forever
    G6  only members can be recorded as not synced, and only while the group is CompletingRebalance
        or Stable; it is CompletingRebalance until the leader has synced
    G7  CompletingRebalance and Stable: at most group.max.size members, absent static ones not
        counted
    G8  an assignment is sent to no member before its Persist; each request is answered once
        (tests/property/classic_histories.py checks every history against these)
Bounds: members by group.max.size, pending ones by PENDING_MAX, waiting requests by one per member.
Work: a heartbeat is O(1); a join is O(1), and O(members) once per rebalance.

Where this differs from Kafka: docs/decisions/coordinators/2026-11-21-classic-groups.md. Sources:
KIP-62, 134, 345, 394, 559, 800, 814 and Kafka's own behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mqd.coordinator.actions import Action, Reply, Timer, TimerFired
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.classic.members import NEVER, Member, PendingMember
from mqd.coordinator.group.classic.rebalance import (
    JOIN_TIMER,
    SESSION_TIMER,
    SYNC_TIMER,
    VERSION_SKIP_ASSIGNMENT,
    Rebalancing,
)
from mqd.coordinator.group.classic.state import (
    COMPLETING,
    EMPTY,
    FENCED_INSTANCE_ID,
    ILLEGAL_GENERATION,
    NONE,
    PREPARING,
    REBALANCE_IN_PROGRESS,
    STABLE,
    UNKNOWN_MEMBER_ID,
)
from mqd.coordinator.group.settings import ClassicSettings
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)

VERSION_MEMBER_ID_REQUIRED = 4  # KIP-394

INCONSISTENT_GROUP_PROTOCOL = int(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)


class ClassicGroup(Rebalancing):
    """A group of the classic protocol. `handle` is the only mutator once it is loaded."""

    def __init__(self, group_id: str, settings: ClassicSettings) -> None:
        super().__init__(group_id, settings)
        self._handlers: dict[type, Callable[[Any, int, list[Action]], None]] = {
            Heartbeat: self._on_heartbeat,
            JoinGroup: self._on_join,
            SyncGroup: self._on_sync,
            LeaveGroup: self._on_leave,
            TimerFired: self._on_timer,
        }

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        self._handlers[type(event)](event, now_ms, actions)
        next_ms = self.members.deadlines.next_ms
        if next_ms is not None and (self._session_armed_ms is None or next_ms < self._session_armed_ms):
            self._session_armed_ms = next_ms
            actions.append(Timer(SESSION_TIMER, next_ms))
        return actions

    def _on_heartbeat(self, event: Heartbeat, now_ms: int, actions: list[Action]) -> None:
        message = event.message
        error = self.validate_member(message.member_id, message.group_instance_id)
        if error == NONE and message.generation_id != self.generation:
            error = ILLEGAL_GENERATION
        if error == NONE:
            member = self.members.by_id[message.member_id]
            if not member.is_new:  # a new member's deadline is that of its first JoinGroup
                self._touch(member, now_ms)
            if self.state is PREPARING:
                error = REBALANCE_IN_PROGRESS
        actions.append(Reply(event.request, HeartbeatResponse(error_code=error)))

    def _on_timer(self, event: TimerFired, now_ms: int, actions: list[Action]) -> None:
        if event.name == SESSION_TIMER:
            self._on_session_timer(now_ms, actions)
        elif event.name == JOIN_TIMER:
            self._on_join_timer(now_ms, actions)
        elif event.name == SYNC_TIMER:
            self._on_sync_timer(now_ms, actions)

    def take_over(self, value: bytes, now_ms: int) -> list[Action]:
        """Converts a consumer group into this one (KIP-848): its members keep their assignment
        until they join again, which they do immediately. `value`: the GroupMetadata, persisted by
        the caller.
        """
        self.replay(value)
        actions = self.on_loaded(now_ms)
        if self.state is STABLE:
            self._prepare_rebalance("the group was converted from the consumer protocol", now_ms, actions)
        return actions

    def on_loaded(self, now_ms: int) -> list[Action]:
        """Members get a full session timeout, because they could not reach this coordinator before.
        The members of a group larger than the current limit must join again.
        """
        actions: list[Action] = []
        for member in self.members.by_id.values():
            self._touch(member, now_ms)
            member.seen_ms = -1
        if len(self.members) > self.settings.max_size:
            self._prepare_rebalance(
                f"the group has {len(self.members)} members, group.max.size allows {self.settings.max_size}",
                now_ms,
                actions,
            )
        self._session_armed_ms = self.members.deadlines.next_ms
        if self._session_armed_ms is not None:
            actions.append(Timer(SESSION_TIMER, self._session_armed_ms))
        return actions

    # -- sessions ----------------------------------------------------------------------------------

    def note_activity(self, member: Member, now_ms: int) -> None:
        """The member has sent a request that is not part of this protocol (a commit)."""
        if not member.is_new:
            self._touch(member, now_ms)

    def _on_session_timer(self, now_ms: int, actions: list[Action]) -> None:
        self._session_armed_ms = None
        for timed in self.members.deadlines.take_expired(now_ms):
            if timed.deadline_ms != NEVER:
                continue  # when this loop removed another member, this one got a new deadline
            member_id = timed.member_id
            if self.members.remove_pending(member_id):
                self._maybe_complete_join(now_ms, actions)
            elif (member := self.members.by_id.get(member_id)) is not None and (member.is_new or not member.is_waiting):
                self._remove_member(member, actions)
                self._rebalance_after_loss(
                    f"member {member_id} sent no heartbeat for its session timeout of {member.session_timeout_ms} ms",
                    now_ms,
                    actions,
                )

    # -- joining -----------------------------------------------------------------------------------

    def _on_join(self, event: JoinGroup, now_ms: int, actions: list[Action]) -> None:
        message = event.message
        member_id = message.member_id
        instance_id = message.group_instance_id
        if not self._has_room_for(
            member_id or (self.members.static_member_ids.get(instance_id, "") if instance_id is not None else "")
        ):
            self._drop_refused(member_id, now_ms, actions)
            return self._refuse_join(event, "", int(ErrorCode.GROUP_MAX_SIZE_REACHED), actions)
        protocols: dict[str, bytes] = {}
        for protocol in message.protocols:
            protocols.setdefault(protocol.name, protocol.metadata)
        if not member_id and not self._supports(message.protocol_type, protocols):
            return self._refuse_join(event, "", INCONSISTENT_GROUP_PROTOCOL, actions)
        if not member_id:
            return self._join_new(event, protocols, now_ms, actions)
        if not self._supports(message.protocol_type, protocols):
            return self._refuse_join(event, member_id, INCONSISTENT_GROUP_PROTOCOL, actions)
        if message.group_instance_id is None and member_id in self.members.pending:
            self.members.remove_pending(member_id)
            return self._add_member(event, member_id, protocols, now_ms, actions)
        error = self.validate_member(member_id, message.group_instance_id)
        if error != NONE:
            return self._refuse_join(event, member_id, error, actions)
        self._rejoin(event, self.members.by_id[member_id], protocols, now_ms, actions)

    def _refuse_join(self, event: JoinGroup, member_id: str, error: int, actions: list[Action]) -> None:
        actions.append(
            Reply(event.request, JoinGroupResponse(error_code=error, member_id=member_id, protocol_name=None))
        )

    def _has_room_for(self, member_id: str) -> bool:
        """Whether the group can admit this member. In a join phase only the members that have
        joined count, so that a group above the limit loses the members that join last.
        """
        member = self.members.by_id.get(member_id)
        if self.state is EMPTY:
            return True
        if self.state is PREPARING:
            return (
                member is not None and member.join_request is not None
            ) or self.members.joined_count < self.settings.max_size
        return member is not None or len(self.members) < self.settings.max_size

    def _drop_refused(self, member_id: str, now_ms: int, actions: list[Action]) -> None:
        """Removes a member that was refused because the group is full."""
        self.members.remove_pending(member_id)
        member = self.members.by_id.get(member_id)
        if member is not None:
            self._remove_member(member, actions)
        self._maybe_complete_join(now_ms, actions)

    def _supports(self, protocol_type: str, protocols: dict[str, bytes]) -> bool:
        if self.state is EMPTY:
            return bool(protocol_type) and bool(protocols)
        if not self.members.by_id:  # all have left during the initial rebalance delay
            return bool(protocol_type) and bool(protocols)
        return protocol_type == self.protocol_type and self.members.supports_any(protocols)

    def _join_new(self, event: JoinGroup, protocols: dict[str, bytes], now_ms: int, actions: list[Action]) -> None:
        message = event.message
        if message.group_instance_id is not None:
            old_id = self.members.static_member_ids.get(message.group_instance_id)
            if old_id is not None:
                return self._replace_static(event, self.members.by_id[old_id], protocols, now_ms, actions)
        elif event.version >= VERSION_MEMBER_ID_REQUIRED:
            pending = PendingMember(event.new_member_id, event.client_id, event.client_host, now_ms)
            self.members.add_pending(
                pending, now_ms + min(message.session_timeout_ms, self.settings.pending_timeout_ms)
            )
            return self._refuse_join(event, event.new_member_id, int(ErrorCode.MEMBER_ID_REQUIRED), actions)
        self._add_member(event, event.new_member_id, protocols, now_ms, actions)

    def _add_member(
        self, event: JoinGroup, member_id: str, protocols: dict[str, bytes], now_ms: int, actions: list[Action]
    ) -> None:
        message = event.message
        if not self.members.by_id:
            self.protocol_type = message.protocol_type
        rebalance_timeout_ms = _rebalance_timeout_ms(message)
        member = Member(
            member_id,
            message.group_instance_id,
            event.client_id,
            event.client_host,
            rebalance_timeout_ms,
            message.session_timeout_ms,
            protocols,
            is_new=True,
        )
        member.join_request, member.seen_ms = event.request, now_ms
        self.members.add(member)
        if self.leader is None:
            self.leader = member_id
        self.members.deadlines.move(member, now_ms + self.settings.new_member_join_timeout_ms)
        if self._initial_join_end_ms != NEVER:
            self._initial_join_end_ms = min(
                now_ms + self.settings.initial_rebalance_delay_ms, self._initial_join_end_max_ms
            )
        self._rebalance_or_complete(f"member {member_id} joined{_reason_text(message.reason)}", now_ms, actions)

    def _rejoin(
        self, event: JoinGroup, member: Member, protocols: dict[str, bytes], now_ms: int, actions: list[Action]
    ) -> None:
        """Handles the JoinGroup of a member. If its metadata is unchanged and no rebalance is
        needed, it receives the current generation: it may have missed the first response.
        """
        is_unchanged = self.state is not PREPARING and member.matches(protocols)
        is_leader = member.member_id == self.leader
        if is_unchanged and (self.state is COMPLETING or not is_leader):
            member.seen_ms = now_ms
            actions.append(Reply(event.request, self._join_response(member)))
            return
        reason_text = _reason_text(event.message.reason)
        reason = (
            f"member {member.member_id} joined again{reason_text}"
            if not is_unchanged
            else f"the leader {member.member_id} requested a rebalance{reason_text}"
        )
        self._update_member(event, member, protocols, now_ms, actions)
        self._rebalance_or_complete(reason, now_ms, actions)

    def _update_member(
        self, event: JoinGroup, member: Member, protocols: dict[str, bytes], now_ms: int, actions: list[Action]
    ) -> None:
        message = event.message
        self.members.set_protocols(member, protocols)
        member.rebalance_timeout_ms, member.session_timeout_ms = (
            _rebalance_timeout_ms(message),
            message.session_timeout_ms,
        )
        member.seen_ms = now_ms
        superseded = self.members.set_join_request(member, event.request)
        if superseded is not None:
            actions.append(
                Reply(
                    superseded,
                    JoinGroupResponse(error_code=REBALANCE_IN_PROGRESS, member_id=member.member_id, protocol_name=None),
                )
            )

    # -- static members (KIP-345) ------------------------------------------------------------------

    def _replace_static(
        self, event: JoinGroup, old: Member, protocols: dict[str, bytes], now_ms: int, actions: list[Action]
    ) -> None:
        """A static member came back without its member id. It gets a new id, and the old one is
        fenced. In a stable group the other members do not notice.
        """
        leader_before = self.leader
        has_same_protocols = old.matches(protocols)
        member = self._rename(old, event, actions)
        self._update_member(event, member, protocols, now_ms, actions)
        self._touch(member, now_ms)
        if self.state is STABLE and (has_same_protocols or self.members.elect_protocol() == self.protocol):
            if not self._persist(actions):
                self._prepare_rebalance(
                    f"static member {member.instance_id} came back with more metadata than fits into a record",
                    now_ms,
                    actions,
                )
                return
            request = self.members.take_join_request(member)
            assert request is not None
            is_leader = self.leader == member.member_id
            if event.version >= VERSION_SKIP_ASSIGNMENT:
                response = self._join_response(member, skip_assignment=is_leader)
            else:
                # the old id, so that the member does not act as the leader
                response = self._join_response(member, leader=leader_before)
            actions.append(Reply(request, response))
            return
        reason_text = _reason_text(event.message.reason)
        self._rebalance_or_complete(
            f"static member {member.instance_id} came back as {member.member_id}{reason_text}", now_ms, actions
        )

    def _rename(self, old: Member, event: JoinGroup, actions: list[Action]) -> Member:
        self._respond_waiting(old, FENCED_INSTANCE_ID, actions, old.member_id)
        was_leader = self.leader == old.member_id
        has_synced = old.member_id not in self.pending_sync
        self.members.remove(old.member_id)
        member = Member(
            event.new_member_id,
            old.instance_id,
            event.client_id,
            event.client_host,
            old.rebalance_timeout_ms,
            old.session_timeout_ms,
            old.protocols,
            old.assignment,
        )
        self.members.add(member)
        if was_leader:
            self.leader = member.member_id
        if not has_synced:
            self.pending_sync.remove(old.member_id)
            self.pending_sync.add(member.member_id)
        return member

    def _on_join_timer(self, now_ms: int, actions: list[Action]) -> None:
        if self.state is not PREPARING:
            return
        if self._initial_join_end_ms > now_ms:
            actions.append(Timer(JOIN_TIMER, self._initial_join_end_ms))
        else:
            self._complete_join(now_ms, actions)

    # -- syncing -----------------------------------------------------------------------------------

    def _on_sync(self, event: SyncGroup, now_ms: int, actions: list[Action]) -> None:
        message = event.message
        error = self._validate_sync(message)
        if error == NONE and self.state is PREPARING:
            error = REBALANCE_IN_PROGRESS
        if error != NONE:
            actions.append(Reply(event.request, SyncGroupResponse(error_code=error)))
            return
        member = self.members.by_id[message.member_id]
        member.seen_ms = now_ms
        self._complete_sync(member.member_id, actions)
        if self.state is STABLE:
            actions.append(Reply(event.request, self._sync_response(member)))
            return
        # the same member retries: the connection of its first request was lost
        if member.sync_request is not None:
            self._respond_sync(member, REBALANCE_IN_PROGRESS, actions)
        member.sync_request = event.request
        if member.member_id == self.leader:
            self._assign({item.member_id: item.assignment for item in message.assignments}, now_ms, actions)

    def _validate_sync(self, message: SyncGroupRequest) -> int:
        error = self.validate_member(message.member_id, message.group_instance_id)
        if error != NONE:
            return error
        if message.generation_id != self.generation:
            return ILLEGAL_GENERATION
        for claimed, actual in ((message.protocol_type, self.protocol_type), (message.protocol_name, self.protocol)):
            if claimed is not None and actual is not None and claimed != actual:
                return INCONSISTENT_GROUP_PROTOCOL
        return NONE

    def _assign(self, assignment: dict[str, bytes], now_ms: int, actions: list[Action]) -> None:
        """Handles the leader's assignment: it is written first (the runtime holds the responses
        back), then sent. A member that the leader left out gets an empty one.
        """
        for member in self.members.by_id.values():
            self.members.set_assignment(member, assignment.get(member.member_id, b""))
        completing_since_ms, self.state_since_ms = self.state_since_ms, now_ms
        if not self._persist(actions):
            self.state_since_ms = completing_since_ms
            self._refuse_assignment(now_ms, actions)
            return
        self._enter(STABLE, now_ms)
        for member in self.members.by_id.values():
            if member.sync_request is not None:
                self._respond_sync(member, NONE, actions)
                self.members.deadlines.move(member, now_ms + member.session_timeout_ms)

    def _refuse_assignment(self, now_ms: int, actions: list[Action]) -> None:
        """Waiting members get the error that Kafka returns when its log refuses a record for its
        size: a retry cannot succeed.
        """
        for member in self.members.by_id.values():
            if member.sync_request is not None:
                self._respond_sync(member, int(ErrorCode.UNKNOWN_SERVER_ERROR), actions)
                self.members.deadlines.move(member, now_ms + member.session_timeout_ms)
        self._prepare_rebalance(
            f"the generation of {len(self.members)} members does not fit into a record of"
            f" {self.settings.record_bytes_max} bytes",
            now_ms,
            actions,
        )

    def _on_sync_timer(self, now_ms: int, actions: list[Action]) -> None:
        """Removes members that have joined but never synced: while they are members, their
        partitions are not consumed.
        """
        if not self.pending_sync:
            return
        unsynced = [self.members.by_id[member_id] for member_id in self.pending_sync]
        for member in unsynced:
            self._remove_member(member, actions)
        self._prepare_rebalance(
            f"{len(unsynced)} members joined but did not sync in time, {unsynced[0].member_id} for one", now_ms, actions
        )

    # -- leaving -----------------------------------------------------------------------------------

    def _on_leave(self, event: LeaveGroup, now_ms: int, actions: list[Action]) -> None:
        departed: list[str] = []
        responses = [self._leave_one(identity, departed, actions) for identity in event.message.members]
        if departed:
            self._rebalance_after_loss(
                f"{', '.join(departed[:3])}{' and others' if len(departed) > 3 else ''} left", now_ms, actions
            )
        else:
            # the group may have waited only for the pending member that left
            self._maybe_complete_join(now_ms, actions)
        actions.append(Reply(event.request, LeaveGroupResponse(members=responses)))

    def _leave_one(
        self, identity: LeaveGroupRequest.MemberIdentity, departed: list[str], actions: list[Action]
    ) -> LeaveGroupResponse.MemberResponse:
        """A request with an instance id but no member id comes from an administrator that removes
        this member.
        """
        member_id, instance_id = identity.member_id, identity.group_instance_id
        error = NONE
        if not member_id:
            member_id = self.members.static_member_ids.get(instance_id, "") if instance_id is not None else ""
            error = NONE if member_id else UNKNOWN_MEMBER_ID
        elif self.members.remove_pending(member_id):
            return LeaveGroupResponse.MemberResponse(member_id=identity.member_id, group_instance_id=instance_id)
        else:
            error = self.validate_member(member_id, instance_id)
        if error == NONE:
            self._remove_member(self.members.by_id[member_id], actions)
            departed.append(member_id + _reason_text(identity.reason))
        return LeaveGroupResponse.MemberResponse(
            member_id=identity.member_id, group_instance_id=instance_id, error_code=error
        )


def _rebalance_timeout_ms(message: JoinGroupRequest) -> int:
    """Version 0 has no rebalance timeout: the session timeout applies."""
    return message.rebalance_timeout_ms if message.rebalance_timeout_ms >= 0 else message.session_timeout_ms


def _reason_text(reason: str | None) -> str:
    """The reason that the client gave (KIP-800), shortened."""
    return f" ({reason[:120]})" if reason else ""
