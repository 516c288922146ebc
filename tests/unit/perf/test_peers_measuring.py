"""The run of the peer comparison, with fake peers and drivers: turns, failures, the time limit."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from perf.peers import measuring, plan
from perf.peers.driving import KAFKA_TOOLS, LEAN, LoadFailed
from perf.peers.measuring import FAILURES_MAX, Bounds, Laboratory
from perf.peers.peer import Load
from perf.peers.plan import BASE, Step
from perf.peers.processes import CpuSeconds, PeerFailed

THROUGHPUT, ALONG = Step(plan.THROUGHPUT), Step(plan.ALONG)


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "quiesce", lambda: None)
    monkeypatch.setattr(measuring, "touch", lambda megabytes: None)


class FakePeer:
    """The part of a Peer that the comparison uses."""

    settings = flush_settings = ""
    brokers = 1
    start_seconds = 1.5

    def __init__(self, directory: Path | str, heap: str = "", protocol: str = "kafka") -> None:
        self.directory, self.heap, self.protocol = Path(directory), heap, protocol
        self.name = self.directory.name
        self.starts = 0
        self.topics: list[str] = []
        self.up = False
        self.cannot = ""
        self.cpu = 0.0

    def kill_leader(self, topic: str) -> None: ...

    def prepare(self) -> None: ...

    def start(self) -> None:
        self.starts += 1
        self.up = True

    def stop(self) -> None:
        self.up = False

    drop = stop

    def running(self) -> bool:
        return self.up

    def version(self) -> str:
        return "1"

    def unsupported_reason(self, load: Load) -> str:
        return self.cannot

    def make_topic(self, name: str, load: Load) -> None:
        self.topics.append(name)

    def drop_topic(self, name: str) -> None:
        self.topics.remove(name)

    def topic_disk_bytes(self, topic: str) -> int:
        return 0

    def cpu_spent(self) -> CpuSeconds:
        self.cpu += 1.0
        return CpuSeconds(self.cpu, self.cpu / 4, self.cpu * 3 / 4)

    def pss_bytes(self) -> int:
        return 5_000_000


class FakeDriver:
    name = "made up"

    def __init__(self, rates: dict[str, float] | None = None) -> None:
        self.during: Callable[[], None] = lambda: None  # a latency
        self.rates = rates or {}
        self.requested: list[tuple] = []
        self.failing: dict[str, Exception] = {}

    def _do(self, what: str, peer: FakePeer, **words) -> None:
        self.requested.append((what, peer.name, words))
        if peer.name in self.failing:
            raise self.failing[peer.name]

    def produce(self, peer, topic, load, *, records, milliseconds, reading=False) -> dict:
        self._do("produce", peer, records=records, reading=reading)
        return {"records": 1000, "stored": 1006, "seconds": 1000 / self.rates.get(peer.name, 1000.0)}

    def consume(self, peer, topic, load, *, records) -> dict:
        self._do("consume", peer, records=records)
        return {"records": records, "seconds": 1.0}

    def latency(self, peer, topic, load, *, rate, milliseconds, warm_milliseconds) -> dict:
        self._do("latency", peer, rate=rate)
        self.during()
        return {
            "records": 100,
            "rate": rate,
            "reached": rate,
            "seconds": 1.0,
            "acknowledged": {"count": 1, "p99_us": 7.0, "max_us": 2_500_000.0},
        }


def laboratory(
    peers: list[FakePeer], driver: FakeDriver, tools: FakeDriver | None = None, seconds: float = 1e6, **more
) -> Laboratory:
    return Laboratory(peers, {"kafka": driver, "redis": driver}, tools, log=lambda line: None, seconds=seconds, **more)  # type: ignore[arg-type, list-item, dict-item]


def _who(driver: FakeDriver, what: str = "produce") -> list[str]:
    return [name for kind, name, _ in driver.requested if kind == what]


def test_peers_are_measured_in_turn_and_the_turn_changes() -> None:
    driver = FakeDriver()
    lab = laboratory([FakePeer("a"), FakePeer("b")], driver)
    lab.run([THROUGHPUT], 3)
    assert _who(driver) == ["a", "b", "b", "a", "a", "b"]
    assert [sample.round for sample in lab.samples] == [0, 0, 1, 1, 2, 2]
    assert lab.rounds == 3


def test_produced_records_are_all_read_back_and_the_topic_is_deleted() -> None:
    driver, peer = FakeDriver(), FakePeer("a")
    lab = laboratory([peer], driver)
    lab.run([THROUGHPUT], 1)
    assert driver.requested[1] == ("consume", "a", {"records": 1006})
    assert peer.topics == []
    values = lab.samples[0].values
    assert (values["records_per_s"], values["pss_mb"], values["consume_records_per_s"]) == (1000.0, 5.0, 1006.0)
    assert values["broker_cpu_s_per_million"] == 1000.0


def test_a_failing_peer_stops_no_other_and_its_reason_is_kept(tmp_path: Path) -> None:
    driver, kept = FakeDriver(), tmp_path / "samples.jsonl"
    driver.failing["a"] = LoadFailed("nothing came\nmore of it")
    peers = [FakePeer("a"), FakePeer("b")]
    lab = laboratory(peers, driver, samples_file=kept)
    lab.run([THROUGHPUT], 2)
    assert {sample.peer for sample in lab.samples} == {"b"}
    assert [failure.reason for failure in lab.failures] == ["nothing came", "nothing came"]
    assert peers[0].topics == [], "its topics went all the same"
    assert [("failed" in json.loads(text), json.loads(text)["peer"]) for text in kept.read_text().splitlines()] == [
        (True, "a"),
        (False, "b"),
        (False, "b"),
        (True, "a"),
    ]


def test_a_peer_that_died_is_restarted() -> None:
    driver, peer = FakeDriver(), FakePeer("a")
    lab = laboratory([peer], driver)
    lab.run([THROUGHPUT], 1)
    peer.up = False
    lab.run([THROUGHPUT], 1)
    assert peer.starts == 2
    assert len(lab.samples) == 2


def test_a_peer_that_keeps_failing_is_skipped() -> None:
    driver = FakeDriver()
    driver.failing["a"] = PeerFailed("it ended")
    lab = laboratory([FakePeer("a"), FakePeer("b")], driver)
    lab.run([THROUGHPUT], FAILURES_MAX + 3)
    assert len(lab.failures) == FAILURES_MAX
    assert len(lab.samples) == FAILURES_MAX + 3
    facts = {found.name: found.skipped for found in lab.facts()}
    assert facts["a"].endswith("it ended") and not facts["b"]


def test_a_peer_without_the_tools_is_not_a_failure() -> None:
    driver, peer = FakeDriver(), FakePeer("a")
    peer.cannot = "does not fsync"
    lab = laboratory([peer, FakePeer("b", protocol="redis")], driver)
    lab.run([THROUGHPUT, dataclasses.replace(THROUGHPUT, everyone=True), Step(plan.THROUGHPUT, driver=KAFKA_TOOLS)], 1)
    assert (_who(driver), lab.failures) == (["b"], []), "b only where everyone is asked, and there are no tools here"


def test_the_lean_client_only_produces() -> None:
    driver, lean = FakeDriver(), FakeDriver()
    lab = Laboratory(
        [FakePeer("a"), FakePeer("b", protocol="redis")],
        {"kafka": driver, "redis": driver},
        None,
        {"kafka": lean},
        log=lambda line: None,
        seconds=1e6,
    )  # type: ignore[list-item, dict-item]
    lab.run([Step(plan.PRODUCE, driver=LEAN, everyone=True)], 1)
    assert [requested[:2] for requested in lean.requested] == [("produce", "a")] and not driver.requested, (
        "and only whose protocol has one"
    )
    assert "consume_records_per_s" not in lab.samples[0].values


def test_rates_are_shares_of_the_peers_maximum_or_fixed() -> None:
    driver = FakeDriver({"a": 8000.0, "b": 2000.0})
    lab = laboratory([FakePeer("a"), FakePeer("b")], driver)
    lab.run([ALONG, Step(plan.LATENCY, share=0.25), Step(plan.LATENCY, rate=1500)], 1)
    assert [(name, words["rate"]) for what, name, words in driver.requested if what == "latency"] == [
        ("a", 2000),
        ("b", 500),
        ("a", 1500),
        ("b", 1500),
    ]
    assert lab.samples[-1].values["acknowledged_p99_us"] == 7.0


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (plan.READERS, [("consume", {"records": 2000 * 4 + 6})] * 9),
        (plan.CATCH_UP, [("produce", {"records": 400_000, "reading": False}), ("consume", {"records": 1006})]),
        (plan.NEIGHBOUR, [("produce", {"records": 8_000_000, "reading": False})]),
    ],
)
def test_other_work_runs_while_a_latency_is_measured(kind: str, wanted: list[tuple]) -> None:
    driver, peer = FakeDriver(), FakePeer("a")
    met = threading.Event()

    def during() -> None:
        deadline = time.monotonic() + 20
        while [what[::2] for what in driver.requested if what[0] != "latency"][: len(wanted)] != wanted:
            assert time.monotonic() < deadline, driver.requested
        met.set()

    driver.during = during
    bounds = Bounds(latency_ms=3000, latency_warm_ms=1000)
    lab = laboratory([peer], driver, bounds=bounds)
    lab.run([Step(plan.LATENCY, rate=2000, beside=kind)], 1)
    assert met.is_set() and not lab.failures
    assert "broker_cpu_s_per_million" not in lab.samples[0].values, "it did other work too"
    assert peer.topics == []


def test_a_failure_of_the_other_work_fails_the_measurement() -> None:
    driver = FakeDriver()
    lab = laboratory([FakePeer("a")], driver)

    def consume(*words: object, **more: object) -> dict:
        raise LoadFailed("nothing came")

    driver.consume = consume  # type: ignore[method-assign]
    lab.run([Step(plan.LATENCY, rate=2000, beside=plan.READERS)], 1)
    assert not lab.samples and lab.failures[0].reason == "nothing came"


def test_a_failover_is_the_longest_wait_of_a_second_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "FAILOVER_AFTER_S", 0.0)
    killed: list[str] = []
    monkeypatch.setattr(FakePeer, "kill_leader", lambda peer, topic: killed.append(peer.name))
    peer = FakePeer("a")
    lab = laboratory([peer], FakeDriver())
    lab.run([Step(plan.FAILOVER, plan.ONE_PARTITION)], 1)
    assert lab.samples[0].values == {"failover_seconds": 2.5}
    assert killed == ["a-second-1"] and peer.up


def test_without_a_maximum_there_is_no_rate_and_a_reason() -> None:
    lab = laboratory([FakePeer("a")], FakeDriver())
    lab.run([Step(plan.LATENCY, share=0.5)], 1)
    assert not lab.samples
    assert "maximum is not known" in lab.failures[0].reason


def test_kafkas_tool_is_given_a_count_that_takes_seconds() -> None:
    driver, tools = FakeDriver({"a": 40_000.0}), FakeDriver({"a": 10_000.0})
    lab = laboratory([FakePeer("a")], driver, tools, bounds=Bounds(tools_seconds=4.0))
    lab.run([THROUGHPUT, Step(plan.THROUGHPUT, driver=KAFKA_TOOLS)], 2)
    assert [words["records"] for what, _, words in tools.requested if what == "produce"] == [80_000, 40_000], (
        "half of the neutral rate first, then its own"
    )
    assert [words["records"] for what, _, words in driver.requested if what == "produce"] == [
        Bounds().payload_bytes // BASE.record_bytes
    ] * 2


def test_at_the_time_limit_the_run_ends_and_keeps_its_results() -> None:
    now = [0.0]

    class Slow(FakeDriver):
        def produce(self, *words, **more) -> dict:
            now[0] += 10.0
            return super().produce(*words, **more)

    driver = Slow()
    lab = laboratory([FakePeer("a"), FakePeer("b")], driver, seconds=45.0, clock=lambda: now[0])
    lab.run([THROUGHPUT], 10)
    assert len(lab.samples) == 4, "two rounds of 20 seconds; a third measurement of 10 would not end in time"
    assert now[0] == 40.0


def test_start_up_is_measured_with_a_second_cold_instance() -> None:
    peer = FakePeer("a")
    lab = laboratory([peer], FakeDriver())
    lab.run([Step(plan.START)], 2)
    assert lab.samples[0].values == {"start_seconds": 1.5, "idle_pss_mb": 5.0}
    assert peer.up and peer.starts == 1


def test_warm_up_is_not_counted_and_its_failures_are_ignored() -> None:
    driver = FakeDriver()
    driver.failing["a"] = LoadFailed("no")
    lab = laboratory([FakePeer("a"), FakePeer("b")], driver)
    lab.warm()
    assert not lab.samples and len(lab.failures) == 1
    assert _who(driver) == ["a", "b"]


def test_a_topic_that_cannot_be_deleted_loses_no_measurement() -> None:
    class Keeping(FakePeer):
        def drop_topic(self, name: str) -> None:
            raise PeerFailed("not now")

    driver, message = FakeDriver(), []
    lab = Laboratory([Keeping("a")], {"kafka": driver}, None, log=message.append, seconds=1e6)  # type: ignore[list-item, dict-item]
    lab.run([THROUGHPUT], 1)
    assert len(lab.samples) == 1 and not lab.failures
    driver.failing["a"] = LoadFailed("nothing came")
    lab.run([THROUGHPUT], 1)
    assert lab.failures[0].reason == "nothing came"
    assert sum("stays: not now" in line for line in message) == 2


def test_as_much_page_cache_is_touched_as_will_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr(measuring, "touch", touched.append)
    lab = laboratory(
        [FakePeer("a")],
        FakeDriver({"a": 100_000.0}),
        bounds=Bounds(throughput_ms=2000, latency_ms=3000, latency_warm_ms=1000, payload_bytes=300_000_000),
    )
    lab.run([THROUGHPUT, ALONG, Step(plan.LATENCY, share=0.5), Step(plan.THROUGHPUT, plan.REPLICATED)], 1)
    assert touched == [300, 204, 204, 900], (
        "all that it may write until its rate is known; then what the rate writes in the time; in all replicas"
    )
