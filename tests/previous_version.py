"""The previous version of mqd, built from the repository's history: the last tag, or BASELINE."""

from __future__ import annotations

import fcntl
import functools
import io
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOME = ROOT / ".build" / "previous"
BUILD_S = 900
# No version has been tagged yet. The main branch of 23 November 2026 is used instead: it has
# mqd.version 1, no share groups, no TLS, and other module names.
BASELINE = "39a5fc81ae9c88238d11eca3f1d5db0a38daf11b"


def _git(*words: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, timeout=60)


def commit() -> str:
    """Skips the test when the clone's history is too short."""
    head = _git("rev-parse", "HEAD").stdout.decode().strip()
    tags = _git("tag", "--list", "v*", "--merged", "HEAD", "--sort=-version:refname").stdout.decode().split()
    commits = [_git("rev-parse", f"{tag}^{{commit}}").stdout.decode().strip() for tag in tags]
    found = next((one for one in commits if one and one != head), BASELINE)
    if _git("cat-file", "-e", f"{found}^{{commit}}").returncode != 0:
        pytest.skip(f"{found[:10]}, the previous version, is not in this clone: git fetch --unshallow --tags")
    return found


@functools.cache
def environment() -> dict[str, str]:
    """With this, `python -m mqd.cli.main` and all processes that it starts run the previous
    version. Its dependencies are those of this version.
    """
    version = commit()
    home = HOME / version[:16]
    HOME.mkdir(parents=True, exist_ok=True)
    with open(HOME / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / "complete").exists():
            _build(version, home)
    # without the second, `python -m` would find this version in the working directory first
    return {"PYTHONPATH": str(home / "installed"), "PYTHONSAFEPATH": "1"}


def _build(version: str, home: Path) -> None:
    shutil.rmtree(home, ignore_errors=True)
    archive = _git("archive", "--format=tar", version)
    assert archive.returncode == 0, archive.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(home / "source", filter="data")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), "."]
    done = subprocess.run(command, cwd=home / "source", capture_output=True, text=True, timeout=BUILD_S)
    if "No matching distribution" in done.stderr:
        pytest.skip(f"what builds {version[:10]} cannot be had: {done.stderr.strip()[-300:]}")
    assert done.returncode == 0, done.stderr[-4000:]
    (wheel,) = home.glob("mqd-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(home / "installed")
    shutil.rmtree(home / "source")
    (home / "complete").touch()
