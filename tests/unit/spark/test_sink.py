"""The sink's options and encoding, without Spark: refusals and their messages, and rows as record
batches.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mqd.client.encryption.keys import format_keys, new_key
from mqd.client.encryption.payload import opener_of, shared_sealer
from mqd.native.client import Partitioner, partition_for
from mqd.protocol.errors import ErrorCode
from mqd.protocol.records import Record, decode_batch, iterate_batches
from mqd.spark import writing
from mqd.spark.encoding import HEADER_BYTES, Batch, Encoder, MqdWriteError
from mqd.spark.joint import Child, JointTransaction
from mqd.spark.options import MqdOptionError
from mqd.spark.sink_options import SinkOptions, column_name, sink_options

HEADERS = "array<struct<key:string,value:binary>>"
BROKER = {"kafka.bootstrap.servers": "127.0.0.1:9092"}


@dataclass
class Kind:
    text: str

    def simpleString(self) -> str:  # noqa: N802  (Spark's name)
        return self.text


@dataclass
class Field:
    name: str
    dataType: Kind  # noqa: N815


@dataclass
class Schema:
    fields: list[Field]


def schema(**kinds: str) -> Schema:
    return Schema([Field(name, Kind(kind)) for name, kind in kinds.items()])


def options(
    topic: str | None = "t", kinds: dict[str, str] | None = None, streaming: bool = False, **given: str
) -> SinkOptions:
    named = {name.replace("__", "."): value for name, value in given.items()}
    return sink_options(
        {**BROKER, **({"topic": topic} if topic else {}), **named},
        schema(**(kinds or {"key": "binary", "value": "binary"})),
        streaming,
    )


# -- options ---------------------------------------------------------------------------------------


def test_defaults_are_exactly_once() -> None:
    found = options()
    assert found.is_exactly_once and found.acks == -1 and found.compression == 0 and found.topic == "t"
    assert column_name(found, "key") == "key" and column_name(found, "headers") is None


def test_columns_are_case_insensitive_and_others_ignored() -> None:
    found = options(None, {"Value": "string", "TOPIC": "string", "offset": "bigint"})
    assert (column_name(found, "value"), column_name(found, "topic"), column_name(found, "key")) == (
        "Value",
        "TOPIC",
        None,
    )


@pytest.mark.parametrize(
    ("topic", "kinds", "given", "problem"),
    [
        ("t", {"key": "binary"}, {}, r"column value .* is required.*\(key\)"),
        ("t", {"value": "binary", "VALUE": "binary"}, {}, "column value appears twice"),
        ("t", {"value": "struct<a:int>"}, {}, "column value is struct<a:int>, and must be binary or string"),
        ("t", {"value": "binary", "timestamp": "bigint"}, {}, "column timestamp is bigint"),
        (None, {"value": "binary"}, {}, "the target is missing"),
        (" ", {"value": "binary"}, {}, "is not a topic name"),
        ("t", {"value": "binary"}, {"delivery": "twice"}, "option delivery: 'twice'"),
        ("t", {"value": "binary"}, {"kafka__acks": "1"}, "it must be 'all' for exactly-once delivery"),
        ("t", {"value": "binary"}, {"kafka__enable.idempotence": "false"}, "exactly-once delivery needs true"),
        ("t", {"value": "binary"}, {"kafka__key.serializer": "x"}, "serialize them"),
        ("t", {"value": "binary"}, {"kafka__transactional.id": "x"}, "txnAppId"),
        ("t", {"value": "binary"}, {"kafka__security.protocol": "TLS"}, "is not known"),
        ("t", {"value": "binary"}, {"txnVersion": "1"}, "go together"),
        ("t", {"value": "binary"}, {"txnAppId": "a", "txnVersion": "-1"}, "txnVersion: -1"),
        (
            "t",
            {"value": "binary"},
            {"txnAppId": "a", "txnVersion": "1", "delivery": "at-least-once"},
            "Leave one of them out",
        ),
    ],
)
def test_invalid_options_are_refused(
    topic: str | None, kinds: dict[str, str], given: dict[str, str], problem: str
) -> None:
    with pytest.raises(MqdOptionError, match=problem):
        options(topic, kinds, **given)


def test_an_application_is_for_batch_writes() -> None:
    assert options(txnAppId="a", txnVersion="3").app_version == 3
    with pytest.raises(MqdOptionError, match="foreachBatch"):
        options(streaming=True, txnAppId="a", txnVersion="3")


def test_at_least_once_may_use_acks_1() -> None:
    found = options(delivery="At-Least-Once", kafka__acks="1")
    assert not found.is_exactly_once and found.acks == 1


# -- encoding --------------------------------------------------------------------------------------


def encoded(found: SinkOptions, *batches: pa.RecordBatch, partition_count: int = 3) -> list[Batch]:
    encoder = Encoder(found, lambda _topic: partition_count)
    out = []
    for batch in batches:
        encoder.add(batch)
        out += list(encoder.ready_batches())
    return out + list(encoder.remaining_batches())


def records_of(batches: list[Batch]) -> dict[tuple[str, int], list[Record]]:
    """As readers of a broker see them; every batch is well-formed and has the right number of
    records.
    """
    out: dict[tuple[str, int], list[Record]] = {}
    for batch in batches:
        batch.stamp(5, 1, 0, True)
        ((header, data),) = iterate_batches(bytes(batch.data))
        assert (header.producer_id, header.producer_epoch, header.is_transactional, header.record_count) == (
            5,
            1,
            True,
            batch.count,
        )
        out.setdefault((batch.topic, batch.partition), []).extend(decode_batch(data))
    return out


ROWS = st.lists(
    st.tuples(st.none() | st.binary(max_size=6), st.none() | st.binary(max_size=40), st.none() | st.integers(0, 2)),
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, cut=st.integers(0, 60), codec=st.sampled_from(["none", "gzip", "snappy", "lz4", "zstd"]))
def test_rows_are_encoded_unchanged(rows: list, cut: int, codec: str) -> None:
    kinds = {"key": "binary", "value": "binary", "partition": "int"}
    table = pa.table(
        {
            "key": pa.array([row[0] for row in rows], pa.binary()),
            "value": pa.array([row[1] for row in rows], pa.binary()),
            "partition": pa.array([row[2] for row in rows], pa.int32()),
        }
    )
    batches = [piece for part in (table.slice(0, cut), table.slice(cut)) for piece in part.to_batches()]
    found = records_of(encoded(options(kinds=kinds, **{"kafka__compression.type": codec}), *batches))
    expected: dict[int, list] = {}
    loose = []
    for key, value, partition in rows:
        if partition is None and key is None:
            loose.append(value)
            continue
        where = partition if partition is not None else partition_for(Partitioner.MURMUR2_RANDOM, key, 3)
        expected.setdefault(where, []).append((key, value))
    got = {index: [(one.key, one.value) for one in records] for (_, index), records in found.items()}
    named = {(key, partition) for key, _, partition in rows if not (key is None and partition is None)}
    for index, pairs in expected.items():
        rest = list(got[index])
        for pair in pairs:  # in this order, with rows without a partition between them
            rest = rest[rest.index(pair) + 1 :]
    assert (
        sum(map(len, got.values())) == len(rows)
        and len(loose) + sum(map(len, expected.values())) == len(rows)
        and (named or not expected)
    )


def test_values_are_sealed_with_their_topic_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQD_TEST_KEYS", format_keys({"one": new_key()}))
    kinds = {"topic": "string", "key": "binary", "value": "binary"}
    found = options(None, kinds, encryption__key__provider="env:MQD_TEST_KEYS")
    assert found.kafka.encryption is not None
    rows = [(topic, key, value) for topic in "ab" for key in (b"k", None) for value in (b"v", None)]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows), (pa.string(), pa.binary(), pa.binary()))]
    batches = encoded(found, pa.RecordBatch.from_arrays(columns, list(kinds)), partition_count=1)
    opener = opener_of(found.kafka.encryption)
    assert [
        (topic, record.key, record.value and opener.open(topic, record.key, record.value))
        for (topic, _), records in records_of(batches).items()
        for record in records
    ] == rows
    monkeypatch.delenv("MQD_TEST_KEYS")
    shared_sealer.cache_clear()
    with pytest.raises(MqdWriteError, match="option the environment variable MQD_TEST_KEYS has no key"):
        encoded(found, pa.RecordBatch.from_arrays(columns, list(kinds)))


def test_batches_fill_the_limit_and_a_single_row_may_exceed_it() -> None:
    values = [b"x" * 1000] * 100 + [b"y" * 50_000] + [b"z" * 1000] * 100
    batch = pa.record_batch({"value": pa.array(values, pa.binary())})
    found = encoded(options(kinds={"value": "binary"}, **{"kafka__batch.size": "16384"}), batch, partition_count=1)
    assert [one.count for one in found if len(one.data) > 16_384] == [1]
    assert all(one.count >= 15 for one in found[:6])
    assert [record.value for record in records_of(found)["t", 0]] == values


def test_rows_that_arrow_cannot_combine_are_all_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a column of the combined rows exceeds 2 GiB."""
    pieces = [
        pa.record_batch({"value": pa.array([b"%d" % number for number in range(first, first + 4)], pa.binary())})
        for first in (0, 4, 8)
    ]

    class Table:
        def __init__(self, batches: list[pa.RecordBatch]) -> None:
            self._batches = batches

        def combine_chunks(self) -> Table:
            return self

        def to_batches(self) -> list[pa.RecordBatch]:
            return self._batches

    monkeypatch.setattr(pa, "Table", SimpleNamespace(from_batches=Table))
    found = encoded(options(kinds={"value": "binary"}), *pieces, partition_count=1)
    assert [record.value for record in records_of(found)["t", 0]] == [b"%d" % number for number in range(12)]


def test_a_batch_that_is_too_large_is_halved() -> None:
    batch = pa.record_batch({"value": pa.array([b"%d" % number for number in range(11)], pa.binary())})
    (whole,) = encoded(options(kinds={"value": "binary"}), batch, partition_count=1)
    halves = whole.split_in_half(0)
    assert [half.count for half in halves] == [5, 6] and all(len(half.data) > HEADER_BYTES for half in halves)
    assert [record.value for record in records_of(halves)["t", 0]] == [b"%d" % number for number in range(11)]


def test_topics_headers_and_times_are_the_rows_own() -> None:
    kinds = {"topic": "string", "value": "string", "headers": HEADERS, "timestamp": "timestamp"}
    header = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch(
        {
            "topic": pa.array(["a", "b", "a"]),
            "value": pa.array(["1", "2", "3"]),
            "headers": pa.array([[{"key": "h", "value": b"v"}, {"key": "n", "value": None}], None, []], header),
            "timestamp": pa.array([1_357_000_000_123_456, 5_000, None], pa.timestamp("us", tz="Europe/Berlin")),
        }
    )
    found = records_of(encoded(options(None, kinds), batch, partition_count=1))
    first, third = found["a", 0]
    assert (first.value, [tuple(one) for one in first.headers], first.timestamp_ms) == (
        b"1",
        [("h", b"v"), ("n", None)],
        1_357_000_000_123,
    )
    assert (third.value, list(third.headers)) == (b"3", []) and third.timestamp_ms > 1_700_000_000_000
    (second,) = found["b", 0]
    assert (second.value, list(second.headers), second.timestamp_ms) == (b"2", [], 5)


def test_rows_without_a_key_stay_together_for_a_round() -> None:
    batch = pa.record_batch({"value": pa.array([b"v"] * 500, pa.binary())})
    kinds = {"value": "binary"}
    assert len(encoded(options(kinds=kinds), batch, partition_count=50)) == 1
    assert len({encoded(options(kinds=kinds), batch, partition_count=50)[0].partition for _ in range(40)}) > 5


@pytest.mark.parametrize(
    ("column", "values", "kind", "problem"),
    [
        ("partition", [0, 3], pa.int32(), "topic t has partitions 0 to 2, but a row has 3"),
        ("partition", [0, -1], pa.int32(), "a row has -1"),
        ("partition", [None, 3], pa.int32(), "a row has 3"),
        (
            "headers",
            [[{"key": None, "value": b""}], None],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            "every header needs a key",
        ),
    ],
)
def test_invalid_rows_are_named(column: str, values: list, kind: pa.DataType, problem: str) -> None:
    batch = pa.record_batch({"value": pa.array([b"a", b"b"], pa.binary()), column: pa.array(values, kind)})
    with pytest.raises(MqdWriteError, match=problem):
        encoded(options(kinds={"value": "binary", column: HEADERS if column == "headers" else "int"}), batch)


def test_a_null_topic_is_named() -> None:
    batch = pa.record_batch({"value": pa.array([b"a", b"b"], pa.binary()), "topic": pa.array(["a", None])})
    with pytest.raises(MqdWriteError, match="1 rows have a null topic"):
        encoded(options(None, {"value": "binary", "topic": "string"}), batch)


# -- the batch's transaction -----------------------------------------------------------------------


def test_an_ended_transaction_is_reported_with_its_timeout() -> None:
    """The broker responds identically to a task that waited too long for its next rows and to one
    that was overtaken.
    """
    coordinator = SimpleNamespace(coordinators=[SimpleNamespace(error_code=0, node_id=1, host="h", port=1)])
    link = SimpleNamespace(
        request=lambda request, *_: (
            coordinator
            if hasattr(request, "coordinator_keys")
            else SimpleNamespace(error_code=ErrorCode.PRODUCER_FENCED)
        )
    )
    cluster: Any = SimpleNamespace(
        any_connection=lambda: link, connection_to=lambda _: link, brokers={}, api_timeout_s=1.0
    )
    with pytest.raises(
        MqdWriteError,
        match=(
            r"continuing the transaction of batch 3: .* the batch had no activity for 60000 ms"
            r" .* raise kafka.transaction.timeout.ms.* another run"
        ),
    ):
        JointTransaction(cluster, "mqd.joint.spark.query.q", 3, "run", 60_000).heartbeat(Child(5, 0))


@pytest.fixture
def sink(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as Spark imports it, with the names that it imports from PySpark."""
    datasource = ModuleType("pyspark.sql.datasource")
    for name in ("DataSourceArrowWriter", "DataSourceStreamArrowWriter", "WriterCommitMessage"):
        setattr(datasource, name, type(name, (), {}))
    for name, module in (
        ("pyspark", ModuleType("pyspark")),
        ("pyspark.sql", ModuleType("pyspark.sql")),
        ("pyspark.sql.datasource", datasource),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.find_spec("mqd.spark.sink")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_a_stream_that_cannot_abort_its_transaction_reports_it(
    sink: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch without a completed task: Spark gives the driver neither the query nor its run."""
    aborted: list[Any] = []
    monkeypatch.setattr(
        writing, "joint_transaction", lambda _, place: SimpleNamespace(abort=lambda: aborted.append(place))
    )
    place = sink.BatchRun("mqd.joint.spark.query.q", 7, "run")
    writer = sink.MqdStreamWriter(options(kafka__transaction__timeout__ms="5000"))
    writer.abort([None, sink.TaskResult(place, (5, 0), 1, 1)], 7)
    assert aborted == [place] and not caplog.records
    for messages in ([], [None, None]):
        writer.abort(messages, 7)
    sink.MqdStreamWriter(options(delivery="at-least-once")).abort([None], 7)
    assert aborted == [place] and [record.levelno for record in caplog.records] == 2 * [logging.WARNING]
    assert (
        "batch 7 failed before any of its tasks was done" in caplog.text
        and "after 5000 ms (kafka.transaction.timeout.ms)" in caplog.text
    )
