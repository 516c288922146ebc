"""Rules of a share consumer's core that random histories (tests/sim/client) do not cover."""

from __future__ import annotations

from typing import Any

import pytest

from mqd.client import requests
from mqd.client.messages import KafkaError, local_error
from mqd.client.share.core import SHARE_GROUP_HEARTBEAT, ShareCore
from mqd.client.share.events import ACCEPT, Limits, Outcome, Range, Send
from mqd.client.share.session import OUTCOME_UNKNOWN, SESSION_LOST, SHARE_ACKNOWLEDGE, SHARE_FETCH
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import ShareFetchResponse
from tests.sim.client.share_member_world import TOPIC, TOPIC_ID, World

LIMITS = Limits(4, 100)


class Scene:
    """A world without faults that is served when the test calls for it."""

    def __init__(self) -> None:
        self.world = World(1, faults=0)
        self.core: ShareCore = self.world.core
        self.core.subscribe((TOPIC,), 0)
        self.now_ms = 0

    def sent(self, api_key: int) -> list[Send]:
        """Serves all other requests, until one of these is sent."""
        for _ in range(20):
            sends = self.core.take_sends()
            found = [send for send in sends if send.api_key == api_key]
            for send in sends:
                if send not in found:
                    self.respond(send)
            if found:
                return found
        raise AssertionError(f"no request {api_key} is sent")

    def respond(self, send: Send, response: Any = None, error: KafkaError | None = None) -> None:
        if response is None and error is None:
            response = self.world.respond(send)
        self.core.on_response(send.number, response, error, self.now_ms)

    def hold(self) -> list[Any]:
        self.core.set_limits(LIMITS, self.now_ms)
        for _ in range(10):
            for send in self.sent(SHARE_FETCH):
                self.respond(send)
            if found := self.core.take(4, self.now_ms):
                return found
        raise AssertionError("no records")


def test_records_lost_with_their_session_are_reported() -> None:
    scene = Scene()
    held = scene.hold()
    message = held[0]
    topic_partition = message.topic(), message.partition()
    session = scene.core.held[topic_partition][message.offset()][0]
    assert scene.core.acknowledge(topic_partition, message.offset(), ACCEPT)
    scene.core.flush(0)
    (send,) = scene.sent(SHARE_ACKNOWLEDGE)
    scene.respond(send, error=local_error(KafkaError._TRANSPORT, "gone"))
    assert scene.core.outcomes.popleft().code == OUTCOME_UNKNOWN
    assert session.is_dead
    for other in held[1:]:
        if scene.core.held[other.topic(), other.partition()][other.offset()][0] is session:
            assert scene.core.acknowledge((other.topic(), other.partition()), other.offset(), ACCEPT)
            assert scene.core.outcomes.popleft() == Outcome(
                (other.topic(), other.partition()), (Range(other.offset(), other.offset(), ACCEPT),), SESSION_LOST
            )


def test_records_whose_locks_have_ended_are_not_handed_out() -> None:
    scene = Scene()
    scene.core.set_limits(LIMITS, 0)
    while not scene.core.ready:
        for send in scene.sent(SHARE_FETCH):
            scene.respond(send)
    assert scene.core.take(4, 10_000) == [] and not scene.core.holds_records


@pytest.mark.parametrize("code", [KafkaError._UNSUPPORTED_FEATURE, KafkaError._AUTHENTICATION])
def test_errors_of_the_connection_are_raised(code: int) -> None:
    scene = Scene()
    (send,) = scene.sent(SHARE_GROUP_HEARTBEAT)
    scene.respond(send, error=local_error(code, "refused"))
    assert scene.core.problems[0].code == code
    assert (scene.core.fatal is not None) == (code == KafkaError._UNSUPPORTED_FEATURE)


def test_a_group_that_may_not_be_read_ends_the_consumer() -> None:
    scene = Scene()
    sends = {send.api_key: send for send in scene.core.take_sends()}
    response = scene.world.respond(sends[requests.FIND_COORDINATOR])
    response.coordinators[0].error_code = ErrorCode.GROUP_AUTHORIZATION_FAILED
    scene.respond(sends[requests.FIND_COORDINATOR], response)
    assert scene.core.fatal is not None and scene.core.fatal.code == ErrorCode.GROUP_AUTHORIZATION_FAILED


def metadata_request(scene: Scene) -> Send | None:
    """The metadata request that is due. Other requests are responded to."""
    scene.core.advance(scene.now_ms)
    found = None
    for send in scene.core.take_sends():
        if send.api_key == requests.METADATA:
            found = send
        else:
            scene.respond(send)
    return found


def respond_with_error(scene: Scene, metadata: Send | None, code: int) -> list[int]:
    """Responds with this error of the topic (0: none). Returns the errors that poll() raises."""
    assert metadata is not None
    response = scene.world.metadata()
    if code:
        response.topics[0].error_code, response.topics[0].partitions = code, []
    scene.respond(metadata, response)
    raised = [problem.code for problem in scene.core.problems]
    scene.core.problems.clear()
    return raised


@pytest.mark.parametrize("code", [ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_TOPIC_EXCEPTION])
def test_the_error_of_a_topic_is_reported_once_until_it_changes(code: int) -> None:
    """As in librdkafka. poll() raised it every second, because metadata was requested that often."""
    scene = Scene()
    scene.core.settings = scene.core.settings._replace(metadata_max_age_ms=10_000)
    assert respond_with_error(scene, metadata_request(scene), code) == [code] and scene.core.fatal is None
    scene.now_ms += 5_000
    assert metadata_request(scene) is None
    for reported, expected in ((code, []), (0, []), (code, [code])):
        scene.now_ms += 10_000
        assert respond_with_error(scene, metadata_request(scene), reported) == expected


def test_a_new_subscription_reports_the_error_of_its_topic_again() -> None:
    scene, code = Scene(), ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert respond_with_error(scene, metadata_request(scene), code) == [code]
    scene.core.subscribe((TOPIC,), scene.now_ms)
    assert respond_with_error(scene, metadata_request(scene), code) == [code]


def test_a_topic_that_does_not_exist_is_looked_for_often() -> None:
    scene = Scene()
    assert respond_with_error(scene, metadata_request(scene), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION) == []
    scene.now_ms += 1_000
    assert metadata_request(scene) is not None


def test_an_assigned_topic_that_may_be_read_now_is_looked_up_at_once() -> None:
    scene, code = Scene(), ErrorCode.TOPIC_AUTHORIZATION_FAILED
    assert respond_with_error(scene, metadata_request(scene), code) == [code]
    (heartbeat,) = scene.sent(SHARE_GROUP_HEARTBEAT)
    assert metadata_request(scene) is None
    scene.respond(heartbeat)
    assert scene.core.membership.assigned and metadata_request(scene) is not None


def test_a_leader_named_in_the_response_gets_the_next_request() -> None:
    scene = Scene()
    scene.core.set_limits(LIMITS, 0)
    first = scene.sent(SHARE_FETCH)[0]
    moved = first.message.topics[0].partitions[0].partition_index
    other = 3 - first.target.node_id
    partition = ShareFetchResponse.Partition(
        partition_index=moved,
        error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER,
        current_leader=ShareFetchResponse.LeaderIdAndEpoch(leader_id=other, leader_epoch=2),
    )
    topic = ShareFetchResponse.Topic(topic_id=TOPIC_ID, partitions=[partition])
    scene.respond(first, ShareFetchResponse(responses=[topic]))
    assert (TOPIC_ID, moved) in scene.core._partitions_by_leader()[other]


def test_a_response_with_invalid_runs_is_an_error_without_records() -> None:
    scene = Scene()
    scene.core.set_limits(LIMITS, 0)
    send = scene.sent(SHARE_FETCH)[0]
    run = ShareFetchResponse.AcquiredRecords(first_offset=9, last_offset=2, delivery_count=1)
    partition = ShareFetchResponse.Partition(partition_index=0, acquired_records=[run])
    scene.respond(
        send, ShareFetchResponse(responses=[ShareFetchResponse.Topic(topic_id=TOPIC_ID, partitions=[partition])])
    )
    assert scene.core.problems[0].code == KafkaError._BAD_MSG and not scene.core.ready


def test_it_sleeps_while_nothing_is_due() -> None:
    scene = Scene()
    scene.hold()
    while sends := scene.core.take_sends():
        for send in sends:
            scene.respond(send)
    due = scene.core.next_ms(0)
    assert due is not None and due > 0, "the runner would turn without end"
