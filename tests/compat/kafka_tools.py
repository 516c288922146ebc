"""Apache Kafka's own command line tools and broker, from its jars (kafka/pom.xml, by Maven), for
comparison tests. Slow tier: a JVM for each call.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from mqd.protocol.messages import ApiVersionsRequest
from perf.peers import apache_kafka, maven
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port

POM = Path(__file__).resolve().parent / "kafka" / "pom.xml"
RUN_SECONDS = 120
START_SECONDS = 180


class KafkaTools:
    """`run` runs one tool by its class, as its .sh does. `pom`: of another version."""

    def __init__(self, directory: Path, pom: Path = POM) -> None:
        self._directory = directory
        self._java = maven.java()
        self.jars = maven.jars(pom)
        self._logging = directory / "tool-log4j2.xml"
        self._logging.write_text(apache_kafka.TOOL_LOGGING)

    def command(self, name: str, *words: str, heap: str = "256M") -> list[str]:
        flags = [
            f"-Xmx{heap}",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={self._logging}",
        ]
        return [self._java, *flags, "-cp", f"{self.jars}/*", name, *words]

    def run(self, name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(name, *words), capture_output=True, text=True, timeout=RUN_SECONDS, stdin=subprocess.DEVNULL
        )

    def reassign(self, bootstrap: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(
            "org.apache.kafka.tools.reassign.ReassignPartitionsCommand", "--bootstrap-server", bootstrap, *words
        )

    def features(self, bootstrap: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("org.apache.kafka.tools.FeatureCommand", "--bootstrap-server", bootstrap, *words)

    @contextmanager
    def broker(self, **settings: str) -> Iterator[str]:
        """One Apache Kafka on a free port, with empty logs: its bootstrap address. In `settings`, _
        replaces a dot.
        """
        with KafkaCluster(
            self, self._directory, 1, {key.replace("_", "."): value for key, value in settings.items()}
        ) as kafka:
            yield kafka.bootstrap


class KafkaBroker:
    """One node, broker and controller in one process. stop() and start() again keep its logs."""

    def __init__(self, tools: KafkaTools, directory: Path, node_id: int) -> None:
        self.node_id, self.port, self.controller_port = node_id, free_port(), free_port()
        self.directory_id = apache_kafka.cluster_id()
        self.log_dir = directory / f"kafka-logs-{node_id}"
        self._tools = tools
        self._properties, self._output = directory / f"server-{node_id}.properties", directory / f"kafka-{node_id}.out"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def controller(self) -> str:
        return f"127.0.0.1:{self.controller_port}"

    def format(self, cluster_id: str, peers: list[KafkaBroker], settings: dict[str, str]) -> None:
        own = {
            "node.id": str(self.node_id),
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{self.controller}",
            "controller.quorum.bootstrap.servers": ",".join(peer.controller for peer in peers),
            "log.dirs": str(self.log_dir),
            **settings,
        }
        lines = {**apache_kafka.PROPERTIES, **own}.items()
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in lines))
        voters = ",".join(f"{peer.node_id}@{peer.controller}:{peer.directory_id}" for peer in peers)
        formatted = self._tools.run(
            "kafka.tools.StorageTool",
            *("format", "-t", cluster_id, "-c", str(self._properties), "--initial-controllers", voters),
        )
        assert formatted.returncode == 0, formatted.stderr + formatted.stdout

    def start(self) -> None:
        command = self._tools.command("kafka.Kafka", str(self._properties), heap="512M")
        with open(self._output, "a") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)

    def wait_until_it_answers(self) -> None:
        assert self.process is not None
        _wait_until_it_answers(self.process, self.port, self._output)

    def stop(self) -> None:
        """SIGTERM, as kafka-server-stop.sh."""
        if self.process is None:
            return
        process, self.process = self.process, None
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def kill(self) -> None:
        if self.process is not None:
            process, self.process = self.process, None
            process.kill()
            process.wait()


class KafkaCluster:
    """Apache Kafka with empty logs on free ports; `brokers` by node id, from 1."""

    def __init__(self, tools: KafkaTools, directory: Path, count: int, settings: dict[str, str] | None = None) -> None:
        self.brokers = {number: KafkaBroker(tools, directory, number) for number in range(1, count + 1)}
        self._settings = settings or {}

    @property
    def bootstrap(self) -> str:
        return ",".join(broker.bootstrap for broker in self.brokers.values())

    def __enter__(self) -> KafkaCluster:
        cluster_id, peers = apache_kafka.cluster_id(), list(self.brokers.values())
        for broker in peers:
            broker.format(cluster_id, peers, self._settings)
        try:
            for broker in peers:
                broker.start()
            for broker in peers:
                broker.wait_until_it_answers()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            list(pool.map(KafkaBroker.stop, self.brokers.values()))


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with KafkaConnection.connect("127.0.0.1", port) as kafka:
                kafka.call(18, 0, ApiVersionsRequest())
                return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, (
                f"Apache Kafka did not start\n{output.read_text()[-3000:]}"
            )
            time.sleep(0.2)  # polls another process; there is no event to wait for
