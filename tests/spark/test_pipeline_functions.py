"""The pipelines' functions on DataFrames, without a broker. A stream is a directory of Parquet
files, so that watermarks and state are Spark's own.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from mqd.spark.pipelines import archive as archiving
from mqd.spark.pipelines.compacting import compact, find_due
from mqd.spark.pipelines.manifest import Archive
from mqd.spark.pipelines.settings import Rule, Value

START = datetime.datetime(2026, 11, 21, 10, tzinfo=datetime.UTC)
RECORDS = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT,"
    " headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
FLIGHT = Value(schema="carrier STRING, delay INT, at TIMESTAMP")


def record(
    offset: int,
    value: Any,
    key: str | None = None,
    partition: int = 0,
    minute: int = 0,
    headers: Any = None,
    topic: str = "flights",
) -> tuple[Any, ...]:
    body = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
    return (
        key.encode() if key else None,
        body,
        topic,
        partition,
        offset,
        START + datetime.timedelta(minutes=minute),
        0,
        headers,
    )


def frame(spark: Any, rows: list[tuple[Any, ...]]) -> Any:
    return spark.createDataFrame(rows, RECORDS)


def stream(spark: Any, folder: Path, *batches: list[tuple[Any, ...]]) -> Any:
    """A stream whose batches are one micro-batch each, in order."""
    for number, rows in enumerate(batches):
        frame(spark, rows).coalesce(1).write.parquet(str(folder / f"batch={number}"))
    return (
        spark.readStream.schema(RECORDS)
        .option("maxFilesPerTrigger", 1)
        .option("latestFirst", "false")
        .parquet(*[str(folder)])
        .drop("batch")
    )


def all_of(spark: Any, streaming: Any, mode: str = "append") -> list[Any]:
    query = (
        streaming.writeStream.format("memory").queryName("found").outputMode(mode).trigger(availableNow=True).start()
    )
    query.awaitTermination()
    return spark.table("found").collect()


def flight(carrier: str, delay: int, minute: int = 0) -> dict[str, Any]:
    return {"carrier": carrier, "delay": delay, "at": (START + datetime.timedelta(minutes=minute)).isoformat()}


@pytest.mark.slow
def test_aggregate_emits_a_window_once_when_it_is_over(spark: Any, tmp_path: Path) -> None:
    from mqd.spark.pipelines.aggregate import aggregate
    from mqd.spark.pipelines.values import decode_values

    batches = [
        [record(0, flight("UA", 10, 5)), record(1, flight("UA", 30, 50)), record(2, flight("AA", 1, 59))],
        # late, but within the watermark; then the hour is over
        [record(3, flight("UA", 20, 20)), record(4, flight("UA", 5, 130))],
        [record(5, flight("UA", 5, 131))],
        [record(6, flight("UA", 99, 30))],  # too late: the previous batch wrote the window
    ]
    rows = decode_values(stream(spark, tmp_path / "in", *batches), FLIGHT)
    measures = {"flights": "count(*)", "p50": "percentile_approx(delay, 0.5)"}
    found = aggregate(rows, time="at", window="1 hour", watermark="30 minutes", by=["carrier"], measures=measures)
    assert found.columns == ["start", "end", "carrier", "flights", "p50"]
    reported = {(row.carrier, row.flights, row.p50) for row in all_of(spark, found)}
    assert reported == {("UA", 3, 20), ("AA", 1, 1)}


def test_dedup_keeps_the_first_of_each(spark: Any, tmp_path: Path) -> None:
    from mqd.spark.pipelines.dedup import dedup
    from mqd.spark.pipelines.values import as_rows

    batches = [
        [record(0, b"a", "k1"), record(1, b"b", "k2")],
        [record(2, b"c", "k1", minute=1), record(3, b"d", "k3", minute=1)],
    ]
    found = dedup(as_rows(stream(spark, tmp_path / "in", *batches)), by=["record.key"], within="10 minutes")
    assert sorted(row.record.offset for row in all_of(spark, found)) == [0, 1, 3]


def test_route_applies_the_first_rule_and_gives_the_reason_of_dead_letters(spark: Any) -> None:
    from mqd.spark.pipelines.route import route

    mine = [{"key": "h", "value": bytearray(b"1")}]
    records = frame(
        spark,
        [
            record(0, flight("UA", 70), "k", headers=mine),
            record(1, flight("UA", 1)),
            record(2, flight("AA", 1)),
            record(3, b"no json", "d", headers=mine),
            record(4, None, "tomb"),
        ],
    )
    rules = [Rule(when="delay > 60", topic="late"), Rule(when="carrier = 'UA'", topic="united")]
    found = {row.topic: row for row in route(records, value=FLIGHT, rules=rules, dead_letters="dead").collect()}
    assert set(found) == {"late", "united", "dead"}
    assert (found["late"].key, [tuple(header) for header in found["late"].headers]) == (b"k", [("h", b"1")])
    assert json.loads(found["united"].value)["delay"] == 1
    dead = found["dead"]
    assert (dead.key, dead.value) == (b"d", b"no json")
    assert [tuple(header) for header in dead.headers] == [
        ("h", b"1"),
        ("mqd.reason", b"the value is not JSON that matches value.schema"),
        ("mqd.from", b"flights-0@3"),
    ]
    others = (
        route(records, value=FLIGHT, rules=rules, dead_letters="dead", otherwise="rest")
        .where("topic = 'rest'")
        .collect()
    )
    assert [row.value is None for row in others] == [False, True], "what no rule takes, tombstones too"


def test_a_malformed_value_stops_a_query_or_is_skipped(spark: Any) -> None:
    from mqd.spark.pipelines.running import explain_error
    from mqd.spark.pipelines.values import decode_values

    records = frame(spark, [record(0, flight("UA", 1)), record(7, b"{no", partition=3)])
    with pytest.raises(Exception, match="USER_RAISED_EXCEPTION") as error:
        decode_values(records, FLIGHT).collect()
    assert explain_error(error.value).startswith(
        "the value is not JSON that matches value.schema: flights-3, offset 7. Set value.malformed=drop"
    )
    kept = decode_values(records, Value(schema=FLIGHT.schema, malformed="drop")).collect()
    assert [row.carrier for row in kept] == ["UA"]


@pytest.mark.slow
def test_rows_of_two_streams_are_joined(spark: Any, tmp_path: Path) -> None:
    from mqd.spark.pipelines.stream_join import stream_join, with_event_time
    from mqd.spark.pipelines.values import decode_values

    orders = Value(schema="id INT, what STRING")
    left = with_event_time(
        decode_values(
            stream(spark, tmp_path / "l", [record(0, {"id": 1, "what": "a"}), record(1, {"id": 2, "what": "b"})]),
            orders,
        ),
        time="record.timestamp",
        watermark="1 minute",
    )
    right = with_event_time(
        decode_values(
            stream(
                spark,
                tmp_path / "r",
                [record(0, {"id": 1, "what": "x"}, minute=5), record(1, {"id": 2, "what": "y"}, minute=20)],
            ),
            orders,
        ),
        time="record.timestamp",
        watermark="1 minute",
    )
    found = stream_join(
        left,
        right,
        on="left.id = right.id AND right.event_time BETWEEN left.event_time AND left.event_time + INTERVAL 10 MINUTES",
        select=["left.id AS id", "right.what AS what"],
    )
    assert [tuple(row) for row in all_of(spark, found)] == [(1, "x")]


def test_table_has_the_latest_of_each_key(spark: Any) -> None:
    from mqd.spark.pipelines.table import table

    records = [
        record(0, b"a", "k1"),
        record(1, b"b", "k2", partition=1),
        record(2, b"c", "k1"),
        record(3, None, "k2", partition=1),
        record(4, b"no key"),
    ]
    assert {(bytes(row.key), row.value, row.offset) for row in table(frame(spark, records)).collect()} == {
        (b"k1", b"c", 2),
        (b"k2", None, 3),
    }


def parquet(spark: Any, archive: Archive) -> Any:
    """An archive's files read with plain Parquet."""
    return spark.read.option("basePath", archive.path).parquet(*(f"{archive.path}/{path}" for path in archive.files))


def test_an_archive_returns_its_records(spark: Any, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path / "archive"))
    header = [{"key": "h", "value": bytearray(b"\x00\xff")}, {"key": "n", "value": None}]
    first = [
        record(0, b"\x00\xffa", "k", headers=header),
        record(1, None, "gone"),
        record(5, b"", partition=1, minute=15 * 60),
    ]
    assert archiving.append(frame(spark, first), archive, "q", 0) is not None
    assert archiving.append(frame(spark, first), archive, "q", 0) is None, "a repeated batch"
    assert (
        archiving.append(frame(spark, [record(2, b"x"), record(9, b"y", partition=1, topic="t.2-x")]), archive, "q", 1)
        is not None
    )
    found = parquet(spark, Archive(str(tmp_path / "archive")))
    got = {(row.topic, row.partition, row.offset): row for row in found.collect()}
    assert {place: (row.key, row.value) for place, row in got.items()} == {
        ("flights", 0, 0): (b"k", b"\x00\xffa"),
        ("flights", 0, 1): (b"gone", None),
        ("flights", 0, 2): (None, b"x"),
        ("flights", 1, 5): (None, b""),
        ("t.2-x", 1, 9): (None, b"y"),
    }
    assert [tuple(one) for one in got["flights", 0, 0].headers] == [("h", b"\x00\xff"), ("n", None)]
    assert got["flights", 0, 1].headers is None
    assert str(got["flights", 1, 5].date) == "2026-11-22", "the day of its timestamp, in UTC"
    assert archive.ends("flights") == {0: 3, 1: 6}


@pytest.mark.slow
def test_small_files_are_merged(spark: Any, tmp_path: Path) -> None:
    archive = Archive(str(tmp_path / "archive"))
    for number in range(4):
        archiving.append(frame(spark, [record(number, f"{number}".encode())]), archive, "q", number)
    before = list(archive.files)
    compact(spark, archive, find_due(archive, 1 << 20, 4))
    assert len(archive.files) == 1
    (file,) = archive.files.values()
    assert (file.spans[0].first, file.spans[0].end, file.row_count) == (0, 4, 4)
    assert [row.offset for row in parquet(spark, archive).collect()] == [0, 1, 2, 3]
    assert all((tmp_path / "archive" / path).exists() for path in before), "somebody may still read the old ones"
    archive.vacuum(now=4e9)
    assert not any((tmp_path / "archive" / path).exists() for path in before)
    assert parquet(spark, archive).count() == 4


def test_replay_selects_by_time_and_offset_and_keeps_the_order(spark: Any, tmp_path: Path) -> None:
    from mqd.spark.pipelines.replay import replay

    archive = Archive(str(tmp_path / "archive"))
    for number in range(3):
        rows = [
            record(offset, f"{offset}".encode(), partition=partition, minute=offset)
            for partition in range(2)
            for offset in range(number * 10, number * 10 + 10)
        ]
        archiving.append(frame(spark, list(reversed(rows))), archive, "q", number)
    starting, ending = (
        (START + datetime.timedelta(minutes=5)).isoformat(),
        (START + datetime.timedelta(minutes=25)).isoformat(),
    )
    found = replay(
        spark,
        archive,
        topics=["flights"],
        to={"flights": "again"},
        starting_timestamp=starting,
        ending_timestamp=ending,
        starting_offsets={"flights": {"1": 20}},
    )
    got = [(row.topic, row.partition, int(row.value)) for row in found.collect()]
    assert [value for _, partition, value in got if partition == 0] == list(range(5, 25))
    assert [value for _, partition, value in got if partition == 1] == list(range(20, 25))
    assert {topic for topic, _, _ in got} == {"again"}
