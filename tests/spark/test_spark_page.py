"""docs/spark.md literally: its Python is run, its pipelines are run over real topics, each in the
page's order. Its shell commands are in test_pipeline_commands.py.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqd.spark.pipelines import running
from mqd.spark.pipelines.settings import KINDS, ONCE, load
from tests.broker import Broker
from tests.spark.support import delete_records, new_topic, produce, read

PAGE = Path(__file__).parents[2] / "docs" / "spark.md"
FLIGHTS = [
    {
        "tailnum": f"N{number % 7}",
        "carrier": ("UA", "AA", "B6")[number % 3],
        "origin": ("EWR", "JFK")[number % 2],
        "dep_delay": number,
        "time_hour": f"2013-01-01T{number // 20:02}:00:00Z",
    }
    for number in range(100)
]
TOPICS = {
    "flights": 2,
    "delays": 1,
    "flights-again": 2,
    "flights-unique": 1,
    "flights-dead": 1,
    "flights-other": 1,
    "flights-late": 1,
    "flights-big": 1,
    "orders": 1,
    "payments": 1,
    "paid": 1,
    "planes": 1,
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def page_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("page-broker")) as broker:
        for name, count in TOPICS.items():
            new_topic(broker, count, name)
        for partition in range(2):
            produce(
                broker,
                "flights",
                [
                    {"value": json.dumps(flight), "key": flight["tailnum"]}
                    for flight in FLIGHTS
                    if int(flight["tailnum"][1:]) % 2 == partition
                ],
                partition,
            )
        produce(broker, "flights", [{"value": "no json", "key": "broken", "headers": [("from", b"elsewhere")]}])
        produce(broker, "orders", [json.dumps({"id": number, "what": f"thing {number}"}) for number in range(5)])
        produce(broker, "payments", [json.dumps({"order_id": number, "amount": number * 1.5}) for number in (1, 3, 9)])
        yield broker


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


def run(
    spark: Any, broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch, kind: str, **changes: Any
) -> list[running.Progress]:
    """The page's pipeline of that kind, over the existing records."""
    monkeypatch.chdir(place)
    (block,) = (block for block in blocks("toml") if f'pipeline = "{kind}"' in block)
    name = re.match(r"# (\S+\.toml)\n", block)[1]
    (place / name).write_text(block)
    reported: list[running.Progress] = []
    running.run(
        spark,
        load(place / name, {"bootstrap": broker.bootstrap, "trigger": ONCE, **changes}),
        reported.append,
        threading.Event(),
    )
    return reported


def found(spark: Any, broker: Broker, topic: str) -> list[Any]:
    return read(spark, broker, topic, includeHeaders="true").orderBy("partition", "offset").collect()


def test_the_page_has_a_pipeline_of_each_kind() -> None:
    assert sorted(re.search(r'^pipeline = "(\w+)"$', block, re.M)[1] for block in blocks("toml")) == sorted(KINDS)


@pytest.mark.slow
def test_archive_replay_and_the_pages_python(
    spark: Any, page_broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (output,) = run(spark, page_broker, place, monkeypatch, "archive")
    assert (output.rows, output.behind) == (101, 0)
    assert list((place / "archive/topic=flights").glob("date=*/*.parquet"))
    run(spark, page_broker, place, monkeypatch, "replay")
    columns = ("partition", "key", "value", "timestamp", "headers")
    before, after = (
        [tuple(row[column] for column in columns) for row in found(spark, page_broker, topic)]
        for topic in ("flights", "flights-again")
    )
    assert before == after
    names: dict[str, Any] = {"spark": spark, "BOOTSTRAP": page_broker.bootstrap}
    for block in blocks("python"):
        if "archive" not in block:
            exec(compile(block, str(PAGE), "exec"), names)
    # by two tasks
    assert {(row.key, row.value) for row in found(spark, page_broker, "delays")} == {(b"UA", b"late"), (b"AA", None)}


@pytest.mark.slow
def test_aggregate(spark: Any, page_broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="USER_RAISED_EXCEPTION") as error:
        run(spark, page_broker, place, monkeypatch, "aggregate")
    assert "flights-0, offset" in running.explain_error(error.value), "the value that is no JSON, and where it is"
    output = run(
        spark,
        page_broker,
        place,
        monkeypatch,
        "aggregate",
        name="again",
        value={"schema": "origin STRING, dep_delay INT, time_hour TIMESTAMP", "malformed": "drop"},
    )
    assert output[0].rows == 101
    windows = [
        json.loads(row.value)
        for row in found(spark, page_broker, "delays")
        if row.value is not None and row.value.startswith(b"{")
    ]
    assert {(window["origin"], window["start"]): window["flights"] for window in windows} == {
        (origin, f"2013-01-01T0{hour}:00:00.000Z"): 10 for origin in ("EWR", "JFK") for hour in range(2)
    }
    assert windows[0].keys() == {"start", "end", "origin", "flights", "mean_delay", "p95_delay"}


@pytest.mark.slow  # dedup itself is tested in test_pipeline_functions.py
def test_dedup(spark: Any, page_broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(
        spark,
        page_broker,
        place,
        monkeypatch,
        "dedup",
        value={"schema": "tailnum STRING, time_hour TIMESTAMP", "malformed": "drop"},
    )
    unique = [json.loads(row.value) for row in found(spark, page_broker, "flights-unique")]
    assert len(unique) == len({(flight["tailnum"], flight["time_hour"]) for flight in FLIGHTS}) == 35


@pytest.mark.slow  # routes are tested in test_pipeline_functions.py
def test_route(spark: Any, page_broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(spark, page_broker, place, monkeypatch, "route")
    counts = {
        topic: len(found(spark, page_broker, topic)) for topic in ("flights-late", "flights-big", "flights-other")
    }
    late = sum(flight["dep_delay"] > 60 for flight in FLIGHTS)
    big = sum(flight["dep_delay"] <= 60 and flight["carrier"] in ("UA", "AA") for flight in FLIGHTS)
    assert counts == {"flights-late": late, "flights-big": big, "flights-other": 100 - late - big}
    (dead,) = found(spark, page_broker, "flights-dead")
    assert (dead.key, dead.value, [header.key for header in dead.headers]) == (
        b"broken",
        b"no json",
        ["from", "mqd.reason", "mqd.from"],
    )


@pytest.mark.slow
def test_stream_join(spark: Any, page_broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(spark, page_broker, place, monkeypatch, "stream_join")
    assert sorted((row.key, json.loads(row.value)["amount"]) for row in found(spark, page_broker, "paid")) == [
        (b"1", 1.5),
        (b"3", 4.5),
    ]


@pytest.mark.slow
def test_table(spark: Any, page_broker: Broker, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(spark, page_broker, place, monkeypatch, "table")
    latest = {row.key: row.value for row in found(spark, page_broker, "planes")}
    last = {flight["tailnum"].encode(): json.dumps(flight).encode() for flight in FLIGHTS}
    assert latest == {**last, b"broken": b"no json"}
    assert run(spark, page_broker, place, monkeypatch, "table") == [], "started again: nothing is new"


@pytest.mark.slow
def test_history_and_now(spark: Any, page_broker: Broker, place: Path) -> None:
    """At the end: the log loses the archived records."""
    (block,) = (block for block in blocks("python") if "archive" in block)
    for partition in range(2):
        delete_records(page_broker, "flights", partition, -1)
    produce(page_broker, "flights", [{"value": "one more"}])
    names: dict[str, Any] = {
        "spark": spark,
        "BOOTSTRAP": page_broker.bootstrap,
        "flights": read(spark, page_broker, "flights"),
    }
    # Spark's processes are not in this directory
    exec(compile(block.replace('"archive", "archive"', f'"archive", "{place}/archive"'), str(PAGE), "exec"), names)
    read_back = [bytes(row.value) for row in names["everything"].collect()]
    assert sorted(read_back) == sorted([*(json.dumps(flight).encode() for flight in FLIGHTS), b"no json", b"one more"])
