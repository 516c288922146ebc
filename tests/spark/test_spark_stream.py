"""spark.readStream.format("mqd"): every record once, from checkpoint to checkpoint; changes of
topics are handled, or reported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.broker import Broker
from tests.spark.support import (
    Stream,
    add_partitions,
    committed,
    delete_records,
    delete_topic,
    new_topic,
    numbered,
    options,
    produce,
    retire_partitions,
    wait_for_partitions,
)


def test_rate_limited_resumed_and_published(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """AvailableNow reads the records existing at its start, in batches of maxOffsetsPerTrigger; the
    next run continues after it; the group's offsets follow, also those of the last batch.
    """
    topic, group = new_topic(broker, 2), f"group-of-{tmp_path.name}"
    produce(broker, topic, [{"value": value, "partition": place % 2} for place, value in enumerate(numbered(0, 100))])
    stream = Stream(
        spark, tmp_path, options(broker, topic, startingOffsets="earliest", maxOffsetsPerTrigger=40, groupId=group)
    )
    stream.run()
    assert stream.batches == [40, 40, 20]
    assert sorted(int(row[3]) for row in stream.seen) == list(range(100))
    assert committed(broker, group, topic, (0, 1)) == [50, 50]
    (source,) = stream.progress[-1].sources
    assert json.loads(source.endOffset)[topic] == {"0": 50, "1": 50}
    assert json.loads(source.latestOffset)[topic] == {"0": 50, "1": 50}
    produce(broker, topic, numbered(100, 10), partition=1)
    assert [row[:2] for row in stream.run()] == [(1, offset) for offset in range(50, 60)]
    assert committed(broker, group, topic, (0, 1)) == [50, 60]


@pytest.mark.slow
def test_latest_is_pinned_when_the_first_batch_fails(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """Records between the first start and the restart are not omitted, though neither run has
    committed a batch.
    """
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 5))
    stream = Stream(spark, tmp_path, options(broker, topic))
    assert "not to be committed" in stream.failure(available_now=False, fail_on=0)
    assert stream.offsets(0)[topic] == {"0": 5}
    produce(broker, topic, numbered(5, 5))  # no reader meanwhile; a source that queries the end again loses these
    stream.start(available_now=False)
    stream.wait(lambda: len(stream.seen) >= 5)
    produce(broker, topic, numbered(10, 5))
    stream.wait(lambda: len(stream.seen) >= 10)
    stream.stop()
    assert [row[3] for row in stream.seen] == numbered(5, 10)


@pytest.mark.slow
def test_a_partition_is_added_and_the_broker_restarted(spark: Any, start_broker: Any, tmp_path: Path) -> None:
    broker = start_broker()
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 10))
    stream = Stream(spark, tmp_path, options(broker, topic, startingOffsets="earliest"))
    stream.start(available_now=False)
    stream.wait(lambda: len(stream.seen) == 10)
    add_partitions(broker, topic, 2)
    produce(broker, topic, numbered(10, 10), partition=1)
    stream.wait(lambda: len(stream.seen) == 20)
    broker.kill_all()
    broker.start()
    produce(broker, topic, [{"value": value, "partition": place % 2} for place, value in enumerate(numbered(20, 10))])
    stream.wait(lambda: len(stream.seen) >= 30)
    stream.stop()
    assert sorted(int(row[3]) for row in stream.seen) == list(range(30))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.slow
def test_offsets_that_are_gone(spark: Any, broker: Broker, tmp_path: Path, transport: str) -> None:
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 10))
    given = options(broker, topic, startingOffsets="earliest", transport=transport)
    stream = Stream(spark, tmp_path, given)
    stream.run()
    produce(broker, topic, numbered(10, 10))
    delete_records(broker, topic, 0, 15)
    reported = stream.failure()
    assert f"{topic}-0" in reported and "offsets 10 to 14 were deleted" in reported and "failOnDataLoss" in reported
    stream.given = {**given, "failOnDataLoss": "false"}
    stream.seen.clear()
    assert [row[3] for row in stream.run()] == numbered(15, 5)


@pytest.mark.slow
def test_a_recreated_topic(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """As many records as before, or more: only its id tells that it is another one."""
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 10))
    given = options(broker, topic, startingOffsets="earliest")
    stream = Stream(spark, tmp_path, given)
    stream.run()
    delete_topic(broker, topic)
    reported = stream.failure()
    assert topic in reported and "gone" in reported
    new_topic(broker, name=topic)
    produce(broker, topic, numbered(100, 20))
    reported = stream.failure()
    assert f"topic {topic} was deleted and created again" in reported
    stream.given = {**given, "failOnDataLoss": "false"}
    stream.seen.clear()
    assert [row[3] for row in stream.run()] == numbered(100, 20)


@pytest.mark.slow
def test_partitions_are_retired(spark: Any, start_broker: Any, tmp_path: Path) -> None:
    """What a query has read to its end is no loss when it goes, even if the query was not running
    then; what it has not read is.
    """
    broker = start_broker(config={"log.retention.check.interval.ms": "300"})
    topic = new_topic(broker, 4)
    given = options(broker, topic, startingOffsets="earliest")
    reader, late = Stream(spark, tmp_path / "reader", given), Stream(spark, tmp_path / "late", given)
    produce(broker, topic, [{"value": value, "partition": place % 4} for place, value in enumerate(numbered(0, 20))])
    assert len(late.run()) == 20
    produce(broker, topic, [{"value": value, "partition": place % 4} for place, value in enumerate(numbered(20, 20))])
    assert len(reader.run()) == 40
    retire_partitions(broker, topic, 2)
    for partition in (2, 3):
        delete_records(broker, topic, partition, 10)
    wait_for_partitions(broker, topic, 2)
    produce(broker, topic, numbered(40, 5), partition=1)
    assert [row[:2] for row in reader.run()] == [(1, offset) for offset in range(10, 15)]
    assert reader.run() == []
    reported = late.failure()
    assert f"{topic}-2, 3 are gone" in reported and "failOnDataLoss" in reported


@pytest.mark.slow
def test_minimum_and_delay(spark: Any, broker: Broker, tmp_path: Path) -> None:
    """Fewer than minOffsetsPerTrigger wait, for maxTriggerDelay at the longest; the first batch
    does not.
    """
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 3))
    stream = Stream(
        spark,
        tmp_path,
        options(broker, topic, startingOffsets="earliest", minOffsetsPerTrigger=10, maxTriggerDelay="600s"),
    )
    stream.start(available_now=False)
    stream.wait(lambda: len(stream.seen) == 3)
    produce(broker, topic, numbered(3, 5))
    produce(broker, topic, numbered(8, 5))
    stream.wait(lambda: len(stream.seen) == 13)
    stream.stop()
    assert stream.batches == [3, 10]


@pytest.mark.slow
def test_streams_refuse_ending_offsets(spark: Any, broker: Broker, tmp_path: Path) -> None:
    topic = new_topic(broker)
    reported = Stream(spark, tmp_path, options(broker, topic, endingOffsets="latest")).failure()
    assert "ending offset not valid in streaming queries" in reported
