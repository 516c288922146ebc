"""The inputs of produce_batch as columns; stages; headers; configuration."""

from __future__ import annotations

import array
import random
from typing import Any
from unittest.mock import patch

import confluent_kafka
import numpy as np
import pytest

from mqd.client import columns, config
from mqd.client.messages import GroupMetadata, KafkaException, Message, decode_headers, encode_headers
from mqd.client.producer import Producer
from mqd.client.shm.staging import FullEntry, Stage, chunk_of
from mqd.protocol.records import Record, decode_records, encode_batch


def _plain(values) -> list[bytes | None]:
    return [value.encode() if isinstance(value, str) else None if value is None else bytes(value) for value in values]


LISTS = [[], [b""], [b"a", b"bb", b""], ["a", b"b", None], [None, None], (b"x",), [bytearray(b"x"), memoryview(b"yz")]]
ARRAYS = [
    np.array([b"a", b"bb"]),
    np.array([b"aa", b"bb"]),
    np.array([b"", b"\0", b"a\0b"]),
    np.array([], "S3"),
    np.array([b"", b""], "S1"),
    np.array([b"abc", b"d", b"ef", b"ghi"])[::2],
]


@pytest.mark.parametrize("values", [*LISTS, *ARRAYS], ids=str)
def test_packed_and_unpacked(values) -> None:
    column = columns.pack(values, "values")
    plain = _plain(values)
    assert column.items() == plain
    for start in range(len(plain) + 1):
        for end in range(start, len(plain) + 1):
            assert column.part(start, end).items() == plain[start:end]
    assert (
        column.largest_bytes() == max([len(value) if value is not None else -1 for value in plain], default=0)
        or column.largest_bytes() == 0
    )


def test_numpy_rows_keep_their_zeros_and_their_memory() -> None:
    rows = np.array([[1, 0], [0, 0]], np.uint8)
    column = columns.pack(rows, "values")
    assert column.items() == [b"\1\0", b"\0\0"] and np.shares_memory(np.frombuffer(column.data, np.uint8), rows)
    full = np.array([b"ab", b"cd"])
    assert np.shares_memory(np.frombuffer(columns.pack(full, "values").data, np.uint8), full)
    assert columns.pack(np.zeros((3, 0), np.uint8), "values").items() == [b""] * 3
    assert columns.pack(rows.T, "values").items() == [b"\1\0", b"\0\0"]


def test_arrow_shares_its_memory() -> None:
    pa = pytest.importorskip("pyarrow")
    kinds = [pa.binary(), pa.string(), pa.large_binary(), pa.large_string(), pa.binary(3)]
    for kind in kinds:
        values = ["abc", "def", "ghi"] if "string" in str(kind) else [b"abc", b"def", b"ghi"]
        array = pa.array(values, kind)
        column = columns.pack(array, "values")
        assert column.items() == [b"abc", b"def", b"ghi"]
        assert np.shares_memory(np.frombuffer(column.data, np.uint8), np.frombuffer(array.buffers()[-1], np.uint8))
        assert columns.pack(array.slice(1, 1), "values").items() == [b"def"]
        assert columns.pack(pa.chunked_array([array, array.slice(2)]), "values").items() == [
            b"abc",
            b"def",
            b"ghi",
            b"ghi",
        ]
    assert columns.pack(pa.array(["a", None, "b"], pa.string_view()), "values").items() == [b"a", None, b"b"]
    assert columns.pack(pa.chunked_array([], pa.binary()), "values").items() == []
    hidden = pa.Array.from_buffers(
        pa.binary(),
        3,
        [pa.py_buffer(b"\5"), pa.py_buffer(np.array([0, 1, 3, 4], np.int32)), pa.py_buffer(b"axxb")],
        null_count=1,
    )
    assert columns.pack(hidden, "values").items() == [b"a", None, b"b"]


@pytest.mark.parametrize(
    "wrong",
    [b"bytes", "text", 5, None, [1], [b"a", 1.5], np.zeros(3), np.zeros((2, 2)), np.array([1, 2], object)],
    ids=str,
)
def test_other_types_of_columns_are_a_type_error(wrong) -> None:
    with pytest.raises(TypeError, match="values"):
        columns.pack(wrong, "values")


def test_items_larger_than_a_byte() -> None:
    """Their number is not the number of bytes."""
    numbers = np.arange(6, dtype=np.int16)
    views = [numbers.data, numbers[::2].data, np.array(7, np.int32).data]
    assert columns.pack(views, "values").items() == [bytes(view) for view in views]
    assert columns.pack([*views, None, "a"], "values").items() == [*(bytes(view) for view in views), None, b"a"]
    for wrong in ([numbers], list(np.ones((10, 4), np.float32)), [array.array("i", [1, 2])], [b"a", numbers]):
        with pytest.raises(TypeError, match="expected values to be bytes"):
            columns.pack(wrong, "values")


class Recorder(Producer):
    """Notes the calls of produce()."""

    def __init__(self) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "transport": "tcp", "log_level": 0})
        self.calls: list[tuple[Any, int, Any]] = []

    def produce(  # type: ignore[override]
        self, _topic: str, value: Any, _key: Any, partition: int, *, on_delivery: Any, **_more: Any
    ) -> None:
        self.calls.append((value, partition, on_delivery))


def test_confluent_kafkas_batch_by_position() -> None:
    producer, report, own = Recorder(), print, repr
    messages = [{"value": b"a"}, {"value": b"b", "partition": 2, "callback": own}]
    assert producer.produce_batch("t", messages, 5, report) == 2
    assert producer.calls == [(b"a", 5, report), (b"b", 2, own)]
    producer.calls.clear()
    assert producer.produce_batch("t", messages, partition=4, on_delivery=report) == 2
    assert producer.produce_batch("t", messages) == 2
    assert [partition for _, partition, _ in producer.calls] == [4, 2, -1, 2]
    assert producer.produce_batch("t", [], 5, report) == 0
    wrong_arguments: list[tuple[Any, Any]] = [([b"k", b"k"], None), (0, {"a": b"1"}), ("0", report)]
    for wrong in wrong_arguments:
        producer.calls.clear()
        with pytest.raises(TypeError):
            producer.produce_batch("t", messages, *wrong)
        assert not producer.calls


def test_headers_are_the_protocols() -> None:
    rng = random.Random(4)
    for _ in range(200):
        headers = [
            (
                "".join(rng.choices("aé ", k=rng.randrange(90))),
                rng.choice([None, b"", rng.randbytes(rng.randrange(200))]),
            )
            for _ in range(rng.randrange(5))
        ]
        encoded = encode_headers(headers)
        assert decode_headers(encoded) == headers
        (record,) = decode_records(encode_batch([Record(b"v", headers=headers)]))
        assert record.headers == headers
        assert encoded in encode_batch([Record(b"v", headers=headers)])
        for cut in range(len(encoded)):
            with pytest.raises(ValueError):
                decode_headers(encoded[:cut])
    assert encode_headers({"a": "b"}) == encode_headers([("a", b"b")])
    numbers = np.arange(3, dtype=np.int32).data
    assert decode_headers(encode_headers({"a": numbers, "b": b"c"})) == [("a", bytes(numbers)), ("b", b"c")]


def test_a_message_has_confluent_kafkas_methods() -> None:
    message = Message("t", 1, 5, b"k", b"value", encode_headers({"a": b"1"}), None, (1, 77), 0.5, 3)
    assert isinstance(message, confluent_kafka.Message) and len(message) == 5
    assert message.headers() == [("a", b"1")] and message.timestamp() == (1, 77) and message.leader_epoch() == 3
    public = {name for name in dir(confluent_kafka.Message) if not name.startswith("_")}
    mine = {name for name in vars(Message) if not name.startswith("_")}
    inherited = public - mine
    assert inherited <= {"delivery_count", "deserialized_key", "deserialized_value"}, (
        "a method of confluent_kafka's that looks at the empty object under ours"
    )
    assert not any(getattr(message, name)() for name in inherited)


def test_group_metadata_has_confluent_kafkas_methods() -> None:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": "127.0.0.1:1", "group.id": "a group", "log_level": 0})
    given = consumer.consumer_group_metadata()
    consumer.close()
    assert GroupMetadata.read(given) == GroupMetadata("a group") and GroupMetadata("a group").to_bytes() == given
    for about in (GroupMetadata("g", 5, "member", "instance"), GroupMetadata("g", 5, "member")):
        assert GroupMetadata.read(about.to_bytes()) == about
    for wrong in (b"", b"CGMDv2:", b"CGMDv2:\0\0\0\0g", "text", None):
        with pytest.raises(KafkaException):
            GroupMetadata.read(wrong)


# -- stages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mix", "plain"), [(0.0, 1.0), (0.0, 0.0), (0.2, 1.0), (0.2, 0.5), (0.0, 0.5)])
def test_a_stage_keeps_times_and_order(mix: float, plain: float) -> None:
    rng = random.Random(7)
    stage, sent, expected, now = Stage("t"), 0, [], 1000
    taken: list[tuple[bytes | None, int]] = []
    for _ in range(400):
        for _ in range(rng.randrange(6)):
            if rng.random() < 0.4:
                now += rng.randrange(3)
            if rng.random() < mix:
                stage.entries.append(FullEntry(b"%d" % sent, None, -1, 7, None, None, 0.0, None))
                expected.append((b"%d" % sent, 7))
            else:
                if not stage.mark_start_s <= now / 1000 < stage.mark_end_s:
                    with patch("time.time_ns", return_value=now * 1_000_000):
                        stage.mark()
                stage.entries.append(b"%d" % sent if rng.random() < plain else (b"%d" % sent, b"key"))
                expected.append((b"%d" % sent, now))
            sent += 1
        count = rng.randrange(len(stage.entries) + 1)
        if not count:
            continue
        chunk = chunk_of(stage, count)
        times = [chunk.timestamp_ms] * count if chunk.timestamps is None else chunk.timestamps.tolist()
        done = rng.randrange(count + 1)
        taken += list(zip(chunk.values.items(), times, strict=True))[:done]
        stage.release(done)
    assert taken == expected[: len(taken)] and stage.released_count == len(taken) > 100


# -- configuration ---------------------------------------------------------------------------------


def _settings(**more) -> config.Settings:
    return config.read({"bootstrap.servers": "127.0.0.1:9092"}, more)


def test_aliases_and_derived_settings() -> None:
    found = config.ProducerConfig(
        config.read(
            {
                "request.required.acks": "all",
                "queue.buffering.max.ms": "7.5",
                "compression.codec": "LZ4",
                "enable.idempotence": "true",
            }
        )
    )
    assert (
        found["acks"],
        found["linger.ms"],
        found["compression.type"],
        found["max.in.flight.requests.per.connection"],
    ) == (-1, 7.5, "lz4", 5)
    transactional = config.ProducerConfig(config.read({"transactional.id": "t", "transaction.timeout.ms": 1000}))
    assert transactional["enable.idempotence"] is True and transactional["delivery.timeout.ms"] == 1000
    nested = config.ProducerConfig(config.read({"default.topic.config": {"acks": 1, "partitioner": "murmur2"}}))
    assert (nested["acks"], nested["partitioner"]) == (1, "murmur2")


def test_defaults_are_librdkafkas() -> None:
    """The defaults over shared memory are librdkafka's; it does not expose them, so this list has
    to be checked when one changes.
    """
    found = config.ProducerConfig(_settings())
    assert (
        found["acks"],
        found["linger.ms"],
        found["batch.size"],
        found["batch.num.messages"],
        found["message.max.bytes"],
    ) == (-1, 5.0, 1_000_000, 10_000, 1_000_000)
    assert (found["queue.buffering.max.messages"], found["delivery.timeout.ms"], found["partitioner"]) == (
        100_000,
        300_000,
        "consistent_random",
    )


def test_the_transport_is_chosen_with_a_reason(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQD_RUN_RENDEZVOUS", str(tmp_path))
    monkeypatch.delenv("MQD_SOCKET", raising=False)
    assert config.choose_transport(_settings(transport="tcp"))[:3] == ("tcp", None, "transport=tcp")
    unserved = config.choose_transport(_settings())
    assert unserved.transport == "tcp" and "9092" in unserved.reason
    secured = config.choose_transport(
        config.read({"bootstrap.servers": "127.0.0.1:9092", "security.protocol": "SASL_SSL"})
    )
    assert secured.transport == "tcp" and "sasl_ssl" in secured.reason
    for wrong in ({"transport": "shm"}, {"mqd.socket.path": str(tmp_path / "none"), "transport": "shm"}):
        with pytest.raises(KafkaException):
            config.choose_transport(config.read({"bootstrap.servers": "127.0.0.1:9092", **wrong}))
    elsewhere = config.choose_transport(config.read({"bootstrap.servers": "192.0.2.1:9092"}))
    assert elsewhere.transport == "tcp" and "not on this host" in elsewhere.reason


@pytest.mark.parametrize(
    "wrong", [{"linger.ms": "soon"}, {"enable.idempotence": "perhaps"}, {"partitioner": "by_moon"}, {"acks": 2000}]
)
def test_invalid_values_are_refused(wrong) -> None:
    with pytest.raises(KafkaException):
        config.check(config.read({"bootstrap.servers": "127.0.0.1:9092", **wrong}), confluent_kafka.Producer)
