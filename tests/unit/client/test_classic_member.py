"""The client's membership core of the classic protocol: what it sends, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mqd.client.group.assignors import Subscription, decode_assignment, encode_assignment, encode_subscription
from mqd.client.group.classic import ClassicCore, ClassicSettings
from mqd.client.group.events import Assign, Done, Partition, Resolve, Revoke, Send, Subscribe, Tick, TopicsKnown
from mqd.client.group.membership import State
from mqd.client.group.runner import GroupRunner
from mqd.client.requests import TopicInfo
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    HeartbeatRequest,
    HeartbeatResponse,
    JoinGroupRequest,
    JoinGroupResponse,
    SyncGroupRequest,
    SyncGroupResponse,
)
from tests.unit.client.client_member import CoreMember

INTERVAL_MS = 3_000
EAGER, COOPERATIVE = ("range", "roundrobin"), ("cooperative-sticky",)
T, T0 = b"t" * 16, Partition("t", 0)


class Member(CoreMember):
    """Its member id is m."""

    def __init__(self, assignors: tuple[str, ...] = EAGER, **settings: Any) -> None:
        super().__init__(ClassicCore(ClassicSettings("g", assignors=assignors, **settings)))
        self.protocol = assignors[0]

    def at(self, now_ms: int) -> list:
        self.now_ms = now_ms
        return self.give(Tick())

    def joined(self, leader: str = "other", subscriptions: dict[str, set[str]] | None = None, **fields: Any) -> list:
        members = [
            JoinGroupResponse.Member(member_id=name, metadata=encode_subscription(Subscription(frozenset(topics))))
            for name, topics in (subscriptions or {}).items()
        ]
        return self.answered(
            JoinGroupResponse(
                generation_id=1, protocol_name=self.protocol, leader=leader, member_id="m", members=members, **fields
            )
        )

    def synced(self, *partitions: Partition) -> list:
        return self.answered(
            SyncGroupResponse(assignment=encode_assignment((one.topic, one.index) for one in partitions))
        )

    def with_assignment(self, *partitions: Partition) -> None:
        self.give(Subscribe(("t",)))
        self.joined()
        assert self.synced(*partitions) == [Assign(partitions)]
        self.give(Done())
        assert self.core.state is State.MEMBER and self.core.request_under_way is None

    def heartbeat(self, code: int = 0) -> list:
        """Sends the next one; returns what follows from its response."""
        assert sent(self.at(self.core.next_ms)) == [HeartbeatRequest]
        return self.answered(HeartbeatResponse(error_code=int(code)))


def sent(actions: list) -> list[type]:
    return [type(action.message) for action in actions if isinstance(action, Send)]


def message(actions: list) -> Any:
    (send,) = [action for action in actions if isinstance(action, Send)]
    return send.message


def test_an_eager_member_sends_heartbeats_while_its_application_releases_partitions() -> None:
    member = Member()
    member.with_assignment(T0)
    assert member.heartbeat(ErrorCode.REBALANCE_IN_PROGRESS) == [Revoke((T0,))]
    for _ in range(20):  # longer than session.timeout.ms
        before_ms = member.now_ms
        assert member.heartbeat(ErrorCode.REBALANCE_IN_PROGRESS) == []
        assert member.now_ms == before_ms + INTERVAL_MS
    assert sent(member.give(Done())) == [JoinGroupRequest]


def test_a_cooperative_member_sends_heartbeats_while_its_application_takes_partitions() -> None:
    member = Member(COOPERATIVE)
    member.give(Subscribe(("t",)))
    member.joined()
    assert member.synced(T0) == [Assign((T0,))]
    member.heartbeat(ErrorCode.REBALANCE_IN_PROGRESS)
    assert member.core.state is State.JOINING
    assert sent(member.at(member.core.next_ms)) == [HeartbeatRequest]
    assert sent(member.give(Done())) == []  # one request at a time
    assert sent(member.answered(HeartbeatResponse())) == [JoinGroupRequest]


def test_a_member_that_is_removed_while_it_releases_partitions_loses_them() -> None:
    member = Member()
    member.with_assignment(T0)
    member.heartbeat(ErrorCode.REBALANCE_IN_PROGRESS)
    member.heartbeat(ErrorCode.UNKNOWN_MEMBER_ID)
    assert member.core.has_lost_partitions
    assert sent(member.give(Done())) == [JoinGroupRequest]


@pytest.mark.parametrize("is_answered", [True, False])
def test_a_changed_subscription_is_sent_at_once(is_answered: bool) -> None:
    """Even if a heartbeat is under way when it changes."""
    member = Member(COOPERATIVE)
    member.with_assignment(T0)
    assert sent(member.at(INTERVAL_MS)) == [HeartbeatRequest]
    member.now_ms += 10
    if is_answered:
        member.answered(HeartbeatResponse())
        assert sent(member.give(Subscribe(("t", "u")))) == [JoinGroupRequest]
    else:
        assert sent(member.give(Subscribe(("t", "u")))) == []
        assert sent(member.answered(HeartbeatResponse())) == [JoinGroupRequest]


def test_more_partitions_that_become_known_while_the_leader_joins_are_assigned() -> None:
    member = Member(COOPERATIVE)
    member.give(Subscribe(("t",)))
    member.joined("m", {"m": {"t"}})
    assert sent(member.give(TopicsKnown(counts={"t": 1}))) == [SyncGroupRequest]
    assert member.give(TopicsKnown(counts={"t": 2})) == []  # SYNCING
    member.synced(T0)
    assert sent(member.give(Done())) == [JoinGroupRequest]


def test_a_subscription_that_changes_while_the_member_joins_leads_to_another_join() -> None:
    member = Member(COOPERATIVE)
    member.give(Subscribe(("t",)))
    member.give(Subscribe(("u",)))
    member.give(TopicsKnown(counts={"t": 1, "u": 1}))
    member.joined()
    member.synced(T0)
    join = message(member.give(Done()))
    assert join.protocols[0].metadata == encode_subscription(Subscription(frozenset({"u"}), frozenset({("t", 0)})))


def test_the_leader_assigns_when_it_knows_the_topics_of_all_members() -> None:
    member = Member()
    member.give(Subscribe(("t",)))
    assert member.joined("m", {"m": {"t"}, "other": {"u", "gone"}}) == [Resolve((), ("gone", "t", "u"))]
    # responses to requests that were sent before
    assert member.give(TopicsKnown(counts={"t": 1})) == []
    assert member.give(TopicsKnown(counts={"t": 1, "gone": 0})) == []
    assert member.at(member.core.next_ms) == [Resolve((), ("gone", "t", "u"))]  # the request may have failed
    assert member.core.next_ms > member.now_ms
    sync = message(member.give(TopicsKnown(counts={"t": 1, "u": 1, "gone": 0})))
    assert {one.member_id: decode_assignment(one.assignment) for one in sync.assignments} == {
        "m": {("t", 0)},
        "other": {("u", 0)},
    }


def test_the_leader_of_members_without_topics_assigns_nothing() -> None:
    """Their expressions match no topic."""
    member = Member()
    member.give(Subscribe((), "x.*"))
    assert member.joined("m", {"m": set()}) == [Resolve((), None)]
    (assignment,) = message(member.give(TopicsKnown())).assignments
    assert decode_assignment(assignment.assignment) == set()


def test_a_static_leader_that_comes_back_notices_more_partitions() -> None:
    """With KIP-814 it gets its assignment without making one."""
    member = Member(instance_id="i")
    member.give(Subscribe(("t",)))
    member.joined("m", {"m": {"t"}, "other": {"u"}}, skip_assignment=True)
    assert message(member.give(TopicsKnown(counts={"t": 1, "u": 1}))).assignments == []
    member.synced(T0)
    member.give(Done())
    assert member.give(TopicsKnown(counts={"t": 1, "u": 2})) == [Revoke((T0,))]
    assert sent(member.give(Done())) == [JoinGroupRequest]


def test_an_expression_matches_only_topics_that_exist() -> None:
    member = Member()
    member.give(Subscribe((), "t.*"))
    member.give(TopicsKnown(counts={"t1": 1, "t2": 0, "u": 1}))
    assert member.core._subscribed_topics() == {"t1"}


def test_topics_with_an_error_are_known_to_have_no_partitions() -> None:
    """So that a leader does not wait for them."""
    topics = {
        name: TopicInfo(name, T, error, False, (0, 0), (0, 0), ((), ()), ((), ()))
        for name, error in {"t": 0, "gone": int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)}.items()
    }
    attachment = SimpleNamespace(
        subscribe=lambda _: None, metadata=SimpleNamespace(version=1, topics=topics, names={T: "t"})
    )
    events: list = []
    core = SimpleNamespace(handle=lambda event, _: events.append(event) or [], next_ms=None)
    runner = GroupRunner(attachment, SimpleNamespace(when_known=lambda _: None), core, lambda _: None)
    runner.on_turn(0.0)
    assert events == [TopicsKnown({T: "t"}, {"t": 2, "gone": 0})]
