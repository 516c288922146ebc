"""What the cores of both group protocols share: which partitions the application has, which action it
carries out, and how long it may go without a poll. Sans-I/O.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

from mqd.client.group.events import Action, Assign, Lost, Partitions, Problem, Revoke, Subscribe
from mqd.client.retrying import backoff_ms

RESOLVE_AGAIN_MS = 500
MAX_POLL_EXCEEDED = -147  # librdkafka's code


class State(enum.Enum):
    IDLE = "not a member, and not joining"
    JOINING = "joins, or is about to"
    LEADING = "leads this generation; waits until the topics of all members are known (classic protocol)"
    SYNCING = "waits for its assignment (classic protocol)"
    MEMBER = "in the group"
    LOST = "out of the group, or about to be; the application releases everything, then the member joins again"
    STALE = "left, because the application did not poll; joins again when it polls"
    LEAVING = "releases everything, then leaves"
    FATAL = "ended by a fatal error"


class MembershipSettings(Protocol):
    @property
    def max_poll_interval_ms(self) -> int: ...


class MembershipCore:
    """`next_ms`: when Tick is due; None: not before another event. A partition is a pair (topic name or
    id, index).
    """

    def __init__(self, settings: MembershipSettings, member_id: str, epoch: int) -> None:
        self.settings = settings
        self.member_id = member_id
        self.epoch = epoch  # or generation
        self.state = State.IDLE
        self.owned: set[Any] = set()
        self.target: set[Any] | None = None
        self.subscription: Subscribe | None = None
        self.request_under_way: int | None = None  # the number of the request
        self.action_under_way: tuple[type, set[Any]] | None = None  # its type and partitions
        self.next_ms: int | None = None
        self._request_number = 0
        self._due_ms = 0  # when the next request is due; classic: JoinGroup, LeaveGroup or, in LEADING, Resolve
        self._failures = 0  # requests without a usable response, one after the other
        self._polled_ms = 0
        self._must_report_left = False

    @property
    def is_member(self) -> bool:
        return self.state is State.MEMBER

    @property
    def has_lost_partitions(self) -> bool:
        """Whether this member's partitions may have other owners by now, so that no offsets can be committed."""
        return self.state in (State.LOST, State.STALE, State.FATAL)

    @property
    def wants_poll(self) -> bool:
        """Whether a Polled event would have an effect."""
        return self.state is State.STALE

    # -- for the subclasses ------------------------------------------------------------------------

    def _begin_joining(self, now_ms: int) -> None:
        self.state, self.target, self.request_under_way = State.JOINING, None, None
        self._due_ms, self._failures = now_ms, 0

    def _to_partitions(self, partitions: set[Any]) -> Partitions:
        """In order, with the names of the topics."""
        raise NotImplementedError

    def _on_polled(self, now_ms: int) -> None:
        self._polled_ms = now_ms
        if self.state is State.STALE and self.action_under_way is None:
            self._begin_joining(now_ms)

    @property
    def _must_poll(self) -> bool:
        """Whether the member leaves if the application does not poll."""
        return self.state in (State.JOINING, State.LEADING, State.SYNCING, State.MEMBER)

    def _poll_deadline_ms(self) -> int:
        return self._polled_ms + self.settings.max_poll_interval_ms

    def _leave_if_not_polled(self, now_ms: int, actions: list[Action]) -> bool:
        """If the application has not polled for too long: becomes STALE and returns True. The caller sends
        the request to leave.
        """
        if not self._must_poll or now_ms < self._poll_deadline_ms():
            return False
        text = (
            f"Application maximum poll interval ({self.settings.max_poll_interval_ms}ms) exceeded: leaving the group;"
            " poll() joins again"
        )
        actions.append(Problem(MAX_POLL_EXCEEDED, text))
        self.state, self.request_under_way = State.STALE, None
        return True

    def _end_action(self) -> type | None:
        """The application has carried out the action under way. Returns its type; None: there was none."""
        if self.action_under_way is None:
            return None
        action_type, partitions = self.action_under_way
        self.action_under_way = None
        if action_type is not Assign:
            self.owned -= partitions
        return action_type

    def _join_after_release(self, now_ms: int) -> None:
        """Joins again if this former member has released its partitions. The application polls: poll()
        has carried out Lost.
        """
        if self.state in (State.LOST, State.STALE) and not self.owned:
            self._begin_joining(now_ms)

    def _lose_membership(self, now_ms: int) -> None:
        """The member is no longer in the group: joins again when the application has released everything."""
        self.target = None
        if self.owned or self.action_under_way is not None:
            self.state = State.LOST
        else:
            self._begin_joining(now_ms)

    def _backoff_ms(self) -> int:
        """How long to wait after another failure."""
        self._failures += 1
        return backoff_ms(self._failures)

    def _start_action(
        self, action_type: type[Assign | Revoke | Lost], partitions: set[Any], actions: list[Action]
    ) -> None:
        self.action_under_way = action_type, partitions
        actions.append(action_type(self._to_partitions(partitions)))

    def check(self) -> None:
        if self.action_under_way is not None:
            assert self.action_under_way[1] <= self.owned, "an action concerns partitions that the application has"
        if self.state is State.IDLE:
            assert not self.owned and self.action_under_way is None, "the application has nothing to release"
        if self.state in (State.LOST, State.STALE):
            assert self.subscription is not None, "the member joins again"
