"""Ends the process, so that it is restarted, when a callback that receives messages raises. The
message is lost in that case, and without a restart possibly no event would wake the process again.
"""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec

from mqd.base import logging

P = ParamSpec("P")


def crash_on_error(work: Callable[P, None]) -> Callable[P, None]:
    """Wraps a callback of the event loop: instead of raising, it ends the process (status 1)."""

    @functools.wraps(work)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            work(*arguments, **named)
        except Exception:
            logging.get("crash_on_error").exception(
                "a callback that receives messages has failed: the process ends and is restarted",
                what=work.__qualname__,
            )
            os._exit(1)

    return guarded
