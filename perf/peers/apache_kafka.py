"""Apache Kafka, one node in KRaft mode, with the settings of its own distribution:
config/server.properties, and what kafka-server-start.sh gives the JVM.
"""

from __future__ import annotations

import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from perf.peers import maven
from perf.peers.kafka_protocol import KafkaProtocolPeer
from perf.peers.peer import Load, Unavailable
from perf.peers.processes import free_port

POM = Path(__file__).resolve().parent / "kafka" / "pom.xml"

# kafka-run-class.sh (KAFKA_JVM_PERFORMANCE_OPTS); the heap is kafka-server-start.sh's
JVM = (
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)

# config/server.properties of the distribution, except for paths, ports and one replica
PROPERTIES = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "inter.broker.listener.name": "PLAINTEXT",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "num.network.threads": "3",
    "num.io.threads": "8",
    "socket.send.buffer.bytes": "102400",
    "socket.receive.buffer.bytes": "102400",
    "socket.request.max.bytes": "104857600",
    "num.partitions": "1",
    "num.recovery.threads.per.data.dir": "1",
    "offsets.topic.replication.factor": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "log.retention.hours": "168",
    "log.segment.bytes": "1073741824",
    "log.retention.check.interval.ms": "300000",
}

LOGGING = """<Configuration><Appenders>
<Console name="out"><PatternLayout pattern="[%d] %p %m (%c)%n"/></Console></Appenders>
<Loggers><Root level="INFO"><AppenderRef ref="out"/></Root></Loggers></Configuration>
"""
TOOL_LOGGING = LOGGING.replace('level="INFO"', 'level="WARN"').replace('name="out"', 'name="out" target="SYSTEM_ERR"')


def cluster_id() -> str:
    """An id as made by `kafka-storage.sh random-uuid`: 22 characters, the first not a dash, which would
    be taken for an option.
    """
    while (text := urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


class ApacheKafka(KafkaProtocolPeer):
    name = "Apache Kafka"
    settings = (
        "KRaft, one node, controller and broker in one JVM; `server.properties` and JVM flags of its distribution (3"
        " network threads, 8 I/O threads, G1, 1 GB heap, the default), its INFO log; files of deleted topics are"
        " removed after a second"
    )
    flush_settings = "`flush.messages=1` on the topic"
    more: Mapping[str, str] = MappingProxyType({})  # of server.properties
    more_listeners = ""

    def prepare(self) -> None:
        self.get()
        self.write({"controller.quorum.bootstrap.servers": f"127.0.0.1:{self.controller_port}"})
        self.format(cluster_id(), "--standalone")

    def get(self) -> None:
        """Gets the jars and ports. Raises Unavailable."""
        self._java = maven.java()
        self._jars = maven.jars(POM)
        self.port, self.controller_port = free_port(), free_port()

    def write(self, quorum: Mapping[str, str]) -> None:
        """Writes the configuration; `quorum`: the properties that name the controllers."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self.data.mkdir(exist_ok=True)
        controller = f"CONTROLLER://127.0.0.1:{self.controller_port}"
        listeners = f"PLAINTEXT://127.0.0.1:{self.port},{controller}{self.more_listeners}"
        # No advertised.listeners for the controller: the distribution's own file lets it follow
        # `listeners`.
        own = {"listeners": listeners, "log.dirs": str(self.data), **quorum}
        (self.directory / "server.properties").write_text(
            "".join(f"{key}={value}\n" for key, value in {**PROPERTIES, **own, **self.more}.items())
        )
        (self.directory / "log4j2.xml").write_text(LOGGING)

    def format(self, cluster: str, *words: str) -> None:
        """Like `kafka-storage.sh format`; not part of the start-up time."""
        command = self._run_class(
            "kafka.tools.StorageTool",
            ["-Xmx128M"],
            "format",
            *words,
            "-t",
            cluster,
            "-c",
            str(self.directory / "server.properties"),
        )
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise Unavailable(
                f"its storage cannot be formatted: {(done.stderr or done.stdout).strip().splitlines()[-1][:200]}"
            )

    def _run_class(self, name: str, options: list[str], *words: str) -> list[str]:
        logging = f"-Dlog4j2.configurationFile={self.directory / 'log4j2.xml'}"
        return [self._java, *options, logging, "-cp", f"{self._jars}/*", name, *words]

    def version(self) -> str:
        jar = next(self._jars.glob("kafka-server-[0-9]*.jar"))
        return f"{jar.stem.removeprefix('kafka-server-')} ({maven.built_on(jar)})"

    def command(self) -> list[str]:
        heap = [f"-Xmx{self.heap}", f"-Xms{self.heap}"]
        return self._run_class("kafka.Kafka", [*heap, *JVM], str(self.directory / "server.properties"))

    def topic_config(self, load: Load) -> dict[str, str]:
        """Files of deleted topics are removed after a second instead of a minute, so that no measurement
        waits while the kernel writes them back (mqd removes them immediately).
        """
        return {"file.delete.delay.ms": "1000"} | ({"flush.messages": "1"} if load.durable else {})
