"""The notation of the configuration properties: the meaning of a line, and invalid lines."""

import re

import pytest

from mqd.base.properties import BROKER, GROUP, TOPIC
from mqd.base.property_notation import INT_MAX, table


def test_a_line_says_the_kind_bounds_choices_and_default():
    rows = table("""
a.level: int >=-1 <=INT_MAX dynamic = 3
    How much,
    and how often.
    refused 0: that is off
a.kind: list(one|two) may_be_empty =
    Which.
a.share: double >=0.5
    Of it. Not set: all.
""")
    level = rows["a.level"]
    assert (level.kind, level.minimum, level.maximum, level.default) == ("int", -1, INT_MAX, "3")
    assert (level.doc, level.dynamic, level.refused) == ("How much, and how often.", True, {"0": "that is off"})
    assert (rows["a.kind"].choices, rows["a.kind"].default) == (("one", "two"), "")
    assert (rows["a.share"].minimum, rows["a.share"].default) == (0.5, None)


def test_a_topics_property_inherits_omitted_parts_from_the_brokers():
    broker = table("log.roll.ms: long >=1\n    When a segment is rolled.")
    rows = table("segment.ms: as log.roll.ms = 604800000\nroll.ms: as log.roll.ms\n    Rolled.", broker)
    assert (rows["segment.ms"].doc, rows["segment.ms"].default) == ("When a segment is rolled.", "604800000")
    assert (rows["roll.ms"].doc, rows["roll.ms"].default, rows["roll.ms"].minimum) == ("Rolled.", None, 1)
    assert rows["roll.ms"].broker_name == "log.roll.ms" and rows["roll.ms"].dynamic


@pytest.mark.parametrize(
    "line", ["a: integer = 1", "a int = 1", "a: int dynamics = 1", "a: int =1", "a: int = 1\na: int"]
)
def test_an_invalid_line_stops_the_import(line):
    with pytest.raises(ValueError):
        table(line)


def test_no_refused_value_is_lost_in_a_text() -> None:
    """A wrapped "refused VALUE" line would become part of the text before it, and stop refusing."""
    tables = (*BROKER.values(), *TOPIC.values(), *GROUP.values())
    texts = [text for one in tables for text in (one.doc, *one.refused.values())]
    assert [text for text in texts if re.search(r"\brefused \S+: ", text)] == []
