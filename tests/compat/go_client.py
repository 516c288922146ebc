"""franz-go, an independent client in Go: the small program in go/, built with the machine's Go into
the build tree.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "go"
OUTPUT = Path(__file__).parents[2] / ".build" / "compat-go"
BUILD_SECONDS = 590
RUN_SECONDS = 90


def build_go_client() -> Path:
    """The program, cached until its sources change. Skips the test where Go or the modules are not
    available.
    """
    if shutil.which("go") is None:
        pytest.skip("the Go client: go is not installed")
    sources = b"".join(path.read_bytes() for path in sorted(SOURCE.iterdir()))
    program = OUTPUT / f"roundtrip-{hashlib.sha256(sources).hexdigest()[:16]}"
    if program.exists():
        return program
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    try:
        got = subprocess.run(
            ["go", "mod", "download"], cwd=SOURCE, capture_output=True, text=True, timeout=BUILD_SECONDS
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"the Go client's modules cannot be had within {BUILD_SECONDS} s")
    if got.returncode != 0:
        pytest.skip(f"the Go client's modules cannot be had: {got.stderr[-300:]}")
    made = subprocess.run(
        ["go", "build", "-mod=readonly", "-o", str(program), "."],
        cwd=SOURCE,
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
    )
    assert made.returncode == 0, made.stderr
    return program


def round_trip(program: Path, **words: object) -> subprocess.CompletedProcess[str]:
    """Two transactions of 100 records, one aborted; then "read 100"."""
    arguments = [word for name, value in words.items() for word in (f"-{name}", str(value))]
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=RUN_SECONDS)
