"""Calls of pipelines to Spark, and their handling of its errors; a query's offsets committed as a
group. Without Spark.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from mqd.cli.common import CliError
from mqd.cli.verbs import pipeline as pipeline_command
from mqd.spark.driver import Driver
from mqd.spark.options import source_options
from mqd.spark.pipelines import compacting, queries, running, session
from mqd.spark.pipelines.manifest import ArchivedFile, ArchiveError, Span
from mqd.spark.pipelines.settings import Archive, Replay, Source, Table

ISOLATION = "kafka.isolation.level"


class Reader:
    """A session, its readers and their frame in one: it records the options."""

    def __init__(self) -> None:
        self.given: dict[str, str] = {}
        self.read = self.readStream = self

    def option(self, name: str, value: str) -> Reader:
        self.given[name] = value
        return self

    def options(self, **given: str) -> Reader:
        self.given |= given
        return self

    def collect(self) -> list[Any]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


# -- reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "read_committed"), ({ISOLATION: "read_uncommitted"}, "read_uncommitted")]
)
def test_pipelines_read_committed_records_by_default(given: dict[str, str], expected: str) -> None:
    reader, source = Reader(), Source(topics=["t"], options=given)
    running.read_stream(reader, source, Table(name="n", source=source, changelog="c"))  # type: ignore[arg-type]
    assert reader.given[ISOLATION] == expected


@pytest.mark.parametrize("live", [False, True])
def test_sql_reads_what_was_committed(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    view, sample = Reader(), Reader()
    monkeypatch.setattr(queries, "as_rows", lambda _: MagicMock())
    queries.add_view(view, "t", "b", "", live)  # type: ignore[arg-type]
    queries.infer_schema(sample, "t", "b")  # type: ignore[arg-type]
    assert (view.given[ISOLATION], sample.given[ISOLATION]) == ("read_committed", "read_committed")


def test_spark_reads_the_end_of_a_batch_from_the_checkpoint() -> None:
    """Its settings locate hdfs:///, pyarrow's do not; and the path is a glob."""
    spark, source = MagicMock(), Source(topics=["t"])
    spark.read.text.return_value.first.return_value = [
        'v1\n{"batchWatermarkMs":0}\n{"t":{"0":7},"@topic_ids":{"t":"x"}}'
    ]
    pipeline = Archive(name="n", source=source, path="a", checkpoint="hdfs:///check[1]")
    assert running._batch_end(spark, pipeline, 3) == ({"t": {"0": 7}}, {"t": "x"})
    spark.read.text.assert_called_once_with(r"hdfs:///check\[1\]/offsets/3", wholetext=True)


# -- errors ------------------------------------------------------------------------------------

FAILED = """[STREAM_FAILED] Query [id = 078c38b8-3cfc-4475-9961-30d13393c64a, runId = 6d85c2f7-3e03-4d65-b73a-c83a7b545571] terminated with exception: \
[FOREACH_BATCH_USER_FUNCTION_ERROR] An error occurred in the user provided function in foreach batch sink. Reason: An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "/site-packages/pyspark/sql/utils.py", line 163, in call
    self.func(DataFrame(jdf, wrapped_session_jdf), batch_id)
  File "/mqd/spark/pipelines/manifest.py", line 15, in commit
    raise ArchiveError("what the line says")
%s
 SQLSTATE: 39000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 078c38b8-3cfc-4475-9961-30d13393c64a, runId = 6d85c2f7-3e03-4d65-b73a-c83a7b545571]
Current Committed Offsets: {}

Logical Plan:
~WriteToMicroBatchDataSourceV1 ForeachBatchSink, 078c38b8-3cfc-4475-9961-30d13393c64a, [checkpointLocation=/tmp/cp], Append
"""
IN_A_TASK = """pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "/mqd/spark/pipelines/parquet.py", line 9, in add
    raise OrderError("what the line says")
"""


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            "mqd.spark.pipelines.manifest.ArchiveError: /a has another writer (commit 3 is there): stop one of the two",
            "/a has another writer (commit 3 is there): stop one of the two",
        ),
        (
            IN_A_TASK + "mqd.spark.pipelines.parquet.OrderError: records of t-0 are not in order at 3: sort them",
            "records of t-0 are not in order at 3: sort them",
        ),
        (
            IN_A_TASK + "OSError: [Errno 28] No space left on device: '/a/x.parquet'",
            "OSError: [Errno 28] No space left on device: '/a/x.parquet'",
        ),
        ("mqd.spark.wire.MqdMissingError: there is no topic t", "there is no topic t"),
        (
            (
                "py4j.protocol.Py4JJavaError: An error occurred while calling o7.save.\n:"
                " org.apache.spark.SparkException: Job aborted\n\tat org.Some.java"
            ),
            "org.apache.spark.SparkException: Job aborted",
        ),
    ],
)
def test_an_error_of_a_batchs_function_is_reported_by_its_own_text(raised: str, expected: str) -> None:
    """FAILED and IN_A_TASK are from Spark 4.3."""
    assert running.explain_error(RuntimeError(FAILED % raised)) == expected


def progress(*ends: tuple[str | None, str | None]) -> dict[str, Any]:
    return {
        "batchId": 0,
        "numInputRows": 1,
        "processedRowsPerSecond": 1.0,
        "batchDuration": 1,
        "sources": [{"endOffset": end, "latestOffset": latest} for end, latest in ends],
    }


@pytest.mark.parametrize(
    ("ends", "behind"),
    [
        ([('{"t":{"0":3},"@topic_ids":{"t":"x"}}', '{"t":{"0":7,"1":2},"@topic_ids":{"t":"x"}}')], 6),
        ([('{"t":{"0":3}}', '{"t":{"0":3}}'), ('{"u":{"0":3}}', '{"u":{"0":4}}')], 1),
        ([('{"t":{"0":3}}', "null")], -1),
        ([('{"t":{"0":3}}', '{"t":{"0":3}}'), ('{"u":{"0":3}}', None)], -1),
    ],
)
def test_the_lag_of_a_batch(ends: list[tuple[str | None, str | None]], behind: int) -> None:
    """Spark reports "null" for a batch that is repeated after a crash."""
    assert running._progress("n", progress(*ends)).behind == behind


# -- compacting ------------------------------------------------------------------------------------


def archived(name: str) -> ArchivedFile:
    return ArchivedFile(f"topic=t/{name}", "t", "2026-11-21", 10, [Span(0, 0, 1, 1, 0, 0)])


class Files:
    """An archive's list of files, and a compaction that fails for some."""

    path = "/archive"

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *broken: str, error: type[BaseException] = ArchiveError
    ) -> None:
        self.groups = [[archived("a1"), archived("a2")], [archived("b1"), archived("b2")]]
        self.files = {file.path: file for group in self.groups for file in group}
        self.requested: list[list[str]] = []
        self._broken, self._error = broken, error
        monkeypatch.setattr(compacting, "compact", self._compact)

    def _compact(self, _spark: Any, _archive: Any, groups: list[list[ArchivedFile]]) -> None:
        self.requested.append([group[0].path[-2:] for group in groups])
        for path in (file.path for group in groups for file in group):
            if path.endswith(self._broken):
                raise self._error(f"{path} cannot be read")
        for group in groups:
            for file in group:
                del self.files[file.path]

    def run(self, skipped: set[str]) -> list[list[str]]:
        self.requested = []
        running._compact(None, self, [group for group in self.groups if group[0].path in self.files], skipped)  # type: ignore[arg-type]
        return self.requested


def test_a_compaction_that_fails_is_reported_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files, skipped = Files(monkeypatch, "b2"), set[str]()
    assert files.run(skipped) == [["a1", "b1"], ["a1"], ["b1"]], (
        "together, then one by one: the other group is compacted"
    )
    assert sorted(files.files) == ["topic=t/b1", "topic=t/b2"] == sorted(skipped)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "topic=t/b2 cannot be read" in record.getMessage()
    assert files.run(skipped) == [], "until the next start"
    assert files.run(set()) == [["b1"]]


@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt,
        type("SparkException", (Exception,), {"__str__": lambda _: "[SPARK_JOB_CANCELLED] Job 7 cancelled"}),
    ],
)
def test_errors_that_stop_a_query_stop_a_compaction(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    files = Files(monkeypatch, "b2", error=error)
    with pytest.raises(error):
        files.run(set())
    assert files.requested == [["a1", "b1"]] and not caplog.records


# -- stopping a replay -------------------------------------------------------------------------

CANCELLED = "[SPARK_JOB_CANCELLED] Job 0 cancelled part of cancelled job group again-1"


class Job:
    """A session with one job, which ends when it is cancelled or of itself. `begin`: what happens
    when it has begun.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, begin: Callable[[], object], outcome: str | None = CANCELLED
    ) -> None:
        self.cancelled, self.begin, self.outcome = threading.Event(), begin, outcome
        self.groups: list[str] = []
        self.sparkContext = SimpleNamespace(
            setJobGroup=lambda group, _: self.groups.append(group),
            cancelJobGroup=self.cancel,
            setLocalProperty=lambda *_: None,
        )
        monkeypatch.setattr(running, "_replay", self.replay)
        monkeypatch.setattr(running, "POLL_S", 0.01)

    def cancel(self, group: str) -> None:
        assert self.groups == [group]
        self.cancelled.set()

    def replay(self, _spark: Any, _pipeline: Any) -> None:
        self.begin()
        assert self.cancelled.wait(20), "it is not cancelled"
        if self.outcome is not None:
            raise RuntimeError(self.outcome)

    def stop(self) -> None:
        """The handler of the session."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, "nothing was written"), ({"Delivery": "at-least-once"}, "the records written so far stay")],
)
def test_a_replay_is_stopped(monkeypatch: pytest.MonkeyPatch, options: dict[str, str], expected: str) -> None:
    stop = threading.Event()
    with pytest.raises(running.ReplayStoppedError, match=expected) as error:
        running.run(Job(monkeypatch, stop.set), Replay(name="again", path="a", options=options), print, stop)  # type: ignore[arg-type]
    assert running.explain_error(error.value) == str(error.value)


def test_a_replay_stopped_too_late_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = threading.Event()
    assert running.run(Job(monkeypatch, stop.set, None), Replay(name="again", path="a"), print, stop)  # type: ignore[arg-type]


def test_a_replay_that_fails_while_it_is_stopped_reports_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its commit, for instance: it is unknown whether it was written."""
    stop = threading.Event()
    with pytest.raises(RuntimeError, match="no outcome within 60 s"):
        running.run(
            Job(monkeypatch, stop.set, "committing batch 0: no outcome within 60 s"),
            Replay(name="again", path="a"),
            print,
            stop,
        )  # type: ignore[arg-type]


@pytest.mark.parametrize("outcome", [CANCELLED, None])
def test_the_command_reports_the_outcome_of_a_replay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str | None
) -> None:
    (tmp_path / "again.toml").write_text('pipeline = "replay"\npath = "a"\ntopics = ["t"]\n')
    job = Job(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGTERM), outcome)
    monkeypatch.setattr(session, "session", lambda *_: job)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if outcome is None:
            assert pipeline_command.command.main(["run", str(tmp_path / "again.toml")], standalone_mode=False) == 0
            assert capsys.readouterr().err.endswith("again: done\n")
            return
        with pytest.raises(CliError, match="again: stopped before its end: nothing was written") as error:
            pipeline_command.command.main(["run", str(tmp_path / "again.toml")], standalone_mode=False)
        assert error.value.exit_code == 130 and "checkpoint" not in str(error.value)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- a group's offsets -----------------------------------------------------------------------------


def test_offsets_committed_by_a_query_are_marked_as_such() -> None:
    """`mqd group seek` depends on it: see tests/interaction/cli/test_cli_group.py."""
    driver = Driver(source_options({"kafka.bootstrap.servers": "a", "subscribe": "t", "groupId": "g"}, streaming=True))
    requests: list[Any] = []
    coordinator = SimpleNamespace(coordinators=[SimpleNamespace(error_code=0, node_id=1, host="h", port=1)])
    link = SimpleNamespace(
        request=lambda request, *_: (
            requests.append(request),
            coordinator if len(requests) == 1 else SimpleNamespace(topics=[]),
        )[1]
    )
    driver.cluster = SimpleNamespace(any_connection=lambda: link, connection_to=lambda _: link, brokers={})  # type: ignore[assignment]
    driver.commit_offsets("g", {("t", 0): 7})
    (partition,) = requests[1].topics[0].partitions
    assert (partition.committed_offset, partition.committed_metadata) == (7, "spark query")
