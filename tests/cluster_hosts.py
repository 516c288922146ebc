"""Hosts of one cluster on this machine: each is a broker started with `mqd up`, on its own loopback
addresses.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mqd.cli.kafka_request import Broker as Client
from mqd.protocol.messages import DescribeQuorumRequest, MetadataRequest
from tests.broker import Broker
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_ports

QUICK = {
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
}


class Host(Broker):
    """One host: node N has the address 127.0.0.N."""

    def __init__(
        self,
        directory: Path,
        node_id: int,
        ports: tuple[int, int, int],
        seeds: str,
        workers: int = 1,
        config: dict[str, str] | None = None,
    ) -> None:
        self.node_id = node_id
        self.address = f"127.0.0.{node_id}"
        self.controller_port = ports[2]
        super().__init__(
            directory / f"node-{node_id}",
            workers,
            {
                **QUICK,
                **(config or {}),
                "node.id": str(node_id),
                "cluster.seeds": seeds,
                "listeners": f"PLAINTEXT://{self.address}:{ports[0]}",
                "inter.broker.listener": f"{self.address}:{ports[1]}",
                "controller.listener": f"{self.address}:{ports[2]}",
            },
        )
        self.port = ports[0]

    @property
    def bootstrap(self) -> str:
        return f"{self.address}:{self.port}"

    def quorum(self) -> Any:
        """The response to DescribeQuorum; None while no host responds."""
        return self._request(
            55,
            DescribeQuorumRequest(
                topics=[
                    DescribeQuorumRequest.TopicData(
                        topic_name="__cluster_metadata",
                        partitions=[DescribeQuorumRequest.PartitionData(partition_index=0)],
                    )
                ]
            ),
        )

    def metadata(self, topics: Iterable[str] | None = ()) -> Any:
        """The response to Metadata; None while no host responds."""
        requested = None if topics is None else [MetadataRequest.Topic(name=name) for name in topics]
        return self._request(3, MetadataRequest(topics=requested, allow_auto_topic_creation=False))

    def request(self, api_key: int, request: object) -> Any:
        with Client(self.bootstrap) as client:
            return client.request(api_key, request)

    def _request(self, api_key: int, request: object) -> Any:
        try:
            return self.request(api_key, request)
        except Exception:
            return None


class Cluster:
    """`with Cluster(tmp_path, 3) as cluster:` hosts 1 to 3 are its seeds and ready."""

    def __init__(
        self,
        directory: Path,
        count: int,
        seeds: int | None = None,
        config: dict[str, str] | None = None,
        workers: int = 1,
    ) -> None:
        self.directory = directory
        ports = free_ports(3 * 8)
        self._ports = [tuple(ports[3 * number : 3 * number + 3]) for number in range(8)]
        self.seeds = ",".join(f"127.0.0.{number + 1}:{self._ports[number][2]}" for number in range(seeds or count))
        self._config, self._workers = config, workers
        self.hosts = [self.make(number + 1) for number in range(count)]

    def make(self, node_id: int) -> Host:
        return Host(self.directory, node_id, self._ports[node_id - 1], self.seeds, self._workers, self._config)  # type: ignore[arg-type]

    def __getitem__(self, node_id: int) -> Host:
        return next(host for host in self.hosts if host.node_id == node_id)

    def start(self, hosts: Iterable[Host] | None = None) -> None:
        """Starts them together: no seed is ready before the others are running."""
        chosen = list(self.hosts if hosts is None else hosts)
        with ThreadPoolExecutor(len(chosen)) as pool:
            for started in [pool.submit(host.start) for host in chosen]:
                started.result()

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            if host.process is not None:
                host.process.send_signal(signal.SIGTERM)
        for host in self.hosts:
            if host.process is not None:
                try:
                    host.process.wait(15)
                except subprocess.TimeoutExpired:
                    pass
                host.kill_all()

    def wait(self, what: str, condition: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
        """The value of `condition`, once it is true. Raises AssertionError with the logs."""

        def logs() -> str:
            return "\n".join(f"===== node {host.node_id}\n{host.logs(15)}" for host in self.hosts)

        return eventually(condition, lambda: f"{what}\n{logs()}", seconds)

    def leader(self) -> Host:
        """The leader of the quorum, according to that host itself."""

        def found() -> Host | None:
            for host in self.hosts:
                response = host.quorum() if host.process is not None else None
                if response is not None and not response.error_code:
                    leader = response.topics[0].partitions[0].leader_id
                    if leader >= 0 and self[leader].process is not None:
                        return self[leader]
            return None

        return self.wait("a leader of the quorum", found)
