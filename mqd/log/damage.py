"""The damage that a worker's scrubber has found in stored segments, as a file in the run directory:
the worker writes it whole, the acceptor reads it at each scrape.

    run/damage.W.json      a JSON array of Damage; W is the worker

It is informational: losing it costs nothing, because the damage will be found again. So it is
neither flushed nor written through the file layer. It is replaced by a rename, so that no reader
sees a partial file.
"""

import os
from pathlib import Path

import msgspec


class Damage(msgspec.Struct, frozen=True):
    """One damaged segment: the position of its first bad batch, and the reason."""

    topic: str
    topic_id: bytes
    partition: int
    segment: int  # base offset
    position: int
    reason: str
    next_sound_offset: int  # reading can continue there
    found_ms: int  # since 1970


def _path(run_dir: Path, worker: int) -> Path:
    return run_dir / f"damage.{worker}.json"


def write(run_dir: Path, worker: int, damage: list[Damage]) -> None:
    """Blocking. Raises OSError."""
    path = _path(run_dir, worker)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(damage))
    os.replace(temporary, path)


def read(run_dir: Path, worker: int) -> list[Damage]:
    """The damage found; [] if the file does not exist, or cannot be read (another version of mqd
    wrote it).
    """
    try:
        return msgspec.json.decode(_path(run_dir, worker).read_bytes(), type=list[Damage])
    except (OSError, msgspec.MsgspecError):
        return []
