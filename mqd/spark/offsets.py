"""Offsets of a stream as Spark stores them: JSON in the form of Spark's Kafka source, plus the
topic ids.

    {"orders": {"0": 12, "1": 7}, "@topic_ids": {"orders": "q83vASNFZ4mrze8BI0VniQ"}}

The number is, for each partition, the next offset to read.

    O1  equal offsets have the same text (Spark compares texts): topics in the order of their names,
        partitions of their numbers
    O2  topic ids distinguish a topic that was deleted and recreated from one that has grown; no
        topic name begins with "@"
Offsets of Spark's Kafka source (without ids) are read as well, but then a recreated topic is not
recognized. Pure: sends no request.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import msgspec

IDS = "@topic_ids"
GROUP_OFFSET_METADATA = "spark query"
"""Metadata of the offsets that a query commits for a consumer group. They are for monitoring only:
the query itself resumes from its checkpoint."""


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
        out: dict[str, Any] = {}
        for topic, partition in sorted(self.offsets):
            out.setdefault(topic, {})[str(partition)] = self.offsets[topic, partition]
        ids = {topic: id_text(self.ids[topic]) for topic in out if topic in self.ids}
        return {**out, IDS: ids} if ids else out

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Position:
        """Raises ValueError, for instance for an edited checkpoint."""
        try:
            offsets = {
                (topic, int(partition)): int(offset)
                for topic, partitions in found.items()
                if topic != IDS
                for partition, offset in partitions.items()
            }
            ids = {
                topic: base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
                for topic, text in found.get(IDS, {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f'not valid offsets for format mqd: {found!r}: {error}; expected, for example: {{"topic":{{"0":12}}}}'
            ) from None
        return cls(offsets, ids)

    def topics(self) -> list[str]:
        return list(dict.fromkeys(topic for topic, _ in sorted(self.offsets)))
