"""An executor's reader against a real broker, without Spark: both transports, brokers that die
meanwhile, ranges that begin and end anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the executors' readers come with pyarrow: pip install 'mqd[spark]'")

from mqd.spark import fetching, local  # noqa: E402
from mqd.spark.driver import Driver, plan_batch  # noqa: E402
from mqd.spark.options import LATEST, SourceOptions, source_options  # noqa: E402
from mqd.spark.planning import Range  # noqa: E402
from mqd.spark.reading import read_range  # noqa: E402
from mqd.spark.wire import MqdReadError  # noqa: E402
from tests.broker import Broker  # noqa: E402
from tests.spark.support import committed, delete_topic, new_topic, numbered, produce  # noqa: E402

WAYS = ("shm", "tcp")


def _options(broker: Broker, topic: str, **more: Any) -> SourceOptions:
    given = {
        "kafka.bootstrap.servers": broker.bootstrap,
        "subscribe": topic,
        "transport": "tcp",
        "kafkaConsumer.pollTimeoutMs": "15000",
    }
    return source_options(
        {**given, **{name.replace("__", "."): str(value) for name, value in more.items()}}, streaming=False
    )


def _values(batches: Iterator[Any]) -> list[bytes]:
    return [value for batch in batches for value in batch.column("value").to_pylist()]


def _read(options: SourceOptions, one: Range) -> list[bytes]:
    return _values(read_range(options, ("value", "offset"), one))


def _id(options: SourceOptions) -> bytes:
    driver = Driver(options)
    driver.partitions()
    driver.close()
    return next(iter(driver.topic_ids().values()))


@pytest.fixture(scope="module")
def hundred(broker: Broker) -> str:
    topic = new_topic(broker)
    for first in range(0, 100, 20):  # batches of twenty
        produce(broker, topic, numbered(first, 20), **{"compression.type": "lz4" if first % 40 else "none"})
    return topic


@pytest.mark.parametrize("transport", WAYS)
def test_ranges_begin_and_end_anywhere(broker: Broker, hundred: str, transport: str) -> None:
    options = _options(broker, hundred, transport=transport)
    topic_id = _id(options)
    for start, end in ((0, 100), (3, 4), (19, 21), (20, 40), (39, 40), (0, 1), (99, 100), (7, 93)):
        assert _read(options, Range(hundred, 0, start, end, topic_id)) == numbered(start, end - start), (start, end)


@pytest.fixture
def no_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that continues over TCP fails."""

    def refuse(self: Any) -> None:
        raise AssertionError(f"{self.name} is fetched from offset {self.position} on")

    monkeypatch.setattr(fetching.TcpBatchViews, "_connect", refuse)


def test_only_mapped_segments(broker: Broker, hundred: str, no_fetch: None) -> None:
    options = _options(broker, hundred, transport="shm")
    assert _read(options, Range(hundred, 0, 0, 100, _id(options))) == numbered(0, 100)


def test_many_small_fetches(broker: Broker, hundred: str) -> None:
    """One batch per response: the next Fetch is always in flight."""
    options = _options(broker, hundred, kafka__max__partition__fetch__bytes=1)
    assert _read(options, Range(hundred, 0, 5, 95, _id(options))) == numbered(5, 90)


def test_without_an_id_the_name_is_used(broker: Broker, hundred: str) -> None:
    assert _read(_options(broker, hundred), Range(hundred, 0, 0, 100)) == numbered(0, 100)


@pytest.mark.parametrize("transport", WAYS)
def test_transactions_at_the_end(broker: Broker, transport: str, request: pytest.FixtureRequest) -> None:
    """The last offsets are markers', and an aborted transaction's: the range ends nevertheless."""
    from confluent_kafka import Producer

    if transport == "shm":
        request.getfixturevalue("no_fetch")
    topic = new_topic(broker)
    for commit in (True, False):
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": topic})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, b"yes" if commit else b"no", partition=0)
        producer.flush(30)
        (producer.commit_transaction if commit else producer.abort_transaction)(30)
    for isolation, expected in (("read_committed", [b"yes"]), ("read_uncommitted", [b"yes", b"no"])):
        options = _options(broker, topic, transport=transport, kafka__isolation__level=isolation)
        (one,) = plan_batch(options)
        assert (one.start, one.end) == (0, 4)
        assert _read(options, one) == expected


@pytest.mark.parametrize("transport", WAYS)
def test_the_broker_dies_in_the_middle(start_broker: Any, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads from mapped segments continue over TCP; a connection is reopened. Each record once."""
    broker = start_broker(name=transport)
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 400), **{"batch.num.messages": 20})
    for module in (fetching, local):
        monkeypatch.setattr(module, "RECORDS_MAX", 10)  # views of ten records, of one batch each
        monkeypatch.setattr(module, "BYTES_MAX", 1)
    monkeypatch.setattr("mqd.spark.reading.ROWS_MAX", 20)
    options = _options(
        broker,
        topic,
        transport="auto" if transport == "shm" else "tcp",
        kafka__max__partition__fetch__bytes=1,
        kafkaConsumer__pollTimeoutMs=60_000,
    )
    batches = read_range(options, ("value", "offset"), Range(topic, 0, 0, 400, _id(options)))
    got = [value for _ in range(3) for value in next(batches).column("value").to_pylist()]
    broker.kill_all()
    broker.start()
    got += _values(batches)
    assert got == numbered(0, 400)


def test_records_that_do_not_arrive_are_reported(broker: Broker, hundred: str) -> None:
    options = _options(broker, hundred, kafkaConsumer__pollTimeoutMs=700)
    with pytest.raises(
        MqdReadError, match=f"{hundred}-0: no records from offset 100 on .range 90 to 101. within 0.7 s"
    ):
        _read(options, Range(hundred, 0, 90, 101, _id(options)))


@pytest.mark.parametrize("loses", [False, True])
def test_a_deleted_topic(broker: Broker, loses: bool) -> None:
    topic = new_topic(broker)
    produce(broker, topic, numbered(0, 10))
    options = _options(broker, topic, failOnDataLoss="false" if loses else "true")
    (one,) = plan_batch(options)
    delete_topic(broker, topic)
    for text in ("does not exist any more", "was deleted and recreated"):
        if loses:
            assert _read(options, one) == []
        else:
            with pytest.raises(MqdReadError, match=f"{topic}-0: the topic or partition {text}"):
                _read(options, one)
        if text.startswith("does not"):
            new_topic(broker, name=topic)


def test_even_by_bytes(broker: Broker) -> None:
    """DescribeLogDirs shows that one partition's records are larger."""
    topic = new_topic(broker, 2)
    produce(broker, topic, [b"x" * 20] * 2000, partition=0)
    produce(broker, topic, [b"y" * 380] * 2000, partition=1)
    made = plan_batch(_options(broker, topic, minPartitions=10))
    counts = [sum(one.partition == index for one in made) for index in (0, 1)]
    assert sum(counts) == 10 and counts[1] >= 8
    options = _options(broker, topic)
    assert sum(len(_read(options, one)) for one in made) == 4000


def test_a_groups_offsets(broker: Broker, hundred: str) -> None:
    driver = Driver(_options(broker, hundred))
    driver.commit_offsets("published", {(hundred, 0): 40})
    driver.commit_offsets("published", {(hundred, 0): 60})
    assert driver.offsets_at([(hundred, 0)], LATEST) == {(hundred, 0): 100}
    driver.close()
    assert committed(broker, "published", hundred, [0]) == [60]
