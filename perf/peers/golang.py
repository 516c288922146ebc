"""Peers in Go: built from their module, as a go.mod pins it, into a cache below .build."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

from perf.peers.maven import CACHE
from perf.peers.peer import Unavailable

BUILD_SECONDS, LIST_SECONDS = 590, 60


def program(module: Path, package: str) -> Path:
    """The program of `package`, a tool in the go.mod of the directory `module`. Raises Unavailable."""
    go = shutil.which("go")
    if go is None:
        raise Unavailable("no go on the PATH to build it with")
    pinned = hashlib.sha256((module / "go.mod").read_bytes()).hexdigest()[:12]
    target = CACHE / f"{module.name}-{pinned}" / package.split("/")[-2]
    if target.exists():
        return target
    command = [go, "build", "-mod=readonly", "-o", str(target.with_suffix(".new")), package]
    try:
        done = subprocess.run(command, cwd=module, capture_output=True, text=True, timeout=BUILD_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"its module was not built within {BUILD_SECONDS} s") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["go gave no reason"]
        raise Unavailable(
            f"its module cannot be built: {' '.join(w for w in reason[0].split() if '://' not in w)[:200]}"
        )
    target.with_suffix(".new").rename(target)
    return target


def released_on(module: Path, package: str) -> str:
    """The day of the version of `package` that the go.mod of the directory `module` pins, as
    2026-11-11; "": go cannot tell.
    """
    command = ["go", "list", "-m", "-json", package]
    try:
        done = subprocess.run(command, cwd=module, capture_output=True, text=True, timeout=LIST_SECONDS)
    except subprocess.TimeoutExpired:
        return ""
    return str(json.loads(done.stdout).get("Time", "")).partition("T")[0] if done.returncode == 0 else ""
