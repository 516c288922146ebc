"""acks.replicas on three hosts: a slow follower is swapped for the spare, so no producer waits for
it; and what is acknowledged survives the hosts that are killed one after the other.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from tests.cluster import Cluster, Member
from tests.interaction.cluster.test_cluster_lagging import changes, stopped_worker
from tests.interaction.cluster_clients import create, partitions, read, run, until

LAG_MS = 3_000
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("spares"), config={"replica.lag.time.max.ms": str(LAG_MS)}) as started:
        yield started


class Writer:
    """Writes numbers, one after the other; each waits for its acknowledgement."""

    def __init__(self, cluster: Cluster, topic: str):
        self.acknowledged: list[bytes] = []
        self.seconds: list[float] = []
        self._cluster, self._topic = cluster, topic
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": ",".join(broker.bootstrap for broker in self._cluster),
                "enable.idempotence": True,
                "linger.ms": 0,
                "retry.backoff.ms": 20,
                "message.timeout.ms": 60_000,
                "socket.nagle.disable": True,
            }
        )
        number = 0
        while not self._ends.is_set():
            value, failed, began = str(number).encode(), [], time.monotonic()
            producer.produce(self._topic, value, partition=0, on_delivery=lambda error, _: failed.append(error))
            producer.flush(60)
            assert failed == [None]
            self.seconds.append(time.monotonic() - began)
            self.acknowledged.append(value)
            number += 1

    def wait(self, count: int) -> list[float]:
        """The seconds that each of the next `count` records took."""
        first = len(self.seconds)
        until(f"{count} more records", lambda: len(self.seconds) >= first + count, self._cluster)
        return self.seconds[first : first + count]


def member_of(cluster: Cluster, topic: str) -> tuple[Member, Member, Member]:
    """(leader, the other member, the spare) of the topic's only partition."""
    (one,) = partitions(cluster, topic).values()
    assert len(one.isrs) == 2 and one.leader in one.isrs, one
    (other,) = set(one.isrs) - {one.leader}
    (spare,) = set(one.replicas) - set(one.isrs)
    return cluster.brokers[one.leader], cluster.brokers[other], cluster.brokers[spare]


def percentile(seconds: list[float], share: float) -> float:
    return sorted(seconds)[min(int(len(seconds) * share), len(seconds) - 1)]


def test_no_producer_waits_for_a_follower_that_stands_still(cluster: Cluster) -> None:
    create(cluster, "spared", partitions=1, config={"acks.replicas": "2"})
    create(cluster, "plain", partitions=1)
    with Writer(cluster, "spared") as writer:
        writer.wait(50)
        leader, member, spare = member_of(cluster, "spared")
        before = changes(leader)
        with stopped_worker(member):
            stalled = writer.wait(300)
            assert {leader.node_id, spare.node_id} == set(partitions(cluster, "spared")[0].isrs)
        after = changes(leader)
        writer.wait(100)
    print("with acks.replicas, ms:", [round(1e3 * percentile(stalled, share), 1) for share in (0.5, 0.99, 1)])
    assert max(stalled) < 0.5 * LAG_MS / 1e3 and percentile(stalled, 0.99) < 0.5
    assert (after["leaves"] - before["leaves"], after["joins"] - before["joins"]) == (1, 1), "one exchange"
    with Writer(cluster, "plain") as writer:
        writer.wait(50)
        (one,) = partitions(cluster, "plain").values()
        follower = cluster.brokers[next(node for node in one.replicas if node != one.leader)]
        with stopped_worker(follower):
            stalled = writer.wait(30)
    print("without, ms:", [round(1e3 * percentile(stalled, share), 1) for share in (0.5, 0.99, 1)])
    assert max(stalled) > 0.9 * LAG_MS / 1e3, "the comparison shows nothing"


def test_spares_are_not_reported_as_lacking_while_their_hosts_are_in_service(cluster: Cluster) -> None:
    create(cluster, "seen", partitions=2, config={"acks.replicas": "2"})

    def under_replicated() -> int:
        found = 0
        for broker in cluster:
            url = f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics"
            with urllib.request.urlopen(url, timeout=60) as page:
                lines = page.read().decode().splitlines()
            found += sum(int(float(line.split()[-1])) for line in lines if line.startswith("mqd_partitions_under_rep"))
        return found

    until("no spare counts", lambda: under_replicated() == 0, cluster)
    status = run("cluster", "status", "--bootstrap", cluster.bootstrap).stdout
    assert "all replicas in sync" in status, status


def test_hosts_killed_in_turn_lose_nothing(cluster: Cluster) -> None:
    create(cluster, "killed", partitions=1, config={"acks.replicas": "2"})
    with Writer(cluster, "killed") as writer:
        for _ in range(2):
            for role in range(3):
                writer.wait(20)
                until("two are in sync", lambda: len(partitions(cluster, "killed")[0].isrs) == 2, cluster)
                victim = member_of(cluster, "killed")[role]
                victim.kill_all()
                writer.wait(20)
                victim.start()
    found = read(cluster, "killed", len(writer.acknowledged))
    assert found[: len(writer.acknowledged)] == writer.acknowledged
