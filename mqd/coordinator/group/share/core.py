"""A share group (KIP-932): ShareGroupHeartbeat 1, ShareGroupDescribe 1, and administrators' changes
to its offsets. Sans-I/O.

Epochs work as in a consumer group (consumer/core.py), but members share partitions: none waits for
another, and a member moves to the target with its next heartbeat. Only share-partitions whose state
is initialized are assigned. A heartbeat that finds uninitialized ones starts their initialization:
they are recorded as initializing, a request goes to the share coordinator (an Effect), and its
response makes them assignable, in a new epoch. States are deleted in the same two steps.

Invariants (check())
    G1  member epoch <= target epoch <= group epoch
    G2  only members have a target; it contains only share-partitions that are initialized, or whose
        topic has been deleted since
    G3  with a target of the group's epoch and no newly assignable partitions, every initialized
        partition of a subscribed topic has a member
    G4  a share-partition is initializing or initialized, not both; the name of each topic is kept
    G5  each member has a session deadline
    G6  a reply depends only on records persisted before it; each request has one reply. A change of
        offsets is answered only after the share coordinator has responded
    G7  while states are being deleted, no initialization is in progress
    G8  `described_bytes` and `assigned_count` are sums over all members
Bounds: at most group.share.max.size members. A heartbeat that changes nothing is O(1) and persists
nothing.

Source: Kafka's own behaviour. Differences: docs/decisions/coordinators/2026-11-26-share-groups.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from mqd.coordinator.actions import Action, Effect, Reply, TimerFired, as_persists
from mqd.coordinator.group.classic.members import NEVER, Timed
from mqd.coordinator.group.consumer.assignors import MemberSpec
from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.consumer.members import NOTHING
from mqd.coordinator.group.consumer.records import Partitions
from mqd.coordinator.group.consumer.requests import Refused
from mqd.coordinator.group.consumer.subscriptions import ResolvedSubscription, SubscriptionKey
from mqd.coordinator.group.modern import ModernGroup
from mqd.coordinator.group.sets import difference, intersection, union
from mqd.coordinator.group.share import assignor, offsets, records
from mqd.coordinator.group.share.events import (
    AlterOffsets,
    DeleteOffsets,
    InitializeStates,
    ShareDescribe,
    ShareHeartbeat,
    StatesChanged,
)
from mqd.coordinator.group.share.records import CurrentAssignment, Description, States
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ShareGroupDescribeResponse, ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse

DEADLINE_TIMER = "share.deadline"
PROTOCOL = "share"
SHORT_INTERVAL_MS = 1_000  # heartbeat interval while something is being initialized
# Memory of a member and of an assigned partition, without the client's strings: measured, rounded
# up.
MEMBER_BYTES, PARTITION_BYTES = 1_200, 120

_TopicPartitions, _Assignment = (ShareGroupHeartbeatResponse.TopicPartitions, ShareGroupHeartbeatResponse.Assignment)
_Described = ShareGroupDescribeResponse


class Member(Timed):
    """`deadline_ms` (of Timed): the end of its session. `resolved`: its entry among the group's
    subscriptions.
    """

    __slots__ = ("assigned", "description", "epoch", "previous_epoch", "resolved")

    def __init__(self, member_id: str, description: Description) -> None:
        super().__init__(member_id)
        self.description = description
        self.resolved: ResolvedSubscription | None = None
        self.epoch = self.previous_epoch = 0
        self.assigned: Partitions = NOTHING

    @property
    def subscription_key(self) -> SubscriptionKey:
        return self.description.topic_names, None, None

    @property
    def topic_ids(self) -> frozenset[bytes]:
        assert self.resolved is not None
        return self.resolved.topic_ids


def size_bytes_of(member_id: str, description: Description) -> int:
    texts = (member_id, description.rack_id or "", description.client_id, description.client_host)
    return MEMBER_BYTES + sum(map(len, texts)) + sum(50 + len(name) for name in description.topic_names)


def _count(partitions: Partitions) -> int:
    return sum(map(len, partitions.values()))


class ShareGroup(ModernGroup):
    """One group. `handle` is the only mutator once it is loaded."""

    records: ClassVar[Any] = records
    deadline_timer: ClassVar[str] = DEADLINE_TIMER

    def __init__(self, group_id: str, cluster: Cluster) -> None:
        super().__init__(group_id, cluster)
        self.members: dict[str, Member] = {}
        self.target: dict[str, Partitions] = {}
        self.states = States()
        self.assigned_count = 0
        self.is_deleted = False  # by DeleteGroups: its last records are tombstones
        self.effects: list[Effect] = []
        self.admin = offsets.OffsetsAdmin(self)
        self._initializing: dict[int, Partitions] = {}  # token of a request without a response -> its partitions
        self._retry_at_ms = 0  # when the partitions that are still initializing are requested again
        # in this group epoch every partition is initialized, or its initialization was requested
        self._checked_epoch = -1
        self._token = 0
        self._handlers: dict[type, Callable[[Any, int, list[Action]], None]] = {
            ShareHeartbeat: self._on_heartbeat,
            ShareDescribe: self._on_describe,
            StatesChanged: self._on_states_changed,
            AlterOffsets: self.admin.on_alter,
            DeleteOffsets: self.admin.on_delete,
            TimerFired: self._on_timer,
        }

    # -- queries ----------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return self.described_bytes + PARTITION_BYTES * self.assigned_count

    @property
    def is_initializing(self) -> bool:
        return bool(self._initializing)

    @property
    def state_name(self) -> str:
        return "Stable" if self.members else "Empty"

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        replies: list[Action] = []
        self._handlers[type(event)](event, now_ms, replies)
        return self._actions(replies)

    def delete_group(self, request: int) -> list[Action]:
        """DeleteGroups: the reply is an error code."""
        replies: list[Action] = []
        self.admin.on_delete_group(request, replies)
        return self._actions(replies)

    def forget_topics(self, names: frozenset[str]) -> list[Action]:
        """Removes topics that were deleted; the share coordinator drops their states itself."""
        gone = {
            topic_id
            for topic_id, name in self.states.names.items()
            if name in names and self.cluster.topic_name(topic_id) is None
        }
        if gone:
            self.set_states(
                _without(self.states.initializing, gone),
                _without(self.states.initialized, gone),
                self.states.deleting.difference(gone),
            )
        return self._actions([])

    def _actions(self, replies: list[Action]) -> list[Action]:
        actions: list[Action] = []
        if self.pending:
            actions = as_persists(self.pending)
            self.pending = []
            self.is_persisted = not self.is_deleted
        if self.effects:
            actions += self.effects
            self.effects = []
        actions += replies
        return self.arm(actions)

    def _on_heartbeat(self, event: ShareHeartbeat, now_ms: int, replies: list[Action]) -> None:
        try:
            response = self._leave(event) if event.message.member_epoch < 0 else self._heartbeat(event, now_ms)
        except Refused as refused:
            response = ShareGroupHeartbeatResponse(error_code=refused.error, error_message=refused.message)
        replies.append(Reply(event.request, response))

    def _heartbeat(self, event: ShareHeartbeat, now_ms: int) -> ShareGroupHeartbeatResponse:
        message = event.message
        member = self._find(message)
        member, bump = self._enroll(member, event)
        self.refresh(bump)
        self._maybe_assign()
        old_assigned = member.assigned
        self._reconcile(member)
        settings = self.cluster.share_settings(self.group_id)
        self.deadlines.move(member, now_ms + settings.session_timeout_ms)
        self._maybe_initialize(now_ms)
        sends_assignment = (
            message.member_epoch == 0 or message.subscribed_topic_names is not None or old_assigned != member.assigned
        )
        interval_ms = settings.heartbeat_interval_ms
        return ShareGroupHeartbeatResponse(
            member_id=member.member_id,
            member_epoch=member.epoch,
            heartbeat_interval_ms=min(interval_ms, SHORT_INTERVAL_MS) if self._initializing else interval_ms,
            assignment=_assignment(member.assigned) if sends_assignment else None,
        )

    # -- members -----------------------------------------------------------------------------------

    def _find(self, message: ShareGroupHeartbeatRequest) -> Member | None:
        """The sender, if it is a member with a valid epoch. None: it must be created. Raises
        Refused, in which case nothing has changed.
        """
        member = self.members.get(message.member_id)
        if member is None:
            max_size = self.cluster.share_settings(self.group_id).max_size
            if len(self.members) >= max_size:
                raise Refused(
                    ErrorCode.GROUP_MAX_SIZE_REACHED,
                    f"The share group has reached its maximum capacity of {max_size} members.",
                )
            if message.member_epoch:
                raise self._unknown(message.member_id)
            return None
        epoch = message.member_epoch
        if epoch not in (0, member.epoch, member.previous_epoch) or epoch > member.epoch:
            comparison = "greater" if epoch > member.epoch else "smaller"
            previous = (
                ""
                if epoch > member.epoch
                else f", and it does not match the previous member epoch ({member.previous_epoch})"
            )
            raise Refused(
                ErrorCode.FENCED_MEMBER_EPOCH,
                f"The share group member has a {comparison} member epoch ({epoch}) than the one known by the group"
                f" coordinator ({member.epoch}){previous}. The member must abandon all its partitions and rejoin.",
            )
        return member

    def _unknown(self, member_id: str) -> Refused:
        return Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"Member {member_id} is not a member of group {self.group_id}.")

    def _enroll(self, member: Member | None, event: ShareHeartbeat) -> tuple[Member, bool]:
        """Creates or updates the member. Also returns whether the assignment depends on the
        change.
        """
        message = event.message
        old = member.description if member is not None else Description(None, "", "", ())
        names = message.subscribed_topic_names
        new = Description(
            message.rack_id if message.rack_id is not None else old.rack_id,
            event.client_id,
            event.client_host,
            tuple(sorted(set(names))) if names is not None else old.topic_names,
        )
        if member is not None and new == old:
            return member, False
        if member is None:
            member = self.members[message.member_id] = Member(message.member_id, new)
        else:
            self._forget_description(member)
        member.description = new
        self._count_description(member)
        self.pending.append(records.member_record(self.group_id, member.member_id, new))
        return member, new.topic_names != old.topic_names

    def _count_description(self, member: Member) -> None:
        member.resolved = self.subscriptions.add(member.subscription_key)
        self.described_bytes += size_bytes_of(member.member_id, member.description)

    def _forget_description(self, member: Member) -> None:
        self.subscriptions.remove(member.subscription_key)
        self.described_bytes -= size_bytes_of(member.member_id, member.description)

    def _leave(self, event: ShareHeartbeat) -> ShareGroupHeartbeatResponse:
        message = event.message
        member = self.members.get(message.member_id)
        if member is None:
            raise self._unknown(message.member_id)
        self._fence([member])
        return ShareGroupHeartbeatResponse(member_id=message.member_id, member_epoch=message.member_epoch)

    def _fence(self, members: list[Member]) -> None:
        """Removes these members; the next heartbeat of another member computes the target."""
        for member in members:
            del self.members[member.member_id]
            self._forget_description(member)
            self.assigned_count -= _count(member.assigned)
            self.target.pop(member.member_id, None)
            self.deadlines.drop(member)
            self.pending += records.member_tombstones(self.group_id, member.member_id)
        self.deadlines.tidy(len(self.members))
        self.refresh(bump=True)

    def _on_timer(self, event: TimerFired, now_ms: int, replies: list[Action]) -> None:
        self._armed_ms = None
        expired = [timed for timed in self.deadlines.take_expired(now_ms) if isinstance(timed, Member)]
        if expired:
            self._fence(expired)

    # -- epochs ------------------------------------------------------------------------------------

    def _maybe_assign(self) -> None:
        """Computes a target for the group's epoch."""
        if self.epoch == self.assignment_epoch:
            return
        specs = {
            member_id: MemberSpec(member.topic_ids, self.target.get(member_id, NOTHING))
            for member_id, member in self.members.items()
        }
        new_target = assignor.simple(specs, self._assignable())
        for member_id, partitions in new_target.items():
            if partitions != self.target.get(member_id):
                self.pending.append(records.target_record(self.group_id, member_id, partitions))
        self.target = new_target
        self.assignment_epoch = self.epoch
        self.pending.append(records.target_epoch_record(self.group_id, self.epoch))

    def _assignable(self) -> Partitions:
        """The initialized partitions of the subscribed topics."""
        initialized = self.states.initialized
        return {
            topic_id: initialized[topic_id]
            for topic_id in self.subscriptions.partition_counts
            if topic_id in initialized
        }

    def _reconcile(self, member: Member) -> None:
        if member.epoch == self.assignment_epoch:
            return
        target = self.target.get(member.member_id, NOTHING)
        self.set_current(member, CurrentAssignment(self.assignment_epoch, member.epoch, target))
        current = CurrentAssignment(member.epoch, member.previous_epoch, target)
        self.pending.append(records.current_record(self.group_id, member.member_id, current))

    def set_current(self, member: Member, current: CurrentAssignment) -> None:
        self.assigned_count += _count(current.assigned) - _count(member.assigned)
        member.epoch, member.previous_epoch, member.assigned = current.epoch, current.previous_epoch, current.assigned

    # -- states ------------------------------------------------------------------------------------

    def _maybe_initialize(self, now_ms: int) -> None:
        """Requests the initialization of partitions that members may get; requests it again if a
        response is overdue.
        """
        is_overdue = bool(self.states.initializing) and now_ms >= self._retry_at_ms
        if (self._checked_epoch == self.epoch and not is_overdue) or self.admin.is_deleting:
            return
        self._checked_epoch = self.epoch
        initializing = NOTHING if is_overdue else self.states.initializing
        wanted = {
            topic_id: tuple(range(count)) for topic_id, count in self.subscriptions.partition_counts.items() if count
        }
        missing = difference(difference(wanted, self.states.initialized), initializing)
        if not missing:
            return
        self._retry_at_ms = now_ms + self.cluster.share_settings(self.group_id).initialize_retry_ms
        if is_overdue:
            self._initializing.clear()
        self.set_states(
            union(self.states.initializing, missing), self.states.initialized, self.states.deleting.difference(missing)
        )
        self.initialize({topic_id: dict.fromkeys(indexes, -1) for topic_id, indexes in missing.items()})

    def initialize(self, start_offsets: dict[bytes, dict[int, int]]) -> int:
        """Requests the initialization from the share coordinator. Returns the request's token."""
        token = self.next_token()
        self._initializing[token] = {topic_id: tuple(sorted(starts)) for topic_id, starts in start_offsets.items()}
        self.effects.append(InitializeStates(token, self.epoch, start_offsets))
        return token

    def next_token(self) -> int:
        self._token += 1
        return self._token

    def _on_states_changed(self, event: StatesChanged, now_ms: int, replies: list[Action]) -> None:
        if self.admin.on_states_deleted(event, replies):
            self._checked_epoch = -1
            return
        self.admin.on_initialized(event, replies)
        requested = self._initializing.pop(event.token, None)
        if requested is None:
            return  # the request was sent before the group was loaded, or has been superseded by a retry
        requested = intersection(requested, self.states.initializing)
        if not requested:
            return
        newly_initialized = {
            topic_id: kept
            for topic_id, indexes in requested.items()
            if (kept := tuple(index for index in indexes if (topic_id, index) not in event.errors))
        }
        self.set_states(
            difference(self.states.initializing, requested),
            union(self.states.initialized, newly_initialized),
            self.states.deleting,
        )
        self.needs_new_epoch = self.needs_new_epoch or bool(newly_initialized)
        if newly_initialized != requested:
            self._checked_epoch = -1  # the next heartbeat tries again

    def set_states(self, initializing: Partitions, initialized: Partitions, deleting: frozenset[bytes]) -> None:
        """Changes the states and records them, with each topic's current name, or a deleted topic's
        last name.
        """
        names, new_names = self.states.names, {}
        for topic_id in {*initializing, *initialized, *deleting}:
            new_names[topic_id] = self.cluster.topic_name(topic_id) or names.get(topic_id, "")
        self.states = States(initializing, initialized, deleting, new_names)
        self.pending.append(records.states_record(self.group_id, self.states))

    # -- description -------------------------------------------------------------------------------

    def _on_describe(self, event: ShareDescribe, now_ms: int, replies: list[Action]) -> None:
        replies.append(
            Reply(
                event.request,
                _Described.Group(
                    group_id=self.group_id,
                    group_state=self.state_name,
                    group_epoch=self.epoch,
                    assignment_epoch=self.assignment_epoch,
                    assignor_name=assignor.NAME,
                    members=[self._describe_member(member) for member in self.members.values()],
                ),
            )
        )

    def _describe_member(self, member: Member) -> ShareGroupDescribeResponse.Member:
        """Topics that have been deleted have no name and are left out."""
        description = member.description
        named_topics = (
            (topic_id, self.cluster.topic_name(topic_id), indexes) for topic_id, indexes in member.assigned.items()
        )
        return _Described.Member(
            member_id=member.member_id,
            rack_id=description.rack_id,
            member_epoch=member.epoch,
            client_id=description.client_id,
            client_host=description.client_host,
            subscribed_topic_names=list(description.topic_names),
            assignment=_Described.Assignment(
                topic_partitions=[
                    _Described.TopicPartitions(topic_id=topic_id, topic_name=name, partitions=list(indexes))
                    for topic_id, name, indexes in named_topics
                    if name is not None
                ]
            ),
        )

    # -- loading -----------------------------------------------------------------------------------

    def replay_own(self, key_type: int, value: bytes | None) -> None:
        if key_type == records.STATES:
            self.states = records.decode_states(value) if value is not None else States()

    def on_loaded(self, now_ms: int) -> list[Action]:
        """Members get a full session timeout, because they could not reach this coordinator before.
        The next heartbeat repeats initializations that were in progress.
        """
        loading, self._loading, self._loaded_keys = self._loading, {}, set()
        session_ms = self.cluster.share_settings(self.group_id).session_timeout_ms
        incomplete_ids = []
        for member_id, (description, current) in loading.items():
            if description is None:
                incomplete_ids += [member_id] if current is not None else []
                continue
            member = self.members[member_id] = Member(member_id, description)
            self._count_description(member)
            if current is not None:
                self.set_current(member, current)
            self.deadlines.move(member, now_ms + session_ms)
        self.target = {
            member_id: partitions for member_id, partitions in self.target.items() if member_id in self.members
        }
        self.assignment_epoch = self.loaded_epoch()
        self.epoch = max(self.epoch, self.assignment_epoch)
        in_both = intersection(self.states.initializing, self.states.initialized)
        self.states.initializing = difference(self.states.initializing, in_both)
        # newly assignable partitions may not have led to a new epoch yet, or a damaged log may have
        # lost the target
        self.needs_new_epoch = self.is_persisted
        for member_id in incomplete_ids:
            self.pending += records.member_tombstones(self.group_id, member_id)
        return self._actions([])

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        assert not self.pending and not self.effects, "G6: records that were not persisted"
        assert self.assignment_epoch <= self.epoch, f"G1: target {self.assignment_epoch}, group {self.epoch}"
        assert self.target.keys() <= self.members.keys(), "G2"
        initialized = self.states.initialized
        covered: Partitions = {}
        for partitions in self.target.values():
            covered = union(covered, partitions)
        if not self.needs_new_epoch and self.epoch == self.assignment_epoch and self.subscriptions.is_current():
            assert covered == self._assignable(), f"G3: {covered} of {self._assignable()}"
            assert not difference(covered, initialized), "G2"
        assert not intersection(self.states.initializing, initialized), "G4"
        all_topic_ids = {*self.states.initializing, *initialized, *self.states.deleting}
        assert all_topic_ids == self.states.names.keys(), "G4"
        assert not (self.admin.is_deleting and self._initializing), "G7"
        self.deadlines.check(self.members.values())
        for member in self.members.values():
            assert 0 <= member.epoch <= self.assignment_epoch, f"G1: member {member.epoch}, {self.assignment_epoch}"
            assert member.deadline_ms != NEVER, "G5"
        self.subscriptions.check([member.subscription_key for member in self.members.values()])
        described = sum(size_bytes_of(name, member.description) for name, member in self.members.items())
        assert described == self.described_bytes, "G8"
        assert self.assigned_count == sum(_count(member.assigned) for member in self.members.values()), "G8"
        self.admin.check()


def _without(partitions: Partitions, gone: set[bytes]) -> Partitions:
    return {topic_id: indexes for topic_id, indexes in partitions.items() if topic_id not in gone}


def _assignment(partitions: Partitions) -> ShareGroupHeartbeatResponse.Assignment:
    return _Assignment(
        topic_partitions=[
            _TopicPartitions(topic_id=topic_id, partitions=list(indexes)) for topic_id, indexes in partitions.items()
        ]
    )
