"""Compared with Apache Kafka 4.2: features set by release with its tool, and groups that have lost
their last committed offset.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.protocol.messages import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
)
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.kafka_connection import KafkaConnection

pytestmark = pytest.mark.slow

GROUP, TOPIC, SECONDS = "once", "t", 30


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker(tmp_path / "broker") as started:
        yield started


def test_features_of_a_release(kafka_tools: KafkaTools, broker: Broker) -> None:
    steps = (
        ("upgrade", "--release-version", "4.2"),  # the current release
        ("downgrade", "--metadata", "4.1"),
        ("upgrade", "--release-version", "4.2"),
    )
    for words in steps:
        done = kafka_tools.features(broker.bootstrap, *words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "metadata.version was upgraded to 29." in done.stdout, done.stdout
    shown = kafka_tools.features(broker.bootstrap, "describe").stdout
    assert "metadata.version" in shown and "kraft.version" in shown, shown
    refused = kafka_tools.features(broker.bootstrap, "upgrade", "--release-version", "9.9")
    assert refused.returncode != 0


def test_a_group_is_deleted_after_its_last_offset(kafka_tools: KafkaTools, broker: Broker) -> None:
    with kafka_tools.broker() as kafka:
        reported = [history(bootstrap) for bootstrap in (kafka, broker.bootstrap)]
    assert reported[0] == reported[1]
    assert reported[1]["deleted"] == 0 and reported[1]["deleted again"] == 69


def history(bootstrap: str) -> dict[str, object]:
    """The errors, and the output."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(TOPIC, 1)])[TOPIC].result(SECONDS)
    host, _, port = bootstrap.rpartition(":")
    found: dict[str, object] = {}
    with KafkaConnection.connect(host, int(port)) as kafka:
        requested = OffsetCommitRequest.Topic(
            name=TOPIC, partitions=[OffsetCommitRequest.Partition(partition_index=0, committed_offset=0)]
        )
        commit = OffsetCommitRequest(group_id=GROUP, generation_id_or_member_epoch=-1, topics=[requested])
        deadline = time.monotonic() + SECONDS
        while (error := kafka.call(8, 7, commit).topics[0].partitions[0].error_code) in (14, 15, 16):
            assert time.monotonic() < deadline, "the coordinator is loading"
            kafka.call(10, 4, FindCoordinatorRequest(key_type=0, coordinator_keys=[GROUP]))  # creates its topic
            time.sleep(0.1)  # polls the broker; there is no event to wait for
        found["committed"] = error
        gone = OffsetDeleteRequest.Topic(name=TOPIC, partitions=[OffsetDeleteRequest.Partition(partition_index=0)])
        deleted = kafka.call(47, 0, OffsetDeleteRequest(group_id=GROUP, topics=[gone]))
        found["offset deleted"] = (deleted.error_code, deleted.topics[0].partitions[0].error_code)
        found["listed"] = [one.group_id for one in kafka.call(16, 4, ListGroupsRequest()).groups]
        shown = kafka.call(15, 5, DescribeGroupsRequest(groups=[GROUP])).groups[0]
        found["described"] = (shown.error_code, shown.group_state, shown.members)
        for name in ("deleted", "deleted again"):
            response = kafka.call(42, 2, DeleteGroupsRequest(groups_names=[GROUP]))
            found[name] = response.results[0].error_code
    return found
