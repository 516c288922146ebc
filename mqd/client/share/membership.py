"""A member of a share group (KIP-932): its heartbeats and its assignment. Sans-I/O.

The coordinator may assign a partition to several members, so a member applies each assignment
immediately: no member waits for another to release partitions.

Invariants
    G1  one heartbeat is under way at a time
    G2  epoch 0 joins with the subscription; a later heartbeat contains it only if it has changed
    G3  a member that was fenced, has left or does not poll has no assignment
    G4  while the member joins, is in the group or leaves, a heartbeat is due or under way
Sources: KIP-932; Kafka's ShareMembershipManager for the handling of errors.
"""

from __future__ import annotations

import enum

from mqd.client.group.membership import MAX_POLL_EXCEEDED
from mqd.client.retrying import COORDINATOR_RETRIED, backoff_ms
from mqd.client.share.events import Problem, TopicIdPartition
from mqd.protocol.errors import ErrorCode, error_message, error_name
from mqd.protocol.messages import ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse

INTERVAL_FIRST_MS = 5_000  # until the coordinator has sent an interval
JOIN_EPOCH, LEAVE_EPOCH = 0, -1
_FENCED = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID})
# reported to the application and retried: permission may be granted later
_REPORTED = frozenset({ErrorCode.TOPIC_AUTHORIZATION_FAILED})


class State(enum.Enum):
    IDLE = "not a member"
    JOINING = "requests to join"
    MEMBER = "in the group"
    LEAVING = "is leaving"
    STALE = "leaves, or has left, because the application does not poll; joins again when it polls"
    FATAL = "ended by a fatal error"


class Membership:
    """See the module docstring. Methods return a Problem if there is one to report to the application."""

    def __init__(self, group_id: str, member_id: str, rack_id: str | None, max_poll_interval_ms: int) -> None:
        self.member_id = member_id
        self.state = State.IDLE
        self.epoch = JOIN_EPOCH
        self.assigned: frozenset[TopicIdPartition] = frozenset()
        self.is_heartbeat_under_way = False
        self._group_id, self._rack_id, self._poll_interval_ms = group_id, rack_id, max_poll_interval_ms
        self._topics: tuple[str, ...] = ()
        self._sent_topics: tuple[str, ...] | None = None
        self._due_ms: int | None = None
        self._interval_ms = INTERVAL_FIRST_MS
        self._failures = 0
        self._reported_code = 0  # the error that the application knows, until a heartbeat succeeds or the topics change
        self._polled_ms = 0
        self._has_left = True  # or has never joined

    # -- the application ---------------------------------------------------------------------------

    def subscribe(self, topics: tuple[str, ...], now_ms: int) -> None:
        """Joins, or changes the subscription. () leaves."""
        self._topics, self._reported_code = topics, 0
        if self.state is State.FATAL:
            return
        if not topics:
            self._leave(State.LEAVING, now_ms)
        elif self.state is State.MEMBER:
            self._due_ms = now_ms
        elif self.state is not State.JOINING:
            self._polled_ms = now_ms
            self._join(now_ms)

    def on_polled(self, now_ms: int) -> None:
        self._polled_ms = now_ms
        if self.state is State.STALE:
            self._join(now_ms)

    def _join(self, now_ms: int) -> None:
        self.state, self.epoch, self.assigned = State.JOINING, JOIN_EPOCH, frozenset()
        self._sent_topics, self._due_ms, self._failures = None, now_ms, 0

    def _leave(self, state: State, now_ms: int) -> None:
        self.assigned = frozenset()
        if self._has_left and not self.is_heartbeat_under_way:
            self.state, self._due_ms = (State.IDLE if state is State.LEAVING else state), None
        else:
            self.state, self._due_ms, self._failures = state, now_ms, 0

    # -- heartbeats --------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> Problem | None:
        if self.state in (State.MEMBER, State.JOINING) and now_ms >= self._polled_ms + self._poll_interval_ms:
            self._leave(State.STALE, now_ms)
            text = f"the application has not polled for {self._poll_interval_ms} ms: left the group; poll() joins again"
            return Problem(MAX_POLL_EXCEEDED, text)
        return None

    def request(self, now_ms: int) -> ShareGroupHeartbeatRequest | None:
        """Returns the heartbeat that is due; on_response() or on_no_response() must follow."""
        if self.is_heartbeat_under_way or self._due_ms is None or now_ms < self._due_ms:
            return None
        self.is_heartbeat_under_way = True
        message = ShareGroupHeartbeatRequest(group_id=self._group_id, member_id=self.member_id)
        if self.state in (State.LEAVING, State.STALE):
            message.member_epoch = LEAVE_EPOCH
            return message
        message.member_epoch, message.rack_id = self.epoch, self._rack_id if self.epoch == JOIN_EPOCH else None
        if self._sent_topics != self._topics or self.epoch == JOIN_EPOCH:
            message.subscribed_topic_names, self._sent_topics = list(self._topics), self._topics
        self._has_left = False
        return message

    def on_no_response(self, now_ms: int) -> None:
        self.is_heartbeat_under_way = False
        self._retry_later(now_ms)

    def _retry_later(self, now_ms: int) -> None:
        """Sends all fields again later, because the coordinator may not have received the last request."""
        self._sent_topics = None
        self._failures += 1
        self._due_ms = now_ms + backoff_ms(self._failures)

    def on_response(self, response: ShareGroupHeartbeatResponse, epoch_sent: int, now_ms: int) -> Problem | None:
        self.is_heartbeat_under_way = False
        code = response.error_code
        if epoch_sent == LEAVE_EPOCH:
            if code in COORDINATOR_RETRIED and self.state in (State.LEAVING, State.STALE):
                self._retry_later(now_ms)
            elif self.state in (State.LEAVING, State.STALE):
                self._has_left, self._due_ms = True, None
                self.state = State.IDLE if self.state is State.LEAVING else State.STALE
            return None
        if self.state not in (State.JOINING, State.MEMBER):
            return None
        if code:
            return self._on_error(code, response.error_message, now_ms)
        if epoch_sent != self.epoch:
            return None  # the member has started to rejoin in the meantime
        self.state, self.epoch, self._failures, self._reported_code = State.MEMBER, response.member_epoch, 0, 0
        self._interval_ms = max(1, response.heartbeat_interval_ms)
        self._due_ms = now_ms if self._sent_topics != self._topics else now_ms + self._interval_ms
        if response.assignment is not None:
            self.assigned = frozenset(
                (topic.topic_id, index) for topic in response.assignment.topic_partitions for index in topic.partitions
            )
        return None

    def _on_error(self, code: int, text: str | None, now_ms: int) -> Problem | None:
        if code in COORDINATOR_RETRIED:
            self._retry_later(now_ms)
            return None
        if code in _FENCED:
            self._join(now_ms)
            return None
        problem = f"{error_name(code)}: {text or error_message(code)}"
        if code in _REPORTED:
            self._retry_later(now_ms)
            self._due_ms = now_ms + self._interval_ms
            previous, self._reported_code = self._reported_code, code
            return Problem(code, problem) if code != previous else None
        self.state, self.assigned, self._due_ms = State.FATAL, frozenset(), None
        return Problem(code, problem, is_fatal=True)

    def give_up(self) -> None:
        self.state, self.assigned, self._due_ms = State.FATAL, frozenset(), None

    @property
    def is_out(self) -> bool:
        """Whether the coordinator needs no further heartbeat."""
        return self.state in (State.IDLE, State.FATAL) and not self.is_heartbeat_under_way

    @property
    def heartbeat_due_ms(self) -> int | None:
        """The time of the next heartbeat (G4); None: not before another event."""
        return None if self.is_heartbeat_under_way else self._due_ms

    @property
    def poll_deadline_ms(self) -> int | None:
        """The time of the next tick()."""
        is_in = self.state in (State.MEMBER, State.JOINING)
        return self._polled_ms + self._poll_interval_ms if is_in else None

    def check(self) -> None:
        if self.state not in (State.MEMBER,):
            assert not self.assigned, "G3"
        if self.state in (State.JOINING, State.MEMBER, State.LEAVING) and not self.is_heartbeat_under_way:
            assert self._due_ms is not None, "G4"
