"""acks.replicas while replicas move between four hosts: reassignment, drain, and the return of the
preferred replica's host. A producer writes meanwhile, and nothing acknowledged is lost.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import Cluster
from tests.interaction.cluster.test_cluster_lagging import stopped_worker
from tests.interaction.cluster.test_cluster_spares import LAG_MS, Writer, member_of
from tests.interaction.cluster_clients import create, partitions, read, run, until

# how long it stays a spare after an exchange, which a busy machine may cause (MQD_REPLICA_PREFER_MS)
PREFERRED_S = 300.0
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = {
        "replica.lag.time.max.ms": str(LAG_MS),
        "leader.imbalance.check.interval.seconds": "2",
        "leader.imbalance.per.broker.percentage": "0",
    }
    with Cluster(tmp_path_factory.mktemp("moved"), count=4, config=config) as started:
        yield started


def mqd(cluster: Cluster, *words: str) -> None:
    done = run(*words, "-b", cluster.bootstrap)
    assert done.returncode == 0, done.stdout + done.stderr


def has_replicas(cluster: Cluster, topic: str, replicas: set[int]) -> bool:
    """Whether these three are the replicas, and two are in sync: the leader and one other."""
    (one,) = partitions(cluster, topic).values()
    return set(one.replicas) == replicas and len(one.isrs) == 2 and one.leader in one.isrs


def check(cluster: Cluster, topic: str, writer: Writer) -> None:
    assert read(cluster, topic, len(writer.acknowledged)) == writer.acknowledged


def test_each_replica_is_moved_while_a_producer_writes(cluster: Cluster) -> None:
    create(cluster, "moved", partitions=1, config={"acks.replicas": "2"})
    with Writer(cluster, "moved") as writer:
        for role in range(3):
            writer.wait(20)
            (one,) = partitions(cluster, "moved").values()
            leaving = member_of(cluster, "moved")[role].node_id
            staying = (set(one.replicas) - {leaving}) | (set(cluster.brokers) - set(one.replicas))
            mqd(cluster, "topic", "reassign", "moved", "--brokers", ",".join(map(str, sorted(staying))), "-r", "3")
            until(f"replicas {staying}", lambda staying=staying: has_replicas(cluster, "moved", staying), cluster)
            writer.wait(20)
    check(cluster, "moved", writer)


def test_the_host_of_each_role_is_drained_while_a_producer_writes(cluster: Cluster) -> None:
    create(cluster, "drained", partitions=1, config={"acks.replicas": "2"})
    with Writer(cluster, "drained") as writer:
        for role in range(3):
            writer.wait(20)
            node_id = member_of(cluster, "drained")[role].node_id
            mqd(cluster, "cluster", "drain", str(node_id))
            others = set(cluster.brokers) - {node_id}
            until(f"{node_id} holds nothing", lambda others=others: has_replicas(cluster, "drained", others), cluster)
            writer.wait(20)
            mqd(cluster, "cluster", "drain", str(node_id), "--cancel")
    check(cluster, "drained", writer)


@pytest.mark.timeout(600)
def test_the_preferred_replica_leads_again_after_its_host_has_died(cluster: Cluster) -> None:
    create(cluster, "returned", partitions=1, config={"acks.replicas": "2"})
    with Writer(cluster, "returned") as writer:
        writer.wait(20)
        (one,) = partitions(cluster, "returned").values()
        preferred = cluster.brokers[one.replicas[0]]
        others = set(one.replicas) - {preferred.node_id}
        preferred.kill_all()
        writer.wait(20)
        until("the spare takes its place", lambda: set(partitions(cluster, "returned")[0].isrs) == others, cluster)
        preferred.start()
        until(
            "it leads",
            lambda: partitions(cluster, "returned")[0].leader == preferred.node_id,
            cluster,
            PREFERRED_S + 60,
        )
        writer.wait(20)
        leader, other, _ = member_of(cluster, "returned")
        assert leader is preferred
        with stopped_worker(other):
            writer.wait(20)
    check(cluster, "returned", writer)
