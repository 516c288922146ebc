"""Topic to Spark to topic, exactly once, while all participants are killed with -9 at random
moments: driver, executors, Python workers, the broker's workers and acceptor.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker
from tests.interaction.transactional import connect, topic_of
from tests.spark.jobs import PARTITIONS, Input, Job, SessionJob, output, progress
from tests.spark.test_sink_deaths import needs_spark  # noqa: F401  (a fixture)

LOCAL = {"driver": 3, "python-driver": 2, "jvm": 3, "python-worker": 4, "python-helper": 2, "worker": 3, "acceptor": 3}
CLUSTER = {
    "driver": 2,
    "python-driver": 1,
    "jvm": 1,
    "executor": 6,
    "python-worker": 3,
    "python-helper": 1,
    "worker": 3,
    "acceptor": 3,
}
# how long the job may take to continue after a kill: a JVM's start on a loaded machine
SECONDS_EACH = 600


class Run:
    """One job and its faults. `make_job(broker, source, target)`; `more`: bounds of the number of
    records written before each kill. `kills`: by kind, those that found a process; `amid`: those of
    them while there was input left.
    """

    def __init__(
        self,
        broker: Broker,
        seed: int,
        make_job: Callable[[Broker, str, str], Any],
        more: tuple[int, int] = (600, 1500),
    ) -> None:
        self.rng, self.broker, self.more = random.Random(seed), broker, more
        with connect(broker) as connection:
            self.source, self.target = topic_of(connection, PARTITIONS), topic_of(connection, PARTITIONS)
        self.feed, self.job = Input(broker, self.source), make_job(broker, self.source, self.target)
        self.kills: Counter[str] = Counter()
        self.amid = 0

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = SECONDS_EACH) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (
                f"not within {seconds} s: {what}; so far {dict(self.kills)}\n{self.job.log()}"
            )
            self.job.ensure()
            time.sleep(0.05)  # polls other processes; there is no event to wait for

    def makes_progress(self) -> None:
        """Another transaction has ended."""
        seen = progress(self.broker, self.target)
        self.wait(lambda: progress(self.broker, self.target) > seen >= 0 or seen < 0, "a batch more")
        if seen < 0:
            self.makes_progress()

    def strike(self, victim: str) -> None:
        """At any moment of the coming batches."""
        self.feed.more(self.rng.randrange(*self.more))
        self.makes_progress()
        time.sleep(self.rng.random())
        struck: list[int] = []
        self.wait(lambda: bool(struck.extend(self._strike(victim)) or struck), f"a process of kind {victim}")
        left = self.feed.end - len(output(self.broker, self.target))
        self.kills[victim] += 1
        self.amid += left > 0
        print(
            f"{time.strftime('%H:%M:%S')} kill -9 {' '.join(map(str, struck))} ({victim}), {left} records on their way",
            flush=True,
        )

    def _strike(self, victim: str) -> list[int]:
        if victim not in ("worker", "acceptor"):
            return self.job.kill(victim, self.rng)
        with contextlib.suppress(OSError):
            struck = self.rng.choice(self.broker.pids(victim))
            os.kill(struck, signal.SIGKILL)
            return [struck]
        return []

    def all_of(self, victims: dict[str, int]) -> None:
        order = [victim for victim, count in victims.items() for _ in range(count)]
        self.rng.shuffle(order)
        for victim in order:
            self.strike(victim)

    def result(self) -> list[int]:
        """The output when as many records have arrived as were written, and the whole job is dead."""
        self.wait(lambda: len(output(self.broker, self.target)) >= self.feed.end, "all of the input", 3 * SECONDS_EACH)
        self.job.kill_all()
        print(
            f"killed by -9: {dict(self.kills)}, {sum(self.kills.values())} in all, {self.amid} with input left;"
            f" {self.job.starts} starts; {self.feed.end} records"
        )
        assert output(self.broker, self.source) == list(range(self.feed.end)), "the input"
        return output(self.broker, self.target)


def every_number_once(run: Run, victims: dict[str, int]) -> None:
    try:
        run.all_of(victims)
        found = run.result()
    finally:
        run.job.kill_all()
    assert run.kills == Counter(victims)
    assert run.amid >= sum(victims.values()) // 2, "too many kills hit a query that was idle"
    assert found == list(range(run.feed.end)), (
        f"{run.feed.end - len(set(found))} missing, {len(found) - len(set(found))} twice"
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_few_kills_at_random(spark: Any, start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    """Kills of processes that can die without the tests' session."""
    run = Run(start_broker(), 4, lambda *three: SessionJob(spark, *three, tmp_path), (500, 1000))
    every_number_once(run, {"python-worker": 2, "worker": 1, "acceptor": 1})


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    ("master", "victims"), [("local[2]", LOCAL), ("local-cluster[2,1,512]", CLUSTER)], ids=["local", "cluster"]
)
def test_twenty_kills_at_random(
    needs_spark: None, start_broker: Callable[..., Broker], tmp_path: Path, master: str, victims: dict[str, int]
) -> None:  # noqa: F811
    assert sum(victims.values()) == 20
    every_number_once(Run(start_broker(), 20, lambda *three: Job(*three, tmp_path / "job", master=master)), victims)


@pytest.mark.slow
@pytest.mark.timeout(5400)
def test_a_sink_without_transactions_is_detected(
    needs_spark: None, start_broker: Callable[..., Broker], tmp_path: Path
) -> None:  # noqa: F811
    """Proves that the tests above can fail: an at-least-once sink does not pass them."""
    run = Run(start_broker(), 21, lambda *three: Job(*three, tmp_path / "job", delivery="at-least-once"))
    try:
        for _ in range(20):
            run.strike(run.rng.choice(("python-worker", "jvm")))
            found = output(run.broker, run.target)
            if len(found) > len(set(found)):
                return
    finally:
        run.job.kill_all()
    pytest.fail(f"nothing came twice: {dict(run.kills)}")
