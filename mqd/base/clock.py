"""The clocks and their purposes. Sans-I/O cores never read a clock: their callers pass the time in."""

import time


def now_ms() -> int:
    """Wall clock, milliseconds since 1970: for timestamps that leave the host. May jump."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """A clock for timeouts and intervals within one process. It stops while the machine is
    suspended.
    """
    return time.monotonic_ns() // 1_000_000


def seconds_until_tick(period_s: float) -> float:
    """Seconds until the next multiple of `period_s` on the monotonic clock. Periodic tasks that
    wait for it wake an idle process once for all tasks, not once for each. Never less than a tenth
    of a period: a timer may fire a little early.
    """
    left_s = period_s - time.monotonic() % period_s
    return left_s if left_s > period_s / 10 else left_s + period_s


def boottime_ns() -> int:
    """A clock for leases: it continues while the machine is suspended, and is the same for all
    processes of the host.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
