"""For the callbacks by which a process receives messages. If one fails, its message is lost, and
possibly no other event wakes the process again. So the process ends and is restarted.
"""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec

from mqd.base import logging

P = ParamSpec("P")


def vital(work: Callable[P, None]) -> Callable[P, None]:
    """Wraps a callback of the event loop: instead of raising, it ends the process (status 1)."""

    @functools.wraps(work)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            work(*arguments, **named)
        except Exception:
            logging.get("vital").exception(
                "a callback that receives messages has failed: the process ends and is restarted",
                what=work.__qualname__,
            )
            os._exit(1)

    return guarded
