"""Offsets of a stream as Spark stores them: JSON in the form of Spark's Kafka source, plus the
topic ids.

    {"orders": {"0": 12, "1": 7}, "@topic_ids": {"orders": "q83vASNFZ4mrze8BI0VniQ"}}

Each number is the next offset to read from the partition.

    O1  equal offsets have the same text (Spark compares texts): topics are in the order of their
        names, partitions in that of their numbers
    O2  topic ids distinguish a topic that was deleted and recreated from one that has grown; no
        topic name begins with "@"
Offsets of Spark's Kafka source, which have no ids, are accepted too, but then a recreated topic is
not recognized. Pure: sends no request.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

IDS = "@topic_ids"
GROUP_OFFSET_METADATA = "spark query"
"""The metadata with which a query commits offsets for a consumer group. These offsets are for
monitoring only: the query itself resumes from its checkpoint."""


def id_text(topic_id: bytes) -> str:
    """URL-safe Base64 without padding, as Kafka's tools print it."""
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


class Position(msgspec.Struct, frozen=True):
    """`offsets`: (topic, partition) -> next offset; `ids`: topic -> id (16 bytes), for topics whose
    id is known.
    """

    offsets: dict[tuple[str, int], int]
    ids: dict[str, bytes]

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries for Spark, in order (O1)."""
        offsets: dict[str, Any] = {}
        for topic, partition in sorted(self.offsets):
            offsets.setdefault(topic, {})[str(partition)] = self.offsets[topic, partition]
        ids = {topic: id_text(self.ids[topic]) for topic in offsets if topic in self.ids}
        return {**offsets, IDS: ids} if ids else offsets

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Position:
        """Raises ValueError, for instance for an edited checkpoint."""
        try:
            offsets = {
                (topic, int(partition)): int(offset)
                for topic, partitions in stored.items()
                if topic != IDS
                for partition, offset in partitions.items()
            }
            ids = {
                topic: base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
                for topic, text in stored.get(IDS, {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f'not valid offsets for format mqd: {stored!r}: {error}; expected, for example: {{"topic":{{"0":12}}}}'
            ) from None
        return cls(offsets, ids)

    def topics(self) -> list[str]:
        return list(dict.fromkeys(topic for topic, _ in sorted(self.offsets)))
