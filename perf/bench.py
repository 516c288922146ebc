"""One run: its brokers, its repetitions, its figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from perf import loading
from perf.accounting import CpuTime, wait_until_idle
from perf.brokers import Brokers
from perf.report import Figure

REPETITIONS = 5
CPU_WAIT_SHARE_MAX = 0.05  # the share of a measurement's time for which the reactor was ready but had no CPU
ATTEMPTS = 4
# how long one pass may wait for other programs and repeat measurements; after that, disturbed measurements count
WAIT_LIMIT_SECONDS = 90.0
WARM_MILLISECONDS = 15_000
# A whole run goes through all its cases this often. The speed of a shared machine changes over minutes, so
# repetitions one after the other would tell too small a spread, and two runs would not agree within it.
PASSES = 3


class Bench:
    """`log` shows progress. `quick`: two repetitions, for trying the bench itself. With several
    `passes`, each has half of the repetitions, and its values are added to the figures of the others.
    """

    def __init__(self, brokers: Brokers, log: Callable[[str], None], quick: bool = False, passes: int = 1) -> None:
        self.brokers = brokers
        self.quick = quick
        self.disturbed = 0  # measurements that were used although other programs disturbed them
        self.measured = 0
        self._passes = passes
        self._pass = 0
        self._figures: dict[str, Figure] = {}
        self._added: set[str] = set()  # names of figures, in this pass
        self._wait_left_s = WAIT_LIMIT_SECONDS
        self._log = log
        self._serial = 0
        self._began = time.monotonic()

    @property
    def figures(self) -> list[Figure]:
        return list(self._figures.values())

    def passes(self) -> Iterator[int]:
        """Yields 0, 1, ...; each pass has brokers of its own."""
        for number in range(self._passes):
            self._pass = number
            self._added.clear()
            self._wait_left_s = WAIT_LIMIT_SECONDS
            yield number
            self.brokers.drop_all()

    def serial(self) -> int:
        """A new number for each call, to make names unique."""
        self._serial += 1
        return self._serial

    def add(
        self,
        name: str,
        unit: str,
        values: list[float],
        target: float | None = None,
        *,
        at_least: bool = False,
        note: str = "",
    ) -> None:
        """Adds values to the figure of that name. Raises ValueError if this pass added some already."""
        if name in self._added:
            raise ValueError(f"two figures are named {name!r}")
        self._added.add(name)
        if name in self._figures:
            self._figures[name].values += values
        else:
            self._figures[name] = Figure(name, unit, list(values), target, at_least, note)

    def repeat(self, what: str, count: int = REPETITIONS) -> Iterator[int]:
        """Yields 0, 1, ... and logs the progress."""
        count = min(count, 2) if self.quick else count
        where = ""
        if self._passes > 1:
            count = (count + 1) // 2
            where = f", pass {self._pass + 1} of {self._passes}"
        for number in range(count):
            self._log(f"{time.monotonic() - self._began:4.0f} s  {what}: {number + 1} of {count}{where}")
            yield number

    def prepare(self, megabytes: int = 0) -> None:
        """Waits, for a limited time, until earlier work (deletions, writeback, other programs) has ended.
        Then touches and frees `megabytes` of memory, which the page cache will use: a virtual machine's
        host allocates a page at its first touch, and reclaims free pages after seconds. That costs up to
        five times as much as appending, and would be counted as the broker's CPU time.
        """
        began = time.monotonic()
        wait_until_idle(min(3.0, self._wait_left_s))
        self._wait_left_s = max(0.0, self._wait_left_s - (time.monotonic() - began))
        if megabytes:
            loading.run("warm", megabytes=megabytes, milliseconds=WARM_MILLISECONDS)

    def measure_undisturbed(self, measure: Callable[[], tuple[dict, CpuTime]]) -> tuple[dict, CpuTime]:
        """Repeats the measurement, at most ATTEMPTS times in all, while other programs delay the reactor.
        Returns the least disturbed result.
        """
        best: tuple[float, dict, CpuTime] | None = None
        self.measured += 1
        for attempt in range(1 if self.quick else ATTEMPTS):
            if attempt and self._wait_left_s <= 0:
                self.disturbed += 1
                break
            began = time.monotonic()
            result, spent = measure()
            if attempt:
                self._wait_left_s -= time.monotonic() - began
            share = spent.waited_ns / 1e9 / result["seconds"]
            if best is None or share < best[0]:
                best = (share, result, spent)
            if share <= CPU_WAIT_SHARE_MAX:
                break
        else:
            self.disturbed += 1
        assert best is not None
        return best[1], best[2]
