"""The core of one group id: its current kind, its members under the protocol of that kind, and its
committed offsets.

    kind      contents
    empty     no members; possibly offsets of consumers that assign themselves partitions
    classic   members that joined by JoinGroup (classic/core.py), or an empty generation in the log
    consumer  members that joined by ConsumerGroupHeartbeat (KIP-848)
    share     members that joined by ShareGroupHeartbeat (KIP-932); no offsets; never converted
    streams   members that joined by StreamsGroupHeartbeat (KIP-1071)

Members and offsets change only through `handle`.

Invariants (check(), in addition to those of the parts)
    GG1  a group has one kind: while it is a consumer, share or streams group, its classic part is
         in its initial state; a share group has no offsets
    GG2  an empty group (is_empty) has nothing in the log
    GG3  an Empty group with an epoch or generation in the log but no offsets is checked again:
         REMOVAL_TIMER or the timer of its offsets is armed
    GG4  a refused change of kind changes nothing
    GG5  a group whose last offset was deleted, alone or with its topic, or whose first member was
         refused, exists until the next check (REMOVAL_TIMER), as in Kafka: it can still be listed
         and deleted. A group whose first commit was refused for every offset also exists until
         then, but read-only requests do not see it, because in Kafka nothing would have been
         written
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from mqd.coordinator.actions import Action, KeyValue, Persist, Reply, Timer, TimerFired, as_persists
from mqd.coordinator.group import migration
from mqd.coordinator.group.classic import records as classic_records
from mqd.coordinator.group.classic.core import ClassicGroup
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.classic.rebalance import TIMERS as CLASSIC_TIMERS
from mqd.coordinator.group.classic.state import COMPLETING, CONSUMER_PROTOCOL, EMPTY, STABLE, DelayingMember, State
from mqd.coordinator.group.consumer.cluster import Cluster, FixedCluster
from mqd.coordinator.group.consumer.core import DEADLINE_TIMER as CONSUMER_TIMER
from mqd.coordinator.group.consumer.core import ConsumerGroup
from mqd.coordinator.group.consumer.describe import delaying_members
from mqd.coordinator.group.consumer.events import ConsumerDescribe, ConsumerHeartbeat
from mqd.coordinator.group.offsets import (
    EXPIRATION_TIMER,
    KEEP,
    OFFSET_EVENTS,
    CommitOffsets,
    Offsets,
    OffsetsSettings,
    PartitionsGone,
)
from mqd.coordinator.group.records import (
    GROUP_METADATA,
    OFFSET_COMMIT,
    SHARE_GROUP_TYPES,
    STREAMS_GROUP_TYPES,
    decode_offset_key,
    key_type_of,
)
from mqd.coordinator.group.refusals import not_found
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.group.share.core import DEADLINE_TIMER as SHARE_TIMER
from mqd.coordinator.group.share.core import PROTOCOL as SHARE_PROTOCOL
from mqd.coordinator.group.share.core import ShareGroup
from mqd.coordinator.group.share.events import AlterOffsets, DeleteOffsets, ShareDescribe, ShareHeartbeat, StatesChanged
from mqd.coordinator.group.streams.core import PROTOCOL as STREAMS_PROTOCOL
from mqd.coordinator.group.streams.core import TIMERS as STREAMS_TIMERS
from mqd.coordinator.group.streams.core import StreamsGroup
from mqd.coordinator.group.streams.events import StreamsDescribe, StreamsHeartbeat
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import DescribeGroupsResponse, JoinGroupResponse

REMOVAL_TIMER = "group.expire"
VERSION_GROUP_ID_NOT_FOUND = 9  # the first OffsetCommit version with this error (KIP-848)
RECORD_OVERHEAD_BYTES = 32
GROUP_BYTES = 3_500  # memory of a group without members and offsets: measured, rounded up
CLASSIC_EVENTS = (JoinGroup, SyncGroup, Heartbeat, LeaveGroup)
SHARE_EVENTS = (ShareHeartbeat, ShareDescribe, AlterOffsets, DeleteOffsets)


class DeleteGroup(msgspec.Struct, frozen=True):
    """The reply is an error code."""

    request: int


class GroupListing(NamedTuple):
    """An entry of ListGroups. As in Kafka, `kind` is also "classic" for a group that has only
    offsets.
    """

    group_id: str
    protocol_type: str
    state: str
    kind: str


class Rebalance(NamedTuple):
    """A rebalance in progress. `since_ms` -1 and `reason` "" mean unknown; a consumer group gives
    no reason.
    """

    since_ms: int
    reason: str
    held_up_by: list[DelayingMember]


class Group:
    def __init__(
        self, group_id: str, classic: ClassicSettings, offsets: OffsetsSettings, cluster: Cluster | None = None
    ) -> None:
        self.group_id = group_id
        self.cluster = cluster or FixedCluster()
        self.classic = ClassicGroup(group_id, classic)
        self.consumer: ConsumerGroup | None = None
        self.share: ShareGroup | None = None
        self.streams: StreamsGroup | None = None
        self.offsets = Offsets(group_id, offsets)
        self._check_interval_ms = offsets.check_interval_ms
        self._is_removal_armed = False
        self._lingers = self._is_unwritten = False  # GG5; not in the log

    # -- queries ----------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        if self.consumer is not None:
            return "consumer"
        if self.share is not None:
            return "share"
        if self.streams is not None:
            return "streams"
        return "classic" if self.classic.is_persisted or not self.classic.is_empty else "empty"

    @property
    def exists(self) -> bool:
        return not self.is_empty

    @property
    def is_empty(self) -> bool:
        """Whether the group has no state, so that it need not be kept in memory."""
        return not self.is_visible and not self._is_unwritten

    @property
    def is_visible(self) -> bool:
        """Whether read-only requests see the group."""
        has_members = self.classic.state is not EMPTY or bool(self.classic.members.pending)
        is_written = self.classic.is_persisted or not self.offsets.is_empty
        return has_members or is_written or self._modern is not None or self._lingers

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory; data whose size clients choose is counted exactly."""
        parts_bytes = self.classic.members.size_bytes + self.offsets.size_bytes
        if self._modern is not None:
            parts_bytes += self._modern.size_bytes
        return GROUP_BYTES + len(self.group_id) + parts_bytes

    @property
    def _modern(self) -> ConsumerGroup | ShareGroup | StreamsGroup | None:
        return self.consumer or self.share or self.streams

    @property
    def state_name(self) -> str:
        if self._modern is not None:
            return self._modern.state_name
        return str(self.classic.state if self.is_visible else State.DEAD)

    @property
    def member_count(self) -> int:
        return len(self.classic.members.by_id if self._modern is None else self._modern.members)

    def listing(self) -> GroupListing:
        if self.consumer is not None:
            return GroupListing(self.group_id, CONSUMER_PROTOCOL, self.state_name, "consumer")
        if self.share is not None:
            return GroupListing(self.group_id, SHARE_PROTOCOL, self.state_name, "share")
        if self.streams is not None:
            return GroupListing(self.group_id, STREAMS_PROTOCOL, self.state_name, "streams")
        return GroupListing(self.group_id, self.classic.protocol_type or "", self.state_name, "classic")

    def held_up_by(self) -> list[DelayingMember]:
        return self.classic.held_up_by() if self.consumer is None else delaying_members(self.consumer)

    @property
    def rebalance_since_ms(self) -> int:
        """When the current rebalance began; -1 if there is none. O(members)."""
        return (self.consumer or self.classic).rebalance_since_ms

    def rebalance(self) -> Rebalance | None:
        held_up_by = self.held_up_by()
        if self.consumer is not None:
            return (
                Rebalance(self.rebalance_since_ms, "", held_up_by)
                if held_up_by or self.consumer.state_name in ("Assigning", "Reconciling")
                else None
            )
        classic = self.classic
        return (
            Rebalance(self.rebalance_since_ms, classic.rebalance_reason, held_up_by)
            if held_up_by or self.rebalance_since_ms >= 0
            else None
        )

    def describe(self) -> DescribeGroupsResponse.Group | None:
        """The entry of DescribeGroups; None if this is not a classic group, or does not exist."""
        if not self.is_visible or self._modern is not None:
            return None
        classic = self.classic
        is_stable = classic.state is STABLE
        return DescribeGroupsResponse.Group(
            group_id=self.group_id,
            group_state=str(classic.state),
            protocol_type=classic.protocol_type or "",
            protocol_data=(classic.protocol or "") if is_stable else "",
            members=[
                member.describe(classic.protocol if is_stable else None) for member in classic.members.by_id.values()
            ],
        )

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        if isinstance(event, CLASSIC_EVENTS):
            if self.consumer is not None:
                return self._handle_consumer(event, now_ms)
            if self.streams is not None:
                return self._handle_classic_in_streams(event, now_ms)
            if type(event) is JoinGroup and self.share is not None:
                error = int(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
                return [Reply(event.request, JoinGroupResponse(error_code=error, protocol_name=None))]
            if type(event) is JoinGroup:
                return self._on_join(event, now_ms)
            actions = self.classic.handle(event, now_ms)
            return actions if type(event) is Heartbeat else actions + self._arm_removal(now_ms)
        if isinstance(event, TimerFired):
            return self._on_timer(event, now_ms)
        if isinstance(event, OFFSET_EVENTS):
            had_offsets = not self.offsets.is_empty
            actions = self.offsets.handle(event, self, now_ms)
            if self.share is not None and isinstance(event, PartitionsGone):
                actions += self.share.forget_topics(frozenset(event.remaining_counts))
            self._lingers |= had_offsets and self.offsets.is_empty
            return actions + self._arm_removal(now_ms)
        if isinstance(event, DeleteGroup):
            return self._on_delete(event)
        if isinstance(event, ConsumerHeartbeat):
            return (
                self._handle_consumer(event, now_ms)
                if self.consumer is not None
                else self._on_first_heartbeat(event, now_ms)
            )
        if isinstance(event, ConsumerDescribe):
            return self.consumer.handle(event, now_ms) if self.consumer is not None else [self._not_found(event)]
        if isinstance(event, SHARE_EVENTS):
            return self._handle_share(event, now_ms)
        if isinstance(event, StreamsHeartbeat):
            return self._on_streams_heartbeat(event, now_ms)
        if isinstance(event, StreamsDescribe):
            return self.streams.handle(event, now_ms) if self.streams is not None else [self._not_found(event)]
        if isinstance(event, StatesChanged):
            return self._handle_share(event, now_ms) if self.share is not None else []
        raise TypeError(f"{type(event).__name__} is not an event of a group")

    def _not_found(self, event: Any) -> Reply:
        return not_found(event, self.group_id, self.is_visible)

    def _on_join(self, event: JoinGroup, now_ms: int) -> list[Action]:
        if event.message.member_id and not self.exists:
            error = int(ErrorCode.UNKNOWN_MEMBER_ID)
            response = JoinGroupResponse(error_code=error, member_id=event.message.member_id, protocol_name=None)
            return [Reply(event.request, response)]
        actions = self.classic.handle(event, now_ms)
        self._lingers |= not self.is_visible
        return actions + self._arm_removal(now_ms)

    # -- the consumer protocol ---------------------------------------------------------------------

    def _on_first_heartbeat(self, event: ConsumerHeartbeat, now_ms: int) -> list[Action]:
        """Handles a heartbeat for a group that is not a consumer group. The group becomes one if
        the sender joins it and the group has no members, or only members that can be converted.
        """
        classic = self.classic
        if event.message.member_epoch != 0 or self.share is not None or self.streams is not None:
            return [self._not_found(event)]
        consumer: ConsumerGroup | None
        if classic.state is EMPTY:
            consumer = ConsumerGroup(self.group_id, self.cluster)
            if classic.is_persisted:
                consumer.pending.append((classic_records.encode_key(self.group_id), None))
        else:
            consumer = (
                migration.upgrade(classic, self.cluster, now_ms)
                if self.cluster.settings(self.group_id).may_upgrade
                else None
            )
        if consumer is None:
            return [self._not_found(event)]
        actions = consumer.handle(event, now_ms)
        replies = [action for action in actions if isinstance(action, Reply)]
        if replies[0].response.error_code:
            return list(replies)  # the heartbeat was refused: the group stays as it was
        disarmed_timers = [Timer(name, None) for name in CLASSIC_TIMERS]
        replies_to_retry = migration.replies_to_retry(classic)
        self.consumer, self.classic = consumer, ClassicGroup(self.group_id, classic.settings)
        return [*disarmed_timers, *actions, *replies_to_retry]

    # -- the share protocol ------------------------------------------------------------------------

    def _handle_share(self, event: Any, now_ms: int) -> list[Action]:
        share = self.share
        if share is None:
            creates_group = isinstance(event, AlterOffsets) or (
                isinstance(event, ShareHeartbeat) and event.message.member_epoch == 0
            )
            if self.exists or not creates_group:
                return [self._not_found(event)]
            share = ShareGroup(self.group_id, self.cluster)
        actions = share.handle(event, now_ms)
        self.share = share if share.is_persisted and not share.is_deleted else None
        return actions

    # -- the streams protocol ----------------------------------------------------------------------

    def _on_streams_heartbeat(self, event: StreamsHeartbeat, now_ms: int) -> list[Action]:
        """A group without members becomes a streams group when the sender joins it."""
        streams, epoch = self.streams, event.message.member_epoch
        if streams is None:
            may_become_streams = self.consumer is None and self.share is None and self.classic.state is EMPTY
            if epoch != 0 or not may_become_streams:
                return [self._not_found(event)]
            streams = StreamsGroup(self.group_id, self.cluster)
            if self.classic.is_persisted:
                streams.pending.append((classic_records.encode_key(self.group_id), None))
        actions = streams.handle(event, now_ms)
        if self.streams is None:
            if any(isinstance(action, Reply) and action.response.error_code for action in actions):
                # the heartbeat was refused: the group stays as it was
                return [action for action in actions if isinstance(action, Reply)]
            self.streams, self.classic = streams, ClassicGroup(self.group_id, self.classic.settings)
            actions = [*(Timer(name, None) for name in CLASSIC_TIMERS), *actions]
        return actions + self._arm_removal(now_ms)

    def _handle_classic_in_streams(self, event: Any, now_ms: int) -> list[Action]:
        """A JoinGroup makes an empty streams group a classic one."""
        streams = self.streams
        assert streams is not None
        if type(event) is not JoinGroup:
            return self.classic.handle(event, now_ms)
        if streams.members:
            error = int(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
            return [Reply(event.request, JoinGroupResponse(error_code=error, protocol_name=None))]
        self.streams = None
        tombstones = as_persists(streams.all_tombstones()) if streams.is_persisted else []
        return [*tombstones, *(Timer(name, None) for name in STREAMS_TIMERS), *self._on_join(event, now_ms)]

    def _handle_streams(self, event: object, now_ms: int) -> list[Action]:
        return self.streams.handle(event, now_ms) + self._arm_removal(now_ms) if self.streams is not None else []

    # -- the consumer protocol, after the first heartbeat ------------------------------------------

    def _handle_consumer(self, event: object, now_ms: int) -> list[Action]:
        consumer = self.consumer
        assert consumer is not None
        if isinstance(event, JoinGroup) and consumer.is_empty:
            removal = (
                [*as_persists(consumer.all_tombstones()), Timer(CONSUMER_TIMER, None)] if consumer.is_persisted else []
            )
            self.consumer = None
            return removal + self._on_join(event, now_ms)
        actions = consumer.handle(event, now_ms)
        if consumer.needs_downgrade:
            actions += self._downgrade(consumer, now_ms)
        return actions if consumer.members else actions + self._arm_removal(now_ms)

    def _downgrade(self, consumer: ConsumerGroup, now_ms: int) -> list[Action]:
        consumer.needs_downgrade = False
        value = migration.downgrade(consumer, now_ms)
        if value is None or len(consumer.members) > self.classic.settings.max_size:
            return []
        tombstones = consumer.all_tombstones()
        if (
            len(value) + sum(len(key) + RECORD_OVERHEAD_BYTES for key, _ in tombstones)
            > self.classic.settings.record_bytes_max
        ):
            # Too much for one batch, and a partial group would be invalid. The members are served
            # as before.
            return []
        self.consumer = None
        persist = Persist((*tombstones, (classic_records.encode_key(self.group_id), value)))
        return [persist, Timer(CONSUMER_TIMER, None), *self.classic.take_over(value, now_ms)]

    def _on_timer(self, event: TimerFired, now_ms: int) -> list[Action]:
        if event.name in CLASSIC_TIMERS:
            return self.classic.handle(event, now_ms) + self._arm_removal(now_ms)
        if event.name == REMOVAL_TIMER:
            self._is_removal_armed = False
            return self._maybe_remove() or self._arm_removal(now_ms)
        if event.name == EXPIRATION_TIMER:
            return self.offsets.on_expiration_timer(self, now_ms)[0] + self._maybe_remove()
        if event.name == SHARE_TIMER:
            return self._handle_share(event, now_ms) if self.share is not None else []
        if event.name in STREAMS_TIMERS:
            return self._handle_streams(event, now_ms)
        return self._handle_consumer(event, now_ms) if self.consumer is not None else []

    def _on_delete(self, event: DeleteGroup) -> list[Action]:
        if self.share is not None:
            actions = self.share.delete_group(event.request)
            self.share = None if self.share.is_deleted else self.share
            return actions
        error = (
            int(ErrorCode.GROUP_ID_NOT_FOUND)
            if not self.exists
            else int(ErrorCode.NON_EMPTY_GROUP)
            if self._has_members()
            else 0
        )
        if error:
            return [Reply(event.request, error)]
        return [*as_persists(self._remove()), Reply(event.request, 0)]

    def _has_members(self) -> bool:
        return not self._modern.is_empty if self._modern is not None else self.classic.state is not EMPTY

    def _remove(self) -> list[KeyValue]:
        """Removes the group's state. Returns tombstones for everything that the log holds of it."""
        records = self.offsets.delete_all()
        if self.consumer is not None:
            records += self.consumer.all_tombstones()
            self.consumer = None
        if self.streams is not None:
            records += self.streams.all_tombstones()
            self.streams = None
        if self.classic.is_persisted:
            records.append((classic_records.encode_key(self.group_id), None))
        self.classic = ClassicGroup(self.group_id, self.classic.settings)
        self._lingers = self._is_unwritten = False
        return records

    def _maybe_remove(self) -> list[Action]:
        """Removes a group that has neither members nor offsets left."""
        if not self.offsets.is_empty or not self._is_deserted():
            return []
        return list(as_persists(self._remove()))

    def _is_deserted(self) -> bool:
        """Whether the group has no members, but exists for another reason than its offsets."""
        if self.share is not None:
            return False  # as in Kafka: only an administrator deletes it
        if self._modern is not None:
            return self._modern.is_empty
        return (self.classic.is_persisted or self._lingers or self._is_unwritten) and self.classic.is_empty

    def _arm_removal(self, now_ms: int) -> list[Action]:
        if self._is_removal_armed or not self._is_deserted() or not self.offsets.is_empty:
            return []
        self._is_removal_armed = True
        return [Timer(REMOVAL_TIMER, now_ms + self._check_interval_ms)]

    # -- loading -----------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> None:
        key_type = key_type_of(key)
        if key_type <= OFFSET_COMMIT:
            _, topic, partition = decode_offset_key(key)
            self.offsets.replay(topic, partition, value)
        elif key_type == GROUP_METADATA:
            self.classic.replay(value)
        elif key_type in SHARE_GROUP_TYPES:
            if self.share is None and value is not None:
                self.share = ShareGroup(self.group_id, self.cluster)
            if self.share is not None:
                self.share.replay(key, value)
        elif key_type in STREAMS_GROUP_TYPES:
            if self.streams is None and value is not None:
                self.streams = StreamsGroup(self.group_id, self.cluster)
            if self.streams is not None:
                self.streams.replay(key, value)
        elif self.consumer is not None or value is not None:
            if self.consumer is None:
                self.consumer = ConsumerGroup(self.group_id, self.cluster)
            self.consumer.replay(key, value)

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        _, topic, partition = decode_offset_key(key)
        self.offsets.replay_pending(topic, partition, value, producer_id)

    def on_loaded(self, now_ms: int) -> list[Action]:
        if self.consumer is not None and not self.consumer.is_persisted:
            self.consumer = None  # tombstones have removed all its records
        # a damaged log: a tombstone is missing
        if self.consumer is not None and self.classic.is_persisted:
            self.consumer.pending.append((classic_records.encode_key(self.group_id), None))
            self.classic = ClassicGroup(self.group_id, self.classic.settings)
        if self.share is not None and not self.share.is_persisted:
            self.share = None
        if self.streams is not None and not self.streams.is_persisted:
            self.streams = None
        if self.streams is not None and (self.share or self.consumer or self.classic.is_persisted):
            # a damaged log: after these records the group changed its kind
            records = self.streams.all_tombstones()
            self.streams = None
            return [*as_persists(records), *self.on_loaded(now_ms)]
        if self.share is not None and not (self.consumer is not None or self.classic.is_persisted):
            return self.share.on_loaded(now_ms) + self.offsets.on_loaded(now_ms)
        self.share = None  # a damaged log: after these records the group changed its kind
        member_actions = (self.consumer or self.streams or self.classic).on_loaded(now_ms)
        return member_actions + self.offsets.on_loaded(now_ms) + self._arm_removal(now_ms)

    # -- offsets.Membership ------------------------------------------------------------------------

    def has_state_of_any(self, topics: Collection[str]) -> bool:
        """Whether the group has state for one of these topics, which have lost partitions."""
        if self.share is not None:
            return any(name in topics for name in self.share.states.names.values())
        return self.offsets.has_offsets_of_any(topics)

    def commit_error(self, event: CommitOffsets) -> int:
        if self.consumer is not None:
            return self.consumer.commit_error(event)
        if self.share is not None:
            return int(ErrorCode.GROUP_ID_NOT_FOUND)
        if self.streams is not None:
            return self.streams.commit_error(event)
        if not self.exists and event.generation >= 0:
            knows_not_found = event.version >= VERSION_GROUP_ID_NOT_FOUND and not event.is_transactional
            return int(ErrorCode.GROUP_ID_NOT_FOUND if knows_not_found else ErrorCode.ILLEGAL_GENERATION)
        return self.classic.validate_commit(
            event.member_id, event.group_instance_id, event.generation, event.is_transactional
        )

    def fetch_error(self, member_id: str | None, member_epoch: int) -> int:
        """A share group has no committed offsets: it is treated like an unknown group."""
        group = self.consumer or self.streams
        return group.fetch_error(member_id, member_epoch) if group is not None else 0

    def delete_error(self) -> int:
        if self.consumer is not None or self.streams is not None:
            return 0
        if not self.exists or self.share is not None:
            return int(ErrorCode.GROUP_ID_NOT_FOUND)
        return (
            int(ErrorCode.NON_EMPTY_GROUP)
            if self._has_members() and self.classic.protocol_type != CONSUMER_PROTOCOL
            else 0
        )

    def is_subscribed(self, topic: str) -> bool:
        group = self.consumer or self.streams
        if group is not None:
            return group.is_subscribed(topic)
        topics = self.classic.subscribed_topics()
        return topic in topics if topics is not None else self.classic.protocol_type == CONSUMER_PROTOCOL

    def empty_since_ms(self) -> int | None:
        if self.consumer is not None or self.streams is not None:
            return None  # as in Kafka: offsets age from their commit, those of subscribed topics not at all
        classic = self.classic
        if classic.protocol_type is None:
            return None
        if classic.state is EMPTY:
            return classic.state_since_ms if classic.state_since_ms >= 0 else None
        return None if classic.state is STABLE and classic.subscribed_topics() is not None else KEEP

    def on_committed(self, event: CommitOffsets, now_ms: int) -> list[Action]:
        """A member's commit shows that it is alive. While the group completes a rebalance, only
        transactional commits reach this method.
        """
        self._is_unwritten |= not self.exists
        member = self.classic.members.by_id.get(event.member_id)
        if (
            member is not None
            and self._modern is None
            and self.classic.state is not COMPLETING
            and not event.is_transactional
        ):
            self.classic.note_activity(member, now_ms)
        return []

    def check(self) -> None:
        self.classic.check()
        self.offsets.check()
        if self.consumer is not None:
            self.consumer.check()
            assert self.classic.is_empty and not self.classic.is_persisted, "GG1"
        if self.share is not None:
            self.share.check()
            assert self.share.is_persisted and self.consumer is None and self.offsets.is_empty, "GG1"
            assert self.classic.is_empty and not self.classic.is_persisted, "GG1"
        if self.streams is not None:
            self.streams.check()
            assert self.streams.is_persisted and self.consumer is None and self.share is None, "GG1"
            assert self.classic.is_empty and not self.classic.is_persisted, "GG1"
        assert not self.is_empty or not self.classic.is_persisted, "GG2"
        may_be_removed = self._is_deserted() and self.offsets.is_empty
        assert not may_be_removed or self._is_removal_armed, "GG3"
