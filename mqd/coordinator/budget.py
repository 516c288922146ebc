"""A limit in bytes on the memory of all cores of one coordinator, across its partitions.

A core counts its own bytes (`size_bytes`); a shard reports by how much each event has changed the
count. A request is checked against the budget before its core handles it, so a refused request
changes nothing. State that is loaded from the log is counted, never refused. It can exceed the
budget; then requests that need more memory are refused.
"""

from __future__ import annotations

from typing import Any, Protocol


class Budget(Protocol):
    used_bytes: int

    def refusal(self, name: str, core: Any, event: object) -> int:
        """Kafka's error code if this event would take too much memory, otherwise 0. `core` is None
        if no core of that name exists.
        """
