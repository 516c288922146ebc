"""Plans new offsets for a group, and commits them. For `mqd group seek`."""

import re
from datetime import datetime
from typing import Any

import click
import msgspec

from mqd.cli import share_groups
from mqd.cli.broker_lookup import EARLIEST, GROUP, LATEST, Cluster, Partition
from mqd.cli.common import CliError
from mqd.cli.group_listing import TOPIC_NAMES_VERSION_MAX, explain, positions
from mqd.cli.records import Position, parse_position, parse_time
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import OffsetCommitRequest
from mqd.spark.offsets import GROUP_OFFSET_METADATA

OFFSET_COMMIT = 8
_HAS_MEMBERS = (
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.STALE_MEMBER_EPOCH,
    ErrorCode.NON_EMPTY_GROUP,
)
SPARK_PROGRESS_NOTE = (
    "group {group} has the progress of a Spark streaming query, which resumes from its checkpoint. Moving an offset"
    " does not change what the query reads, but only the displayed lag, until the query's next batch from that"
    " partition. To make it read from elsewhere, start the query with a new checkpoint and startingOffsets"
)


class Move(msgspec.Struct):
    """`old` None: no offset was committed. `new` None: the offset stays, for the reason in `note`.
    `is_spark_progress`: the offset is the progress of a Spark streaming query (spark/offsets.py).
    """

    topic: str
    partition: int
    old: int | None
    new: int | None
    note: str
    is_spark_progress: bool = False


def parse_destination(text: str, now: datetime) -> Position:
    """Parses the starting points of `mqd consume -o`, and times without @. Raises click.UsageError."""
    if re.fullmatch(r"-\d{1,12}(ms|s|m|h|d)|\d{4}-\d\d-\d\d.*", text):
        return Position("time", parse_time(text, now))
    try:
        return parse_position(text, now)
    except click.UsageError:
        raise click.UsageError(
            f"--to {text}: give earliest, latest, an offset, -COUNT, or a time such as 2026-01-31T12:00, -15m or"
            " @MILLISECONDS"
        ) from None


def _partitions(
    cluster: Cluster, requested: list[tuple[str, set[int] | None]], offsets: dict[Partition, int]
) -> list[Partition]:
    topics = cluster.topics({topic for topic, _ in requested} or {topic for topic, _ in offsets})
    if not requested:
        return sorted(offsets)
    partitions: set[Partition] = set()
    for topic, indexes in requested:
        if topic not in topics:
            raise CliError(f"there is no topic {topic}; mqd topic list shows all topics")
        missing = sorted((indexes or set()) - topics[topic].keys())
        if missing:
            raise CliError(f"topic {topic} has no partition {missing[0]}; it has 0 to {len(topics[topic]) - 1}")
        partitions.update((topic, index) for index in (topics[topic] if indexes is None else indexes))
    return sorted(partitions)


def plan(
    cluster: Cluster,
    group: str,
    requested: list[tuple[str, set[int] | None]],
    start: Position | None,
    shift: int,
    is_share: bool = False,
) -> list[Move]:
    """Computes the new offsets: at `start`, or if it is None, `shift` after the committed offset.
    Offsets outside the log are clamped, with a note. Raises CliError when nothing can move.
    """
    committed = positions(cluster, group, is_share)
    offsets = {partition: position.offset for partition, position in committed.items()}
    partitions = _partitions(cluster, requested, offsets)
    starts, ends = cluster.offsets(partitions, EARLIEST), cluster.offsets(partitions, LATEST)
    at_time = cluster.offsets(partitions, start.value) if start is not None and start.kind == "time" else {}
    moves = []
    for partition in partitions:
        old = offsets.get(partition)
        new, note = _target_of(old, starts.get(partition), ends.get(partition), at_time.get(partition), start, shift)
        moves.append(
            Move(
                *partition,
                old,
                new,
                note,
                is_spark_progress=partition in committed and committed[partition].metadata == GROUP_OFFSET_METADATA,
            )
        )
    if not any(move.new is not None for move in moves):
        raise CliError(
            f"group {group} has no committed offset there; use --to earliest or --to latest to set one"
            if not any(move.old is not None for move in moves)
            else moves[0].note
        )
    return moves


def _target_of(
    old: int | None, first: int | None, end: int | None, at_time: int | None, start: Position | None, shift: int
) -> tuple[int | None, str]:
    if first is None or end is None:
        return None, "stays: the partition is gone, or not served"
    if start is None:
        if old is None:
            return None, "stays: there is no committed offset to shift"
        target = old + shift
    elif start.kind == "time":
        if at_time is None:
            return None, "stays: the partition is not served"
        if at_time < 0:
            return end, "no record is that recent: moves to the end"
        target = at_time
    else:
        target = {"beginning": first, "end": end, "offset": start.value, "tail": max(first, end - start.value)}[
            start.kind
        ]
    if target < first:
        return first, f"clamped from {target}: the log begins here"
    if target > end:
        return end, f"clamped from {target}: the log ends here"
    return target, ""


def commit(cluster: Cluster, group: str, moves: list[Move]) -> dict[Partition, str]:
    """Commits as an administrator, outside of any generation; the coordinator accepts this only for
    a group without members. Returns partition -> reason, for the commits that failed.
    """
    topics: dict[str, list[Any]] = {}
    for move in moves:
        if move.new is not None:
            # the metadata marks a Spark query's progress, and is kept
            metadata = GROUP_OFFSET_METADATA if move.is_spark_progress else ""
            topics.setdefault(move.topic, []).append(
                OffsetCommitRequest.Partition(
                    partition_index=move.partition, committed_offset=move.new, committed_metadata=metadata
                )
            )
    request = OffsetCommitRequest(
        group_id=group,
        topics=[OffsetCommitRequest.Topic(name=name, partitions=partitions) for name, partitions in topics.items()],
    )

    def errors(response: Any) -> dict[Partition, int]:
        return {
            (topic.name, partition.partition_index): partition.error_code
            for topic in response.topics
            for partition in topic.partitions
            if partition.error_code
        }

    response = cluster.request_coordinator(
        GROUP,
        group,
        OFFSET_COMMIT,
        request,
        lambda response: next(iter(errors(response).values()), 0),
        TOPIC_NAMES_VERSION_MAX,
    )
    return {partition: _reason(error) for partition, error in errors(response).items()}


def _reason(error: int) -> str:
    if error in _HAS_MEMBERS:
        return "a member has joined in the meantime; stop it and seek again"
    return explain(error)


def alter(cluster: Cluster, group: str, moves: list[Move]) -> dict[Partition, str]:
    """Sets the start offsets of a share group; for other groups, use commit(). Returns the same."""
    targets = {(move.topic, move.partition): move.new for move in moves if move.new is not None}
    return {partition: _reason(error) for partition, error in share_groups.alter(cluster, group, targets).items()}
