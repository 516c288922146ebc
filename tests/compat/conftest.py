"""Shared by all of tests/compat: the folder of unpacked clients, a client by name, a kcat."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf.peers.peer import Unavailable
from tests.compat.clients import NAMES, Client, client_of
from tests.compat.kafka_tools import KafkaTools
from tests.compat.kcat import Kcat, find_kcat


@pytest.fixture(scope="session")
def unpacked_clients(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept between runs; only for this run if pytest's cache is disabled."""
    cache = getattr(request.config, "cache", None)
    return Path(cache.mkdir("clients")) if cache is not None else tmp_path_factory.mktemp("clients")


# Not session-scoped: pytest would then order tests by client first and restart the shared brokers
# for each.
@pytest.fixture(params=NAMES)
def client(request: pytest.FixtureRequest, unpacked_clients: Path) -> Client:
    return client_of(request.param, unpacked_clients)


@pytest.fixture(scope="session")
def kcat(unpacked_clients: Path) -> Kcat:
    return find_kcat(unpacked_clients)


@pytest.fixture(scope="module")
def kafka_tools(tmp_path_factory: pytest.TempPathFactory) -> KafkaTools:
    """Apache Kafka's tools and broker. Skips, with the reason, where there is no Java 17 or the
    jars cannot be obtained.
    """
    try:
        return KafkaTools(tmp_path_factory.mktemp("kafka"))
    except Unavailable as why:
        pytest.skip(f"Apache Kafka: {why}")
