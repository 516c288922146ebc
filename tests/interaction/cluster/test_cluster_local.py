"""Applications on a host of a cluster that use shared memory for everything: partitions led by
other hosts, with and without a local replica, groups and transactions with remote coordinators,
leaders that move or die during writes.
"""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd import Consumer, Producer
from mqd.client.messages import TopicPartition
from mqd.protocol.messages import AlterPartitionReassignmentsRequest, CreateTopicsRequest, ElectLeadersRequest
from tests.cluster import Cluster, Member
from tests.interaction.cluster_clients import until
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S
from tests.tiers import quick

CREATE_TOPICS, ELECT_LEADERS, ALTER_REASSIGNMENTS = 19, 43, 45
PARTITIONS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(
        tmp_path_factory.mktemp("cluster"), workers=2, config={"group.initial.rebalance.delay.ms": "0"}
    ) as started:
        yield started


def at(broker: Member, **more: object) -> dict[str, object]:
    """A client of this host. The first one uses the default and does not request shared memory
    explicitly.
    """
    return {
        "bootstrap.servers": broker.bootstrap,
        "mqd.socket.path": str(broker.data_dir / "run" / "client.sock"),
        **{key.replace("_", "."): value for key, value in more.items()},
    }


def create(cluster: Cluster, name: str, assignments: list[list[int]], config: dict[str, str] | None = None) -> None:
    topic = CreateTopicsRequest.Topic(
        name=name,
        num_partitions=-1,
        replication_factor=-1,
        assignments=[
            CreateTopicsRequest.Assignment(partition_index=index, broker_ids=nodes)
            for index, nodes in enumerate(assignments)
        ],
        configs=[CreateTopicsRequest.Config(name=key, value=value) for key, value in (config or {}).items()],
    )
    with KafkaConnection(cluster.brokers[1].address, cluster.brokers[1].port, timeout_s=PATIENCE_S) as kafka:
        response = kafka.call(CREATE_TOPICS, 7, CreateTopicsRequest(topics=[topic], timeout_ms=60_000)).topics[0]
    assert response.error_code == 0, response.error_message
    until(f"{name} is led", lambda: leaders(cluster, name) == [nodes[0] for nodes in assignments], cluster)


def leaders(cluster: Cluster, name: str) -> list[int]:
    reported = [
        AdminClient({"bootstrap.servers": broker.bootstrap})
        .list_topics(name, timeout=PATIENCE_S)
        .topics[name]
        .partitions
        for broker in cluster
        if broker.process is not None
    ]
    assert reported
    return (
        [one.leader for _, one in sorted(reported[0].items())]
        if all(
            {i: p.leader for i, p in each.items()} == {i: p.leader for i, p in reported[0].items()} for each in reported
        )
        else []
    )


def metric(broker: Member, name: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}_total", f"{name}{{", f"{name} ")))
    )


def write(
    producer: Producer, topic: str, count: int, partitions: int = PARTITIONS, begin: int = 0
) -> list[tuple[int, int, int]]:
    """(partition, offset, number) of every record, all acknowledged."""
    done: list[tuple[int, int, int]] = []
    failed: list[object] = []

    def report(error: object, message: object) -> None:
        (failed if error else done).append(error or (message.partition(), message.offset(), int(message.value())))

    for number in range(begin, begin + count):
        producer.produce(topic, b"%d" % number, partition=number % partitions, on_delivery=report)
        producer.poll(0)
    assert producer.flush(PATIENCE_S) == 0
    assert not failed
    return done


def read(consumer: Consumer, count: int, seconds: float = PATIENCE_S) -> dict[tuple[str, int], list[int]]:
    """Values by partition, in the order in which they came."""
    found: dict[tuple[str, int], list[int]] = {}
    total, deadline = 0, time.monotonic() + seconds
    while total < count and time.monotonic() < deadline:
        for message in consumer.consume(1000, 0.5):
            assert message.error() is None, message.error()
            found.setdefault((message.topic(), message.partition()), []).append(int(message.value()))
            total += 1
    return found


def expected(topic: str, count: int, partitions: int = PARTITIONS) -> dict[tuple[str, int], list[int]]:
    return {(topic, index): list(range(index, count, partitions)) for index in range(partitions)}


# -- transport -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def topics(cluster: Cluster) -> tuple[str, str]:
    """One topic with replicas on all hosts, and one with a single replica per partition."""
    create(cluster, "everywhere", [[1 + (i + j) % 3 for j in range(3)] for i in range(PARTITIONS)])
    create(cluster, "scattered", [[1 + i % 3] for i in range(PARTITIONS)])
    return "everywhere", "scattered"


@pytest.mark.parametrize("topic_index", [0, 1], ids=["replicas here", "no replica here"])
def test_everything_by_shared_memory(cluster: Cluster, topics: tuple[str, str], topic_index: int) -> None:
    topic, count = topics[topic_index], 3000
    writer, reader = cluster.brokers[1], cluster.brokers[2]
    before = metric(writer, "mqd_relayed_batches")
    producer = Producer(at(writer, enable_idempotence=True, linger_ms=2))
    assert producer.transport == "shm"
    done = write(producer, topic, count)
    assert sorted(number for _, _, number in done) == list(range(count))
    assert {(partition, offset) for partition, offset, _ in done} == {
        (p, o) for p in range(PARTITIONS) for o in range(count // PARTITIONS)
    }
    assert metric(writer, "mqd_relayed_batches") > before
    consumer = Consumer(at(reader, group_id=f"readers-of-{topic}", auto_offset_reset="earliest"))
    assert consumer.transport == "shm"
    consumer.subscribe([topic])
    assert read(consumer, count) == expected(topic, count)
    write(producer, topic, 60, begin=count)  # to a consumer that has read everything and is waiting
    later = read(consumer, 60)
    assert sorted(number for numbers in later.values() for number in numbers) == list(range(count, count + 60))
    assert [consumer.get_watermark_offsets(TopicPartition(topic, p), 10) for p in range(PARTITIONS)] == [
        (0, (count + 60) // PARTITIONS)
    ] * PARTITIONS
    consumer.close()


def test_seeking_without_a_local_replica(cluster: Cluster) -> None:
    create(cluster, "sought", [[3]])
    write(Producer(at(cluster.brokers[1])), "sought", 2000, 1)
    consumer = Consumer(at(cluster.brokers[1], group_id="seekers", enable_partition_eof=True))
    consumer.assign([TopicPartition("sought", 0, 1990)])

    def rest(begin: int) -> None:
        found = []
        while True:
            message = consumer.poll(PATIENCE_S)
            assert message is not None
            if message.error() is not None:
                assert (message.error().name(), message.offset()) == ("_PARTITION_EOF", 2000)
                break
            found.append(int(message.value()))
        assert found == list(range(begin, 2000))

    rest(1990)
    for begin in (5, 1500, 0):
        consumer.seek(TopicPartition("sought", 0, begin))
        rest(begin)
    batch_from = TopicPartition("sought", 0, 100)
    consumer.seek(batch_from)
    batch = consumer.consume_batch(50, PATIENCE_S)
    assert [int(value) for value in batch.values.to_list()] == list(range(100, 100 + len(batch))) and len(batch) <= 50
    consumer.close()


# -- remote coordinators -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", quick(["classic", "consumer"], ["consumer"]))
def test_groups_of_every_coordinator(cluster: Cluster, topics: tuple[str, str], protocol: str) -> None:
    """Five groups, so that each host coordinates some of them."""
    create(cluster, f"grouped-{protocol}", [[1, 2, 3], [2, 3, 1], [3, 1, 2]])
    write(Producer(at(cluster.brokers[3])), f"grouped-{protocol}", 30, 3)
    for number in range(5):
        config = at(
            cluster.brokers[1],
            group_id=f"group-{protocol}-{number}",
            auto_offset_reset="earliest",
            group_protocol=protocol,
            enable_auto_commit=False,
        )
        first = Consumer(config)
        first.subscribe([f"grouped-{protocol}"])
        assert read(first, 30) == expected(f"grouped-{protocol}", 30, 3)
        first.commit(asynchronous=False)
        first.close()
        second = Consumer(config)
        assert [
            one.offset for one in second.committed([TopicPartition(f"grouped-{protocol}", p) for p in range(3)], 30)
        ] == [10, 10, 10]
        second.close()


def test_transactions_of_every_coordinator(cluster: Cluster) -> None:
    create(cluster, "into", [[1 + i % 3] for i in range(PARTITIONS)])
    create(cluster, "into-all", [[1 + (i + j) % 3 for j in range(3)] for i in range(PARTITIONS)])
    create(cluster, "from", [[3, 2, 1]])
    write(Producer(at(cluster.brokers[2])), "from", 9, 1)
    for number in range(5):
        consumer = Consumer(
            at(cluster.brokers[1], group_id=f"moved-{number}", auto_offset_reset="earliest", enable_auto_commit=False)
        )
        consumer.assign([TopicPartition("from", 0, 0)])
        read(consumer, 9)
        producer = Producer(at(cluster.brokers[1], transactional_id=f"mover-{number}"))
        producer.init_transactions(PATIENCE_S)
        for outcome in ("abort", "commit"):
            producer.begin_transaction()
            for index in range(PARTITIONS):
                for topic in ("into", "into-all"):
                    producer.produce(topic, b"%d" % (number if outcome == "commit" else -1), partition=index)
            producer.send_offsets_to_transaction(
                [TopicPartition("from", 0, 3 if outcome == "abort" else 9)],
                consumer.consumer_group_metadata(),
                PATIENCE_S,
            )
            (producer.commit_transaction if outcome == "commit" else producer.abort_transaction)(PATIENCE_S)
        assert consumer.committed([TopicPartition("from", 0)], 30)[0].offset == 9
        consumer.close()
    reader = Consumer(at(cluster.brokers[2], group_id="of-what-was-moved", auto_offset_reset="earliest"))
    both = [(topic, index) for topic in ("into", "into-all") for index in range(PARTITIONS)]
    reader.assign([TopicPartition(*place, 0) for place in both])
    assert read(reader, 5 * len(both)) == {place: list(range(5)) for place in both}
    reader.close()


# -- leaders that move or die ----------------------------------------------------------------------


class Writer(threading.Thread):
    """Writes numbers to partition 0 until stopped; acknowledged offsets by number."""

    def __init__(self, broker: Member, topic: str, **more: object) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(at(broker, enable_idempotence=True, linger_ms=1, acks="all", **more))
        self._topic = topic
        self.ending = threading.Event()
        self.offsets: dict[int, int] = {}
        self.errors: list[object] = []
        self.count = 0

    def run(self) -> None:
        while not self.ending.is_set():
            self._producer.poll(0.0005)
            try:
                self._producer.produce(self._topic, b"%d" % self.count, partition=0, on_delivery=self._report)
            except BufferError:
                continue
            self.count += 1
        self._producer.flush(PATIENCE_S)

    def _report(self, error: object, message: object) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.offsets[int(message.value())] = message.offset()

    def end(self) -> int:
        """Returns how many records were written; all are acknowledged."""
        self.ending.set()
        self.join(2 * PATIENCE_S)
        assert not self.is_alive() and not self.errors
        assert sorted(self.offsets) == list(range(self.count))
        return self.count

    def makes_progress(self, cluster: Cluster) -> None:
        seen = max(self.offsets, default=-1)
        until("it goes on", lambda: max(self.offsets, default=-1) > seen + 100, cluster)


def test_a_leader_that_moves_away_and_back_under_load(cluster: Cluster) -> None:
    create(cluster, "moving", [[1, 2, 3]])
    writer = Writer(cluster.brokers[1], "moving")
    writer.start()
    with KafkaConnection(cluster.brokers[1].address, cluster.brokers[1].port, timeout_s=PATIENCE_S) as kafka:
        for order in ([2, 3, 1], [1, 3, 2], [3, 1, 2], [1, 2, 3]):
            writer.makes_progress(cluster)
            topic = AlterPartitionReassignmentsRequest.ReassignableTopic(
                name="moving",
                partitions=[
                    AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=0, replicas=order)
                ],
            )
            assert (
                kafka.call(
                    ALTER_REASSIGNMENTS, 0, AlterPartitionReassignmentsRequest(timeout_ms=60_000, topics=[topic])
                ).error_code
                == 0
            )
            requests = [ElectLeadersRequest.TopicPartitions(topic="moving", partitions=[0])]
            until(
                "the preferred one leads",
                lambda: (
                    kafka.call(
                        ELECT_LEADERS,
                        2,
                        ElectLeadersRequest(election_type=0, topic_partitions=requests, timeout_ms=60_000),
                    )
                    and leaders(cluster, "moving") == order[:1]
                ),
                cluster,
            )
    writer.makes_progress(cluster)
    count = writer.end()
    for broker in cluster:  # read from each host's own replica
        consumer = Consumer(at(broker, group_id=f"checking-{broker.node_id}", auto_offset_reset="earliest"))
        consumer.assign([TopicPartition("moving", 0, 0)])
        assert read(consumer, count) == {("moving", 0): list(range(count))}
        assert consumer.get_watermark_offsets(TopicPartition("moving", 0), 10) == (0, count)
        consumer.close()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["epoll", "io_uring"])
def test_a_leader_that_is_killed_under_load(tmp_path: Path, backend: str) -> None:
    config = {"io.backend": backend, "broker.session.timeout.ms": "3000", "min.insync.replicas": "2"}
    with Cluster(tmp_path, config=config) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        admin.create_topics([NewTopic("killed", 1, 3)])["killed"].result(PATIENCE_S)
        (first,) = until("it is led", lambda: leaders(cluster, "killed"), cluster)
        here = next(broker for broker in cluster if broker.node_id != first)
        reader = Consumer(at(here, group_id="watching", auto_offset_reset="earliest"))
        reader.assign([TopicPartition("killed", 0, 0)])
        writer = Writer(here, "killed")
        writer.start()
        for _ in range(2):
            writer.makes_progress(cluster)
            (leader,) = until("it is led", lambda: leaders(cluster, "killed"), cluster)
            if leader == here.node_id:
                break
            cluster.brokers[leader].kill_all()
            writer.makes_progress(cluster)
            cluster.brokers[leader].start()
        count = writer.end()
        assert read(reader, count) == {("killed", 0): list(range(count))}
        reader.close()
