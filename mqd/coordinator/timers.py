"""Named timers of many state machines (cores) in one heap. Sans-I/O: the owner asks when the next
timer is due, and takes the timers that are due.

Moving a timer to a later time is the usual case (every heartbeat does it) and costs no heap
operation: when the old entry pops, it is pushed again with the new time. Bound: twice as many
entries as armed timers, plus HEAP_SLACK. Disarmed and superseded entries are purged when they
outnumber the others: clients choose the times, so these entries might otherwise stay for weeks.
"""

import heapq

TimerName = tuple[str, str]  # (core, timer)
HEAP_SLACK = 64


class Timers:
    def __init__(self) -> None:
        self._due_ms: dict[TimerName, int] = {}
        self._entry_ms: dict[TimerName, int] = {}  # when the heap entry pops; never later than the due time
        self._heap: list[tuple[int, TimerName]] = []

    def __len__(self) -> int:
        return len(self._due_ms)

    def set(self, name: TimerName, at_ms: int | None) -> None:
        """Arms the timer, or moves it. None disarms it."""
        if at_ms is None:
            if self._due_ms.pop(name, None) is not None:
                self._tidy()
            return
        self._due_ms[name] = at_ms
        entry_ms = self._entry_ms.get(name)
        if entry_ms is None or at_ms < entry_ms:
            self._entry_ms[name] = at_ms
            heapq.heappush(self._heap, (at_ms, name))
            self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) <= 2 * len(self._due_ms) + HEAP_SLACK:
            return
        self._entry_ms = {name: self._entry_ms[name] for name in self._due_ms}
        self._heap = [(at_ms, name) for name, at_ms in self._entry_ms.items()]
        heapq.heapify(self._heap)

    def next_ms(self) -> int | None:
        """When to call take_due() next: perhaps before a timer is due, never after."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ms: int) -> list[TimerName]:
        """Disarms the timers that are due and returns them in order of their times."""
        due_timers = []
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, name = heapq.heappop(self._heap)
            if self._entry_ms.get(name) != at_ms:
                continue  # another entry has an earlier time
            del self._entry_ms[name]
            due_ms = self._due_ms.get(name)
            if due_ms is None:
                continue
            if due_ms > now_ms:
                self._entry_ms[name] = due_ms
                heapq.heappush(self._heap, (due_ms, name))
                continue
            del self._due_ms[name]
            due_timers.append((due_ms, name))
        if due_timers:
            self._tidy()
        due_timers.sort()
        return [name for _, name in due_timers]
