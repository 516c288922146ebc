"""Every property that Apache Kafka 4.2 documents, according to its own jars: brokers and topics
accept each, or refuse it with a reason.
"""

from __future__ import annotations

import re

import pytest

from mqd.base import kafka_names
from mqd.base.config import BROKER, TOPIC, ConfigError, property_of
from tests.compat.kafka_tools import KafkaTools

pytestmark = pytest.mark.slow


def names(kafka_tools: KafkaTools, main: str) -> set[str]:
    """The properties of the generated page of Kafka's documentation."""
    done = kafka_tools.run(main)
    found = set(re.findall(r'<a id="([a-z0-9.]+)"', done.stdout))
    assert len(found) > 25, done.stdout[:500] + done.stderr
    return found


def refused(name: str) -> bool:
    return name.startswith(tuple(kafka_names.REFUSED))


def test_brokers(kafka_tools: KafkaTools) -> None:
    kafkas = names(kafka_tools, "kafka.server.KafkaConfig")
    assert {"log.retention.ms", "ssl.keystore.location", "group.share.max.size"} <= kafkas
    assert [
        name for name in sorted(kafkas) if not (kafka_names.ALIASES.get(name, name) in BROKER or refused(name))
    ] == []
    unused = {prefix for prefix in kafka_names.REFUSED if not any(name.startswith(prefix) for name in kafkas)}
    of_older_kafka = {
        "inter.broker.protocol.version",
        "log.message.format.version",
        "message.format.version",
        "zookeeper.",
    }
    of_topics = {"local.retention."}
    # jaas.config of a mechanism follows a listener's name
    assert {name for name in unused if not name.endswith(".sasl.jaas.config")} == of_older_kafka | of_topics


def test_topics(kafka_tools: KafkaTools) -> None:
    unknown = []
    for name in sorted(names(kafka_tools, "org.apache.kafka.storage.internals.log.LogConfig")):
        try:
            property_of(TOPIC, name)
        except ConfigError:
            unknown.append(name)
    assert unknown == []
