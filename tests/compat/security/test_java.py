"""Java's client and Kafka's own tools prove who they are, with the settings that `mqd connect java`
writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.cli import secure
from mqd.cli.verbs.connect import written
from mqd.security import client
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.interaction.security.secured import Secured

pytestmark = pytest.mark.slow  # a JVM for each step


@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_every_mechanism(
    kafka_tools: KafkaTools, start_broker: Callable[..., Broker], tmp_path: Path, mechanism: str, protocol: str
) -> None:
    tls: dict[str, str] = {}
    if protocol == "SASL_SSL":
        places = secure.prepare(tmp_path, 1, ["127.0.0.1"])
        tls = {"ca": str(places.ca), "ssl.keystore.type": "PEM", "ssl.keystore.location": str(places.broker)}
    secured = Secured(start_broker, protocol, **tls)

    def settings(password: str | None = None) -> str:
        known = {name: str(value) for name, value in secured.client("bob", mechanism, password).items()}
        file = tmp_path / "client.properties"
        file.write_text(written("java", secured.bootstrap, client.of_properties(known).settings))
        return str(file)

    told = ("--bootstrap-server", secured.bootstrap, "--command-config", settings())
    made = kafka_tools.run("org.apache.kafka.tools.TopicCommand", *told, "--create", "--topic", "t")
    assert made.returncode == 0, made.stdout + made.stderr
    produced = kafka_tools.run(
        "org.apache.kafka.tools.VerifiableProducer", *told, "--topic", "t", "--max-messages", "10", "--acks", "-1"
    )
    assert produced.returncode == 0 and '"acked":10' in produced.stdout, produced.stdout + produced.stderr
    consumed = kafka_tools.run(
        "org.apache.kafka.tools.VerifiableConsumer",
        *told,
        *("--topic", "t", "--group-id", "g", "--max-messages", "10", "--reset-policy", "earliest"),
    )
    assert consumed.returncode == 0 and '"count":10' in consumed.stdout, consumed.stdout + consumed.stderr
    settings("wrong")
    refused = kafka_tools.run("org.apache.kafka.tools.TopicCommand", *told, "--list")
    assert refused.returncode != 0
    assert f"invalid credentials with SASL mechanism {mechanism}" in refused.stdout + refused.stderr
