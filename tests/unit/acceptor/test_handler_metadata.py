"""Metadata, DescribeTopicPartitions, DescribeCluster, FindCoordinator, ApiVersions: encoded in
every version.
"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqd import native
from mqd.acceptor import dispatch, producer_ids
from mqd.acceptor.broker_state import Origin, ProducerIds
from mqd.acceptor.handlers.cluster import api_versions
from mqd.cluster.host import messages
from mqd.cluster.metadata.features import (
    MQD_VERSION,
    SHARE_GROUPS_LEVEL,
    SHARE_VERSION,
    STREAMS_GROUPS_LEVEL,
    STREAMS_VERSION,
)
from mqd.protocol import codec
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DescribeClusterRequest,
    DescribeTopicPartitionsRequest,
    FindCoordinatorRequest,
    InitProducerIdRequest,
    MetadataRequest,
    ProduceRequest,
)
from tests.unit.acceptor.handler_broker import ORIGIN, HandlerBroker


def versions(api_key: int) -> range:
    return range(SUPPORTED[api_key].min_version, SUPPORTED[api_key].max_version + 1)


async def create(broker: HandlerBroker, name: str, count: int = 2, **config: str) -> bytes:
    topic = CreateTopicsRequest.Topic(
        name=name,
        num_partitions=count,
        replication_factor=1,
        configs=[CreateTopicsRequest.Config(name=key.replace("_", "."), value=value) for key, value in config.items()],
    )
    response = await broker.send_request(CreateTopicsRequest(topics=[topic]), 7)
    assert response.topics[0].error_code == 0, response
    return response.topics[0].topic_id


def named(*names: str, **options: object) -> MetadataRequest:
    return MetadataRequest(topics=[MetadataRequest.Topic(name=name, topic_id=b"\0" * 16) for name in names], **options)


def test_metadata_of_every_version(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            topic_id = await create(broker, "orders", 3)
            await create(broker, "other", 1)
            for version in versions(3):
                response = await broker.send_request(named("orders"), version)
                assert [(b.node_id, b.host, b.port) for b in response.brokers] == [(1, "10.1.2.3", 9092)]
                assert broker.last.is_cacheable
                (topic,) = response.topics
                assert (topic.error_code, topic.name) == (0, "orders")
                assert [
                    (p.partition_index, p.leader_id, p.replica_nodes, p.isr_nodes, p.error_code)
                    for p in topic.partitions
                ] == [(i, 1, [1], [1], 0) for i in range(3)]
                if version >= 10:
                    assert topic.topic_id == topic_id
                if version >= 8:
                    assert topic.topic_authorized_operations == -(2**31)
                    (requested,) = (
                        await broker.send_request(named("orders", include_topic_authorized_operations=True), version)
                    ).topics
                    assert requested.topic_authorized_operations == 0b1101_1111_1000
                if version >= 2:
                    assert response.cluster_id == "cluster"

    asyncio.run(run())


def test_null_requests_all_topics_and_an_empty_list_none(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "b")
            await create(broker, "a")
            for version in versions(3):
                everything = await broker.send_request(MetadataRequest(topics=None if version else []), version)
                assert [topic.name for topic in everything.topics] == ["a", "b"]
                if version:
                    assert (await broker.send_request(MetadataRequest(topics=[]), version)).topics == []

    asyncio.run(run())


def test_topic_by_id(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            topic_id = await create(broker, "orders")
            requests = [
                MetadataRequest.Topic(topic_id=topic_id, name=None),
                MetadataRequest.Topic(topic_id=b"x" * 16, name=None),
            ]
            for version in (12, 13):
                known, unknown = (await broker.send_request(MetadataRequest(topics=requests), version)).topics
                assert (known.error_code, known.name) == (0, "orders")
                assert (unknown.error_code, unknown.topic_id) == (ErrorCode.UNKNOWN_TOPIC_ID, b"x" * 16)
                assert not broker.last.is_cacheable

    asyncio.run(run())


def test_topic_ids_in_versions_that_request_by_name(tmp_path: Path) -> None:
    """Versions 10 and 11 have the field already, but their responses need a name."""

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            topic_id = await create(broker, "orders")
            requests = [
                MetadataRequest.Topic(topic_id=topic_id, name=None),
                MetadataRequest.Topic(topic_id=b"x" * 16, name="orders"),
                MetadataRequest.Topic(name=None),
            ]
            for version in (10, 11):
                responses = (await broker.send_request(MetadataRequest(topics=requests), version)).topics
                assert [(one.error_code, one.name) for one in responses] == [
                    (ErrorCode.INVALID_REQUEST, ""),
                    (ErrorCode.INVALID_REQUEST, "orders"),
                    (ErrorCode.INVALID_REQUEST, ""),
                ]

    asyncio.run(run())


def test_error_messages_with_long_quotes_are_truncated(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            name = "x" * 32767
            for version in versions(37):
                request = CreatePartitionsRequest(
                    topics=[CreatePartitionsRequest.Topic(name=name, count=9)], timeout_ms=1000
                )
                (result,) = (await broker.send_request(request, version)).results
                assert (
                    result.name == name
                    and result.error_code
                    and 100 < len(result.error_message) <= dispatch.MESSAGE_CHARS_MAX
                )

    asyncio.run(run())


def test_topics_are_created_on_demand(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path, {"num.partitions": "3"}) as broker:
            response = await broker.send_request(named("new", allow_auto_topic_creation=False), 9)
            assert response.topics[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            first, second = await asyncio.gather(
                broker.send_request(named("new"), 9), broker.send_request(named("new"), 9)
            )
            assert len(first.topics[0].partitions) == len(second.topics[0].partitions) == 3
            assert first.topics[0].error_code == 0
            invalid = await broker.send_request(named("bad name"), 9)
            assert invalid.topics[0].error_code == ErrorCode.INVALID_TOPIC_EXCEPTION

    asyncio.run(run())


def test_topics_are_not_created_when_auto_creation_is_disabled(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path, {"auto.create.topics.enable": "false"}) as broker:
            assert (await broker.send_request(named("new"), 9)).topics[
                0
            ].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    asyncio.run(run())


def test_partition_that_is_not_open_yet_has_no_leader(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "orders", 2)
            partition = broker.metadata.topics["orders"].partitions[1]
            broker.control.set_slot_state(partition.slot, native.SlotState.OPENING)
            response = await broker.send_request(named("orders"), 12)
            assert [(p.error_code, p.leader_id) for p in response.topics[0].partitions] == [
                (0, 1),
                (ErrorCode.LEADER_NOT_AVAILABLE, -1),
            ]
            assert not broker.last.is_cacheable

    asyncio.run(run())


def test_new_partitions_are_visible_once_every_worker_knows_them(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "orders", 1)
            image = broker.metadata.topics["orders"]
            assert broker.metadata.known_count(image, broker.control.metadata_version) == 1
            broker.refuse_workers = {1}
            creation = asyncio.create_task(create(broker, "later", 2))
            while "later" not in broker.metadata.topics:
                await asyncio.sleep(0)
            response = await broker.send_request(named("later", "orders"), 12)
            assert {p.error_code for p in response.topics[0].partitions} == {ErrorCode.LEADER_NOT_AVAILABLE}
            assert {p.error_code for p in response.topics[1].partitions} == {0}
            creation.cancel()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("config", "origin", "expected"),
    [
        ({}, Origin(0, "192.168.7.7", 19092), ("192.168.7.7", 19092)),
        ({}, Origin(0, "", 19092), ("localhost", 19092)),
        (
            {"advertised.listeners": "PLAINTEXT://broker.example:29092"},
            Origin(0, "192.168.7.7", 19092),
            ("broker.example", 29092),
        ),
    ],
)
def test_advertised_address(tmp_path: Path, config: dict, origin: Origin, expected: tuple) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path, config, [("PLAINTEXT", "0.0.0.0", 9092)]) as broker:
            metadata = await broker.send_request(MetadataRequest(topics=[]), 9, origin)
            assert (metadata.brokers[0].host, metadata.brokers[0].port) == expected
            coordinator = await broker.send_request(FindCoordinatorRequest(key="g"), 2, origin)
            assert (coordinator.host, coordinator.port) == expected

    asyncio.run(run())


def test_trailing_bytes_are_ignored(tmp_path: Path) -> None:
    """librdkafka 2.x requests all topics with three bytes after the message."""

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "orders")
            outcome = await broker.frame(bytes.fromhex("0003000d0000000e000772646b61666b610000000000010000"))
            assert outcome.close_reason is None
            correlation_id, response = decode_response(outcome.body, 3, 13)
            assert correlation_id == 14 and [topic.name for topic in response.topics] == ["orders"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0\3",
        b"\0\3\0\1",
        b"\0\3\0\1\0\0\0\1\0\5ab",
        b"\0\3\0\1\0\0\0\1\xff\xff\x7f\xff\xff\xff",
        bytes.fromhex("7fff000000000001ffff"),
        bytes.fromhex("0003006300000001ffff00"),
    ],
)
def test_hostile_frames_close_only_their_connection(tmp_path: Path, frame: bytes) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            outcome = await broker.frame(frame)
            assert outcome.close_reason and outcome.body is None

    asyncio.run(run())


def test_paging_through_topics(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            for name, count in (("a", 3), ("b", 1), ("c", 4)):
                await create(broker, name, count)
            seen, cursor, pages = [], None, 0
            while True:
                response = await broker.send_request(
                    DescribeTopicPartitionsRequest(topics=[], response_partition_limit=2, cursor=cursor), 0
                )
                seen += [
                    (topic.name, partition.partition_index)
                    for topic in response.topics
                    for partition in topic.partitions
                ]
                pages += 1
                if response.next_cursor is None:
                    break
                cursor = DescribeTopicPartitionsRequest.Cursor(
                    topic_name=response.next_cursor.topic_name, partition_index=response.next_cursor.partition_index
                )
            assert seen == [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0), ("c", 1), ("c", 2), ("c", 3)]
            assert pages == 4
            requests = [DescribeTopicPartitionsRequest.Topic(name=name) for name in ("nothing", "b", "b!")]
            found = (await broker.send_request(DescribeTopicPartitionsRequest(topics=requests), 0)).topics
            assert [(topic.name, topic.error_code) for topic in found] == [
                ("b", 0),
                ("b!", ErrorCode.INVALID_TOPIC_EXCEPTION),
                ("nothing", ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            ]
            assert len({topic.topic_authorized_operations for topic in found}) == 1
            # a cursor at an unknown partition, or at a topic that is not requested
            for name, index in (("b", -1), ("a", 0)):
                cursor = DescribeTopicPartitionsRequest.Cursor(topic_name=name, partition_index=index)
                response = await broker.send_request(
                    DescribeTopicPartitionsRequest(topics=requests[:2], cursor=cursor), 0
                )
                assert [(topic.name, topic.error_code) for topic in response.topics] == [
                    ("nothing", ErrorCode.INVALID_REQUEST),
                    ("b", ErrorCode.INVALID_REQUEST),
                ]

    asyncio.run(run())


def test_cluster_and_coordinators(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            for version in versions(60):
                response = await broker.send_request(DescribeClusterRequest(), version)
                assert (response.error_code, response.cluster_id, response.controller_id) == (0, "cluster", 1)
                assert [(b.broker_id, b.host, b.port) for b in response.brokers] == [(1, ORIGIN.local_ip, 9092)]
            assert (
                await broker.send_request(DescribeClusterRequest(endpoint_type=2), 1)
            ).error_code == ErrorCode.MISMATCHED_ENDPOINT_TYPE
            assert (
                await broker.send_request(DescribeClusterRequest(endpoint_type=9), 1)
            ).error_code == ErrorCode.UNSUPPORTED_ENDPOINT_TYPE
            for version in versions(10):
                response = await broker.send_request(
                    FindCoordinatorRequest(key="g", coordinator_keys=["g", "h"]), version
                )
                found = response.coordinators if version >= 4 else [response]
                assert all((one.node_id, one.error_code) == (1, 0) for one in found) and len(found) == (
                    2 if version >= 4 else 1
                )
            assert (
                await broker.send_request(FindCoordinatorRequest(key="g", key_type=2), 3)
            ).error_code == ErrorCode.INVALID_REQUEST

    asyncio.run(run())


def test_api_versions(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            bodies = api_versions.bodies(broker.metadata.features, broker.metadata.features_version)
            for version in versions(18):
                request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
                response = await broker.send_request(request, version)
                supported = {key.api_key: (key.min_version, key.max_version) for key in response.api_keys}
                assert (
                    supported[0] == (0, 13)
                    and supported[1] == (4, 18)
                    and supported[18] == (0, 4)
                    and 71 not in supported
                )
                assert set(supported) == set(dispatch.HANDLERS)
                assert broker.last.body[4:] == bodies[version]
            outcome = await broker.frame(bytes.fromhex("00120009000012340003616263"))
            assert outcome.body[:4] == bytes.fromhex("00001234") and outcome.body[4:] == bodies[7]
            unsupported = codec.decode(ApiVersionsResponse, 0, bodies[7])
            assert unsupported.error_code == 35 and {key.api_key for key in unsupported.api_keys} == set(
                dispatch.HANDLERS
            )
            assert all(len(body) <= 4080 for body in bodies.values())

    asyncio.run(run())


@pytest.mark.parametrize("all_hosts_have_them", [False, True])
@pytest.mark.parametrize(
    ("feature", "level", "keys"),
    [
        (SHARE_VERSION, SHARE_GROUPS_LEVEL, api_versions.SHARE_GROUP_KEYS),
        (STREAMS_VERSION, STREAMS_GROUPS_LEVEL, api_versions.STREAMS_GROUP_KEYS),
    ],
)
def test_groups_are_advertised_where_all_hosts_have_them(
    feature: str, level: int, keys: frozenset[int], all_hosts_have_them: bool
) -> None:
    levels = {MQD_VERSION: level if all_hosts_have_them else level - 1, feature: 1}
    for version, body in api_versions.bodies(levels, 1).items():
        told = codec.decode(ApiVersionsResponse, 0 if version == api_versions.UNKNOWN_VERSION_BODY else version, body)
        assert {key.api_key for key in told.api_keys} & keys == (keys if all_hosts_have_them else set())


def test_every_advertised_api_has_a_handler_for_every_version() -> None:
    for key in dispatch.HANDLERS:
        assert callable(dispatch.handler_of(key))
        assert key in SUPPORTED


def test_all_waiting_requests_for_producer_ids_fail_together() -> None:
    """They failed one by one, each after the controller's timeout."""

    class Controller:
        def __init__(self) -> None:
            self.answers: list[asyncio.Future[messages.Response]] = []

        async def request(
            self, change: messages.Change, timeout_ms: int, validate_only: bool = False
        ) -> messages.Response:
            assert isinstance(change, messages.AllocateProducerIds)
            self.answers.append(asyncio.get_running_loop().create_future())
            return await self.answers[-1]

    async def run() -> None:
        controller = Controller()
        broker: Any = SimpleNamespace(controller=controller, producer_ids=ProducerIds())

        async def answered(count: int, response: messages.Response, given_up: int = 0) -> list[tuple[int, int]]:
            pending = [asyncio.create_task(producer_ids.allocate(broker)) for _ in range(count)]
            while not controller.answers:
                await asyncio.sleep(0)
            for one in pending[:given_up]:
                one.cancel()
            controller.answers.pop().set_result(response)
            return await asyncio.wait_for(asyncio.gather(*pending[given_up:]), 20)

        refused = (-1, int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        assert await answered(5, messages.Response(1, ErrorCode.REQUEST_TIMED_OUT), given_up=1) == 4 * [refused]
        assert sorted(await answered(5, messages.Response(2, 0, offset=7000, count=1000), given_up=1)) == [
            (7000 + number, 0) for number in range(4)
        ]
        assert await producer_ids.allocate(broker) == (7004, 0) and not controller.answers

    asyncio.run(run())


def test_producer_ids_are_assigned_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            responses = await asyncio.gather(
                *(broker.send_request(InitProducerIdRequest(), version) for version in versions(22) for _ in range(400))
            )
            assert sorted(response.producer_id for response in responses) == list(range(len(responses)))
            assert (
                {response.error_code for response in responses}
                == {0}
                == {response.producer_epoch for response in responses}
            )
            # FindCoordinator creates its topic
            assert (
                await broker.send_request(InitProducerIdRequest(transactional_id="t"), 4)
            ).error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE
            assert (
                await broker.send_request(InitProducerIdRequest(transactional_id=""), 4)
            ).error_code == ErrorCode.INVALID_REQUEST
        async with HandlerBroker(tmp_path) as broker:  # restarted: the rest of the block is lost, never assigned again
            assert (await broker.send_request(InitProducerIdRequest(), 4)).producer_id >= len(responses)

    asyncio.run(run())


def test_old_produce_is_refused_by_partition(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            data = [
                ProduceRequest.TopicData(
                    name="t", partition_data=[ProduceRequest.PartitionData(index=4, records=b"old")]
                )
            ]
            for version in range(3):
                response = await broker.send_request(ProduceRequest(acks=1, topic_data=data), version)
                (partition,) = response.responses[0].partition_responses
                assert (partition.index, partition.error_code, partition.base_offset) == (
                    4,
                    ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
                    -1,
                )
            assert (await broker.frame(encode_request(ProduceRequest(acks=0, topic_data=data), 1, 1))).close_reason

    asyncio.run(run())
