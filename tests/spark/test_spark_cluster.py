"""Spark with three real brokers while one is killed: a leader during a batch read, and a leader
during a stream that writes exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.interaction.cluster_clients import all_in_sync, create, partitions, produce, until
from tests.interaction.transactional import fresh
from tests.spark.support import options, read
from tests.spark.test_bad_input import Copy, Gate, copy, gathered, wide  # noqa: F401  (a fixture)

PARTITIONS = 3
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as started:
        yield started


def topic_of(cluster: Cluster) -> str:
    topic = fresh("spark")
    create(cluster, topic, PARTITIONS)
    until("every replica is in sync", lambda: all_in_sync(cluster, topic), cluster)
    return topic


def kill_leader(cluster: Cluster, topic: str, partition: int = 0) -> None:
    """Returns when other brokers lead all its partitions."""
    leader = partitions(cluster, topic)[partition].leader
    cluster.brokers[leader].kill_all()
    until(
        "others lead",
        lambda: all(one.leader not in (leader, -1) for one in partitions(cluster, topic).values()),
        cluster,
    )


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_leader_is_killed_while_a_batch_is_read(spark: Any, cluster: Cluster, tmp_path: Path, transport: str) -> None:
    topic, each = topic_of(cluster), 30_000
    for index in range(PARTITIONS):
        produce(cluster, topic, wide(each), index)
    frame = read(
        spark,
        cluster,
        topic,
        transport=transport,
        kafka__fetch__max__bytes=1 << 17,
        kafka__max__partition__fetch__bytes=1 << 17,
    )
    found = gathered(Gate(tmp_path / "gate"), frame, lambda: kill_leader(cluster, topic))
    assert found == [(index, number, number) for index in range(PARTITIONS) for number in range(each)]


def test_a_leader_is_killed_while_a_stream_writes(cluster: Cluster, copy: Callable[..., Copy]) -> None:  # noqa: F811
    """Reader, writer and the coordinator of the batches' transactions: their leaders are on several
    brokers, and all continue.
    """
    source, target = topic_of(cluster), topic_of(cluster)
    produce(cluster, source, [b"%d" % number for number in range(500)])
    job = copy(cluster, source, target)
    job.wait(lambda: len(job.found()) == 500)
    kill_leader(cluster, target)
    for index in range(PARTITIONS):
        produce(cluster, source, [b"%d" % number for number in range(500 * (index + 1), 500 * (index + 2))], index)
    count = 500 * (PARTITIONS + 1)
    job.wait(lambda: len(job.found()) >= count)
    assert sorted(int(row[3]) for row in job.found()) == list(range(count))


def test_permanently_lost_brokers_are_named(spark: Any, cluster: Cluster) -> None:
    topic = topic_of(cluster)
    produce(cluster, topic, wide(10))
    for broker in cluster:
        broker.kill_all()
    frame = spark.read.format("mqd").options(**options(cluster, topic, kafka__default__api__timeout__ms=1000)).load()
    with pytest.raises(Exception, match=f"topics {topic}: no response within 1 s from {cluster.bootstrap}"):
        frame.collect()
