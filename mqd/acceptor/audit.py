"""logs/audit.log: who was denied what, and who changed rules and users. One JSON object a line.

A denial is written once for each principal, address, operation and resource in WINDOW_S; the next
line for it has the number of those in between. Bounds: DENIALS_MAX different denials in
WINDOW_S; of further ones only the number is written. The file is renamed to audit.log.1 at
SIZE_BYTES_MAX, and KEPT of those stay.
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
        self._swept_s = 0.0  # when room was last made
        self._beyond = 0  # denials since then that no line is written for

    def denied(
        self, principal: str, host: str, operation: int, resource_type: int, name: str, only_logged: bool
    ) -> None:
        now = self._clock()
        key = (principal, host, operation, resource_type, name)
        known = self._denials.get(key)
        if known is not None and now - known[0] < WINDOW_S:
            known[1] += 1
            return
        if known is None and len(self._denials) >= DENIALS_MAX and not self._sweep(now):
            self._beyond += 1
            return
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

    def _sweep(self, now: float) -> bool:
        """Makes room; returns whether there is some. Once in a window: a flood of names must cost no
        more than a dictionary's look-up for each.
        """
        if now - self._swept_s < WINDOW_S:
            return False
        self._swept_s = now
        self._denials = {key: one for key, one in self._denials.items() if now - one[0] < WINDOW_S}
        if self._beyond:
            self.write("denied", further=self._beyond)
            self._beyond = 0
        return len(self._denials) < DENIALS_MAX

    def write(self, event: str, **fields: object) -> None:
        """A disk that refuses does not stop the broker; logging reports it on stderr."""
        if self._handler is None:
            return
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._clock()))
        line = json.dumps({"time": f"{stamp}Z", "event": event, **fields}, ensure_ascii=True)
        self._handler.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, (), None))
