"""`make test`'s runner, on a small tree of its own: what fails counts, wherever it fails, and what
is run again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[1] / "run_quick.py"
PASSES = "def test_it():\n    pass\n"
FAILS = "def test_it():\n    assert False\n"
# fails when the file beside it is not there yet, and makes it
ONCE = (
    "import pathlib\n\n\ndef test_it():\n    mark = pathlib.Path(__file__).with_suffix('.mark')\n    seen ="
    " mark.exists()\n    mark.touch()\n    assert seen\n"
)


def run(
    root: Path, core: str = "true", *, with_broker: str = PASSES, without: str = PASSES
) -> subprocess.CompletedProcess[str]:
    for folder, body in (
        ("interaction", with_broker),
        ("unit", without),
        ("property", PASSES),
        ("sim", PASSES),
        ("tidy", FAILS),  # make lint's
        ("compat", PASSES),
        ("spark", PASSES),
    ):
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / f"test_of_{folder}.py").write_text(body)
    (root / "native" / "tests").mkdir(parents=True)
    (root / "native" / "tests" / "Makefile").write_text(f"check:\n\t@echo the core && {core}\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(RUNNER, root / "tests" / "run_quick.py")
    return subprocess.run(
        [sys.executable, "-m", "tests.run_quick"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_all_of_it_is_run(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "1 passed" in done.stdout
        and "5 passed" in done.stdout
        and "the core" in done.stdout
        and "once more" not in done.stdout
    )


@pytest.mark.parametrize("place", ["with_broker", "without"])
def test_what_fails_once_is_run_again_alone_and_named(tmp_path, place):
    done = run(tmp_path, **{place: ONCE})
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "1 failed and is run once more, alone:\n  tests/" in done.stdout
        and "passed the second time, to be looked into:" in done.stdout
    )


@pytest.mark.parametrize("place", ["with_broker", "without"])
def test_what_fails_twice_fails_the_run(tmp_path, place):
    done = run(tmp_path, **{place: FAILS})
    assert done.returncode == 1 and "once more" in done.stdout


def test_a_failing_core_fails_the_run_and_hides_nothing(tmp_path):
    done = run(tmp_path, core="false", without=FAILS)
    assert done.returncode != 0 and "1 failed, 4 passed" in done.stdout and "1 passed" in done.stdout
    assert (
        "1 failed and is run once more, alone:\n  tests/unit" in done.stdout
        and "the core's own tests failed" in done.stdout.splitlines()[-1]
    )
