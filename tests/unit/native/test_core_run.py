"""The runner of the native tests: native/tests/run.sh and its Makefile."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[3] / "native" / "tests"
RUN = str(CORE / "run.sh")
PATIENCE_S = 60


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def run(*programs: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run([RUN, *programs], capture_output=True, text=True, env={**os.environ, **environment})
    return done.returncode, done.stdout


@pytest.fixture
def good(tmp_path: Path) -> str:
    return program(tmp_path, "test_good", "echo unseen; echo test_good: 3 passed, 0 failed")


def test_only_totals_of_passing_programs_are_shown(good: str) -> None:
    assert run(good) == (0, f"{good}: 3 passed, 0 failed\n3 passed, 0 failed\n")


@pytest.mark.parametrize(
    "text, reported",
    [
        ("echo why; echo 'test_bad: 1 passed, 2 failed'; exit 1", "{0}: 1 passed, 2 failed\n"),
        ("echo why; echo 'test_bad: 1 passed, 0 failed'; exit 3", "{0}: exit code 3\n"),
        ("echo why", "{0}: 0 passed, 1 failed\n"),
        ("echo why; sleep 50", "{0}: no end after 0.1 s\n"),
    ],
    ids=["fails", "dies", "says nothing", "hangs"],
)
def test_a_failure_is_shown_whole_and_named_at_the_end(tmp_path: Path, good: str, text: str, reported: str) -> None:
    bad = program(tmp_path, "test_bad", text)
    status, output = run(bad, good, TEST_TIMEOUT="0.1" if "sleep" in text else "50")
    assert status == 1
    assert "why\n" in output
    assert reported.format(bad) in output
    assert f"FAILED: {bad}\n" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["test_bad", "test_good"]


def test_a_missing_program_is_a_failure(tmp_path: Path, good: str) -> None:
    status, output = run(str(tmp_path / "test_none"), good)
    assert status == 1
    assert output.endswith(f"FAILED: {tmp_path / 'test_none'}: not built\n3 passed, 1 failed\n")


def test_an_interrupted_run_leaves_no_files(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    waits = program(tmp_path, "test_waits", f"echo $$ >{pid}.part; mv {pid}.part {pid}; exec sleep 50")
    process = subprocess.Popen([RUN, "--tally", waits], start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    while not pid.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pid", "test_waits"]


def test_test_files_are_compiled_without_optimization() -> None:
    """The core itself is compiled with optimization."""
    objects = [f"build/flags/asan/obj/{name}.o" for name in ("test_arena", "base/arena")]
    command = ["make", "-C", str(CORE), "-n", "BUILD=build/flags", *objects]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    of_test, of_core = (next(line for line in lines if line.endswith(f"-o {path}")) for path in objects)
    assert "-O0 -fno-sanitize=undefined" in of_test
    assert "-O0" not in of_core
    assert "-fno-sanitize=undefined" not in of_core
