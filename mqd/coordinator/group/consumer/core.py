"""A KIP-848 consumer group: ConsumerGroupHeartbeat 0-1, ConsumerGroupDescribe 0-1. Sans-I/O.

There are three epochs. The group epoch rises whenever an input of the assignment changes: members,
subscriptions, topics. The target assignment has the group epoch for which it was computed; there is
at most one per group epoch. The member epoch is the epoch of the target that the member holds.
Members wait only for partitions, never for each other: each moves to the target through its own
heartbeats (members.py), first releases the partitions that it must lose, and then gets those that
others have released.

A target costs O(members + partitions), so TARGET_SIZE_PER_MS limits how often a large group
computes one: a thousand members that join within a second cost a few targets. A member that joins
in between has no partitions yet, and gets a short heartbeat interval.

Classic members (of a group that is migrating from or to the classic protocol) are in
classic_members.py: they hold and release partitions by the same rules.

Invariants (check())
    U1  a partition has at most one owner: it is assigned to a member, or not yet released by one
    U2  a member owns exactly the partitions assigned to it and those it must release; `owners` is
        the inverse mapping
    U3  member epoch <= target epoch <= group epoch; the epoch of a static member that left is -2
    U4  the target gives each partition to one member, and has no entry for a former member
    U5  a STABLE member at the target's epoch holds its target. A REVOKING member has partitions to
        release, any other member has none
    U6  partitions that a member keeps from one target to the next are never revoked in between: no
        partition that is assigned and in the target is among those it must release
    U7  each member has a session deadline; each REVOKING member also a deadline for the release,
        which a heartbeat does not move
    U8  each instance id in `static_member_ids` maps to the one member that has it
    U9  a reply depends only on records persisted before it; each request is answered once
    U10 `described_bytes` is the sum of the sizes of all members' descriptions
Bounds: at most group.consumer.max.size members. A heartbeat that changes nothing is O(1) and
persists nothing. A Persist holds at most actions.PERSIST_BYTES_MAX; the target's epoch comes last.

Sources: KIP-848, KIP-1101 (metadata hash), Kafka's own behaviour. Differences:
docs/decisions/coordinators/2026-11-21-consumer-groups.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from mqd.coordinator.actions import Action, Reply, TimerFired, as_persists
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.classic.members import protocols_size_bytes
from mqd.coordinator.group.consumer import records, requests
from mqd.coordinator.group.consumer.assignors import ASSIGNORS, MemberSpec
from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.consumer.events import ConsumerDescribe, ConsumerHeartbeat
from mqd.coordinator.group.consumer.known_members import find_sender
from mqd.coordinator.group.consumer.members import (
    LEFT_STATIC_EPOCH,
    NOTHING,
    REVOKING,
    STABLE,
    Member,
    Owners,
    next_state,
)
from mqd.coordinator.group.consumer.records import CurrentAssignment, Description, Partitions
from mqd.coordinator.group.consumer.requests import Refused
from mqd.coordinator.group.modern import ModernGroup
from mqd.coordinator.group.offsets import CommitOffsets
from mqd.coordinator.group.sets import intersection
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ConsumerGroupHeartbeatResponse

DEADLINE_TIMER = "consumer.deadline"
TIMERS = (DEADLINE_TIMER,)
TARGET_SIZE_PER_MS = 32  # members plus partitions per millisecond of delay between two targets
UNDELAYED_SIZE_MAX = 1000  # members plus partitions up to which every epoch gets its target immediately
# Heartbeat interval of a member that waits for partitions. librdkafka waits equally long for the
# response to a heartbeat.
SHORT_INTERVAL_MS = 1000
VERSION_MEMBER_EPOCH = 9  # the first OffsetCommit version with a member epoch
# Memory of a member without the client's strings and metadata, and of a partition that it owns
# (including the target's entry): measured, rounded up.
MEMBER_BYTES = 1_500
PARTITION_BYTES = 200
REVOKE = "revoke"  # the only step that is ever required of a member of this protocol


def size_bytes_of(member_id: str, description: Description) -> int:
    """The memory of a member, without its partitions."""
    texts = (
        member_id,
        description.instance_id,
        description.client_id,
        description.topic_regex,
        *(description.authorized_as or ()),
    )
    texts_bytes = sum(len(text or "") for text in texts) + sum(50 + len(name) for name in description.topic_names)
    protocols = description.classic.protocols if description.classic is not None else ()
    return MEMBER_BYTES + texts_bytes + protocols_size_bytes(protocols)


class ConsumerGroup(ModernGroup):
    """One group. `handle` is the only mutator once it is loaded."""

    records: ClassVar[Any] = records
    deadline_timer: ClassVar[str] = DEADLINE_TIMER

    def __init__(self, group_id: str, cluster: Cluster) -> None:
        from mqd.coordinator.group.consumer.classic_members import ClassicMembers

        super().__init__(group_id, cluster)
        self.members: dict[str, Member] = {}
        self.target: dict[str, Partitions] = {}
        self.static_member_ids: dict[str, str] = {}  # instance id -> member id
        self.owners = Owners()
        self.assignor_votes: dict[str, int] = {}
        self.classic = ClassicMembers(self)
        # must become a classic group: no member uses the consumer protocol any more
        self.needs_downgrade = False
        # when the last rebalance began: a target was computed while all members held the old one
        self._rebalance_since_ms = -1
        self._assign_after_ms = 0
        self._handlers: dict[type, Callable[[Any, int, list[Action]], None]] = {
            ConsumerHeartbeat: self._on_heartbeat,
            ConsumerDescribe: self._on_describe,
            TimerFired: self._on_timer,
            JoinGroup: self.classic.on_join,
            SyncGroup: self.classic.on_sync,
            Heartbeat: self.classic.on_heartbeat,
            LeaveGroup: self.classic.on_leave,
        }

    # -- queries ----------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return self.described_bytes + PARTITION_BYTES * self.owners.count

    @property
    def state_name(self) -> str:
        """The state's name in ListGroups and ConsumerGroupDescribe. O(members)."""
        if not self.members:
            return "Empty"
        if self.epoch > self.assignment_epoch:
            return "Assigning"
        # a copy, because the metrics thread calls this too
        return "Stable" if all(map(self._is_stable, list(self.members.values()))) else "Reconciling"

    def _is_stable(self, member: Member) -> bool:
        return member.state == STABLE and member.epoch in (self.assignment_epoch, LEFT_STATIC_EPOCH)

    @property
    def rebalance_since_ms(self) -> int:
        """When the current rebalance began, that is, when a new target was computed while all
        members held the old one; -1 if the group is not Reconciling. O(members).
        """
        return self._rebalance_since_ms if self.state_name == "Reconciling" else -1

    @property
    def assignor(self) -> str:
        """The assignor that most members request, among those that request one; otherwise the first
        configured one.
        """
        offered = self.cluster.settings(self.group_id).assignors
        votes = {name: count for name, count in self.assignor_votes.items() if name in offered}
        return max(sorted(votes), key=votes.__getitem__) if votes else offered[0]

    def is_subscribed(self, topic: str) -> bool:
        self.resolve_subscriptions()
        return topic in self.subscriptions.all_names()

    def commit_error(self, event: CommitOffsets) -> int:
        if event.generation < 0 and (not self.members or (event.is_transactional and not event.member_id)):
            return 0  # an administrator, or a producer whose client does not identify the member
        member = self.members.get(event.member_id)
        if member is None:
            return int(ErrorCode.UNKNOWN_MEMBER_ID)
        if not event.is_transactional and not member.is_classic and event.version < VERSION_MEMBER_EPOCH:
            return int(ErrorCode.UNSUPPORTED_VERSION)
        return self._validate_epoch(member, event.generation)

    def fetch_error(self, member_id: str | None, member_epoch: int) -> int:
        if member_id is None and member_epoch < 0:
            return 0
        member = self.members.get(member_id or "")
        return int(ErrorCode.UNKNOWN_MEMBER_ID) if member is None else self._validate_epoch(member, member_epoch)

    def _validate_epoch(self, member: Member, epoch: int) -> int:
        if epoch == member.epoch:
            return 0
        return int(ErrorCode.ILLEGAL_GENERATION if member.is_classic else ErrorCode.STALE_MEMBER_EPOCH)

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        replies: list[Action] = []
        self._handlers[type(event)](event, now_ms, replies)
        if not self.pending:
            actions = replies
        else:
            actions = self._persists() + replies
        return self.arm(actions)

    def _persists(self) -> list[Action]:
        """Returns the pending records as Persists, ordered so that the log holds a loadable state
        after each one: the group's epoch first, the target's last.
        """
        persists = as_persists(self.pending)
        self.pending = []
        self.is_persisted = True
        return persists

    def _on_heartbeat(self, event: ConsumerHeartbeat, now_ms: int, replies: list[Action]) -> None:
        try:
            response = self._leave(event) if event.message.member_epoch < 0 else self._heartbeat(event, now_ms)
        except Refused as refused:
            response = ConsumerGroupHeartbeatResponse(error_code=refused.error, error_message=refused.message)
        replies.append(Reply(event.request, response))

    def _heartbeat(self, event: ConsumerHeartbeat, now_ms: int) -> ConsumerGroupHeartbeatResponse:
        message = event.message
        known = find_sender(self, event)
        description = requests.updated_description(
            known.description if known is not None else None, event, self.cluster.matcher
        )
        member, needs_new_epoch = self.enroll(known, message.member_id or event.new_member_id, description)
        self.refresh(needs_new_epoch)
        self.maybe_assign(now_ms)
        previously_assigned = member.assigned
        self.reconcile(member, requests.owned_partitions(message), now_ms)
        self.deadlines.move(member, now_ms + self.cluster.settings(self.group_id).session_timeout_ms)
        sends_assignment = (
            message.member_epoch != member.epoch
            or previously_assigned != member.assigned
            or requests.sets_all_fields(message)
        )
        return ConsumerGroupHeartbeatResponse(
            member_id=member.member_id,
            member_epoch=member.epoch,
            heartbeat_interval_ms=self._interval_ms(member),
            assignment=requests.assignment(member.assigned) if sends_assignment else None,
        )

    def _interval_ms(self, member: Member) -> int:
        """Waiting members send heartbeats sooner, but their total rate is limited."""
        interval_ms = self.cluster.settings(self.group_id).heartbeat_interval_ms
        if member.state == STABLE and (self.epoch == self.assignment_epoch or member.assigned):
            return interval_ms
        return (
            interval_ms if member.state == REVOKING else min(interval_ms, max(SHORT_INTERVAL_MS, 2 * len(self.members)))
        )

    # -- members -----------------------------------------------------------------------------------

    def check_capacity(self) -> None:
        max_size = self.cluster.settings(self.group_id).max_size
        if len(self.members) >= max_size:
            raise Refused(
                ErrorCode.GROUP_MAX_SIZE_REACHED,
                f"The consumer group has reached its maximum capacity of {max_size} members.",
            )

    def enroll(self, known: Member | None, member_id: str, description: Description) -> tuple[Member, bool]:
        """Creates, renames or updates the member. Also returns whether the assignment depends on
        the change.
        """
        member = known
        if member is None:
            member = Member(member_id, description)
            self._add(member)
        elif member.member_id != member_id:
            member = self._rename(member, member_id)
        elif member.description is description:
            return member, False
        return member, self.set_description(member, description) or known is None

    def set_description(self, member: Member, description: Description) -> bool:
        """Sets the member's description. Returns whether the assignment depends on the change."""
        old_description, old_subscription_key, old_assignor = member.description, member.subscription_key, self.assignor
        if member.resolved is None or old_description != description:
            self.pending.append(records.member_record(self.group_id, member.member_id, description))
        self._forget_description(member)
        member.description = description
        self._count_description(member)
        return old_subscription_key != member.subscription_key or (
            old_description.server_assignor != description.server_assignor and old_assignor != self.assignor
        )

    def _count_description(self, member: Member) -> None:
        description = member.description
        member.resolved = self.subscriptions.add(member.subscription_key)
        if description.instance_id is not None:
            self.static_member_ids[description.instance_id] = member.member_id
        if description.server_assignor is not None:
            self.assignor_votes[description.server_assignor] = (
                self.assignor_votes.get(description.server_assignor, 0) + 1
            )
        self.classic.adjust_counts(description, 1)
        self.described_bytes += size_bytes_of(member.member_id, description)

    def _forget_description(self, member: Member) -> None:
        if member.resolved is None:
            return
        description = member.description
        self.subscriptions.remove(member.subscription_key)
        member.resolved = None
        if description.instance_id is not None:
            del self.static_member_ids[description.instance_id]
        if description.server_assignor is not None:
            self.assignor_votes[description.server_assignor] -= 1
            if not self.assignor_votes[description.server_assignor]:
                del self.assignor_votes[description.server_assignor]
        self.classic.adjust_counts(description, -1)
        self.described_bytes -= size_bytes_of(member.member_id, description)

    def _add(self, member: Member) -> None:
        self.members[member.member_id] = member

    def _rename(self, old: Member, member_id: str) -> Member:
        """Gives a static member that comes back its new member id. It keeps everything but starts
        at epoch 0.
        """
        target = self.target.get(old.member_id, NOTHING)
        current = CurrentAssignment(0, 0, STABLE, old.assigned, NOTHING)
        self.remove(old)
        member = Member(member_id, old.description, current)
        self._add(member)
        self.owners.claim(member_id, member.assigned)
        if target:
            self.target[member_id] = target
            self.pending.append(records.target_record(self.group_id, member_id, target))
        self.pending.append(records.current_record(self.group_id, member_id, current))
        return member

    def remove(self, member: Member) -> None:
        """Removes the member; its partitions are free immediately."""
        del self.members[member.member_id]
        self._forget_description(member)
        self.owners.release(member.member_id, member.assigned)
        self.owners.release(member.member_id, member.revoking)
        self.target.pop(member.member_id, None)
        self.deadlines.drop(member)
        self.deadlines.drop(member.step)
        self.deadlines.tidy(2 * len(self.members))
        self.pending += records.member_tombstones(self.group_id, member.member_id)

    def _leave(self, event: ConsumerHeartbeat) -> ConsumerGroupHeartbeatResponse:
        message = event.message
        if message.instance_id is None:
            member = self.members.get(message.member_id)
            if member is None:
                raise Refused(
                    ErrorCode.UNKNOWN_MEMBER_ID, f"Member {message.member_id} is not a member of group {self.group_id}."
                )
        else:
            owner_id = self.static_member_ids.get(message.instance_id)
            if owner_id is None:
                raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"Instance id {message.instance_id} is unknown.")
            if owner_id != message.member_id:
                raise Refused(
                    ErrorCode.FENCED_INSTANCE_ID,
                    f"Static member {message.member_id} with instance id {message.instance_id} was fenced by member"
                    f" {owner_id}.",
                )
            member = self.members[owner_id]
        if message.member_epoch == LEFT_STATIC_EPOCH and message.instance_id is not None:
            self._leave_temporarily(member)
        else:
            self.fence([member])
        return ConsumerGroupHeartbeatResponse(member_id=message.member_id, member_epoch=message.member_epoch)

    def _leave_temporarily(self, member: Member) -> None:
        """Handles a static member that leaves and may come back: its session continues, and it
        keeps its assignment. The partitions that it had to release become free.
        """
        self.set_current(
            member, CurrentAssignment(LEFT_STATIC_EPOCH, member.previous_epoch, STABLE, member.assigned, NOTHING)
        )
        self.clear_step(member)

    def fence(self, members: list[Member]) -> None:
        """Removes these members and bumps the group epoch; the next heartbeat of any member
        computes the target.
        """
        for member in members:
            self.remove(member)
        self.refresh(bump=True)
        self.classic.maybe_downgrade()

    # -- epochs ------------------------------------------------------------------------------------

    def maybe_assign(self, now_ms: int, immediately: bool = False) -> None:
        """Computes a target for the group's epoch, unless the last target is too recent."""
        if self.epoch == self.assignment_epoch:
            return
        counts = self.subscriptions.partition_counts
        size = len(self.members) + sum(counts.values())
        if self.assignment_epoch and size > UNDELAYED_SIZE_MAX and now_ms < self._assign_after_ms and not immediately:
            return
        specs = {
            member_id: MemberSpec(member.topic_ids, self.target.get(member_id, NOTHING), member.description.instance_id)
            for member_id, member in self.members.items()
        }
        if all(member.epoch == 0 or self._is_stable(member) for member in self.members.values()):
            self._rebalance_since_ms = now_ms  # epoch 0: a member that is just joining
        new_target = ASSIGNORS[self.assignor](specs, counts)
        for member_id, partitions in new_target.items():
            old_partitions = self.target.get(member_id)
            if old_partitions is partitions or old_partitions == partitions:
                new_target[member_id] = old_partitions
            else:
                self.pending.append(records.target_record(self.group_id, member_id, partitions))
        self.target = new_target
        self.assignment_epoch = self.epoch
        self.pending.append(records.target_epoch_record(self.group_id, self.epoch))
        self._assign_after_ms = now_ms + size // TARGET_SIZE_PER_MS

    def reconcile(self, member: Member, owned: Partitions | None, now_ms: int) -> None:
        """Moves the member as far towards the target as possible."""
        target = self.target.get(member.member_id, NOTHING)
        # the target may be older than the member's subscription
        if self.epoch != self.assignment_epoch:
            ids = member.topic_ids
            target = {topic_id: indexes for topic_id, indexes in target.items() if topic_id in ids}
        current = next_state(member, target, self.assignment_epoch, self.owners, owned)
        if current == member.current:
            return
        was_revoking = member.state == REVOKING and member.epoch == current.epoch
        self.set_current(member, current)
        if member.is_classic:
            return
        if member.state != REVOKING:
            self.clear_step(member)
        elif not was_revoking:
            self.set_step(member, REVOKE, now_ms + max(member.description.rebalance_timeout_ms, 0))

    def set_current(self, member: Member, current: CurrentAssignment) -> None:
        self.owners.release(member.member_id, member.assigned)
        self.owners.release(member.member_id, member.revoking)
        member.set_current(current)
        self.owners.claim(member.member_id, member.assigned)
        self.owners.claim(member.member_id, member.revoking)
        self.pending.append(records.current_record(self.group_id, member.member_id, current))

    # -- time --------------------------------------------------------------------------------------

    def set_step(self, member: Member, kind: str, at_ms: int) -> None:
        member.step_kind = kind
        self.deadlines.move(member.step, at_ms)

    def clear_step(self, member: Member) -> None:
        member.step_kind = ""
        self.deadlines.drop(member.step)

    def _on_timer(self, event: TimerFired, now_ms: int, replies: list[Action]) -> None:
        self._armed_ms = None
        expired: dict[str, Member] = {}
        for timed in self.deadlines.take_expired(now_ms):
            member = self.members.get(timed.member_id)
            if member is not None and timed in (member, member.step):
                expired[member.member_id] = member
        if expired:
            self.fence(list(expired.values()))

    def _on_describe(self, event: ConsumerDescribe, now_ms: int, replies: list[Action]) -> None:
        from mqd.coordinator.group.consumer.describe import describe_group

        replies.append(Reply(event.request, describe_group(self)))

    # -- loading -----------------------------------------------------------------------------------

    def on_loaded(self, now_ms: int) -> list[Action]:
        """Members get a full session timeout, because they could not reach this coordinator before.
        Members that a damaged log leaves without a complete and consistent state are fenced.
        """
        loading, self._loading = self._loading, {}
        self.pending += [(key, None) for key in sorted(self._loaded_keys) if records.is_expression_key(key)]
        self._loaded_keys = set()
        broken_ids = [
            member_id
            for member_id, (description, current) in loading.items()
            if description is None and current is not None
        ]
        for member_id, (description, current) in loading.items():
            if description is not None and not self.load_member(member_id, description, current):
                broken_ids.append(member_id)
        self.target = {
            member_id: partitions for member_id, partitions in self.target.items() if member_id in self.members
        }
        self._load_epochs()
        for member_id in broken_ids:
            self.target.pop(member_id, None)
            self.pending += records.member_tombstones(self.group_id, member_id)
        self._rebalance_since_ms = now_ms
        session_ms = self.cluster.settings(self.group_id).session_timeout_ms
        for member in self.members.values():
            classic = member.description.classic
            self.deadlines.move(member, now_ms + (session_ms if classic is None else classic.session_timeout_ms))
            if member.state == REVOKING and classic is None:
                self.set_step(member, REVOKE, now_ms + max(member.description.rebalance_timeout_ms, 0))
        if broken_ids:
            self.epoch += 1
            self.pending.append(records.group_record(self.group_id, self.epoch, 0))
            self.metadata_hash = 0
        return self.arm(self._persists() if self.pending else [])

    def load_member(self, member_id: str, description: Description, current: CurrentAssignment | None) -> bool:
        """Adds the member. Returns False, and does not add it, if its state is inconsistent or
        contradicts that of the others.
        """
        current = current or CurrentAssignment(0, 0, STABLE, NOTHING, NOTHING)
        is_inconsistent = any(
            self.owners.get(topic_id, index)
            for partitions in (current.assigned, current.revoking)
            for topic_id, indexes in partitions.items()
            for index in indexes
        )
        is_inconsistent = (
            is_inconsistent
            or bool(intersection(current.assigned, current.revoking))
            or current.state not in (0, 1, 2)
            or (current.state == REVOKING) != bool(current.revoking)
        )
        instance_id = description.instance_id
        if is_inconsistent or (instance_id is not None and instance_id in self.static_member_ids):
            return False
        member = Member(member_id, description, current)
        self._add(member)
        self._count_description(member)
        self.owners.claim(member_id, current.assigned)
        self.owners.claim(member_id, current.revoking)
        return True

    def _load_epochs(self) -> None:
        self.assignment_epoch = self.loaded_epoch()
        if self.epoch < self.assignment_epoch:
            # 0 differs from any hash, so the next heartbeat raises the epoch
            self.epoch, self.metadata_hash = self.assignment_epoch, 0

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        from mqd.coordinator.group.consumer.invariants import check

        check(self)
