"""The long runs of the native tests (`MQD_TEST_LONG`), one test for each program, so that every
share of the slow tier has some of them.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CORE_TESTS = Path(__file__).resolve().parents[3] / "native" / "tests"
LIMIT_S = 800


def programs() -> list[str]:
    """asan/NAME of each test, and tsan/NAME of each that starts threads, as in the Makefile."""
    found = []
    for path in sorted(CORE_TESTS.glob("*/**/test_*.c")):
        if path.relative_to(CORE_TESTS).parts[0] != "build":
            found.append(f"asan/{path.stem}")
            with path.open() as file:
                if "tsan" in file.readline():
                    found.append(f"tsan/{path.stem}")
    return found


def test_all_programs_of_the_core_are_found() -> None:
    output = subprocess.check_output(["make", "--no-print-directory", "-C", str(CORE_TESTS), "list"], text=True)
    lists = dict(line.split(": ", 1) for line in output.splitlines())
    asan = [name.removeprefix("asan/") for name in programs() if name.startswith("asan/")]
    tsan = [name.removeprefix("tsan/") for name in programs() if name.startswith("tsan/")]
    assert sorted(asan) == sorted(lists["tests"].split()) and sorted(tsan) == sorted(lists["threads"].split())


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("program", programs())
def test_program(program: str) -> None:
    if program.startswith("tsan/"):
        make("build/tsan/works")
        if (CORE_TESTS / "build/tsan/works").read_text().strip() != "yes":
            pytest.skip("ThreadSanitizer does not work here")
    make(f"build/{program}")
    done = subprocess.run(
        ["./run.sh", f"build/{program}"],
        cwd=CORE_TESTS,
        env={**os.environ, "MQD_TEST_LONG": "1", "TEST_TIMEOUT": str(LIMIT_S)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def make(target: str) -> None:
    built = subprocess.run(["make", "-C", str(CORE_TESTS), target], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
