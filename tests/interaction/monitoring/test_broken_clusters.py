"""Five brokers and clusters with a problem each: within five minutes an alert fires, `mqd doctor`
names the cause and the cure, and the overview of `mqd console` shows it.

The rules are the shipped ones, with their real durations, and all problems are caused at once: the
whole takes as long as the slowest alert.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mqd import Consumer, Producer, TopicPartition
from mqd.admin import AdminClient, NewTopic
from mqd.monitoring.alerts import render_rules
from tests.broker import Broker
from tests.broker_files import faults_file
from tests.chaos.hosts import wall_clock_shim
from tests.cluster import Cluster
from tests.console_client import Browser, options
from tests.interaction.monitoring.prometheus import Prometheus
from tests.interaction.traffic import eventually

pytestmark = pytest.mark.slow

WITHIN_S = 300
AHEAD_S = 3600
HANGS_MS = 900_000
POLL_MS = {"max.poll.interval.ms": 1_800_000, "session.timeout.ms": 45_000}


class Problem(NamedTuple):
    """`labels`: some of the alert's. `cause`, `cure`: parts of the doctor's output. `seen`: a part
    of the overview.
    """

    alert: str
    labels: dict[str, str]
    cause: str
    cure: str
    seen: str


class BrokenSystems:
    """Three systems: a cluster of three hosts, of which one goes down and one has a wrong clock; a
    broker whose groups have problems; a broker whose disk hangs.
    """

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self.cluster = Cluster(directory / "cluster")
        self._clock = directory / "clock"
        self._set_clock(0)
        self.skewed = {"CHAOS_WALL_CLOCK": str(self._clock), "LD_PRELOAD": str(wall_clock_shim(directory))}
        self.cluster.brokers[2].environment |= self.skewed
        self.groups = Broker(directory / "groups", workers=1, config={"group.initial.rebalance.delay.ms": "0"})
        self._faults = faults_file(directory / "disk")
        self.disk = Broker(directory / "disk", workers=1, environment={"MQD_FILE_FAULTS": f"@{self._faults}"})
        self._stop = threading.Event()

    def _set_clock(self, ahead_s: int) -> None:
        value = (ahead_s * 1_000_000_000).to_bytes(8, sys.byteorder, signed=True)
        if not self._clock.exists():
            self._clock.write_bytes(value)
        with self._clock.open("r+b") as file:  # in place: it is mapped
            file.write(value)

    @property
    def brokers(self) -> list[Broker]:
        return [*self.cluster.brokers.values(), self.groups, self.disk]

    def start(self) -> None:
        self._stack.enter_context(self.cluster)
        for broker in (self.groups, self.disk):
            broker.start()
            self._stack.callback(broker.kill_all)  # the disk would block a clean stop
        admin = AdminClient({"bootstrap.servers": self.cluster.bootstrap})
        admin.create_topics([NewTopic("orders", num_partitions=1, replica_assignment=[[1, 2, 3]])])["orders"].result(60)
        admin = AdminClient({"bootstrap.servers": self.groups.bootstrap})
        for name in ("jobs", "events"):
            admin.create_topics([NewTopic(name, num_partitions=3)])[name].result(60)
        producer = Producer({"bootstrap.servers": self.disk.bootstrap})
        producer.produce("hung", b"value")
        assert producer.flush(60) == 0

    def consumer(self, group: str, client: str, topic: str, protocol: str) -> Consumer:
        consumer = Consumer(
            {
                "bootstrap.servers": self.groups.bootstrap,
                "group.id": group,
                "client.id": client,
                "group.protocol": protocol,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                **{name: value for name, value in POLL_MS.items() if protocol == "classic" or "poll" in name},
            }
        )
        self._stack.callback(consumer.close)
        consumer.subscribe([topic])
        return consumer

    def cause_problems(self) -> None:
        self._hold_rebalances_up()
        self._poison()
        self._set_clock(AHEAD_S)
        self.cluster.brokers[3].kill_all()
        changed = self._faults.with_suffix(".new")
        changed.write_text(f"sync:DELAY:.log:ms={HANGS_MS}")
        changed.replace(self._faults)
        producer = Producer({"bootstrap.servers": self.disk.bootstrap, "message.timeout.ms": HANGS_MS})
        producer.produce("hung", b"value")
        producer.flush(1)
        self._stack.callback(producer.purge)

    def _hold_rebalances_up(self) -> None:
        for protocol in ("classic", "consumer"):
            slow = self.consumer(f"held-{protocol}", f"slow-{protocol}", "events", protocol)
            eventually(lambda one=slow: one.poll(0.1) is None and one.assignment(), "an assignment")
            new = self.consumer(f"held-{protocol}", f"new-{protocol}", "events", protocol)
            threading.Thread(target=self._poll, args=(new,), daemon=True).start()  # slow- does not poll

    def _poll(self, consumer: Consumer) -> None:
        while not self._stop.wait(1):
            with contextlib.suppress(RuntimeError):  # it has been closed
                consumer.poll(0.1)

    def _poison(self) -> None:
        consumer = self.consumer("workers", "worker", "jobs", "classic")
        eventually(lambda: consumer.poll(0.1) is None and consumer.assignment(), "an assignment")
        producer = Producer({"bootstrap.servers": self.groups.bootstrap})
        for partition in range(3):
            for _ in range(1000):
                producer.produce("jobs", b"job", partition=partition)
        assert producer.flush(60) == 0
        consumer.commit(offsets=[TopicPartition("jobs", 0, 1)], asynchronous=False)

        def work() -> None:
            """Partition 0 makes no progress: its second record cannot be processed."""
            for offset in range(1, 1000):
                moved = [TopicPartition("jobs", partition, offset) for partition in (1, 2)]
                with contextlib.suppress(RuntimeError):
                    consumer.commit(offsets=moved, asynchronous=False)
                if self._stop.wait(2):
                    return

        threading.Thread(target=work, daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    # -- the operator's view
    # --------------------------------------------------------------------------

    def doctor(self) -> list[dict[str, Any]]:
        """The output of `mqd doctor` for each host that is up."""
        found = []
        for broker in self.brokers:
            if broker.process is None:
                continue
            environment = self.skewed if broker is self.cluster.brokers[2] else {}
            command = [sys.executable, "-m", "mqd.cli.main", "doctor", "--data-dir", str(broker.data_dir)]
            done = subprocess.run(
                [*command, "--format", "json"],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=WITHIN_S,
            )
            assert done.returncode in (0, 1), done.stderr
            found += json.loads(done.stdout)
        return found

    def overviews(self) -> list[Browser]:
        """A console for each of the three systems."""
        places = (
            (self.cluster.bootstrap, [one for one in self.cluster if one.process is not None]),
            (self.groups.bootstrap, [self.groups]),
            (self.disk.bootstrap, [self.disk]),
        )
        found = []
        for bootstrap, brokers in places:
            urls = tuple(one.status()["metrics_url"] for one in brokers)
            found.append(Browser(options(bootstrap, metrics=urls)))
        return found


@pytest.fixture(scope="module")
def broken_systems(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokenSystems, Prometheus, float]]:
    with contextlib.ExitStack() as stack:
        made = BrokenSystems(tmp_path_factory.mktemp("sick"), stack)
        stack.callback(made.stop)
        made.start()
        targets = [one.status()["metrics_url"].split("/")[2] for one in made.brokers]
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), targets, render_rules("docs/monitoring.md"))
        stack.callback(prometheus.stop)
        eventually(lambda: prometheus.healthy_targets() == len(targets), "scraped brokers")
        made.cause_problems()
        yield made, prometheus, time.monotonic() + WITHIN_S


PROBLEMS = {
    "under-replicated": Problem(
        "MqdUnderReplicated", {}, "broker 3 is not in sync in", "start broker 3", "broker 3 is not in sync in"
    ),
    "hung disk": Problem("MqdFlushHangs", {}, "its disk does not respond", "smartctl", "its disk does not respond"),
    "stuck rebalance": Problem(
        "MqdRebalanceStuck",
        {"consumergroup": "held-classic"},
        "waits for slow-classic at",
        "mqd group describe held-classic",
        "waits for slow-classic at",
    ),
    "stuck rebalance of a consumer group": Problem(
        "MqdRebalanceStuck",
        {"consumergroup": "held-consumer"},
        "waits for slow-consumer at",
        "mqd group describe held-consumer",
        "waits for slow-consumer at",
    ),
    "poisoned partition": Problem(
        "MqdPartitionStuck",
        {"consumergroup": "workers", "topic": "jobs", "partition": "0"},
        "has not passed offset 1 of jobs-0",
        "mqd group seek workers jobs:0 --shift-by 1",
        "has not passed offset 1 of jobs-0",
    ),
    "clock skew": Problem("MqdClockSkew", {}, "this host's clock is 3600 s", "chronyc", "is 3600 s ahead of this"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_cause_and_cure_are_named_within_five_minutes(
    broken_systems: tuple[BrokenSystems, Prometheus, float], name: str
) -> None:
    made, prometheus, deadline = broken_systems
    problem = PROBLEMS[name]

    def fires() -> bool:
        return any(
            labels["alertname"] == problem.alert and problem.labels.items() <= labels.items()
            for labels in prometheus.alerts()
        )

    eventually(fires, lambda: f"{problem.alert}, not only {prometheus.alerts()}", max(1, deadline - time.monotonic()))
    found = made.doctor()
    assert any(problem.cause in one["what"] and problem.cure in one["cure"] for one in found), "\n".join(
        f"{one['what']}: {one['cure']}" for one in found
    )
    pages = []
    for browser in made.overviews():
        sampler = browser.app._app.state.console.metrics
        sampler.sample()
        time.sleep(3)  # partitions 1 and 2 are committed every two
        sampler.sample()
        pages.append(browser.get("/").words)
    assert any(problem.seen in page for page in pages), pages
