"""Prometheus and promtool, from the machine or from Debian's package, unpacked without root."""

import shutil
from pathlib import Path

import pytest

from perf.peers.debian import program, unpacked
from perf.peers.peer import Unavailable


def find(name: str) -> str:
    """The program's path. Skips the test if it cannot be installed."""
    installed = shutil.which(name)
    if installed:
        return installed
    try:
        return program(unpacked(["prometheus"]), str(Path("usr/bin") / name))
    except Unavailable as error:
        pytest.skip(f"{name}: {error}; apt-get install prometheus")
