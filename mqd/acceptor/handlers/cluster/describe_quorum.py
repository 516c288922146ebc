"""DescribeQuorum 0-2 (KIP-595, KIP-836, KIP-853): the metadata quorum, as its leader sees it. A
single host is a quorum of one: its controller is the leader and only voter.

Offsets are those of the metadata log. A single host's log end and high watermark are the same here:
the acceptor learns metadata only once it has been flushed. Only __cluster_metadata has a quorum.
"""

import time

from mqd.acceptor.broker import Broker, Context
from mqd.cluster.host import messages
from mqd.cluster.metadata.rules.topics import METADATA_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeQuorumRequest, DescribeQuorumResponse

NO_ID = b"\0" * 16
TIMEOUT_MS = 10_000  # the request has no timeout field


async def handle(context: Context, header: RequestHeader, request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    broker = context.broker
    requested = [(topic.topic_name, part.partition_index) for topic in request.topics for part in topic.partitions]
    if requested != [(METADATA_TOPIC, 0)] or len(request.topics) > 1:
        return _unknown_partitions(request)
    if not broker.metadata.is_single_host:
        return await _request_controller(broker)
    host, port = broker.advertised_address(context.origin)
    listener = DescribeQuorumResponse.Listener(name="CONTROLLER", host=host, port=port)
    return _response(_partition(broker), [DescribeQuorumResponse.Node(node_id=broker.node_id, listeners=[listener])])


def _response(
    partition: DescribeQuorumResponse.PartitionData, nodes: list[DescribeQuorumResponse.Node]
) -> DescribeQuorumResponse:
    topic = DescribeQuorumResponse.TopicData(topic_name=METADATA_TOPIC, partitions=[partition])
    return DescribeQuorumResponse(topics=[topic], nodes=nodes)


async def _request_controller(broker: Broker) -> DescribeQuorumResponse:
    response = await broker.controller.request(messages.DescribeQuorum(), TIMEOUT_MS)
    quorum = response.quorum
    if response.error or quorum is None:
        return DescribeQuorumResponse(
            error_code=response.error or int(ErrorCode.NOT_LEADER_OR_FOLLOWER), error_message=response.message
        )
    nodes = [
        DescribeQuorumResponse.Node(
            node_id=replica.node_id,
            listeners=[DescribeQuorumResponse.Listener(name="CONTROLLER", host=replica.host, port=replica.port)],
        )
        for replica in [*quorum.voters, *quorum.observers]
        if replica.host
    ]
    return _response(_quorum_partition(quorum), nodes)


def _quorum_partition(quorum: messages.QuorumImage) -> DescribeQuorumResponse.PartitionData:
    return DescribeQuorumResponse.PartitionData(
        leader_id=quorum.leader_id,
        leader_epoch=quorum.leader_epoch,
        high_watermark=quorum.high_watermark,
        current_voters=[_replica(replica) for replica in quorum.voters],
        observers=[_replica(replica) for replica in quorum.observers],
        fetch_timeout_ms=quorum.fetch_timeout_ms,
    )


def _replica(replica: messages.QuorumReplica) -> DescribeQuorumResponse.ReplicaState:
    return DescribeQuorumResponse.ReplicaState(
        replica_id=replica.node_id,
        replica_directory_id=replica.directory_id if len(replica.directory_id) == len(NO_ID) else NO_ID,
        log_end_offset=replica.log_end_offset,
        last_fetch_timestamp=replica.last_fetch_ms,
        last_caught_up_timestamp=replica.last_caught_up_ms,
    )


def _unknown_partitions(request: DescribeQuorumRequest) -> DescribeQuorumResponse:
    """The response to a request for anything but the one partition that has a quorum: refused as a
    whole, as in Kafka."""
    return DescribeQuorumResponse(
        topics=[
            DescribeQuorumResponse.TopicData(
                topic_name=topic.topic_name,
                partitions=[
                    DescribeQuorumResponse.PartitionData(
                        partition_index=part.partition_index,
                        error_code=int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
                        error_message=f"Only {METADATA_TOPIC}-0 has a quorum; it must be the only partition named.",
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _epoch(broker: Broker) -> int:
    """The offset of the host's registration in the metadata log, which rises with every restart of
    the host.
    """
    registered = broker.metadata.brokers.get(broker.node_id)
    return min(registered.epoch, 2**31 - 1) if registered is not None else 0


def _partition(broker: Broker) -> DescribeQuorumResponse.PartitionData:
    now_ms = time.time_ns() // 1_000_000
    version = max(broker.metadata.version, 0)
    voter = DescribeQuorumResponse.ReplicaState(
        replica_id=broker.node_id,
        replica_directory_id=NO_ID,
        log_end_offset=version,
        last_fetch_timestamp=now_ms,
        last_caught_up_timestamp=now_ms,
    )
    return DescribeQuorumResponse.PartitionData(
        leader_id=broker.node_id,
        leader_epoch=_epoch(broker),
        high_watermark=version,
        current_voters=[voter],
        observers=[],
    )
