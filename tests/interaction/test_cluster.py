"""Three real brokers: what is acknowledged is on the others' disks, and a broker's death is a matter of moments."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.cluster import Cluster, Member

PATIENCE_S = 30.0


@pytest.fixture(scope="module", params=["epoll", "io_uring"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster"), config={"io.backend": request.param}) as started:
        yield started


def _until(what: str, holds: Callable[[], object], cluster: Cluster, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:.0f} s: {what}\n{cluster.logs()}")
        time.sleep(0.05)  # other processes' doing: nothing here can be waited for


def _create(cluster: Cluster, name: str, partitions: int = 3, replicas: int = 3, config: dict[str, str] | None = None) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(name, partitions, replicas, config=config or {})])[name].result(PATIENCE_S)


def _partitions(cluster: Cluster, name: str) -> dict:
    return AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(name, timeout=PATIENCE_S).topics[name].partitions


def _produce(cluster: Cluster, topic: str, values: list[bytes], partition: int = 0) -> None:
    """All acknowledged, or the test fails."""
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "enable.idempotence": True, "linger.ms": 1, "message.timeout.ms": 60_000})
    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=lambda error, _message: failed.append(error) if error else None)
    assert producer.flush(60) == 0
    assert not failed


def _read(cluster: Cluster, topic: str, count: int, partition: int = 0) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "reader", "auto.offset.reset": "earliest", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, partition, 0)])
    found: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < deadline:
        found += [message.value() for message in consumer.consume(1000, 0.5) if not message.error()]
    consumer.close()
    return found


def _log(broker: Member, topic: str, partition: int) -> bytes:
    """The partition's records as they lie on the broker's disk."""
    directory = broker.data_dir / "log" / f"{topic}-{partition}"
    return b"".join(path.read_bytes() for path in sorted(directory.glob("*.log")))


def _all_in_sync(cluster: Cluster, topic: str) -> bool:
    return all(sorted(one.isrs) == sorted(one.replicas) and one.leader >= 0 for one in _partitions(cluster, topic).values())


def test_acknowledged_records_lie_on_every_broker_byte_for_byte(cluster: Cluster) -> None:
    _create(cluster, "copied")
    values = [f"{number}".encode() for number in range(2000)]
    _produce(cluster, "copied", values)
    logs = {broker.node_id: _log(broker, "copied", 0) for broker in cluster}
    leader = _partitions(cluster, "copied")[0].leader
    in_sync = _partitions(cluster, "copied")[0].isrs
    assert leader in in_sync and len(in_sync) >= 2
    for node_id in in_sync:
        assert logs[node_id] == logs[leader]
    assert _read(cluster, "copied", 2000) == values


def test_records_survive_the_death_of_their_leader(cluster: Cluster) -> None:
    _create(cluster, "survives", partitions=1)
    before = [f"before {number}".encode() for number in range(500)]
    after = [f"after {number}".encode() for number in range(500)]
    _produce(cluster, "survives", before)
    leader = _partitions(cluster, "survives")[0].leader
    cluster.brokers[leader].kill_all()
    try:
        _produce(cluster, "survives", after)
        assert _read(cluster, "survives", 1000) == before + after
        assert _partitions(cluster, "survives")[0].leader != leader
    finally:
        cluster.brokers[leader].start()
    _until("the broker that was killed is in sync again", lambda: _all_in_sync(cluster, "survives"), cluster)
    logs = {_log(broker, "survives", 0) for broker in cluster}
    assert len(logs) == 1


def test_a_controlled_shutdown_costs_no_producer_an_error(cluster: Cluster) -> None:
    _create(cluster, "calm", partitions=3)
    _until("all replicas are in sync", lambda: _all_in_sync(cluster, "calm"), cluster)
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all", "enable.idempotence": True, "message.timeout.ms": 60_000, "error_cb": lambda error: None})
    member = cluster.brokers[_partitions(cluster, "calm")[0].leader]
    for number in range(300):
        producer.produce("calm", str(number).encode(), partition=number % 3, on_delivery=lambda error, _message: errors.append(error) if error else None)
        producer.poll(0.002)
        if number == 100:
            member.stop()
    try:
        assert producer.flush(60) == 0
        assert not errors
    finally:
        member.start()
    _until("the broker is back in sync", lambda: _all_in_sync(cluster, "calm"), cluster)
    assert sorted(value for partition in range(3) for value in _read(cluster, "calm", 100, partition)) == sorted(str(number).encode() for number in range(300))
