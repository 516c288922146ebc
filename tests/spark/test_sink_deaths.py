"""Exactly once, whatever dies: between write and commit, behind the commit, twice, in a task; the driver by kill -9; and everything, twenty times, by chance."""

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
from typing import Any

import psutil
import pytest

from mqd.protocol.records import Record, encode_batch
from tests.broker import Broker
from tests.interaction.traffic import eventually, produce
from tests.interaction.transactional import connect, fetch_committed, topic_of
from tests.kafka_connection import ConnectionEnded
from tests.spark import conftest
from tests.spark.test_sink import PARTITIONS, kafka, numbers, topic, values  # noqa: F401  (fixtures)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """script(fail_before=1): the directory of a script in which that happens to batch 1."""
    folder = tmp_path / "script"
    folder.mkdir()

    def write(**happens: int) -> str:
        for what, batch in happens.items():
            (folder / f"{batch}.{what.replace('_', '-')}").touch()
        return str(folder)

    return write


def run_once(spark: Any, frame: Any, broker: Broker, checkpoint: Path, topic: str, script: str) -> str:  # noqa: F811
    """What the query failed with; empty when it went well."""
    from tests.spark.dying_sink import DyingDataSource

    spark.dataSource.register(DyingDataSource)
    writer = frame.writeStream.format("mqd-dying").outputMode("append").option("kafka.bootstrap.servers", broker.bootstrap).option("topic", topic)
    query = writer.option("checkpointLocation", str(checkpoint)).option("script", script).trigger(availableNow=True).start()
    try:
        query.awaitTermination(120)
    except Exception as error:
        return str(error)
    finally:
        query.stop()
    return ""


@pytest.mark.parametrize("what", ["fail_before", "fail_after", "twice", "task"])
def test_every_record_once(spark: Any, broker: Broker, kafka, topic: str, tmp_path: Path, numbers, script, what: str) -> None:  # noqa: F811
    frame = numbers(0, 50)
    numbers(50, 100)
    folder = script(**{what: 1})
    failed = run_once(spark, frame, broker, tmp_path / "checkpoint", topic, folder)
    assert bool(failed) == (what != "twice"), failed
    if failed:
        assert sorted(values(kafka, topic), key=int) == [b"%d" % number for number in range(100 if what == "fail_after" else 50)]
        assert run_once(spark, frame, broker, tmp_path / "checkpoint", topic, folder) == ""
    assert not list(Path(folder).iterdir()), "what was to happen happened"
    assert sorted(values(kafka, topic), key=int) == [b"%d" % number for number in range(100)]
    for index in range(PARTITIONS):
        assert fetch_committed(kafka, topic, index).last_stable_offset == fetch_committed(kafka, topic, index).high_watermark


# -- kill -9 -------------------------------------------------------------------------------------------------------------------


class Job:
    """sink_job.py in a process of its own."""

    def __init__(self, broker: Broker, source: str, target: str, checkpoint: Path, script: str, log: Path) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("sink_job.py")), broker.bootstrap, source, target, str(checkpoint), script]
        self._log = log
        self._process: psutil.Popen | None = None

    def start(self) -> None:
        environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(conftest.ROOT), os.environ.get("PYTHONPATH", "")])}
        with self._log.open("ab") as out:
            self._process = psutil.Popen(self._command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.Error):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """Driver, JVM and workers, at once."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        assert self._process is not None
        self._process.wait(30)

    def kill_worker(self) -> None:
        """A Python process that is not the driver."""
        workers = [process for process in self.processes()[1:] if _name(process).startswith("python")]
        with contextlib.suppress(psutil.Error):
            if workers:
                random.choice(workers).kill()


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


@pytest.fixture
def needs_spark() -> None:
    if conftest.why_not() is not None:
        pytest.skip(f"Spark cannot run here: {conftest.why_not()}")


class Input:
    """Numbers into a topic, spread over its partitions."""

    def __init__(self, broker: Broker, topic: str) -> None:  # noqa: F811
        self.broker, self.topic, self.end = broker, topic, 0

    def more(self, count: int) -> None:
        for first in range(self.end, self.end + count, 100):
            now_ms = time.time_ns() // 1_000_000  # older ones would be deleted for their age
            records = [Record(value=b"%d" % number, key=b"%d" % number, timestamp_ms=now_ms) for number in range(first, min(first + 100, self.end + count))]

            def write(first: int = first, records: list[Record] = records) -> object:
                try:
                    with connect(self.broker) as kafka:  # noqa: F811
                        return produce(kafka, self.topic, first // 100 % PARTITIONS, encode_batch(records)).error_code == 0
                except (OSError, ConnectionEnded):
                    return None

            eventually(write, "room for the input")
        self.end += count


def output(broker: Broker, topic: str) -> list[int]:  # noqa: F811
    def read() -> list[int] | None:
        try:
            with connect(broker) as kafka:  # noqa: F811
                return sorted(int(value) for value in values(kafka, topic))
        except (OSError, ConnectionEnded, AssertionError):
            return None

    return eventually(lambda: ("read", read()) if read() is not None else None, "the output")[1] or []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["hang_before", "hang_after"])
def test_the_driver_is_killed_around_the_commit(needs_spark: None, start_broker: Callable[..., Broker], tmp_path: Path, script, where: str) -> None:
    broker = start_broker()
    with connect(broker) as connection:
        source, target = topic_of(connection, PARTITIONS), topic_of(connection, PARTITIONS)
    feed = Input(broker, source)
    feed.more(1200)
    folder = script(**{where: 1})
    job = Job(broker, source, target, tmp_path / "checkpoint", folder, tmp_path / "job.log")
    job.start()
    try:
        wait(lambda: (Path(folder) / "1.reached").exists(), 600, job)
        job.kill()
        job.start()
        wait(lambda: len(output(broker, target)) >= feed.end, 600, job)
    finally:
        job.kill()
    assert output(broker, target) == list(range(feed.end))


def wait(condition: Callable[[], bool], seconds: float, job: Job) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come to it"
        if not job.is_alive():
            job.start()
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random(needs_spark: None, start_broker: Callable[..., Broker], tmp_path: Path, script) -> None:
    """Topic to Spark to topic; driver, Python workers, the broker's workers and acceptor, each -9. The output is the input, every record once."""
    rng = random.Random(20)
    broker = start_broker()
    with connect(broker) as connection:
        source, target = topic_of(connection, PARTITIONS), topic_of(connection, PARTITIONS)
    feed = Input(broker, source)
    feed.more(2000)
    job = Job(broker, source, target, tmp_path / "checkpoint", script(), tmp_path / "job.log")
    job.start()
    victims = ["driver", "worker", "broker-worker", "acceptor"] * 5
    rng.shuffle(victims)
    try:
        for victim in victims:
            before = len(output(broker, target))
            feed.more(rng.randrange(500, 2500))
            wait(lambda before=before: len(output(broker, target)) > before, 600, job)  # it runs: then, at any moment,
            time.sleep(rng.random())
            if victim == "driver":
                job.kill()
            elif victim == "worker":
                job.kill_worker()
            else:
                for pid in broker.pids("acceptor" if victim == "acceptor" else "worker")[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        wait(lambda: len(output(broker, target)) >= feed.end, 900, job)
    finally:
        job.kill()
    assert output(broker, target) == list(range(feed.end))
