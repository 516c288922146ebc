"""Several real brokers as one cluster on loopback, each with its own address: ports never collide."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.broker import Broker

_serial = itertools.count()


class Member(Broker):
    """One broker of a cluster; start() returns when it is ready, which at the first start requires
    the other seeds too.
    """

    def __init__(
        self,
        data_dir: Path,
        node_id: int,
        address: str,
        port: int,
        seeds: str,
        workers: int,
        config: dict[str, str] | None = None,
    ) -> None:
        own = {
            "listeners": f"PLAINTEXT://{address}:{port}",
            "inter.broker.listener": f"{address}:{port + 1}",
            "controller.listener": f"{address}:{port + 2}",
            "node.id": str(node_id),
            "cluster.seeds": seeds,
        }
        super().__init__(data_dir, workers, own | (config or {}))
        self.node_id = node_id
        self.address = address
        self.port = port

    @property
    def bootstrap(self) -> str:
        return f"{self.address}:{self.port}"


class Cluster:
    """`brokers` by node id, from 1. Addresses 127.P.P.1, ... from this process's number P, and
    ports of this cluster: neither processes nor clusters collide.
    """

    def __init__(self, directory: Path, count: int = 3, workers: int = 1, config: dict[str, str] | None = None) -> None:
        pid, self._port = os.getpid() & 0xFFFF, 20_000 + 10 * next(_serial)
        self._network = f"127.{64 + (pid >> 8) % 128}.{pid & 0xFF}"
        self._directory, self._workers, self._config = directory, workers, dict(config or {})
        self._seeds = ",".join(f"{self._network}.{node_id}:{self._port + 2}" for node_id in range(1, count + 1))
        self.brokers: dict[int, Member] = {node_id: self._member(node_id) for node_id in range(1, count + 1)}

    def _member(self, node_id: int, name: str | None = None) -> Member:
        return Member(
            self._directory / (name or f"broker-{node_id}"),
            node_id,
            f"{self._network}.{node_id}",
            self._port,
            self._seeds,
            self._workers,
            self._config,
        )

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    def start(self) -> Cluster:
        """Starts all at once: seeds wait for each other."""
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(Broker.start, [broker for broker in self.brokers.values() if broker.process is None]))
        return self

    def add(self, node_id: int) -> Member:
        """A broker that joins later; it is not among the seeds."""
        member = self.brokers[node_id] = self._member(node_id)
        member.start()
        return member

    def stop(self) -> None:
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(Broker.stop, self.brokers.values()))

    def logs(self) -> str:
        return "\n".join(f"=== broker {node_id}\n{broker.logs()}" for node_id, broker in self.brokers.items())

    def __iter__(self) -> Iterator[Member]:
        return iter(self.brokers.values())

    def __enter__(self) -> Cluster:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_exc: object) -> None:
        self.stop()
