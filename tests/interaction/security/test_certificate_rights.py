"""Rights of clients that authenticate with a certificate: on the data path and at the acceptor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.broker import Broker
from tests.certificates import Authority
from tests.polling import PATIENCE_S


@pytest.mark.timeout(120)
def test_a_certificate_has_the_rights_of_its_user(start_broker: Callable[..., Broker], tmp_path: Path) -> None:
    ca, clients = Authority("Broker CA"), Authority("Client CA")
    broker = start_broker(
        config={
            "listeners": "SSL://127.0.0.1:0",
            "authorizer.class.name": "standard",
            "super.users": "User:alice",
            "ssl.keystore.location": str(ca.issue("broker").write(tmp_path / "broker.pem")),
            "ssl.truststore.location": str(clients.write(tmp_path / "clients.pem")),
            "ssl.client.auth": "required",
            "ssl.principal.mapping.rules": r"RULE:^CN=([^,]+),.*$/$1/L",
        }
    )

    def settings(name: str) -> dict[str, object]:
        pem = str(clients.issue(name).write(tmp_path / f"{name}.pem"))
        return {
            "bootstrap.servers": broker.bootstrap,
            "security.protocol": "ssl",
            "ssl.ca.location": str(ca.write(tmp_path / "ca.pem")),
            "ssl.certificate.location": pem,
            "ssl.key.location": pem,
            "log_level": 0,
        }

    def produced(name: str) -> confluent_kafka.KafkaError | None:
        outcomes: list[confluent_kafka.KafkaError | None] = []
        producer = confluent_kafka.Producer({**settings(name), "message.timeout.ms": 8000})
        producer.produce("t", b"value", on_delivery=lambda error, _: outcomes.append(error))
        assert producer.flush(PATIENCE_S) == 0
        return outcomes[0]

    def consumed(name: str) -> confluent_kafka.Message:
        consumer = confluent_kafka.Consumer({**settings(name), "group.id": name, "auto.offset.reset": "earliest"})
        consumer.assign([confluent_kafka.TopicPartition("t", 0, 0)])
        try:
            message = consumer.poll(PATIENCE_S)
            assert message is not None
            return message
        finally:
            consumer.close()

    def allow(operation: AclOperation, resource_type: ResourceType) -> None:
        literal, allowed = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
        name = "t" if resource_type is ResourceType.TOPIC else "bob"
        binding = AclBinding(resource_type, name, literal, "User:bob", "*", operation, allowed)
        admin.create_acls([binding])[binding].result(PATIENCE_S)

    admin = AdminClient(settings("Alice"))
    admin.create_topics([NewTopic("t", 1, 1)])["t"].result(PATIENCE_S)
    assert produced("Alice") is None
    assert consumed("Alice").value() == b"value"
    denied = confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED
    error = produced("bob")
    assert error is not None and error.code() == denied
    allow(AclOperation.READ, ResourceType.GROUP)
    allow(AclOperation.DESCRIBE, ResourceType.TOPIC)
    assert consumed("bob").error().code() == denied
    allow(AclOperation.READ, ResourceType.TOPIC)
    assert consumed("bob").value() == b"value"
    error = produced("bob")
    assert error is not None and error.code() == denied
