"""The rotating share of the slow tier: its order, its time limit, and its report of a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slow_share import BEGIN_MINUTES, END_MINUTES, HAND, dealt, limit

TESTS = Path(__file__).resolve().parents[1]
NAMES = [f"tests/test_{module}.py::test_it[{number}]" for module in "abcdefgh" for number in range(20)]
CONFTEST = (
    "def pytest_addoption(parser):\n    parser.addoption('--tier')\n    parser.addini('timeout', '', default='300')\n"
)
BODY = (
    "import time\n\nimport pytest\n\n\n@pytest.fixture(scope='module')\ndef ended():\n    yield\n    print('torn"
    " down')\n"
    "\n\n@pytest.mark.parametrize('number', range(30))\ndef test_it(number, ended):\n    time.sleep({seconds})\n"
    "    assert number != {wrong}\n"
)


def test_a_seed_is_an_order_of_all_tests():
    assert dealt(NAMES, "2026-11-26-abc") == dealt(NAMES[::-1], "2026-11-26-abc") != dealt(NAMES, "2026-11-27-abc")
    assert sorted(dealt(NAMES, "x")) == sorted(NAMES)


def test_a_module_of_many_tests_is_not_the_whole_share():
    many = [f"tests/test_many.py::test_it[{number}]" for number in range(200)]
    order = [test.partition("::")[0] for test in dealt(NAMES + many, "x")]
    others = [place for place, module in enumerate(order) if module != "tests/test_many.py"]
    assert others[0] < 20 and len(order) - others[-1] < 20


def test_tests_of_a_module_are_dealt_in_hands():
    order = [test.partition("::")[0] for test in dealt(NAMES, "x")]
    changes = sum(one != other for one, other in zip(order, order[1:], strict=False))
    assert changes < len(order) / HAND * 1.4


def test_every_test_has_its_turn():
    """Within a hundred seeds each test is among the first tenth of some order."""
    seen = {test for seed in range(100) for test in dealt(NAMES, str(seed))[: len(NAMES) // 10]}
    assert seen == set(NAMES)


@pytest.mark.parametrize(
    ("minutes", "own", "seconds"),
    [
        (12.0, 300.0, 300.0),
        (BEGIN_MINUTES - 0.1, 300.0, 300.0),
        (BEGIN_MINUTES, 1.0, None),
        (BEGIN_MINUTES - 1, 1200.0, None),  # would not end in time
        (END_MINUTES - 20, 1200.0, 1200.0),
        (12.0, 3000.0, (END_MINUTES - 12) * 60.0),
        (40.0, 3000.0, None),
    ],
)
def test_no_test_begins_without_enough_time(minutes, own, seconds):
    assert limit(minutes, own) == (None if seconds is None else pytest.approx(seconds))


def test_ci_runs_the_command_of_the_readme_first():
    script = (TESTS.parent / ".ci" / "run").read_text()
    commands = [line for line in script.splitlines() if not line.startswith(("#", "set ", "cd "))]
    assert commands[0] == "make test" and "`make test`" in (TESTS.parent / "README.md").read_text()
    assert "tests.slow_share" in commands[1] and len(commands) == 2


def share(root: Path, spent: float, *, wrong: int = -1, seconds: float = 0.0) -> subprocess.CompletedProcess[str]:
    (root / "tests").mkdir()
    shutil.copy(TESTS / "slow_share.py", root / "tests")
    (root / "tests" / "conftest.py").write_text(CONFTEST)
    (root / "tests" / "test_it.py").write_text(BODY.format(seconds=seconds, wrong=wrong))
    (root / "pytest.ini").write_text("[pytest]\nmarkers = timeout\n")
    return subprocess.run(
        [sys.executable, "-m", "tests.slow_share", "--seed=seven", f"--spent={spent}"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )


def test_a_failure_is_reported_with_the_seed_and_the_command(tmp_path):
    done = share(tmp_path, 0.0, wrong=17)
    assert done.returncode == 1 and "29 passed" in done.stdout and "--seed seven" in done.stdout
    assert "30 of 30 slow tests" in done.stdout
    assert f"repeat it: {sys.executable} -m pytest -q --tier=slow 'tests/test_it.py::test_it[17]'" in done.stdout


def test_a_run_at_its_time_limit_passes(tmp_path):
    done = share(tmp_path, BEGIN_MINUTES * 60 - 3.0, seconds=0.5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"no test is begun after minute {BEGIN_MINUTES}" in done.stdout and "30 passed" not in done.stdout
    assert " passed" in done.stdout
