"""A member of a consumer group with the KIP-848 protocol, whose only request is
ConsumerGroupHeartbeat. Sans-I/O.

The coordinator sends the member's target assignment, and the member moves towards it: it first
revokes partitions that are not in the target (the application is notified, and commits), then takes
the new ones, and reports what it owns. Only then may others get the revoked partitions.

Invariants (check())
    M1  `owned`, the partitions that the application has, grows when Assign is sent, and shrinks when
        the application has carried out Revoke or Lost
    M2  at most one request is under way, and at most one of Revoke, Assign and Lost
    M3  a request with epoch 0 reports no owned partitions, and the member has none
    M4  a former member loses all its partitions: Lost or Revoke is under way or done
    M5  between a report of the owned partitions and its response no partition is added: the
        coordinator may have given a partition that is missing from the report to another member
    M6  next_ms is never later than the time when the core has something to do
    M7  a member that leaves stays in the group, by heartbeats, while the application carries out the
        last Revoke, for at most the poll interval: until then its commits are valid
Bounds: owned and target are bounded by the coordinator's assignments; responses to requests that
are not under way are dropped.

Sources: KIP-848, KIP-1082 (the client generates its member id); Kafka's consumer for the handling of
errors. Difference: UNRELEASED_INSTANCE_ID is retried for RELEASE_WAIT_MS, since otherwise a static
member that was killed and restarted would have to be restarted again.
"""

from __future__ import annotations

import msgspec

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
from mqd.protocol.messages import ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse

API_KEY = 68
INTERVAL_FIRST_MS = 5_000  # until the coordinator has sent an interval
RELEASE_WAIT_MS = 60_000
LEAVE_EPOCH, LEAVE_STATIC_EPOCH = -1, -2

_TopicPartitions = ConsumerGroupHeartbeatRequest.TopicPartitions
_FENCED = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID})
# reported to the application and retried: permission may be granted later
_REPORTED = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED})

PartitionSet = set[tuple[bytes, int]]


class Settings(msgspec.Struct, frozen=True):
    group_id: str
    member_id: str
    instance_id: str | None = None
    rack_id: str | None = None
    server_assignor: str | None = None
    max_poll_interval_ms: int = 300_000


class ConsumerProtocolCore(MembershipCore):
    """`handle` is the only mutator."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, settings.member_id, 0)
        self.settings: Settings
        self.names: dict[bytes, str] = {}  # topic id -> name
        self._sent_subscription: Subscribe | None = None
        self._must_report_all = True
        self._must_report_owned = False
        self._reported_owned: PartitionSet = set()
        self._is_report_pending = False  # M5: a report of `owned` has had no response yet
        self._interval_ms = INTERVAL_FIRST_MS
        self._resolve_due_ms: int | None = None
        self._resolve_count = 0
        self._unreleased_since_ms: int | None = None
        self._was_member = False
        self._leave_request_number = 0
        self._leave_epoch = LEAVE_EPOCH if settings.instance_id is None else LEAVE_STATIC_EPOCH

    # -- state -------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """generation_id_or_member_epoch of a commit; -1: not a member."""
        is_valid = self.state is State.MEMBER or (
            self.state is State.LEAVING and self._was_member and not self._has_sent_leave
        )
        return self.epoch if is_valid and self.epoch > 0 else -1

    def timeout_s(self, _send: Send) -> float | None:
        """How long a request may take; None: the default."""
        return None

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        match event:
            case ResponseReceived(number, message):
                self._on_response(number, message, now_ms, actions)
            case ResponseMissing(number):
                self._on_response_missing(number, now_ms)
            case Done():
                self._on_done(now_ms)
            case Subscribe():
                self._on_subscribe(event, now_ms, actions)
            case Leave():
                self._on_leave(actions)
            case TopicsKnown(names):
                self.names.update(names)
                self._resolve_due_ms = None if not self._unknown_topics() else now_ms + RESOLVE_AGAIN_MS
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
        if self.state is State.IDLE:
            self._polled_ms = now_ms
            self._begin_joining(now_ms)
        elif self.state is State.LEAVING and self.action_under_way is None:
            # a leave request under way is handled before the join request, which uses the same
            # connection
            self._finish_leaving(now_ms, actions)

    def _begin_joining(self, now_ms: int) -> None:
        super()._begin_joining(now_ms)
        self.epoch = 0
        self._must_report_all, self._must_report_owned, self._reported_owned = True, False, set()

    def _on_leave(self, actions: list[Action]) -> None:
        self.subscription = None
        if self.state in (State.IDLE, State.STALE, State.FATAL) and self.action_under_way is None:
            if self.state is not State.FATAL:
                self.state, self.epoch, self.target = State.IDLE, 0, None  # the last target is no longer valid
            actions.append(Left())
        elif self.state is State.FATAL:
            self._must_report_left = True
        elif self.state is not State.LEAVING:
            self._was_member = self.state in (State.MEMBER, State.JOINING)
            self.state = State.LEAVING
            self.target, self._failures = set(), 0

    def _on_tick(self, is_polling: bool, now_ms: int, actions: list[Action]) -> None:
        if is_polling:
            self._on_polled(now_ms)
        if self._leave_if_not_polled(now_ms, actions):
            self._send(self._empty_heartbeat(self._leave_epoch), actions)

    def _on_done(self, now_ms: int) -> None:
        if self._end_action() is not None:
            self._must_report_owned = True
            self._join_after_release(now_ms)

    # -- responses ---------------------------------------------------------------------------------

    def _on_response_missing(self, number: int, now_ms: int) -> None:
        if number == self.request_under_way:
            self.request_under_way = None
            self._retry_later(now_ms)

    def _retry_later(self, now_ms: int) -> None:
        """Sends all fields again later, because it is unknown what the coordinator has received."""
        self._must_report_all = True
        self._due_ms = now_ms + self._backoff_ms()

    def _on_response(
        self, number: int, message: ConsumerGroupHeartbeatResponse, now_ms: int, actions: list[Action]
    ) -> None:
        if number != self.request_under_way:
            return
        self.request_under_way = None
        if self.state is State.LEAVING and number != self._leave_request_number:
            self._on_heartbeat_while_leaving(message, now_ms)
        elif self.state is State.LEAVING:
            if message.error_code in COORDINATOR_RETRIED:
                self._retry_later(now_ms)
                return
            self._finish_leaving(now_ms, actions)
        elif self.state in (State.JOINING, State.MEMBER):
            if message.error_code:
                self._on_error(message.error_code, message.error_message, now_ms, actions)
            else:
                self._on_success(message, now_ms)

    def _on_heartbeat_while_leaving(self, message: ConsumerGroupHeartbeatResponse, now_ms: int) -> None:
        if message.error_code == ErrorCode.UNKNOWN_MEMBER_ID:
            self._was_member = False
        elif message.error_code == ErrorCode.FENCED_MEMBER_EPOCH:
            self.epoch = 0
        elif message.error_code:
            self._retry_later(now_ms)
        else:
            self.epoch, self._failures = message.member_epoch, 0
            self._due_ms = now_ms + self._interval_ms

    def _finish_leaving(self, now_ms: int, actions: list[Action]) -> None:
        self.state, self.epoch, self.target = State.IDLE, 0, None
        actions.append(Left())
        if self.subscription is not None:
            self._begin_joining(now_ms)

    def _on_success(self, message: ConsumerGroupHeartbeatResponse, now_ms: int) -> None:
        self.state = State.MEMBER
        self.epoch = message.member_epoch
        self._failures, self._unreleased_since_ms, self._is_report_pending = 0, None, False
        self._interval_ms = max(1, message.heartbeat_interval_ms)
        self._due_ms = now_ms + self._interval_ms
        if message.assignment is not None:
            self.target = {
                (topic.topic_id, index) for topic in message.assignment.topic_partitions for index in topic.partitions
            }
            if self._unknown_topics():
                self._resolve_due_ms, self._resolve_count = now_ms, 0
            elif self.target != self._reported_owned:
                # even if `owned` equals the target: the coordinator expects a report
                self._must_report_owned = True

    def _on_error(self, code: int, text: str | None, now_ms: int, actions: list[Action]) -> None:
        if code in COORDINATOR_RETRIED:
            self._retry_later(now_ms)
        elif code in _FENCED:
            self.epoch = 0
            self._lose_membership(now_ms)
        elif code == ErrorCode.UNRELEASED_INSTANCE_ID and self._may_wait_for_release(now_ms):
            self._retry_later(now_ms)
        elif code == ErrorCode.INVALID_REGULAR_EXPRESSION:
            actions.append(Problem(code, text or error_message(code)))
            self._sent_subscription = self.subscription  # not sent again until the subscription changes
            self._due_ms = now_ms + self._interval_ms
            if self.state is State.JOINING:
                self.state, self.subscription = State.IDLE, None
        elif code in _REPORTED:
            self._retry_later(now_ms)
            self._due_ms = now_ms + self._interval_ms
            actions.append(Problem(code, f"{error_name(code)}: {text or error_message(code)}"))
        else:
            self.state = State.FATAL
            actions.append(Problem(code, f"{error_name(code)}: {text or error_message(code)}", is_fatal=True))

    def _may_wait_for_release(self, now_ms: int) -> bool:
        if self._unreleased_since_ms is None:
            self._unreleased_since_ms = now_ms
        return now_ms < self._unreleased_since_ms + RELEASE_WAIT_MS

    # -- moving towards the target -----------------------------------------------------------------

    def _unknown_topics(self) -> set[bytes]:
        return {topic_id for topic_id, _ in self.target or () if topic_id not in self.names}

    def _advance(self, now_ms: int, actions: list[Action]) -> None:
        if self._resolve_due_ms is not None and now_ms >= self._resolve_due_ms:
            self._resolve_due_ms = now_ms + RESOLVE_AGAIN_MS
            self._resolve_count += 1
            if self._resolve_count > 1:
                self._must_report_owned = True  # other members may wait for revoked partitions
            actions.append(Resolve(tuple(sorted(self._unknown_topics()))))
        if self.action_under_way is None:
            self._reconcile(now_ms, actions)
        self._maybe_send(now_ms, actions)

    def _reconcile(self, now_ms: int, actions: list[Action]) -> None:
        if self.has_lost_partitions:
            if self.owned:
                self._start_action(Lost, set(self.owned), actions)
        elif self.target is not None and self.state in (State.MEMBER, State.LEAVING):
            revoked = self.owned - self.target
            added = (
                set()
                if self._is_report_pending
                else {partition for partition in self.target - self.owned if partition[0] in self.names}
            )
            if revoked:
                self._start_action(Revoke, revoked, actions)
            elif added:
                self.owned |= added
                self._start_action(Assign, added, actions)
        if self.state is State.LEAVING and self.action_under_way is None and not self.owned and not self._was_member:
            self._finish_leaving(now_ms, actions)
        elif self.state is State.FATAL and self.action_under_way is None and self._must_report_left:
            self._must_report_left = False
            actions.append(Left())

    def _to_partitions(self, partitions: PartitionSet) -> Partitions:
        return tuple(sorted(Partition(self.names[topic_id], index, topic_id) for topic_id, index in partitions))

    # -- requests ----------------------------------------------------------------------------------

    def _maybe_send(self, now_ms: int, actions: list[Action]) -> None:
        if self.state is State.LEAVING:
            if (
                self.action_under_way is None
                and not self.owned
                and not self._has_sent_leave
                and now_ms >= (self._due_ms if self._failures else 0)
            ):
                self.request_under_way = None
                self._leave_request_number = self._send(self._empty_heartbeat(self._leave_epoch), actions)
            elif self._stays_until_released and self.request_under_way is None and now_ms >= self._due_ms:
                self._send(self._empty_heartbeat(self.epoch), actions)
                self._due_ms = now_ms + self._interval_ms
            return
        if self.request_under_way is not None or self.state not in (State.JOINING, State.MEMBER):
            return
        is_stable = self.action_under_way is None  # no action is about to change `owned`
        is_urgent = not self._failures and (
            (self._must_report_owned and is_stable)
            or self.subscription != self._sent_subscription
            or (self.state is State.JOINING and self._must_report_all)
        )
        if is_urgent or now_ms >= self._due_ms:
            self._send(self._heartbeat(is_stable), actions)
            self._due_ms = now_ms + self._interval_ms

    @property
    def _has_sent_leave(self) -> bool:
        return self.request_under_way is not None and self.request_under_way == self._leave_request_number

    @property
    def _stays_until_released(self) -> bool:
        """Whether this leaving member still sends heartbeats (M7)."""
        return (
            self.state is State.LEAVING
            and self.action_under_way is not None
            and self._was_member
            and self.epoch > 0
            and self._due_ms < self._poll_deadline_ms()
        )

    def _send(self, message: ConsumerGroupHeartbeatRequest, actions: list[Action]) -> int:
        self._request_number += 1
        self.request_under_way = self._request_number
        actions.append(Send(self._request_number, API_KEY, message))
        return self._request_number

    def _empty_heartbeat(self, epoch: int) -> ConsumerGroupHeartbeatRequest:
        """A heartbeat that reports no change."""
        return ConsumerGroupHeartbeatRequest(
            group_id=self.settings.group_id,
            member_id=self.member_id,
            member_epoch=epoch,
            instance_id=self.settings.instance_id,
        )

    def _heartbeat(self, is_stable: bool) -> ConsumerGroupHeartbeatRequest:
        is_full, subscription = self._must_report_all, self.subscription
        assert subscription is not None
        message = self._empty_heartbeat(self.epoch)
        if is_full:
            message.rack_id, message.server_assignor = self.settings.rack_id, self.settings.server_assignor
            message.rebalance_timeout_ms = self.settings.max_poll_interval_ms
        if is_full or subscription != self._sent_subscription:
            message.subscribed_topic_names, message.subscribed_topic_regex = (
                list(subscription.topics),
                subscription.regex or "",
            )
        if is_full or (self._must_report_owned and is_stable):
            message.topic_partitions = self._owned_partitions()
            self._reported_owned, self._is_report_pending = set(self.owned), True
            self._must_report_owned = self._must_report_owned and not is_stable
        self._sent_subscription, self._must_report_all = subscription, False
        return message

    def _owned_partitions(self) -> list[_TopicPartitions]:
        by_topic: dict[bytes, list[int]] = {}
        for topic_id, index in sorted(self.owned):
            by_topic.setdefault(topic_id, []).append(index)
        return [_TopicPartitions(topic_id=topic_id, partitions=indexes) for topic_id, indexes in by_topic.items()]

    # -- time --------------------------------------------------------------------------------------

    def _set_next_ms(self) -> None:
        times = [self._resolve_due_ms] if self._resolve_due_ms is not None else []
        must_leave = self.state is State.LEAVING and self.action_under_way is None and not self._has_sent_leave
        if self._must_poll:
            times.append(self._poll_deadline_ms())
            if self.request_under_way is None:
                times.append(self._due_ms)
        elif must_leave or (self._stays_until_released and self.request_under_way is None):
            times.append(self._due_ms)
        self.next_ms = min(times) if times else None

    def check(self) -> None:
        super().check()
        if self.state is State.JOINING:
            assert self.epoch == 0 and not self.owned and self.action_under_way is None, "M3"
        if self.state in (State.LOST, State.FATAL, State.STALE):
            assert not self.owned or self.action_under_way is not None, "M4"
        if self.state in (State.JOINING, State.MEMBER) and self.request_under_way is None:
            assert self.next_ms is not None, "M6"
        if self._stays_until_released and self.request_under_way is None:
            assert self.next_ms is not None and self.next_ms <= self._due_ms, "M7"
