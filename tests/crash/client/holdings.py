"""The kernel resources that a broker's processes hold for local clients, so that a test can detect
leaks.

    before = Holdings.of(broker)
    ...                                  # clients connect, leave, and are killed
    Holdings.of(broker).beyond(before)   # [] or descriptions of resources that are new

Descriptors by kind and mappings of attachments, summed over the processes of a role, because which
worker serves which client is random; gauges of memory, attachments and arena extents; credits. Log
and index files are not counted: their number follows the data.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from pathlib import Path

import sysv_ipc

from mqd.shm import credits
from tests.broker import Broker
from tests.interaction.traffic import Watch

_KINDS = ("/memfd:mqd-local", "anon_inode:[eventfd]", "anon_inode:[pidfd]", "pipe:", "socket:")
_CONTROL = "/dev/shm/"
_GAUGES = ("local_attachments", "local_bytes", "connections")
_SLACK_PSS_BYTES = 24 << 20  # Python's fluctuation, and page tables for the page cache of a larger log


def descriptors(pid: int) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            target = str(path.readlink())
            found.update(kind for kind in _KINDS if target.startswith(kind))
    return found


def local_mappings(pid: int) -> int:
    return sum("memfd:mqd-local" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def control_name(broker: Broker) -> str:
    """The name of the control segment, as mapped by a worker."""
    for line in Path(f"/proc/{broker.pid('mqd-worker-0')}/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if path.startswith(_CONTROL) and "control" in path:
            return "/" + path.removeprefix(_CONTROL)
    raise AssertionError("worker 0 has no control segment mapped")


def free_credits(broker: Broker) -> tuple[int, int]:
    """Blocks of connections and of local memory that no worker holds."""
    name = control_name(broker)
    return (
        sysv_ipc.Semaphore(credits._key(name, 0)).value,
        sysv_ipc.Semaphore(credits._key(credits.local_memory_name(name), 0)).value,
    )


@dataclasses.dataclass(frozen=True)
class Holdings:
    counts: dict[str, int]
    pss_bytes: int

    @classmethod
    def of(cls, broker: Broker) -> Holdings:
        counts: collections.Counter[str] = collections.Counter()
        pss = 0
        for process in broker.running():
            pid, role = process["pid"], process["role"]
            for kind, count in descriptors(pid).items():
                counts[f"{role} {kind}"] += count
            counts[f"{role} mappings of attachments"] += local_mappings(pid)
            pss += pss_bytes(pid)
        counters = Watch(broker).counters()
        for name in _GAUGES:
            counts[name] = int(sum(counters[name].values()))
        # each worker keeps its receive window
        counts["arena extents beyond one for each worker"] = int(
            sum(max(0, used - 1) for used in counters["arena_extents_used"].values())
        )
        return cls(dict(counts), pss)

    def beyond(self, before: Holdings) -> list[str]:
        more = [
            f"{name}: {count}, was {before.counts.get(name, 0)}"
            for name, count in self.counts.items()
            if count > before.counts.get(name, 0)
        ]
        if self.pss_bytes > before.pss_bytes + _SLACK_PSS_BYTES:
            more.append(f"{self.pss_bytes >> 20} MiB of memory (PSS), was {before.pss_bytes >> 20}")
        return more
