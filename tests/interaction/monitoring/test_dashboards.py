"""A real Prometheus scrapes a broker under load and evaluates the query of every panel and variable
of the dashboards: each returns a value.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import urllib.parse
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, Producer

from mqd.monitoring import dashboards
from mqd.monitoring.alerts import render_rules
from tests.broker import Broker
from tests.certificates import Authority
from tests.interaction.monitoring.prometheus import Prometheus
from tests.interaction.traffic import eventually
from tests.ports import free_port

pytestmark = pytest.mark.slow

TOPIC, GROUP = "orders", "billing"
RANGE = "15s"  # the dashboards' own is four scrapes of 15 s


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """It has a certificate, and one of its workers has died: panels show both."""
    directory = tmp_path_factory.mktemp("watched")
    authority = Authority()
    config = {
        "ssl.keystore.location": str(authority.issue("broker", "127.0.0.1").write(directory / "broker.pem")),
        "ssl.truststore.location": str(authority.write(directory / "ca.pem")),
    }
    found = Broker(directory / "data", config=config)
    config["listeners"] = f"PLAINTEXT://127.0.0.1:{found.port},SSL://127.0.0.1:{free_port()}"
    found.config |= config
    with found:
        yield found


@pytest.fixture(scope="module")
def prometheus(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    target = broker.status()["metrics_url"].split("/")[2]
    found = Prometheus(tmp_path_factory.mktemp("prometheus"), [target], render_rules("docs/monitoring.md"))
    try:
        eventually(lambda: found.healthy_targets() == 1, "a scraped broker")
        os.kill(broker.pid("mqd-worker-1"), signal.SIGKILL)
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="module")
def traffic(broker: Broker) -> Iterator[None]:
    """Records are written, read and committed until the end."""
    is_over = threading.Event()
    producer = Producer({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": GROUP, "auto.offset.reset": "earliest", "log_level": 0,
         "auto.commit.interval.ms": 500}
    )  # fmt: skip

    def run() -> None:
        consumer.subscribe([TOPIC])
        while not is_over.is_set():
            producer.produce(TOPIC, b"value")
            producer.poll(0)
            consumer.poll(0.02)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    is_over.set()
    thread.join()
    producer.flush(60)
    consumer.close()


def values(prometheus: Prometheus, broker: Broker, query: str) -> list[float]:
    """The numbers that a panel would draw. Raises HTTPError for a query that is not PromQL."""
    instance = broker.status()["metrics_url"].split("/")[2]
    chosen = {"$topic": TOPIC, "$group": GROUP, "$broker": instance, "$__rate_interval": RANGE}
    for name, value in chosen.items():
        query = query.replace(name, value)
    found = prometheus.get("query?" + urllib.parse.urlencode({"query": query}))
    numbers = [float(one["value"][1]) for one in found["result"]]  # type: ignore[index]
    return [number for number in numbers if not math.isnan(number)]


@pytest.mark.usefixtures("traffic")
def test_every_query_of_the_dashboards_returns_a_value(prometheus: Prometheus, broker: Broker) -> None:
    waiting = dashboards.all_queries()
    assert len(waiting) > 60

    def all_found() -> bool:
        waiting[:] = [one for one in waiting if not values(prometheus, broker, one[1])]
        return not waiting

    eventually(all_found, lambda: f"values of {waiting}", 120)


def test_a_query_without_a_value_is_found(prometheus: Prometheus, broker: Broker) -> None:
    assert values(prometheus, broker, 'mqd_connections{instance="elsewhere"}') == []
    assert values(prometheus, broker, "histogram_quantile(0.5, sum by (le) (0 * mqd_sync_seconds_bucket))") == []
