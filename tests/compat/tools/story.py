"""A story: steps with one tool, run once on each side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tests.compat.tools.sides import Side


@dataclasses.dataclass(frozen=True)
class Story:
    tool: str
    title: str
    brokers: int
    tell: Callable[[Side], None]

    @property
    def name(self) -> str:
        return f"{self.tool}: {self.title}"


STORIES: dict[str, Story] = {}


def story(tool: str, title: str, brokers: int = 1) -> Callable[[Callable[[Side], None]], Callable[[Side], None]]:
    """Registers a story. `tool` is the script's name without kafka- and .sh; names are unique."""

    def register(tell: Callable[[Side], None]) -> Callable[[Side], None]:
        made = Story(tool, title, brokers, tell)
        assert made.name not in STORIES, f"two stories are called {made.name}"
        STORIES[made.name] = made
        return tell

    return register
