"""The house rules that a machine can check."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINES_MAX = 800  # 600 once the files that the narrower lines made longer are split
CODE = [
    path
    for folder in ("native", "mqd", "tests", "perf")
    for suffix in ("*.py", "*.c", "*.h")
    for path in (ROOT / folder).rglob(suffix)
    if "build" not in path.parts
]


def _relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _owned() -> list[Path]:
    """Generated and built files are nobody's prose."""
    return [path for path in CODE if path.name != "_native.c" and ".venv" not in path.parts]


@pytest.mark.parametrize(
    "path", [path for path in _owned() if len(path.read_text().splitlines()) > LINES_MAX], ids=_relative
)
def test_a_long_file_says_why(path: Path) -> None:
    head = "\n".join(path.read_text().splitlines()[:25])
    assert re.search(r"long|one file|in one place|together", head), (
        f"{_relative(path)} has more than {LINES_MAX} lines and gives no reason at its head"
    )


def test_imports_go_down_only() -> None:
    tool = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_module_touches_cffi() -> None:
    users = [
        _relative(path)
        for path in _owned()
        if path.suffix == ".py"
        and path.is_relative_to(ROOT / "mqd")
        and re.search(r"^\s*(from mqd\._native|import cffi|from cffi)", path.read_text(), re.M)
    ]
    assert users == ["mqd/native/core.py"]


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in _owned()
        if path.suffix == ".h" and path.is_relative_to(ROOT / "native") and "tests" not in path.parts
    ],
    ids=_relative,
)
def test_a_header_stands_alone(path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "no C compiler: the package cannot be built either"
    done = subprocess.run(
        [
            compiler,
            "-std=gnu11",
            "-D_GNU_SOURCE",
            "-fsyntax-only",
            "-Wall",
            f"-I{ROOT / 'native'}",
            "-x",
            "c",
            str(path),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_open() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{_relative(path)}:{number}"
        for path in _owned()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert not found


def test_native_core_does_not_know_python() -> None:
    found = [
        _relative(path)
        for path in _owned()
        if path.is_relative_to(ROOT / "native") and path.suffix in {".c", ".h"} and "Python.h" in path.read_text()
    ]
    assert not found


def test_test_files_have_names_of_their_own():
    """pytest imports a file outside a package by its name alone: two of one name end the whole run
    before it begins.
    """
    alone = [path for path in (ROOT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in alone]
    assert not sorted({name for name in names if names.count(name) > 1})
