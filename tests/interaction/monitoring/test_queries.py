"""The metrics of a live broker: checked by promtool, and against every query of the alerts and
dashboards.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer as TcpConsumer
from confluent_kafka import Producer as TcpProducer
from prometheus_client.parser import text_string_to_metric_families

from mqd import Consumer, Producer, TopicPartition
from mqd.cli.common import Settings
from mqd.cli.inspection.diagnosis import Finding, Harm, host_findings
from mqd.cli.main import cli
from mqd.cli.verbs.doctor import examine, host_facts
from mqd.monitoring import alerts, dashboards
from tests import collector
from tests.broker import Broker
from tests.interaction.monitoring.prometheus import find
from tests.interaction.traffic import eventually
from tests.kafka_connection import KafkaConnection

DESCRIBE_CLUSTER = 60
TOPIC, GROUP, MOVED = "orders", "billing", "moved"
_OF_PROMETHEUS = {"up", "instance", "job", "source", "cluster"}
_SELECTOR = re.compile(r"([a-z_][a-z0-9_]*)\{([^}]*)\}")
_GROUPING = re.compile(r"\b(?:by|without|on) \(([^)]*)\)")
# families without samples on this broker: it has no certificate, no compacted topic, no dead
# letters
_WITHOUT_SAMPLES = {
    "mqd_certificate_expiry_timestamp_seconds": {"listener"},
    "mqd_compaction_uncleanable": {"topic", "partition"},
    "mqd_dead_letters_oldest_seconds": {"group"},
    "mqd_dead_letters_total": {"group"},
}
_NAME = re.compile(r"\b(?:mqd|kafka)_[a-z0-9_]+")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("watched"), config={"slow.request.ms": "200"}) as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for number in range(10):
            producer.produce(TOPIC, str(number))
        assert producer.flush(60) == 0
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": GROUP, "auto.offset.reset": "earliest"})
        consumer.subscribe([TOPIC])
        message = eventually(lambda: consumer.poll(1), "a message")
        consumer.commit(message=message, asynchronous=False)
        yield broker
        consumer.close()


def get(broker: Broker, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{broker.status()['metrics_port']}{path}", timeout=60
        ) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.fixture(scope="module")
def labels(broker: Broker) -> dict[str, set[str]]:
    """The labels of each sample of a scrape, by metric name."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(get(broker, "/metrics")[1]):
        names = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
        for suffix in names:
            found.setdefault(family.name + suffix, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for name, names in _WITHOUT_SAMPLES.items():
        assert found[name] == set()
        found[name] = names
    return found


def faults(query: str, labels: dict[str, set[str]]) -> list[str]:
    """Metrics and labels of a query that the scrape does not have."""
    found = [f"there is no {name}" for name in _NAME.findall(query) if name not in labels]
    named = [name for name in _NAME.findall(query) if name in labels]
    known = set().union(*(labels[name] for name in named)) | _OF_PROMETHEUS
    for name, selector in _SELECTOR.findall(query):
        if name in labels:
            found += [
                f"{name} has no label {label}"
                for label in re.findall(r"(\w+)\s*!?=", selector)
                if label not in labels[name] | _OF_PROMETHEUS
            ]
    for grouping in _GROUPING.findall(query):
        found += [f"no metric has a label {label}" for label in re.findall(r"\w+", grouping) if label not in known]
    return found


@pytest.mark.slow
def test_promtool_finds_no_fault_with_the_page(broker: Broker) -> None:
    status, page = get(broker, "/metrics")
    assert status == 200
    done = subprocess.run(
        [find("promtool"), "check", "metrics"], input=page, capture_output=True, text=True, timeout=60
    )
    # kafka_exporter's name, kept for the dashboards that use it
    (fault,) = done.stderr.splitlines()
    assert fault.startswith("kafka_consumergroup_lag_sum ") and '"_sum" suffix' in fault and not done.stdout


def test_every_query_names_existing_metrics_and_labels(labels: dict[str, set[str]]) -> None:
    queries = [(one.name, one.expression) for one in alerts.ALERTS] + dashboards.all_queries()
    assert {name: found for name, query in queries if (found := faults(query, labels))} == {}
    assert len(queries) > 60


def test_a_query_with_an_unknown_metric_is_found(labels: dict[str, set[str]]) -> None:
    assert faults("rate(mqd_sync_failure_total[5m])", labels) == ["there is no mqd_sync_failure_total"]
    assert faults('mqd_connections{topic="a"}', labels) == ["mqd_connections has no label topic"]
    assert faults("sum by (partition) (mqd_connections)", labels) == ["no metric has a label partition"]


def test_templates_use_labels_that_the_expression_keeps(labels: dict[str, set[str]]) -> None:
    """`{{ $labels.x }}` is empty if the expression drops the label."""
    for one in alerts.ALERTS:
        kept = set().union(*(labels[name] for name in _NAME.findall(one.expression) if name in labels))
        kept |= {"instance"}
        if grouping := re.match(r"(?:count|max|sum|histogram_quantile\([0-9.]+, sum) by \(([^)]*)\)", one.expression):
            kept = set(re.findall(r"\w+", grouping[1])) - {"le"}
        elif re.match(r"(?:max|sum)\(", one.expression):
            kept = set()
        assert set(re.findall(r"\$labels\.(\w+)", one.summary)) <= kept, one.name


def test_health_through_a_worker_s_death(broker: Broker) -> None:
    assert get(broker, "/health/live") == (200, "ok\n") and get(broker, "/health/ready") == (200, "ok\n")
    assert get(broker, "/health")[0] == 404
    os.kill(broker.pid("mqd-worker-1"), signal.SIGKILL)
    found = eventually(lambda: (response := get(broker, "/health/ready"))[0] == 503 and response, "a worker's death")
    assert found[1].startswith("worker 1 is not running")
    assert get(broker, "/health/live")[0] == 200
    eventually(lambda: get(broker, "/health/ready") == (200, "ok\n"), "the worker's return")
    page = get(broker, "/metrics")[1]
    assert 'mqd_process_deaths_total{process="worker-1"} 1.0' in page.splitlines()
    assert 'mqd_process_restarts_total{process="worker-1",reason="killed"} 1.0' in page.splitlines()
    assert 'mqd_process_restarts_total{process="acceptor",reason="killed"} 0.0' in page.splitlines()


def test_traffic_of_topics(broker: Broker) -> None:
    """A client over TCP: all that it reads is counted as sent."""

    def counts() -> dict[str, float]:
        lines = get(broker, "/metrics")[1].splitlines()
        return {
            line.split("{")[0]: float(line.split()[1])
            for line in lines
            if line.startswith("mqd_topic_") and MOVED in line
        }

    producer = TcpProducer({"bootstrap.servers": broker.bootstrap})
    for _ in range(50):
        producer.produce(MOVED, b"x" * 1000)
    assert producer.flush(60) == 0
    before = counts()
    assert before["mqd_topic_records_in_total"] == 50 and 50_000 < before["mqd_topic_bytes_in_total"] < 60_000
    assert before["mqd_topic_bytes_out_total"] == 0
    settings = {"bootstrap.servers": broker.bootstrap, "group.id": "reader", "auto.offset.reset": "earliest"}
    with contextlib.closing(TcpConsumer(settings)) as consumer:
        consumer.subscribe([MOVED])
        taken = 0
        while taken < 50:
            taken += len(consumer.consume(50, 20))
    after = counts()
    assert after["mqd_topic_bytes_out_total"] >= before["mqd_topic_bytes_in_total"] == after["mqd_topic_bytes_in_total"]


def test_a_slow_request_is_logged_with_the_time_of_each_stage(broker: Broker) -> None:
    """The acceptor is stopped during a request."""
    acceptor = broker.pid("mqd-acceptor")
    with KafkaConnection(port=broker.port) as kafka:
        kafka.call(DESCRIBE_CLUSTER, 1)  # the acceptor has handed the connection to a worker
        os.kill(acceptor, signal.SIGSTOP)
        resumed = threading.Timer(0.5, os.kill, (acceptor, signal.SIGCONT))
        resumed.start()
        try:
            kafka.call(DESCRIBE_CLUSTER, 1)
        finally:
            resumed.join()

    def logged() -> str | None:
        lines = [line for path in (broker.data_dir / "logs").glob("mqd-worker-*.log") for line in path.open()]
        return next((line for line in lines if "a slow request" in line and "api=DescribeCluster" in line), None)

    found = dict(field.partition("=")[::2] for field in eventually(logged, "a line of the log").split())
    assert int(found["acceptor_ms"]) >= 200 and int(found["ms"]) >= int(found["acceptor_ms"]) and found["client"]


def test_the_doctor_finds_nothing_until_a_problem_is_caused(broker: Broker) -> None:
    """Without findings about this machine's settings, which are not the broker's."""

    def examined() -> list[Finding]:
        found = examine(Settings(broker.bootstrap), broker.data_dir)
        return [one for one in found if one not in host_findings(host_facts(broker.pid("mqd-acceptor")))]

    assert examined() == []
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    producer.produce("aged", b"value", timestamp=1)
    assert producer.flush(60) == 0
    client = {"bootstrap.servers": broker.bootstrap, "group.id": "stale"}
    with contextlib.closing(Consumer(client)) as consumer:
        consumer.commit(offsets=[TopicPartition("aged", 0, 0)], asynchronous=False)
    behind = eventually(examined, "a group that is behind")
    assert behind[0].harm == Harm.NUISANCE and behind[0].what.startswith("group stale is ")


def test_the_doctor_of_a_broker_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mqd-worker-0.log").write_text("2026-01-01 INFO well\n2026-01-01 ERROR the disk is gone\n")
    done = CliRunner().invoke(cli, ["doctor", "--data-dir", str(tmp_path)], catch_exceptions=False)
    assert "no broker is running in " in done.output and "ERROR the disk is gone" in done.output


def test_every_family_reaches_an_opentelemetry_collector(broker: Broker) -> None:
    with collector.running() as found:
        done = CliRunner().invoke(
            cli, ["otel", "--once", "--data-dir", str(broker.data_dir), "--endpoint", found.url], catch_exceptions=False
        )
        assert done.exit_code == 0, done.output
        assert found.resource == {"service.name": "mqd", "service.instance.id": broker.bootstrap}
        sent = found.metrics
    scraped = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in text_string_to_metric_families(get(broker, "/metrics")[1])
        if family.samples
    }
    assert scraped and set(sent) == scraped
    appended = sent["mqd_records_appended_total"].sum.data_points
    assert sum(point.as_double for point in appended) >= 10
    assert any(point.count for point in sent["mqd_produce_seconds"].histogram.data_points)
