"""`make test`'s runner, on a small tree: every failure counts, in every lane, and nothing is
retried.
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

TESTS = Path(__file__).resolve().parents[1]
FEW = "(Lane(('tests/crash', 'tests/unit'), 0, False), Lane(('tests/property',), 0, True))"
PASSES = "def test_it():\n    pass\n"
FAILS = "def test_it():\n    assert False\n"
# fails if the file beside it does not exist yet, and creates it
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
    bodies = dict.fromkeys(("tests/crash", "tests/property"), PASSES)
    bodies |= {"tests/interaction": with_broker, "tests/unit": without, "tests/tidy": FAILS}  # tidy is run by make lint
    for folder, body in bodies.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / f"test_of_{Path(folder).name}.py").write_text(body)
    (root / "native" / "tests").mkdir(parents=True)
    (root / "native" / "tests" / "Makefile").write_text(f"check:\n\t@echo the core && {core}\n")
    (root / "pytest.ini").write_text("[pytest]\n")
    shutil.copy(TESTS / "cpu_seconds.py", root / "tests")
    whole = (TESTS / "run_quick.py").read_text()
    # three lanes are enough, since each starts pytest again
    (root / "tests" / "run_quick.py").write_text(whole.replace("BESIDE = (", f"BESIDE = {FEW} or (", 1))
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


def test_all_parts_are_run_and_their_cost_is_printed_and_kept(tmp_path):
    done = run(
        tmp_path,
        "--keep",
        without=BUSY,
        kept={"tests/unit/test_of_unit.py::test_it": 0.1, "tests/gone.py::test_it": 0.1},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert passed(done) == [1, 1, 2] and "the core" in done.stdout
    cost, _, doubled = done.stdout.partition("twice as slow as in tests/durations.json")
    assert all(f"  {part}\n" in cost for part in ("tests/unit", "tests/interaction", "native/tests", "together"))
    assert "tests/unit/test_of_unit.py::test_it, at most 0.1 before" in doubled and "test_of_crash" not in doubled
    kept = json.loads((tmp_path / "tests" / "durations.json").read_text())
    assert next(iter(kept)) == "tests/unit/test_of_unit.py::test_it" and max(kept.values()) > 1
    assert len(kept) == 5 and "tests/gone.py::test_it" not in kept


def passed(done: subprocess.CompletedProcess[str]) -> list[int]:
    """How many tests passed in each lane."""
    return sorted(map(int, re.findall(r"^(?:\d failed, )?(\d+) passed", done.stdout, re.MULTILINE)))


def test_a_failure_fails_the_run_without_a_second_try_and_hides_nothing(tmp_path):
    """In the first lane; and the native tests, in a parallel one."""
    done = run(tmp_path, core="false", with_broker=ONCE)
    assert done.returncode != 0 and done.stdout.count("1 failed") == 1
    assert passed(done) == [1, 2] and "the core's own tests FAILED" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("parts", [{"core": "false"}, {"with_broker": ONCE}, {"without": ONCE}], ids=str)
def test_each_failure_is_enough(tmp_path, parts):
    assert run(tmp_path, **parts).returncode != 0


def test_each_folder_has_one_lane():
    folders = [folder for lane in run_quick.BESIDE for folder in lane.folders]
    assert len(folders) == len(set(folders)) and all((TESTS.parent / folder).is_dir() for folder in folders)
    assert len({lane.name for lane in run_quick.BESIDE}) == len(run_quick.BESIDE), "a lane's cache has its name"
