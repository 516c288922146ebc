"""CPU seconds of each test, including the processes that it starts: a pytest plugin, and its
report.

Wall time says little on a machine with other load; CPU time varies by some percent.
`durations.json` lists the slowest tests of `make test`; a test that takes twice as long is named at
the end of a run. This command writes that file:

    make durations

A fixture of session scope (Spark's) is counted under its own name, any other one with the first
test that needs it. A process that neither the test nor its children wait for is not counted once it
has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

KEPT = Path(__file__).with_name("durations.json")
KEPT_COUNT = 100
SHOWN_COUNT = 20
# a test has to be this much slower, by the factor and by the seconds, before it is named
SLOWER_FACTOR, SLOWER_SECONDS = 2.0, 1.0
COLLECTION = "collection"
_TICKS = os.sysconf("SC_CLK_TCK")


def _of_children(pid: int) -> float:
    """CPU seconds of the child processes of `pid`, and of those that they have waited for."""
    seconds = 0.0
    with contextlib.suppress(OSError):  # a process may end while it is read
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                with contextlib.suppress(OSError):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    seconds += sum(map(int, fields[11:15])) / _TICKS + _of_children(child)
    return seconds


def used() -> float:
    """CPU seconds of this process and all its descendants so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _of_children(os.getpid())


class Meter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._fixtures_seconds = 0.0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self) -> None:
        self._seconds[COLLECTION] = round(used(), 2)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, fixtures = used(), self._fixtures_seconds
        yield
        own = used() - began - (self._fixtures_seconds - fixtures)
        self._seconds[item.nodeid] = max(0.0, round(own, 2))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
        if fixturedef.scope != "session":
            yield
            return
        began, others = used(), self._fixtures_seconds
        yield
        own = max(0.0, used() - began - (self._fixtures_seconds - others))  # it may have requested another fixture
        self._fixtures_seconds += own
        name = f"{folder(request._pyfuncitem.nodeid)}::{fixturedef.argname} (fixture)"
        self._seconds[name] = round(self._seconds.get(name, 0.0) + own, 2)

    def pytest_sessionfinish(self) -> None:
        write(self._seconds, self._path)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, help="writes the CPU seconds of each test into this file")


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--cpu-seconds")) is not None:
        config.pluginmanager.register(Meter(path))


def folder(test: str) -> str:
    """tests/unit for tests below it; `collection` unchanged."""
    return "/".join(test.partition("::")[0].split("/")[:2])


def slower(now: Mapping[str, float], kept: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The tests that take twice as long as before, with both times. The previous time of a test
    that was not among the slowest is at most that of the last of them.
    """
    most = min(kept.values(), default=float("inf"))
    was = {test: kept.get(test, most) for test in now if test != COLLECTION}
    return {
        test: (before, now[test])
        for test, before in was.items()
        if now[test] > SLOWER_FACTOR * before and now[test] > before + SLOWER_SECONDS
    }


def slowest(seconds: Mapping[str, float], count: int) -> dict[str, float]:
    tests = ((test, taken) for test, taken in seconds.items() if test != COLLECTION)
    return dict(sorted(tests, key=lambda one: (-one[1], one[0]))[:count])


def report(now: Mapping[str, float], kept: Mapping[str, float]) -> str:
    folders: Counter[str] = Counter()
    for test, seconds in now.items():
        folders[folder(test)] += seconds
    lines = ["CPU seconds:"]
    lines += [f"  {seconds:7.1f}  {name}" for name, seconds in folders.most_common()]
    lines += [f"  {sum(folders.values()):7.1f}  together", f"the {SHOWN_COUNT} slowest:"]
    lines += [f"  {seconds:7.1f}  {test}" for test, seconds in slowest(now, SHOWN_COUNT).items()]
    if doubled := slower(now, kept):
        lines.append(f"twice as slow as in tests/{KEPT.name}, or more:")
        lines += [
            f"  {after:7.1f}  {test}, at most {before:.1f} before" for test, (before, after) in sorted(doubled.items())
        ]
    return "\n".join(lines)


def read(path: Path) -> dict[str, float]:
    return json.loads(path.read_text()) if path.exists() else {}


def write(seconds: Mapping[str, float], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(seconds))


def together(files: Iterable[Path]) -> dict[str, float]:
    """The sum of several runs; each has its own collection."""
    seconds: Counter[str] = Counter()
    for file in files:
        seconds.update(read(file))
    return dict(seconds)


def keep(now: Mapping[str, float], path: Path = KEPT) -> None:
    path.write_text(json.dumps(slowest(now, KEPT_COUNT), indent=1) + "\n")
