"""A member of a consumer group with the classic protocol: JoinGroup, SyncGroup, Heartbeat,
LeaveGroup; in each generation the leader assigns the partitions to the members. Sans-I/O.

Used when the broker does not admit a member of the newer protocol to a group
(group.consumer.migration.policy). Same events and actions as consumer_protocol.py.

Invariants (check())
    C1  `owned`, the partitions that the application has, grows when Assign is sent, and shrinks when
        the application has carried out Revoke or Lost
    C2  at most one request is under way, and at most one of Revoke, Assign and Lost
    C3  eager: a member that joins owns no partitions. Cooperative: a member that joins reports its
        partitions, and joins again when it has released some
    C4  next_ms is never later than the time when the core has something to do
    C5  a member sends heartbeats only with a valid generation

Sources: KIP-62, KIP-345 (static members), KIP-394 (member ids), KIP-429 (cooperative), KIP-814
(skip_assignment: a static leader that rejoins only compares partition counts).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from mqd.client.group.assignors import (
    ASSIGNORS,
    COOPERATIVE,
    Subscription,
    TopicPartition,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
)
from mqd.client.group.events import (
    Action,
    Assign,
    Done,
    Event,
    Leave,
    Left,
    Lost,
    Partition,
    Partitions,
    Polled,
    Problem,
    Resolve,
    ResponseMissing,
    ResponseReceived,
    Revoke,
    Send,
    Subscribe,
    Tick,
    TopicsKnown,
)
from mqd.client.group.membership import RESOLVE_AGAIN_MS, MembershipCore, State
from mqd.client.retrying import COORDINATOR_RETRIED
from mqd.protocol.errors import ErrorCode, error_message, error_name
from mqd.protocol.messages import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest

JOIN, HEARTBEAT, LEAVE, SYNC = 11, 12, 13, 14
JOIN_VERSION_MAX = 9
PROTOCOL_TYPE = "consumer"


class ClassicSettings(msgspec.Struct, frozen=True):
    group_id: str
    instance_id: str | None = None
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    max_poll_interval_ms: int = 300_000
    assignors: tuple[str, ...] = ("range", "roundrobin")
    metadata_interval_ms: int = 300_000


class ClassicCore(MembershipCore):
    """`handle` is the only mutator. `epoch` is the generation."""

    def __init__(self, settings: ClassicSettings) -> None:
        super().__init__(settings, "", -1)
        self.settings: ClassicSettings
        self.is_cooperative = settings.assignors[0] == COOPERATIVE
        self.counts: dict[str, int] = {}  # topic -> number of partitions
        self._sent_type: type | None = None
        self._must_join = False
        self._members: dict[str, Subscription] = {}
        self._protocol: str | None = None
        self._skips_assignment = False
        # the partition counts that this member, as the leader, knew when it last sent SyncGroup
        self._assigned_counts: dict[str, int] | None = None
        self._joined_topics: frozenset[str] = frozenset()
        self._heartbeat_due_ms = 0
        self._refresh_due_ms: int | None = None

    @property
    def generation(self) -> int:
        """generation_id of a commit; -1: not a member."""
        return (
            self.epoch
            if self.member_id
            and self.state in (State.MEMBER, State.JOINING, State.LEADING, State.SYNCING, State.LEAVING)
            else -1
        )

    def timeout_s(self, send: Send) -> float | None:
        """How long a request may take; None: the default. The response to a join or sync comes when all
        members have joined, or after the rebalance timeout.
        """
        return (self.settings.max_poll_interval_ms + 5_000) / 1000 if send.api_key in (JOIN, SYNC) else None

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        match event:
            case ResponseReceived(number, message):
                if number == self.request_under_way:
                    self.request_under_way = None
                    self._on_response(message, now_ms, actions)
            case ResponseMissing(number):
                if number == self.request_under_way:
                    self.request_under_way = None
                    if self.state in (State.LEADING, State.SYNCING):
                        self._rejoin(now_ms)
                    self._retry_later(now_ms)
            case Done():
                self._on_done(now_ms)
            case Subscribe():
                self._on_subscribe(event, now_ms, actions)
            case Leave():
                self._on_leave(actions)
            case TopicsKnown(_, counts):
                self._on_topics(dict(counts), now_ms, actions)
            case Polled():
                self._on_polled(now_ms)
            case Tick(is_polling):
                self._on_tick(is_polling, now_ms, actions)
        self._advance(now_ms, actions)
        self._set_next_ms()
        return actions

    def _on_subscribe(self, event: Subscribe, now_ms: int, actions: list[Action]) -> None:
        if self.state is State.FATAL:
            return
        self.subscription = event
        actions.append(Resolve((), None if event.regex is not None else event.topics))
        self._refresh_due_ms = now_ms + self.settings.metadata_interval_ms
        if self.state is State.IDLE:
            self._polled_ms = now_ms
            self._begin_joining(now_ms)
        elif self.state in (State.MEMBER, State.SYNCING, State.LEADING):
            self._rejoin(now_ms)

    def _begin_joining(self, now_ms: int) -> None:
        super()._begin_joining(now_ms)
        self.epoch, self._must_join = -1, True

    def _rejoin(self, now_ms: int) -> None:
        """Joins again with the same member id; eager members release all partitions first."""
        self.state, self._must_join, self.target, self._due_ms = State.JOINING, True, None, now_ms

    def _on_leave(self, actions: list[Action]) -> None:
        self.subscription, self._refresh_due_ms = None, None
        if self.state in (State.IDLE, State.STALE, State.FATAL) and self.action_under_way is None:
            self.state = self.state if self.state is State.FATAL else State.IDLE
            actions.append(Left())
        elif self.state is State.FATAL:
            self._must_report_left = True
        elif self.state is not State.LEAVING:
            self.state, self.target, self.request_under_way, self._failures = State.LEAVING, set(), None, 0

    def _on_tick(self, is_polling: bool, now_ms: int, actions: list[Action]) -> None:
        if is_polling:
            self._on_polled(now_ms)
        if self._leave_if_not_polled(now_ms, actions):
            if self.member_id and self.settings.instance_id is None:
                self._send(LEAVE, self._leave_request(), actions)
            self.request_under_way, self.member_id = None, ""
        if self._refresh_due_ms is not None and now_ms >= self._refresh_due_ms and self.subscription is not None:
            self._refresh_due_ms = now_ms + self.settings.metadata_interval_ms
            actions.append(Resolve((), None if self.subscription.regex is not None else self.subscription.topics))

    def _on_done(self, now_ms: int) -> None:
        action_type = self._end_action()
        if action_type is Revoke and self.is_cooperative and self.state is State.MEMBER:
            self._must_join = True  # other members get the released partitions in the next generation
        if action_type is not None:
            self._join_after_release(now_ms)

    def _on_topics(self, counts: dict[str, int], now_ms: int, actions: list[Action]) -> None:
        self.counts = counts
        if self.state is State.LEADING:
            # otherwise these counts are from a response to an earlier request, or the request has failed
            if counts.keys() >= self._topics_of_members:
                self._assign(actions)
        elif self.state is State.MEMBER and self._is_outdated:
            self._rejoin(now_ms)

    @property
    def _is_outdated(self) -> bool:
        """Whether the subscription or the assignment of this generation would be different now."""
        return self._subscribed_topics() != self._joined_topics or any(
            self.counts.get(topic, 0) != count for topic, count in (self._assigned_counts or {}).items()
        )

    def _subscribed_topics(self) -> frozenset[str]:
        subscription = self.subscription
        if subscription is None:
            return frozenset()
        matched = set(subscription.topics)
        if subscription.regex is not None:
            try:
                matches = re.compile(subscription.regex).fullmatch
            except re.error:
                return frozenset(matched)
            matched.update(topic for topic, count in self.counts.items() if count and matches(topic))
        return frozenset(matched)

    @property
    def _topics_of_members(self) -> set[str]:
        return {topic for subscription in self._members.values() for topic in subscription.topics}

    # -- responses ---------------------------------------------------------------------------------

    def _retry_later(self, now_ms: int) -> None:
        self._due_ms = self._heartbeat_due_ms = now_ms + self._backoff_ms()
        self._must_join = self._must_join or self.state is State.JOINING

    def _on_response(self, message: Any, now_ms: int, actions: list[Action]) -> None:
        code, sent = message.error_code, self._sent_type
        if self.state is State.LEAVING and sent is HeartbeatRequest:
            self._on_heartbeat_while_leaving(code, now_ms)
        elif self.state is State.LEAVING:
            self._finish_leaving(now_ms, actions)
        elif self.state not in (State.JOINING, State.SYNCING, State.MEMBER):
            return
        elif code:
            self._on_error(code, message, now_ms, actions)
        elif sent is JoinGroupRequest:
            self._on_joined(message, now_ms, actions)
        elif sent is SyncGroupRequest:
            self._failures, self.state = 0, State.MEMBER
            self._heartbeat_due_ms = now_ms + self.settings.heartbeat_interval_ms
            # the subscription or the topics may have changed since JoinGroup was sent
            self._must_join = self._must_join or self._is_outdated
            try:
                self.target = set(decode_assignment(message.assignment))
            except ValueError as error:
                self._fail(
                    int(ErrorCode.INCONSISTENT_GROUP_PROTOCOL),
                    f"the group's leader sent an assignment that cannot be read: {error}",
                    actions,
                )
        elif sent is HeartbeatRequest:
            self._failures, self._heartbeat_due_ms = 0, now_ms + self.settings.heartbeat_interval_ms

    def _on_heartbeat_while_leaving(self, code: int, now_ms: int) -> None:
        """A rebalance is no reason to join: the other members wait for this one to leave."""
        if code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID):
            self.member_id = ""
        elif code == ErrorCode.ILLEGAL_GENERATION:
            self.epoch = -1
        elif code and code != ErrorCode.REBALANCE_IN_PROGRESS:
            self._retry_later(now_ms)
        else:
            self._failures, self._heartbeat_due_ms = 0, now_ms + self.settings.heartbeat_interval_ms

    def _on_error(self, code: int, message: Any, now_ms: int, actions: list[Action]) -> None:
        if code in COORDINATOR_RETRIED:
            if self.state is State.SYNCING:
                self._rejoin(now_ms)
            self._retry_later(now_ms)
        elif code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id, self._must_join, self._due_ms = message.member_id, True, now_ms
        elif code == ErrorCode.REBALANCE_IN_PROGRESS:
            self._rejoin(now_ms)
        elif code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION):
            if code == ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            self.epoch, self._must_join = -1, False
            self._lose_membership(now_ms)
        else:
            self._fail(code, f"{error_name(code)}: {error_message(code)}", actions)

    def _fail(self, code: int, text: str, actions: list[Action]) -> None:
        self.state = State.FATAL
        actions.append(Problem(code, text, is_fatal=True))

    def _on_joined(self, message: Any, now_ms: int, actions: list[Action]) -> None:
        self._failures = 0
        self.member_id, self.epoch, self._protocol = message.member_id, message.generation_id, message.protocol_name
        self._assigned_counts = None
        if message.leader != message.member_id:
            self._sync([], actions)
            return
        try:
            self._members = {member.member_id: decode_subscription(member.metadata) for member in message.members}
        except ValueError as error:
            self._fail(
                int(ErrorCode.INCONSISTENT_GROUP_PROTOCOL), f"a member's subscription cannot be read: {error}", actions
            )
            return
        self.state, self._due_ms, self._skips_assignment = State.LEADING, now_ms, message.skip_assignment

    def _assign(self, actions: list[Action]) -> None:
        self._assigned_counts = {topic: self.counts[topic] for topic in self._topics_of_members}
        if self._skips_assignment:
            self._sync([], actions)
            return
        partition_counts = {topic: count for topic, count in self._assigned_counts.items() if count}
        assignment = ASSIGNORS[self._protocol or ""](self._members, partition_counts)
        self._sync(
            [
                SyncGroupRequest.Assignment(member_id=member_id, assignment=encode_assignment(partitions))
                for member_id, partitions in assignment.items()
            ],
            actions,
        )

    def _sync(self, assignments: list[Any], actions: list[Action]) -> None:
        self.state = State.SYNCING
        request = SyncGroupRequest(
            group_id=self.settings.group_id,
            generation_id=self.epoch,
            member_id=self.member_id,
            group_instance_id=self.settings.instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocol_name=self._protocol,
            assignments=assignments,
        )
        self._send(SYNC, request, actions)

    def _finish_leaving(self, now_ms: int, actions: list[Action]) -> None:
        self.state, self.epoch, self.target, self.member_id = State.IDLE, -1, None, ""
        actions.append(Left())
        if self.subscription is not None:
            self._begin_joining(now_ms)

    # -- actions -----------------------------------------------------------------------------------

    def _advance(self, now_ms: int, actions: list[Action]) -> None:
        if self.action_under_way is None:
            self._reconcile(now_ms, actions)
        if self.request_under_way is not None:
            return
        if self._sends_heartbeats:
            if now_ms >= self._heartbeat_due_ms:
                request = HeartbeatRequest(
                    group_id=self.settings.group_id,
                    generation_id=self.epoch,
                    member_id=self.member_id,
                    group_instance_id=self.settings.instance_id,
                )
                self._send(HEARTBEAT, request, actions)
                self._heartbeat_due_ms = now_ms + self.settings.heartbeat_interval_ms
        elif self.action_under_way is not None:
            return
        elif self.state is State.LEAVING and not self.owned and now_ms >= (self._due_ms if self._failures else 0):
            if self.member_id and self.settings.instance_id is None:
                self._send(LEAVE, self._leave_request(), actions)
            else:
                self._finish_leaving(now_ms, actions)
        elif (
            self.state is State.JOINING
            and self._must_join
            and now_ms >= self._due_ms
            and (self.is_cooperative or not self.owned)
        ):
            self._send(JOIN, self._join_request(), actions)
        elif self.state is State.LEADING and now_ms >= self._due_ms:
            self._due_ms = now_ms + RESOLVE_AGAIN_MS
            # if the members subscribe to no topic: all topics, because a lookup of none might send no request
            actions.append(Resolve((), tuple(sorted(self._topics_of_members)) or None))

    @property
    def _sends_heartbeats(self) -> bool:
        """Whether this member sends heartbeats. A joining or leaving member does so while the application
        carries out Revoke or Assign, because that may take longer than the session timeout; a leaving
        member does so for at most the poll interval.
        """
        if self.action_under_way is not None and self.state is State.LEAVING:
            return bool(self.member_id) and self.epoch >= 0 and self._heartbeat_due_ms < self._poll_deadline_ms()
        return self.state is State.MEMBER or (self.state is State.JOINING and self.action_under_way is not None)

    def _reconcile(self, now_ms: int, actions: list[Action]) -> None:
        if self.has_lost_partitions:
            if self.owned:
                self._start_action(Lost, set(self.owned), actions)
            elif self.state is State.FATAL and self._must_report_left:
                self._must_report_left = False
                actions.append(Left())
        elif self.state is State.JOINING and not self.is_cooperative:
            if self.owned:
                self._start_action(Revoke, set(self.owned), actions)
        elif self.target is not None and self.state in (State.MEMBER, State.LEAVING):
            revoked, added = self.owned - self.target, self.target - self.owned
            if revoked:
                self._start_action(Revoke, revoked, actions)
            elif added:
                self.owned |= added
                self._start_action(Assign, added, actions)
            elif self._must_join and self.state is State.MEMBER:
                self._rejoin(now_ms)
                self.request_under_way = None

    def _to_partitions(self, partitions: set[TopicPartition]) -> Partitions:
        return tuple(sorted(Partition(topic, index) for topic, index in partitions))

    # -- requests ----------------------------------------------------------------------------------

    def _send(self, api_key: int, message: Any, actions: list[Action]) -> None:
        self._request_number += 1
        self.request_under_way, self._sent_type = self._request_number, type(message)
        actions.append(Send(self._request_number, api_key, message, JOIN_VERSION_MAX))

    def _join_request(self) -> JoinGroupRequest:
        self._must_join = False
        self._joined_topics = self._subscribed_topics()
        metadata = encode_subscription(Subscription(self._joined_topics, frozenset(self.owned)))
        return JoinGroupRequest(
            group_id=self.settings.group_id,
            session_timeout_ms=self.settings.session_timeout_ms,
            rebalance_timeout_ms=self.settings.max_poll_interval_ms,
            member_id=self.member_id,
            group_instance_id=self.settings.instance_id,
            protocol_type=PROTOCOL_TYPE,
            protocols=[JoinGroupRequest.Protocol(name=name, metadata=metadata) for name in self.settings.assignors],
        )

    def _leave_request(self) -> LeaveGroupRequest:
        identity = LeaveGroupRequest.MemberIdentity(
            member_id=self.member_id, group_instance_id=self.settings.instance_id
        )
        return LeaveGroupRequest(group_id=self.settings.group_id, member_id=self.member_id, members=[identity])

    # -- time --------------------------------------------------------------------------------------

    def _set_next_ms(self) -> None:
        times = [self._refresh_due_ms] if self._refresh_due_ms is not None else []
        if self._must_poll:
            times.append(self._poll_deadline_ms())
        if self.request_under_way is None:
            if self._sends_heartbeats:
                times.append(self._heartbeat_due_ms)
            elif self.action_under_way is None and (
                self.state in (State.LEAVING, State.LEADING) or (self.state is State.JOINING and self._must_join)
            ):
                times.append(self._due_ms)
        self.next_ms = min(times) if times else None

    def check(self) -> None:
        super().check()
        if self._sent_type is JoinGroupRequest and self.request_under_way is not None and not self.is_cooperative:
            assert not self.owned, "C3"
        if self._sends_heartbeats:
            assert self.epoch >= 0 and self.member_id, "C5"
            if self.request_under_way is None:
                assert self.next_ms is not None and self.next_ms <= self._heartbeat_due_ms, "C4"
