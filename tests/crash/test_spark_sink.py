"""The sink of Spark, exactly once, under random kill -9 of driver, tasks, workers and acceptor;
Spark itself is simulated (sink_driver.py), so that it can happen often.
tests/spark/test_sink_deaths.py does the same with Spark, more slowly.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.broker import Broker
from tests.crash import sink_driver
from tests.interaction.traffic import eventually
from tests.interaction.transactional import connect, fetch_committed, fresh, read_committed, topic_of
from tests.kafka_connection import ConnectionEnded

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = 3
VICTIMS = ("driver", "driver alone", "task", "worker", "acceptor", "everything")


class Driver:
    """sink_driver.py, restarted when it ends."""

    def __init__(self, broker: Broker, topic: str, checkpoint: Path, log: Path) -> None:
        self._command = [sys.executable, str(Path(sink_driver.__file__)), broker.bootstrap, topic, str(checkpoint)]
        self._log, self._starts = log, 0
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._starts += 1
            with self._log.open("ab") as out:
                self._process = subprocess.Popen(
                    [*self._command, str(self._starts)],
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )

    def kill(self, tasks_too: bool) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if tasks_too else os.kill)(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def kill_task(self) -> None:
        assert self._process is not None
        with contextlib.suppress(psutil.Error, IndexError):
            random.choice(psutil.Process(self._process.pid).children()).kill()


def output(broker: Broker, topic: str) -> list[int] | None:
    """None: currently no broker serves it."""
    try:
        with connect(broker) as kafka:
            return [int(value) for index in range(PARTITIONS) for value in read_committed(kafka, topic, index)]
    except (OSError, ConnectionEnded, AssertionError):
        return None


def strike(broker: Broker, driver: Driver, victim: str) -> None:
    if victim.startswith("driver"):
        driver.kill(tasks_too=victim == "driver")
    elif victim == "task":
        driver.kill_task()
    elif victim == "everything":
        broker.kill_all()
        broker.start()
    else:
        for pid in broker.pids(victim):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def every_number_once(start_broker: Callable[..., Broker], tmp_path: Path, kill_count: int, seed: int) -> None:
    rng, broker = random.Random(seed), start_broker()
    with connect(broker) as kafka:
        topic = topic_of(kafka, PARTITIONS)
    driver = Driver(broker, topic, tmp_path / fresh("query"), tmp_path / "driver.log")
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(kill_count)]
    rng.shuffle(victims)
    seen = 0

    def makes_progress() -> bool:
        driver.ensure()
        found = output(broker, topic)
        return found is not None and len(found) > seen

    try:
        for victim in victims:
            eventually(makes_progress, f"a batch before {victim} is killed", 90)
            seen = len(output(broker, topic) or ()) or seen
            time.sleep(rng.random() / 4)  # at any moment of the next one
            strike(broker, driver, victim)
        eventually(makes_progress, "a batch after all of that", 90)
    finally:
        driver.kill(tasks_too=True)
    with connect(broker) as kafka:  # each killed task, and the last, has left a transaction until its timeout
        eventually(
            lambda: all(
                (one := fetch_committed(kafka, topic, index)).last_stable_offset == one.high_watermark
                for index in range(PARTITIONS)
            ),
            "quiet",
            60,
        )
    found = output(broker, topic)
    assert found is not None and len(found) >= seen and len(found) % sink_driver.BATCH == 0, "whole batches"
    assert sorted(found) == list(range(len(found))), "every number once"


@pytest.mark.slow
def test_every_number_is_written_once(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    every_number_once(start_broker, tmp_path, len(VICTIMS), 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_twenty_kills(start_broker: Callable[..., Broker], tmp_path: Path, seed: int) -> None:
    every_number_once(start_broker, tmp_path, 20, seed)
