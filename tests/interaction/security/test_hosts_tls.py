"""The traffic between the hosts of a cluster, as an eavesdropper on every path sees it, while
certificates are rotated.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import pytest

from mqd import Producer
from mqd.base import cluster_key
from mqd.security import pki
from tests.cluster import Cluster
from tests.polling import PATIENCE_S, eventually
from tests.recorder import Recorder
from tests.unit.security.host_files import LONG_AGO, NOW, authority, config_of, write

MARKER = b"a secret that no wire may show"
LOADED = "host certificate reloaded"


class WatchedCluster(Cluster):
    """A cluster whose hosts reach each other only through recorders."""

    def __init__(self, directory: Path, tls: str) -> None:
        super().__init__(directory, 3)
        self.key = directory / "cluster.key"
        cluster_key.make(self.key)
        self.wires: list[Recorder] = []
        seeds = ",".join(f"{self._wire(node_id)}:{self._port + 2}" for node_id in self.brokers)
        for node_id, member in self.brokers.items():
            wire = self._wire(node_id)
            for name, port in (("inter.broker", self._port + 1), ("controller", self._port + 2)):
                self.wires.append(Recorder((member.address, port), wire, port))
                member.config[f"advertised.{name}.listener"] = f"{wire}:{port}"
            member.config |= {"cluster.seeds": seeds, "cluster.key.file": str(self.key)}
            if tls != "off":
                pair = pki.issue_host(authority(), node_id, NOW)
                member.config |= config_of(self.folder(node_id), pair, node_id, tls)

    def _wire(self, node_id: int) -> str:
        return f"{self._network}.{100 + node_id}"

    def folder(self, node_id: int) -> Path:
        return self._directory / f"host-{node_id}"

    def certify(self, node_id: int, pair: pki.CertifiedKey) -> None:
        write(self.folder(node_id) / "host.pem", pair.key + pair.certificate)

    def stop(self) -> None:
        super().stop()
        for wire in self.wires:
            wire.close()

    def seen(self) -> bytes:
        return b"".join(data for wire in self.wires for data in wire.seen)


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WatchedCluster]:
    with WatchedCluster(tmp_path, getattr(request, "param", "required")) as made:
        admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": made.bootstrap})
        topic = confluent_kafka.admin.NewTopic("t", 3, 3, config={"min.insync.replicas": "2"})
        admin.create_topics([topic])["t"].result(PATIENCE_S)
        yield made


class Load:
    """Records with acks=all, one after another, until the end."""

    def __init__(self, cluster: Cluster) -> None:
        self.failures: list[object] = []
        self.count = 0
        self._producer = confluent_kafka.Producer(
            {"bootstrap.servers": cluster.bootstrap, "acks": "all", "linger.ms": 1}
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            self._producer.produce("t", MARKER, partition=self.count % 3, on_delivery=self._on_delivery)
            self._producer.flush(PATIENCE_S)

    def _on_delivery(self, error: object, _message: object) -> None:
        if error is not None:
            self.failures.append(error)
        else:
            self.count += 1

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)


def wait(condition: Callable[[], bool], cluster: Cluster, what: str) -> None:
    eventually(condition, lambda: f"{what}\n{cluster.logs()}")


def transact(cluster: Cluster) -> None:
    """Over all hosts: the coordinator's host sends the outcome to the leaders' hosts."""
    producer = confluent_kafka.Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": MARKER.decode()})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for partition in range(3):
        producer.produce("t", MARKER, partition=partition)
    producer.commit_transaction(PATIENCE_S)


def relay(cluster: Cluster, records: int = 30) -> None:
    """Over shared memory of each host: its worker relays requests for partitions that other hosts
    lead.
    """
    failed: list[object] = []
    for member in cluster:
        path = str(member.data_dir / "run" / "client.sock")
        producer = Producer({"bootstrap.servers": member.bootstrap, "mqd.socket.path": path})
        for number in range(records):
            producer.produce(
                "t", MARKER * 100, partition=number % 3, on_delivery=lambda error, _: error and failed.append(error)
            )
        assert producer.flush(PATIENCE_S) == 0 and producer.transport == "shm"
    assert failed == []


def in_sync(cluster: Cluster) -> list[int]:
    admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": cluster.bootstrap})
    partitions = admin.list_topics("t", timeout=PATIENCE_S).topics["t"].partitions
    return [len(partition.isrs) for partition in partitions.values()]


def wait_loaded(cluster: WatchedCluster, words: str, times: int = 1) -> None:
    """Waits until controller, acceptor and worker of each host have loaded the new files."""
    for member in cluster:
        wait(lambda member=member: member.logs(2000).count(words) >= 3 * times, cluster, f"not logged: {words}")


def wait_taken(load: Load, cluster: WatchedCluster) -> None:
    """Writes records over new connections between all hosts."""
    before = load.count
    for wire in cluster.wires:
        wire.end_connections()
    wait(lambda: load.count > before + 30, cluster, "no records are taken")


@pytest.mark.slow
def test_nothing_is_sent_in_plaintext_while_certificates_and_the_key_rotate(cluster: WatchedCluster) -> None:
    transact(cluster)
    with Load(cluster) as load:
        for node_id in cluster.brokers:
            cluster.certify(node_id, pki.issue_host(authority(), node_id, NOW))
        wait_loaded(cluster, LOADED)
        wait_taken(load, cluster)
        for step in (1, 2, 3):
            assert cluster_key.rotate(cluster.key) == step
            wait_loaded(cluster, "cluster key reloaded", step)
            wait_taken(load, cluster)
        os.kill(cluster.brokers[1].pids("worker")[0], signal.SIGKILL)
        wait_taken(load, cluster)
    assert load.failures == []
    transact(cluster)
    relay(cluster)
    wait(lambda: in_sync(cluster) == [3, 3, 3], cluster, "a replica is not in sync")
    assert all(wire.count > 1 and len(b"".join(wire.seen)) > 10_000 for wire in cluster.wires)
    assert MARKER not in cluster.seen() and b"MQDP" in cluster.seen()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["off"], indirect=True)
def test_without_tls_the_eavesdropper_sees_it(cluster: WatchedCluster) -> None:
    """Proves that the test above can fail."""
    transact(cluster)
    assert cluster.seen().count(MARKER) >= 6, "each record goes to two followers"


@pytest.mark.slow
def test_an_expired_certificate_is_refused_until_it_is_renewed(cluster: WatchedCluster) -> None:
    with Load(cluster) as load:
        cluster.certify(3, pki.issue_host(authority(), 3, LONG_AGO))
        wait(lambda: cluster.brokers[3].logs(2000).count(LOADED) >= 3, cluster, "the certificate is not loaded")
        for wire in cluster.wires:
            wire.end_connections()
        wait(lambda: 2 in in_sync(cluster), cluster, "host 3 is still in sync")
        for node_id, words in (
            (1, "certificate has expired"),
            (2, "certificate has expired"),
            (3, "certificate expired"),
        ):
            wait(lambda: words in cluster.brokers[node_id].logs(2000), cluster, f"host {node_id} does not say why")
        cluster.certify(3, pki.issue_host(authority(), 3, NOW))
        wait(lambda: in_sync(cluster) == [3, 3, 3], cluster, "host 3 does not come back")
    assert load.failures == []


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["off"], indirect=True)
def test_a_plaintext_cluster_is_encrypted_host_by_host(cluster: WatchedCluster) -> None:
    """Like one that an earlier release has secured: TLS is first allowed everywhere, then required."""
    with Load(cluster) as load:
        for tls in ("allowed", "required"):
            for node_id, member in cluster.brokers.items():
                member.stop()
                pair = pki.issue_host(authority(), node_id, NOW)
                member.config |= config_of(cluster.folder(node_id), pair, node_id, tls)
                member.start()
                wait(lambda: in_sync(cluster) == [3, 3, 3], cluster, f"host {node_id} does not come back")
        for wire in cluster.wires:
            wire.seen.clear()
        before = load.count
        wait(lambda: load.count > before + 30, cluster, "no records are taken")
    assert load.failures == []
    assert MARKER not in cluster.seen() and len(cluster.seen()) > 10_000
