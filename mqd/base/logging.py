"""Structured log lines: human-readable or JSON, rate-limited, with a level that can be changed at
run time.

    log = mqd.base.logging.get("acceptor")
    log.warning("request refused", connection=17, client="billing", reason="too large")

1. The message is a constant and its variable parts are fields; lines are counted by message. At
   most BURST lines of one message are written in a burst, and RATE_PER_S per second after that; the
   next line that is written gives the number of suppressed lines (`suppressed`).
2. Fields may hold data from a peer: control characters are escaped, so that it cannot forge a line.
3. The level comes from the function given to `follow`, which in a broker reads a word of the
   control segment. It is called for every line (a few hundred nanoseconds), so a change takes effect
   immediately.

Thread-safe, like the standard library's logging, on which it is built. Imports no module of mqd.
"""

import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

LEVELS = {"error": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
SYSLOG_OF_LEVEL = {"error": 3, "warning": 4, "info": 6, "debug": 7}
LEVEL_OF_SYSLOG = {number: name for name, number in SYSLOG_OF_LEVEL.items()}

BURST = 20
RATE_PER_S = 2.0
# the number of messages that are tracked; beyond it the least recently used one is dropped
MESSAGE_COUNT_MAX = 512


def level_name(syslog: int) -> str:
    """Returns the nearest of our four levels: 0-3 error, 4 warning, 5-6 info, 7 debug."""
    return LEVEL_OF_SYSLOG[3 if syslog <= 3 else 4 if syslog == 4 else 6 if syslog <= 6 else 7]


class RateLimit:
    """Token buckets by message. `admit` returns -1 if the line is to be suppressed, else the number
    of lines suppressed since the last one that was written.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, burst: int = BURST, rate_per_s: float = RATE_PER_S):
        self._clock, self._burst, self._rate = clock, float(burst), rate_per_s
        self._buckets: dict[Any, list[float]] = {}  # key -> [tokens, time, suppressed]

    def admit(self, key: Any) -> int:
        now = self._clock()
        bucket = self._buckets.pop(key, None) or [self._burst, now, 0]
        self._buckets[key] = bucket  # moved to the end: the order is by last use
        if len(self._buckets) > MESSAGE_COUNT_MAX:
            # No lock, because a signal handler or a forked child could find it held. So another
            # thread may have removed the same bucket.
            self._buckets.pop(list(self._buckets)[0], None)
        bucket[0] = min(self._burst, bucket[0] + (now - bucket[1]) * self._rate)
        bucket[1] = now
        if bucket[0] < 1.0:
            bucket[2] += 1
            return -1
        bucket[0] -= 1.0
        suppressed, bucket[2] = int(bucket[2]), 0
        return suppressed


class _State:
    level_source: Callable[[], int] | None = None
    syslog_level: int = -1
    limit = RateLimit()


_state = _State()
_root = logging.getLogger("mqd")


def _apply_level(syslog_level: int) -> None:
    _state.syslog_level = syslog_level
    level = LEVELS[level_name(syslog_level)]
    _root.setLevel(level)
    # third-party libraries: their debug lines are not needed
    logging.getLogger().setLevel(max(level, logging.INFO))


class Logger:
    """`bind` returns a logger that adds its fields to every line."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: dict[str, Any]):
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: Any) -> "Logger":
        return Logger(self._logger, {**self._fields, **fields})

    def is_enabled(self, level: int) -> bool:
        source = _state.level_source
        if source is not None and (syslog_level := source()) != _state.syslog_level:
            _apply_level(syslog_level)
        return self._logger.isEnabledFor(level)

    def log(self, level: int, message: str, fields: dict[str, Any], exc_info: Any = None) -> None:
        if not self.is_enabled(level):
            return
        suppressed = _state.limit.admit((level, message))
        if suppressed < 0:
            return
        merged = {**self._fields, **fields}
        if suppressed:
            merged["suppressed"] = suppressed
        self._logger.log(level, "%s", message, extra={"mqd_fields": merged}, exc_info=exc_info)

    def debug(self, message: str, /, **fields: Any) -> None:
        self.log(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: Any) -> None:
        self.log(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: Any) -> None:
        self.log(logging.WARNING, message, fields)

    def error(self, message: str, /, **fields: Any) -> None:
        self.log(logging.ERROR, message, fields)

    def exception(self, message: str, /, **fields: Any) -> None:
        """Logs an error with the traceback of the current exception."""
        self.log(logging.ERROR, message, fields, exc_info=sys.exc_info())

    def syslog(self, level: int, message: str, /, **fields: Any) -> None:
        """Logs a line from the native reactor, with a syslog level."""
        self.log(LEVELS[level_name(level)], message, fields)


def _printable(value: Any) -> str:
    text = value if isinstance(value, str) else f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not any(mark in text for mark in ' "=\\'):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)[1:-1]


class HumanFormatter(logging.Formatter):
    """2026-01-31 12:00:00.123 WARNING worker-0 request refused  connection=17 client=billing"""

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        message = _one_line(record.getMessage())
        line = f"{timestamp}.{int(record.msecs):03d} {record.levelname:<7} {self._process} {message}"
        fields = getattr(record, "mqd_fields", None)
        if fields:
            line += "  " + " ".join(f"{name}={_printable(value)}" for name, value in fields.items())
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, process, pid, logger, message and the fields (a field
    with one of these names gets a trailing underscore).
    """

    def __init__(self, process: str):
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{timestamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in (getattr(record, "mqd_fields", None) or {}).items():
            line[f"{name}_" if name in line else name] = value
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def get(name: str, **fields: Any) -> Logger:
    """A logger below "mqd"; `fields` are added to each of its lines."""
    return Logger(logging.getLogger(f"mqd.{name}"), fields)


def _stderr() -> Any:
    """A stderr that writes whole lines. Python's own, when unbuffered (PYTHONUNBUFFERED, as in many
    images), drops the rest of a line if a pipe accepts only a part of it, which happens when the
    process is stopped and continued while it waits.
    """
    if isinstance(getattr(sys.stderr, "buffer", None), io.RawIOBase):
        return open(sys.stderr.fileno(), "w", encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False)
    return sys.stderr


def setup(role: str, index: int = 0, config: Mapping[str, str] | None = None, stream: Any = None) -> Logger:
    """Call this once per process before anything else, and again when the configuration is known.
    Lines go to stderr, which supervisord writes to logs/.
    """
    config = config or {}
    process = f"{role}-{index}" if role == "worker" else role
    handler = logging.StreamHandler(stream or _stderr())
    handler.setFormatter(JsonFormatter(process) if config.get("logging.format") == "json" else HumanFormatter(process))
    logging.getLogger().handlers[:] = [handler]
    logging.raiseExceptions = False  # a full disk under logs/ must not end the process
    if _state.level_source is None:
        _apply_level(SYSLOG_OF_LEVEL.get(config.get("logging.level", "info"), 6))
    return get(role)


def follow(source: Callable[[], int] | None) -> None:
    """Makes `source` determine the level (a syslog number) of every later line. None: the level
    stays as it is.
    """
    _state.level_source = source
    if source is not None:
        _apply_level(source())
