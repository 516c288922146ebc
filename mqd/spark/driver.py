"""The driver's requests to brokers: they query partitions, their sizes, and their offsets (first,
last, by time), and commit a group's offsets. Batch queries are planned here, streaming queries in
progress.py.

    D1  a Driver is used in one process; it connects on first use, and again after an error
    D2  retriable errors are retried for kafka.default.api.timeout.ms; all others are MqdReadErrors
        that name topic and partition
    D3  missing data is reported by report_loss(): an error with failOnDataLoss, a warning without
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    DescribeLogDirsRequest,
    FindCoordinatorRequest,
    ListOffsetsRequest,
    OffsetCommitRequest,
)
from mqd.spark.offsets import GROUP_OFFSET_METADATA
from mqd.spark.options import EARLIEST, LATEST, Boundary, Offsets, SourceOptions
from mqd.spark.planning import Key, Range, split
from mqd.spark.wire import BrokerError, Cluster, Metadata, MqdReadError, Topic, check

log = logging.getLogger("mqd.spark")

_COMMIT_VERSION_MAX = 9  # topics by name
_NO_MATCH = -1
WEIGHTS_AGE_MAX_S = 60.0


def list_offsets(cluster: Cluster, timestamps: Mapping[Key, int], isolation: int) -> dict[Key, int]:
    """Returns each partition's offset at its timestamp: EARLIEST, LATEST (the last stable offset
    with `isolation` 1), or a time in ms (the first record at or after it; -1 if there is none).
    Raises BrokerError or OSError, which are retriable.
    """
    metadata = cluster.metadata(sorted({topic for topic, _ in timestamps}))
    by_node: dict[int, dict[str, list[int]]] = {}
    for topic, partition in timestamps:
        info = metadata.topics.get(topic)
        if info is None:
            raise BrokerError(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), topic)
        check(info.error, topic)
        leader = info.leaders.get(partition)
        if leader is None:
            raise BrokerError(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), f"{topic}-{partition}")
        if leader < 0:
            raise BrokerError(int(ErrorCode.LEADER_NOT_AVAILABLE), f"{topic}-{partition}")
        by_node.setdefault(leader, {}).setdefault(topic, []).append(partition)
    offsets: dict[Key, int] = {}
    for node, topics in by_node.items():
        requested = [
            ListOffsetsRequest.Topic(
                name=topic,
                partitions=[
                    ListOffsetsRequest.Partition(partition_index=index, timestamp=timestamps[topic, index])
                    for index in indexes
                ],
            )
            for topic, indexes in topics.items()
        ]
        response = cluster.connection_to(node).request(
            ListOffsetsRequest(
                isolation_level=isolation, topics=requested, timeout_ms=int(cluster.settings.request_timeout_s * 1000)
            )
        )
        for topic in response.topics:
            for result in topic.partitions:
                check(result.error_code, f"offsets of {topic.name}-{result.partition_index}")
                offsets[topic.name, result.partition_index] = result.offset
    missing = [f"{topic}-{partition}" for topic, partition in timestamps if (topic, partition) not in offsets]
    if missing:
        raise BrokerError(int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), ", ".join(missing))
    return offsets


class Driver:
    """See the module's docstring."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        self.cluster = Cluster(options.kafka)
        self.isolation = int(options.kafka.read_committed)
        self.topics: dict[str, Topic] = {}  # as last seen
        # (time of the query, the queried partitions, their bytes per offset)
        self._weights: tuple[float, set[Key], dict[Key, float]] = (float("-inf"), set(), {})

    def close(self) -> None:
        self.cluster.close()

    def report_loss(self, text: str) -> None:
        """Reports missing data (D3)."""
        report_loss(self.options, text)

    # -- partitions --------------------------------------------------------------------------------

    def partitions(self, skip_missing: bool = False) -> list[Key]:
        """Returns the current partitions of the requested topics. A missing topic or partition is an
        error. With `skip_missing`, for those that existed before, it is left out.
        """
        options = self.options
        names = None if options.pattern is not None else options.topics
        metadata = self.cluster.with_retries(
            f"topics {', '.join(options.topics) or options.pattern}",
            lambda: self._metadata(names, skip_missing),
            options.retry_interval_s,
        )
        if options.pattern is not None:
            pattern = re.compile(options.pattern)
            self.topics = {
                name: topic for name, topic in metadata.topics.items() if not topic.error and pattern.search(name)
            }
        else:
            self.topics = {name: topic for name, topic in metadata.topics.items() if not topic.error}
        if options.assigned is None:
            return sorted((name, index) for name, topic in self.topics.items() for index in topic.leaders)
        for name, indexes in options.assigned.items():
            existing = self.topics[name].leaders if name in self.topics else {}
            unknown = [index for index in indexes if index not in existing]
            if unknown and not skip_missing:
                raise MqdReadError(
                    f"option assign: topic {name} has no partition {', '.join(map(str, unknown))}; it has"
                    f" {len(existing)} partitions"
                )
        return sorted(
            (name, index)
            for name, indexes in options.assigned.items()
            if name in self.topics
            for index in indexes
            if index in self.topics[name].leaders
        )

    def _metadata(self, names: Iterable[str] | None, skip_missing: bool) -> Metadata:
        metadata = self.cluster.metadata(names)
        for topic in metadata.topics.values():
            if topic.error and not (
                skip_missing and topic.error in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID)
            ):
                check(topic.error, f"topic {topic.name}")
        return metadata

    def use_another_broker(self) -> None:
        """Sends later requests that any broker can handle, such as Metadata, to another broker."""
        self.cluster.prefer_other_brokers()

    def topic_ids(self) -> dict[str, bytes]:
        return {name: topic.topic_id for name, topic in self.topics.items()}

    # -- offsets -----------------------------------------------------------------------------------

    def offsets_at(self, keys: Iterable[Key], timestamp: int) -> dict[Key, int]:
        return self.offsets_by_time({key: timestamp for key in keys})

    def offsets_by_time(self, timestamps: Mapping[Key, int]) -> dict[Key, int]:
        if not timestamps:
            return {}
        names = ", ".join(sorted({topic for topic, _ in timestamps}))
        return self.cluster.with_retries(
            f"offsets of {names}",
            lambda: list_offsets(self.cluster, timestamps, self.isolation),
            self.options.retry_interval_s,
        )

    def retired_end_offsets(self, keys: Iterable[Key]) -> dict[Key, int]:
        """The end offsets of retired partitions that are no longer in the metadata: their former
        leaders serve them for a while. Partitions that no broker serves are left out.
        """
        by_topic: dict[str, list[ListOffsetsRequest.Partition]] = {}
        for topic, partition in keys:
            by_topic.setdefault(topic, []).append(
                ListOffsetsRequest.Partition(partition_index=partition, timestamp=LATEST)
            )
        request = ListOffsetsRequest(
            topics=[ListOffsetsRequest.Topic(name=name, partitions=partitions) for name, partitions in by_topic.items()]
        )
        ends: dict[Key, int] = {}
        for node in sorted(self.cluster.brokers):
            try:
                response = self.cluster.connection_to(node).request(request)
            except (OSError, BrokerError, MqdReadError) as error:
                log.warning("broker %d does not return the end offsets of retired partitions: %s", node, error)
                continue
            ends |= {
                (topic.name, result.partition_index): result.offset
                for topic in response.topics
                for result in topic.partitions
                if not result.error_code
            }
        return ends

    def resolve(self, boundary: Boundary, keys: list[Key], side: str) -> dict[Key, int]:
        """The offset of `boundary` in each partition. `side`: "starting" or "ending"."""
        if boundary.symbolic is not None:
            return self.offsets_at(keys, boundary.symbolic)
        if boundary.offsets is not None:
            return self._resolve_offsets(boundary.offsets, keys, f"{side}Offsets")
        if boundary.timestamp is not None:
            requested = dict.fromkeys(keys, boundary.timestamp)
        else:
            requested = self._flatten(boundary.timestamps or {}, keys, f"{side}OffsetsByTimestamp")
        offsets = self.offsets_by_time(requested)
        unmatched = [key for key in keys if offsets[key] == _NO_MATCH]
        if unmatched and side == "starting" and self.options.timestamp_without_match == "error":
            topic, partition = unmatched[0]
            raise MqdReadError(
                f"No offset matched from request of topic-partition {topic}-{partition} and timestamp"
                f" {requested[unmatched[0]]}: no record is that late. startingOffsetsByTimestampStrategy=latest"
                " begins at the end instead"
            )
        return {**offsets, **self.offsets_at(unmatched, LATEST)}

    def _resolve_offsets(self, offsets: Offsets, keys: list[Key], option: str) -> dict[Key, int]:
        requested = self._flatten(offsets, keys, option)
        symbolic = {key: offset for key, offset in requested.items() if offset in (EARLIEST, LATEST)}
        return {**requested, **self.offsets_by_time(symbolic)}

    @staticmethod
    def _flatten(by_topic: Offsets, keys: list[Key], option: str) -> dict[Key, int]:
        by_key = {
            (topic, partition): number
            for topic, partitions in by_topic.items()
            for partition, number in partitions.items()
        }
        if set(by_key) != set(keys):
            raise MqdReadError(
                f"If {option} contains specific offsets, you must specify all TopicPartitions. Use -1 for latest, -2"
                f" for earliest. Specified: {_format_keys(by_key)} Assigned: {_format_keys(keys)}"
            )
        return by_key

    def bytes_per_offset(self, keys: Iterable[Key]) -> dict[Key, float]:
        """Returns the average bytes on disk per offset, from each leader's log directories.
        Partitions of unknown size are left out; planning.split() then splits all ranges by their
        numbers of offsets.
        """
        by_node: dict[int, dict[str, list[int]]] = {}
        for topic, partition in keys:
            if topic in self.topics and (leader := self.topics[topic].leaders.get(partition, -1)) >= 0:
                by_node.setdefault(leader, {}).setdefault(topic, []).append(partition)
        sizes: dict[Key, int] = {}
        try:
            for node, topics in by_node.items():
                request = [
                    DescribeLogDirsRequest.Topic(topic=topic, partitions=indexes) for topic, indexes in topics.items()
                ]
                for result in self.cluster.connection_to(node).request(DescribeLogDirsRequest(topics=request)).results:
                    for topic in result.topics:
                        sizes |= {
                            (topic.name, replica.partition_index): replica.partition_size
                            for replica in topic.partitions
                            if not replica.is_future_key
                        }
            earliest, latest = self.offsets_at(sizes, EARLIEST), self.offsets_at(sizes, LATEST)
        except (OSError, BrokerError, MqdReadError) as error:
            log.warning("sizes of partitions are not known (%s): tasks are split by offsets", error)
            self.cluster.close()
            return {}
        return {
            key: size / (latest[key] - earliest[key])
            for key, size in sizes.items()
            if latest[key] > earliest[key] and size > 0
        }

    def split_into_tasks(self, ranges: list[Range]) -> list[Range]:
        """Splits ranges according to the options; each resulting range is one task."""
        options = self.options
        weights = self._known_weights(ranges) if options.min_partitions and options.min_partitions > len(ranges) else {}
        return split(ranges, options.min_partitions, options.max_records_per_partition, weights)

    def _known_weights(self, ranges: list[Range]) -> dict[Key, float]:
        """Returns bytes per offset. They are queried again after WEIGHTS_AGE_MAX_S and for new
        partitions, not for every micro-batch.
        """
        requested = {(range_.topic, range_.partition) for range_ in ranges}
        queried_at_s, queried_keys, weights = self._weights
        if time.monotonic() - queried_at_s > WEIGHTS_AGE_MAX_S or not requested <= queried_keys:
            queried_keys = requested | queried_keys
            weights = self.bytes_per_offset(queried_keys)
            self._weights = (time.monotonic(), queried_keys, weights)
        return weights

    # -- a group's offsets -------------------------------------------------------------------------

    def commit_offsets(self, group_id: str, offsets: Mapping[Key, int]) -> None:
        """Commits `offsets` for a group without members; tries once. Raises BrokerError, OSError,
        MqdReadError.
        """
        response = self.cluster.any_connection().request(
            FindCoordinatorRequest(key_type=0, coordinator_keys=[group_id])
        )
        (coordinator,) = response.coordinators
        check(coordinator.error_code, f"coordinator of group {group_id}")
        self.cluster.brokers = {**self.cluster.brokers, coordinator.node_id: (coordinator.host, coordinator.port)}
        by_topic: dict[str, list[int]] = {}
        for topic, partition in sorted(offsets):
            by_topic.setdefault(topic, []).append(partition)
        topics = [
            OffsetCommitRequest.Topic(
                name=topic,
                partitions=[
                    OffsetCommitRequest.Partition(
                        partition_index=index,
                        committed_offset=offsets[topic, index],
                        committed_metadata=GROUP_OFFSET_METADATA,
                    )
                    for index in indexes
                ],
            )
            for topic, indexes in by_topic.items()
        ]
        committed = self.cluster.connection_to(coordinator.node_id).request(
            OffsetCommitRequest(group_id=group_id, member_id="", topics=topics), _COMMIT_VERSION_MAX
        )
        for topic in committed.topics:
            for result in topic.partitions:
                check(result.error_code, f"group {group_id}, offset of {topic.name}-{result.partition_index}")


def _format_keys(keys: Iterable[Key]) -> str:
    return "{" + ", ".join(f"{topic}-{partition}" for topic, partition in sorted(keys)) + "}"


def report_loss(options: SourceOptions, text: str) -> None:
    if options.fail_on_data_loss:
        raise MqdReadError(
            f"{text}. Some data may have been lost because they are not available in mqd any more. To let the query"
            " continue without them set failOnDataLoss to false"
        )
    log.warning("%s; failOnDataLoss is false: continuing without them", text)


# -- a batch ---------------------------------------------------------------------------------------


def plan_batch(options: SourceOptions) -> list[Any]:
    """The tasks of spark.read: planning.Range and, with the option archive,
    pipelines.parquet.ArchivedTask. Raises MqdReadError.
    """
    archive = None
    if options.archive is not None:
        from mqd.spark import history

        archive = history.open_archive(options)  # before the ends are queried: history.H5
    driver = Driver(options)
    try:
        keys = driver.partitions()
        starts = driver.resolve(options.starting, keys, "starting")
        ends = driver.resolve(options.ending, keys, "ending")
        earliest, latest = driver.offsets_at(keys, EARLIEST), driver.offsets_at(keys, LATEST)
        archived: list[Any] = []
        requested = {key: [(starts[key], ends[key])] for key in keys}
        if archive is not None:
            archived, requested = history.plan(options, starts, ends, latest, driver.topic_ids(), archive)
        ranges = []
        for key in keys:
            for requested_start, requested_end in requested[key]:
                start, end = _clip_to_log(driver, key, requested_start, requested_end, earliest[key], latest[key])
                if end > start:
                    ranges.append(Range(*key, start, end, driver.topics[key[0]].topic_id))
        return archived + driver.split_into_tasks(ranges)
    finally:
        driver.close()


def _clip_to_log(driver: Driver, key: Key, start: int, end: int, earliest: int, latest: int) -> tuple[int, int]:
    """The available part of [start, end); the rest is reported as lost."""
    name = f"{key[0]}-{key[1]}"
    if end > latest:
        driver.report_loss(f"{name}: the ending offset {end} is beyond the log's end {latest}")
    if start > latest:
        driver.report_loss(f"{name}: the starting offset {start} is beyond the log's end {latest}")
    if start < earliest and start < end:
        driver.report_loss(
            f"{name}: offsets {start} to {min(earliest, end) - 1} were deleted (retention or DeleteRecords): the log"
            f" starts at {earliest}"
        )
    return max(start, earliest), min(end, latest)
