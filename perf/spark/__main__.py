"""python -m perf.spark [--rows 5000000] [--value-bytes 100] [--partitions 2] [--rounds 3]
[--no-spark]

Needs `pip install 'mqd[spark]'` and Java 17, and Maven for the comparison with Spark's own connector;
starts a broker of its own and deletes its data.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perf.spark import archiving, reading, streaming, writing
from tests.broker import Broker
from tests.spark import connector

TOPIC, WRITTEN = "perf-spark", "perf-spark-written"


def _session(jars: list[Path]) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.driver.memory": "2g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.jars": ",".join(map(str, jars)),
    }
    builder = SparkSession.builder.master("local[2]")
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m perf.spark", description="The cost of reading and writing by format(mqd)."
    )
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-spark", action="store_true", help="only the steps without Spark")
    given = parser.parse_args()
    reading.adopt_orphans()
    print(reading.decode(given.value_bytes).line(), flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="mqd-perf-spark-") as place,
        Broker(Path(place) / "data", config={"num.partitions": str(given.partitions)}) as broker,
    ):
        reading.fill(broker.bootstrap, TOPIC, given.rows, given.value_bytes, given.partitions)

        def spent() -> float:
            return reading.cpu_seconds(broker.process.pid)

        for name, transport in (("local", "shm"), ("tcp", "tcp")):
            print(reading.task(name, broker.bootstrap, TOPIC, transport, given.rows, spent).line(), flush=True)
            print(
                writing.task(
                    f"write {name}",
                    broker.bootstrap,
                    WRITTEN,
                    given.rows,
                    given.value_bytes,
                    spent,
                    transport=transport,
                ).line(),
                flush=True,
            )
        if not given.no_spark:
            _by_spark(given, broker.bootstrap, Path(place), spent)


def _by_spark(given: argparse.Namespace, bootstrap: str, place: Path, spent: Callable[[], float]) -> None:
    jars, why_not = connector.jars()
    session = _session(jars)
    for transport in ("shm", "tcp"):
        print(
            reading.by_spark(
                session, bootstrap, TOPIC, given.rows, spent, given.rounds, f"spark {transport}", transport=transport
            ).line(),
            flush=True,
        )
    print(
        why_not
        or reading.by_spark(
            session, bootstrap, TOPIC, given.rows, spent, given.rounds, "spark connector", form="kafka"
        ).line(),
        flush=True,
    )
    for delivery in ("exactly-once", "at-least-once"):
        name = f"spark write {delivery}"
        print(
            writing.by_spark(
                session, bootstrap, WRITTEN, given.rows, given.value_bytes, spent, given.rounds, name, delivery=delivery
            ).line(),
            flush=True,
        )
    if jars:
        print(
            writing.by_spark(
                session,
                bootstrap,
                WRITTEN,
                given.rows,
                given.value_bytes,
                spent,
                given.rounds,
                "spark write connector",
                form="kafka",
            ).line(),
            flush=True,
        )
    print(streaming.ages(session, bootstrap, place).line(), flush=True)
    for line in archiving.archive_and_replay(session, bootstrap, place, given.partitions, spent):
        print(line, flush=True)
    session.stop()


if __name__ == "__main__":
    main()
