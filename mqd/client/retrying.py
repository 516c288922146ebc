"""When the core of a group member repeats a request, and after which errors of a coordinator."""

from __future__ import annotations

from mqd.protocol.errors import ErrorCode

BACKOFF_FIRST_MS, BACKOFF_MAX_MS = 100, 1_000
COORDINATOR_MOVED = frozenset({ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR})
# the same request may succeed later, perhaps at another host
COORDINATOR_RETRIED = COORDINATOR_MOVED | {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NETWORK_EXCEPTION,
    ErrorCode.REQUEST_TIMED_OUT,
}


def backoff_ms(failures: int) -> int:
    """How long to wait after `failures` failures, at least one, in a row."""
    return min(BACKOFF_MAX_MS, BACKOFF_FIRST_MS << min(failures - 1, 10))
