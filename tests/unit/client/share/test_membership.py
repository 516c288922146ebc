"""A share group's member: when it sends which heartbeat, and the effect of each response."""

from __future__ import annotations

import pytest

from mqd.client.group.membership import MAX_POLL_EXCEEDED
from mqd.client.retrying import BACKOFF_FIRST_MS
from mqd.client.share.membership import LEAVE_EPOCH, Membership, State
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ShareGroupHeartbeatResponse as Response

ID = b"\1" * 16
POLL_MS = 10_000


def response_of(epoch: int = 1, partitions: list[int] | None = None, error: int = 0) -> Response:
    assigned = None
    if partitions is not None:
        assigned = Response.Assignment(
            topic_partitions=[Response.TopicPartitions(topic_id=ID, partitions=partitions)] if partitions else []
        )
    return Response(error_code=error, member_epoch=epoch, heartbeat_interval_ms=1_000, assignment=assigned)


def joining() -> Membership:
    member = Membership("group", "member", "rack", POLL_MS)
    member.subscribe(("jobs",), 0)
    return member


def joined(partitions: list[int] | None = None) -> Membership:
    member = joining()
    assert member.request(0) is not None
    assert member.on_response(response_of(5, [0, 1] if partitions is None else partitions), 0, 0) is None
    member.check()
    return member


def test_joining_names_the_subscription_and_later_heartbeats_do_not() -> None:
    member = joining()
    first = member.request(0)
    assert first is not None
    assert (first.group_id, first.member_id, first.member_epoch) == ("group", "member", 0)
    assert first.rack_id == "rack" and first.subscribed_topic_names == ["jobs"]
    assert member.request(0) is None, "G1"
    member.on_response(response_of(5, [0]), 0, 10)
    assert member.assigned == {(ID, 0)} and member.heartbeat_due_ms == 1_010
    assert member.request(1_009) is None
    later = member.request(1_010)
    assert later is not None
    assert (later.member_epoch, later.subscribed_topic_names, later.rack_id) == (5, None, None)
    member.on_response(response_of(5), 5, 1_020)
    assert member.assigned == {(ID, 0)}, "a response without an assignment changes none"


def test_a_changed_subscription_is_sent_at_once_and_again_after_a_loss() -> None:
    member = joined()
    member.subscribe(("more",), 100)
    changed = member.request(100)
    assert changed is not None and changed.subscribed_topic_names == ["more"]
    member.on_no_response(110)
    again = member.request(110 + BACKOFF_FIRST_MS)
    assert again is not None and again.subscribed_topic_names == ["more"]


def test_a_subscription_that_changes_while_a_heartbeat_is_under_way_follows_it() -> None:
    member = joined()
    assert member.request(1_000) is not None
    member.subscribe(("more",), 1_001)
    member.on_response(response_of(5), 5, 1_002)
    following = member.request(1_002)
    assert following is not None and following.subscribed_topic_names == ["more"]


@pytest.mark.parametrize("code", [ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID])
def test_a_fenced_member_joins_again_without_an_assignment(code: int) -> None:
    member = joined()
    member.request(1_000)
    assert member.on_response(response_of(error=code), 5, 1_000) is None
    member.check()
    assert member.state is State.JOINING and not member.assigned
    again = member.request(1_000)
    assert again is not None and again.member_epoch == 0 and again.subscribed_topic_names == ["jobs"]


@pytest.mark.parametrize(
    "code", [ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE]
)
def test_retriable_errors_keep_the_assignment(code: int) -> None:
    member = joined()
    member.request(1_000)
    assert member.on_response(response_of(error=code), 5, 1_000) is None
    assert member.assigned and member.request(1_000) is None
    again = member.request(1_000 + BACKOFF_FIRST_MS)
    assert again is not None and again.member_epoch == 5


def test_a_refusal_of_the_group_is_final_and_one_of_a_topic_is_not() -> None:
    member = joined()
    member.request(1_000)
    problem = member.on_response(response_of(error=ErrorCode.TOPIC_AUTHORIZATION_FAILED), 5, 1_000)
    assert problem is not None and not problem.is_fatal and member.request(2_000) is not None
    problem = member.on_response(response_of(error=ErrorCode.GROUP_AUTHORIZATION_FAILED), 5, 2_000)
    assert problem is not None and problem.is_fatal and problem.code == ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert member.is_out and member.heartbeat_due_ms is None and not member.assigned
    member.subscribe(("more",), 3_000)
    assert member.request(3_000) is None


def test_the_refusal_of_a_topic_is_reported_once_until_a_heartbeat_succeeds_or_the_topics_change() -> None:
    """poll() raised it once in each heartbeat interval."""
    member = joined()

    def is_reported(error: int, now_ms: int) -> bool:
        assert member.request(now_ms) is not None
        return member.on_response(response_of(error=error), 5, now_ms) is not None

    refused = ErrorCode.TOPIC_AUTHORIZATION_FAILED
    found = [is_reported(error, 1_000 * turn) for turn, error in enumerate((refused, refused, 0, refused, refused), 1)]
    assert found == [True, False, False, True, False]
    member.subscribe(("more",), 6_000)
    assert is_reported(refused, 6_000)


def test_a_member_repeats_its_leave_until_it_is_acknowledged() -> None:
    member = joined()
    member.subscribe((), 100)
    assert not member.assigned and not member.is_out
    leave = member.request(100)
    assert leave is not None and leave.member_epoch == LEAVE_EPOCH
    member.on_no_response(110)
    again = member.request(110 + BACKOFF_FIRST_MS)
    assert again is not None and again.member_epoch == LEAVE_EPOCH
    member.on_response(response_of(LEAVE_EPOCH), LEAVE_EPOCH, 300)
    assert member.is_out and member.heartbeat_due_ms is None


def test_a_member_that_never_joined_need_not_leave() -> None:
    member = joining()
    member.subscribe((), 1)
    assert member.is_out and member.request(1) is None


def test_a_member_that_subscribes_while_it_leaves_joins_after_that() -> None:
    member = joined()
    member.subscribe((), 100)
    assert member.request(100) is not None
    member.subscribe(("jobs",), 101)
    assert member.request(101) is None, "G1"
    member.on_response(response_of(LEAVE_EPOCH), LEAVE_EPOCH, 102)
    again = member.request(102)
    assert again is not None and again.member_epoch == 0


def test_a_response_to_an_epoch_before_the_fencing_is_dropped() -> None:
    member = joined()
    member.request(1_000)
    member.subscribe((), 1_000)
    member.subscribe(("jobs",), 1_001)
    member.on_response(response_of(5, [7]), 5, 1_002)
    assert not member.assigned and member.state is State.JOINING


def test_a_member_that_does_not_poll_leaves_and_joins_with_the_next_poll() -> None:
    member = joined()
    member.on_polled(500)
    assert member.tick(500 + POLL_MS - 1) is None
    assert member.poll_deadline_ms == 500 + POLL_MS
    problem = member.tick(500 + POLL_MS)
    assert problem is not None and problem.code == MAX_POLL_EXCEEDED and not member.assigned
    leave = member.request(500 + POLL_MS)
    assert leave is not None and leave.member_epoch == LEAVE_EPOCH
    member.on_response(response_of(LEAVE_EPOCH), LEAVE_EPOCH, 20_000)
    assert member.request(20_000) is None and member.poll_deadline_ms is None
    member.on_polled(30_000)
    again = member.request(30_000)
    assert again is not None and again.member_epoch == 0
