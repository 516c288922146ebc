"""An executor's Fetch, and a driver's Metadata, with fake brokers: a leader that moves, a nearer
replica, a broker with invalid responses, a silent one, one that does not know a topic yet.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ports import free_port

pytest.importorskip("pyarrow", reason="the executors' readers come with pyarrow: pip install 'mqd[spark]'")

from mqd.protocol.api import decode_request, encode_response, with_length  # noqa: E402
from mqd.protocol.headers import SUPPORTED  # noqa: E402
from mqd.protocol.messages import (
    ApiVersionsResponse,
    DescribeLogDirsResponse,
    FetchResponse,
    ListOffsetsResponse,
    MetadataResponse,
)  # noqa: E402
from mqd.protocol.records import Record, encode_batch  # noqa: E402
from mqd.spark import fetching  # noqa: E402
from mqd.spark.driver import Driver  # noqa: E402
from mqd.spark.options import source_options  # noqa: E402
from mqd.spark.planning import Range  # noqa: E402
from mqd.spark.progress import Progress  # noqa: E402
from mqd.spark.reading import read_range  # noqa: E402
from mqd.spark.wire import Cluster, MqdReadError, Topic  # noqa: E402

TOPIC = b"the topic's id.."
BATCHES = {
    offset: encode_batch([Record(value=b"%d" % number) for number in range(offset, offset + 10)], base_offset=offset)
    for offset in range(0, 50, 10)
}


class World:
    """Brokers 1 and 2, the leader, and invalid responses to a Fetch."""

    def __init__(self) -> None:
        self.leader, self.topic_id, self.fetches = 1, TOPIC, []
        self.behind: set[int] = set()  # brokers whose metadata does not contain the topic yet
        self.requested: list[int] = []  # for metadata
        # bytes: the whole response; a PartitionData: that
        self.lie: Callable[[int, int], Any] = lambda node, offset: None
        self._sockets = [socket.create_server(("127.0.0.1", free_port())) for _ in range(2)]
        for node, listener in enumerate(self._sockets, 1):
            threading.Thread(target=self._accept, args=(node, listener), daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return "127.0.0.1:%d" % self._sockets[0].getsockname()[1]

    def close(self) -> None:
        for listener in self._sockets:
            listener.shutdown(socket.SHUT_RDWR)  # ends a waiting accept(), which close() alone does not
            listener.close()

    def _accept(self, node: int, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(node, connection), daemon=True).start()

    def _serve(self, node: int, connection: socket.socket) -> None:
        # the reader disconnects at any time
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
            while len(head := stream.read(4)) == 4:
                header, request = decode_request(stream.read(struct.unpack(">i", head)[0]))
                response = self._answer(node, header, request)
                connection.sendall(
                    response if isinstance(response, bytes) else with_length(encode_response(header, response))
                )

    def _answer(self, node: int, header: Any, request: Any) -> Any:
        if header.api_key == 18:
            return ApiVersionsResponse(
                api_keys=[
                    ApiVersionsResponse.ApiVersion(
                        api_key=one.key, min_version=one.min_version, max_version=one.max_version
                    )
                    for one in SUPPORTED.values()
                ]
            )
        if header.api_key == 3:
            brokers = [
                MetadataResponse.Broker(node_id=number, host="127.0.0.1", port=one.getsockname()[1])
                for number, one in enumerate(self._sockets, 1)
            ]
            self.requested.append(node)
            if node in self.behind:
                return MetadataResponse(
                    brokers=brokers,
                    cluster_id="c",
                    controller_id=1,
                    topics=[MetadataResponse.Topic(name="orders", error_code=3, partitions=[])],
                )
            part = MetadataResponse.Partition(
                partition_index=0, leader_id=self.leader, replica_nodes=[1, 2], isr_nodes=[1, 2]
            )
            return MetadataResponse(
                brokers=brokers,
                cluster_id="c",
                controller_id=1,
                topics=[MetadataResponse.Topic(name="orders", topic_id=self.topic_id, partitions=[part])],
            )
        if header.api_key == 2:
            requested = request.topics[0].partitions[0]
            offset = 0 if requested.timestamp == -2 else 50
            part = ListOffsetsResponse.PartitionResponse(
                partition_index=requested.partition_index,
                error_code=0 if node == self.leader else 6,
                offset=offset if node == self.leader else -1,
            )
            return ListOffsetsResponse(topics=[ListOffsetsResponse.TopicResponse(name="orders", partitions=[part])])
        offset = request.topics[0].partitions[0].fetch_offset
        self.fetches.append((node, offset))
        lie = self.lie(node, offset)
        if isinstance(lie, bytes):
            return lie
        honest = self.part(error_code=6) if node != self.leader else self.part(records=BATCHES.get(offset // 10 * 10))
        return FetchResponse(responses=[FetchResponse.TopicResponse(topic_id=TOPIC, partitions=[lie or honest])])

    @staticmethod
    def part(**fields: Any) -> Any:
        return FetchResponse.PartitionData(
            **{
                "partition_index": 0,
                "error_code": 0,
                "high_watermark": 50,
                "last_stable_offset": 50,
                "log_start_offset": 0,
                "aborted_transactions": None,
                "records": None,
                **fields,
            }
        )


@pytest.fixture
def world() -> Iterator[World]:
    one = World()
    yield one
    one.close()


def _read(world: World, end: int = 50, **more: str) -> list[int]:
    given = {
        "kafka.bootstrap.servers": world.bootstrap,
        "subscribe": "orders",
        "transport": "tcp",
        "kafkaConsumer.pollTimeoutMs": "20000",
        "kafka.client.rack": "here",
        **more,
    }
    batches = read_range(source_options(given, streaming=False), ("value",), Range("orders", 0, 0, end, TOPIC))
    return [int(value) for batch in batches for value in batch.column("value").to_pylist()]


def test_the_next_fetch_is_sent_ahead(world: World) -> None:
    assert _read(world) == list(range(50))
    assert world.fetches == [(1, offset) for offset in range(0, 50, 10)]


def test_a_leader_that_moves(world: World) -> None:
    def move(node: int, offset: int) -> None:
        if offset == 20:
            world.leader = 2

    world.lie = move
    assert _read(world) == list(range(50))
    assert (1, 20) in world.fetches and (2, 20) in world.fetches and (2, 40) in world.fetches


def test_a_nearer_replica(world: World) -> None:
    """It is used when the leader names it (KIP-392), and left when it lacks the requested records."""

    def near(node: int, offset: int) -> Any:
        if node == 1 and offset == 0:
            return world.part(preferred_read_replica=2)
        return world.part(records=BATCHES[offset]) if node == 2 and offset < 30 else None

    world.lie = near
    assert _read(world) == list(range(50))
    assert {node for node, offset in world.fetches if 0 < offset < 30} == {2} and (1, 40) in world.fetches


@pytest.mark.parametrize(
    "response",
    [
        with_length(b"\0" * 40),
        with_length(b"no"),
        struct.pack(">i", 1 << 30),
        struct.pack(">i", -1),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_one_invalid_response_is_retried(world: World, response: bytes) -> None:
    reported: list[int] = []

    def lie(node: int, offset: int) -> Any:
        if offset == 20 and not reported:
            reported.append(offset)
            return response
        return None

    world.lie = lie
    assert _read(world) == list(range(50))


def test_a_broker_with_only_invalid_responses(world: World) -> None:
    world.lie = lambda node, offset: with_length(b"\0" * 40)
    with pytest.raises(
        MqdReadError,
        match=(
            "orders-0: no records from offset 0 on .range 0 to 50. within 0.3 s: .*does not respond like a Kafka broker"
        ),
    ):
        _read(world, **{"kafkaConsumer.pollTimeoutMs": "300"})


@pytest.mark.parametrize(
    ("records", "text"),
    [
        (BATCHES[20][:40], "40 bytes that are not a whole record batch"),
        (BATCHES[20][:-1], "not a whole record batch"),
        (BATCHES[20][:16] + b"\1" + BATCHES[20][17:], "magic"),
        (BATCHES[20][:-1] + b"!", "checksum"),
        (BATCHES[0], "batches that end at offset 10"),
    ],
)
def test_invalid_records(world: World, records: bytes, text: str) -> None:
    """Damage is reported: no records are skipped."""
    world.lie = lambda node, offset: world.part(records=records) if offset == 20 else None
    with pytest.raises(MqdReadError, match=f"orders-0: a damaged record batch at offset 20: .*{text}"):
        _read(world)


def test_an_offset_out_of_range(world: World) -> None:
    world.lie = lambda node, offset: world.part(error_code=1) if offset >= 60 else None
    with pytest.raises(MqdReadError, match="no records from offset 50 on"):
        _read(world, end=60, **{"kafkaConsumer.pollTimeoutMs": "300"})
    given = {"kafka.bootstrap.servers": world.bootstrap, "subscribe": "orders", "transport": "tcp"}
    with pytest.raises(MqdReadError, match="orders-0: offset 60 is beyond the log's end 50"):
        list(read_range(source_options(given, streaming=False), ("value",), Range("orders", 0, 60, 70, TOPIC)))
    assert (
        list(
            read_range(
                source_options({**given, "failOnDataLoss": "false"}, streaming=False),
                ("value",),
                Range("orders", 0, 60, 70, TOPIC),
            )
        )
        == []
    )


def test_another_broker_is_queried_for_missing_topics(world: World) -> None:
    """It is then used further: the next trigger need not query two brokers."""
    options = source_options(
        {"kafka.bootstrap.servers": world.bootstrap, "subscribe": "orders", "startingOffsets": "earliest"},
        streaming=True,
    )
    progress = Progress(options, Driver(options), pause=lambda seconds: None)
    end = progress.latest(progress.initial(), True)
    world.behind, world.requested = {1}, []
    assert progress.latest(end, True) == end and world.requested[:2] == [1, 2]
    world.requested = []
    assert progress.latest(end, True) == end and set(world.requested) == {2}
    world.behind = {1, 2}
    with pytest.raises(MqdReadError, match="orders-0 was deleted"):
        progress.latest(end, True)
    progress.close()


def test_an_executor_does_not_trust_one_broker_about_a_missing_topic(world: World) -> None:
    """It may be cut off from the others forever: waiting does not help."""
    world.behind = {1}
    assert _read(world, failOnDataLoss="false") == list(range(50))
    assert set(world.requested) == {1, 2}


@pytest.mark.parametrize("poll_timeout_ms", ["1000", "60000"])
def test_a_topic_that_no_broker_has_is_skipped_after_5_seconds(
    world: World, monkeypatch: pytest.MonkeyPatch, poll_timeout_ms: str
) -> None:
    now = [100.0]
    monkeypatch.setattr(
        fetching,
        "time",
        SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)),
    )
    world.behind = {1, 2}
    assert _read(world, failOnDataLoss="false", **{"kafkaConsumer.pollTimeoutMs": poll_timeout_ms}) == []
    assert 5 <= now[0] - 100 <= 7 and world.requested.count(1) > 1 and world.requested.count(2) > 1
    with pytest.raises(MqdReadError, match="orders-0: the topic or partition does not exist any more"):
        _read(world, **{"kafkaConsumer.pollTimeoutMs": poll_timeout_ms})


def test_hidden_partitions_are_queried_from_all_brokers(world: World) -> None:
    driver = Driver(source_options({"kafka.bootstrap.servers": world.bootstrap, "subscribe": "orders"}, streaming=True))
    assert driver.partitions() == [("orders", 0)]
    world.leader = 2
    assert driver.retired_end_offsets([("orders", 1)]) == {("orders", 1): 50}
    world.leader = 3
    assert driver.retired_end_offsets([("orders", 1)]) == {}
    driver.close()


def test_sizes_of_partitions_with_a_leader_are_reported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(
        source_options({"kafka.bootstrap.servers": world.bootstrap, "subscribe": "orders"}, streaming=False)
    )
    driver.topics = {"orders": Topic("orders", TOPIC, {0: 1, 1: -1})}
    there = DescribeLogDirsResponse.Topic(
        name="orders", partitions=[DescribeLogDirsResponse.Partition(partition_index=0, partition_size=1000)]
    )
    responses = {1: DescribeLogDirsResponse(results=[DescribeLogDirsResponse.Result(topics=[there])])}

    def connection_to(node: int) -> Any:
        if node not in responses:
            raise ConnectionError(f"broker {node} is not in the metadata")
        return SimpleNamespace(request=lambda request: responses[node])

    monkeypatch.setattr(driver.cluster, "connection_to", connection_to)
    monkeypatch.setattr(driver, "offsets_at", lambda keys, at: dict.fromkeys(keys, 0 if at == -2 else 10))
    assert driver.bytes_per_offset([("orders", 0), ("orders", 1)]) == {("orders", 0): 100.0}

    def gone(keys: Any, at: int) -> Any:
        raise MqdReadError("offsets of orders: UNKNOWN_TOPIC_OR_PARTITION")

    monkeypatch.setattr(driver, "offsets_at", gone)
    assert driver.bytes_per_offset([("orders", 0)]) == {}


def test_unknown_sizes_of_partitions_are_not_queried_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(source_options({"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "orders"}, streaming=True))
    queries: list[set[Any]] = []
    monkeypatch.setattr(driver, "bytes_per_offset", lambda keys: queries.append(set(keys)) or {})
    for partitions in (1, 1, 2, 2, 1):
        assert driver._known_weights([Range("orders", index, 0, 10) for index in range(partitions)]) == {}
    assert queries == [{("orders", 0)}, {("orders", 0), ("orders", 1)}]


def test_an_unavailable_broker_is_not_used(world: World) -> None:
    away = f"127.0.0.1:{free_port()}"
    cluster = Cluster(
        source_options(
            {"kafka.bootstrap.servers": f"{world.bootstrap},{away}", "subscribe": "orders"}, streaming=True
        ).kafka
    )
    for _ in range(4):
        assert cluster.metadata(["orders"]).topics["orders"].topic_id == TOPIC
        cluster.prefer_other_brokers()
    assert world.requested == [1, 2, 2, 1]  # the unavailable leader is tried, too
    cluster.close()


def test_a_recreated_topic(world: World) -> None:
    world.topic_id = bytes(16)
    with pytest.raises(
        MqdReadError, match="was deleted and recreated under the same name: offsets 0 to 50 cannot be read"
    ):
        _read(world)
