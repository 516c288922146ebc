"""Settings of pipelines: what a file may contain, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqd.spark.pipelines.settings import KINDS, Aggregate, Route, SettingsError, load

ROUTE = """
pipeline = "route"
dead_letters = "flights.dead"
[source]
topics = ["flights"]
[value]
schema = "carrier STRING"
[[rules]]
when = "carrier = 'UA'"
topic = "united"
"""


def write(folder: Path, text: str, name: str = "delays.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_becomes_its_pipeline(tmp_path: Path) -> None:
    pipeline = load(write(tmp_path, ROUTE), {"bootstrap": "h:1", "master": None})
    assert isinstance(pipeline, Route)
    assert (pipeline.name, pipeline.bootstrap, pipeline.master, pipeline.rules[0].topic) == (
        "delays",
        "h:1",
        "local[*]",
        "united",
    )


def test_every_kind_has_its_own_tag() -> None:
    assert sorted(KINDS) == ["aggregate", "archive", "dedup", "replay", "route", "stream_join", "table"]


AGGREGATE = 'pipeline = "aggregate"\nwindow = "1 hour"\nwatermark = "1 hour"\n[value]\nschema = "a INT"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pipeline = 'rout'", "pipeline is 'rout'; it must be one of archive, "),
        ("pipeline", "not TOML"),
        (ROUTE.replace('topics = ["flights"]', ""), "[source] set either `topics` or `pattern`"),
        (ROUTE.replace('topics = ["flights"]', 'topics = ["flights"]\npattern = "f.*"'), "[source] set either"),
        (ROUTE.replace('topics = ["flights"]', "topics = [7]"), "Expected `str`, got `int` - at `$.source.topics[0]`"),
        (ROUTE.replace("dead_letters", "dead_leters"), "dead_leters"),
        (
            AGGREGATE + '[source]\ntopics=["t"]\n[sink]\ntopic = "x"\npath = "y"\n[measures]\nn = "count(*)"',
            "[sink] set either `topic` or `path`",
        ),
        (AGGREGATE + '[source]\ntopics=["t"]\n[sink]\ntopic = "x"\n[measures]\n', "measures is empty"),
    ],
)
def test_errors_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(SettingsError) as error:
        load(write(tmp_path, text))
    assert words in str(error.value)
    assert str(tmp_path / "delays.toml") in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no such file; the pipelines are archive"):
        load(tmp_path / "none.toml")


def test_measures_keep_their_order(tmp_path: Path) -> None:
    pipeline = load(
        write(
            tmp_path,
            AGGREGATE + '[source]\ntopics=["t"]\n[sink]\ntopic = "x"\n[measures]\nz = "count(*)"\na = "max(a)"',
        )
    )
    assert isinstance(pipeline, Aggregate)
    assert list(pipeline.measures) == ["z", "a"]


def test_options_override_the_file_and_the_file_the_environment(tmp_path: Path) -> None:
    bare, named = tmp_path / "bare.toml", tmp_path / "named.toml"
    bare.write_text('pipeline = "table"\nchangelog = "t"\n[source]\ntopics = ["a"]\n')
    named.write_text('bootstrap = "file:1"\n' + bare.read_text())
    assert load(bare).bootstrap == "127.0.0.1:9092"
    assert load(bare, {"bootstrap": None}, {"bootstrap": "environment:1"}).bootstrap == "environment:1"
    assert load(named, {"bootstrap": None}, {"bootstrap": "environment:1"}).bootstrap == "file:1"
    assert load(named, {"bootstrap": "command:1"}, {"bootstrap": "environment:1"}).bootstrap == "command:1"
