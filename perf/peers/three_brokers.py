"""mqd and Apache Kafka as clusters of three brokers on this machine, for replicated topics and failover."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from mqd.protocol.messages import MetadataRequest
from perf.peers import processes
from perf.peers.apache_kafka import ApacheKafka, cluster_id
from perf.peers.kafka_protocol import METADATA, KafkaProtocolPeer
from perf.peers.mqd_broker import Mqd
from perf.peers.peer import Load
from perf.peers.processes import PeerFailed
from tests.kafka_connection import KafkaConnection

BROKERS = 3


class Cluster(KafkaProtocolPeer):
    brokers = BROKERS

    @property
    def address(self) -> str:
        """The addresses of all brokers: a client that knows only one could not start while it is down."""
        return ",".join(self.addresses())

    def addresses(self) -> list[str]:
        raise NotImplementedError

    def _broker_pid(self, node_id: int) -> int:
        raise NotImplementedError

    def kill_leader(self, topic: str) -> None:
        """Kills all processes of the broker that leads the topic's first partition."""
        requested = MetadataRequest(topics=[MetadataRequest.Topic(name=topic)])
        with KafkaConnection("127.0.0.1", self.port, timeout_s=10) as kafka:
            (found,) = kafka.call(METADATA, 5, requested).topics
        for pid in processes.tree([self._broker_pid(found.partitions[0].leader_id)]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class MqdCluster(Cluster, Mqd):
    name = "mqd, 3 brokers"
    settings = (
        "`mqd cluster local` with its defaults, one worker for each broker; `min.insync.replicas=2` and"
        " `flush.on.ack=false` on the topic"
    )

    def command(self) -> list[str]:
        words = ["--brokers", str(BROKERS), "--data-dir", str(self.data), "--port", str(self.port)]
        more = ["--set", "admin.port=0", "--set", "core.files.allow=true"]
        return [sys.executable, "-m", "mqd.cli.main", "cluster", "local", *words, *more]

    def addresses(self) -> list[str]:
        return [f"127.0.0.{number}:{self.port}" for number in range(1, BROKERS + 1)]

    def _broker_pid(self, node_id: int) -> int:
        assert self.process is not None
        for pid in processes.children(self.process.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"--node-id" in words and words[words.index(b"--node-id") + 1] == b"%d" % node_id:
                return pid
        raise PeerFailed(f"broker {node_id} of {self.name} does not run")

    def topic_config(self, load: Load) -> dict[str, str]:
        return {**super().topic_config(load), "min.insync.replicas": "2"}


class KafkaCluster(Cluster, ApacheKafka):
    name = "Apache Kafka, 3 brokers"
    settings = (
        "KRaft, three nodes, each controller and broker in one JVM, with the settings of the single node;"
        " `min.insync.replicas=2` on the topic"
    )

    def prepare(self) -> None:
        self.get()
        self._nodes = [ApacheKafka(self.data / f"broker-{number}", self.heap) for number in range(1, BROKERS + 1)]
        for node in self._nodes:
            node.get()
        self.port, cluster = self._nodes[0].port, cluster_id()
        voters = ",".join(f"{number}@127.0.0.1:{node.controller_port}" for number, node in enumerate(self._nodes, 1))
        for number, node in enumerate(self._nodes, 1):
            node.write({"node.id": str(number), "controller.quorum.voters": voters})
            node.format(cluster)

    def launch(self) -> None:
        for node in self._nodes:
            node.launch()
        self.process, *self._others = [node.process for node in self._nodes if node.process is not None]

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join(node.log_tail(lines) for node in self._nodes)

    def addresses(self) -> list[str]:
        return [node.address for node in self._nodes]

    def _broker_pid(self, node_id: int) -> int:
        process = self._nodes[node_id - 1].process
        assert process is not None
        return process.pid

    def topic_config(self, load: Load) -> dict[str, str]:
        return {**super().topic_config(load), "min.insync.replicas": "2"}
