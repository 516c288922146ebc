"""The sink's producer when topics and leaders change while a task writes: with fake brokers in this
process.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the sink comes with pyarrow: pip install 'mqd[spark]'")

from mqd.protocol.api import encode_response  # noqa: E402
from mqd.protocol.errors import ErrorCode  # noqa: E402
from mqd.protocol.headers import RequestHeader  # noqa: E402
from mqd.protocol.messages import MetadataResponse, ProduceResponse  # noqa: E402
from mqd.spark import producing, wire  # noqa: E402
from mqd.spark.encoding import Batch, MqdWriteError  # noqa: E402
from mqd.spark.options import KafkaSettings  # noqa: E402
from mqd.spark.producing import METADATA_AGE_S, PRODUCE, Producer  # noqa: E402
from mqd.spark.sink_options import SinkOptions  # noqa: E402
from mqd.spark.wire import Metadata, Topic  # noqa: E402

ID, ANOTHER_ID = b"i" * 16, b"j" * 16


class Cluster:
    """`topic`: the metadata of its brokers; `errors`: of the next requests, by node id."""

    def __init__(self) -> None:
        self.topic = Topic("t", ID, {index: 1 + index % 2 for index in range(4)})
        self.written: list[tuple[int, int]] = []  # node id, partition
        self.errors: dict[int, list[int]] = {}
        self.silent: set[int] = set()  # node ids
        self.now = 1000.0
        self.turns = 0

    def metadata(self, names: list[str]) -> Metadata:
        return Metadata({1: ("h", 1), 2: ("h", 2)}, {"t": self.topic})

    def with_retries(self, what: str, attempt: Any) -> Any:
        return attempt()

    def close(self) -> None: ...

    def prefer_other_brokers(self, _silent: tuple[str, int]) -> None:
        self.turns += 1

    def link(self, node_id: int, size_bytes: int) -> Link:
        return Link(self, node_id)


class Link:
    port = 1

    def __init__(self, cluster: Cluster, node_id: int) -> None:
        self.host = f"h{node_id}"
        self._cluster, self._node_id, self._answer = cluster, node_id, b""

    def pick(self, api_key: int, at_most: int) -> int:
        return at_most

    def send(self, request: Any, version: int) -> int:
        error = (self._cluster.errors.get(self._node_id) or [0]).pop(0)
        topics = []
        for topic in request.topic_data:
            partitions = [
                ProduceResponse.PartitionResponse(index=one.index, error_code=error) for one in topic.partition_data
            ]
            topics.append(ProduceResponse.TopicResponse(name=topic.name, partition_responses=partitions))
            if not error:
                self._cluster.written += [(self._node_id, one.index) for one in topic.partition_data]
        self._answer = encode_response(RequestHeader(PRODUCE, version, 1, "x"), ProduceResponse(responses=topics))
        return 1

    def ready(self, seconds: float) -> bool:
        if self._node_id not in self._cluster.silent:
            return True
        self._cluster.now += seconds
        return False

    def receive(self) -> bytes:
        if self._node_id in self._cluster.silent:
            self._cluster.now += 30
            raise TimeoutError("nothing")
        return self._answer


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Its clock advances by sleeping, and by the test."""
    found = Cluster()

    class Connections:
        cluster, producer_count, link, drop = found, 0, found.link, lambda self, node_id: None

    class Clock:
        def monotonic(self) -> float:
            return found.now

        def sleep(self, seconds: float) -> None:
            found.now += seconds

    monkeypatch.setattr(producing, "connections", lambda options: Connections())
    monkeypatch.setattr(producing, "time", Clock())
    return found


def producer(**more: float) -> Producer:
    return Producer(SinkOptions(KafkaSettings("h:1"), (), "t", **more), (1, 0), None)


def batches(*partitions: int) -> list[Batch]:
    return [Batch("t", partition, None, 0, 1, bytearray(100)) for partition in partitions]


@pytest.mark.parametrize("requested_because", ["the metadata is old", "a leader has moved"])
def test_rows_of_hidden_partitions_go_to_their_leaders(cluster: Cluster, requested_because: str) -> None:
    writing = producer()
    assert writing.partition_count("t") == 4
    cluster.topic = Topic("t", ID, {0: 1, 1: 2})
    if requested_because == "the metadata is old":
        cluster.now += METADATA_AGE_S + 1
    else:
        cluster.errors[1] = [int(ErrorCode.NOT_LEADER_OR_FOLLOWER)]
    writing.send(batches(0, 2, 3))
    writing.flush()
    assert sorted(cluster.written) == [(1, 0), (1, 2), (2, 3)]
    assert writing.partition_count("t") == 2, "new rows go to those that remain"


def test_rows_for_a_topic_that_was_recreated_with_fewer_partitions_are_not_sent_to_those_of_the_old_one(
    cluster: Cluster,
) -> None:
    writing = producer()
    assert writing.partition_count("t") == 4
    cluster.topic = Topic("t", ANOTHER_ID, {0: 1, 1: 2})
    cluster.now += METADATA_AGE_S + 1
    with pytest.raises(MqdWriteError, match="partition 3.*no leader"):
        writing.send(batches(3))
        writing.flush()
    assert not cluster.written


def test_a_silent_leader_delays_only_its_own_partitions_until_the_delivery_timeout(cluster: Cluster) -> None:
    writing = producer(delivery_timeout_s=3.0)
    cluster.silent = {1}
    began = cluster.now
    with pytest.raises(MqdWriteError, match="partition 0: 1 rows were not acknowledged within 3 s .*has not responded"):
        writing.send(batches(0, 1, 1, 1, 3, 3))
        writing.flush()
    assert 3 <= cluster.now - began < 3.1
    assert [partition for node_id, partition in cluster.written if node_id == 2] == [1, 3, 1, 3, 1]


def test_rows_of_a_leaderless_partition_go_to_its_new_leader_while_others_are_written(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows arrive slowly, and a request to another leader is always in flight: the sink did not
    refresh the leader before delivery.timeout.ms was over.
    """
    monkeypatch.setattr(producing, "QUEUED_BYTES_MAX", 400)
    cluster.topic = Topic("t", ID, {0: 1, 1: -1})
    writing = producer(delivery_timeout_s=60.0)
    writing.send(batches(1))
    cluster.topic = Topic("t", ID, {0: 1, 1: 2})
    for _ in range(50):
        writing.send(batches(0))
        cluster.now += 2
    writing.flush()
    assert sorted(cluster.written)[-1] == (2, 1) and len(cluster.written) == 51


def test_after_a_closed_connection_the_same_broker_is_queried_for_leaders(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the others may be cut off, and take seconds to show it."""
    ends = iter([True, True, False])

    def send(link: Link, request: Any, version: int, sends: Any = Link.send) -> int:
        if next(ends):
            raise ConnectionError("it has closed the connection")
        return sends(link, request, version)

    monkeypatch.setattr(Link, "send", send)
    writing = producer()
    writing.send(batches(0))
    writing.flush()
    assert cluster.written == [(1, 0)] and not cluster.turns


@pytest.mark.parametrize("turns_before", range(3))
def test_another_broker_is_queried_for_leaders_when_one_is_silent(cluster: Cluster, turns_before: int) -> None:
    """The silent one was queried, and again as the first of kafka.bootstrap.servers, until
    kafka.delivery.timeout.ms was over; or it came next, though another one had been queried.
    """

    class Requested:
        closed = False

        def __init__(self, host: str) -> None:
            self.is_silent = host == "h1"
            if cluster.silent and self.is_silent:
                self.request(None)

        def close(self) -> None: ...

        def request(self, _request: Any) -> MetadataResponse:
            if cluster.silent and self.is_silent:
                cluster.now += 30
                raise TimeoutError("nothing")
            partitions = [MetadataResponse.Partition(partition_index=0, leader_id=cluster.topic.leaders[0])]
            brokers = [MetadataResponse.Broker(node_id=node, host=f"h{node}", port=1) for node in (1, 2)]
            return MetadataResponse(
                brokers=brokers, topics=[MetadataResponse.Topic(name="t", topic_id=ID, partitions=partitions)]
            )

    real = wire.Cluster(KafkaSettings("h1:1,h2:1"))
    real._link = lambda address: real._links.get(address) or real._links.setdefault(address, Requested(address[0]))  # type: ignore[assignment,method-assign]
    writing = producer()
    writing._connections.cluster = real  # type: ignore[assignment]
    cluster.topic = Topic("t", ID, {0: 1})
    assert writing.partition_count("t") == 1
    for _ in range(turns_before):
        real.prefer_other_brokers()
    cluster.silent = {1}
    cluster.topic = Topic("t", ID, {0: 2})
    began = cluster.now
    writing.send(batches(0))
    writing.flush()
    assert cluster.written[-1] == (2, 0) and cluster.now - began < 31


def test_connections_are_shared_by_equal_settings() -> None:
    def of(**settings: Any) -> producing.Connections:
        return producing.connections(SinkOptions(KafkaSettings("h:1", **settings), (), "t"))

    first = of(others={"default.api.timeout.ms": "1000", "linger.ms": "5"})
    assert of(others={"linger.ms": "5", "default.api.timeout.ms": "1000"}) is first
    second = of(others={"default.api.timeout.ms": "2000", "linger.ms": "5"})
    assert (first.cluster.api_timeout_s, second.cluster.api_timeout_s) == (1.0, 2.0)
    assert (
        of(request_timeout_s=5.0).cluster.settings.request_timeout_s == 5.0
        and of().cluster.settings.request_timeout_s == 30.0
    )


def test_unused_connections_of_many_settings_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query with other settings in each of its batches kept an attachment for each until its
    process ended.
    """
    closed: list[str] = []

    class Closing:
        def __init__(self, client_id: str) -> None:
            self._client_id = client_id

        def close(self) -> None:
            closed.append(self._client_id)

    def options(number: int) -> SinkOptions:
        return SinkOptions(KafkaSettings("h:1", client_id=f"batch{number}"), (), "t")

    monkeypatch.setattr(producing, "_connections", {})
    monkeypatch.setattr(producing, "find", lambda _host, _port, settings: Closing(settings.client_id))
    writing = Producer(options(0), (1, 0), None)
    for number in range(8):
        found = producing.connections(options(number))
        found.cluster.brokers = {1: ("h", 1)}
        found.link(1, 100)
        producing.connections(options(1))
    assert closed == ["batch2", "batch3", "batch4"]
    writing.close()
    writing.close()
    producing.connections(options(8))
    assert closed == ["batch2", "batch3", "batch4", "batch0", "batch5"]
