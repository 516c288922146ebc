"""The base of every simulated cluster: one seed, one queue of events in true time, processes that
die and stall, clocks that drift, links that lose.

Invariants
    K1  everything random comes from Kernel.random, everything happens in the order (true time,
        order of scheduling): the same seed gives the same run
    K2  an event of a dead process is dropped, and not given to its successor; an event of a stopped
        process is handled when it continues, in order
    K3  a message is delivered to the process to which it was sent (the connection ends with either
        end), late, twice or never, depending on the link

Times are microseconds of true time, integers; a host sees them through its Clock (nanoseconds, as
CLOCK_BOOTTIME). Story: every event adds one tuple of plain values, so that a run can be hashed and
printed; tuples are only formatted when printed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

MILLISECOND = 1_000
SECOND = 1_000_000


class Violation(AssertionError):
    """An invariant does not hold. `name`: the invariant's, as in the design page ("P2")."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


class Process:
    """A restarted process is another Process."""

    __slots__ = ("name", "alive", "stopped", "backlog")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def die(self) -> None:
        self.alive = False
        self.backlog = []


class Timer:
    """An event scheduled in a process, which can be cancelled before it is due."""

    __slots__ = ("_owner", "_on")

    def __init__(self, owner: Process) -> None:
        self._owner = owner
        self._on = True

    @property
    def alive(self) -> bool:
        return self._on and self._owner.alive

    @property
    def stopped(self) -> bool:
        return self._owner.stopped

    @property
    def backlog(self) -> list[tuple[Callable[..., None], tuple[Any, ...]]]:
        return self._owner.backlog

    def cancel(self) -> None:
        self._on = False


class Kernel:
    def __init__(self, seed: int | str) -> None:
        self.random = Random(seed)
        self.now = 0
        self.steps = 0
        self.history: list[tuple[Any, ...]] = []
        self.after_each: Callable[[], None] | None = None
        self._queue: list[tuple[int, int, Process | Timer | None, Callable[..., None], tuple[Any, ...]]] = []
        self._order = self._backlog_order = 0

    def after(self, delay: int, process: Process | None, do: Callable[..., None], *arguments: Any) -> None:
        """Calls `do` after `delay`, if `process` (None = the world) is still alive then."""
        self._order += 1
        heappush(self._queue, (self.now + delay, self._order, process, do, arguments))

    def timer(self, delay: int, owner: Process, do: Callable[..., None], *arguments: Any) -> Timer:
        """Like after(), and it can be cancelled. If the owner was stopped when the timer was due,
        the caller must check itself whether it is still wanted.
        """
        timer = Timer(owner)
        self._order += 1
        heappush(self._queue, (self.now + delay, self._order, timer, do, arguments))
        return timer

    def report(self, *what: Any) -> None:
        self.history.append((self.now, *what))

    def run(self, steps: int = 1 << 60, until: int = 1 << 60) -> None:
        """Runs at most this many events, none after `until`; the clock is at `until` if nothing
        more is due.
        """
        queue, check = self._queue, self.after_each
        last = self.steps + steps
        while self.steps < last and queue and queue[0][0] <= until:
            self.now, _, process, do, arguments = heappop(queue)
            if process is not None:
                if not process.alive:
                    continue
                if process.stopped:
                    process.backlog.append((do, arguments))
                    continue
            self.steps += 1
            do(*arguments)
            if check is not None:
                check()
        if self.steps < last and until < 1 << 60:
            self.now = until

    def go_on(self, process: Process) -> None:
        process.stopped = False
        backlog, process.backlog = process.backlog, []
        self._backlog_order -= len(backlog)  # before events due at this very moment
        for order, (do, arguments) in enumerate(backlog, self._backlog_order):
            heappush(self._queue, (self.now, order, process, do, arguments))

    def trace_hash(self) -> str:
        """A hash of the whole story. Story tuples contain plain values in fixed order, so
        PYTHONHASHSEED does not affect it.
        """
        digest = hashlib.blake2b(digest_size=16)
        for entry in self.history:
            digest.update(repr(entry).encode())
        return digest.hexdigest()


class Clock:
    """CLOCK_BOOTTIME of one host: its own offset, faster or slower by `drift` (0.001 = 1 ms each
    second). It never steps; the wall clock does.
    """

    __slots__ = ("_kernel", "_base_true", "_base_local", "rate", "wall_offset_ms")

    def __init__(self, kernel: Kernel, drift: float) -> None:
        self._kernel = kernel
        self._base_true = kernel.now
        self._base_local = kernel.random.randrange(1, 10**6) * 10**9
        self.rate = 1 + drift
        self.wall_offset_ms = 1_700_000_000_000

    def now(self) -> int:
        """Nanoseconds."""
        return self._base_local + int((self._kernel.now - self._base_true) * 1_000 * self.rate)

    def now_ms(self) -> int:
        return self.now() // 1_000_000

    def wall_ms(self) -> int:
        return self.wall_offset_ms + self._kernel.now // 1_000

    def true_delay(self, local_ns: int) -> int:
        """Microseconds of true time, rounded up, until this clock has advanced by this many
        nanoseconds (for a stopped clock: as if it ran).
        """
        return max(0, int(local_ns / (1_000 * (self.rate or 1))) + 1)

    def set_drift(self, drift: float) -> None:
        self._base_local, self._base_true = self.now(), self._kernel.now
        self.rate = 1 + drift

    def stand_still(self, duration: int) -> None:
        """A virtual machine that is paused with its clock: no process in it may run meanwhile. It
        does not catch up.
        """
        rate = self.rate
        if rate:
            self.set_drift(-1)
            self._kernel.after(duration, None, self.set_drift, rate - 1)


class Link:
    """One direction between two hosts."""

    __slots__ = ("cut", "loss", "double", "delay_min", "delay_max", "late", "late_max")

    def __init__(self) -> None:
        self.cut = False
        self.loss = 0.0
        self.double = 0.0  # share of messages that arrive twice
        self.delay_min, self.delay_max = 100, 1_500
        self.late = 0.0  # share that is delayed by up to late_max: overtaken by everything
        self.late_max = 5 * SECOND


class Network:
    """Hosts 0..count-1, `links[a][b]` from a to b. Within a host nothing is lost."""

    def __init__(self, kernel: Kernel, count: int) -> None:
        self._kernel = kernel
        self.count = count
        self.links = [[Link() for _ in range(count)] for _ in range(count)]

    def send(self, source: int, target: int, process: Process | None, do: Callable[..., None], *arguments: Any) -> None:
        """process: the receiver, None = no process listens (the connection is refused)."""
        kernel = self._kernel
        if process is None:
            return
        if source == target:
            kernel.after(30, process, do, *arguments)
            return
        link = self.links[source][target]
        draw = kernel.random.random
        if link.cut or (link.loss and draw() < link.loss):
            return
        copies = 2 if link.double and draw() < link.double else 1
        for _ in range(copies):
            delay = link.delay_min + int(draw() * (link.delay_max - link.delay_min))
            if link.late and draw() < link.late:
                delay += int(draw() * link.late_max)
            kernel.after(delay, process, self._arrive, link, process, do, arguments)

    def _arrive(self, link: Link, process: Process, do: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not link.cut:
            do(*arguments)

    def heal(self) -> None:
        for row in self.links:
            for link in row:
                link.cut = False
                link.loss = link.double = link.late = 0.0
                link.delay_min, link.delay_max = 100, 1_500
