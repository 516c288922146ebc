"""The share of the slow tier that one CI run has time for, after `make test`.

    python -m tests.slow_share [--seed SEED] [--spent SECONDS]

The seed, by default the date and the commit, decides the order, so that every test has its turn.
Modules are dealt in hands of a few tests, so that one module of long tests does not fill a whole
run. No test begins after BEGIN_MINUTES of the run, of which SPENT are over; the last one ends, or
fails, before END_MINUTES. A failure is printed with the command that repeats it.
"""

from __future__ import annotations

import argparse
import datetime
import random
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import pytest

BEGIN_MINUTES, END_MINUTES = 40, 52
HAND = 3  # tests of one module in a row: its fixtures are set up once for them
LONG_MINUTES = 25  # a limit beyond this is patience, not an estimate
NO_TIME = f"no test is begun after minute {BEGIN_MINUTES}"


def default_seed() -> str:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return f"{datetime.date.today()}-{commit}" if commit else str(datetime.date.today())


def dealt(tests: Sequence[str], seed: str) -> list[str]:
    """All of the tests in the order of a seed: groups of HAND tests of one module."""
    chance = random.Random(seed)
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        modules[test.partition("::")[0]].append(test)
    hands = []
    for module in modules.values():
        chance.shuffle(module)
        hands += [module[first : first + HAND] for first in range(0, len(module), HAND)]
    chance.shuffle(hands)
    return [test for hand in hands for test in hand]


def limit(minutes: float, seconds_max: float) -> float | None:
    """The seconds that a test that begins now may take, or None: it is too late to begin one."""
    left = (END_MINUTES - minutes) * 60
    if minutes >= BEGIN_MINUTES or min(seconds_max, LONG_MINUTES * 60) > left:
        return None
    return min(seconds_max, left)


def command(test: str) -> str:
    return f"{sys.executable} -m pytest -q --tier=slow {shlex.quote(test)}"


class Share:
    """The pytest plugin: order, time limit, and the summary at the end."""

    def __init__(self, seed: str, began: float) -> None:
        self._seed, self._began = seed, began
        self._failed: list[str] = []
        self._count = self._run = 0
        self.stopped = ""

    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test] for test in dealt(list(by_name), self._seed)]
        self._count = len(items)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        marker = item.get_closest_marker("timeout")
        own = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
        minutes = self._minutes()
        seconds = limit(minutes, own)
        if seconds is None:
            item.add_marker(pytest.mark.skip(reason=NO_TIME if minutes >= BEGIN_MINUTES else f"{own:.0f} s do not fit"))
            if minutes >= BEGIN_MINUTES:
                item.session.shouldstop = self.stopped = NO_TIME
        else:
            item.add_marker(pytest.mark.timeout(seconds), append=False)
            self._run += 1
        yield

    def status(self, message: int) -> int:
        """A run that was cut short by its own time limit succeeds if no test failed."""
        ended = self.stopped and message == pytest.ExitCode.INTERRUPTED
        return int(bool(self._failed)) if ended else message

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self._failed:
            self._failed.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.line(f"{self._run} of {self._count} slow tests, chosen by the seed {self._seed}")
        for test in self._failed:
            terminalreporter.line(f"repeat it: {command(test)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", default=default_seed(), help="decides the order; by default the date and the commit")
    parser.add_argument("--spent", type=float, default=0.0, help="seconds that are over of the run")
    parser.add_argument("tests", nargs="*", default=["tests"])
    options = parser.parse_args(arguments)
    share = Share(options.seed, time.monotonic() - options.spent)
    print(f"the slow tier in the order of --seed {options.seed}", flush=True)
    return share.status(int(pytest.main(["-q", "--tier=slow", *options.tests], plugins=[share])))


if __name__ == "__main__":
    sys.exit(main())
