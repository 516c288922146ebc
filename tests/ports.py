"""Ports for servers that tests start: no other test uses them, and the kernel assigns them to no
connection.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from pathlib import Path

_FIRST = 10_000
_BLOCK = 32  # ports that a process of tests takes at a time
_taken: list[socket.socket] = []
_unused: list[int] = []


def _end() -> int:
    """The first port of the kernel's ephemeral range."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def _blocks() -> Iterator[int]:
    firsts = list(range(_FIRST, _end() - _BLOCK, _BLOCK))
    random.SystemRandom().shuffle(firsts)
    for first in firsts:
        # a name in the abstract namespace: the kernel frees it when this process ends
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0mqd-tests-ports-{first}")
        except OSError:
            name.close()
            continue
        _taken.append(name)
        yield first


_more = _blocks()


def _is_free(port: int) -> bool:
    """For TCP and UDP, on all interfaces."""
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_INET, kind) as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True


def free_ports(count: int) -> list[int]:
    """Successive ports, at most 32, that this process has not handed out before. Raises
    StopIteration when none is left.
    """
    assert count <= _BLOCK
    while True:
        while len(_unused) >= count:
            found = _unused[:count]
            taken = next((place for place, port in enumerate(found) if not _is_free(port)), None)
            del _unused[: count if taken is None else taken + 1]
            if taken is None:
                return found
        first = next(_more)
        _unused[:] = range(first, first + _BLOCK)


def free_port() -> int:
    return free_ports(1)[0]
