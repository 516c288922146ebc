"""Decides how a redrive handles each dead letter: pure functions.

A redrive reads a dead-letter topic with a filter. Its positions are committed offsets of a group
whose name contains the topic and the filter (`group_of`), so that a redrive with another filter
does not skip letters that this one did not select. A letter that both filters select is moved once:
`is_moved` checks the positions of the topic's other redrives.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mqd.coordinator.share.letter_records import EXHAUSTED_MESSAGE, PREFIX, REJECTED_MESSAGE

GROUP_PREFIX = "mqd-redrive:"  # followed by TOPIC?FILTER; neither a topic's name nor a quoted value has ? or &
COUNT_HEADER = "mqd-redriven"  # header: how many times the record was redriven
REDRIVE_COUNT_MAX = 3
REASONS = {"rejected": REJECTED_MESSAGE, "exhausted": EXHAUSTED_MESSAGE}
CLOCK_SKEW_MAX_MS = 60_000  # how far a producer's clock may be ahead of the broker's

# the reasons why letters are not moved
NOT_A_LETTER = "not a dead letter: its headers do not name a record"
LOOP = "its source topic is itself a dead-letter topic"
TOO_OFTEN = f"already redriven {REDRIVE_COUNT_MAX} times"
GONE = "written without its record, and the source topic no longer has it"
REPLACED = "written without its record, and the source topic has a newer one at that offset"

Headers = tuple[tuple[str, bytes | None], ...]


class StoredRecord(NamedTuple):
    """A record of a topic."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Origin(NamedTuple):
    """The record that a letter's headers name. `group`, `message`: which share group dead-lettered
    the record, and why.
    """

    topic: str
    partition: int
    offset: int
    group: str
    message: str


class NewRecord(NamedTuple):
    """A record to be written to the partition that it came from, if the partition still exists."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Filter(NamedTuple):
    """Selects letters; an empty or 0 field selects all. Times are those of the letters:
    `since_ms` is included, `until_ms` is not.
    """

    group: str = ""
    topic: str = ""  # that the record came from
    reason: str = ""  # of REASONS
    since_ms: int = 0
    until_ms: int = 0

    def selects(self, letter: StoredRecord, origin: Origin) -> bool:
        return (
            self.group in ("", origin.group)
            and self.topic in ("", origin.topic)
            and (not self.reason or REASONS[self.reason] == origin.message)
            and self.since_ms <= letter.timestamp_ms
            and (not self.until_ms or letter.timestamp_ms < self.until_ms)
        )


class EarlierRedrive(NamedTuple):
    """Another redrive of the topic. In each partition, it has handled the letters below its
    position.
    """

    filter: Filter
    positions: Mapping[int, int]  # by partition


def group_of(topic: str, letter_filter: Filter) -> str:
    """The group whose committed offsets are the positions of this redrive."""
    criteria = {name: value for name, value in letter_filter._asdict().items() if value}
    return f"{GROUP_PREFIX}{topic}" + (f"?{urllib.parse.urlencode(criteria)}" if criteria else "")


def filter_of(group: str, topic: str) -> Filter | None:
    """Returns the filter of a redrive of `topic`, parsed from the name of the redrive's group. None
    if `group` is not the group of such a redrive.
    """
    name, _, query = group.partition("?")
    if name != GROUP_PREFIX + topic:
        return None
    try:
        criteria = dict(urllib.parse.parse_qsl(query, strict_parsing=bool(query)))
        since_ms, until_ms = int(criteria.get("since_ms", 0)), int(criteria.get("until_ms", 0))
        letter_filter = Filter(
            criteria.get("group", ""), criteria.get("topic", ""), criteria.get("reason", ""), since_ms, until_ms
        )
    except ValueError:
        return None
    return letter_filter if group_of(topic, letter_filter) == group and letter_filter.reason in ("", *REASONS) else None


def origin_of(letter: StoredRecord) -> Origin | None:
    """None if the record is not a dead letter."""
    origin_headers = {
        name.removeprefix(PREFIX): value or b"" for name, value in letter.headers if name.startswith(PREFIX)
    }
    try:
        partition, offset = int(origin_headers["partition"]), int(origin_headers["offset"])
        topic, group, message = (origin_headers[name].decode() for name in ("topic", "group", "message"))
    except (KeyError, ValueError):  # ValueError includes UnicodeDecodeError
        return None
    return Origin(topic, partition, offset, group, message) if topic and partition >= 0 and offset >= 0 else None


def is_moved(letter: StoredRecord, origin: Origin, earlier: Iterable[EarlierRedrive]) -> bool:
    """Whether another redrive has handled the letter."""
    return any(
        letter.offset < redrive.positions.get(letter.partition, 0) and redrive.filter.selects(letter, origin)
        for redrive in earlier
    )


def needs_source(letter: StoredRecord) -> bool:
    """Whether the record must be read from its topic, because the letter has no copy of it. A
    letter with a copy looks the same if its record has no key, no value and no headers; reading
    that record again does no harm.
    """
    return letter.key is None and letter.value is None and not _application_headers(letter.headers)


def record_of(
    letter: StoredRecord, origin: Origin, source: StoredRecord | None, source_is_dead_letter_topic: bool
) -> NewRecord | str:
    """Returns the record to write, or the reason why none is written. `source`: the original record,
    if it is needed and still exists. No record is written to a topic that is itself a dead-letter
    topic: there it would be a dead letter without headers, or, if two topics take each other's
    letters, be redriven back and forth.
    """
    if source_is_dead_letter_topic:
        return LOOP
    if needs_source(letter):
        if source is None:
            return GONE
        if source.timestamp_ms > letter.timestamp_ms + CLOCK_SKEW_MAX_MS:  # the topic was deleted and created again
            return REPLACED
    else:
        source = letter
    count = _redrive_count(source.headers)
    if count >= REDRIVE_COUNT_MAX:
        return TOO_OFTEN
    headers = (*_application_headers(source.headers), (COUNT_HEADER, b"%d" % (count + 1)))
    return NewRecord(origin.topic, origin.partition, source.key, source.value, headers)


def _application_headers(headers: Headers) -> Headers:
    return tuple(header for header in headers if header[0] != COUNT_HEADER and not header[0].startswith(PREFIX))


def _redrive_count(headers: Headers) -> int:
    """How many times the record was redriven. Headers that are not numbers are ignored: no redrive
    wrote them.
    """
    texts = [value or b"" for name, value in headers if name == COUNT_HEADER]
    return max((int(text) for text in texts if text.isdigit() and len(text) < 10), default=0)
