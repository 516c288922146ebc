"""Apache Kafka's kafka-reassign-partitions against three brokers: --execute --throttle, --verify
and --cancel, and which traffic the throttle slows down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from tests.cluster import Cluster
from tests.compat.kafka_tools import KafkaTools
from tests.interaction.cluster_clients import PATIENCE_S, partitions, produce, until

pytestmark = pytest.mark.slow

BATCH = [bytes(10_000)] * 300  # 3 MB
RATE = 30_000  # bytes per second: a hundred seconds for the data
THROTTLES = (
    "leader.replication.throttled.rate",
    "follower.replication.throttled.rate",
    "replica.alter.log.dirs.io.max.bytes.per.second",
)
LISTS = ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("reassigned")) as started:
        yield started


def in_sync(cluster: Cluster, name: str) -> set[int]:
    found = partitions(cluster, name).get(0)
    return set(found.isrs) if found else set()


def replicas(cluster: Cluster, name: str) -> set[int]:
    found = partitions(cluster, name).get(0)
    return set(found.replicas) if found else set()


def filled(cluster: Cluster, name: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics(
        [NewTopic(name, replica_assignment=[[1, 2]], num_partitions=1, config={"min.insync.replicas": "1"})]
    )[name].result(PATIENCE_S)
    until("both are in sync", lambda: in_sync(cluster, name) == {1, 2}, cluster)
    produce(cluster, name, BATCH)


def plan(path: Path, name: str, to: list[int]) -> list[str]:
    path.write_text(json.dumps({"version": 1, "partitions": [{"topic": name, "partition": 0, "replicas": to}]}))
    return ["--reassignment-json-file", str(path)]


def throttles(cluster: Cluster, name: str) -> dict[str, str]:
    """The throttles set on brokers and on the topic."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    resources = [*(ConfigResource("broker", str(node)) for node in cluster.brokers), ConfigResource("topic", name)]
    found = {}
    for resource in resources:  # librdkafka queries one broker at a time
        for row in admin.describe_configs([resource])[resource].result(PATIENCE_S).values():
            if row.name in (*THROTTLES, *LISTS) and not row.is_default:
                found[f"{resource.name} {row.name}"] = row.value
    return found


def test_execute_verify(cluster: Cluster, kafka_tools: KafkaTools, tmp_path: Path) -> None:
    filled(cluster, "moved")
    filled(cluster, "beside")
    moved = plan(tmp_path / "moved.json", "moved", [1, 3])
    done = kafka_tools.reassign(
        cluster.bootstrap, *moved, "--execute", "--throttle", str(RATE), "--replica-alter-log-dirs-throttle", "5000000"
    )
    assert done.returncode == 0 and "Successfully started partition reassignment for moved-0" in done.stdout, (
        done.stdout + done.stderr
    )
    set_now = throttles(cluster, "moved")
    assert {f"{node} {name}" for node in (1, 2, 3) for name in THROTTLES[:2]} <= set_now.keys(), set_now
    assert set_now["moved follower.replication.throttled.replicas"] == "0:3", set_now

    done = kafka_tools.reassign(
        cluster.bootstrap, *plan(tmp_path / "beside.json", "beside", [1, 3]), "--execute", "--additional"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    until(
        "what is not listed is not slowed down",
        lambda: replicas(cluster, "beside") == in_sync(cluster, "beside") == {1, 3},
        cluster,
    )
    assert replicas(cluster, "moved") == {1, 2, 3}, "what is listed is"

    done = kafka_tools.reassign(cluster.bootstrap, *moved, "--verify")
    assert done.returncode == 0 and "Reassignment of partition moved-0 is still in progress." in done.stdout, (
        done.stdout + done.stderr
    )
    assert throttles(cluster, "moved"), "it stays until all is moved"
    done = kafka_tools.reassign(cluster.bootstrap, *moved, "--execute", "--additional", "--throttle", str(1000 * RATE))
    assert done.returncode == 0 and throttles(cluster, "moved")["3 follower.replication.throttled.rate"] == str(
        1000 * RATE
    ), done.stdout + done.stderr
    until(
        "it has moved, at a higher rate",
        lambda: replicas(cluster, "moved") == in_sync(cluster, "moved") == {1, 3},
        cluster,
    )
    done = kafka_tools.reassign(cluster.bootstrap, *moved, "--verify")
    assert done.returncode == 0 and "Reassignment of partition moved-0 is completed." in done.stdout, (
        done.stdout + done.stderr
    )
    assert (
        "Clearing broker-level throttles on brokers 1,2,3" in done.stdout
        and "Clearing topic-level throttles on topic moved" in done.stdout
    )
    assert throttles(cluster, "moved") == {}


def test_cancel(cluster: Cluster, kafka_tools: KafkaTools, tmp_path: Path) -> None:
    filled(cluster, "cancelled")
    words = plan(tmp_path / "plan.json", "cancelled", [1, 3])
    done = kafka_tools.reassign(cluster.bootstrap, *words, "--execute", "--throttle", "1000")
    assert done.returncode == 0 and throttles(cluster, "cancelled"), done.stdout + done.stderr
    done = kafka_tools.reassign(cluster.bootstrap, *words, "--cancel")
    assert done.returncode == 0 and "Successfully cancelled partition reassignment" in done.stdout, (
        done.stdout + done.stderr
    )
    assert throttles(cluster, "cancelled") == {}
    until(
        "it is where it was", lambda: replicas(cluster, "cancelled") == in_sync(cluster, "cancelled") == {1, 2}, cluster
    )
