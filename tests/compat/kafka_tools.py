"""Apache Kafka's own command line tools and broker, from its jars (perf/peers/kafka/pom.xml, by
Maven), for tests that judge beside them. Slow tier: a JVM for each call.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqd.protocol.messages import ApiVersionsRequest
from perf.peers import apache_kafka, maven
from tests.broker import free_port
from tests.kafka_connection import KafkaConnection

RUN_SECONDS = 120
START_SECONDS = 60


class KafkaTools:
    """`run` carries out one tool by its class, as its .sh does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._java = maven.java()
        self.jars = maven.jars(apache_kafka.POM)
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
        stands for a dot.
        """
        port, controller = free_port(), free_port()
        own = {
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "log.dirs": str(self._directory / "kafka-logs"),
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
        properties = self._directory / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in {**apache_kafka.PROPERTIES, **own}.items()))
        formatted = self.run(
            "kafka.tools.StorageTool", "format", "--standalone", "-t", apache_kafka.cluster_id(), "-c", str(properties)
        )
        assert formatted.returncode == 0, formatted.stderr + formatted.stdout
        with open(self._directory / "kafka.out", "w") as output:
            process = subprocess.Popen(
                self.command("kafka.Kafka", str(properties), heap="512M"),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )
        try:
            _wait_until_it_answers(process, port, self._directory / "kafka.out")
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
            time.sleep(0.2)  # polls another process; nothing here can be waited for
