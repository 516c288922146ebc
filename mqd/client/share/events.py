"""Types passed between the parts of a share consumer."""

from __future__ import annotations

from typing import Any, NamedTuple

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)  # acknowledgement types, on the wire

TopicIdPartition = tuple[bytes, int]  # topic id and partition
TopicPartitionKey = tuple[str, int]  # topic and partition


class Range(NamedTuple):
    """Offsets `first` to `last`, both included, with the same acknowledgement type."""

    first: int
    last: int
    type: int


class Target(NamedTuple):
    """The connection for a request. A connection keeps the order of its requests, and a share session
    belongs to one connection.

    kind: "control" = any broker; "group" = the coordinator; "share" = a leader
    """

    kind: str
    node_id: int = -1


class Send(NamedTuple):
    """A request; ends with one ShareCore.on_response() with the same number."""

    number: int
    target: Target
    api_key: int
    message: Any
    version_min: int = 0
    wait_ms: int = 0  # how long the broker may park it


class Outcome(NamedTuple):
    """The result of acknowledgements: `code` is Kafka's, 0 = done. `ranges` has no GAP."""

    topic_partition: TopicPartitionKey
    ranges: tuple[Range, ...]
    code: int


class Problem(NamedTuple):
    """An exception for the application. A fatal one is raised again by every later call."""

    code: int
    text: str
    is_fatal: bool = False


class Limits(NamedTuple):
    """Limits of one fetch. `is_strict`: never more than records_max records (KIP-1206)."""

    records_max: int
    wait_ms: int
    is_strict: bool = False
    bytes_min: int = 1
    bytes_max: int = 50 << 20


def merged(ranges: list[Range]) -> list[Range]:
    """Sorts ranges that do not overlap, and merges adjacent ones of the same type."""
    result: list[Range] = []
    for next_range in sorted(ranges):
        if result and result[-1].last + 1 == next_range.first and result[-1].type == next_range.type:
            result[-1] = Range(result[-1].first, next_range.last, next_range.type)
        else:
            result.append(next_range)
    return result
