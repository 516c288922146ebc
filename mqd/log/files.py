"""All changes of files in a log directory by Python code go through this module, and from here
through the native file layer.

The native layer can record, refuse and drop every change (tests/crash); a change that bypassed it
would be invisible to those tests. Code takes a `Files` as an argument, so that it can be tested
without the extension, and a test can observe the order of changes. Reads do not use it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol


class Files(Protocol):
    def replace(self, path: Path, data: bytes) -> None:
        """Afterwards, even after a power cut, `path` holds all of `data` or, on an error, its
        previous contents. Raises OSError.
        """

    def unlink(self, path: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None:
        """Durable after sync_directory of the parent."""

    def make_directory(self, path: Path) -> None: ...

    def sync_directory(self, path: Path) -> None: ...


class NativeFiles:
    """The production implementation. Every call releases the GIL; thread-safe. Raises the matching
    subclass of OSError (FileNotFoundError...).
    """

    def __init__(self) -> None:
        from mqd import native  # the extension is loaded only where files are really changed

        self._native = native

    def replace(self, path: Path, data: bytes) -> None:
        self._call(self._native.file_replace, path, data)

    def unlink(self, path: Path) -> None:
        self._call(self._native.file_unlink, path)

    def rename(self, source: Path, target: Path) -> None:
        self._call(self._native.file_rename, source, target)

    def make_directory(self, path: Path) -> None:
        self._call(self._native.file_mkdir, path)

    def sync_directory(self, path: Path) -> None:
        self._call(self._native.file_sync_directory, path)

    def _call(self, change: Callable[..., None], path: Path, *arguments: Any) -> None:
        try:
            change(path, *arguments)
        except self._native.NativeError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
