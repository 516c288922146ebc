"""A consumer's offsets: stores and commits them, at the application's request or automatically, and
looks up offsets at the broker.

See shm/consumer.py, L2 and L3; how a commit reaches the coordinator: committing.py.
Concurrency: the application's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from mqd.client import offsets, requests
from mqd.client.group.committing import Commit, CommitQueue
from mqd.client.messages import (
    OFFSET_INVALID,
    OFFSET_STORED,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    broker_error,
    failure,
    local_error,
    next_offset,
    partition_of,
)
from mqd.client.offsets import Committed, Key, PartitionResult, partition_result
from mqd.client.shm.partitions import AssignedPartition
from mqd.protocol.errors import ErrorCode

CLOSE_S = 10.0
RETRY_S = 0.1
INFINITY = float("inf")
_RETRIABLE = offsets.COORDINATOR_UNAVAILABLE | {ErrorCode.UNSTABLE_OFFSET_COMMIT}


def deadline_of(timeout: float | None) -> float:
    """None and negative values mean no limit, as in confluent_kafka."""
    return INFINITY if timeout is None or timeout < 0 else time.monotonic() + timeout


def _epoch(leader_epoch: int | None) -> int:
    return leader_epoch if leader_epoch is not None else -1


def _stored_offset(part: AssignedPartition) -> Committed:
    return Committed(part.stored, part.stored_epoch, part.stored_metadata, part.topic_id or requests.NO_TOPIC_ID)


def _topic_gone_error(message: Message) -> KafkaError:
    """Returns the error with which the broker refuses a commit by the id of a deleted topic."""
    return broker_error(
        int(ErrorCode.UNKNOWN_TOPIC_ID), f"{message.topic()} [{message.partition()}]: the topic of this record is gone"
    )


class ConsumerOffsets:
    """`consumer`: a ShmConsumer."""

    def __init__(self, consumer: Any, commits: CommitQueue) -> None:
        self._consumer, self._config, self._control, self._parts = (
            consumer,
            consumer.config,
            consumer.control,
            consumer.parts,
        )
        self.commits = commits
        self.auto_store = bool(self._config["enable.auto.offset.store"])
        self._interval_s = (
            self._config["auto.commit.interval.ms"] / 1000 if self._config["enable.auto.commit"] else INFINITY
        )
        self._timeout_s = self._config["socket.timeout.ms"] / 1000
        self.due = INFINITY  # time of the next automatic commit; infinite while there is nothing to commit

    # -- automatic ---------------------------------------------------------------------------------

    def note_received(self, part: AssignedPartition, position: int, leader_epoch: int | None) -> None:
        """Notes that the application has received all records before `position`."""
        part.position, part.leader_epoch = position, _epoch(leader_epoch)
        if part.received_end is not None:
            part.received_end = max(part.received_end, position)
        if self.auto_store:
            part.stored, part.stored_epoch, part.stored_metadata = position, part.leader_epoch, None

    def schedule_commit(self) -> None:
        """Sets the time of the next automatic commit, because records are being returned."""
        # interval 0: no timer; offsets are committed only when partitions are taken away
        if self.due == INFINITY and 0 < self._interval_s < INFINITY:
            self.due = time.monotonic() + self._interval_s
            self._control.wake_by(self.due)

    def commit_automatically(self, more_follow: bool) -> None:
        """Commits stored offsets asynchronously. `more_follow`: more records are being returned."""
        self.due = INFINITY
        stored = self._uncommitted(part for part in self._parts if not part.is_unknown)
        if stored:
            self.commits.add(stored, self._config["on_commit"], self._timeout_s)
        # offsets that were left out now are committed later, even if no more records arrive
        if more_follow or any(
            part.stored >= 0 and part.stored != part.committed and part.key not in stored for part in self._parts
        ):
            self.schedule_commit()

    def commit_before_leaving(self, parts: list[AssignedPartition]) -> None:
        """Commits the offsets of partitions that are taken away; waits for the outcome, which is passed to
        on_commit.
        """
        stored = (
            self._with_unknown(self._uncommitted(part for part in parts if not part.is_unknown), parts)
            if self._interval_s < INFINITY
            else {}
        )
        if stored:
            commit = self.commits.add(stored, self._config["on_commit"], min(CLOSE_S, self._timeout_s))
            self._consumer.wait_until(lambda: commit.outcome is not None, commit.deadline)

    def release(self, keys: Iterable[Key], is_lost: bool) -> None:
        """Called when these partitions are taken away. No other member owns them before the
        coordinator is informed, so this first waits for the commits already requested for them (except
        for lost partitions, which another member may own already).
        """
        keys = set(keys)
        if not is_lost:
            core = self._consumer._runner.core
            self._consumer.wait_until(
                lambda: core.has_lost_partitions or not self.commits.has_pending(keys),
                time.monotonic() + min(CLOSE_S, self._timeout_s),
            )
        self.commits.drop(keys)

    def _uncommitted(self, parts: Iterable[AssignedPartition]) -> dict[Key, Committed]:
        return {
            part.key: _stored_offset(part)
            for part in parts
            if part.stored >= 0 and part.stored != part.committed and not self._was_recreated(part)
        }

    def _with_unknown(self, known: dict[Key, Committed], parts: Iterable[AssignedPartition]) -> dict[Key, Committed]:
        """Returns `known` and the uncommitted offsets of partitions that were missing from the last
        Metadata response: this may be the last chance to commit them. They are left out of a commit by
        name (used if one topic id is missing), which could go to a new topic of that name; in a commit
        by id the broker refuses deleted topics.
        """
        if not self.commits.supports_topic_ids or any(
            offset.topic_id == requests.NO_TOPIC_ID for offset in known.values()
        ):
            return known
        return known | self._uncommitted(part for part in parts if part.is_unknown and part.topic_id is not None)

    def _was_recreated(self, part: AssignedPartition) -> bool:
        """Whether the topic was deleted and recreated, and the new topic has not been read yet."""
        info = self._control.metadata.topics.get(part.topic)
        return part.topic_id is not None and info is not None and not info.error and info.topic_id != part.topic_id

    # -- calls of the application ------------------------------------------------------------------

    def commit(
        self, message: Message | None = None, offsets: list[TopicPartition] | None = None, asynchronous: bool = True
    ) -> list[TopicPartition] | None:
        if message is not None and offsets is not None:
            raise ValueError("message and offsets are mutually exclusive")
        self._consumer.enter()
        to_commit = self._offsets_to_commit(message, offsets)
        on_commit = self._config["on_commit"]
        if not to_commit:
            error = local_error(KafkaError._NO_OFFSET) if message is None else _topic_gone_error(message)
            if not asynchronous:
                raise KafkaException(error)
            self.commits.finish(Commit({}, on_commit, 0.0), error)
            return None
        commit = self.commits.add(to_commit, on_commit if asynchronous else None, self._timeout_s)
        if asynchronous:
            return None
        self._consumer.wait_until(lambda: commit.outcome is not None, INFINITY)
        commit_error, results = commit.outcome or (None, [])
        if commit_error is not None:
            raise KafkaException(commit_error)
        return list(results)

    def _offsets_to_commit(
        self, message: Message | None, partitions: list[TopicPartition] | None
    ) -> dict[Key, Committed]:
        """Returns the offsets to commit: none for a message from a topic that no longer exists."""
        if message is not None:
            if message.error() is not None:
                raise KafkaException(message.error())
            key = partition_of(message)
            if self._is_of_deleted_topic(message):
                return {}
            return {key: Committed(next_offset(message), _epoch(message.leader_epoch()), None, self._topic_id(key))}
        if partitions is not None:
            for partition in partitions:
                if partition.offset < 0 and partition.offset not in (OFFSET_INVALID, OFFSET_STORED):
                    raise failure(
                        KafkaError._INVALID_ARG,
                        f"{partition.topic} [{partition.partition}]: offset {partition.offset} cannot be committed",
                    )
            keys = [(partition.topic, partition.partition) for partition in partitions]
            return {
                key: Committed(
                    partition.offset, _epoch(partition.leader_epoch), partition.metadata, self._topic_id(key)
                )
                for key, partition in zip(keys, partitions, strict=True)
                if partition.offset >= 0
            }
        return self._with_unknown(
            {
                part.key: _stored_offset(part)
                for part in self._parts
                if part.stored >= 0 and not part.is_unknown and not self._was_recreated(part)
            },
            self._parts,
        )

    def _is_of_deleted_topic(self, message: Message) -> bool:
        """Whether the message is from an earlier topic of this name: the application has not received
        this offset from the current topic.
        """
        part = self._parts.get((message.topic(), message.partition()))
        return part is not None and part.received_end is not None and message.offset() >= part.received_end

    def _topic_id(self, key: Key) -> bytes:
        """Returns the id of the topic that is being read, or NO_TOPIC_ID for unassigned partitions, of
        which the application knows only the name."""
        part = self._parts.get(key)
        return part.topic_id or requests.NO_TOPIC_ID if part is not None else requests.NO_TOPIC_ID

    def store_offsets(self, message: Message | None = None, offsets: list[TopicPartition] | None = None) -> None:
        if (message is None) == (offsets is None):
            raise ValueError("expected either message or offsets")
        if self.auto_store:
            raise failure(KafkaError._INVALID_ARG, "enable.auto.offset.store must be false for store_offsets")
        self._consumer.enter()
        to_store = self._offsets_to_commit(message, offsets)
        if message is not None and not to_store:
            raise KafkaException(_topic_gone_error(message))
        unassigned = [f"{topic} [{index}]" for topic, index in to_store if (topic, index) not in self._parts]
        for key, offset in to_store.items():
            part = self._parts.get(key)
            if part is not None:
                part.stored, part.stored_epoch, part.stored_metadata = (
                    offset.offset,
                    offset.leader_epoch,
                    offset.metadata,
                )
        if to_store:
            self.schedule_commit()
        # an error only if all are unassigned, as in confluent_kafka: a rebalance may have taken some away
        if unassigned and len(unassigned) == len(to_store):
            raise failure(KafkaError._STATE, f"not assigned: {', '.join(unassigned)}")

    # -- requests to the broker --------------------------------------------------------------------

    def request(self, api_key: int, version_max: int, message: object, deadline: float) -> Any:
        timeout_s = max(deadline - time.monotonic(), 0) if deadline < INFINITY else -1
        return self._control.request(api_key, self._control.api.pick(api_key, version_max), message, timeout_s)

    def committed(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        self._consumer.enter()
        deadline = deadline_of(timeout if timeout is not None else self._timeout_s)
        keys = [(partition.topic, partition.partition) for partition in partitions]
        message = offsets.offset_fetch_request(
            self._config["group.id"], dict.fromkeys(keys), bool(self._config.isolation_level)
        )
        while True:
            outcomes = offsets.decode_offset_fetch_response(
                self.request(requests.OFFSET_FETCH, offsets.OFFSET_FETCH_VERSION_MAX, message, deadline)
            )
            codes = {code for code, _ in outcomes.values()}
            if codes & offsets.COORDINATOR_UNAVAILABLE:
                self._consumer.coordinator.look_up()
            if not codes & _RETRIABLE or time.monotonic() + RETRY_S >= deadline:
                break
            self._consumer.wait_until(lambda: False, time.monotonic() + RETRY_S)
        unknown_partition = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), Committed(-1)
        results: list[TopicPartition] = []
        for topic, index in keys:
            code, committed = outcomes.get((topic, index), unknown_partition)
            results.append(
                partition_result(
                    topic,
                    index,
                    committed.offset if committed.offset >= 0 and not code else OFFSET_INVALID,
                    code,
                    committed.metadata,
                    committed.leader_epoch,
                )
            )
        return results

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float | None = None, cached: bool = False
    ) -> tuple[int, int] | None:
        self._consumer.enter()
        key = partition.topic, partition.partition
        if cached:
            part = self._parts.get(key)
            return (
                (OFFSET_INVALID, OFFSET_INVALID)
                if part is None or part.reader is None
                else (part.reader.log_start(), part.reader.lag_end())
            )
        deadline = deadline_of(timeout)
        low, high = (
            self._list_offsets({key: timestamp}, deadline)[0]
            for timestamp in (offsets.EARLIEST_TIMESTAMP, offsets.LATEST_TIMESTAMP)
        )
        for result in (low, high):
            if result.error is not None:
                raise KafkaException(result.error)
        return low.offset, high.offset

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float | None = None) -> list[TopicPartition]:
        self._consumer.enter()
        results = {
            (result.topic, result.partition): result
            for result in self._list_offsets(
                {(query.topic, query.partition): query.offset for query in partitions}, deadline_of(timeout)
            )
        }
        if results and all(result.error is not None for result in results.values()):
            raise KafkaException(next(iter(results.values())).error)
        return [results[query.topic, query.partition] for query in partitions]

    def _list_offsets(self, timestamps: dict[Key, int], deadline: float) -> list[PartitionResult]:
        deadline = min(deadline, time.monotonic() + self._timeout_s)
        timeout_ms = int(max(deadline - time.monotonic(), 0) * 1000)
        listed = offsets.read_list_offsets(
            self.request(
                requests.LIST_OFFSETS,
                1 << 14,
                offsets.list_offsets_request(timestamps, self._config.isolation_level, timeout_ms),
                deadline,
            )
        )
        return [
            PartitionResult(
                topic,
                index,
                offset,
                None,
                epoch,
                (
                    local_error(KafkaError._UNKNOWN_PARTITION)
                    if code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    else broker_error(code)
                    if code
                    else None
                ),
            )
            for (topic, index), (code, offset, epoch) in listed.items()
        ]

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._consumer.enter()
        return self._control.metadata.list_topics(
            topic, timeout, allow_auto_create=bool(self._config["allow.auto.create.topics"])
        )

    def cluster_id(self, timeout: float = -1) -> str | None:
        self._consumer.enter()
        return requests.read_metadata(
            self.request(requests.METADATA, 1 << 14, requests.metadata_request([], False), deadline_of(timeout))
        )[0].cluster_id
