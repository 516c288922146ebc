"""Requests to a cluster from inside the clients' namespace, without a process for each: one thread
runs there (setns(2) only affects the calling thread).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from mqd.protocol.messages import (
    AlterPartitionReassignmentsRequest,
    DescribeQuorumRequest,
    ElectLeadersRequest,
    MetadataRequest,
)
from tests.kafka_connection import ConnectionEnded, KafkaConnection

CLONE_NEWNET = 0x40000000
CONNECT_S, ANSWER_S = 1.0, 20.0
_METADATA, _ELECT_LEADERS, _REASSIGN, _DESCRIBE_QUORUM = 3, 43, 45, 55
Answer = TypeVar("Answer")


class Report(NamedTuple):
    """According to one host. -1: it knows none."""

    controller: int
    leader: int
    in_sync: tuple[int, ...]
    replicas: tuple[int, ...]


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace)


class Asking:
    def __init__(self, namespace: str, hosts: dict[int, tuple[str, int]]) -> None:
        self._hosts = hosts
        self._thread = ThreadPoolExecutor(1, initializer=_enter, initargs=(namespace,))

    def _with_any(self, work: Callable[[KafkaConnection], Answer], nodes: list[int]) -> Answer | None:
        def run() -> Answer | None:
            for node in nodes:
                try:
                    with KafkaConnection(*self._hosts[node], timeout_s=CONNECT_S) as kafka:
                        kafka.socket.settimeout(ANSWER_S)
                        return work(kafka)
                except (OSError, ConnectionEnded):
                    continue
            return None

        return self._thread.submit(run).result()

    def report(self, topic: str, nodes: list[int] | None = None) -> Report | None:
        """Of partition 0, by the first of these hosts that responds; None: none of them, or it does
        not know the topic.
        """

        def request(kafka: KafkaConnection) -> Report | None:
            response = kafka.call(
                _METADATA,
                12,
                MetadataRequest(topics=[MetadataRequest.Topic(name=topic)], allow_auto_topic_creation=False),
            )
            found = response.topics[0].partitions
            return (
                Report(
                    self._controller(kafka),
                    found[0].leader_id,
                    tuple(found[0].isr_nodes),
                    tuple(found[0].replica_nodes),
                )
                if found
                else None
            )

        return self._with_any(request, nodes or list(self._hosts))

    @staticmethod
    def _controller(kafka: KafkaConnection) -> int:
        """Metadata names the host that was queried, as in Kafka."""
        expected = DescribeQuorumRequest.TopicData(
            topic_name="__cluster_metadata", partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)]
        )
        found = kafka.call(_DESCRIBE_QUORUM, 2, DescribeQuorumRequest(topics=[expected])).topics
        return found[0].partitions[0].leader_id if found and found[0].partitions else -1

    def lead(self, topic: str, node: int, replicas: tuple[int, ...]) -> None:
        """Requests that `node`, one of its replicas, leads partition 0: makes it the preferred
        replica and elects it. This takes a moment.
        """

        def request(kafka: KafkaConnection) -> None:
            order = [node, *(other for other in replicas if other != node)]
            partition = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=0, replicas=order)
            expected = AlterPartitionReassignmentsRequest.ReassignableTopic(name=topic, partitions=[partition])
            kafka.call(_REASSIGN, 0, AlterPartitionReassignmentsRequest(timeout_ms=10_000, topics=[expected]))
            elected = ElectLeadersRequest.TopicPartitions(topic=topic, partitions=[0])
            kafka.call(
                _ELECT_LEADERS, 2, ElectLeadersRequest(election_type=0, topic_partitions=[elected], timeout_ms=10_000)
            )

        self._with_any(request, [node, *(other for other in self._hosts if other != node)])

    def close(self) -> None:
        self._thread.shutdown()
