"""A bound in bytes on what all cores of one coordinator keep in memory, whatever their partition.

A core counts its own bytes (`size_bytes`); a shard reports what each event has changed. A request
is checked against the budget before its core handles it, so a refused one has changed nothing. What
is loaded from the log is counted, never refused: the budget may then be exceeded, but requests no
longer increase it.
"""

from __future__ import annotations

from typing import Any, Protocol


class Budget(Protocol):
    used_bytes: int

    def refusal(self, name: str, core: Any, event: object) -> int:
        """Kafka's error code if this event would take too much memory, otherwise 0. `core` None:
        there is none of that name.
        """
