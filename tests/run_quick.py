"""`make test`: the native tests and pytest's quick tier, and their cost.

Nine parallel lanes, since tests with brokers wait more than they compute. None takes longer than
nine minutes on a quiet machine, and compute-bound lanes use the time in which the others wait. Four
lanes test our own processes: everything that no other lane has, security and limits, clusters and
the keeper, clients and the log. At a lower priority run those that mostly wait: third-party clients
and kills, Spark, and `make native-test` before the property tests, which need the most CPU; at the
lowest priority the simulators and the unit tests. The output of the other lanes is shown when the
first is done. A failure fails the run: there is no second try. With arguments there is a single run
of pytest, with them.

At the end it prints the CPU seconds of each part and the tests that became slower than in
tests/durations.json; `--keep` writes that file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests import cpu_seconds

APART = ("tests/tidy",)  # `make lint`, which `make test` runs first
KEEP, LANE = "--keep", "--lane"
CORE = "native/tests"
CACHE, CORE_CACHE = Path(".pytest_cache"), Path(".pytest_cache/core")


class Lane(NamedTuple):
    """`has_core`: the native tests run first in it."""

    folders: tuple[str, ...]
    nice: int
    has_core: bool

    @property
    def name(self) -> str:
        return self.folders[0].rpartition("/")[2]

    @property
    def cache(self) -> Path:
        return CACHE / self.name


BESIDE = (
    Lane(("tests/interaction/cluster", "tests/interaction/keeper"), nice=0, has_core=False),
    Lane(("tests/interaction/security", "tests/interaction/server"), nice=0, has_core=False),
    Lane(
        ("tests/interaction/client", "tests/interaction/coordinator", "tests/interaction/log"), nice=0, has_core=False
    ),
    Lane(("tests/crash", "tests/compat"), nice=5, has_core=False),
    Lane(("tests/spark",), nice=5, has_core=False),
    Lane(("tests/property",), nice=5, has_core=True),
    Lane(("tests/sim",), nice=10, has_core=False),
    Lane(("tests/unit",), nice=10, has_core=False),
)


def _seconds_file(cache: Path) -> Path:
    return cache / "cpu_seconds.json"


def run(cache: Path, *arguments: str) -> int:
    options = ["-p", "tests.cpu_seconds", f"--cpu-seconds={_seconds_file(cache)}", "-o", f"cache_dir={cache}"]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *options, *arguments]).returncode


def _run_core() -> int:
    """The exit status of the native tests; their cost and their compiler's are one number."""
    before = cpu_seconds.used()
    status = subprocess.run(["make", "--no-print-directory", "-C", CORE, "check"]).returncode
    cpu_seconds.write({CORE: cpu_seconds.used() - before}, _seconds_file(CORE_CACHE))
    if status:
        print("the core's own tests FAILED, see above", flush=True)
    return status


def run_lane(lane: Lane) -> int:
    """Runs in a process of its own. Both parts run, even if one fails."""
    core = _run_core() if lane.has_core else 0
    return run(lane.cache, *lane.folders) or core


@contextlib.contextmanager
def beside(lane: Lane, statuses: list[int]) -> Iterator[None]:
    """Runs the lane while the block runs, then shows its output and appends its status."""
    with tempfile.TemporaryFile("w+") as output:
        command = ["nice", "-n", str(lane.nice), sys.executable, "-m", "tests.run_quick", LANE, lane.name]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield
            statuses.append(process.wait())
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
            output.seek(0)
            print(f"\nbeside it, {lane.name}:\n" + output.read(), flush=True)


def main(arguments: list[str]) -> int:
    kept_again = KEEP in arguments
    arguments = [argument for argument in arguments if argument != KEEP]
    files = [_seconds_file(cache) for cache in (CACHE, CORE_CACHE, *(lane.cache for lane in BESIDE))]
    for file in files:
        file.unlink(missing_ok=True)
    statuses: list[int] = []
    with contextlib.ExitStack() as lanes:
        others = () if arguments else BESIDE
        for lane in others:
            lanes.enter_context(beside(lane, statuses))
        apart = (*APART, *(folder for lane in others for folder in lane.folders))
        statuses.append(run(CACHE, *(arguments or ("tests", *(f"--ignore={path}" for path in apart)))))
    now = cpu_seconds.together(files)
    print(cpu_seconds.report(now, cpu_seconds.read(cpu_seconds.KEPT)), flush=True)
    if kept_again:
        cpu_seconds.keep(now)
    return max(map(abs, statuses))


if __name__ == "__main__":
    if sys.argv[1:2] == [LANE]:
        sys.exit(next(run_lane(lane) for lane in BESIDE if lane.name == sys.argv[2]))
    sys.exit(main(sys.argv[1:]))
