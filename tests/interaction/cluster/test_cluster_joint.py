"""Joint transactions over three hosts: partitions, their coordinator and the driver's requests on
different hosts; the coordinator's host dies between write and commit.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition

from mqd.coordinator.transaction.joint import JOINT_PREFIX
from mqd.spark.encoding import Encoder
from mqd.spark.joint import Child, JointTransaction
from mqd.spark.options import KafkaSettings
from mqd.spark.producing import Producer, connections
from mqd.spark.sink_options import COLUMNS, SinkOptions
from tests.cluster import Cluster
from tests.interaction.cluster_clients import PATIENCE_S, create, partitions, until
from tests.interaction.transactional import fresh

PARTITIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


class Query:
    def __init__(self, cluster: Cluster, topic: str) -> None:
        columns = tuple("value" if name == "value" else "" for name in COLUMNS)
        self.options = SinkOptions(
            KafkaSettings(cluster.bootstrap, client_id=fresh("spark"), transport="tcp"), columns, topic
        )
        self.name = JOINT_PREFIX + fresh("query")

    def joint(self, batch: int) -> JointTransaction:
        return JointTransaction(connections(self.options).cluster, self.name, batch, "run", 60_000)

    def write(self, joint: JointTransaction, numbers: range) -> Child:
        """A child process that writes a number to each partition in turn."""
        child = joint.enlist()
        assert child is not None
        producer = Producer(self.options, child, self.name)
        for index in range(PARTITIONS):
            encoder = Encoder(self.options, lambda _: PARTITIONS)
            encoder._partitions = lambda _topic, batch, index=index: pa.array(
                [index] * batch.num_rows, pa.int32()
            ).to_numpy()  # type: ignore[method-assign]
            encoder.add(
                pa.record_batch(
                    {"value": pa.array([b"%d" % number for number in numbers[index::PARTITIONS]], pa.binary())}
                )
            )
            producer.send(encoder.remaining_batches())
        producer.flush()
        return child

    def coordinator(self) -> int:
        joint = self.joint(0)
        joint._coordinator()
        return joint._node_id


def committed(cluster: Cluster, topic: str, count: int) -> list[int]:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": "reader",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
    found: list[int] = []

    def all_there() -> bool:
        found.extend(int(message.value()) for message in consumer.consume(1000, 0.5) if not message.error())
        return len(found) >= count

    until(f"{count} records of {topic}", all_there, cluster, 2 * PATIENCE_S)
    assert not consumer.consume(1, 1.0), "and no more"
    consumer.close()
    return sorted(found)


def test_partitions_and_coordinators_on_all_hosts(cluster: Cluster) -> None:
    topic = fresh("joint")
    create(cluster, topic, PARTITIONS)
    until("every host leads", lambda: {one.leader for one in partitions(cluster, topic).values()} == {1, 2, 3}, cluster)
    coordinators = set()
    written = 0
    for _ in range(12):
        query = Query(cluster, topic)
        joint = query.joint(0)
        winner, loser = query.write(joint, range(written, written + 60)), query.write(joint, range(10_000, 10_060))
        assert winner != loser
        joint.commit([winner])
        assert query.joint(0).enlist() is None, "known on every host"
        coordinators.add(query.coordinator())
        written += 60
        if coordinators == {1, 2, 3}:
            break
    assert coordinators == {1, 2, 3}
    assert committed(cluster, topic, written) == list(range(written))


@pytest.mark.slow
def test_the_coordinator_s_host_dies_between_write_and_commit(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Cluster(tmp_path_factory.mktemp("dying")) as cluster:
        topic = fresh("joint")
        create(cluster, topic, PARTITIONS)
        query = Query(cluster, topic)
        for batch in range(3):
            joint = query.joint(batch)
            winner = query.write(joint, range(batch * 60, batch * 60 + 60))
            query.write(joint, range(10_000, 10_060))
            member = cluster.brokers[query.coordinator()]
            member.kill_all()
            joint.commit([winner])
            assert query.joint(batch).enlist() is None
            member.start()
            until(
                "the host is back",
                lambda: all(len(one.isrs) == 3 for one in partitions(cluster, topic).values()),
                cluster,
                2 * PATIENCE_S,
            )
        assert committed(cluster, topic, 180) == list(range(180))
