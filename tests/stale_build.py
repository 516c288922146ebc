"""A native library that is older than its sources: its structs differ from what the tests expect, so
some tests would hang instead of failing.
"""

from __future__ import annotations

from pathlib import Path

LIBRARY = "mqd/_native.abi3.so"


def newer_source(root: Path) -> Path | None:
    """The newest C source or build script under `root` that was changed after the library was built
    in place; None: there is none, or the library is installed elsewhere.
    """
    library = root / LIBRARY
    if not library.exists():
        return None
    native = root / "native"
    sources = [
        path for path in native.rglob("*.[ch]") if path.relative_to(native).parts[0] not in ("tests", "examples")
    ]
    newest = max([*sources, native / "build_ffi.py"], key=lambda path: path.stat().st_mtime_ns)
    return newest if newest.stat().st_mtime_ns > library.stat().st_mtime_ns else None
