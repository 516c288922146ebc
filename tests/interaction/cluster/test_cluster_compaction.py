"""Compacted topics with several replicas: a replica that is added later has the records of its
leader, offsets and gaps included, even when the topic is no longer compacted; and it can lead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

from mqd.log import compaction_report
from tests.cluster import Cluster
from tests.interaction.cluster_clients import PATIENCE_S, all_in_sync, partitions, run, until

COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": "16384",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "60000",
}
KEYS, ROUNDS = 40, 60
Read = list[tuple[int, bytes, bytes]]  # offset, key, value


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("compacted"), config={"log.cleaner.backoff.ms": "100"}) as started:
        yield started


def mqd(cluster: Cluster, *arguments: str) -> str:
    done = run(*arguments, "-b", cluster.bootstrap)
    assert done.returncode == 0, f"{arguments}: {done.stderr}\n{cluster.logs()}"
    return done.stdout


def write(cluster: Cluster, topic: str, rounds: int) -> None:
    """Writes each key many times, with aborted transactions and their markers among the records."""
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "transactional.id": f"{topic}-writer",
            "linger.ms": 1,
            "batch.num.messages": 10,
        }
    )
    producer.init_transactions(PATIENCE_S)
    for number in range(rounds):
        producer.begin_transaction()
        for key in range(KEYS):
            producer.produce(topic, f"{number}-{key}-".encode() + b"." * 40, f"key-{key}".encode(), 0)
        producer.flush(PATIENCE_S)
        (producer.abort_transaction if number % 5 == 3 else producer.commit_transaction)(PATIENCE_S)


def read(cluster: Cluster, topic: str) -> Read:
    """All committed records, in order."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    found: Read = []
    deadline, ended = time.monotonic() + PATIENCE_S, False
    while not ended:
        assert time.monotonic() < deadline, cluster.logs()
        for message in consumer.consume(1000, 0.2):
            if message.error() is None:
                found.append((message.offset(), message.key(), message.value()))
            else:
                ended = True  # the end of the log: no producer writes
    consumer.close()
    return found


def compacted(cluster: Cluster, topic: str, node_id: int) -> bool:
    broker = cluster.brokers[node_id]
    return any(
        one.runs > 0
        for worker in range(broker.workers)
        for one in compaction_report.read(broker.data_dir / "run", worker).partitions
        if one.topic == topic
    )


@pytest.mark.slow
@pytest.mark.parametrize("still", [True, False], ids=["compacted", "compacted once"])
def test_a_new_replica_equals_its_compacted_leader(cluster: Cluster, still: bool) -> None:
    topic = f"later-{still}"
    settings = [word for name, value in COMPACT.items() for word in ("-c", f"{name}={value}")]
    mqd(cluster, "topic", "create", topic, "--partitions", "1", "--replication-factor", "1", *settings)
    write(cluster, topic, ROUNDS)
    first = partitions(cluster, topic)[0].leader
    until(
        "the leader has compacted it",
        lambda: compacted(cluster, topic, first) and len(read(cluster, topic)) < KEYS * ROUNDS // 2,
        cluster,
    )
    if not still:
        mqd(cluster, "topic", "alter", topic, "-c", "cleanup.policy=delete")
    else:
        # two successive reads must be equal
        mqd(cluster, "topic", "alter", topic, "-c", "min.cleanable.dirty.ratio=1.0")
    before = read(cluster, topic)
    offsets = [offset for offset, _, _ in before]
    assert any(later - earlier > 1 + KEYS for earlier, later in zip(offsets, offsets[1:])), (
        "there is a gap of whole batches"
    )
    other = 1 + first % len(cluster.brokers)
    mqd(cluster, "topic", "reassign", topic, "--brokers", f"{first},{other}", "-r", "2")
    until(
        "the new replica is in sync",
        lambda: all_in_sync(cluster, topic) and len(partitions(cluster, topic)[0].replicas) == 2,
        cluster,
    )
    mqd(cluster, "topic", "reassign", topic, "--brokers", str(other), "-r", "1")
    until("it leads", lambda: partitions(cluster, topic)[0].leader == other, cluster)
    assert read(cluster, topic) == before
    cluster.brokers[other].kill_all()  # recovery accepts gaps in the offsets
    cluster.brokers[other].start()
    until("it leads again", lambda: partitions(cluster, topic)[0].leader == other, cluster)
    assert read(cluster, topic) == before
    write(cluster, topic, 2)
    assert read(cluster, topic)[: len(before)] == before
