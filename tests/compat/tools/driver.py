"""Apache Kafka's tools by the names of their scripts, all in one Java process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from tests.compat.kafka_tools import KafkaTools

SOURCE = Path(__file__).parent / "ToolDriver.java"
RUN_SECONDS = 60
BEYOND_SECONDS = 30  # time that the driver itself may take in addition

# The classes that bin/kafka-NAME.sh runs
CLASSES = {
    "acls": "org.apache.kafka.tools.AclCommand",
    "broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "client-metrics": "org.apache.kafka.tools.ClientMetricsCommand",
    "cluster": "org.apache.kafka.tools.ClusterTool",
    "configs": "kafka.admin.ConfigCommand",
    "console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "console-share-consumer": "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
    "consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "consumer-perf-test": "org.apache.kafka.tools.ConsumerPerformance",
    "delegation-tokens": "org.apache.kafka.tools.DelegationTokenCommand",
    "delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "dump-log": "kafka.tools.DumpLogSegments",
    "e2e-latency": "org.apache.kafka.tools.EndToEndLatency",
    "features": "org.apache.kafka.tools.FeatureCommand",
    "get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "groups": "org.apache.kafka.tools.GroupsCommand",
    "leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "replica-verification": "org.apache.kafka.tools.ReplicaVerificationTool",
    "share-groups": "org.apache.kafka.tools.consumer.group.ShareGroupCommand",
    "streams-application-reset": "org.apache.kafka.tools.StreamsResetter",
    "streams-groups": "org.apache.kafka.tools.streams.StreamsGroupCommand",
    "topics": "org.apache.kafka.tools.TopicCommand",
    "transactions": "org.apache.kafka.tools.TransactionsCommand",
    "verifiable-consumer": "org.apache.kafka.tools.VerifiableConsumer",
    "verifiable-producer": "org.apache.kafka.tools.VerifiableProducer",
    "verifiable-share-consumer": "org.apache.kafka.tools.VerifiableShareConsumer",
}
# A process for each call: their shutdown hooks are those of the Java runtime
ALONE = ("replica-verification", "verifiable-producer")


@dataclasses.dataclass(frozen=True)
class Ran:
    """The result of one call of a tool. `code` is None when it was stopped because it took too
    long.
    """

    code: int | None
    out: str
    err: str


class ToolDriver:
    """One Java process, started with the first call, and restarted after a tool that did not end."""

    def __init__(self, tools: KafkaTools, errors: Path) -> None:
        self._tools, self._errors = tools, errors
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(
        self,
        tool: str,
        words: list[str],
        stdin: str = "",
        seconds: float = RUN_SECONDS,
        enough: Callable[[str], bool] | None = None,
    ) -> Ran:
        """`enough`: stops a tool in its own process once its output matches."""
        if tool in ALONE:
            return self._run_alone(CLASSES[tool], words, seconds, enough)
        request = {"tool": CLASSES[tool], "words": words, "stdin": stdin, "seconds": seconds}
        with self._lock:
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            ended = threading.Timer(seconds + BEYOND_SECONDS, process.kill)
            ended.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            finally:
                ended.cancel()
            assert line, f"{tool} {words}: the driver ended\n{self._errors.read_text()[-3000:]}"
            response = json.loads(line)
            exited = response.pop("exited")
            ran = Ran(**response)
            if exited:
                ran = dataclasses.replace(ran, code=process.wait())
            if exited or ran.code is None:
                self._stop()
            return ran

    def _run_alone(
        self, name: str, words: list[str], seconds: float, enough: Callable[[str], bool] | None = None
    ) -> Ran:
        command = self._tools.command(name, *words)
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
            ) as process,
        ):
            assert process.stdout is not None
            late = threading.Timer(seconds, process.kill)
            late.start()
            out, is_enough = "", False
            for line in process.stdout:
                out += line
                if enough is not None and enough(out):
                    is_enough = True
                    process.kill()
                    break
            late.cancel()
            code = process.wait()
            errors.seek(0)
            return Ran(None if is_enough or code == -signal.SIGKILL else code, out, errors.read())

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            with open(self._errors, "a") as errors:
                self._process = subprocess.Popen(
                    self._tools.command(str(SOURCE)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]

    def stop(self) -> None:
        with self._lock:
            self._stop()
