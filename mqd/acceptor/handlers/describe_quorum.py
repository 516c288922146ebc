"""DescribeQuorum 0-2 (KIP-595, KIP-836, KIP-853): the metadata quorum. One host is a quorum of one: the controller on this host leads, and is its only voter.

Offsets are those of the metadata log; everything that is known here has been flushed. Another topic than __cluster_metadata has no quorum.
"""

import time

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.metadata_rules import METADATA_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import DescribeQuorumRequest, DescribeQuorumResponse

NO_ID = b"\0" * 16


async def handle(context: Context, header: RequestHeader, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    broker = context.broker
    topics = [
        DescribeQuorumResponse.TopicData(
            topic_name=topic.topic_name, partitions=[_partition(broker, topic.topic_name, partition.partition_index) for partition in topic.partitions]
        )
        for topic in request.topics
    ]
    host, port = broker.advertised(context.address)
    listener = DescribeQuorumResponse.Listener(name="CONTROLLER", host=host, port=port)
    return DescribeQuorumResponse(topics=topics, nodes=[DescribeQuorumResponse.Node(node_id=broker.node_id, listeners=[listener])])


def _epoch(broker: Broker) -> int:
    """It rises whenever the host is started anew: the offset of its registration in the metadata log."""
    registered = broker.metadata.brokers.get(broker.node_id)
    return min(registered.epoch, 2**31 - 1) if registered is not None else 0


def _partition(broker: Broker, topic: str, index: int) -> DescribeQuorumResponse.PartitionData:
    if (topic, index) != (METADATA_TOPIC, 0):
        return DescribeQuorumResponse.PartitionData(
            partition_index=index,
            error_code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            error_message=f"Only {METADATA_TOPIC}-0 has a quorum.",
            leader_id=-1,
            leader_epoch=-1,
            high_watermark=-1,
        )
    now_ms = time.time_ns() // 1_000_000
    version = max(broker.metadata.version, 0)
    voter = DescribeQuorumResponse.ReplicaState(
        replica_id=broker.node_id, replica_directory_id=NO_ID, log_end_offset=version, last_fetch_timestamp=now_ms, last_caught_up_timestamp=now_ms
    )
    return DescribeQuorumResponse.PartitionData(
        partition_index=index, leader_id=broker.node_id, leader_epoch=_epoch(broker), high_watermark=version, current_voters=[voter], observers=[]
    )
