"""A consumer's assignment, which the application or the group changes: assigned partitions, their
positions, and which are paused.

See shm/consumer.py, L1 and L3; how a partition finds its start: fetching.py.
Concurrency: the application's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mqd.client.messages import OFFSET_INVALID, KafkaError, TopicPartition, failure, local_error
from mqd.client.offsets import PartitionResult
from mqd.client.shm.fetching import Fetcher
from mqd.client.shm.partitions import AssignedPartition


class ConsumerAssignment:
    """`consumer`: a ShmConsumer."""

    def __init__(self, consumer: Any, fetcher: Fetcher) -> None:
        self._consumer, self._parts, self._fetcher = consumer, consumer.parts, fetcher

    def assign(self, partitions: list[TopicPartition]) -> None:
        self._consumer._require_open()
        self._consumer._rebalancer.on_application_assigns()
        self.remove(list(self._parts))
        self._add(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self._consumer._require_open()
        self._consumer._rebalancer.on_application_assigns()
        for partition in partitions:
            if (partition.topic, partition.partition) in self._parts:
                raise failure(KafkaError._CONFLICT, f"{partition.topic} [{partition.partition}] is assigned already")
        self._add(partitions)

    def unassign(self) -> None:
        self._consumer._require_open()
        self._consumer._rebalancer.on_application_assigns()
        self.remove(list(self._parts))

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        self._consumer._require_open()
        self._consumer._rebalancer.on_application_assigns()
        parts = [self._part(partition) for partition in partitions]
        self.remove(parts)

    def _add(self, partitions: Iterable[TopicPartition]) -> None:
        added: list[AssignedPartition] = []
        for partition in partitions:
            if partition.partition < 0:
                raise failure(KafkaError._INVALID_ARG, f"{partition.topic}: a partition number is needed")
            if (partition.topic, partition.partition) in self._parts or any(
                part.key == (partition.topic, partition.partition) for part in added
            ):
                raise failure(KafkaError._INVALID_ARG, f"{partition.topic} [{partition.partition}] is listed twice")
            added.append(AssignedPartition(partition.topic, partition.partition, partition.offset))
        for part in added:
            self._parts.add(part)
        self._fetcher.start(added)

    def remove(self, parts: list[AssignedPartition]) -> None:
        for part in parts:
            self._consumer._drop_chunk_of(part)
        if not self._consumer._rebalancer.is_releasing_lost:
            self._consumer._offsets.commit_before_leaving(parts)
        self._parts.remove([part.key for part in parts])

    def _part(self, partition: TopicPartition) -> AssignedPartition:
        part = self._parts.get((partition.topic, partition.partition))
        if part is None:
            raise failure(KafkaError._INVALID_ARG, f"{partition.topic} [{partition.partition}] is not assigned")
        return part

    def assignment(self) -> list[TopicPartition]:
        self._consumer._require_open()
        return sorted(
            TopicPartition(part.topic, part.index, part.position if part.position >= 0 else part.start)
            for part in self._parts
        )

    def seek(self, partition: TopicPartition) -> None:
        self._consumer._require_open()
        part = self._parts.get((partition.topic, partition.partition))
        if part is None:
            raise failure(
                KafkaError._STATE,
                f"Failed to seek to offset {partition.offset}: {partition.topic} [{partition.partition}] is not"
                " assigned",
            )
        self._consumer._drop_chunk_of(part)
        part.start, part.requested_start, part.position, part.reported_error = (
            partition.offset,
            partition.offset,
            OFFSET_INVALID,
            0,
        )
        self._fetcher.events = type(self._fetcher.events)(
            event for event in self._fetcher.events if (event.topic(), event.partition()) != part.key
        )
        self._fetcher.start([part])

    def pause(self, partitions: list[TopicPartition]) -> None:
        self._consumer._require_open()
        for partition in partitions:
            part = self._parts.get((partition.topic, partition.partition))
            if part is not None:  # as in confluent_kafka: a rebalance may have taken it away in the meantime
                self._consumer._drop_chunk_of(part)
                part.paused = True

    def resume(self, partitions: list[TopicPartition]) -> None:
        self._consumer._require_open()
        for partition in partitions:
            part = self._parts.get((partition.topic, partition.partition))
            if part is not None:
                part.paused = False

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        self._consumer._require_open()
        self._consumer._advance_past_returned()
        results: list[TopicPartition] = []
        for partition in partitions:
            part = self._parts.get((partition.topic, partition.partition))
            error = local_error(KafkaError._UNKNOWN_PARTITION) if part is None else None
            results.append(
                PartitionResult(
                    partition.topic,
                    partition.partition,
                    part.position if part is not None else OFFSET_INVALID,
                    error=error,
                )
            )
        return results
