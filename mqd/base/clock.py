"""The clocks and their purposes. Cores never read them: their shells do, and pass the time in."""

import time


def now_ms() -> int:
    """Wall clock, milliseconds since 1970: for timestamps that leave the host. May jump."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """For timeouts and intervals within one process. Stops while the machine is suspended."""
    return time.monotonic_ns() // 1_000_000


def boottime_ns() -> int:
    """For leases: continues while the machine is suspended, and is the same for all processes of
    the host.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
