"""docs/kafka-tools.md, from the stories and the table of differences."""

from __future__ import annotations

import textwrap
from pathlib import Path

from tests.compat.tools.catalogue import STORIES
from tests.compat.tools.differences import reasons

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kafka-tools.md"
HEAD = """# Apache Kafka's command line tools

Every tool of Apache Kafka 4.2.0 that connects to a broker or reads its files is run against mqd and
against Apache Kafka 4.2.0, in the same scenarios: the usual steps, invalid arguments and missing
objects, on one broker or, where the scenario says so, on three. Exit codes and output are compared
line by line, ignoring addresses, ids, times and measured numbers. If a message comes with an error
code, only the code is compared. `same` means that nothing else differs.

This page is written by `python -m tests.compat.tools --page`; `tests/compat/tools` checks it
against both brokers.

| tool | scenario | result |
| --- | --- | --- |
"""


def render() -> str:
    numbers: dict[str, int] = {}
    rows = []
    for story in sorted(STORIES.values(), key=lambda story: (story.tool, story.brokers)):
        found = [numbers.setdefault(reason, len(numbers) + 1) for reason in reasons(story.name)]
        result = f"differs: {', '.join(map(str, sorted(found)))}" if found else "same"
        rows.append(f"| `kafka-{story.tool}` | {story.title} | {result} |")
    notes = [
        textwrap.fill(
            f"{number}. {reason}.", 100, subsequent_indent=" " * (len(str(number)) + 2), break_on_hyphens=False
        )
        for reason, number in numbers.items()
    ]
    return HEAD + "\n".join(rows) + "\n\n## What differs, and why\n\n" + "\n".join(notes) + "\n"
