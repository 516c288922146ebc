"""The requests of the Spark sink, without Spark: record batches over TCP to a real broker that
restarts, and joint transactions.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

import pyarrow as pa
import pytest

from mqd.coordinator.transaction.joint import JOINT_PREFIX
from mqd.spark.encoding import Encoder, MqdWriteError
from mqd.spark.joint import Child, JointTransaction
from mqd.spark.options import KafkaSettings
from mqd.spark.producing import Producer, connections
from mqd.spark.sink_options import COLUMNS, SinkOptions
from mqd.spark.wire import Cluster
from tests.broker import Broker
from tests.interaction.traffic import eventually
from tests.interaction.transactional import connect, fetch_committed, fresh, read_committed, topic_of
from tests.tiers import quick

PARTITIONS = 3
NO_PRODUCER = (-1, -1)


def options(broker: Broker, topic: str, transport: str = "auto", **more) -> SinkOptions:
    columns = tuple("value" if name == "value" else "" for name in COLUMNS)
    return SinkOptions(
        KafkaSettings(broker.bootstrap, client_id=fresh("spark"), transport=transport),
        columns,
        topic,
        **{"batch_bytes": 16 << 10, **more},
    )


def rows(first: int, count: int) -> pa.RecordBatch:
    return pa.record_batch({"value": pa.array([b"%d" % number for number in range(first, first + count)], pa.binary())})


def identity(found: SinkOptions) -> Child:
    from mqd.protocol.messages import InitProducerIdRequest

    response = connections(found).cluster.any_connection().request(InitProducerIdRequest(transactional_id=None))
    assert response.error_code == 0
    return Child(response.producer_id, response.producer_epoch)


def send(found: SinkOptions, producer: Producer, batch: pa.RecordBatch) -> None:
    encoder = Encoder(found, producer.partition_count)
    encoder.add(batch)
    producer.send(encoder.remaining_batches())


def everything(broker: Broker, topic: str) -> list[int]:
    with connect(broker) as kafka:
        return [int(value) for index in range(PARTITIONS) for value in read_committed(kafka, topic, index)]


@pytest.mark.parametrize(
    ("role", "transport"), quick([("worker", "tcp"), ("worker", "auto"), ("acceptor", "tcp")], ["acceptor"])
)
def test_a_broker_that_restarts_gets_every_row_once(
    start_broker: Callable[..., Broker], role: str, transport: str
) -> None:
    broker = start_broker()
    with connect(broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
    found = options(broker, topic, transport)
    producer = Producer(found, identity(found), None)
    for step in range(12):
        send(found, producer, rows(step * 2000, 2000))
        if step in (2, 5, 8):
            eventually(lambda: broker.pids(role), f"a {role} that runs")
            for pid in broker.pids(role):
                with contextlib.suppress(ProcessLookupError):  # it died a moment ago
                    os.kill(pid, signal.SIGKILL)
    producer.flush()
    assert producer.record_count == 24_000
    assert (connections(found).local_request_count > 0) == (transport == "auto")
    eventually(lambda: sorted(everything(broker, topic)) == list(range(24_000)), "every row once")


def test_a_partition_without_acknowledgements_is_named_within_the_timeout(start_broker: Callable[..., Broker]) -> None:
    broker = start_broker()
    with connect(broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
    found = options(broker, topic, delivery_timeout_s=1.0)
    producer = Producer(found, identity(found), None)
    send(found, producer, rows(0, 10))
    producer.flush()
    broker.kill_all()
    with pytest.raises(
        MqdWriteError,
        match=rf"topic {topic}, partition \d: 10 rows were not acknowledged within 1 s .*kafka.delivery.timeout.ms",
    ):
        send(found, producer, rows(10, 10))
        producer.flush()
    producer.close()


def test_a_row_that_is_too_large_for_shared_memory_goes_over_tcp(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, 1, **{"max.message.bytes": str(64 << 20)})
    found = options(shared_broker, topic, "shm")
    producer = Producer(found, identity(found), None)
    large = pa.record_batch({"value": pa.array([b"x" * (6 << 20), b"small"], pa.binary())})
    send(found, producer, large)
    producer.flush()
    with connect(shared_broker) as kafka:
        assert fetch_committed(kafka, topic, 0).high_watermark == 2
    assert producer.byte_count > 6 << 20


def test_unavailable_shared_memory_is_reported_when_it_is_requested(
    shared_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mqd.shm import rendezvous

    monkeypatch.setattr(rendezvous, "find", lambda *_: rendezvous.Rendezvous(None, "nobody is here"))
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
    found = options(shared_broker, topic, "shm")
    with pytest.raises(MqdWriteError, match="cannot be reached through shared memory: nobody is here"):
        send(found, Producer(found, identity(found), None), rows(0, 1))


def test_a_child_of_an_ended_transaction_gets_an_error(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
    found = options(shared_broker, topic)
    cluster = connections(found).cluster
    name = JOINT_PREFIX + fresh("query")
    first, second = (
        JointTransaction(cluster, name, 0, "run-1", 60_000),
        JointTransaction(cluster, name, 0, "run-2", 60_000),
    )
    zombie = first.enlist()
    late = Producer(found, zombie, name)
    send(found, late, rows(0, 10))
    late.flush()
    first.heartbeat(zombie)
    child = second.enlist()
    with pytest.raises(MqdWriteError, match="another run of this query has replaced this one"):
        first.heartbeat(zombie)
    with pytest.raises(MqdWriteError, match="this task's part of the transaction has ended"):
        send(found, late, rows(10, 10))
        late.flush()
    with pytest.raises(MqdWriteError, match="another run"):
        first.commit([zombie])
    producer = Producer(found, child, name)
    send(found, producer, rows(100, 10))
    producer.flush()
    second.commit([child])
    second.commit([child])
    assert first.enlist() is None and second.enlist() is None
    assert sorted(everything(shared_broker, topic)) == list(range(100, 110))
    with pytest.raises(MqdWriteError, match=r"kafka.transaction.timeout.ms is 3600000, .*transaction.max.timeout.ms"):
        JointTransaction(cluster, name, 1, "run-2", 3_600_000).enlist()


def test_brokers_that_do_not_know_joint_transactions_are_named(
    shared_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is that of a broker which ignored the field."""
    cluster = Cluster(KafkaSettings(shared_broker.bootstrap))
    joint = JointTransaction(cluster, JOINT_PREFIX + fresh("query"), 0, "run", 60_000)
    query = joint._request
    monkeypatch.setattr(joint, "_request", lambda request, doing: _without_field(query(request, doing)))
    with pytest.raises(MqdWriteError, match="delivery' to 'at-least-once"):
        joint.enlist()


def _without_field(response):
    response.joint = None
    return response


def test_a_dead_drivers_transaction_soon_stops_blocking_readers(shared_broker: Broker) -> None:
    with connect(shared_broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
        found = options(shared_broker, topic)
        joint = JointTransaction(connections(found).cluster, JOINT_PREFIX + fresh("query"), 0, "run", 1000)
        producer = Producer(found, joint.enlist(), joint.transactional_id)
        send(found, producer, rows(0, 10))
        producer.flush()
        eventually(
            lambda: all(
                (one := fetch_committed(kafka, topic, index)).last_stable_offset == one.high_watermark
                for index in range(PARTITIONS)
            ),
            "the timeout",
        )
    assert everything(shared_broker, topic) == []
