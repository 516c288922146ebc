"""A transaction's marker between hosts names the leader epoch for which it is meant. A marker
delayed by the network, while another leader wrote it, ended the producer's next transaction when
its host led again (clients before KIP-890).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from mqd.acceptor.broker_state import Origin
from mqd.acceptor.interbroker.transactions import MarkerToWrite
from mqd.acceptor.transactions import TransactionService
from mqd.coordinator.topics import OFFSETS_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import FindCoordinatorRequest, WriteTxnMarkersRequest
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

OF_ANOTHER_HOST = Origin(peer_node=3)


async def _marked(broker: HandlerBroker, topic: str, leader_epoch: int) -> tuple[int, int]:
    """(error, batches written)"""
    before = len(broker.owners.batches)
    marker = WriteTxnMarkersRequest.Marker(
        producer_id=7,
        producer_epoch=0,
        transaction_result=True,
        topics=[WriteTxnMarkersRequest.Topic(name=topic, partition_indexes=[0])],
        coordinator_epoch=0,
        leader_epoch=leader_epoch,
    )
    response = await broker.send_request(WriteTxnMarkersRequest(markers=[marker]), 2, OF_ANOTHER_HOST)
    return response.markers[0].topics[0].partitions[0].error_code, len(broker.owners.batches) - before


@pytest.mark.parametrize(
    ("topic", "refused"), [("t", ErrorCode.NOT_LEADER_OR_FOLLOWER), (OFFSETS_TOPIC, ErrorCode.NOT_COORDINATOR)]
)
def test_a_marker_is_only_written_in_its_leader_epoch(tmp_path: Path, topic: str, refused: ErrorCode) -> None:
    async def scenario() -> None:
        async with HandlerBroker(tmp_path, {"offsets.topic.num.partitions": "1"}) as broker:
            await create(broker, "t", 1)
            await broker.send_request(FindCoordinatorRequest(key="g", coordinator_keys=["g"]), 4)
            while topic == OFFSETS_TOPIC and broker.broker.coordinators.groups.partition_states[0].shard is None:
                await asyncio.sleep(0.001)
            epoch = broker.metadata.topics[topic].partitions[0].leader_epoch
            assert await _marked(broker, topic, epoch + 1) == (refused, 0)
            assert await _marked(broker, topic, epoch) == (0, 1)
            assert await _marked(broker, topic, -1) == (0, 1), "of a host that does not know the field"
            if epoch:
                assert await _marked(broker, topic, epoch - 1) == (refused, 0)

    asyncio.run(scenario())


def test_a_marker_names_the_current_leader_and_epoch() -> None:
    sent: list[tuple[int, MarkerToWrite]] = []
    partitions = {("t", 0): SimpleNamespace(leader=3, leader_epoch=5)}
    broker = SimpleNamespace(
        node_id=1,
        broker_number=lambda _name: 1_000,
        metadata=SimpleNamespace(may_exist=None, successor_of=lambda *_: -1),
        partition_of=lambda *key: partitions[key],
    )
    service = TransactionService(broker, broker)  # type: ignore[arg-type]
    service._remote_markers = SimpleNamespace(write=lambda node, marker: sent.append((node, marker)))  # type: ignore[assignment]
    service.append_marker("t", 0, 7, 0, 2, True)
    partitions["t", 0] = SimpleNamespace(leader=4, leader_epoch=6)
    service.append_marker("t", 0, 7, 0, 2, True)
    assert sent == [
        (3, MarkerToWrite(("t", 0), 7, 0, 2, True, False, 5)),
        (4, MarkerToWrite(("t", 0), 7, 0, 2, True, False, 6)),
    ]
