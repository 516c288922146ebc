"""What a process takes its messages by: if it fails once, what came with the message is lost, and
nobody may wake the process again. So the process ends, and its successor begins anew.
"""

import functools
import os
from collections.abc import Callable
from typing import ParamSpec

from mqd.base import logging

P = ParamSpec("P")


def vital(work: Callable[P, None]) -> Callable[P, None]:
    """A callback of the event loop that ends the process (status 1) instead of raising."""

    @functools.wraps(work)
    def guarded(*arguments: P.args, **named: P.kwargs) -> None:
        try:
            work(*arguments, **named)
        except Exception:
            logging.get("vital").exception(
                "what this process takes its messages by has failed: the process ends, so that another one takes its"
                " place",
                what=work.__qualname__,
            )
            os._exit(1)

    return guarded
