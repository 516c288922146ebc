"""Shared fixtures: real brokers on free ports, both I/O backends, the test tiers."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqd.shm import tools
from tests import broker as brokers_of_tests
from tests import bytecode, stale_build, tiers
from tests.broker import Broker
from tests.polling import PATIENCE_S


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        default="quick",
        choices=("quick", "slow", "long"),
        help="slow: only the tests of the slow tier; long: both",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Under nohup or in the background of a shell these signals are ignored, and the brokers under
    test would inherit that: ctrl-C would not stop them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    tools.RESPONSE_TIMEOUT_S = PATIENCE_S
    brokers_of_tests.is_forked = tiers.is_quick = config.getoption("--tier") == "quick"
    root = Path(__file__).resolve().parents[1]
    if source := stale_build.newer_source(root):
        pytest.exit(f"{source.relative_to(root)} was changed after the native library was built: run make venv", 4)
    bytecode.keep_apart(root / ".pytest_cache" / "bytecode")


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """A command that runs in this process may set variables; the next test must not see them."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MQD_")}
    yield
    after = {name: value for name, value in os.environ.items() if name.startswith("MQD_")}
    if after != before:
        for name in after:
            del os.environ[name]
        os.environ.update(before)
        pytest.fail(f"the test has changed {dict(after.items() ^ before.items())} for all that follow")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collected items live as long as the run: the garbage collector does not scan them while they
    are collected, nor at each later collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier == "long":
        return
    parts: dict[bool, list[pytest.Item]] = {False: [], True: []}
    for item in items:
        parts[_is_slow(item)].append(item)
    if left_out := parts[tier == "quick"]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = parts[tier == "slow"]


def _is_slow(item: pytest.Item) -> bool:
    """A test of ours on the other I/O backend is slow, unless it is marked `both_backends`; the
    native tests always run on both. Markers, not `item.keywords`: those contain the names of all
    parent directories, and one of them may be named "slow".
    """
    if item.get_closest_marker("slow"):
        return True
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("io_backend") == SECOND_BACKEND and not item.get_closest_marker("both_backends")


# tests without this fixture use the default: io_uring where the kernel allows it
FIRST_BACKEND, SECOND_BACKEND = "epoll", "io_uring"


@pytest.fixture(scope="session", params=[FIRST_BACKEND, SECOND_BACKEND])
def io_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def shared_broker(io_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker of two workers per I/O backend, for tests whose only state is their topics."""
    with Broker(tmp_path_factory.mktemp(f"broker-{io_backend}"), config={"io.backend": io_backend}) as broker:
        yield broker


@pytest.fixture
def start_broker(tmp_path: Path) -> Iterator[Callable[..., Broker]]:
    """start_broker(workers=2, config={...}) -> a running Broker; all are stopped at the end."""
    brokers: list[Broker] = []

    def start(name: str = "data", **options) -> Broker:
        broker = Broker(tmp_path / name, **options)
        brokers.append(broker)
        return broker.start()

    yield start
    for broker in brokers:
        broker.stop()
