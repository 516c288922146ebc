"""Deletion on acknowledgement: records of topics with queue.delete.on.ack are deleted when every share
group is done with them.

Each host does it for the partitions that it leads: every `queue.delete.on.ack.interval.ms` it
queries all coordinators of `__share_group_state` for the start offsets of the groups of its topics,
and moves the log start of its partitions, as DeleteRecords does. For the rules see
mqd/coordinator/share/deletion.py.

Bounds: at most IN_FLIGHT_MAX queries of share-partitions, and deletions, are in flight.
Concurrency: the event loop's thread.
"""

import asyncio
from typing import Any

from mqd.acceptor.broker_state import BrokerState
from mqd.acceptor.interbroker.client import PeerError, Peers
from mqd.base import logging
from mqd.base.tasks import Periodic
from mqd.cluster.host import messages
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.coordinator.partition_state import PartitionState
from mqd.coordinator.runtime import Coordinator
from mqd.coordinator.share.core import ReadSummary, SharePartition
from mqd.coordinator.share.deletion import (
    UNINITIALIZED,
    StartOffsets,
    TopicPartition,
    deletable_ends,
    lowest_by_partition,
)
from mqd.coordinator.share.records import split_name
from mqd.protocol.api import decode_request, encode_response
from mqd.protocol.headers import KNOWN
from mqd.protocol.messages import ShareStartsRequest, ShareStartsResponse

SHARE_STARTS, VERSION = 20_000, 0
TIMEOUT_S, DELETE_TIMEOUT_MS = 5.0, 30_000
IN_FLIGHT_MAX = 100
PROPERTY = "queue.delete.on.ack"
FAILURE = "records that every share group is done with cannot be deleted"

log = logging.get("acceptor.share")


class QueueDeletion:
    """`share`: the coordinator of share-partitions' states."""

    def __init__(self, broker: BrokerState, share: Coordinator) -> None:
        self._broker = broker
        self._share = share
        self.peers: Peers | None = None  # set before the first request if there are other hosts
        self._slots = asyncio.Semaphore(IN_FLIGHT_MAX)
        self.periodic_task = Periodic(
            lambda: broker.broker_number("queue.delete.on.ack.interval.ms") / 1000, self.delete, log, FAILURE
        )

    async def delete(self) -> None:
        """Deletes once, in all partitions that this host leads."""
        topics = self._topics()
        state_topic = self._broker.metadata.topics.get(self._share.topic)
        if not topics or state_topic is None:
            return
        leaders = {partition.leader for partition in state_topic.partitions}
        responses = await asyncio.gather(*(self._query(leader, frozenset(topics)) for leader in leaders))
        end_offsets = deletable_ends(
            [response for response in responses if response is not None], len(state_topic.partitions)
        )
        await asyncio.gather(*(self._delete(topics[key[0]], key[1], offset) for key, offset in end_offsets.items()))

    def _topics(self) -> dict[bytes, str]:
        return {
            topic.topic_id: topic.name
            for topic in self._broker.metadata.topics.values()
            if topic.config.get(PROPERTY) == "true"
            and any(partition.leader == self._broker.node_id for partition in topic.partitions)
        }

    async def _delete(self, topic: str, index: int, offset: int) -> None:
        async with self._slots:
            partition = self._broker.partition_of(topic, index)
            view = self._broker.view(partition) if partition is not None else None
            if view is None or not view.log_start_offset < offset <= view.high_watermark:
                return
            change = messages.DeleteRecords(topic, index, offset)
            response = await self._broker.controller.request(change, DELETE_TIMEOUT_MS)
        if response.error:
            log.warning(FAILURE, topic=topic, partition=index, offset=offset, reason=response.message)

    # -- queries and responses ---------------------------------------------------------------------

    async def _query(self, node_id: int, topic_ids: frozenset[bytes]) -> StartOffsets | None:
        """Returns the start offsets of the share-partitions that the host coordinates, or None if the
        host does not respond, or is not known.
        """
        if node_id == self._broker.node_id:
            return await self._local_start_offsets(topic_ids)
        if node_id < 0 or self.peers is None:
            return None
        try:
            request = ShareStartsRequest(topic_ids=list(topic_ids))
            response: ShareStartsResponse = await self.peers.request(node_id, request, VERSION, TIMEOUT_S)
        except PeerError as error:
            log.info("a coordinator of share groups' states does not respond", node=node_id, reason=str(error))
            return None
        start_offsets = {
            (topic.topic_id, partition.partition): partition.start_offset
            for topic in response.topics
            for partition in topic.partitions
        }
        return StartOffsets(frozenset(response.state_partitions), start_offsets)

    async def serve(self, frame: bytes) -> bytes:
        """Answers another host's ShareStarts request. Raises ProtocolError."""
        header, request = decode_request(frame, KNOWN)
        assert isinstance(request, ShareStartsRequest)
        start_offsets = await self._local_start_offsets(frozenset(request.topic_ids))
        topics: dict[bytes, list[ShareStartsResponse.Partition]] = {}
        for (topic_id, partition), offset in start_offsets.lowest.items():
            topics.setdefault(topic_id, []).append(ShareStartsResponse.Partition(partition, offset))
        return encode_response(
            header,
            ShareStartsResponse(
                list(start_offsets.state_partitions),
                [ShareStartsResponse.Topic(topic_id, partitions) for topic_id, partitions in topics.items()],
            ),
        )

    async def _local_start_offsets(self, topic_ids: frozenset[bytes]) -> StartOffsets:
        """The start offsets of the share-partitions that this host coordinates."""
        if not self._broker.may_lead():
            return StartOffsets(frozenset(), {})
        states = [state for state in self._share.partition_states if state.shard is not None]
        responses = await asyncio.gather(*(self._start_offsets_in(state, topic_ids) for state in states))
        answered = [(state, starts) for state, starts in zip(states, responses, strict=True) if starts is not None]
        return StartOffsets(
            frozenset(state.index for state, _ in answered),
            lowest_by_partition(item for _, starts in answered for item in starts),
        )

    async def _start_offsets_in(
        self, state: PartitionState, topic_ids: frozenset[bytes]
    ) -> list[tuple[TopicPartition, int]] | None:
        """Returns the start offsets that one state partition has, or None if at least one of them is
        unknown. A share-partition's core responds only when its state is persisted (Q3).
        """
        assert state.shard is not None
        names = [
            name
            for name, core in state.shard.items()
            if isinstance(core, SharePartition) and core.exists and core.topic_id in topic_ids
        ]
        try:
            return list(await asyncio.gather(*map(self._start_offset, names)))
        except CoordinatorError:
            return None

    async def _start_offset(self, name: str) -> tuple[TopicPartition, int]:
        async with self._slots:
            summary: Any = await self._share.request(name, ReadSummary, TIMEOUT_S)
        _, topic_id, partition = split_name(name)
        image = self._broker.metadata.by_id(topic_id)
        if image is None or partition >= len(image.partitions):
            return (topic_id, partition), UNINITIALIZED
        is_current = summary.leader_epoch >= image.partitions[partition].leader_epoch  # Q5
        return (topic_id, partition), summary.start_offset if is_current else UNINITIALIZED
