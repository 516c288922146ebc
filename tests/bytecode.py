"""Bytecode for brokers that run from the source tree, in the tests and in the bench."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from pathlib import Path


def keep_apart(folder: Path) -> None:
    """Where Python is set to write no bytecode into the tree, write it to `folder`. Without
    bytecode, each of the five processes of a broker compiles all its modules at every start, which
    doubles the CPU time; an installed mqd has bytecode, because pip compiles it.
    """
    if not sys.dont_write_bytecode:
        return
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False
    for installed in map(sysconfig.get_path, ("stdlib", "purelib")):
        _link(Path(installed), folder)


def _link(installed: Path, folder: Path) -> None:
    """Links the bytecode of Python itself and of installed packages, for which Python no longer
    looks in their own folders: otherwise each fresh clone would compile two thousand modules.
    """
    place = folder / installed.relative_to("/")
    try:
        place.mkdir(parents=True)
    except FileExistsError:  # an earlier run or another lane has linked it
        return
    for path, directories, _ in os.walk(installed):
        here = place / Path(path).relative_to(installed)
        if "__pycache__" in directories:
            here.mkdir(parents=True, exist_ok=True)
            for file in os.scandir(f"{path}/__pycache__"):
                if file.name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                    with contextlib.suppress(FileExistsError):
                        (here / file.name).symlink_to(file.path)
        directories[:] = [name for name in directories if name not in ("__pycache__", "site-packages", "test", "tests")]
