"""Three real brokers: acknowledged records are on the other brokers' disks, and clients recover
within moments of a broker's death.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from tests.cluster import Cluster
from tests.interaction.cluster_clients import (
    all_in_sync,
    create,
    log,
    partitions,
    produce,
    read,
    until,
    wait_for_in_sync,
)
from tests.tiers import quick


@pytest.fixture(scope="module", params=quick(["epoll", "io_uring"], ["epoll"]))
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), config={"io.backend": request.param}) as started:
        yield started


def test_acknowledged_records_are_identical_on_every_broker(cluster: Cluster) -> None:
    create(cluster, "copied")
    values = [f"{number}".encode() for number in range(2000)]
    produce(cluster, "copied", values)
    logs = {broker.node_id: log(broker, "copied", 0) for broker in cluster}
    leader = partitions(cluster, "copied")[0].leader
    in_sync = partitions(cluster, "copied")[0].isrs
    assert leader in in_sync and len(in_sync) >= 2
    for node_id in in_sync:
        assert logs[node_id] == logs[leader]
    assert read(cluster, "copied", 2000) == values


def test_records_survive_the_death_of_their_leader(cluster: Cluster) -> None:
    create(cluster, "survives", partitions=1)
    before = [f"before {number}".encode() for number in range(500)]
    after = [f"after {number}".encode() for number in range(500)]
    produce(cluster, "survives", before)
    leader = partitions(cluster, "survives")[0].leader
    cluster.brokers[leader].kill_all()
    try:
        produce(cluster, "survives", after)
        assert read(cluster, "survives", 1000) == before + after
        assert partitions(cluster, "survives")[0].leader != leader
    finally:
        cluster.brokers[leader].start()
    until("the broker that was killed is in sync again", lambda: all_in_sync(cluster, "survives"), cluster)
    logs = {log(broker, "survives", 0) for broker in cluster}
    assert len(logs) == 1


def test_a_controlled_shutdown_causes_no_producer_errors(cluster: Cluster) -> None:
    create(cluster, "calm", partitions=3)
    leader = wait_for_in_sync(cluster, "calm")[0].leader
    errors: list[object] = []
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "message.timeout.ms": 60_000,
            "error_cb": lambda error: None,
        }
    )
    member = cluster.brokers[leader]
    for number in range(300):
        producer.produce(
            "calm",
            str(number).encode(),
            partition=number % 3,
            on_delivery=lambda error, _message: errors.append(error) if error else None,
        )
        producer.poll(0.002)
        if number == 100:
            member.stop()
    try:
        assert producer.flush(60) == 0
        assert not errors
    finally:
        member.start()
    until("the broker is back in sync", lambda: all_in_sync(cluster, "calm"), cluster)
    assert sorted(value for partition in range(3) for value in read(cluster, "calm", 100, partition)) == sorted(
        str(number).encode() for number in range(300)
    )
