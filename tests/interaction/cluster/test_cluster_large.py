"""Records of tens of megabytes in a cluster: followers fetch batches larger than their buffers and
than the requested bytes; a local client's are relayed to a leader on another host.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import mqd
from tests.cluster import Cluster
from tests.interaction.cluster_clients import all_in_sync, create, log, partitions, until, wait_for_in_sync

MIB = 1 << 20


def written(producer, topic: str, value: bytes) -> None:
    failed: list = []
    producer.produce(topic, value, partition=0, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(120) == 0 and not failed, failed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_large_records_are_replicated_and_relayed(tmp_path: Path) -> None:
    values = [os.urandom(1 << 16) * 16 * mebibytes for mebibytes in (20, 1, 90, 20, 30)]
    with Cluster(tmp_path, config={"queued.max.request.bytes": str(160 * MIB)}) as cluster:
        create(cluster, "large", partitions=1, config={"max.message.bytes": str(100 * MIB)})
        leader = wait_for_in_sync(cluster, "large")[0].leader
        settings = {"bootstrap.servers": cluster.bootstrap, "acks": "all", "message.max.bytes": 100 * MIB}
        for value in values[:3]:
            written(Producer(settings), "large", value)
        elsewhere = next(broker for node, broker in cluster.brokers.items() if node != leader)
        local = {
            **settings,
            "transport": "shm",
            "bootstrap.servers": elsewhere.bootstrap,
            "mqd.socket.path": str(elsewhere.data_dir / "run" / "client.sock"),
        }
        for value in values[3:]:
            written(mqd.Producer(local), "large", value)
        assert all_in_sync(cluster, "large")
        lengths = {node: len(log(broker, "large", 0)) for node, broker in cluster.brokers.items()}
        assert len(set(lengths.values())) == 1 and lengths[leader] > sum(map(len, values)), lengths
        cluster.brokers[leader].kill_all()
        until("another host leads", lambda: partitions(cluster, "large")[0].leader not in (leader, -1), cluster)
        consumer = Consumer(
            {"bootstrap.servers": elsewhere.bootstrap, "group.id": "none", "receive.message.max.bytes": 200 * MIB}
        )
        consumer.assign([TopicPartition("large", 0, 0)])
        for value in values:
            message = consumer.poll(60)
            assert message is not None and message.error() is None, message
            assert message.value() == value
        consumer.close()
