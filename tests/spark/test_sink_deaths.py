"""Exactly once, whatever dies: between write and commit, after the commit, twice, in a task; the
driver by kill -9 around the commit. Random kills: test_sink_kills.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker
from tests.interaction.transactional import connect, fetch_committed, topic_of
from tests.spark import conftest
from tests.spark.jobs import Input, Job, output
from tests.spark.test_sink import PARTITIONS, kafka, numbers, topic, values  # noqa: F401  (fixtures)
from tests.tiers import quick


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., str]:
    """script(fail_before=1): the directory of a script with that fault in batch 1."""
    folder = tmp_path / "script"
    folder.mkdir()

    def write(**happens: int) -> str:
        for what, batch in happens.items():
            (folder / f"{batch}.{what.replace('_', '-')}").touch()
        return str(folder)

    return write


def run_once(spark: Any, frame: Any, broker: Broker, checkpoint: Path, topic: str, script: str) -> str:  # noqa: F811
    """The error of the query; empty if it succeeded."""
    from tests.spark.dying_sink import DyingDataSource

    spark.dataSource.register(DyingDataSource)
    writer = (
        frame.writeStream.format("mqd-dying")
        .outputMode("append")
        .option("kafka.bootstrap.servers", broker.bootstrap)
        .option("topic", topic)
    )
    query = (
        writer.option("checkpointLocation", str(checkpoint)).option("script", script).trigger(availableNow=True).start()
    )
    try:
        query.awaitTermination(120)
    except Exception as error:
        return str(error)
    finally:
        query.stop()
    return ""


@pytest.mark.parametrize("what", quick(["fail_before", "fail_after", "twice", "task"], ["fail_after", "task"]))
def test_every_record_once(
    spark: Any, broker: Broker, kafka, topic: str, tmp_path: Path, numbers, script, what: str
) -> None:  # noqa: F811
    frame = numbers(0, 50)
    numbers(50, 100)
    folder = script(**{what: 1})
    failed = run_once(spark, frame, broker, tmp_path / "checkpoint", topic, folder)
    assert bool(failed) == (what != "twice"), failed
    if failed:
        assert sorted(values(kafka, topic), key=int) == [
            b"%d" % number for number in range(100 if what == "fail_after" else 50)
        ]
        assert run_once(spark, frame, broker, tmp_path / "checkpoint", topic, folder) == ""
    assert not list(Path(folder).iterdir()), "what was to happen happened"
    assert sorted(values(kafka, topic), key=int) == [b"%d" % number for number in range(100)]
    for index in range(PARTITIONS):
        assert (
            fetch_committed(kafka, topic, index).last_stable_offset
            == fetch_committed(kafka, topic, index).high_watermark
        )


# -- kill -9 ---------------------------------------------------------------------------------------


@pytest.fixture
def needs_spark() -> None:
    if conftest.why_not() is not None:
        pytest.skip(f"Spark cannot run here: {conftest.why_not()}")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", ["hang_before", "hang_after"])
def test_the_driver_is_killed_around_the_commit(
    needs_spark: None, start_broker: Callable[..., Broker], tmp_path: Path, script, where: str
) -> None:
    broker = start_broker()
    with connect(broker) as connection:
        source, target = topic_of(connection, PARTITIONS), topic_of(connection, PARTITIONS)
    feed = Input(broker, source)
    feed.more(1200)
    folder = script(**{where: 1})
    job = Job(broker, source, target, tmp_path / "job", script=folder)
    try:
        wait(lambda: (Path(folder) / "1.reached").exists(), 600, job)
        job.kill_all()
        wait(lambda: len(output(broker, target)) >= feed.end, 600, job)
    finally:
        job.kill_all()
    assert output(broker, target) == list(range(feed.end))


def wait(condition: Callable[[], bool], seconds: float, job: Job) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it does not come to it\n{job.log()}"
        job.ensure()
        time.sleep(0.2)
