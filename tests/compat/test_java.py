"""The Java client's behaviours: groups of both protocols, transactions of version 2, an
administrator's requests, compacted topics.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.compat.java_client import build_java_client, run_java_client
from tests.tiers import quick

PARTS = {"group": 6, "group848": 5, "txn": 5, "admin": 7, "compaction": 6}
CONFIG = {
    "group.initial.rebalance.delay.ms": "50",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
    "log.cleaner.backoff.ms": "100",
}


@pytest.fixture(scope="session")
def java_home() -> Path:
    return build_java_client()


@pytest.fixture(scope="module", params=["epoll", pytest.param("io_uring", marks=pytest.mark.slow)])
def broker(
    request: pytest.FixtureRequest, java_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("java"), config={**CONFIG, "io.backend": request.param}) as broker:
        yield broker


@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", quick(PARTS, ["group848", "txn", "admin"]))
def test_java(broker: Broker, java_home: Path, command: str) -> None:
    held = run_java_client(java_home, broker.bootstrap, command)
    assert len(held) == PARTS[command], held
