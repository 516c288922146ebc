"""The metrics page: scrapes while a directory hangs; series of topics while partitions are added
and removed.
"""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqd import native
from mqd.acceptor.metrics import directories as measuring
from mqd.acceptor.metrics import health
from mqd.acceptor.metrics import page as metrics
from mqd.acceptor.metrics.observer import HANDLER_BUCKETS, Observer
from mqd.acceptor.metrics.page import Metrics
from mqd.acceptor.metrics.partitions import FAMILIES
from mqd.acceptor.metrics.topics import TopicTraffic
from mqd.native import NativeError
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

Slots = dict[int, tuple[int, int, int]]
SIZE, FREE, PARTITIONS = "mqd_partition_size_bytes", "mqd_log_dir_free_bytes", 6


def shown(found: Metrics) -> dict[str, dict[str, float]]:
    """The samples of a scrape by the first label that distinguishes them."""
    return {
        family.name: {
            sample.labels.get("partition") or sample.labels.get("directory") or "": sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(found.render().decode())
    }


def test_a_hung_directory_delays_no_scrape_and_takes_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scrape used to block a thread behind the previous one, and there were no metrics while a
    disk hung.
    """
    let_go = threading.Event()
    hanging: list[bool] = []
    hung: list[threading.Thread] = []

    def size_of(path: Path) -> int:
        if path.is_relative_to(tmp_path / "b") and hanging:
            hung.append(threading.current_thread())
            assert let_go.wait(60)
        return 4711

    monkeypatch.setattr(metrics, "size_of", size_of)
    monkeypatch.setattr(metrics, "SIZES_CACHE_S", 0.0)
    monkeypatch.setattr(measuring, "WAIT_S_MAX", 20.0)

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "t", PARTITIONS)
            found = Metrics(Observer(broker.broker, broker.control, 2, tmp_path / "run"))
            sound = shown(found)
            assert sound[SIZE] == {str(index): 4711 for index in range(PARTITIONS)} and len(sound[FREE]) == 2
            hanging.append(True)
            monkeypatch.setattr(measuring, "WAIT_S_MAX", 0.01)
            scrapes = [threading.Thread(target=lambda: results.append(shown(found)), daemon=True) for _ in range(5)]
            results: list[dict[str, dict[str, float]]] = []
            for scrape in scrapes:
                scrape.start()
            for scrape in scrapes:
                scrape.join(10)
            assert len(results) == 5 and len(set(hung)) == 1
            assert all(
                result[SIZE] == sound[SIZE]
                and len(result[FREE]) == 2
                and result["mqd_partition_online"].keys() == sound[SIZE].keys()
                for result in results
            )
            new = shown(Metrics(Observer(broker.broker, broker.control, 2, tmp_path / "run")))
            known = {
                str(partition.index) for partition in broker.metadata.topics["t"].partitions if partition.log_dir == 0
            }
            assert new[SIZE].keys() <= known and list(new[FREE]) in ([], [str(tmp_path / "a")]), (
                "of a directory that has never answered nothing is said"
            )
            let_go.set()

    try:
        asyncio.run(asyncio.wait_for(run(), 120))
    finally:
        let_go.set()


def test_requests_are_counted_by_time_and_api(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            observer = Observer(broker.broker, broker.control, 2, tmp_path / "run")
            observer.observe("METADATA", 0.0001, False)
            observer.observe("METADATA", 0.003, False)
            observer.observe("METADATA", 31.0, True)
            text = Metrics(observer).render().decode()
            lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("mqd_handler"))
            assert float(lines.pop('mqd_handler_seconds_sum{api="METADATA"}')) == pytest.approx(31.0031)
            assert lines.pop('mqd_handler_failures_total{api="METADATA"}') == "1.0"
            assert lines.pop('mqd_handler_seconds_count{api="METADATA"}') == "3.0"
            counts = {le: lines[f'mqd_handler_seconds_bucket{{api="METADATA",le="{le}"}}'] for le in ("0.0001", "30.0")}
            assert counts == {"0.0001": "1.0", "30.0": "2.0"} and len(lines) == len(HANDLER_BUCKETS) + 1

    asyncio.run(run())


def test_series_of_partitions_can_be_left_out(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "t", PARTITIONS)
            observer = Observer(broker.broker, broker.control, 2, tmp_path / "run")
            whole = Metrics(observer).render().decode()
            assert whole.count('{topic="t",partition="') == len(FAMILIES) * PARTITIONS
            observer.shows_partitions = False
            assert "partition=" not in Metrics(observer).render().decode()

    asyncio.run(run())


def test_an_expensive_measurement_is_taken_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(measuring.time, "thread_time", lambda: 0.5)
    responses = iter(range(10))
    kept = measuring.CachedQuery(lambda: next(responses), 10.0)

    def known() -> int | None:
        kept.refresh()
        return kept.wait_for_result()

    assert known() == 0
    now[0] += 49.0
    assert known() == 0
    now[0] += 2.0
    assert known() == 1


def test_why_a_broker_is_not_ready(tmp_path: Path) -> None:
    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            own = broker.broker.metadata.brokers[broker.broker.node_id]

            def faults() -> list[str]:
                return [fault.partition(";")[0] for fault in health.faults(broker.broker, broker.control, 2)]

            for worker in range(2):
                broker.control.set_endpoint_state(worker, native.ProcessState.RUNNING, 1)
            assert faults() == []
            broker.control.set_broker(own.epoch, own.incarnation, 1)  # its deadline is long past
            assert faults() == [f"broker {own.node_id} has lost its lease: it cannot reach the active controller"]
            broker.control.set_endpoint_state(1, native.ProcessState.DEAD, 1)
            broker.broker.metadata.brokers[own.node_id] = msgspec.structs.replace(own, fenced=True)
            assert faults() == [
                "worker 1 is not running",
                f"broker {own.node_id} is fenced: the active controller receives no heartbeats from it",
            ]
            del broker.broker.metadata.brokers[own.node_id]
            assert faults()[1:] == [f"broker {own.node_id} is not registered"]

    asyncio.run(run())


def test_an_acceptor_imports_only_modules_that_it_uses() -> None:
    """Prometheus' client imports HTTP servers; OAUTHBEARER an HTTP client."""
    program = "import mqd.acceptor.__main__, gc, sys; print(*sys.modules); sys.exit(not gc.isenabled())"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"prometheus_client", "http.client", "http.server", "urllib.request", "jwt"}.intersection(loaded)


# -- topics ----------------------------------------------------------------------------------------


def broker(**topics: tuple[int, ...]) -> Any:
    """Topic -> the slots of its partitions; -1: no replica here."""
    found = {
        name: SimpleNamespace(
            name=name,
            topic_id=name.encode(),
            partitions=[SimpleNamespace(index=index, slot=slot) for index, slot in enumerate(slots)],
        )
        for name, slots in topics.items()
    }
    return SimpleNamespace(metadata=SimpleNamespace(topics=found, topics_with_logs=lambda: list(found.values())))


def traffic_shown(topics: TopicTraffic, broker: Any, slots: Slots) -> dict[str, int]:
    def traffic(slot: int) -> tuple[int, int, int]:
        if slot not in slots:
            raise NativeError(-1, "being assigned")
        return slots[slot]

    lines = topics.text(broker, traffic).splitlines()
    assert sum(line.endswith(" counter") for line in lines) == 3
    return {line.split()[0]: int(line.split()[1]) for line in lines if not line.startswith("#")}


def of(name: str, counts: tuple[int, int, int]) -> dict[str, int]:
    return dict(
        zip(
            (f'mqd_topic_{what}_total{{topic="{name}"}}' for what in ("records_in", "bytes_in", "bytes_out")),
            counts,
            strict=True,
        )
    )


def test_sums_over_partitions() -> None:
    found = traffic_shown(TopicTraffic(), broker(t=(0, 1), u=(-1,)), {0: (1, 100, 10), 1: (2, 200, 0)})
    assert found == of("t", (3, 300, 10))


def test_a_sum_stays_monotonic_when_a_partition_leaves_and_returns() -> None:
    topics = TopicTraffic()
    both = broker(t=(0, 1))
    assert traffic_shown(topics, both, {0: (10, 10, 0), 1: (5, 5, 0)}) == of("t", (15, 15, 0))
    assert traffic_shown(topics, broker(t=(-1, 1)), {1: (6, 6, 0)}) == of("t", (16, 16, 0))
    # its new slot counts from zero
    assert traffic_shown(topics, both, {0: (2, 2, 0), 1: (6, 6, 0)}) == of("t", (18, 18, 0))


def test_a_slot_cleared_between_two_scrapes_counts_from_zero() -> None:
    topics = TopicTraffic()
    assert traffic_shown(topics, broker(t=(0,)), {0: (10, 100, 50)}) == of("t", (10, 100, 50))
    assert traffic_shown(topics, broker(t=(0,)), {0: (3, 30, 60)}) == of("t", (13, 130, 110))


def test_an_unreadable_slot_only_affects_one_scrape() -> None:
    topics = TopicTraffic()
    assert traffic_shown(topics, broker(t=(0, 1)), {0: (4, 4, 4), 1: (1, 1, 1)}) == of("t", (5, 5, 5))
    assert traffic_shown(topics, broker(t=(0, 1)), {1: (2, 2, 2)}) == of("t", (6, 6, 6))
    assert traffic_shown(topics, broker(t=(0, 1)), {0: (5, 5, 5), 1: (2, 2, 2)}) == of("t", (7, 7, 7))


def test_a_deleted_topic_has_no_series() -> None:
    topics = TopicTraffic()
    traffic_shown(topics, broker(t=(0,)), {0: (1, 1, 1)})
    assert traffic_shown(topics, broker(), {}) == {}
    assert traffic_shown(topics, broker(t=(0,)), {0: (2, 2, 2)}) == of("t", (2, 2, 2))
