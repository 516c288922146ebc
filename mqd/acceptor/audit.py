"""logs/audit.log: who was denied what, and who changed rules and users. One JSON object a line.

A denial is written once for each principal, address, operation and resource in WINDOW_S; the next
line for it has the number of those in between. Bounds: DENIALS_MAX of them are counted, beyond that
each one is written; the file is renamed to audit.log.1 at SIZE_BYTES_MAX, and KEPT of those stay.
"""

import json
import logging
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path

from mqd.security.acl import Operation, ResourceType, name_of

WINDOW_S = 10.0
DENIALS_MAX = 10_000
SIZE_BYTES_MAX, KEPT = 64 << 20, 4


class Audit:
    """`path` None: nothing is written."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._handler: RotatingFileHandler | None = None
        if path is not None:
            self._handler = RotatingFileHandler(path, maxBytes=SIZE_BYTES_MAX, backupCount=KEPT, encoding="utf-8")
        # (principal, host, operation, type, name) -> [time of the last line, denials since]
        self._denials: dict[tuple[str, str, int, int, str], list[float]] = {}

    def denied(
        self, principal: str, host: str, operation: int, resource_type: int, name: str, only_logged: bool
    ) -> None:
        now = self._clock()
        key = (principal, host, operation, resource_type, name)
        known = self._denials.get(key)
        if known is not None and now - known[0] < WINDOW_S:
            known[1] += 1
            return
        if len(self._denials) >= DENIALS_MAX:
            self._denials = {key: one for key, one in self._denials.items() if now - one[0] < WINDOW_S}
        if known is not None or len(self._denials) < DENIALS_MAX:
            self._denials[key] = [now, 0]
        self.write(
            "denied, but done: authorizer.log.only" if only_logged else "denied",
            principal=principal,
            host=host,
            operation=name_of(Operation, operation),
            resource_type=name_of(ResourceType, resource_type),
            resource=name,
            **({"before": int(known[1])} if known is not None and known[1] else {}),
        )

    def write(self, event: str, **fields: object) -> None:
        """A disk that refuses does not stop the broker; logging reports it on stderr."""
        if self._handler is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._clock()))
        line = json.dumps({"time": f"{stamp}Z", "event": event, **fields}, ensure_ascii=True)
        self._handler.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, (), None))
