"""The clocks, each by what it is good for. Cores never read them: their shells do, and pass the
time in.
"""

import time


def now_ms() -> int:
    """Wall clock, milliseconds since 1970: for timestamps that leave the host. May jump."""
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """For time-outs and intervals within one process. Stands still while the machine sleeps."""
    return time.monotonic_ns() // 1_000_000


def boottime_ns() -> int:
    """For leases: goes on while the machine sleeps, and is the same for all processes of the host."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)
