"""Members of a consumer group that speak the classic protocol: JoinGroup, SyncGroup, Heartbeat and
LeaveGroup. They share the target assignment with the other members, and follow the same rules.

Such a member's generation is its member epoch. The response REBALANCE_IN_PROGRESS to a heartbeat
makes it send a JoinGroup, whose metadata lists the partitions that it still owns, as a heartbeat of
the consumer protocol does. SyncGroup returns its assignment. There is no leader election and
members do not wait for each other: each JoinGroup is answered immediately.

A classic member must send its next request within its rebalance timeout: JoinGroup after the first
REBALANCE_IN_PROGRESS, SyncGroup after JoinGroup. When the last member of the consumer protocol has
left and the configuration allows it, the group sets `ConsumerGroup.needs_downgrade`, and group.py
converts it to a classic group. Source: KIP-848 (online migration), Kafka's own behaviour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.coordinator.actions import Action, Reply
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.consumer.members import LEFT_STATIC_EPOCH, NOTHING, REVOKING, WAITING, Member, can_take_more
from mqd.coordinator.group.consumer.records import ClassicMetadata, Description, Partitions
from mqd.coordinator.group.consumer.requests import Refused
from mqd.coordinator.group.consumer_protocol import Subscription, decode_subscription, encode_assignment
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    LeaveGroupResponse,
    SyncGroupResponse,
)

if TYPE_CHECKING:
    from mqd.coordinator.group.consumer.core import ConsumerGroup

PROTOCOL_TYPE = "consumer"
JOIN, SYNC = "join", "sync"
VERSION_MEMBER_ID_REQUIRED = 4
METADATA_BYTES_MAX = 1 << 20  # limit for all protocols of one member, which go into one record


class ClassicMembers:
    """Serves the classic members of a group. `member_count`: how many there are; `votes`: protocol
    -> how many of them support it.
    """

    def __init__(self, group: ConsumerGroup) -> None:
        self.group = group
        self.member_count = 0
        self.votes: dict[str, int] = {}

    def adjust_counts(self, description: Description, by: int) -> None:
        """Adds `by` (1 or -1) to the counts that a member with this description is part of."""
        if description.classic is None:
            return
        self.member_count += by
        for name, _ in description.classic.protocols:
            self.votes[name] = self.votes.get(name, 0) + by
            if not self.votes[name]:
                del self.votes[name]

    # -- joining -----------------------------------------------------------------------------------

    def on_join(self, event: JoinGroup, now_ms: int, replies: list[Action]) -> None:
        try:
            response = self._join(event, now_ms)
        except Refused as refused:
            member_id = event.new_member_id if refused.error == ErrorCode.MEMBER_ID_REQUIRED else ""
            response = JoinGroupResponse(
                error_code=refused.error, member_id=member_id, protocol_name="" if event.version < 7 else None
            )
        replies.append(Reply(event.request, response))

    def _join(self, event: JoinGroup, now_ms: int) -> JoinGroupResponse:
        group, message = self.group, event.message
        known = self._find_known(message)
        if known is None:
            group.check_capacity()
        self._check_protocols(message, known)
        self._check_claim(message)
        if (
            known is None
            and not message.member_id
            and message.group_instance_id is None
            and event.version >= VERSION_MEMBER_ID_REQUIRED
        ):
            raise Refused(ErrorCode.MEMBER_ID_REQUIRED, "")
        subscription = _decode_subscription(message)
        description = Description(
            message.group_instance_id,
            subscription.rack_id,
            event.client_id,
            event.client_host,
            subscription.topics,
            None,
            message.rebalance_timeout_ms if message.rebalance_timeout_ms >= 0 else message.session_timeout_ms,
            None,
            ClassicMetadata(
                message.session_timeout_ms, tuple((protocol.name, protocol.metadata) for protocol in message.protocols)
            ),
        )
        member, needs_new_epoch = group.enroll(known, message.member_id or event.new_member_id, description)
        group.refresh(needs_new_epoch)
        group.maybe_assign(now_ms, immediately=True)
        group.reconcile(member, self._owned_partitions(subscription), now_ms)
        group.deadlines.move(member, now_ms + message.session_timeout_ms)
        group.set_step(member, SYNC, now_ms + description.rebalance_timeout_ms)
        response = JoinGroupResponse(
            generation_id=member.epoch,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=message.protocols[0].name,
            leader="",
            member_id=member.member_id,
        )
        self.maybe_downgrade()
        return response

    def _find_known(self, message: JoinGroupRequest) -> Member | None:
        members = self.group.members
        if message.group_instance_id is None:
            return members.get(message.member_id)
        return members.get(self.group.static_member_ids.get(message.group_instance_id, message.member_id))

    def _check_claim(self, message: JoinGroupRequest) -> None:
        """If the request has both an instance id and a member id, checks that they belong
        together. Raises Refused.
        """
        if message.group_instance_id is None or not message.member_id:
            return
        owner_id = self.group.static_member_ids.get(message.group_instance_id)
        if owner_id is None:
            raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, "")
        if owner_id != message.member_id:
            raise Refused(ErrorCode.FENCED_INSTANCE_ID, "")

    def _check_protocols(self, message: JoinGroupRequest, known: Member | None) -> None:
        """Raises Refused."""
        votes, count = self.votes, self.member_count
        own_metadata = known.description.classic if known is not None else None
        own_names = {name for name, _ in own_metadata.protocols} if own_metadata is not None else set()
        other_count = count - (own_metadata is not None)
        if message.protocol_type != PROTOCOL_TYPE or not message.protocols:
            raise Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "")
        if other_count and not any(
            votes.get(protocol.name, 0) - (protocol.name in own_names) == other_count for protocol in message.protocols
        ):
            raise Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "")

    def _owned_partitions(self, subscription: Subscription) -> Partitions:
        owned: Partitions = {}
        for name, indexes in subscription.owned.items():
            topic = self.group.cluster.topic(name)
            if topic is not None and indexes:
                owned[topic.topic_id] = indexes
        return owned

    # -- syncing, heartbeats, leaving --------------------------------------------------------------

    def _find_member(self, member_id: str, instance_id: str | None, generation: int) -> Member:
        """Raises Refused."""
        group = self.group
        if instance_id is not None:
            owner_id = group.static_member_ids.get(instance_id)
            if owner_id is None:
                raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, "")
            if owner_id != member_id:
                raise Refused(ErrorCode.FENCED_INSTANCE_ID, "")
        member = group.members.get(member_id)
        if member is None or not member.is_classic:
            raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, "")
        if generation != member.epoch:
            raise Refused(ErrorCode.ILLEGAL_GENERATION, "")
        return member

    def _extend_session(self, member: Member, now_ms: int) -> None:
        classic = member.description.classic
        assert classic is not None
        self.group.deadlines.move(member, now_ms + classic.session_timeout_ms)

    def _expect_join(self, member: Member, now_ms: int) -> None:
        if member.step_kind != JOIN:
            self.group.set_step(member, JOIN, now_ms + member.description.rebalance_timeout_ms)

    def on_sync(self, event: SyncGroup, now_ms: int, replies: list[Action]) -> None:
        try:
            response = self._sync(event, now_ms)
        except Refused as refused:
            response = SyncGroupResponse(error_code=refused.error)
        replies.append(Reply(event.request, response))

    def _sync(self, event: SyncGroup, now_ms: int) -> SyncGroupResponse:
        group, message = self.group, event.message
        member = self._find_member(message.member_id, message.group_instance_id, message.generation_id)
        classic = member.description.classic
        assert classic is not None
        name, metadata = classic.protocols[0]
        if message.protocol_type not in (None, PROTOCOL_TYPE) or message.protocol_name not in (None, name):
            raise Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "")
        if group.epoch > member.epoch and member.state != REVOKING:
            self._expect_join(member, now_ms)
            raise Refused(ErrorCode.REBALANCE_IN_PROGRESS, "")
        group.clear_step(member)
        self._extend_session(member, now_ms)
        assignment = {
            topic: indexes
            for topic_id, indexes in member.assigned.items()
            if (topic := group.cluster.topic_name(topic_id)) is not None
        }
        return SyncGroupResponse(
            protocol_type=PROTOCOL_TYPE,
            protocol_name=name,
            assignment=encode_assignment(decode_subscription(metadata).version, assignment),
        )

    def on_heartbeat(self, event: Heartbeat, now_ms: int, replies: list[Action]) -> None:
        group, message, error = self.group, event.message, 0
        try:
            member = self._find_member(message.member_id, message.group_instance_id, message.generation_id)
            self._extend_session(member, now_ms)
            group.refresh(bump=False)
            target = group.target.get(member.member_id, NOTHING)
            if (
                member.epoch < group.epoch
                or member.state == REVOKING
                or (member.state == WAITING and can_take_more(member, target, group.owners))
            ):
                self._expect_join(member, now_ms)
                error = int(ErrorCode.REBALANCE_IN_PROGRESS)
        except Refused as refused:
            error = refused.error
        replies.append(Reply(event.request, HeartbeatResponse(error_code=error)))

    def on_leave(self, event: LeaveGroup, now_ms: int, replies: list[Action]) -> None:
        leaving: dict[str, Member] = {}
        responses = []
        for identity in event.message.members:
            error = 0
            try:
                member = self._find_leaving(identity)
                error = int(ErrorCode.UNKNOWN_MEMBER_ID) if member.member_id in leaving else 0
                leaving[member.member_id] = member
            except Refused as refused:
                error = refused.error
            responses.append(
                LeaveGroupResponse.MemberResponse(
                    member_id=identity.member_id, group_instance_id=identity.group_instance_id, error_code=error
                )
            )
        if leaving:
            self.group.fence(list(leaving.values()))
        replies.append(Reply(event.request, LeaveGroupResponse(members=responses)))

    def _find_leaving(self, identity: LeaveGroupRequest.MemberIdentity) -> Member:
        """Finds the member that leaves, of either protocol: by member id, or by instance id alone
        if an administrator removes a static member. Raises Refused.
        """
        group = self.group
        if identity.group_instance_id is None:
            member = group.members.get(identity.member_id)
        else:
            owner_id = group.static_member_ids.get(identity.group_instance_id)
            if owner_id is not None and identity.member_id and owner_id != identity.member_id:
                raise Refused(ErrorCode.FENCED_INSTANCE_ID, "")
            member = group.members.get(owner_id) if owner_id is not None else None
        if member is None:
            raise Refused(ErrorCode.UNKNOWN_MEMBER_ID, "")
        return member

    # -- downgrade ---------------------------------------------------------------------------------

    def maybe_downgrade(self) -> None:
        group = self.group
        all_classic = self.member_count and self.member_count == len(group.members)
        if all_classic and group.cluster.settings(group.group_id).may_downgrade:
            group.needs_downgrade = True

    def check(self) -> None:
        classics = [
            member.description.classic
            for member in self.group.members.values()
            if member.description.classic is not None
        ]
        assert len(classics) == self.member_count
        votes: dict[str, int] = {}
        for classic in classics:
            for name, _ in classic.protocols:
                votes[name] = votes.get(name, 0) + 1
        assert votes == self.votes
        assert all(member.epoch != LEFT_STATIC_EPOCH for member in self.group.members.values() if member.is_classic)


def _decode_subscription(message: JoinGroupRequest) -> Subscription:
    """Raises Refused."""
    if sum(len(protocol.metadata) for protocol in message.protocols) > METADATA_BYTES_MAX:
        raise Refused(ErrorCode.INVALID_REQUEST, "")
    try:
        return decode_subscription(message.protocols[0].metadata)
    except ValueError:
        raise Refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "") from None
