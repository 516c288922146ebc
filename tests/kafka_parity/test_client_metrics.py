"""Metrics of clients (KIP-714), compared with Apache Kafka: possible subscriptions, their
descriptions, and whether clients are offered to send metrics.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Producer

from mqd.protocol import messages as m
from perf.peers.peer import Unavailable
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.kafka_parity.brokers import both
from tests.kafka_parity.compare import Table
from tests.kafka_parity.model import Step, World
from tests.kafka_parity.sides import Side

KIND, DESCRIBE, ALTER, INCREMENTAL, LIST = 16, 32, 33, 44, 74
SET, DELETE, APPEND, SUBTRACT = range(4)
# name of the subscription, operation, configurations
CHANGES: list[tuple[str, int, dict[str, str | None]]] = [
    ("a", SET, {"metrics": "org.apache.kafka.producer.", "interval.ms": "1000"}),
    ("a", APPEND, {"metrics": "org.apache.kafka.consumer."}),
    ("a", SUBTRACT, {"metrics": "org.apache.kafka.producer."}),
    ("a", APPEND, {"interval.ms": "1"}),
    ("a", DELETE, {"metrics": None}),
    ("a", SET, {"metrics": None}),
    ("b", SET, {"match": "client_id=app.*, client_software_name=librdkafka"}),
    ("b", SET, {"match": "client_id=a=b"}),
    ("b", SET, {"match": "client_id="}),
    ("b", SET, {"match": "client_id"}),
    ("b", SET, {"match": "client=a"}),
    ("b", SET, {"match": "client_id=("}),
    ("b", SET, {"match": " client_source_port = 1.* "}),
    ("b", SET, {"match": "a=b", "interval.ms": "1"}),
    ("c", SET, {"interval.ms": "99"}),
    ("c", SET, {"interval.ms": "100"}),
    ("c", SET, {"interval.ms": "3600000"}),
    ("c", SET, {"interval.ms": "3600001"}),
    ("c", SET, {"interval.ms": "soon"}),
    ("c", SET, {"interval.ms": "2147483648"}),
    ("c", SET, {"interval.ms": "-5"}),
    ("c", SET, {"interval.ms": ""}),
    ("c", SET, {"unknown": "1"}),
    ("c", SET, {"unknown": "1", "interval.ms": "1"}),
    ("c", DELETE, {"unknown": None}),
    ("d", SET, {"metrics": ""}),
    ("d", SET, {"metrics": "*"}),
    ("", SET, {"metrics": "*"}),
    ("a", DELETE, {"interval.ms": None}),
]


def _alter(side: Side, name: str, operation: int, values: dict[str, str | None]) -> int:
    request = m.IncrementalAlterConfigsRequest
    configs = [request.Config(key, operation, value) for key, value in values.items()]
    step = Step(INCREMENTAL, 1, request([request.Resource(KIND, name, configs)]))
    return side.call(step, World("")).body.responses[0].error_code


def _replace(side: Side, name: str, values: dict[str, str | None]) -> int:
    request = m.AlterConfigsRequest
    configs = [request.Config(key, value) for key, value in values.items()]
    return (
        side.call(Step(ALTER, 2, request([request.Resource(KIND, name, configs)])), World(""))
        .body.responses[0]
        .error_code
    )


def _shown(side: Side) -> tuple[object, ...]:
    listed = side.call(Step(LIST, 1, m.ListConfigResourcesRequest([KIND])), World("")).body
    asked = [m.DescribeConfigsRequest.Resource(KIND, name, None) for name in "abcd"]
    found = side.call(Step(DESCRIBE, 4, m.DescribeConfigsRequest(asked, include_synonyms=True)), World("")).body
    return (
        sorted(one.resource_name for one in listed.config_resources),
        [
            sorted(
                (
                    one.name,
                    one.value,
                    one.read_only,
                    one.config_source,
                    one.config_type,
                    [(synonym.name, synonym.value, synonym.source) for synonym in one.synonyms],
                )
                for one in result.configs
            )
            for result in found.results
        ],
    )


@pytest.mark.slow
def test_subscriptions_are_set_and_described_alike(tmp_path: Path) -> None:
    try:
        with both(tmp_path, Table([])) as comparison:
            differences = []
            for number, (name, operation, values) in enumerate(CHANGES):
                for change in (
                    lambda side: _alter(side, name, operation, values),
                    lambda side: _replace(side, name, values),
                ):
                    kafka, mqd = change(comparison.sides[0]), change(comparison.sides[1])
                    if kafka != mqd:
                        differences.append(f"{number} {name} {operation} {values}: Kafka {kafka}, mqd {mqd}")
                    if (kafka := _shown(comparison.sides[0])) != (mqd := _shown(comparison.sides[1])):
                        differences.append(f"{number} {name} {values}: Kafka shows\n{kafka}\nmqd\n{mqd}")
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    assert not differences, "\n".join(differences)


RECEIVER = """
import java.util.List;
import java.util.Map;
import org.apache.kafka.common.metrics.KafkaMetric;
import org.apache.kafka.common.metrics.MetricsReporter;
import org.apache.kafka.server.telemetry.ClientTelemetry;
import org.apache.kafka.server.telemetry.ClientTelemetryReceiver;

public class Receiver implements MetricsReporter, ClientTelemetry {
    public ClientTelemetryReceiver clientReceiver() { return (context, payload) -> { }; }
    public void init(List<KafkaMetric> metrics) { }
    public void metricChange(KafkaMetric metric) { }
    public void metricRemoval(KafkaMetric metric) { }
    public void configure(Map<String, ?> configs) { }
    public void close() { }
}
"""
TELEMETRY = {71, 72}  # GetTelemetrySubscriptions, PushTelemetry


class _ReceivingKafka(KafkaTools):
    """Apache Kafka with a class of the test's on its class path."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._classes = directory / "classes"
        (directory / "Receiver.java").write_text(RECEIVER)
        subprocess.run(
            ["javac", "-cp", f"{self.jars}/*", "-d", str(self._classes), str(directory / "Receiver.java")],
            check=True,
            capture_output=True,
        )

    def command(self, name: str, *words: str, heap: str = "256M") -> list[str]:
        command = super().command(name, *words, heap=heap)
        command[command.index("-cp") + 1] += f":{self._classes}"
        return command


def _offered(side: Side) -> set[int]:
    body = side.call(Step(18, 4, m.ApiVersionsRequest("judge", "1")), World("")).body
    return {api.api_key for api in body.api_keys}


@pytest.mark.slow
def test_kafka_offers_to_take_metrics_only_with_a_receiver(tmp_path: Path) -> None:
    if shutil.which("javac") is None:
        pytest.skip("javac is not installed")
    offered = []
    try:
        tools = _ReceivingKafka(tmp_path)
        for number, settings in enumerate(({}, {"metric_reporters": "Receiver"})):
            (tmp_path / str(number)).mkdir()
            tools._directory = tmp_path / str(number)
            with tools.broker(**settings) as bootstrap:
                side = Side("Apache Kafka", int(bootstrap.rpartition(":")[2]))
                offered.append(_offered(side) & TELEMETRY)
                side.close()
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    with Broker(tmp_path / "mqd", workers=1) as broker:
        side = Side("mqd", broker.port)
        offered.append(_offered(side) & TELEMETRY)
        side.close()
    assert offered == [set(), TELEMETRY, set()]


@pytest.mark.slow
def test_clients_that_would_send_metrics_are_served_without(tmp_path: Path) -> None:
    try:
        tools = KafkaTools(tmp_path)
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    properties = tmp_path / "client.properties"
    properties.write_text("enable.metrics.push=true\n")
    errors: list[KafkaError] = []
    with Broker(tmp_path / "mqd", workers=1) as broker:
        side = Side("mqd", broker.port)
        assert _alter(side, "all", SET, {"metrics": "*", "interval.ms": "100"}) == 0
        side.close()
        producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "enable.metrics.push": True, "error_cb": errors.append}
        )
        for number in range(5):
            producer.produce("judge-metrics", b"%d" % number)
        assert producer.flush(20) == 0 and errors == []
        where = (
            "--bootstrap-server",
            broker.bootstrap,
            "--topic",
            "judge-metrics",
            "--command-config",
            str(properties),
        )
        sent = tools.run("org.apache.kafka.tools.VerifiableProducer", *where, "--max-messages", "5")
        read = tools.run(
            "org.apache.kafka.tools.consumer.ConsoleConsumer", *where, "--from-beginning", "--max-messages", "10"
        )
    assert sent.returncode == 0 and '"acked":5' in sent.stdout and "telemetry" not in sent.stderr.lower(), sent
    assert read.returncode == 0 and "telemetry" not in read.stderr.lower(), read
    assert sorted(read.stdout.split()) == sorted([*"01234"] * 2)
