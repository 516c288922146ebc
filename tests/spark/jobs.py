"""A streaming job in separate processes, which can be killed by kind; numbers as its input, and its
output.

    Job(broker, source, target, place)                 sink_job.py: ensure(), kill(kind, rng),
                                                       kill_all()
    SessionJob(spark, broker, source, target, place)   the same in the session of the tests: only
                                                       its Python workers can be killed

The kinds of a job's processes (`KINDS`); processes that they leave behind (executors, Python
workers) are not ended until kill_all(), even after the next start:

    driver          the Python program and the JVM, at once
    python-driver   only the Python program: the JVM should end by itself
    jvm             only the JVM; with local[N] it is the executor, too
    executor        only an executor's JVM, with local-cluster[...]
    python-worker   a Python process that runs a task
    python-helper   another one: of the source, of a batch's planning and of its commit, the daemon
                    that forks them all
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from mqd.protocol.records import Record, encode_batch
from tests.broker import Broker
from tests.interaction.traffic import eventually, produce
from tests.interaction.transactional import connect, fetch_committed, read_committed
from tests.kafka_connection import ConnectionEnded
from tests.spark import conftest

PARTITIONS = 3
KINDS = ("driver", "python-driver", "jvm", "executor", "python-worker", "python-helper")


class Job:
    """`script`: of dying_sink.py. `delivery`: the sink's. Files of its own are in `place`, the
    checkpoint among them.
    """

    def __init__(
        self,
        broker: Broker,
        source: str,
        target: str,
        place: Path,
        *,
        script: str = "",
        master: str = "local[2]",
        delivery: str = "exactly-once",
    ) -> None:
        place.mkdir(parents=True, exist_ok=True)
        reported = {
            "bootstrap": broker.bootstrap,
            "source": source,
            "target": target,
            "checkpoint": str(place / "checkpoint"),
            "place": str(place / "spark"),
            "script": script,
            "master": master,
            "delivery": delivery,
            "format": "mqd-dying" if script else "mqd",
        }
        self._command = [sys.executable, str(Path(__file__).with_name("sink_job.py")), json.dumps(reported)]
        self._log = place / "job.log"
        self._environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([str(conftest.ROOT), os.environ.get("PYTHONPATH", "")]),
            "SPARK_LOCAL_IP": "127.0.0.1",
        }
        if master.startswith("local-cluster"):
            self._environment["SPARK_HOME"] = str(_home(place / "home"))
        self._process: subprocess.Popen[bytes] | None = None
        self._sessions: list[int] = []
        self.starts = 0

    def start(self) -> None:
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        self._sessions.append(self._process.pid)
        self.starts += 1

    def ensure(self) -> None:
        """Restarts it when it has ended, as a supervisor would."""
        if self._process is None or self._process.poll() is not None:
            self.start()

    # -- its processes -----------------------------------------------------------------------------

    def processes(self, kind: str) -> list[psutil.Process]:
        """Of the last start."""
        if self._process is None or self._process.poll() is not None:
            return []
        found = {kind: list[psutil.Process]() for kind in KINDS}
        for process in _of_sessions(self._sessions[-1:]):
            with contextlib.suppress(psutil.Error):
                for one in ("driver", "python-driver") if process.pid == self._process.pid else _kinds(process):
                    found[one].append(process)
        return found[kind] if kind != "driver" or len(found[kind]) == 2 else []

    def kill(self, kind: str, rng: random.Random) -> list[int]:
        """Kills a random process of the kind. Empty: there is none now."""
        found = sorted(self.processes(kind), key=lambda process: process.pid)
        killed = []
        for process in found if kind == "driver" else rng.sample(found, min(1, len(found))):
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.append(process.pid)
        if kind in ("driver", "python-driver") and killed:
            assert self._process is not None
            self._process.wait(30)
        return killed

    def kill_all(self) -> None:
        """Including processes that earlier starts have left."""
        for process in _of_sessions(self._sessions):
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self._process is not None:
            self._process.wait(30)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-4000:] if self._log.exists() else ""


class SessionJob:
    """One query of the session `spark`, restarted when it has failed; of its processes only the
    Python workers can be killed.
    """

    def __init__(self, spark: Any, broker: Broker, source: str, target: str, place: Path) -> None:
        rows = (
            spark.readStream.format("mqd")
            .option("kafka.bootstrap.servers", broker.bootstrap)
            .option("subscribe", source)
            .option("startingOffsets", "earliest")
        )
        frame = rows.option("maxOffsetsPerTrigger", "250").load().selectExpr("key", "value")
        sink = (
            frame.writeStream.format("mqd")
            .outputMode("append")
            .option("kafka.bootstrap.servers", broker.bootstrap)
            .option("topic", target)
        )
        self._writer = sink.option("checkpointLocation", str(place / "checkpoint"))
        self._query: Any = None
        self.starts = 0

    def ensure(self) -> None:
        if self._query is None or not self._query.isActive:
            self._query = self._writer.start()
            self.starts += 1

    def kill(self, kind: str, rng: random.Random) -> list[int]:
        assert kind == "python-worker"
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if kind in _kinds(process):
                    found.append(process)
        for process in rng.sample(found, min(1, len(found))):
            with contextlib.suppress(psutil.Error):
                process.kill()
                return [process.pid]
        return []

    def kill_all(self) -> None:
        if self._query is not None:
            self._query.stop()

    def log(self) -> str:
        return "" if self._query is None else str(self._query.exception())[-4000:]


def _kinds(process: psutil.Process) -> tuple[str, ...]:
    """The kind of a process other than the Python program. Raises psutil.Error."""
    words = process.cmdline()
    if "org.apache.spark.deploy.SparkSubmit" in words:
        return ("driver", "jvm")
    if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in words:
        return ("executor",)
    if not words or not Path(words[0]).name.startswith("python"):
        return ()
    parent = process.parent()
    is_forked = "pyspark.daemon" in words and parent is not None and "pyspark.daemon" in parent.cmdline()
    return ("python-worker",) if is_forked and "pyspark.worker" in words else ("python-helper",)


def _of_sessions(sessions: list[int]) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) in sessions:
                found.append(psutil.Process(pid))
    return found


def _home(home: Path) -> Path:
    """Spark's, with a directory of its own for what executors write: it would be that of the
    package.
    """
    import pyspark

    home.mkdir(exist_ok=True)
    for entry in Path(pyspark.__file__).parent.iterdir():
        if entry.name != "work":
            (home / entry.name).symlink_to(entry)
    return home


class Input:
    """Numbers into a topic, spread over its partitions."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.broker, self.topic, self.end = broker, topic, 0

    def more(self, count: int) -> None:
        for first in range(self.end, self.end + count, 100):
            now_ms = time.time_ns() // 1_000_000  # older ones would be deleted because of their age
            records = [
                Record(value=b"%d" % number, key=b"%d" % number, timestamp_ms=now_ms)
                for number in range(first, min(first + 100, self.end + count))
            ]

            def write(first: int = first, records: list[Record] = records) -> object:
                try:
                    with connect(self.broker) as kafka:
                        return (
                            produce(kafka, self.topic, first // 100 % PARTITIONS, encode_batch(records)).error_code == 0
                        )
                except (OSError, ConnectionEnded):
                    return None

            eventually(write, "room for the input", 120)
        self.end += count


def progress(broker: Broker, topic: str) -> int:
    """Rises with every transaction that ends. -1: currently no broker serves it."""
    try:
        with connect(broker) as kafka:
            found = [fetch_committed(kafka, topic, index, bytes_max=1) for index in range(PARTITIONS)]
            return -1 if any(one.error_code for one in found) else sum(one.last_stable_offset for one in found)
    except (OSError, ConnectionEnded, AssertionError):
        return -1


def output(broker: Broker, topic: str) -> list[int]:
    """The records that committed readers see, sorted."""

    def read() -> tuple[list[int]] | None:
        try:
            with connect(broker) as kafka:
                return (
                    sorted(int(value) for index in range(PARTITIONS) for value in read_committed(kafka, topic, index)),
                )
        except (OSError, ConnectionEnded, AssertionError):
            return None

    return eventually(read, "the output", 120)[0]
