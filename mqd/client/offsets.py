"""Committed offsets and offsets by time, without I/O: encodes requests from TopicPartitions, and
decodes responses. Errors become KafkaErrors on their TopicPartition.

Versions: OffsetFetch up to 9, the last version with topic names; OffsetCommit 10 if the ids of all
topics are known, so that the broker refuses deleted topics even if new ones have their names;
otherwise 9.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mqd.client.messages import OFFSET_INVALID, KafkaError, TopicPartition, broker_error, local_error
from mqd.client.requests import NO_TOPIC_ID, TopicInfo
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
)

COMMIT_BY_NAME_VERSION_MAX = OFFSET_FETCH_VERSION_MAX = 9
COMMIT_BY_ID_VERSION = 10
EARLIEST_TIMESTAMP, LATEST_TIMESTAMP = -2, -1
# Errors after which a commit is retried. STALE: a retry succeeds once the membership is valid again
COORDINATOR_UNAVAILABLE = frozenset(
    {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR}
)
STALE = frozenset({ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.REBALANCE_IN_PROGRESS})

Key = tuple[str, int]


class Committed(NamedTuple):
    """`topic_id`: the id of the topic to commit for, if known."""

    offset: int
    leader_epoch: int = -1
    metadata: str | None = None
    topic_id: bytes = NO_TOPIC_ID


def _by_topic(keys: Iterable[Key]) -> dict[str, list[int]]:
    indexes_by_topic: dict[str, list[int]] = {}
    for topic, index in keys:
        indexes_by_topic.setdefault(topic, []).append(index)
    return indexes_by_topic


def commit_request(
    group_id: str, member_id: str, generation: int, instance_id: str | None, offsets: dict[Key, Committed]
) -> OffsetCommitRequest:
    """`generation` -1: the commit is not made by a member. Topics have names and ids; the version
    decides which are sent.
    """
    Topic, Partition = OffsetCommitRequest.Topic, OffsetCommitRequest.Partition
    topics: dict[tuple[str, bytes], OffsetCommitRequest.Topic] = {}
    for (name, index), committed in offsets.items():
        topic = topics.get((name, committed.topic_id))
        if topic is None:
            topic = topics[name, committed.topic_id] = Topic(name=name, topic_id=committed.topic_id)
        topic.partitions.append(
            Partition(
                partition_index=index,
                committed_offset=committed.offset,
                committed_leader_epoch=committed.leader_epoch,
                committed_metadata=committed.metadata,
            )
        )
    member = member_id if generation >= 0 else ""
    return OffsetCommitRequest(
        group_id=group_id,
        generation_id_or_member_epoch=generation,
        member_id=member,
        group_instance_id=instance_id if generation >= 0 else None,
        topics=list(topics.values()),
    )


def commit_version_max(offsets: dict[Key, Committed]) -> int:
    return (
        COMMIT_BY_ID_VERSION
        if all(committed.topic_id != NO_TOPIC_ID for committed in offsets.values())
        else COMMIT_BY_NAME_VERSION_MAX
    )


def decode_commit_response(response: Any, offsets: dict[Key, Committed]) -> dict[Key, int]:
    """Returns the error code of each partition in `offsets`; 0 = committed."""
    names = {committed.topic_id: topic for (topic, _), committed in offsets.items()}
    return {
        (topic.name or names.get(topic.topic_id, ""), partition.partition_index): partition.error_code
        for topic in response.topics
        for partition in topic.partitions
    }


def offset_fetch_request(group_id: str, keys: Iterable[Key], require_stable: bool) -> OffsetFetchRequest:
    """`require_stable`: while an open transaction has an offset for a partition, the broker responds
    with UNSTABLE_OFFSET_COMMIT (retriable).
    """
    topics = [
        OffsetFetchRequest.GroupTopic(name=topic, partition_indexes=indexes)
        for topic, indexes in _by_topic(keys).items()
    ]
    return OffsetFetchRequest(
        groups=[OffsetFetchRequest.Group(group_id=group_id, topics=topics)], require_stable=require_stable
    )


def decode_offset_fetch_response(response: Any) -> dict[Key, tuple[int, Committed]]:
    """Returns (error code, committed offset; -1 = none) by partition."""
    (group,) = response.groups
    return {
        (topic.name, partition.partition_index): (
            group.error_code or partition.error_code,
            Committed(partition.committed_offset, partition.committed_leader_epoch, partition.metadata or None),
        )
        for topic in group.topics
        for partition in topic.partitions
    }


def list_offsets_request(timestamps: dict[Key, int], isolation_level: int, timeout_ms: int) -> ListOffsetsRequest:
    Topic, Partition = ListOffsetsRequest.Topic, ListOffsetsRequest.Partition
    topics = [
        Topic(
            name=topic,
            partitions=[Partition(partition_index=index, timestamp=timestamps[topic, index]) for index in indexes],
        )
        for topic, indexes in _by_topic(timestamps).items()
    ]
    return ListOffsetsRequest(isolation_level=isolation_level, topics=topics, timeout_ms=timeout_ms)


def read_list_offsets(response: Any) -> dict[Key, tuple[int, int, int]]:
    """Returns (error code, offset, leader epoch) by partition; offset -1 = all records are older."""
    return {
        (topic.name, partition.partition_index): (partition.error_code, partition.offset, partition.leader_epoch)
        for topic in response.topics
        for partition in topic.partitions
    }


def positions_request(
    positions: Iterable[tuple[bytes, int, int]], isolation_level: int, max_wait_ms: int, rack_id: str
) -> FetchRequest:
    """A Fetch that returns positions, but no records (max_bytes 0). The broker parks it until one of the
    partitions has records at or after its offset. `positions`: (topic id, partition index, offset).
    """
    topics: dict[bytes, FetchRequest.Topic] = {}
    for topic_id, index, offset in positions:
        topic = topics.get(topic_id)
        if topic is None:
            topic = topics[topic_id] = FetchRequest.Topic(topic_id=topic_id)
        topic.partitions.append(FetchRequest.Partition(partition=index, fetch_offset=offset, partition_max_bytes=1))
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=0,
        isolation_level=isolation_level,
        topics=list(topics.values()),
        rack_id=rack_id,
    )


def read_positions(response: FetchResponse) -> Iterable[tuple[bytes, int, Any]]:
    for topic in response.responses:
        for partition in topic.partitions:
            yield topic.topic_id, partition.partition_index, partition


class PartitionResult(TopicPartition):
    """A TopicPartition created with an `error`, which confluent_kafka's class does not allow from Python."""

    __slots__ = ("_error",)

    def __init__(
        self,
        topic: str,
        partition: int = -1,
        offset: int = OFFSET_INVALID,
        metadata: str | None = None,
        leader_epoch: int = -1,
        error: KafkaError | None = None,
    ) -> None:
        more: dict[str, Any] = {}
        if metadata is not None:
            more["metadata"] = metadata
        if leader_epoch is not None and leader_epoch >= 0:
            more["leader_epoch"] = leader_epoch
        super().__init__(topic, partition, offset, **more)
        self._error = error

    @property
    def error(self) -> KafkaError | None:  # type: ignore[override]  # read-only here
        return self._error

    # confluent_kafka's TopicPartition compares only with its own class; Python tries the
    # methods of a subclass first, even when its instance is the right operand

    def _key(self) -> Key:
        return self.topic, self.partition

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopicPartition) and self._key() == (other.topic, other.partition)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: TopicPartition) -> bool:
        return self._key() < (other.topic, other.partition)

    def __le__(self, other: TopicPartition) -> bool:
        return self._key() <= (other.topic, other.partition)

    def __gt__(self, other: TopicPartition) -> bool:
        return self._key() > (other.topic, other.partition)

    def __ge__(self, other: TopicPartition) -> bool:
        return self._key() >= (other.topic, other.partition)

    __hash__ = TopicPartition.__hash__

    def __repr__(self) -> str:
        return (
            f"TopicPartition{{topic={self.topic},partition={self.partition},offset={self.offset},"
            f"leader_epoch={self.leader_epoch},error={self._error}}}"
        )

    __str__ = __repr__


def partition_result(
    topic: str, index: int, offset: int, code: int, metadata: str | None = None, leader_epoch: int = -1
) -> PartitionResult:
    """`code`: Kafka's error code, 0 = none."""
    return PartitionResult(topic, index, offset, metadata, leader_epoch, broker_error(code) if code else None)


def unknown_partition_error(topic: str, index: int, info: TopicInfo | None) -> KafkaError | None:
    """Returns the error for a missing partition, as in librdkafka; None if the partition exists."""
    if info is None or info.error:
        return broker_error(
            info.error if info is not None and info.error else int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
            f"{topic} [{index}]",
        )
    if index >= info.partition_count:
        return local_error(
            KafkaError._UNKNOWN_PARTITION, f"{topic} [{index}]: the topic has {info.partition_count} partitions"
        )
    return None
