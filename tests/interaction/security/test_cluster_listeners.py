"""A cluster whose hosts have two listeners: a client gets the addresses of the listener that it
uses, and so never reaches a host on one with another protocol.
"""

from __future__ import annotations

import time
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import pytest

from tests.cluster import Cluster
from tests.interaction.security.secured import PASSWORDS, set_password
from tests.polling import PATIENCE_S

SASL_PORT_STEP = 5


@pytest.fixture
def cluster(tmp_path: Path):
    made = Cluster(tmp_path, 3)
    for member in made:
        plain = member.config["listeners"]
        member.config["listeners"] = f"{plain},SASL_PLAINTEXT://{member.address}:{member.port + SASL_PORT_STEP}"
    with made:
        yield made


def sasl(cluster: Cluster, node_id: int) -> dict:
    member = cluster.brokers[node_id]
    return {
        "bootstrap.servers": f"{member.address}:{member.port + SASL_PORT_STEP}",
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanisms": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": PASSWORDS["alice"],
        "log_level": 0,
    }


def test_each_listener_names_its_own_addresses(cluster: Cluster) -> None:
    set_password(cluster.brokers[1], "alice", PASSWORDS["alice"])
    for settings, step in ((sasl(cluster, 1), SASL_PORT_STEP), ({"bootstrap.servers": cluster.bootstrap}, 0)):
        admin = confluent_kafka.admin.AdminClient(settings)
        ports = {broker.port for broker in admin.list_topics(timeout=PATIENCE_S).brokers.values()}
        assert ports == {cluster.brokers[1].port + step}


def test_a_client_of_the_second_listener_over_a_dead_leader(cluster: Cluster) -> None:
    """Leaders, coordinators and their successors are all reached through it."""
    set_password(cluster.brokers[1], "alice", PASSWORDS["alice"])
    admin = confluent_kafka.admin.AdminClient(sasl(cluster, 1))
    admin.create_topics([confluent_kafka.admin.NewTopic("t", 6, 3)])["t"].result(PATIENCE_S)
    failures: list[object] = []
    producer = confluent_kafka.Producer(
        {**sasl(cluster, 1), "on_delivery": lambda error, _: failures.append(error) if error else None}
    )
    for number in range(3000):
        producer.produce("t", b"%d" % number, partition=number % 6)
        producer.poll(0)
        if number == 1500:
            producer.flush(PATIENCE_S)
            cluster.brokers[2].kill_all()
    assert producer.flush(PATIENCE_S) == 0 and failures == []
    consumer = confluent_kafka.Consumer({**sasl(cluster, 3), "group.id": "g", "auto.offset.reset": "earliest"})
    consumer.subscribe(["t"])
    found: set[int] = set()
    end = time.monotonic() + PATIENCE_S
    while len(found) < 3000 and time.monotonic() < end:
        found |= {int(message.value()) for message in consumer.consume(1000, 1.0) if message.error() is None}
    consumer.close()
    assert found == set(range(3000))
