"""`make test`: the core's own tests and pytest's quick tier; what failed is run once more, alone,
by fresh brokers, and named.

Two runs beside each other, since tests with brokers wait more than they compute: those of our own
processes under attack (crash, interaction, and what is not named here), and at a lower priority
`make native-test` and then BESIDE: what starts no broker, and other people's clients and Spark, who
are patient. What the second says is shown when the first is done. With arguments there is one run
of pytest, with them.

Thousands of tests with real processes, on a machine whose speed nobody promises: one of them may
lose a race against its own time limit. A test that fails twice, or is one of more than AGAIN_MAX,
fails the run; so does a test of the core. One that passes the second time is printed as such, so
that it is looked into; the slow tiers have no second try.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

AGAIN_MAX = 5
APART = ("tests/tidy",)  # `make lint`, which `make test` runs first
BESIDE = ("tests/unit", "tests/sim", "tests/property", "tests/compat", "tests/spark")
BESIDE_NICE = 10
THE_SECOND = "--beside"
CORE_FAILED = 100
CACHE, BESIDE_CACHE = Path(".pytest_cache"), Path(".pytest_cache/beside")


def run(cache: Path, *arguments: str) -> int:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--durations=40", "-o", f"cache_dir={cache}", *arguments]
    ).returncode


def _last_failed(cache: Path) -> Path:
    return cache / "v" / "cache" / "lastfailed"


def failed_of(cache: Path) -> list[str]:
    return sorted(json.loads(_last_failed(cache).read_text())) if _last_failed(cache).exists() else []


def the_second() -> int:
    """The second run, in a process of its own: pytest's status, and CORE_FAILED more when the
    core's own tests fail.
    """
    core = subprocess.run(["make", "--no-print-directory", "-C", "native/tests", "check"]).returncode
    status = run(BESIDE_CACHE, *BESIDE)
    return status + (CORE_FAILED if core else 0)


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


def again(cache: Path, failed: list[str], *arguments: str) -> int:
    print(
        f"\n{len(failed)} failed and {'is' if len(failed) == 1 else 'are'} run once more, alone:",
        *failed,
        sep="\n  ",
        flush=True,
    )
    status = run(cache, "--last-failed", "--last-failed-no-failures=none", *arguments)
    if status == 0:
        print("\npassed the second time, to be looked into:", *failed, sep="\n  ", flush=True)
    return status


def main(arguments: list[str]) -> int:
    core_failed = False
    for cache in (CACHE, BESIDE_CACHE):
        _last_failed(cache).unlink(missing_ok=True)
    if arguments:
        runs = {CACHE: run(CACHE, *arguments)}
    else:
        with beside() as statuses:
            status = run(CACHE, "tests", *(f"--ignore={folder}" for folder in (*APART, *BESIDE)))
        core_failed = statuses[0] >= CORE_FAILED
        runs = {CACHE: status, BESIDE_CACHE: statuses[0] % CORE_FAILED}
    failed = {cache: failed_of(cache) if status == 1 else [] for cache, status in runs.items()}
    hopeless = [status for cache, status in runs.items() if status and not failed[cache]]
    if hopeless or sum(map(len, failed.values())) > AGAIN_MAX:
        return hopeless[0] if hopeless else 1
    ended = [
        again(cache, names, *(arguments or (BESIDE if cache == BESIDE_CACHE else ())))
        for cache, names in failed.items()
        if names
    ]
    if core_failed:
        print(
            "\nthe core's own tests failed, see above; they have no second try: what fails there now and then is a race"
            " of ours",
            flush=True,
        )
    return max([*ended, CORE_FAILED if core_failed else 0])


if __name__ == "__main__":
    sys.exit(the_second() if sys.argv[1:] == [THE_SECOND] else main(sys.argv[1:]))
