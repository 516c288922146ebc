"""Views read by Spark like any topic: batches, streams from a checkpoint, ranges with nothing selected at their end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from tests.broker import Broker
from tests.spark.support import Stream, admin, new_topic, options, produce, read, rows

TAGS = ("a", "b", "c", "c")


def _view(broker: Broker, base: str, condition: str) -> str:
    name = f"{base}-view"
    config = {"view.of": base, "view.filter": condition}
    client = admin(broker)
    client.create_topics([NewTopic(name, -1, config=config)])[name].result(30)
    return name


def _produce(broker: Broker, base: str, first: int, count: int) -> list[tuple[int, int, None, bytes]]:
    """Into two partitions by turns, in batches of five with each of the tags. Returns the rows tagged a or b."""
    numbers = range(first, first + count)
    records = [
        {"value": b"%d" % number, "partition": number % 2, "headers": {"tag": TAGS[number // 2 % len(TAGS)]}}
        for number in numbers
    ]
    produce(broker, base, records, **{"batch.num.messages": 5, "compression.type": "lz4" if first else "none"})
    return sorted(
        (number % 2, number // 2, None, b"%d" % number) for number in numbers if TAGS[number // 2 % len(TAGS)] in "ab"
    )


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_batches_and_streams_of_a_view(spark: Any, broker: Broker, tmp_path: Path, transport: str) -> None:
    base = new_topic(broker, 2)
    view = _view(broker, base, "tag IN ('a', 'b')")
    given = options(broker, view, transport=transport, startingOffsets="earliest", maxOffsetsPerTrigger=50)
    stream = Stream(spark, tmp_path, given)
    wanted = _produce(broker, base, 0, 200)  # the last two of each partition are not selected
    assert rows(read(spark, broker, view, transport=transport)) == wanted
    assert len(rows(read(spark, broker, base, transport=transport))) == 200
    assert sorted(stream.run()) == wanted
    assert stream.offsets(len(stream.batches) - 1)[view] == {"0": 100, "1": 100}, "the base topic's ends"
    more = _produce(broker, base, 200, 40)
    assert sorted(stream.run()) == more, "it continues at the checkpoint"
    assert rows(read(spark, broker, view, transport=transport)) == sorted(wanted + more)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_view_that_selects_nothing(spark: Any, broker: Broker, tmp_path: Path, transport: str) -> None:
    base = new_topic(broker, 2)
    view = _view(broker, base, "tag = 'x'")
    _produce(broker, base, 0, 200)
    assert rows(read(spark, broker, view, transport=transport, includeHeaders="true")) == []
    stream = Stream(spark, tmp_path, options(broker, view, transport=transport, startingOffsets="earliest"))
    assert stream.run() == []
    assert stream.offsets(0)[view] == {"0": 100, "1": 100}
