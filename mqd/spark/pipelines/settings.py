"""A pipeline's settings: TOML files, checked completely before anything starts.

A file names its kind of pipeline (`pipeline = "route"`) and sets the fields of that kind's
structure below; missing fields have the defaults below. Fields with an SQL expression are passed to
Spark unchanged, so all of Spark SQL is allowed there. Durations are Spark's: "10 minutes", "1
hour".
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import msgspec

DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
ONCE = "available-now"
READ_COMMITTED = {"kafka.isolation.level": "read_committed"}
"""The isolation level of pipelines and `mqd sql`: failed attempts of an exactly-once sink stay in
the log, aborted."""


class SettingsError(ValueError):
    """A pipeline's settings are wrong; the text names the file, field and allowed values."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Source(_Strict, frozen=True, kw_only=True):
    """Topics to read. Exactly one of `topics` and `pattern` (a Java regular expression) is set."""

    topics: list[str] = []
    pattern: str = ""
    starting: str = "earliest"
    """earliest, latest, or JSON: {"topic":{"0":12}}. Used only while the pipeline has no
    checkpoint."""
    options: dict[str, str] = {}
    """Further options of format("mqd"): maxOffsetsPerTrigger, kafka.isolation.level (default:
    read_committed), ..."""

    def problems(self) -> list[str]:
        if bool(self.topics) == bool(self.pattern):
            return ["set either `topics` or `pattern`"]
        return []


class Value(_Strict, frozen=True, kw_only=True):
    """How values are decoded: JSON according to a schema in Spark DDL, e.g. "carrier STRING,
    dep_delay INT, time_hour TIMESTAMP".
    """

    schema: str
    malformed: Literal["fail", "drop"] = "fail"
    """fail: the pipeline stops at the first value that does not match; drop: such values are
    dropped. `route` sends them to the dead letters instead."""


class Sink(_Strict, frozen=True, kw_only=True):
    """Where rows are written. Exactly one of `topic` (values are JSON of the row) and `path`
    (Parquet) is set.
    """

    topic: str = ""
    path: str = ""
    key: str = ""
    """SQL expression over the row: the record's key. Records have no key by default."""
    options: dict[str, str] = {}

    def problems(self) -> list[str]:
        if bool(self.topic) == bool(self.path):
            return ["set either `topic` or `path`"]
        return []


class _Pipeline(_Strict, frozen=True, kw_only=True, tag_field="pipeline"):
    """The settings that all pipelines have."""

    name: str = ""
    """Names the query, its checkpoint and its consumer group. The file's name without .toml by
    default.
    """
    bootstrap: str = DEFAULT_BOOTSTRAP
    master: str = "local[*]"
    trigger: str = "1 second"
    """Time between batches, or available-now: process all available records, then end. "0 seconds":
    as fast as possible."""
    checkpoint: str = ""
    """Directory of offsets and state, from which the pipeline resumes; `checkpoints/NAME` by
    default."""
    spark: dict[str, str] = {}
    """Configuration of Spark."""

    nested_fields: ClassVar[tuple[str, ...]] = ("source", "sink", "left", "right")

    def problems(self) -> list[str]:
        """Errors other than types, each beginning with its field."""
        problems = []
        for field in self.nested_fields:
            nested = getattr(self, field, None)
            problems += [f"[{field}] {problem}" for problem in nested.problems()] if nested is not None else []
        return problems


class Archive(_Pipeline, frozen=True, kw_only=True, tag="archive"):
    """Writes topics to Parquet files below `path`, by topic and date, with offsets, headers and
    timestamps.
    """

    source: Source
    path: str
    trigger: str = "1 minute"
    file_mb: int = 128
    """Size to which small files are compacted, in MB."""
    compact_from_files: int = 16
    """A topic's files of one day are compacted if at least this many of them are small; 0: never."""

    def problems(self) -> list[str]:
        wrong = [] if self.file_mb > 0 else ["file_mb must be at least 1"]
        return (
            super().problems()
            + wrong
            + ([] if self.compact_from_files >= 0 else ["compact_from_files must be 0 or more"])
        )


class Replay(_Pipeline, frozen=True, kw_only=True, tag="replay"):
    """Replays an archive into topics: keys, values, headers, timestamps and the order in each
    partition.
    """

    path: str
    topics: list[str] = []
    """Topics of the archive; all by default."""
    to: dict[str, str] = {}
    """The target of each archived topic; by default the topic of the same name. The targets must
    exist, with the same number of partitions."""
    starting_timestamp: str = ""
    """ISO 8601, UTC by default. Records from this time on; all by default."""
    ending_timestamp: str = ""
    """Records before this time."""
    starting_offsets: dict[str, dict[str, int]] = {}
    """The first offset, by topic and partition."""
    ending_offsets: dict[str, dict[str, int]] = {}
    """The offset after the last, by topic and partition."""
    options: dict[str, str] = {}


class Aggregate(_Pipeline, frozen=True, kw_only=True, tag="aggregate"):
    """Counts, sums and percentiles over windows of event time, emitted once a window is over."""

    source: Source
    value: Value
    sink: Sink
    time: str = "record.timestamp"
    """SQL expression: the event's time."""
    window: str
    slide: str = ""
    """Interval between the starts of successive windows; equal to the window by default (each event
    is in one window).
    """
    watermark: str
    """How late an event may arrive. A window is emitted when the watermark has passed it; later
    events are dropped."""
    by: list[str] = []
    """SQL expressions to group by."""
    measures: dict[str, str]
    """SQL aggregates by name: { flights = "count(*)", p95 = "percentile_approx(dep_delay, 0.95)" }."""

    def problems(self) -> list[str]:
        return super().problems() + (
            [] if self.measures else ['measures is empty: define at least one, e.g. { events = "count(*)" }']
        )


class Dedup(_Pipeline, frozen=True, kw_only=True, tag="dedup"):
    """Keeps the first of equal records within a period."""

    source: Source
    sink: Sink
    by: list[str] = msgspec.field(default_factory=lambda: ["record.key"])
    """SQL expressions that identify equal records."""
    value: Value | None = None
    time: str = "record.timestamp"
    within: str
    """Period in which repetitions are recognized."""

    def problems(self) -> list[str]:
        return super().problems() + (
            [] if self.by else ["by is empty: set at least one expression that identifies equal records"]
        )


class Rule(_Strict, frozen=True, kw_only=True):
    when: str
    """SQL condition over the fields of the value and `record`."""
    topic: str


class Route(_Pipeline, frozen=True, kw_only=True, tag="route"):
    """Writes each record to the topic of the first matching rule, and values that cannot be decoded
    to the dead letters, with the reason in a header.
    """

    source: Source
    value: Value
    rules: list[Rule]
    otherwise: str = ""
    """Topic of records that match no rule; by default they are dropped."""
    dead_letters: str
    options: dict[str, str] = {}

    def problems(self) -> list[str]:
        return super().problems() + ([] if self.rules else ["rules is empty"])


class Side(_Strict, frozen=True, kw_only=True):
    """One topic of a join."""

    source: Source
    value: Value
    time: str = "record.timestamp"
    watermark: str

    def problems(self) -> list[str]:
        return self.source.problems()


class StreamJoin(_Pipeline, frozen=True, kw_only=True, tag="stream_join"):
    """Joins rows of two topics."""

    left: Side
    right: Side
    on: str
    """SQL condition over `left` and `right`; it must bound the time between the two
    (`left.event_time`, `right.event_time`), or the state would grow without limit."""
    how: Literal["inner", "left_outer", "right_outer", "full_outer"] = "inner"
    select: list[str] = msgspec.field(default_factory=lambda: ["left.*", "right.*"])
    sink: Sink


class Table(_Pipeline, frozen=True, kw_only=True, tag="table"):
    """The latest value of each key, kept as state; every change goes to the changelog topic (create
    it with cleanup.policy=compact).
    """

    source: Source
    changelog: str
    options: dict[str, str] = {}


Pipeline = Archive | Replay | Aggregate | Dedup | Route | StreamJoin | Table
KINDS: dict[str, type[_Pipeline]] = {
    str(kind.__struct_config__.tag): kind for kind in (Archive, Replay, Aggregate, Dedup, Route, StreamJoin, Table)
}


def load(path: Path, changes: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None) -> Pipeline:
    """The pipeline that a TOML file describes. `changes` replace top-level fields, `defaults` fill
    in missing ones; None values in either are ignored. Raises SettingsError.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file; the pipelines are {', '.join(KINDS)}, and docs/spark.md has an"
            " example of each"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not TOML: {error}") from None
    changed_fields, default_fields = (
        {key: value for key, value in (given or {}).items() if value is not None} for given in (changes, defaults)
    )
    return parse_settings({"name": path.stem, **default_fields, **raw, **changed_fields}, str(path))


def parse_settings(raw: Mapping[str, Any], origin: str) -> Pipeline:
    """The pipeline that a mapping describes. Raises SettingsError naming `origin` and the field."""
    kind = raw.get("pipeline")
    if kind not in KINDS:
        raise SettingsError(f"{origin}: pipeline is {kind!r}; it must be one of {', '.join(KINDS)}")
    try:
        pipeline = cast(Pipeline, msgspec.convert(dict(raw), KINDS[kind]))
    except msgspec.ValidationError as error:
        raise SettingsError(f"{origin}: {error}") from None
    problems = [*pipeline.problems(), *([] if pipeline.name else ["name is empty"])]
    if problems:
        raise SettingsError(f"{origin}: {'; '.join(problems)}")
    return pipeline
