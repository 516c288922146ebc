"""Properties of a broker that are defaults of its topics, and those of Kafka's that have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from tests.broker import Broker
from tests.polling import eventually


def test_topics_follow_the_brokers_cleanup_policy_and_properties_without_effect_are_logged(
    start_broker: Callable[..., Broker],
) -> None:
    broker = start_broker(workers=1, config={"log.cleanup.policy": "compact", "num.network.threads": "3"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    made = admin.create_topics([NewTopic("follows", 1), NewTopic("own", 1, config={"cleanup.policy": "delete"})])
    for future in made.values():
        future.result(30)
    follows = ConfigResource(ConfigResource.Type.TOPIC, "follows")
    assert admin.describe_configs([follows])[follows].result(30)["cleanup.policy"].value == "compact"

    outcomes: dict[tuple[str, Any], KafkaError | None] = {}

    def delivered(error: KafkaError | None, message: Message) -> None:
        outcomes[message.topic(), message.key()] = error

    producer = Producer({"bootstrap.servers": broker.bootstrap, "linger.ms": 0})
    for topic, key in (("follows", None), ("follows", b"key"), ("own", None)):
        producer.produce(topic, b"value", key, on_delivery=delivered)
        assert producer.flush(30) == 0
    refused = outcomes.pop(("follows", None))
    assert refused is not None and refused.code() == KafkaError.INVALID_RECORD
    assert outcomes == {("follows", b"key"): None, ("own", None): None}

    log = broker.data_dir / "logs" / "mqd-keeper.log"

    def lines() -> list[str]:
        return [line for line in log.read_text().splitlines() if "properties without effect" in line]

    (line,) = eventually(lines, "no line about properties without effect")
    assert "num.network.threads" in line and "log.cleanup.policy" not in line
