"""Pipelines over real topics: which records they process, how they use a checkpoint, and which
errors do not stop them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from mqd.spark.pipelines import running
from mqd.spark.pipelines.manifest import Archive as ArchiveFiles
from mqd.spark.pipelines.settings import ONCE, Archive, Replay, Source, Table
from tests.broker import Broker
from tests.interaction.transactional import connect, fetch_committed, read_committed
from tests.spark.support import LADEN, new_topic, numbered, produce, read, values

TRIES = 5


def run(spark: Any, pipeline: Any) -> None:
    """Reads everything. Where Spark finds the machine overloaded it is restarted, as an operator
    would do.
    """
    for left in reversed(range(TRIES)):
        try:
            return running.run(spark, pipeline, lambda _: None, threading.Event())
        except Exception as error:
            if not left or not any(text in str(error) for text in LADEN):
                raise
    raise AssertionError("unreachable")


def archive_of(broker: Broker, topic: str, place: Path, **more: Any) -> Archive:
    return Archive(
        name="archiving",
        bootstrap=broker.bootstrap,
        source=Source(topics=[topic]),
        path=str(place / "archive"),
        checkpoint=str(place / "check [it]{1}"),
        trigger=ONCE,
        **more,
    )


def test_aborted_records_are_not_archived(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """An exactly-once sink's failed batch is in the log, aborted."""
    topic = new_topic(broker)
    producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": topic})
    producer.init_transactions(30)
    for end, value in ((producer.abort_transaction, b"aborted"), (producer.commit_transaction, b"committed")):
        producer.begin_transaction()
        producer.produce(topic, value, partition=0)
        producer.flush(30)
        end(30)
    run(spark, archive_of(broker, topic, tmp_path))
    archive = ArchiveFiles(str(tmp_path / "archive"))
    assert [file.row_count for file in archive.files.values()] == [1]
    assert archive.ends(topic) == {0: 4}, "the markers at the end belong to the batch: by the checkpoint"


@pytest.mark.slow
def test_a_table_with_a_new_checkpoint_is_another_query(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """Numbers of batches restart; with only the pipeline's name they were dropped as duplicates.
    With the old checkpoint nothing is written twice.
    """
    topic, changelog = new_topic(broker), new_topic(broker)
    produce(broker, topic, [{"value": "1", "key": "k"}])

    def table(checkpoint: str) -> list[Any]:
        run(
            spark,
            Table(
                name="planes",
                bootstrap=broker.bootstrap,
                source=Source(topics=[topic]),
                changelog=changelog,
                checkpoint=str(tmp_path / checkpoint),
                trigger=ONCE,
            ),
        )
        return values(read(spark, broker, changelog, kafka__isolation__level="read_committed"))

    assert table("a") == [b"1"]
    for commit in (tmp_path / "a/commits").glob("*0*"):  # and Hadoop's checksum of it
        commit.unlink()  # a crash between the changelog's commit and the checkpoint's
    assert table("a") == [b"1"]
    assert table("b") == [b"1", b"1"]


@pytest.mark.slow
def test_a_compaction_that_fails_does_not_end_archiving(
    spark: Any, broker: Broker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic(broker)
    pipeline = archive_of(broker, topic, tmp_path, compact_from_files=2)
    for number in range(3):
        produce(broker, topic, numbered(10 * number, 10))
        run(spark, pipeline)
        if number == 0:
            (damaged,) = (tmp_path / "archive").glob("topic=*/date=*/*.parquet")
            damaged.write_bytes(b"no Parquet")
    archive = ArchiveFiles(str(tmp_path / "archive"))
    assert (sum(file.row_count for file in archive.files.values()), archive.ends(topic)) == (30, {0: 30})
    logged = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "archiving continues" in record.getMessage()
    ]
    assert logged and all(damaged.name in text for text in logged)


def test_a_replay_that_is_stopped_has_written_nothing(
    spark: Any, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is stopped when its first rows are in the log."""
    topic, stop = new_topic(broker), threading.Event()

    def slow(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch
            time.sleep(0.5)  # so that it takes longer than the stop

    found = (
        spark.range(0, 4_000_000, 1, 1)
        .mapInArrow(slow, "id LONG")
        .selectExpr(f"'{topic}' AS topic", "repeat(cast(id AS string), 100) AS value")
    )
    monkeypatch.setattr(running, "replay", lambda *_, **__: found)

    def watch() -> None:
        deadline = time.monotonic() + 120
        with connect(broker) as connection:
            while not fetch_committed(connection, topic, 0).high_watermark and time.monotonic() < deadline:
                time.sleep(0.05)
        stop.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with pytest.raises(running.ReplayStoppedError, match="nothing was written"):
        running.run(spark, Replay(name="again", bootstrap=broker.bootstrap, path=str(tmp_path)), lambda _: None, stop)
    watcher.join()
    with connect(broker) as connection:
        reported = fetch_committed(connection, topic, 0)
        assert 0 < reported.high_watermark == reported.last_stable_offset, (
            "rows were there, and are aborted: no transaction is open"
        )
        assert read_committed(connection, topic, 0) == []
