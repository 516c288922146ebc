"""The kernel's own accounting: CPU time of processes and threads, memory, the machine.

A process's CPU time is its CPU clock (clock_getcpuclockid(3): nanoseconds, threads that have ended
included; io_uring's kernel workers are threads of the process too). A thread's is the first field
of /proc/PID/task/TID/schedstat, and the second is the time it was runnable but did not run: other
programs raise the second, and change CPU time only by colder caches.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable
from pathlib import Path

_CPUCLOCK_SCHED = 2  # linux/posix-timers.h: the most precise of a process's three CPU clocks


@dataclasses.dataclass(frozen=True)
class CpuTime:
    """CPU time of some processes: of all threads, and of the reactor threads alone (time run, time
    runnable but waiting).
    """

    run_ns: int = 0
    reactor_ns: int = 0
    waited_ns: int = 0

    def __sub__(self, before: CpuTime) -> CpuTime:
        return CpuTime(
            self.run_ns - before.run_ns, self.reactor_ns - before.reactor_ns, self.waited_ns - before.waited_ns
        )

    @property
    def run_us(self) -> float:
        return self.run_ns / 1e3


def process_clock(pid: int) -> int:
    """The clock id of a process's CPU time, for time.clock_gettime_ns."""
    return (~pid << 3) | _CPUCLOCK_SCHED


def cpu_time(pids: Iterable[int], thread_prefix: str = "mqd-reactor") -> CpuTime:
    """CPU time of these processes. Raises OSError when one of them is gone."""
    run = reactor = waited = 0
    for pid in pids:
        run += time.clock_gettime_ns(process_clock(pid))
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                if (task / "comm").read_text().startswith(thread_prefix):
                    ran, wait, _ = (task / "schedstat").read_text().split()
                    reactor += int(ran)
                    waited += int(wait)
            except OSError:
                continue  # it ended after it was listed
    return CpuTime(run, reactor, waited)


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size: shared pages are divided among those that map them."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _idle_ticks() -> tuple[int, int]:
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def busy_share(seconds: float) -> float:
    """The share of all CPUs in use, 0 to 1, measured for `seconds`."""
    idle, total = _idle_ticks()
    time.sleep(seconds)
    idle_after, total_after = _idle_ticks()
    return 1 - (idle_after - idle) / max(total_after - total, 1)


def wait_until_idle(limit_seconds: float, busy_max: float = 0.08) -> float:
    """Waits until no other program uses the CPUs, `limit_seconds` at most. Returns the last busy share."""
    deadline = time.monotonic() + limit_seconds
    while (busy := busy_share(0.2)) > busy_max and time.monotonic() < deadline:
        pass
    return busy


def machine() -> dict[str, object]:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control")
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": os.uname().release,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "tcp_congestion_control": congestion.read_text().strip() if congestion.exists() else "unknown",
    }
