"""Rights on views: READ on the view suffices to read its records; creating one requires READ on its
base.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, NewTopic, ResourceType

from tests.broker import Broker
from tests.interaction.security.secured import Secured
from tests.interaction.security.test_rights_of_clients import admin, grant, rule
from tests.polling import PATIENCE_S

pytestmark = pytest.mark.slow


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """The plain listener is the administrator's."""
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path / "data", workers=2, **options))
        return brokers[-1].start()

    yield Secured(start, **{"authorizer.class.name": "standard", "super.users": "User:ANONYMOUS"})
    for broker in brokers:
        broker.stop()


def created(client: AdminClient, view: str) -> str:
    topic = NewTopic(view, config={"view.of": "orders", "view.filter": "tag = 'a'"})
    try:
        client.create_topics([topic])[view].result(PATIENCE_S)
    except KafkaException as error:
        return error.args[0].name()
    return ""


def first(secured: Secured, topic: str) -> str:
    consumer = Consumer({**secured.client(), "group.id": "g", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = consumer.poll(PATIENCE_S)
    consumer.close()
    assert message is not None and message.error() is None
    return message.value().decode()


def error_of(client: AdminClient, topic: str) -> str:
    return client.list_topics(topic, timeout=PATIENCE_S).topics[topic].error.name()


def test_a_view_is_read_without_a_right_to_its_base(secured: Secured) -> None:
    administrator, alice = admin(secured), AdminClient(secured.client())
    administrator.create_topics([NewTopic("orders", 1)])["orders"].result(PATIENCE_S)
    producer = Producer({"bootstrap.servers": secured.broker.bootstrap})
    for tag in "ba":
        producer.produce("orders", tag, headers={"tag": tag})
    assert producer.flush(PATIENCE_S) == 0
    grant(secured, rule("alice", AclOperation.CREATE, "mine"), rule("alice", AclOperation.READ, "mine"))
    grant(secured, rule("alice", AclOperation.READ, "g", ResourceType.GROUP))
    assert created(alice, "mine") == "TOPIC_AUTHORIZATION_FAILED"
    assert created(administrator, "mine") == ""
    assert first(secured, "mine") == "a"
    assert error_of(alice, "orders") == "TOPIC_AUTHORIZATION_FAILED"
    grant(secured, rule("alice", AclOperation.READ, "orders"), rule("alice", AclOperation.CREATE, "other"))
    assert created(alice, "other") == ""
    assert error_of(alice, "other") == "TOPIC_AUTHORIZATION_FAILED"
