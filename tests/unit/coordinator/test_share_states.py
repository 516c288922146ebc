"""Share-partitions' states between workers, the group coordinator, the share coordinator and its
log: the real controller and metadata, owners of partitions played by the test.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mqd.acceptor import share_pruning
from mqd.acceptor.interbroker.client import PeerError
from mqd.acceptor.interbroker.share_states import DELETE, INITIALIZE, READ, READ_SUMMARY, WRITE, ShareStates
from mqd.cluster.host.messages import DeleteRecords, Response
from mqd.coordinator.group.group import DeleteGroup
from mqd.coordinator.group.settings import PACKED
from mqd.coordinator.group.share.events import ShareHeartbeat
from mqd.coordinator.internal_topic import partition_for
from mqd.coordinator.share.core import Settings, SharePartition
from mqd.coordinator.share.records import name_of_key, share_partition_name
from mqd.coordinator.topics import SHARE_STATES_TOPIC
from mqd.log import records
from mqd.log.batches import parse_header
from mqd.protocol import codec
from mqd.protocol.api import decode_response, encode_request
from mqd.protocol.errors import ProtocolError
from mqd.protocol.messages import (
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    FindCoordinatorRequest,
    IncrementalAlterConfigsRequest,
    ReadShareGroupStateRequest,
    ShareGroupHeartbeatRequest,
    WriteShareGroupStateRequest,
    message_class,
)
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

CONFIG = {"offsets.topic.num.partitions": "2", "share.coordinator.state.topic.num.partitions": "3"}
VERSIONS = {INITIALIZE: 0, READ: 0, WRITE: 1, DELETE: 0, READ_SUMMARY: 1}
_StateBatch = WriteShareGroupStateRequest.StateBatch


def run(tmp_path: Path, scenario) -> None:
    async def body() -> None:
        async with HandlerBroker(tmp_path, CONFIG) as broker:
            await create(broker, "t", 2)
            await scenario(broker)

    asyncio.run(body())


def states_of(broker: HandlerBroker) -> ShareStates:
    assert broker.broker.coordinators is not None
    return broker.broker.coordinators.share_states


async def send_request(
    broker: HandlerBroker, api_key: int, partition: int = 0, group: str = "g", topic: str = "t", **fields: Any
):
    """The partition of the response, encoded and decoded as for a worker."""
    image = broker.metadata.topics.get(topic)
    message = message_class(api_key, "Request")
    one = message.Partition(partition=partition, **fields)
    topic_id = image.topic_id if image is not None else b"x" * 16
    request = message(group_id=group, topics=[message.Topic(topic_id=topic_id, partitions=[one])])
    body = await states_of(broker).respond_to_worker(api_key, bytes(codec.encode(request, VERSIONS[api_key])))
    response = codec.decode(message_class(api_key, "Response"), VERSIONS[api_key], body[PACKED.size :])
    (answered,) = response.results
    assert answered.topic_id == topic_id
    (found,) = answered.partitions
    assert found.partition == partition
    return found


def test_responses_begin_with_the_groups_settings(tmp_path: Path) -> None:
    async def settings(broker: HandlerBroker) -> tuple[int, ...]:
        message = message_class(READ, "Request")
        topic = message.Topic(topic_id=bytes(16), partitions=[message.Partition(partition=0)])
        request = message(group_id="g", topics=[topic])
        body = await states_of(broker).respond_to_worker(READ, bytes(codec.encode(request, 0)))
        return PACKED.unpack(body[: PACKED.size])

    async def alter(broker: HandlerBroker, **values: str) -> int:
        message = IncrementalAlterConfigsRequest
        configs = [message.Config(name=name.replace("_", "."), value=value) for name, value in values.items()]
        request = message(resources=[message.Resource(resource_type=32, resource_name="g", configs=configs)])
        return (await broker.send_request(request, 1)).responses[0].error_code

    async def scenario(broker: HandlerBroker) -> None:
        assert PACKED.size == 32
        assert await settings(broker) == (30_000, 5, 2_000, 0, 0, 0, 0, 0, 0, 60_000)
        assert not await alter(broker, share_isolation_level="read_committed", share_auto_offset_reset="earliest")
        assert await settings(broker) == (30_000, 5, 2_000, 1, 1, 0, 0, 0, 0, 60_000)
        by_duration = {"share_record_lock_duration_ms": "45000", "share_auto_offset_reset": "by_duration:PT2M"}
        assert not await alter(broker, **by_duration)
        assert not await alter(broker, share_retry_backoff_ms="250", share_retry_backoff_max_ms="4000")
        assert await settings(broker) == (45_000, 5, 2_000, 1, 2, 0, 0, 0, 250, 4_000)
        assert not await alter(broker, errors_deadletterqueue_topic_name="dlq.g")
        assert await settings(broker) == (45_000, 5, 2_000, 1, 2, 1, 0, 0, 250, 4_000)
        assert not await alter(broker, share_fifo="key")
        assert await settings(broker) == (45_000, 5, 2_000, 1, 2, 3, 0, 0, 250, 4_000)
        assert not await alter(broker, errors_deadletterqueue_topic_name="", share_fifo="header:ord")
        assert await settings(broker) == (45_000, 5, 2_000, 1, 2, 2, 3, 0, 250, 4_000)
        assert not await alter(broker, share_fifo="")
        for refused in (
            {"share_record_lock_duration_ms": "14999"},
            {"share_record_lock_duration_ms": "60001"},
            {"share_auto_offset_reset": "by_duration:-PT1S"},
            {"share_isolation_level": "serializable"},
            {"share_retry_backoff_ms": "4001"},
            {"share_retry_backoff_max_ms": "249"},
            {"share_retry_backoff_max_ms": "60001"},
            {"share_fifo": "order-id"},
            {"share_fifo": "header:"},
            {"share_fifo": "header:" + 64 * "x"},
            {"errors_deadletterqueue_topic_name": "letters"},
            {"errors_deadletterqueue_topic_name": "__letters"},
        ):
            assert await alter(broker, **refused) == 40
        described = DescribeConfigsRequest
        request = described(resources=[described.Resource(resource_type=32, resource_name="g")], include_synonyms=True)
        found = {one.name: one for one in (await broker.send_request(request, 4)).results[0].configs}
        assert (found["share.auto.offset.reset"].value, found["share.auto.offset.reset"].config_source) == (
            "by_duration:PT2M",
            8,
        )
        assert found["share.isolation.level"].value == "read_committed"
        assert found["share.record.lock.duration.ms"].value == "45000"

    run(tmp_path, scenario)


def test_a_dead_letter_topic_is_deleted_whatever_its_old_value(tmp_path: Path) -> None:
    """Java's AdminClient sends the old value with DELETE. The topic takes no dead letters any more."""

    async def alter(broker: HandlerBroker, operation: int) -> int:
        message = IncrementalAlterConfigsRequest
        config = message.Config(name="errors.deadletterqueue.topic.name", value="dlq.g", config_operation=operation)
        request = message(resources=[message.Resource(resource_type=32, resource_name="g", configs=[config])])
        return (await broker.send_request(request, 1)).responses[0].error_code

    async def scenario(broker: HandlerBroker) -> None:
        assert await alter(broker, 0) == 0
        await create(broker, "dlq.g", 1)
        assert await alter(broker, 0) == 40 and await alter(broker, 1) == 0

    run(tmp_path, scenario)


def test_a_share_partition_starts_by_duration(tmp_path: Path) -> None:
    """Where READ has no start, the offset is looked up; an error of the lookup is retriable."""

    async def scenario(broker: HandlerBroker) -> None:
        requests: list[tuple[bytes, int, int]] = []
        found = [(17, 0), (-1, 0), (-1, 56)]

        async def first_offset_since(topic_id: bytes, partition: int, since_ms: int) -> tuple[int, int]:
            requests.append((topic_id, partition, since_ms))
            return found[len(requests) - 1]

        async def read(partition: int) -> tuple[int, int]:
            message, topic_id = message_class(READ, "Request"), broker.metadata.topics["t"].topic_id
            one = message.Partition(partition=partition, leader_epoch=0)
            request = message(group_id="g", topics=[message.Topic(topic_id=topic_id, partitions=[one])])
            body = await states_of(broker).respond_to_worker(READ, bytes(codec.encode(request, 0)))
            response = codec.decode(message_class(READ, "Response"), 0, body[PACKED.size :])
            return PACKED.unpack(body[: PACKED.size])[7], response.results[0].partitions[0].error_code

        states_of(broker).first_offset_since = first_offset_since
        message = IncrementalAlterConfigsRequest
        configs = [message.Config(name="share.auto.offset.reset", value="by_duration:PT2M")]
        await broker.send_request(
            message(resources=[message.Resource(resource_type=32, resource_name="g", configs=configs)]), 1
        )
        await send_request(broker, INITIALIZE, state_epoch=0, start_offset=-1)
        assert await read(0) == (17, 0)
        assert await read(0) == (-1, 0)
        assert await read(0) == (-1, 15)
        await send_request(broker, INITIALIZE, partition=1, state_epoch=0, start_offset=5)
        assert await read(1) == (0, 0)
        assert [one[:2] for one in requests] == [(broker.metadata.topics["t"].topic_id, 0)] * 3
        assert abs(requests[0][2] + 120_000 - time.time() * 1000) < 60_000

    run(tmp_path, scenario)


async def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("never came true")


def test_a_worker_reads_and_writes(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert (await send_request(broker, READ, leader_epoch=1)).error_code == 42
        topic = broker.metadata.topics[SHARE_STATES_TOPIC]
        assert topic.internal and len(topic.partitions) == 3
        assert (topic.config["cleanup.policy"], topic.config["retention.ms"]) == ("delete", "-1")
        assert (await send_request(broker, INITIALIZE, state_epoch=2, start_offset=-1)).error_code == 0
        assert (await send_request(broker, READ, leader_epoch=1)).start_offset == -1
        batches = [_StateBatch(5, 9, 2, 1), _StateBatch(12, 12, 4, 5)]
        write = {"state_epoch": 2, "leader_epoch": 1, "start_offset": 4, "delivery_complete_count": 6}
        assert (await send_request(broker, WRITE, state_batches=batches, **write)).error_code == 0
        found = await send_request(broker, READ, leader_epoch=3)
        assert (found.start_offset, found.state_epoch) == (4, 2)
        assert [(one.first_offset, one.last_offset) for one in found.state_batches] == [(5, 9), (12, 12)]
        assert (await send_request(broker, WRITE, **write)).error_code == 74
        summary = await send_request(broker, READ_SUMMARY)
        assert (summary.leader_epoch, summary.start_offset, summary.delivery_complete_count) == (3, 4, 6)
        assert (await send_request(broker, DELETE)).error_code == 0
        assert (await send_request(broker, WRITE, **write)).error_code == 42

    run(tmp_path, scenario)


def test_requests_refused_before_they_reach_a_core(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert (await send_request(broker, READ, topic="none")).error_code == 3
        assert (await send_request(broker, READ, partition=2)).error_code == 3
        assert (await send_request(broker, READ, partition=-1)).error_code == 42
        assert (await send_request(broker, READ, group="")).error_code == 42
        await send_request(broker, INITIALIZE, state_epoch=0, start_offset=0)
        upside_down = [_StateBatch(9, 5, 2, 1)]
        assert (await send_request(broker, WRITE, state_batches=upside_down)).error_code == 42
        for api_key in VERSIONS:
            for body in (b"", b"\x02g", b"\xff" * 40):
                with pytest.raises(ProtocolError):
                    await states_of(broker).respond_to_worker(api_key, body)
        message = message_class(READ, "Request")
        none = message.Topic(topic_id=bytes(16))
        for topics in ([], [none], [none, message.Topic(topic_id=bytes(16), partitions=[message.Partition()])]):
            with pytest.raises(ProtocolError, match="one share-partition"):
                await states_of(broker).respond_to_worker(
                    READ, bytes(codec.encode(message(group_id="g", topics=topics), 0))
                )

    run(tmp_path, scenario)


def test_another_host_coordinates(tmp_path: Path) -> None:
    """The request goes to its leader; without a response the error is a retriable one."""

    class Peers:
        def __init__(self) -> None:
            self.requested: list[tuple[int, object, int]] = []

        async def request(self, node_id: int, request: object, version: int, timeout_s: float) -> object:
            self.requested.append((node_id, request, version))
            if len(self.requested) > 1:
                raise PeerError("gone")
            response = message_class(READ, "Response")
            one = response.Partition(partition=0, start_offset=77)
            return response(results=[response.Topic(topic_id=bytes(16), partitions=[one])])

    async def scenario(broker: HandlerBroker) -> None:
        await send_request(broker, INITIALIZE, state_epoch=0, start_offset=0)
        name = share_partition_name("g", broker.metadata.topics["t"].topic_id, 0)
        partitions = broker.metadata.topics[SHARE_STATES_TOPIC].partitions
        index = partition_for(name, 3)
        partitions[index] = msgspec.structs.replace(partitions[index], leader=9)
        peers = states_of(broker).peers = Peers()  # type: ignore[assignment]
        assert (await send_request(broker, READ, leader_epoch=1)).start_offset == 77
        (node_id, request, version) = peers.requested[0]
        assert (node_id, version) == (9, 0) and isinstance(request, ReadShareGroupStateRequest)
        assert (await send_request(broker, READ, leader_epoch=1)).error_code == 15
        # a host that mistakes this one for the leader: the request is not forwarded
        frame = encode_request(request, 0, 5)
        _, response = decode_response(await states_of(broker).serve(frame), READ, 0)
        assert response.results[0].partitions[0].error_code == 16
        assert len(peers.requested) == 2

    run(tmp_path, scenario)


def test_a_share_group_from_its_first_heartbeat_to_its_deletion(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        await broker.send_request(FindCoordinatorRequest(coordinator_keys=["g"]), 4)
        coordinators = broker.broker.coordinators
        assert coordinators is not None
        groups = coordinators.groups

        async def heartbeat(epoch: int, names: list[str] | None = None):
            message = ShareGroupHeartbeatRequest(
                group_id="g", member_id="m", member_epoch=epoch, subscribed_topic_names=names
            )
            return await groups.request("g", lambda number: ShareHeartbeat(number, "c", "/h", message))

        first = await heartbeat(0, ["t"])
        assert (first.error_code, first.member_epoch, first.heartbeat_interval_ms) == (0, 1, 1_000)
        assert first.assignment.topic_partitions == []
        await until(lambda: groups.core("g").share.states.initialized)
        second = await heartbeat(1)
        (assigned,) = second.assignment.topic_partitions
        assert (second.member_epoch, assigned.partitions) == (2, [0, 1])
        assert (await send_request(broker, READ, partition=1, leader_epoch=0)).state_epoch == 1
        assert await groups.request("g", DeleteGroup) == 68
        assert (await heartbeat(-1)).error_code == 0
        assert await groups.request("g", DeleteGroup) == 0
        assert groups.core("g") is None
        assert (await send_request(broker, READ, leader_epoch=0)).error_code == 42

    run(tmp_path, scenario)


def test_a_deleted_topic_is_forgotten(tmp_path: Path) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        assert (await send_request(broker, INITIALIZE, state_epoch=0, start_offset=0)).error_code == 0
        await create(broker, "other", 1)
        assert (await send_request(broker, INITIALIZE, topic="other", state_epoch=0, start_offset=0)).error_code == 0
        share = broker.broker.coordinators.share
        assert len(list(share.items())) == 2
        await broker.send_request(DeleteTopicsRequest(topic_names=["t"], timeout_ms=1_000), 5)
        await until(lambda: len(list(share.items())) == 1)
        assert (await send_request(broker, READ, topic="other", leader_epoch=0)).error_code == 0

    run(tmp_path, scenario)


def state_after(broker: HandlerBroker, partition: int, start_offset: int, name: str) -> tuple[object, ...]:
    """The share-partition's state according to its coordinator's log from that offset on."""
    core = SharePartition(name, Settings())
    offset = 0
    for slot, batch in broker.owners.batches:
        if slot != broker.metadata.topics[SHARE_STATES_TOPIC].partitions[partition].slot:
            continue
        for record in records.records(parse_header(batch, 0, 0), batch):
            if offset >= start_offset and name_of_key(record.key) == name:
                core.replay(record.key, record.value)
            offset += 1
    return core.durable_state()


@pytest.mark.parametrize("moves", [False, True])
def test_records_before_the_snapshots_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool) -> None:
    async def scenario(broker: HandlerBroker) -> None:
        coordinators = broker.broker.coordinators
        pruning, share = coordinators.share_pruning, coordinators.share
        deleted: list[DeleteRecords] = []

        async def request(change: DeleteRecords, timeout_ms: int) -> Response:
            deleted.append(change)
            return Response(1, 0, "")

        for group in ("g", "idle"):
            await send_request(broker, INITIALIZE, group=group, state_epoch=2, start_offset=5)
        name = share_partition_name("g", broker.metadata.topics["t"].topic_id, 0)
        place = share.partition_states[share.partition_for(name)]
        write = {"state_epoch": 2, "leader_epoch": 1, "start_offset": -1, "delivery_complete_count": 1}
        for offset in range(8, 14):
            assert not (
                await send_request(broker, WRITE, state_batches=[_StateBatch(offset, offset, 2, 1)], **write)
            ).error_code
        monkeypatch.setattr(broker.broker, "controller", SimpleNamespace(request=request))
        assert await pruning.prune(place) == -1 and not deleted  # too little
        monkeypatch.setattr(share_pruning, "RECORDS_MIN", 6)
        before = share.core(name).durable_state()
        end_offset = place.shard.end_offset
        pruned = asyncio.ensure_future(pruning.prune(place))
        if moves:
            await asyncio.sleep(0)
            place.shard.leader_epoch += 1
            assert await pruned == -1 and not deleted
            return
        # records written meanwhile
        written = send_request(broker, WRITE, state_batches=[_StateBatch(20, 20, 4, 5)], **write)
        assert await pruned == end_offset == deleted[0].offset
        assert (deleted[0].name, deleted[0].partition) == (SHARE_STATES_TOPIC, place.index)
        assert state_after(broker, place.index, end_offset, name)[2:] == before[2:]
        assert not (await written).error_code
        for each, core in place.shard.items():
            assert state_after(broker, place.index, end_offset, each) == core.durable_state()

    run(tmp_path, scenario)
