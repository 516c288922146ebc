"""The files of an index: a directory of append-only files, and one file that is replaced."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol


class Storage(Protocol):
    """Data that is appended and not yet synced may be lost, wholly or in part."""

    def names(self) -> list[str]: ...
    def size(self, name: str) -> int: ...
    def append(self, name: str, data: bytes) -> None: ...
    def read(self, name: str, at: int, size_bytes: int) -> bytes: ...
    def truncate(self, name: str, size_bytes: int) -> None: ...
    def sync(self, name: str) -> None: ...
    def replace(self, name: str, data: bytes) -> None: ...
    def remove(self, name: str) -> None: ...


class Directory:
    """A Storage on disk. Raises OSError. No file stays open: there may be hundreds, each used
    rarely.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._path = path

    def names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self._path) if entry.is_file()]

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def append(self, name: str, data: bytes) -> None:
        with (self._path / name).open("ab", buffering=0) as file:
            while data:  # a write may be partial
                data = data[file.write(data) :]

    def read(self, name: str, at: int, size_bytes: int) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(at)
            return file.read(size_bytes)

    def truncate(self, name: str, size_bytes: int) -> None:
        os.truncate(self._path / name, size_bytes)

    def sync(self, name: str) -> None:
        with (self._path / name).open("rb") as file:
            os.fsync(file.fileno())

    def replace(self, name: str, data: bytes) -> None:
        temporary = self._path / f"{name}.new"
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path / name)
        descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
