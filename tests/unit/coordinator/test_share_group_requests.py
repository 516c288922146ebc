"""Clients' requests to share groups, through the handlers: the real controller and metadata, owners
of partitions played by the test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mqd.acceptor.interbroker.client import PeerError
from mqd.cluster.metadata import features
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

CONFIG = {"offsets.topic.num.partitions": "2", "share.coordinator.state.topic.num.partitions": "3"}
Alter, Describe, Delete = (
    m.AlterShareGroupOffsetsRequest,
    m.DescribeShareGroupOffsetsRequest,
    m.DeleteShareGroupOffsetsRequest,
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def running(scenario: Callable[[HandlerBroker], Any]) -> None:
        async def body() -> None:
            async with HandlerBroker(tmp_path, CONFIG) as broker:
                await create(broker, "t", 2)
                await broker.send_request(m.FindCoordinatorRequest(coordinator_keys=["g"]), 4)
                await scenario(broker)

        asyncio.run(body())

    return running


async def until(condition: Callable[[], Any]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never came true")


async def beat(broker: HandlerBroker, epoch: int = 0, **fields: Any) -> Any:
    """A first heartbeat names the topic `t`."""
    given = {"group_id": "g", "member_id": "m", "subscribed_topic_names": ["t"] if epoch == 0 else None, **fields}
    return await broker.send_request(m.ShareGroupHeartbeatRequest(member_epoch=epoch, **given), 1)


async def alter(broker: HandlerBroker, offsets: dict[int, int], topic: str = "t", group: str = "g") -> Any:
    partitions = [Alter.Partition(partition_index=index, start_offset=start) for index, start in offsets.items()]
    return await broker.send_request(
        Alter(group_id=group, topics=[Alter.Topic(topic_name=topic, partitions=partitions)]), 0
    )


async def offsets(broker: HandlerBroker, topics: dict[str, list[int]] | None = None, version: int = 1) -> Any:
    """The group's entry."""
    named = None if topics is None else [Describe.Topic(topic_name=name, partitions=topics[name]) for name in topics]
    response = await broker.send_request(Describe(groups=[Describe.Group(group_id="g", topics=named)]), version)
    (group,) = response.groups
    assert group.group_id == "g"
    return group


def rows(group: Any) -> list[tuple[int, int, int, int]]:
    """(partition, start offset, lag, error) of topic `t`."""
    (topic,) = group.topics
    assert topic.topic_name == "t"
    return [(one.partition_index, one.start_offset, one.lag, one.error_code) for one in topic.partitions]


def test_share_groups_are_off_until_every_host_supports_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """share.version is 1."""
    level = features.FEATURES[features.MQD_VERSION]._replace(last=features.SHARE_GROUPS_LEVEL - 1)
    monkeypatch.setitem(features.FEATURES, features.MQD_VERSION, level)

    async def scenario() -> None:
        async with HandlerBroker(tmp_path, CONFIG) as broker:
            assert (await beat(broker)).error_code == E.UNSUPPORTED_VERSION
            assert (await offsets(broker)).error_code == E.UNSUPPORTED_VERSION
            assert (await alter(broker, {0: 1})).error_code == E.UNSUPPORTED_VERSION
            described = await broker.send_request(m.ShareGroupDescribeRequest(group_ids=["g"]), 1)
            assert described.groups[0].error_code == E.UNSUPPORTED_VERSION
            assert (await broker.send_request(Delete(group_id="g"), 0)).error_code == E.UNSUPPORTED_VERSION
            for request in (m.ShareFetchRequest(group_id="g"), m.ShareAcknowledgeRequest(group_id="g")):
                for version in (1, 2):
                    assert (await broker.send_request(request, version)).error_code == E.UNSUPPORTED_VERSION

    asyncio.run(scenario())


def test_both_features_are_needed() -> None:
    level = features.SHARE_GROUPS_LEVEL
    for share, mqd, expected in ((1, level, True), (0, level, False), (1, level - 1, False)):
        assert features.has_share_groups({features.SHARE_VERSION: share, features.MQD_VERSION: mqd}) is expected


def test_dead_letters_need_a_level_of_their_own() -> None:
    level = features.DEAD_LETTERS_LEVEL
    for share, mqd, expected in ((1, level, True), (0, level, False), (1, level - 1, False)):
        assert features.dead_letters_allowed({features.SHARE_VERSION: share, features.MQD_VERSION: mqd}) is expected


def test_heartbeats_that_are_invalid_in_any_group(run: Callable[..., None]) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        for fields, message in (
            ({"member_id": ""}, "Invalid member id in the request."),
            ({"member_id": "m" * 37}, "Invalid member id in the request."),
            ({"member_id": " "}, "MemberId can't be empty."),
            ({"group_id": ""}, "GroupId can't be empty."),
            ({"rack_id": ""}, "RackId can't be empty."),
            ({"subscribed_topic_names": None}, "SubscribedTopicNames must be set in first request."),
            ({"subscribed_topic_names": []}, "SubscribedTopicNames must be set in first request."),
            ({"epoch": -2}, "MemberEpoch is invalid."),
        ):
            response = await beat(broker, **fields)
            assert (response.error_code, response.error_message) == (E.INVALID_REQUEST, message)
        assert (await beat(broker, rack_id="r" * 9_000)).error_code == E.INVALID_REQUEST
        assert (await beat(broker, 3)).error_code == E.GROUP_ID_NOT_FOUND

    run(scenario)


def test_a_member_joins_is_described_and_leaves(run: Callable[..., None]) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert (await beat(broker)).member_epoch == 1
        groups = broker.broker.coordinators.groups
        await until(lambda: groups.core("g").share.states.initialized)
        assert (await beat(broker, 1)).assignment.topic_partitions[0].partitions == [0, 1]
        request = m.ShareGroupDescribeRequest(group_ids=["g", "none", ""], include_authorized_operations=True)
        group, none, empty = (await broker.send_request(request, 1)).groups
        assert (group.group_state, group.assignor_name, group.group_epoch) == ("Stable", "simple", 2)
        assert group.members[0].assignment.topic_partitions[0].topic_name == "t"
        assert group.authorized_operations & (1 << 8)
        assert (none.error_code, empty.error_code) == (E.GROUP_ID_NOT_FOUND, E.INVALID_GROUP_ID)
        listed = (await broker.send_request(m.ListGroupsRequest(types_filter=["Share"]), 5)).groups
        assert [(one.group_id, one.group_type, one.group_state) for one in listed] == [("g", "share", "Stable")]
        classic = (await broker.send_request(m.DescribeGroupsRequest(groups=["g"]), 6)).groups[0]
        assert (classic.error_code, classic.group_state) == (E.GROUP_ID_NOT_FOUND, "Dead")
        assert (await broker.send_request(m.DeleteGroupsRequest(groups_names=["g"]), 2)).results[
            0
        ].error_code == E.NON_EMPTY_GROUP
        assert (await alter(broker, {0: 1})).error_code == E.NON_EMPTY_GROUP
        assert (await broker.send_request(Delete(group_id="g"), 0)).error_code == E.NON_EMPTY_GROUP
        assert (await beat(broker, -1)).error_code == 0
        assert (await broker.send_request(m.DeleteGroupsRequest(groups_names=["g"]), 2)).results[0].error_code == 0

    run(scenario)


def test_a_share_group_has_no_committed_offsets(run: Callable[..., None]) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert (await beat(broker)).error_code == 0
        Fetch = m.OffsetFetchRequest
        found = await broker.send_request(Fetch("g", [Fetch.Topic("t", [0])]), 5)
        assert (found.error_code, found.topics[0].partitions[0].committed_offset) == (0, -1)
        (group,) = (await broker.send_request(Fetch(groups=[Fetch.Group("g", None, -1, None)]), 8)).groups
        assert (group.error_code, group.topics) == (0, [])

    run(scenario)


def test_offsets_are_altered_described_with_lag_and_deleted(run: Callable[..., None]) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        broker.place("t", 0, log_end_offset=100, high_watermark=90)
        broker.place("t", 1, log_end_offset=100, high_watermark=100)
        assert (await offsets(broker)).topics == []
        response = await alter(broker, {0: 40, 1: -1, 7: 3})
        errors = {one.partition_index: one.error_code for topic in response.responses for one in topic.partitions}
        assert errors == {0: 0, 1: E.INVALID_REQUEST, 7: E.UNKNOWN_TOPIC_OR_PARTITION}
        (topic,) = (await alter(broker, {1: -1, 7: -1})).responses  # as in Kafka: existence is checked first
        errors = {one.partition_index: one.error_code for one in topic.partitions}
        assert errors == {1: E.INVALID_REQUEST, 7: E.UNKNOWN_TOPIC_OR_PARTITION}
        (topic,) = (await alter(broker, {})).responses
        assert (topic.topic_name, topic.partitions) == ("t", [])
        assert (await alter(broker, {}, topic="none")).responses == []
        states = broker.broker.coordinators.share_states
        # written by a leader: 5 of the records from 42 on are complete
        topic_id = broker.metadata.topics["t"].topic_id
        write = m.WriteShareGroupStateRequest
        written = write.Partition(
            partition=0, state_epoch=1, leader_epoch=3, start_offset=42, delivery_complete_count=5, state_batches=[]
        )
        await states.respond(write(group_id="g", topics=[write.Topic(topic_id=topic_id, partitions=[written])]))
        assert rows(await offsets(broker)) == [(0, 42, 90 - 42 - 5, 0)]
        assert rows(await offsets(broker, version=0)) == [(0, 42, -1, 0)]
        # partition 1 was never initialized, 9 does not exist
        assert rows(await offsets(broker, {"t": [1, 0, 9]})) == [(1, -1, -1, 0), (0, 42, 43, 0), (9, -1, -1, 0)]
        (missing,) = (await offsets(broker, {"none": [0]})).topics
        assert (missing.partitions[0].start_offset, missing.topic_id) == (-1, bytes(16))
        assert (await offsets(broker, {})).topics == []
        deleted = await broker.send_request(
            Delete(group_id="g", topics=[Delete.Topic(topic_name=name) for name in ("t", "t", "none")]), 0
        )
        assert {one.topic_name: one.error_code for one in deleted.responses} == {
            "t": 0,
            "none": E.UNKNOWN_TOPIC_OR_PARTITION,
        }
        assert (await offsets(broker)).topics == []
        assert (await alter(broker, {0: 1}, group="")).error_code == E.INVALID_GROUP_ID
        assert (await broker.send_request(Delete(group_id="none"), 0)).error_code == E.GROUP_ID_NOT_FOUND

    run(scenario)


def test_lag_of_partitions_that_another_host_leads(run: Callable[..., None]) -> None:
    class Peers:
        failing = False

        async def request(self, node_id: int, request: Any, version: int, timeout_s: float) -> Any:
            assert (node_id, request.topics[0].name) == (9, "t")
            if self.failing:
                raise PeerError("gone")
            response = m.ListOffsetsResponse
            one = response.PartitionResponse(partition_index=0, offset=77)
            return response(topics=[response.TopicResponse(name="t", partitions=[one])])

    async def scenario(broker: HandlerBroker) -> None:
        broker.place("t", 1, log_end_offset=9, high_watermark=9)
        await alter(broker, {0: 7, 1: 2})
        states = broker.broker.coordinators.share_states
        topic_id = broker.metadata.topics["t"].topic_id
        write = m.WriteShareGroupStateRequest
        for index in (0, 1):
            one = write.Partition(partition=index, state_epoch=1, start_offset=-1, delivery_complete_count=0)
            await states.respond(write(group_id="g", topics=[write.Topic(topic_id=topic_id, partitions=[one])]))
        partitions = broker.metadata.topics["t"].partitions
        partitions[0] = msgspec.structs.replace(partitions[0], leader=9)
        states.peers = peers = Peers()
        assert rows(await offsets(broker)) == [(0, 7, 70, 0), (1, 2, 7, 0)]
        peers.failing = True
        assert rows(await offsets(broker)) == [(0, 0, -1, E.NETWORK_EXCEPTION), (1, 2, 7, 0)]

    run(scenario)


def test_the_coordinator_of_a_share_partition(run: Callable[..., None]) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        key = f"g:{'A' * 22}:0"
        wrong = m.FindCoordinatorRequest(key_type=2, coordinator_keys=["g", "g:topic:0"])
        assert [one.error_code for one in (await broker.send_request(wrong, 6)).coordinators] == [E.INVALID_REQUEST] * 2
        assert "__share_group_state" not in broker.metadata.topics
        request = m.FindCoordinatorRequest(key_type=2, coordinator_keys=[key, "g", "g:topic:0"])
        found, *invalid = (await broker.send_request(request, 6)).coordinators
        assert (found.key, found.node_id, found.error_code) == (key, broker.broker.node_id, 0)
        assert [one.error_code for one in invalid] == [E.INVALID_REQUEST] * 2
        assert [one.error_code for one in (await broker.send_request(request, 5)).coordinators] == [
            E.INVALID_REQUEST
        ] * 3
        assert "__share_group_state" in broker.metadata.topics

    run(scenario)
