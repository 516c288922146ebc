"""Peers that speak Kafka's protocol: mqd's own test connection creates topics and probes the broker; it
is not part of what is measured.
"""

from __future__ import annotations

from mqd.protocol.messages import CreateTopicsRequest, DeleteTopicsRequest, MetadataRequest
from perf.peers.peer import Load, Peer
from perf.peers.processes import PeerFailed
from tests.kafka_connection import ConnectionEnded, KafkaConnection

METADATA, CREATE_TOPICS, DELETE_TOPICS = 3, 19, 20


class KafkaProtocolPeer(Peer):
    protocol = "kafka"

    def topic_config(self, load: Load) -> dict[str, str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it lists all brokers and would create a topic with a replica on each: a broker may
        answer before the controller has admitted it.
        """
        topic = CreateTopicsRequest.Topic(name="ready", num_partitions=1, replication_factor=self.brokers)
        request = CreateTopicsRequest(topics=[topic], timeout_ms=2000, validate_only=True)
        try:
            with KafkaConnection("127.0.0.1", self.port, timeout_s=2) as kafka:
                if len(kafka.call(METADATA, 5, MetadataRequest(topics=[])).brokers) != self.brokers:
                    return False
                return kafka.call(CREATE_TOPICS, 5, request).topics[0].error_code == 0
        except ConnectionEnded:  # it listens but does not serve yet
            return False

    def make_topic(self, name: str, load: Load) -> None:
        configs = [CreateTopicsRequest.Config(name=key, value=value) for key, value in self.topic_config(load).items()]
        requested = CreateTopicsRequest.Topic(
            name=name, num_partitions=load.partitions, replication_factor=load.replicas, configs=configs
        )
        with KafkaConnection("127.0.0.1", self.port, timeout_s=60) as kafka:
            result = kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[requested], timeout_ms=60000)).topics[0]
        if result.error_code:
            raise PeerFailed(f"{self.name}: cannot create {name}: error {result.error_code} {result.error_message}")

    def drop_topic(self, name: str) -> None:
        with KafkaConnection("127.0.0.1", self.port, timeout_s=60) as kafka:
            kafka.call(DELETE_TOPICS, 5, DeleteTopicsRequest(topic_names=[name], timeout_ms=60000))
