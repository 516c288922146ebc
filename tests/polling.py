"""Waiting for another process or thread when there is no event to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# far longer than needed on a busy machine; shorter than the time limit of a test (pyproject.toml)
PATIENCE_S = 60.0
PAUSE_S = 0.02
T = TypeVar("T")


def eventually(
    look: Callable[[], T], what: str | Callable[[], str] = "", seconds: float = PATIENCE_S, pause_s: float = PAUSE_S
) -> T:
    """Polls `look` until it is true; returns its value. Raises AssertionError with `what` after
    `seconds`, but never before one last look.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_over = time.monotonic() > deadline
        if seen := look():
            return seen
        assert not is_over, f"not within {seconds:.0f} s: {what() if callable(what) else what}"
        time.sleep(pause_s)
