"""Scrapes of the metrics while a directory does not answer."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

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
from tests.unit.acceptor.handler_broker import HandlerBroker
from tests.unit.acceptor.test_handler_metadata import create

SIZE, FREE, PARTITIONS = "mqd_partition_size_bytes", "mqd_log_dir_free_bytes", 6


def shown(found: Metrics) -> dict[str, dict[str, float]]:
    """Of a scrape: the values of those by the first label that tells them apart."""
    return {
        family.name: {
            sample.labels.get("partition") or sample.labels.get("directory") or "": sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(found.render().decode())
    }


def test_a_directory_that_hangs_holds_up_no_scrape_and_takes_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scrape was a thread that waited behind the one before, and there were no metrics while a
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
    monkeypatch.setattr(metrics, "SIZES_KEPT_S", 0.0)
    monkeypatch.setattr(measuring, "ANSWER_S", 20.0)

    async def run() -> None:
        async with HandlerBroker(tmp_path) as broker:
            await create(broker, "t", PARTITIONS)
            found = Metrics(Observer(broker.broker, broker.control, 2, tmp_path / "run"))
            sound = shown(found)
            assert sound[SIZE] == {str(index): 4711 for index in range(PARTITIONS)} and len(sound[FREE]) == 2
            hanging.append(True)
            monkeypatch.setattr(measuring, "ANSWER_S", 0.01)
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


def test_a_costly_question_is_asked_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(measuring.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(measuring.time, "thread_time", lambda: 0.5)
    answers = iter(range(10))
    kept = measuring.Kept(lambda: next(answers), 10.0)

    def known() -> int | None:
        kept.refresh()
        return kept.known()

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
            assert faults() == [f"broker {own.node_id} has lost its lease: it does not reach the active controller"]
            broker.control.set_endpoint_state(1, native.ProcessState.DEAD, 1)
            broker.broker.metadata.brokers[own.node_id] = msgspec.structs.replace(own, fenced=True)
            assert faults() == [
                "worker 1 does not run",
                f"broker {own.node_id} is fenced: the active controller does not hear from it",
            ]
            del broker.broker.metadata.brokers[own.node_id]
            assert faults()[1:] == [f"broker {own.node_id} is not registered"]

    asyncio.run(run())


def test_an_acceptor_loads_only_what_it_serves_with() -> None:
    """Prometheus' client brings HTTP servers with it; OAUTHBEARER an HTTP client."""
    program = "import mqd.acceptor.__main__, gc, sys; print(*sys.modules); sys.exit(not gc.isenabled())"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"prometheus_client", "http.client", "http.server", "urllib.request", "jwt"}.intersection(loaded)
