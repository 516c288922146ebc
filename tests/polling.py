"""Waiting for what another process or thread does, where nothing tells when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

# far more than it takes on a busy machine; less than a test may take (pyproject.toml)
PATIENCE_S = 60.0
PAUSE_S = 0.02
T = TypeVar("T")


def eventually(look: Callable[[], T], what: str | Callable[[], str] = "", seconds: float = PATIENCE_S) -> T:
    """Polls `look` until it is true; returns its value. Raises AssertionError with `what` was awaited
    after so many seconds, and never before a last look.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_over = time.monotonic() > deadline
        if seen := look():
            return seen
        assert not is_over, f"not within {seconds:.0f} s: {what() if callable(what) else what}"
        time.sleep(PAUSE_S)
