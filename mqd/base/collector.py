"""Pauses the garbage collector during work that creates hundreds of thousands of long-lived
objects: it would scan all of them repeatedly, and find nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """For code that does not wait for anything."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
