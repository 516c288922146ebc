"""`make test`: the core's own tests and pytest's quick tier, and what they cost.

Two runs beside each other, since tests with brokers wait more than they compute: those of our own
processes under attack (crash, interaction, and what is not named here), and at a lower priority
`make native-test` and then BESIDE: what starts no broker, and other people's clients and Spark, who
are patient. What the second says is shown when the first is done. What fails fails the run: there
is no second try. With arguments there is one run of pytest, with them.

At the end it prints the CPU seconds of each part and what became slower than tests/durations.json
says; `--keep` writes that file.
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

from tests import cpu_seconds

APART = ("tests/tidy",)  # `make lint`, which `make test` runs first
BESIDE = ("tests/unit", "tests/sim", "tests/property", "tests/compat", "tests/spark")
BESIDE_NICE = 10
THE_SECOND, KEEP = "--beside", "--keep"
CORE = "native/tests"
CACHE, BESIDE_CACHE, CORE_CACHE = Path(".pytest_cache"), Path(".pytest_cache/beside"), Path(".pytest_cache/core")


def _seconds_file(cache: Path) -> Path:
    return cache / "cpu_seconds.json"


def run(cache: Path, *arguments: str) -> int:
    options = ["-p", "tests.cpu_seconds", f"--cpu-seconds={_seconds_file(cache)}", "-o", f"cache_dir={cache}"]
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *options, *arguments]).returncode


def _run_core() -> int:
    """The status of the core's own tests; what they and their compiler cost is one number."""
    before = cpu_seconds.used()
    status = subprocess.run(["make", "--no-print-directory", "-C", CORE, "check"]).returncode
    cpu_seconds.write({CORE: cpu_seconds.used() - before}, _seconds_file(CORE_CACHE))
    if status:
        print("the core's own tests FAILED, see above", flush=True)
    return status


def the_second() -> int:
    """The second run, in a process of its own. Both parts are run, whichever fails."""
    core = _run_core()
    return run(BESIDE_CACHE, *BESIDE) or core


@contextlib.contextmanager
def beside() -> Iterator[list[int]]:
    """Has the second run under way while the block runs, then shows what it said. Gives a list that
    holds its status afterwards.
    """
    statuses: list[int] = []
    with tempfile.TemporaryFile("w+") as said:
        command = ["nice", "-n", str(BESIDE_NICE), sys.executable, "-m", "tests.run_quick", THE_SECOND]
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            yield statuses
            statuses.append(process.wait())
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
            said.seek(0)
            print("\nbeside it:\n" + said.read(), flush=True)


def main(arguments: list[str]) -> int:
    kept_again = KEEP in arguments
    arguments = [argument for argument in arguments if argument != KEEP]
    files = [_seconds_file(cache) for cache in (CACHE, BESIDE_CACHE, CORE_CACHE)]
    for file in files:
        file.unlink(missing_ok=True)
    if arguments:
        statuses = [run(CACHE, *arguments)]
    else:
        with beside() as statuses:
            status = run(CACHE, "tests", *(f"--ignore={path}" for path in (*APART, *BESIDE)))
        statuses.append(status)
    now = cpu_seconds.together(files)
    print(cpu_seconds.report(now, cpu_seconds.read(cpu_seconds.KEPT)), flush=True)
    if kept_again:
        cpu_seconds.keep(now)
    return max(map(abs, statuses))


if __name__ == "__main__":
    sys.exit(the_second() if sys.argv[1:] == [THE_SECOND] else main(sys.argv[1:]))
