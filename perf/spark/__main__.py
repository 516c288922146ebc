"""python -m perf.spark [--rows 5000000] [--value-bytes 100] [--partitions 2] [--rounds 3] [--no-spark]

Needs `pip install 'mqd[spark]'` and Java 17; starts a broker of its own and deletes what it wrote.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from perf.spark import reading, writing
from tests.broker import Broker

TOPIC, WRITTEN = "perf-spark", "perf-spark-written"


def _session() -> object:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.log.level", "ERROR").config("spark.driver.memory", "2g").getOrCreate()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.spark", description="What reading and writing by format(mqd) cost.")
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--value-bytes", type=int, default=100)
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-spark", action="store_true", help="the steps without Spark alone")
    given = parser.parse_args()
    print(reading.decode(given.value_bytes).line(), flush=True)
    with tempfile.TemporaryDirectory(prefix="mqd-perf-spark-") as place, Broker(Path(place) / "data", config={"num.partitions": str(given.partitions)}) as broker:
        reading.fill(broker.bootstrap, TOPIC, given.rows, given.value_bytes, given.partitions)

        def spent() -> float:
            return reading.cpu_seconds(broker.process.pid)

        for name, transport in (("local", "shm"), ("tcp", "tcp")):
            print(reading.task(name, broker.bootstrap, TOPIC, transport, given.rows, spent).line(), flush=True)
            print(writing.task(f"write {name}", broker.bootstrap, WRITTEN, given.rows, given.value_bytes, spent, transport=transport).line(), flush=True)
        if not given.no_spark:
            session = _session()
            for transport in ("shm", "tcp"):
                print(reading.by_spark(session, broker.bootstrap, TOPIC, transport, given.rows, spent, given.rounds).line(), flush=True)
            for delivery in ("exactly-once", "at-least-once"):
                name = f"spark write {delivery}"
                print(writing.by_spark(session, broker.bootstrap, WRITTEN, given.rows, given.value_bytes, spent, given.rounds, name, delivery=delivery).line(), flush=True)
            session.stop()


if __name__ == "__main__":
    main()
