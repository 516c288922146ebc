"""Replica logs of stopped hosts, byte for byte: common offsets of two replicas must be equal (log
matching), and after healing all must be complete.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

HEAD = struct.Struct(">qi")  # base_offset, batch_length: the bytes after this field
BATCH_BYTES_MIN = 61


def batches(directory: Path) -> dict[int, bytes]:
    """base_offset -> the whole batch, of all segments of one replica. Stops in each file where no
    batch begins (preallocated space).
    """
    found: dict[int, bytes] = {}
    for path in sorted(directory.glob("*.log")):
        data, position = path.read_bytes(), 0
        while position + BATCH_BYTES_MIN <= len(data):
            base_offset, length = HEAD.unpack_from(data, position)
            size = HEAD.size + length
            if length < BATCH_BYTES_MIN - HEAD.size or position + size > len(data):
                break
            found[base_offset] = data[position : position + size]
            position += size
    return found


def differences(replicas: dict[str, Path]) -> list[str]:
    """`replicas`: host -> the partition's directory there."""
    read = {host: batches(path) for host, path in replicas.items()}
    if not read:
        return ["no replica"]
    # retention may have deleted more on one of them
    first = max((min(found) for found in read.values() if found), default=0)
    offsets = sorted({offset for found in read.values() for offset in found if offset >= first})
    reported = []
    for offset in offsets:
        values = {host: found.get(offset) for host, found in read.items()}
        missing = [host for host, value in values.items() if value is None]
        if missing:
            reported.append(f"the batch at {offset} is not on {', '.join(missing)}")
        elif len(set(values.values())) > 1:
            reported.append(f"the batch at {offset} is not the same on {', '.join(values)}")
        if len(reported) >= 5:
            break
    return reported


def compare(data_dirs: dict[str, Path], places: Mapping[tuple[str, int], Iterable[str]]) -> list[str]:
    """Of stopped hosts. `places`: a partition -> the hosts that have its replicas; each is the
    folder TOPIC-PARTITION below one of the host's log directories.
    """
    reported = []
    for (topic, partition), hosts in places.items():
        name = f"{topic}-{partition}"
        found = {host: sorted(one for one in data_dirs[host].rglob(name) if one.is_dir()) for host in hosts}
        reported += [f"{name}: {host} has no such replica" for host, folders in found.items() if not folders]
        reported += [
            f"{name}: {text}" for text in differences({host: folders[0] for host, folders in found.items() if folders})
        ]
    return reported
