"""Pauses the garbage collector during work that creates hundreds of thousands of long-lived
objects: it would scan all of them repeatedly, and find nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pauses collection within this context, in which the code must not wait for anything."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
