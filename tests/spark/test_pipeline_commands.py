"""The commands: `mqd pipeline run` with a kill and a restart, `mqd sql`, `mqd demo-spark`. Each
starts its own Spark, so they are in the slow tier; tests that need none are not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.spark.conftest import why_not
from tests.spark.support import new_topic, produce

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
}
KILLS = 6
LIMIT_S = 500  # bounds a hang; they take half a minute on an otherwise idle machine


@pytest.fixture(autouse=True, scope="module")
def _spark_is_there() -> None:
    reason = why_not()
    if reason:
        pytest.skip(f"Spark cannot run here: {reason}")


def mqd(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """It is stopped when it takes too long, with its whole session: a Java process that keeps
    running would disturb the next test.
    """
    command = [sys.executable, "-m", "mqd.cli.main", *arguments]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def test_invalid_settings_are_reported_before_spark_starts(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('pipeline = "archive"\npath = "x"\n[source]\n')
    output = mqd("pipeline", "run", "a", cwd=tmp_path)
    assert (output.returncode, output.stdout) == (2, "")
    assert output.stderr == "mqd: a.toml: [source] set either `topics` or `pattern`\n"
    assert "there is no such file; the pipelines are" in mqd("pipeline", "run", "none.toml", cwd=tmp_path).stderr


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_a_pipeline_continues_where_it_stopped(broker: Broker, tmp_path: Path) -> None:
    source, target = new_topic(broker, 2), new_topic(broker, 1)
    (tmp_path / "r.toml").write_text(
        f'pipeline = "route"\nbootstrap = "{broker.bootstrap}"\ntrigger = "0 seconds"\ndead_letters ='
        f' "{target}"\n[source]\ntopics = ["{source}"]\n[value]\nschema = "n INT"\n[[rules]]\nwhen = "n >= 0"\ntopic ='
        f' "{target}"\n'
    )
    produce(broker, source, [json.dumps({"n": number}) for number in range(100)])
    command = [sys.executable, "-m", "mqd.cli.main", "pipeline", "run", "r.toml", "--format", "json"]
    for stop in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["rows"] > 0
        finally:
            if stop == signal.SIGKILL:
                os.killpg(process.pid, stop)
            else:
                process.send_signal(stop)
            _, output = process.communicate(timeout=LIMIT_S)
        produce(
            broker, source, [json.dumps({"n": number}) for number in range(100, 200)] if stop == signal.SIGKILL else []
        )
    assert process.returncode == 0 and "stopped; the next run resumes from its checkpoint" in output
    done = mqd("pipeline", "run", "r", "--once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "check",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(target, 0, 0)])
    numbers = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        numbers.append(json.loads(message.value())["n"])
    consumer.close()
    assert sorted(numbers) == list(range(200)), "each record once"


@pytest.mark.slow
@pytest.mark.timeout(6 * LIMIT_S)
def test_an_archive_has_each_record_once_however_often_it_is_killed(broker: Broker, tmp_path: Path) -> None:
    """kill -9 of the whole pipeline at random moments after its first batch: in a batch, between
    its files and their commit, between that and Spark's, in a compaction.
    """
    from mqd.spark.pipelines.manifest import Archive
    from mqd.spark.pipelines.parquet import ArchivedTask, read_in_order

    chance = random.Random(6)
    topic = new_topic(broker, 2)
    settings = (
        f'pipeline = "archive"\nbootstrap = "{broker.bootstrap}"\ntrigger = "0 seconds"\npath ='
        f' "there"\ncompact_from_files = 4\n[source]\ntopics = ["{topic}"]\noptions = {{ maxOffsetsPerTrigger = "300"'
        " }\n"
    )
    (tmp_path / "a.toml").write_text(settings)
    command = [sys.executable, "-m", "mqd.cli.main", "pipeline", "run", "a.toml", "--format", "json"]
    for turn in range(KILLS):
        for partition in range(2):
            produce(broker, topic, [b"%d" % (5000 * turn + number) for number in range(5000)], partition)
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None and json.loads(process.stdout.readline())["rows"] > 0
            time.sleep(chance.uniform(0, 3))  # the moment of the kill
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=LIMIT_S)
    done = mqd("pipeline", "run", "a", "--once", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    archive = Archive(str(tmp_path / "there"))
    tasks = [
        ArchivedTask(archive.path, file.path, topic, ((span.partition, span.first, span.end),))
        for file in archive.files_of(topic)
        for span in file.spans
    ]
    found = [
        (row["partition"], row["offset"], int(row["value"]))
        for batch in read_in_order(tasks, ("partition", "offset", "value"))
        for row in batch.to_pylist()
    ]
    assert found == [(partition, number, number) for partition in range(2) for number in range(5000 * KILLS)]
    assert any(path.rsplit("/", 1)[1].startswith("compacted-") for path in archive.files)


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_sql(broker: Broker, tmp_path: Path) -> None:
    topic = new_topic(broker, 2)
    produce(
        broker,
        topic,
        [
            {"key": f"k{number}", "value": json.dumps({"origin": ("EWR", "JFK")[number % 2], "delay": number})}
            for number in range(10)
        ],
    )
    output = mqd(
        "-b",
        broker.bootstrap,
        "--format",
        "json",
        "sql",
        f"SELECT origin, count(*) AS flights, max(record.key) AS last FROM `{topic}` GROUP BY origin ORDER BY origin",
        cwd=tmp_path,
    )
    assert [json.loads(line) for line in output.stdout.splitlines()] == [
        {"origin": "EWR", "flights": 5, "last": "k8"},
        {"origin": "JFK", "flights": 5, "last": "k9"},
    ], output.stderr
    wrong = mqd("-b", broker.bootstrap, "sql", f"SELECT nonsense FROM `{topic}`", cwd=tmp_path)
    assert wrong.returncode == 1 and "nonsense" in wrong.stderr and len(wrong.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.timeout(4 * LIMIT_S)
def test_the_demo(tmp_path: Path) -> None:
    output = mqd("--format", "json", "demo-spark", "--records", "20000", cwd=tmp_path, TZ="Asia/Tokyo")
    assert output.returncode == 0 and "WARN" not in output.stderr, output.stdout + output.stderr
    assert json.loads(output.stdout)["passed"]
