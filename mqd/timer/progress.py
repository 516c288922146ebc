"""What a timer commits: its progress, and the delays of records that have neither of the headers
mqd-deliver-at and mqd-delay-ms.

Such a record keeps the delay with which it was first read, even if schedule.delay.ms changes later.
Progress is a position in the order of due times: if a record's due time changed, a pending one
could be taken for delivered, or a delivered one for pending.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from mqd.timer.core import START, Progress
from mqd.timer.index import Entry

# Their text must fit into offset.metadata.max.bytes, which is 4096 by default.
CHANGE_COUNT_MAX = 64


class Change(NamedTuple):
    """The delay of the records from `offset` to the next change."""

    offset: int
    delay_ms: int


class Delays:
    """`changes` are in the order of their offsets."""

    def __init__(self, changes: list[Change]) -> None:
        self.changes = changes
        self._offsets = [change.offset for change in changes]

    def of(self, offset: int) -> int:
        return self.changes[bisect_right(self._offsets, offset) - 1].delay_ms

    def with_delay(self, delay_ms: int, end_offset: int, log_start: int) -> Delays:
        """Returns the delays after schedule.delay.ms was set to `delay_ms`. The new delay applies
        to the records that have not been read yet: those at `end_offset` and above. If there are
        already too many changes (CHANGE_COUNT_MAX), it is not adopted until the log's start has
        passed the earliest of them.
        """
        if not self.changes:
            return Delays([Change(0, delay_ms)])
        kept = self.changes[max(bisect_right(self._offsets, log_start) - 1, 0) :]
        if kept[-1].delay_ms != delay_ms and len(kept) <= CHANGE_COUNT_MAX:
            kept = [*(change for change in kept if change.offset < end_offset), Change(end_offset, delay_ms)]
        return Delays(kept)


def progress_text(topic_id: bytes, last: Entry, delays: Delays) -> str:
    """The metadata of the committed offset."""
    changes = (f"{change.offset}:{change.delay_ms}" for change in delays.changes)
    return " ".join(("1", topic_id.hex(), str(last.due_ms), str(last.offset), *changes))


def parse_progress(offset: int, text: str | None, topic_id: bytes) -> tuple[Progress, Delays]:
    """If nothing was committed, or only for another topic of this name, `last` is START and there
    are no delays.
    """
    fields = (text or "").split()
    if offset < 0 or len(fields) < 4 or fields[:2] != ["1", topic_id.hex()]:
        return Progress(0, START), Delays([])
    changes = [Change(*map(int, field.split(":"))) for field in fields[4:]]
    return Progress(offset, Entry(int(fields[2]), int(fields[3]))), Delays(changes)
