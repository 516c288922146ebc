"""A stdout whose reader has stopped, like that of `mqd ... | head`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes the reading end of stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(os.devnull, "w") as nowhere, open(writer, "w") as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        try:
            yield
        finally:
            os.dup2(nowhere.fileno(), writer)  # for the rest of `out`
