"""Quotas of users, their clients and addresses, and connection limits: one broker, two users and a
listener without authentication.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator

import pytest

from mqd.protocol.messages import (
    AlterClientQuotasRequest,
    DescribeConfigsRequest,
    IncrementalAlterConfigsRequest,
    ProduceRequest,
)
from tests.broker import Broker
from tests.compat import topics
from tests.interaction.security.secured import Secured
from tests.interaction.security.test_sasl_wire import authenticate
from tests.interaction.traffic import eventually
from tests.kafka_connection import ConnectionEnded, KafkaConnection

PRODUCE, CONNECTION = "producer_byte_rate", "connection_creation_rate"
RATE = 50_000  # with a burst of one second
SLOW_RATE = RATE // 5  # the debt is not paid before the next check, however slow the machine
TOPIC = "quotas"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        options["config"]["quota.window.num"] = "2"
        brokers.append(Broker(tmp_path_factory.mktemp("quotas"), **options))
        return brokers[-1].start()

    running = Secured(start)
    topics.create_named(brokers[0], TOPIC)
    yield running
    for broker in brokers:
        broker.stop()


def plain(secured: Secured, client_id: str = "administrator") -> KafkaConnection:
    return KafkaConnection("127.0.0.1", secured.broker.port, client_id=client_id, timeout_s=30)


def proven(secured: Secured, user: str, client_id: str) -> KafkaConnection:
    kafka = secured.connect(client_id=client_id, timeout_s=30)
    authenticate(kafka, user)
    return kafka


def limit(kafka: KafkaConnection, key: str, value: float | None, **entity: str | None) -> None:
    parts = [
        AlterClientQuotasRequest.EntityData(entity_type=kind.replace("_", "-"), entity_name=name)
        for kind, name in entity.items()
    ]
    operation = AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
    entry = AlterClientQuotasRequest.EntryData(entity=parts, ops=[operation])
    (response,) = kafka.call(49, 1, AlterClientQuotasRequest(entries=[entry])).entries
    assert response.error_code == 0, response.error_message


def request(size: int) -> ProduceRequest:
    data = ProduceRequest.PartitionData(index=0, records=topics.batch_of(b"x" * size))
    return ProduceRequest(
        acks=1, timeout_ms=30_000, topic_data=[ProduceRequest.TopicData(name=TOPIC, partition_data=[data])]
    )


def throttled_ms(kafka: KafkaConnection, size: int = 3 * RATE) -> int:
    response = kafka.call(0, 9, request(size))
    assert response.responses[0].partition_responses[0].error_code == 0
    return response.throttle_time_ms


def is_throttled(kafka: KafkaConnection) -> bool:
    """Whether its next request is left unread. The response still has to be received."""
    kafka.send(0, 9, request(10))
    return not select.select([kafka.socket], [], [], 0.2)[0]


def test_a_user_shares_its_quota_among_its_clients_and_with_no_other_user(secured: Secured) -> None:
    with (
        plain(secured) as admin,
        proven(secured, "alice", "one") as one,
        proven(secured, "alice", "two") as two,
        proven(secured, "bob", "one") as bob,
    ):
        limit(admin, PRODUCE, SLOW_RATE, user="alice")
        assert 13_000 < throttled_ms(one) <= 14_100
        assert throttled_ms(bob) == throttled_ms(admin) == 0
        assert is_throttled(two)
        limit(admin, PRODUCE, None, user="alice")
        assert two.receive().body.throttle_time_ms == throttled_ms(one) == 0


def test_a_client_of_a_user_has_a_quota_of_its_own(secured: Secured) -> None:
    with (
        plain(secured) as admin,
        proven(secured, "alice", "loader") as loader,
        proven(secured, "alice", "reader") as reader,
        proven(secured, "bob", "loader") as bob,
    ):
        limit(admin, PRODUCE, RATE, user="alice", client_id="loader")
        limit(admin, PRODUCE, 100 * RATE, user="alice")
        limit(admin, PRODUCE, 100 * RATE, client_id="loader")
        assert throttled_ms(loader) > 1000
        assert throttled_ms(reader) == throttled_ms(bob) == 0
        for entity in ({"user": "alice", "client_id": "loader"}, {"user": "alice"}, {"client_id": "loader"}):
            limit(admin, PRODUCE, None, **entity)


def test_the_default_user_quota_holds_for_each_user_and_for_anonymous(secured: Secured) -> None:
    with plain(secured) as admin, proven(secured, "alice", "a") as alice, proven(secured, "bob", "b") as bob:
        limit(admin, PRODUCE, SLOW_RATE, user=None)
        assert throttled_ms(alice) > 1000
        assert throttled_ms(bob, SLOW_RATE // 2) == 0  # it has its own bucket
        limit(admin, PRODUCE, 100 * RATE, user="ANONYMOUS")
        assert throttled_ms(admin) == 0
        limit(admin, PRODUCE, None, user="ANONYMOUS")
        assert throttled_ms(admin) > 1000
        with plain(secured, "another") as another:
            assert is_throttled(another)
            limit(bob, PRODUCE, None, user=None)
            another.receive()


def test_an_address_connects_no_faster_than_its_quota(secured: Secured) -> None:
    with plain(secured) as admin:
        limit(admin, CONNECTION, 1, ip=None)
        limit(admin, CONNECTION, 2, ip="127.0.0.1")
        began = time.monotonic()
        connections = [plain(secured, str(number)) for number in range(8)]
        ended = 0
        for kafka in connections:
            try:
                kafka.call(18, 3)
            except ConnectionEnded:
                ended += 1
            kafka.close()
        # two in a second's burst, and the first; a slow machine takes so long to open them that
        # more are allowed
        assert 7 - 3 - 2 * (time.monotonic() - began) <= ended <= 5
        limit(admin, CONNECTION, None, ip="127.0.0.1")
        limit(admin, CONNECTION, None, ip=None)
        for number in range(8):
            with plain(secured, str(number)) as kafka:
                assert kafka.call(18, 3).error_code == 0


def configure(kafka: KafkaConnection, name: str, value: str | None) -> None:
    config = IncrementalAlterConfigsRequest.Config(
        name=name, config_operation=0 if value is not None else 1, value=value
    )
    resource = IncrementalAlterConfigsRequest.Resource(4, "1", [config])
    (response,) = kafka.call(44, 1, IncrementalAlterConfigsRequest(resources=[resource])).responses
    assert response.error_code == 0, response.error_message


def test_connections_of_an_address_are_limited(secured: Secured) -> None:
    with plain(secured) as admin:
        configure(admin, "max.connections.per.ip.overrides", "127.0.0.1:4")
        asked = DescribeConfigsRequest.Resource(4, "1", ["max.connections.per.ip", "max.connections.per.ip.overrides"])
        (response,) = admin.call(32, 4, DescribeConfigsRequest(resources=[asked])).results
        assert {one.name: one.value for one in response.configs} == {
            "max.connections.per.ip": "2147483647",
            "max.connections.per.ip.overrides": "127.0.0.1:4",
        }
        # those of earlier tests may not have ended everywhere yet
        held = [admin]
        for _ in range(3):
            held.append(eventually(lambda: connected(secured), "it is served"))
        assert not is_served(secured)
        held.pop().close()
        eventually(lambda: is_served(secured), "the place is free")
        configure(admin, "max.connections.per.ip.overrides", None)
        for kafka in held[1:]:
            kafka.close()


@pytest.mark.parametrize("name", ["max.connections", "listener.name.plaintext.max.connections"])
def test_connections_are_limited_and_allowed_again_without_a_restart(secured: Secured, name: str) -> None:
    """Connections that are open when the limit is set count."""
    with plain(secured) as admin, contextlib.ExitStack() as ends:
        held = [ends.enter_context(plain(secured, str(number))) for number in range(6)]
        for kafka in held:
            eventually(lambda kafka=kafka: kafka.call(18, 3).error_code == 0, "it is served")
        configure(admin, name, "3")
        asked = DescribeConfigsRequest.Resource(4, "1", [name])
        (response,) = admin.call(32, 4, DescribeConfigsRequest(resources=[asked])).results
        assert [(one.name, one.value, one.read_only) for one in response.configs] == [(name, "3", False)]
        eventually(lambda: not is_served(secured), "no further connection is served")
        assert all(kafka.call(18, 3).error_code == 0 for kafka in held), "those that are open stay"
        configure(admin, name, "20000")  # more than at the start
        eventually(lambda: is_served(secured), "it is served")
        configure(admin, name, None)


def connected(secured: Secured) -> KafkaConnection | None:
    """A connection, or None if it was refused."""
    kafka = plain(secured, "c")
    with contextlib.suppress(ConnectionEnded):
        if kafka.call(18, 3).error_code == 0:
            return kafka
    kafka.close()
    return None


def is_served(secured: Secured) -> bool:
    kafka = connected(secured)
    if kafka is not None:
        kafka.close()
    return kafka is not None


def test_a_listeners_rate_can_be_changed(secured: Secured) -> None:
    name = "listener.name.plaintext.max.connection.creation.rate"
    with plain(secured) as admin:
        configure(admin, name, "2")
        began = time.monotonic()
        for number in range(8):  # a burst of two, then two a second
            with plain(secured, str(number)) as kafka:
                assert kafka.call(18, 3).error_code == 0
        assert time.monotonic() - began > 2
        configure(admin, name, None)
