"""The brokers that are measured: several at the same time, each with its own settings, started on first
use; one that is not measured is idle and uses no CPU.

Worker 0 is pinned to CPU 0, the clients to the last CPU. All data is below one directory on a real
disk, which is deleted at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from mqd.protocol.messages import CreateTopicsRequest, DeleteTopicsRequest
from perf import loading
from perf.accounting import CpuTime, cpu_time
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection

CREATE_TOPICS, DELETE_TOPICS = 19, 20


class Measured:
    """A running broker: its topics, its load, and the CPU time of its workers."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.worker_pids = broker.pids("worker")
        self.topics: set[str] = set()

    @property
    def port(self) -> int:
        return self.broker.port

    def pids(self) -> list[int]:
        return [process["pid"] for process in self.broker.running()]

    def topic(self, name: str, partitions: int = 1, **config: object) -> str:
        """Creates the topic unless it exists. Config names have _ in place of dots."""
        if name in self.topics:
            return name
        configs = [
            CreateTopicsRequest.Config(name=key.replace("_", "."), value=str(value)) for key, value in config.items()
        ]
        requested = CreateTopicsRequest.Topic(
            name=name, num_partitions=partitions, replication_factor=1, configs=configs
        )
        with KafkaConnection("127.0.0.1", self.port, timeout_s=60) as kafka:
            answer = kafka.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[requested], timeout_ms=60000))
        result = answer.topics[0]
        if result.error_code:
            raise loading.LoadFailed(f"cannot create {name}: error {result.error_code} {result.error_message}")
        self.topics.add(name)
        return name

    def delete(self, name: str) -> None:
        if name in self.topics:
            with KafkaConnection("127.0.0.1", self.port, timeout_s=60) as kafka:
                kafka.call(DELETE_TOPICS, 5, DeleteTopicsRequest(topic_names=[name], timeout_ms=60000))
            self.topics.discard(name)

    def load(self, what: str, **arguments: object) -> tuple[dict, CpuTime]:
        """Runs the load generator with `timeout_s` and its own arguments. Returns its result, and the CPU
        time of all the workers' threads.
        """
        before = cpu_time(self.worker_pids)
        result = loading.run(what, port=self.port, **arguments)
        return result, cpu_time(self.worker_pids) - before


class Brokers:
    """All brokers of one run, by name. Use as a context manager: everything is stopped and deleted
    at its end.
    """

    SETTINGS: dict[str, tuple[int, dict[str, str]]] = {
        "uring": (1, {"io.backend": "io_uring"}),
        "epoll": (1, {"io.backend": "epoll"}),
        "copy": (1, {"io.backend": "io_uring", "sendfile.bytes.min": str(2**31 - 1)}),
        "two": (2, {"io.backend": "auto", "worker.cpus": "0,1"}),
        "idle": (2, {"worker.cpus": ""}),
    }
    BASE = {
        "worker.cpus": "0",
        "admin.port": "0",
        "log.segment.delete.delay.ms": "0",
        "log.dirs.free.bytes.min": str(1 << 30),
    }

    def __init__(self, parent: Path | None = None) -> None:
        place = parent or os.environ.get("MQD_PERF_DIR") or loading.BUILD
        Path(place).mkdir(parents=True, exist_ok=True)
        self.directory = Path(tempfile.mkdtemp(prefix="bench-", dir=place))
        self._running: dict[str, Measured] = {}

    def get(self, name: str, workers: int | None = None, config: dict[str, str] | None = None) -> Measured:
        """The running broker of that name; `workers` and `config` for names that are not in
        SETTINGS.
        """
        if name not in self._running:
            self._running[name] = Measured(self.make(name, workers, config).start())
        return self._running[name]

    def make(self, name: str, workers: int | None = None, config: dict[str, str] | None = None) -> Broker:
        """A broker that is not started yet."""
        known_workers, known_config = self.SETTINGS.get(name, (1, {}))
        return Broker(self.directory / name, workers or known_workers, {**self.BASE, **known_config, **(config or {})})

    def drop(self, name: str) -> None:
        """Kills the broker and deletes its data. Does nothing if there is no such broker."""
        measured = self._running.pop(name, None)
        if measured is not None:
            measured.broker.kill_all()
        shutil.rmtree(self.directory / name, ignore_errors=True)

    def drop_all(self) -> None:
        for name in list(self._running):
            self.drop(name)

    def __enter__(self) -> Brokers:
        return self

    def __exit__(self, *_exc) -> None:
        self.drop_all()
        shutil.rmtree(self.directory, ignore_errors=True)
