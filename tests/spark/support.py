"""Topics, records and reads for the tests of format("mqd")."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from tests.broker import Broker
from tests.polling import eventually

_numbers = itertools.count(1)
Row = tuple[int, int, Any, Any]


def admin(broker: Broker) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.bootstrap})


def new_topic(
    broker: Broker, partitions: int = 1, name: str | None = None, config: dict[str, str] | None = None
) -> str:
    name = name or f"spark-{next(_numbers)}"
    client = admin(broker)
    client.create_topics([NewTopic(name, partitions, 1, config=config or {})])[name].result(30)
    return name


def delete_topic(broker: Broker, name: str) -> None:
    client = admin(broker)
    client.delete_topics([name])[name].result(30)


def add_partitions(broker: Broker, name: str, count: int) -> None:
    client = admin(broker)
    client.create_partitions([NewPartitions(name, count)])[name].result(30)


def delete_records(broker: Broker, name: str, partition: int, before: int) -> None:
    client = admin(broker)
    for future in client.delete_records([TopicPartition(name, partition, before)]).values():
        future.result(30)


def retire_partitions(broker: Broker, name: str, to: int) -> None:
    """Returns when their records are redirected; the partitions exist until they are empty."""
    command = [
        sys.executable,
        "-m",
        "mqd.cli.main",
        "topic",
        "retire-partitions",
        name,
        "--to",
        str(to),
        "-b",
        broker.bootstrap,
    ]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)


def wait_for_partitions(broker: Broker, name: str, count: int, seconds: float = 60.0) -> None:
    """Waits until metadata shows this many."""
    client = admin(broker)
    eventually(
        lambda: len(client.list_topics(name, timeout=60).topics[name].partitions) == count,
        f"{name} has {count} partitions",
        seconds,
    )


def produce(broker: Broker, topic: str, records: Iterable[Any], partition: int = 0, **config: Any) -> None:
    """`records`: values, or dictionaries of produce()'s arguments."""
    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 20, **config})
    failed: list[Any] = []
    for record in records:
        arguments = record if isinstance(record, dict) else {"value": record}
        producer.produce(
            topic,
            partition=arguments.pop("partition", partition),
            on_delivery=lambda error, _: error and failed.append(error),
            **arguments,
        )
        producer.poll(0)
    assert producer.flush(60) == 0 and not failed, failed


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


def options(broker: Broker, topic: str, **more: Any) -> dict[str, str]:
    return {
        "kafka.bootstrap.servers": broker.bootstrap,
        "subscribe": topic,
        **{name.replace("__", "."): str(value) for name, value in more.items()},
    }


def read(spark: Any, broker: Broker, topic: str, **more: Any) -> Any:
    return spark.read.format("mqd").options(**options(broker, topic, **more)).load()


def rows(frame: Any) -> list[Row]:
    """(partition, offset, key, value) in order."""
    found = [
        (row.partition, row.offset, _plain(row.key), _plain(row.value))
        for row in frame.select("partition", "offset", "key", "value").collect()
    ]
    return sorted(found, key=lambda row: row[:2])


def values(frame: Any) -> list[Any]:
    return [row[3] for row in rows(frame)]


def _plain(blob: Any) -> bytes | None:
    return None if blob is None else bytes(blob)


# Spark waits ten seconds for one of its Python processes to start, which cannot be configured: on
# an overloaded machine it is restarted, as an operator would do.
LADEN = ("failed to connect back", "CANNOT_OPEN_SOCKET")


class Stream:
    """A streaming read of format("mqd"), which collects its rows, with its own checkpoint: every
    run continues where the last one ended.
    """

    def __init__(self, spark: Any, place: Path, given: dict[str, str]) -> None:
        self._spark, self.checkpoint, self.given = spark, place / "checkpoint", given
        self.seen: list[Row] = []
        self.batches: list[int] = []  # rows of each that has any
        self.progress: list[Any] = []
        self._query: Any = None
        self._arguments: tuple[bool, int | None] = (True, None)

    def start(self, available_now: bool = True, fail_on: int | None = None) -> None:
        """`fail_on`: the batch that raises an exception before it is committed."""

        def each(frame: Any, number: int) -> None:
            if number == fail_on:
                raise RuntimeError("this batch is not to be committed")
            found = rows(frame)
            self.seen += found
            self.batches += [len(found)] if found else []

        self._arguments = (available_now, fail_on)
        stream = self._spark.readStream.format("mqd").options(**self.given).load()
        writer = stream.writeStream.foreachBatch(each).option("checkpointLocation", str(self.checkpoint))
        self._query = (
            writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
        ).start()

    def wait(self, condition: Any, seconds: float = 120.0) -> None:
        """Waits while the query runs. Raises its error."""
        deadline = time.monotonic() + seconds
        while not condition():
            problem = self._query.exception() if not self._query.isActive else None
            if problem is not None and any(text in str(problem) for text in LADEN):
                self.start(*self._arguments)
            elif problem is not None:
                raise problem
            assert time.monotonic() < deadline, f"it did not come about: {self._query.status}"
            time.sleep(0.05)  # polls Spark's own threads; there is no event to wait for

    def stop(self) -> None:
        self._query.stop()

    def run(self) -> list[Row]:
        """Reads everything; returns the rows of this run."""
        before = len(self.seen)
        self.start()
        self.wait(lambda: not self._query.isActive and self._query.exception() is None)
        self.progress = self._query.recentProgress
        return self.seen[before:]

    def failure(self, **arguments: Any) -> str:
        """The error that ends it."""
        self.start(**arguments)
        try:
            self.wait(lambda: False)
        except Exception as error:  # noqa: BLE001  (Spark's are many)
            assert not isinstance(error, AssertionError), error
            return str(error)
        raise AssertionError("it did not fail")

    def offsets(self, batch: int) -> dict[str, Any]:
        """The end of a batch that Spark has persisted."""
        return json.loads((self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])


def committed(broker: Broker, group: str, topic: str, partitions: Sequence[int]) -> list[int]:
    from confluent_kafka import ConsumerGroupTopicPartitions

    client = admin(broker)
    requested = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, partition) for partition in partitions])
    found = client.list_consumer_group_offsets([requested])[group].result(30)
    return [one.offset for one in sorted(found.topic_partitions, key=lambda one: one.partition)]
