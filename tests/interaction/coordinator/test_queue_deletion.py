"""Deletion on acknowledgement (queue.delete.on.ack) on a running broker."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import AcknowledgeType, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from mqd.native import Control
from mqd.protocol.messages import DeleteShareGroupOffsetsRequest
from tests.broker import Broker
from tests.crash.client.holdings import control_name
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
    """A topic of one partition whose records are deleted when all its groups have finished them."""

    def __init__(self, bootstrap: str, config: dict[str, str] | None = None) -> None:
        super().__init__(bootstrap, 1, {"queue.delete.on.ack": "true", **(config or {})})
        self.connect()

    def connect(self) -> None:
        """Reconnects after a restart: an admin client keeps the leader epochs that it has seen."""
        self._admin = AdminClient({"bootstrap.servers": self.bootstrap})

    def set(self, name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, self.topic, incremental_configs=[entry])
        self._admin.incremental_alter_configs([resource])[resource].result(SECONDS)

    def other_group(self) -> Queue:
        other = Queue.__new__(Queue)
        other.__dict__.update(self.__dict__, group=f"{self.group}-other")
        begin_at_first_record(self.bootstrap, other.group)
        return other

    def begin(self) -> None:
        """A member acquires and releases records: from then on the group holds them. A group that
        no member has joined holds nothing, so another group's acknowledgements would delete the
        records before it begins.
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


def test_records_are_deleted_when_accepted_or_rejected(queue: Queue) -> None:
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
        # a record of another queue as a marker shows that deletion passes have run
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


MEMORY = {"flush.on.ack": "false", "queue.unflushed.bytes": str(64 << 20), "segment.bytes": str(5 << 20)}


def durable_offset(broker: Broker, end_offset: int) -> int:
    """Of the only partition with this log end; what no flush has covered is above it."""
    with Path(f"/dev/shm{control_name(broker)}").open("r+b") as file:
        control = Control.attach(mmap.mmap(file.fileno(), 0))
    [view] = [view for view in control.slots_in_use()[0].values() if view.log_end_offset == end_offset]
    return view.durable_offset


def deleted_files(broker: Broker, topic: str) -> list[str]:
    """Files of the topic without a name that a worker has open: the kernel still writes them."""
    found = []
    for pid in broker.pids("worker"):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(path.readlink()))
    return [file for file in found if f"/{topic}-0/" in file and file.endswith(" (deleted)")]


def test_records_finished_in_time_are_never_flushed(broker: Broker) -> None:
    """12 MB are unacknowledged at once; without queue.unflushed.bytes they would be flushed at 8 MB.
    The kernel drops what it has not written of a file that is deleted and closed. It may write
    earlier of its own accord, when much else on the machine waits to be written.
    """
    count, size = 120, 100_000
    queue = Queue(broker.bootstrap, MEMORY)
    queue.produce(*(f"{number:0{size}}" for number in range(count)))
    with queue.consumer("explicit") as consumer:
        assert len(take(consumer, count)) == count
    queue.wait_for_log_start(count)
    wait_until(lambda: not deleted_files(broker, queue.topic), SECONDS, lambda: str(deleted_files(broker, queue.topic)))
    assert durable_offset(broker, count) == 0


@pytest.mark.slow
def test_new_jobs_are_delivered_after_a_power_cut(tmp_path: Path) -> None:
    """Nothing of what was not flushed is left, not even file names. The group's finished offsets are
    known, and are used again by new jobs.
    """
    with Broker(tmp_path, workers=1, config={"queue.delete.on.ack.interval.ms": str(INTERVAL_MS)}) as broker:
        queue = Queue(broker.bootstrap, {**MEMORY, "segment.bytes": str(1 << 20)})
        queue.produce(*(f"{number:0100000}" for number in range(30)))
        with queue.consumer("explicit") as consumer:
            take(consumer, 30)
        queue.wait_for_log_start(30)
        queue.set("queue.delete.on.ack", "false")
        queue.produce("done and lost")
        with queue.consumer("explicit") as consumer:
            take(consumer, 1)
        broker.kill_all()
        files = [file for file in tmp_path.glob(f"**/{queue.topic}-0/*") if file.stem.isdigit()]
        assert files
        for file in files:
            file.unlink()
        broker.start()
        queue.connect()
        queue.wait_for_log_start(30)
        queue.produce("next")
        queue.set("queue.delete.on.ack", "true")
        with queue.consumer("explicit") as consumer:
            assert take(consumer, 1) == [("next", 1)]
        queue.wait_for_log_start(31)
