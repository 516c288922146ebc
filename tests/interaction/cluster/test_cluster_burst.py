"""A burst of large records with three replicas: followers that fetch at full speed stay in sync,
and retries write nothing twice.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.cluster import Cluster
from tests.interaction.cluster_clients import all_in_sync, create, wait_for_in_sync

RECORD_BYTES = 500_000


@pytest.mark.parametrize("count", [150, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_a_burst_does_not_change_the_isr(tmp_path: Path, count: int) -> None:
    with Cluster(tmp_path, config={"logging.level": "info"}) as cluster:
        create(cluster, "burst", partitions=1, config={"max.message.bytes": "1048588"})
        leader = cluster.brokers[wait_for_in_sync(cluster, "burst")[0].leader]
        already = leader.logs(10_000).count("the in-sync set")
        failed: list[str] = []
        producer = Producer(
            {"bootstrap.servers": cluster.bootstrap, "acks": "all", "queue.buffering.max.kbytes": "2097151"}
        )
        for number in range(count):
            producer.produce(
                "burst",
                b"%d" % number + bytes(RECORD_BYTES),
                partition=0,
                on_delivery=lambda error, _message: failed.append(str(error)) if error else None,
            )
            producer.poll(0)
        assert producer.flush(300) == 0 and not failed, f"{failed[:3]}\n{cluster.logs()}"
        changes = leader.logs(10_000).count("the in-sync set") - already
        assert changes == 0, f"{changes} changes\n{cluster.logs()}"
        assert all_in_sync(cluster, "burst")
        consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "none"})
        assert consumer.get_watermark_offsets(TopicPartition("burst", 0), timeout=60) == (0, count), (
            "duplicates by retries"
        )
        consumer.close()
