"""Members of consumer groups, one for each Python client behind one small interface. Each polls in
its own thread and commits the records it has read before it polls again.

`held` are the member's current partitions; `values` those it has read, in order, and `committed`
how many of them were read at its last successful commit. `leave()` ends it properly and raises its
error.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable

import aiokafka
import aiokafka.errors
import confluent_kafka
import kafka
from aiokafka.coordinator.assignors.range import RangePartitionAssignor as AioRange
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor as AioRoundRobin
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor as AioSticky
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor

DEADLINE_SECONDS = 60.0
SESSION_MS, HEARTBEAT_MS, POLL_MS = 10_000, 100, 50

Held = frozenset[tuple[str, int]]


class Member(threading.Thread):
    def __init__(self, bootstrap: str, group: str, topic: str, kind: str, **options: object) -> None:
        super().__init__(daemon=True)
        self.bootstrap, self.group, self.topic, self.kind, self.options = bootstrap, group, topic, kind, options
        self.held: Held = frozenset()
        self.values: list[bytes] = []
        self.committed = 0
        self.failure: BaseException | None = None
        self.leaving = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            self.live()
        except BaseException as failure:  # reported where this member is awaited
            self.failure = failure
        self.held = frozenset()

    def live(self) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        self.leaving.set()
        self.join(DEADLINE_SECONDS)
        assert not self.is_alive(), f"{self.kind} does not end"
        self.check()

    def check(self) -> None:
        if self.failure is not None:
            raise AssertionError(f"{type(self).__name__} {self.kind} failed") from self.failure


class ConfluentMember(Member):
    """`kind`: an assignor's name, or "consumer" for the KIP-848 protocol."""

    def live(self) -> None:
        settings = {
            "bootstrap.servers": self.bootstrap,
            "group.id": self.group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": POLL_MS,
        }
        if self.kind == "consumer":
            settings["group.protocol"] = "consumer"
        else:
            settings |= {
                "partition.assignment.strategy": self.kind,
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": HEARTBEAT_MS,
            }
        consumer = confluent_kafka.Consumer({**settings, **self.options})
        try:
            consumer.subscribe([self.topic])
            while not self.leaving.is_set():
                messages = consumer.consume(50, POLL_MS / 1000)
                for message in messages:
                    assert message.error() is None, message.error()
                    self.values.append(message.value())
                if messages:
                    consumer.commit(asynchronous=False)
                    self.committed = len(self.values)
                self.held = frozenset((one.topic, one.partition) for one in consumer.assignment())
        finally:
            consumer.close()


class KafkaPythonMember(Member):
    """kafka-python 3.0.12 forgets a rebalance whose response arrives between two polls: it then has
    no partitions, and sends no heartbeats. Such a member's rebalance is requested again.
    """

    ASSIGNORS = {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
        "cooperative-sticky": CooperativeStickyAssignor,
    }

    def live(self) -> None:
        consumer = kafka.KafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            partition_assignment_strategy=[self.ASSIGNORS[self.kind]],
            **self.options,
        )
        try:
            while not self.leaving.is_set():
                batches = consumer.poll(POLL_MS)
                self._look_for_forgotten_rebalance(consumer)
                self.values += [record.value for records in batches.values() for record in records]
                if batches:
                    consumer.commit()
                    self.committed = len(self.values)
                self.held = frozenset((one.topic, one.partition) for one in consumer.assignment())
        finally:
            consumer.close()

    @staticmethod
    def _look_for_forgotten_rebalance(consumer: kafka.KafkaConsumer) -> None:
        coordinator = consumer._coordinator
        task = getattr(coordinator, "_join_task", None)
        if task is not None and task.is_done and not coordinator.need_rejoin():
            coordinator.request_rejoin()


class AiokafkaMember(Member):
    """It rebalances at any time, also between reading and committing: such a commit is refused, and
    the new owner of the partitions reads the records again.
    """

    ASSIGNORS = {"range": AioRange, "roundrobin": AioRoundRobin, "sticky": AioSticky}

    def live(self) -> None:
        asyncio.run(self._live())

    async def _live(self) -> None:
        consumer = aiokafka.AIOKafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap,
            group_id=self.group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            partition_assignment_strategy=(self.ASSIGNORS[self.kind],),
            **self.options,
        )
        await consumer.start()
        try:
            while not self.leaving.is_set():
                batches = await consumer.getmany(timeout_ms=POLL_MS)
                self.values += [record.value for records in batches.values() for record in records]
                if batches:
                    try:
                        await consumer.commit()
                        self.committed = len(self.values)
                    except (aiokafka.errors.CommitFailedError, aiokafka.errors.IllegalStateError):
                        pass
                self.held = frozenset((one.topic, one.partition) for one in consumer.assignment())
        finally:
            await consumer.stop()


MEMBERS: dict[str, type[Member]] = {
    "confluent-kafka": ConfluentMember,
    "kafka-python": KafkaPythonMember,
    "aiokafka": AiokafkaMember,
}


def until(what: str, look: Callable[[], bool], *members: Member) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not look():
        for member in members:
            member.check()
        assert time.monotonic() < deadline, f"not in time: {what}; {[sorted(member.held) for member in members]}"
        time.sleep(0.01)  # polls other threads


def share(topic: str, partitions: int, *members: Member) -> None:
    """Waits until all partitions are assigned, each to one member, and every member has equally
    many.
    """
    expected = {(topic, partition) for partition in range(partitions)}

    def shared() -> bool:
        held = [member.held for member in members]
        return all(len(one) == partitions // len(members) for one in held) and set().union(*held) == expected

    until(f"{len(members)} members share {topic}", shared, *members)


def values_of(members: Iterable[Member]) -> set[bytes]:
    return {value for member in members for value in list(member.values)}
