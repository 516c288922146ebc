"""Deletion on acknowledgement (queue.delete.on.ack) on a running broker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import AcknowledgeType, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from mqd.protocol.messages import DeleteShareGroupOffsetsRequest
from tests.broker import Broker
from tests.crash.workload import wait_until
from tests.interaction.coordinator.test_share_groups import SECONDS, Shared, committed, polled, take
from tests.interaction.share_members import begin_at_first_record
from tests.kafka_connection import KafkaConnection

INTERVAL_MS = 200
DELETE_SHARE_GROUP_OFFSETS = 92


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    config = {"queue.delete.on.ack.interval.ms": str(INTERVAL_MS)}
    with Broker(tmp_path_factory.mktemp("queue"), config=config) as started:
        yield started


class Queue(Shared):
    """A topic of one partition whose records go when the group, and any other, is done with them."""

    def __init__(self, bootstrap: str) -> None:
        super().__init__(bootstrap, 1, {"queue.delete.on.ack": "true"})
        self._admin = AdminClient({"bootstrap.servers": bootstrap})

    def other_group(self) -> Queue:
        other = Queue.__new__(Queue)
        other.__dict__.update(self.__dict__, group=f"{self.group}-other")
        begin_at_first_record(self.bootstrap, other.group)
        return other

    def begin(self) -> None:
        """A member takes and releases records: from then on the group holds them. A group that no member
        has joined holds nothing, so that another's acknowledgements would delete them before it begins.
        """
        with self.consumer("explicit") as consumer:
            for _, message in polled(consumer):
                consumer.acknowledge(message, AcknowledgeType.RELEASE)
            committed(consumer)

    def log_start(self) -> int:
        found = self._admin.list_offsets({TopicPartition(self.topic, 0): OffsetSpec.earliest()})
        return next(iter(found.values())).result(SECONDS).offset

    def wait_for_log_start(self, offset: int) -> None:
        wait_until(lambda: self.log_start() == offset, SECONDS, lambda: f"the log starts at {self.log_start()}")


@pytest.fixture
def queue(broker: Broker) -> Queue:
    return Queue(broker.bootstrap)


def test_records_go_when_they_are_accepted_or_rejected(queue: Queue) -> None:
    queue.produce("accepted", "rejected", "released", "held")
    with queue.consumer("explicit") as consumer:
        first = {
            "rejected": AcknowledgeType.REJECT,
            "released": AcknowledgeType.RELEASE,
            "held": AcknowledgeType.RELEASE,
        }
        again = {"held": AcknowledgeType.RELEASE}
        take(consumer, 6, first, again)
        queue.wait_for_log_start(3)
        assert take(consumer, 1) == [("held", 3)]
    queue.wait_for_log_start(4)
    queue.produce("next")
    with queue.consumer("explicit") as consumer:
        assert take(consumer, 1) == [("next", 1)]
    queue.wait_for_log_start(5)


def test_the_slowest_group_holds_records_until_it_is_deleted(queue: Queue, broker: Broker) -> None:
    queue.produce("0", "1")
    slow = queue.other_group()
    queue.begin()
    with slow.consumer("explicit") as consumer:
        take(consumer, 2)
    with queue.consumer("explicit") as consumer:
        take(consumer, 2)
        queue.wait_for_log_start(2)
        queue.produce("2", "3")
        take(consumer, 2)
        # a marker of another queue shows that passes have gone by
        marker = Queue(broker.bootstrap)
        marker.produce("marker")
        with marker.consumer("explicit") as marked:
            take(marked, 1)
        marker.wait_for_log_start(1)
        assert queue.log_start() == 2
        topics = [DeleteShareGroupOffsetsRequest.Topic(topic_name=queue.topic)]
        with KafkaConnection("127.0.0.1", broker.port) as kafka:
            request = DeleteShareGroupOffsetsRequest(group_id=slow.group, topics=topics)
            response = kafka.call(DELETE_SHARE_GROUP_OFFSETS, 0, request)
        assert [(topic.topic_name, topic.error_code) for topic in response.responses] == [(queue.topic, 0)]
        queue.wait_for_log_start(4)


def test_a_compacted_topic_is_refused(broker: Broker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    config = {"queue.delete.on.ack": "true", "cleanup.policy": "compact"}
    with pytest.raises(KafkaException, match="queue.delete.on.ack=true deletes records"):
        admin.create_topics([NewTopic("compacted-queue", 1, config=config)])["compacted-queue"].result(SECONDS)
