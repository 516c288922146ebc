"""The garbage collector, kept away from work that makes hundreds of thousands of objects that stay:
it would look at all of them again and again, and find nothing.
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
