"""Quotas against a real broker: a producer and a consumer throttled by time to their rate, while
others are not affected; over all connections and workers together; kept across restarts.

The elapsed time must be at least what the quota demands, and the throttle times that the broker
reports at most a fifth above, as documented: the elapsed time of a slow machine proves nothing
more.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mqd.cli import main as main_module
from mqd.protocol.messages import AlterClientQuotasRequest, DescribeConfigsRequest, ProduceRequest
from tests.broker import Broker
from tests.compat import topics
from tests.crash.processes import kill_and_wait
from tests.kafka_connection import KafkaConnection
from tests.tiers import quick

PRODUCE, FETCH, REQUEST = "producer_byte_rate", "consumer_byte_rate", "request_percentage"
NONE = dict.fromkeys((PRODUCE, FETCH, REQUEST, "controller_mutation_rate", "connection_creation_rate"))
RATE = 200_000
BURST_S = 1.0  # quota.window.num=2, of one second each


@pytest.fixture(scope="module")
def broker(io_backend: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(
        tmp_path_factory.mktemp(f"quotas-{io_backend}"), config={"io.backend": io_backend, "quota.window.num": "2"}
    ) as running:
        yield running


def limit(broker: Broker, client_id: str | None, **quotas: float | None) -> None:
    names = {"produce": PRODUCE, "fetch": FETCH, "request": REQUEST}
    operations = [
        AlterClientQuotasRequest.OpData(key=names[name], value=value or 0.0, remove=value is None)
        for name, value in quotas.items()
    ]
    entry = AlterClientQuotasRequest.EntryData(
        entity=[AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name=client_id)], ops=operations
    )
    with connect(broker, "administrator") as connection:
        (response,) = connection.call(49, 1, AlterClientQuotasRequest(entries=[entry])).entries
    assert response.error_code == 0, response.error_message


def connect(broker: Broker, client_id: str) -> KafkaConnection:
    return KafkaConnection("127.0.0.1", broker.port, client_id=client_id, timeout_s=60)


def produce(connection: KafkaConnection, topic: str, size: int, partition: int = 0):
    data = ProduceRequest.PartitionData(index=partition, records=batch_of(size))
    response = connection.call(
        0,
        9,
        ProduceRequest(
            acks=1, timeout_ms=30_000, topic_data=[ProduceRequest.TopicData(name=topic, partition_data=[data])]
        ),
    )
    assert response.responses[0].partition_responses[0].error_code == 0
    return response


def batch_of(size: int) -> bytes:
    return topics.batch_of(b"x" * size)


def fetch(connection: KafkaConnection, topic: str, offset: int):
    return connection.call(1, 11, topics.fetch_request([(topic, 0, offset)]))


class Bystander:
    """Another client that runs throughout the test."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.throttled, self.count = 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(broker, topic))

    def _run(self, broker: Broker, topic: str) -> None:
        with connect(broker, "bystander") as connection:
            while not self._stop.is_set():
                self.throttled += produce(connection, topic, 1000, 1).throttle_time_ms
                self.count += 1

    def __enter__(self) -> "Bystander":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def minimum_s(size: int) -> float:
    return size / RATE - BURST_S


def test_a_producer_is_slowed_to_its_rate_and_others_are_not(broker: Broker) -> None:
    topic = topics.create_topic(broker, "produce", 2)
    limit(broker, "slow", produce=RATE)
    size = 20_000
    with connect(broker, "slow") as connection, Bystander(broker, topic) as bystander:
        began, sent, reported = time.monotonic(), 0, [0]
        while sent < 5 * RATE:
            reported.append(produce(connection, topic, size).throttle_time_ms)
            sent += size
        taken = time.monotonic() - began
    # the last request gets its response before its throttle time is over; a slow machine takes
    # longer than the throttle time
    assert minimum_s(sent - size) <= taken
    assert sum(reported) / 1000 <= 1.2 * minimum_s(sent + 20 * 100)
    assert 0 < max(reported) < 1000
    assert bystander.throttled == 0 and bystander.count > sent / size, "the bystander waited"
    limit(broker, "slow", produce=None)


def test_large_requests_on_several_connections_share_one_rate(broker: Broker) -> None:
    topic = topics.create_topic(broker, "shared", 2)
    limit(broker, "many", produce=RATE)
    size, each = 100_000, 3
    ends: list[float] = []

    def send(partition: int) -> None:
        with connect(broker, "many") as connection:
            for _ in range(each):
                produce(connection, topic, size, partition)
        ends.append(time.monotonic())

    began = time.monotonic()
    threads = [threading.Thread(target=send, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # at most one request of each connection is in flight when the others have paid
    assert max(ends) - began >= minimum_s(size * (4 * each - 4))
    limit(broker, "many", produce=None)


@pytest.mark.slow
def test_a_consumer_is_slowed_to_its_rate(broker: Broker) -> None:
    topic = topics.create_topic(broker, "fetch", 2)
    size, count = 20_000, 50
    with connect(broker, "writer") as connection:
        for _ in range(count):
            produce(connection, topic, size)
    limit(broker, "reader", fetch=RATE)
    with connect(broker, "reader") as connection, Bystander(broker, topic) as bystander:
        began, offset, reported = time.monotonic(), 0, [0]
        while offset < count:
            response = fetch(connection, topic, offset)
            records = response.responses[0].partitions[0].records
            assert len(records) <= RATE * BURST_S, "more than the burst in one answer"
            reported.append(response.throttle_time_ms)
            offset += len(records) // size
        taken = time.monotonic() - began
    assert minimum_s((count - RATE // size) * size) <= taken
    assert 0 < sum(reported) / 1000 <= 1.2 * minimum_s(count * (size + 100))
    assert bystander.throttled == 0
    limit(broker, "reader", fetch=None)


def test_request_time_at_the_acceptor_is_limited_too(broker: Broker) -> None:
    requested = DescribeConfigsRequest(resources=[DescribeConfigsRequest.Resource(resource_type=4, resource_name="1")])
    with connect(broker, "asker") as connection, connect(broker, "other") as other:
        connection.call(32, 4, requested)  # imports at the first request are not charged to a client
        limit(broker, "asker", request=2.0)  # of one thread
        reported, count = 0, 0
        while not reported:
            began = time.monotonic()
            reported = connection.call(32, 4, requested).throttle_time_ms
            count += 1
            assert count < 5000, "never throttled"
        assert other.call(32, 4, requested).throttle_time_ms == 0
        connection.call(32, 4, requested)
        assert time.monotonic() - began >= reported / 1000 - 0.02, (
            "the connection was read before its time was paid for"
        )
        limit(broker, "asker", request=None)
    assert "throttled" in _metrics(broker)


def _metrics(broker: Broker) -> str:
    import urllib.request

    port = broker.status()["metrics_port"] if "metrics_port" in broker.status() else broker.port + 552
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        return response.read().decode()


def test_a_producer_with_acks_0_is_slowed_too(broker: Broker) -> None:
    topic = topics.create_topic(broker, "acks0", 1)
    limit(broker, "quiet", produce=RATE)
    size, count = 20_000, 30
    data = ProduceRequest.PartitionData(index=0, records=batch_of(size))
    request = ProduceRequest(
        acks=0, timeout_ms=1000, topic_data=[ProduceRequest.TopicData(name=topic, partition_data=[data])]
    )
    with connect(broker, "quiet") as connection:
        began = time.monotonic()
        for _ in range(count):
            connection.send(0, 9, request, expect_response=False)
        connection.call(18, 3)  # read after everything before it has been
        assert time.monotonic() - began >= minimum_s((count - 1) * size)
    limit(broker, "quiet", produce=None)


@pytest.mark.parametrize("name", quick(["mqd-worker-0", "mqd-controller", "mqd-acceptor"], ["mqd-worker-0"]))
def test_quotas_hold_when_a_process_dies(start_broker, io_backend: str, name: str) -> None:
    broker = start_broker(config={"io.backend": io_backend, "quota.window.num": "2"})
    topic = topics.create_topic(broker, "kept", 2)
    limit(broker, "slow", produce=RATE)
    kill_and_wait(broker, name)
    for number in range(4):  # on any worker
        with connect(broker, "slow") as connection:
            began = time.monotonic()
            reported = produce(connection, topic, 5 * RATE).throttle_time_ms
            assert reported >= 1000 * (minimum_s(5 * RATE) - (time.monotonic() - began))
        limit(broker, "slow", produce=RATE + number + 1)  # a change cancels the debt


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture
def mqd(broker: Broker, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    monkeypatch.setenv("MQD_BOOTSTRAP", broker.bootstrap)

    def call(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main_module._run(list(arguments))
        sys.stdout.flush()
        return code, *capfd.readouterr()

    return call


def test_the_quota_command(mqd) -> None:
    assert mqd("quota", "list") == (0, "no quota is set\n", "")
    assert mqd("quota", "set", "app", "--produce", "10MB", "--request-time", "50") == (
        0,
        "client app is limited: produce 10.0 MB/s, request time 50 %\n",
        "",
    )
    assert mqd("quota", "set", "--default", "--fetch", "1MiB", "--dry-run") == (
        0,
        "the default for all clients would be limited: fetch 1.0 MB/s\n",
        "",
    )
    assert mqd("quota", "set", "--default", "--fetch", "500k")[0] == 0
    assert mqd("quota", "list")[1].splitlines() == [
        "ENTITY            PRODUCE    FETCH       REQUEST TIME  PARTITION CHANGES  CONNECTIONS",
        "client app        10.0 MB/s  -           50 %          -                  -",
        "client <default>  -          500.0 KB/s  -             -                  -",
    ]
    assert json.loads(mqd("quota", "list", "app", "--format", "json")[1]) == [
        {"entity": {"client-id": "app"}, **NONE, PRODUCE: 10e6, REQUEST: 50.0}
    ]
    assert json.loads(mqd("quota", "list", "--default", "--format", "json")[1]) == [
        {"entity": {"client-id": None}, **NONE, FETCH: 500e3}
    ]
    assert mqd("quota", "delete", "app", "--produce") == (0, "client app is no longer limited: produce\n", "")
    code, _, error = mqd("quota", "delete", "app", "--produce")
    assert code == 1 and "none of these quotas" in error
    assert mqd("quota", "delete", "app")[0] == mqd("quota", "delete", "--default")[0] == 0
    assert mqd("quota", "list", "app") == (0, "no quota is set for client app\n", "")
    for of, message in (
        (("--user", "alice"), "user alice"),
        (("app", "--user", "alice"), "client app of user alice"),
        (("--default", "--default-user"), "the default for all clients of the default for all users"),
    ):
        assert mqd("quota", "set", *of, "--partition-changes", "2.5") == (
            0,
            f"{message} is limited: partition changes 2.5/s\n",
            "",
        )
    assert mqd("quota", "set", "--ip", "10.0.0.1", "--connections", "5")[:2] == (
        0,
        "address 10.0.0.1 is limited: connections 5/s\n",
    )
    assert [line.split("  ")[0] for line in mqd("quota", "list")[1].splitlines()[1:]] == [
        "user alice, client app",
        "user alice",
        "user <default>, client <default>",
        "address 10.0.0.1",
    ]
    assert len(mqd("quota", "list", "--user", "alice")[1].splitlines()) == 2
    for of in (("--user", "alice"), ("app", "--user", "alice"), ("--default", "--default-user"), ("--ip", "10.0.0.1")):
        assert mqd("quota", "delete", *of)[0] == 0
    for wrong in (
        ("set",),
        ("set", "--ip", "10.0.0.1", "--user", "alice", "--connections", "5"),
        ("set", "--user", "alice", "--default-user", "--fetch", "1"),
        ("set", "app"),
        ("set", "app", "--default", "--fetch", "1"),
        ("set", "app", "--fetch", "fast"),
        ("set", "app", "--request-time", "0"),
        ("delete",),
    ):
        code, _, error = mqd("quota", *wrong)
        assert code == 2 and error.startswith("mqd: "), wrong
