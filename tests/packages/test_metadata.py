"""The metadata and contents of the packages, without building one."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import mqd

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ALWAYS_HELD = {"pyproject.toml", "setup.py", "README.md", "pyspark_mqd.py", "MANIFEST.in"}  # added by setuptools


def test_the_version_has_one_source(tmp_path: Path) -> None:
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert importlib.metadata.version("mqd") == mqd.__version__
    command = [sys.executable, "-m", "mqd", "--version"]
    output = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert output == f"mqd {mqd.__version__}\n"


def test_the_licence() -> None:
    assert PROJECT["license"] == "Apache-2.0" and PROJECT["license-files"] == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_sdist_holds_the_tree() -> None:
    """Every file that git knows; what MANIFEST.in grafts or includes."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"this tree is no git checkout: {done.stderr.strip()}")
    grafted, included = set(), set(ALWAYS_HELD)
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        verb, *names = line.split() or ["#"]
        if verb == "graft":
            grafted |= set(names)
        elif verb == "include":
            included |= set(names)
    for name in done.stdout.splitlines():
        held = name.partition("/")[0] in grafted or any(fnmatch.fnmatch(name, pattern) for pattern in included)
        assert held, f"{name} is missing in MANIFEST.in"
    assert all((ROOT / name).is_dir() for name in grafted)
