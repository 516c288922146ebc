"""`make test`'s runner, on a small tree of its own: what fails counts, wherever it fails, and
nothing is tried a second time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import run_quick
from tests.tiers import quick

TESTS = Path(__file__).resolve().parents[1]
PASSES = "def test_it():\n    pass\n"
FAILS = "def test_it():\n    assert False\n"
# fails when the file beside it is not there yet, and makes it
ONCE = (
    "import pathlib\n\n\ndef test_it():\n    mark = pathlib.Path(__file__).with_suffix('.mark')\n    seen ="
    " mark.exists()\n    mark.touch()\n    assert seen\n"
)
BUSY = (
    "import time\n\n\ndef test_it():\n    began = time.process_time()\n"
    "    while time.process_time() - began < 1.5:\n        pass\n"
)


def run(
    root: Path,
    *arguments: str,
    core: str = "true",
    with_broker: str = PASSES,
    without: str = PASSES,
    kept: dict[str, float] | None = None,
) -> subprocess.CompletedProcess[str]:
    bodies = dict.fromkeys((folder for lane in run_quick.BESIDE for folder in lane.folders), PASSES)
    bodies |= {"tests/interaction": with_broker, "tests/unit": without, "tests/tidy": FAILS}  # tidy is make lint's
    for folder, body in bodies.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / f"test_of_{Path(folder).name}.py").write_text(body)
    (root / "native" / "tests").mkdir(parents=True)
    (root / "native" / "tests" / "Makefile").write_text(f"check:\n\t@echo the core && {core}\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    for name in ("run_quick.py", "cpu_seconds.py"):
        shutil.copy(TESTS / name, root / "tests" / name)
    if kept is not None:
        (root / "tests" / "durations.json").write_text(json.dumps(kept))
    return subprocess.run(
        [sys.executable, "-m", "tests.run_quick", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_all_of_it_is_run_and_what_each_part_costs_is_printed_and_kept(tmp_path):
    done = run(
        tmp_path,
        "--keep",
        without=BUSY,
        kept={"tests/unit/test_of_unit.py::test_it": 0.1, "tests/gone.py::test_it": 0.1},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done) == [1, 1, 2, 2, 3] and "the core" in done.stdout
    cost, _, doubled = done.stdout.partition("twice as slow as in tests/durations.json")
    assert all(f"  {part}\n" in cost for part in ("tests/unit", "tests/interaction", "native/tests", "together"))
    assert "tests/unit/test_of_unit.py::test_it, at most 0.1 before" in doubled and "test_of_sim" not in doubled
    kept = json.loads((tmp_path / "tests" / "durations.json").read_text())
    assert next(iter(kept)) == "tests/unit/test_of_unit.py::test_it" and max(kept.values()) > 1
    assert len(kept) == 10 and "tests/gone.py::test_it" not in kept


def passed(done: subprocess.CompletedProcess[str]) -> list[int]:
    """How many tests passed in each lane."""
    return sorted(map(int, re.findall(r"^(?:\d failed, )?(\d+) passed", done.stdout, re.MULTILINE)))


@pytest.mark.parametrize("place", quick(["with_broker", "without"], ["with_broker"]))
def test_nothing_has_a_second_try(tmp_path, place):
    """In the first lane, and in one beside it."""
    done = run(tmp_path, **{place: ONCE})
    assert done.returncode == 1 and done.stdout.count("1 failed") == 1


def test_a_failing_core_fails_the_run_and_hides_nothing(tmp_path):
    done = run(tmp_path, core="false")
    assert done.returncode != 0 and passed(done) == [1, 1, 2, 2, 3]
    assert "the core's own tests FAILED" in done.stdout
