"""A worker's share of local clients (those that attach through shared memory) and of their memory,
leased from the broker's budget.

Memory is leased in MiB by the same rules as connections (mqd/shm/credits.py): ahead of need,
returned when others need it, and released by the kernel when the worker dies. The limit on clients
(local.attachments.max) is divided evenly; the acceptor passes each client to the worker that has
the fewest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mqd import native
from mqd.base.config import broker_number
from mqd.shm.attach import KeeperClient
from mqd.shm.credits import Credits, local_memory_name

MEBIBYTE = 1 << 20


def attachment_share(attachment_count_max: int, worker_count: int) -> int:
    """One worker's share of local.attachments.max. Together the workers may serve slightly more
    than the broker's limit, never fewer.
    """
    return -(-attachment_count_max // worker_count)


class LocalBudget:
    """One worker's budget. `control_fd`: a read-only descriptor of the control segment, which is
    passed to clients; it is owned by the KeeperClient; -1 if local clients are disabled.
    """

    def __init__(self, control_fd: int, attachment_count_max: int, credits: Credits | None):
        self.control_fd = control_fd
        self._attachment_count_max = attachment_count_max
        self._credits = credits

    @classmethod
    def attach(cls, client: KeeperClient, lock_path: Path, config: Mapping[str, str], worker_count: int) -> LocalBudget:
        """Raises OSError; its message says how to fix the problem."""
        attachment_count_max = broker_number(config, "local.attachments.max")
        if attachment_count_max == 0:
            return cls(-1, 0, None)
        mebibytes = broker_number(config, "local.memory.max.bytes") // MEBIBYTE
        name = client.welcome.control_name
        credits = Credits.attach(
            local_memory_name(name),
            client.welcome.generation,
            lock_path,
            mebibytes,
            worker_count,
            "local.memory.max.bytes",
        )
        credits.adjust(0)
        return cls(client.control_read_fd, attachment_share(attachment_count_max, worker_count), credits)

    def adjust(self, used_bytes: int) -> bool:
        """Leases more memory or gives some back. If it returns True, the amount has changed: call
        apply().
        """
        return self._credits is not None and self._credits.adjust(-(-used_bytes // MEBIBYTE))

    def apply(self, reactor: native.Reactor) -> None:
        reactor.set_local_max(
            self._attachment_count_max, self._credits.granted_count * MEBIBYTE if self._credits is not None else 0
        )

    def close(self) -> None:
        if self._credits is not None:
            self._credits.close()
