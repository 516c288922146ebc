"""docs/kafka-tools.md is current, and the comparison behind it finds differences."""

from __future__ import annotations

import re

from tests.compat.tools.catalogue import STORIES
from tests.compat.tools.differences import ALLOWED, Allowed, Verdict
from tests.compat.tools.driver import CLASSES
from tests.compat.tools.normal import normal
from tests.compat.tools.page import PAGE, render
from tests.compat.tools.sides import Step


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "python -m tests.compat.tools --page"


def test_every_tool_has_a_story() -> None:
    told = {story.tool for story in STORIES.values()}
    beside = {"consumer-perf-test", "e2e-latency", "verifiable-consumer"}  # steps of other tools' stories
    assert told | beside == set(CLASSES), set(CLASSES) ^ (told | beside)


def test_every_difference_has_a_story() -> None:
    for entry in ALLOWED:
        assert any(re.fullmatch(entry.stories, name) for name in STORIES), entry
        assert bool(entry.part) != bool(entry.lines), entry


def step(code: int, *out: str) -> Step:
    return Step("topics", "--list", code, list(out), [])


def test_differences_are_found() -> None:
    assert Verdict("a", [step(0, "x")], [step(0, "x")], ()).unexplained == []
    assert Verdict("a", [step(0, "x")], [step(1, "x")], ()).unexplained == [
        "topics --list",
        "    - exit 0",
        "    + exit 1",
    ]
    assert Verdict("a", [step(0, "x")], [step(0)], ()).unexplained == ["topics --list", "    - out x"]
    error = "org.apache.kafka.common.errors.{}: {}"
    assert not Verdict(
        "a", [step(1, error.format("AException", "b"))], [step(1, error.format("AException", "c"))], ()
    ).unexplained
    assert Verdict(
        "a", [step(1, error.format("AException", "b"))], [step(1, error.format("BException", "b"))], ()
    ).unexplained


def test_unused_allowed_differences_are_found() -> None:
    cut, line = Allowed("r", "a", part="x=[0-9]"), Allowed("r", "a", lines="out extra.*")
    verdict = Verdict("a", [step(0, "x=1", "y")], [step(0, "x=2", "y", "extra 4")], (cut, line))
    assert not verdict.unexplained and not verdict.unused
    assert Verdict("a", [step(0, "y")], [step(0, "y")], (cut, line)).unused == [cut, line]
    assert Verdict("b", [step(0, "y")], [step(0, "y", "extra")], (cut, line)).unexplained


def test_parts_that_are_not_compared() -> None:
    text = "at 127.0.0.1:9092\n\tat java.lang.Thread\n\nIsr: 3,1   Elr:\n5 of 7.5"
    assert normal(text, {"127.0.0.1:9092": "BROKER1"}) == ["at BROKER1", "Isr: 1,3 Elr:", "5 of 7.5"]
    assert normal(text, {}, shape=True) == ["at ADDRESS", "Isr: N,N Elr:", "N of N"]
