"""The kernel's own accounting: CPU time of processes and threads, memory, the machine.

A process's CPU time is its CPU clock (clock_getcpuclockid(3): nanoseconds, threads that have ended
included; io_uring's kernel workers are threads of the process too). User and system time are
/proc/PID/stat's utime and stime, in ticks of 10 ms. Their sum is exact, but most kernels estimate
the shares from what a clock tick interrupts. A thread's CPU time is the first field of
/proc/PID/task/TID/schedstat, and the second is the time it was runnable but did not run: other
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
    runnable but waiting); and of all threads in user mode and in the kernel.
    """

    run_ns: int = 0
    reactor_ns: int = 0
    waited_ns: int = 0
    user_ns: int = 0
    system_ns: int = 0

    def __sub__(self, before: CpuTime) -> CpuTime:
        return CpuTime(
            self.run_ns - before.run_ns,
            self.reactor_ns - before.reactor_ns,
            self.waited_ns - before.waited_ns,
            self.user_ns - before.user_ns,
            self.system_ns - before.system_ns,
        )

    @property
    def kernel_percent(self) -> float:
        """The share of CPU time in the kernel; 0 when less than a tick was used."""
        return 100 * self.system_ns / max(self.user_ns + self.system_ns, 1)

    @property
    def run_us(self) -> float:
        return self.run_ns / 1e3


def process_clock(pid: int) -> int:
    """The clock id of a process's CPU time, for time.clock_gettime_ns."""
    return (~pid << 3) | _CPUCLOCK_SCHED


def user_system_ns(pid: int) -> tuple[int, int]:
    """CPU time of all threads, in user mode and in the kernel. Raises OSError when the process is gone."""
    # the name, in parentheses, may have spaces and parentheses; the third field follows it
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return int(fields[11]) * tick_ns, int(fields[12]) * tick_ns


def cpu_time(pids: Iterable[int], thread_prefix: str = "mqd-reactor") -> CpuTime:
    """CPU time of these processes. Raises OSError when one of them is gone."""
    run = reactor = waited = user = system = 0
    for pid in pids:
        run += time.clock_gettime_ns(process_clock(pid))
        in_user, in_kernel = user_system_ns(pid)
        user += in_user
        system += in_kernel
        for task in Path(f"/proc/{pid}/task").iterdir():
            try:
                if (task / "comm").read_text().startswith(thread_prefix):
                    ran, wait, _ = (task / "schedstat").read_text().split()
                    reactor += int(ran)
                    waited += int(wait)
            except OSError:
                continue  # it ended after it was listed
    return CpuTime(run, reactor, waited, user, system)


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
