"""Kafka's own tools over TLS 1.2, with PEM files and certificates on both sides. TLS 1.3:
test_mechanisms.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker import Broker
from tests.certificates import Authority
from tests.compat.kafka_tools import KafkaTools
from tests.ports import free_port

pytestmark = pytest.mark.slow  # a JVM for each step


def test_a_certificate_on_both_sides(
    kafka_tools: KafkaTools, start_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    ca, clients, port = Authority("Broker CA"), Authority("Client CA"), free_port()
    start_broker(
        config={
            "listeners": f"PLAINTEXT://127.0.0.1:0,SSL://127.0.0.1:{port}",
            "ssl.keystore.location": str(ca.issue("broker").write(tmp_path / "broker.pem")),
            "ssl.truststore.location": str(clients.write(tmp_path / "clients.pem")),
            "ssl.client.auth": "required",
        }
    )
    settings = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": ca.write(tmp_path / "ca.pem"),
        "ssl.enabled.protocols": "TLSv1.2",
        "ssl.protocol": "TLSv1.2",
    }
    own = {"ssl.keystore.type": "PEM", "ssl.keystore.location": clients.issue("alice").write(tmp_path / "alice.pem")}

    def properties(name: str, values: dict[str, object]) -> str:
        (tmp_path / name).write_text("".join(f"{key}={value}\n" for key, value in values.items()))
        return str(tmp_path / name)

    bootstrap = f"localhost:{port}"
    told = ("--bootstrap-server", bootstrap, "--command-config", properties("alice", {**settings, **own}))
    made = kafka_tools.run("org.apache.kafka.tools.TopicCommand", *told, "--create", "--topic", "t")
    assert made.returncode == 0, made.stdout + made.stderr
    produced = kafka_tools.run(
        "org.apache.kafka.tools.VerifiableProducer", *told, "--topic", "t", "--max-messages", "200", "--acks", "-1"
    )
    assert produced.returncode == 0 and '"acked":200' in produced.stdout, produced.stdout + produced.stderr
    consumed = kafka_tools.run(
        "org.apache.kafka.tools.VerifiableConsumer",
        *told,
        *("--topic", "t", "--group-id", "g", "--max-messages", "200", "--reset-policy", "earliest"),
    )
    assert consumed.returncode == 0 and '"count":200' in consumed.stdout, consumed.stdout + consumed.stderr
    nobody = ("--bootstrap-server", bootstrap, "--command-config", properties("nobody", settings))
    refused = kafka_tools.run("org.apache.kafka.tools.TopicCommand", *nobody, "--list")
    assert refused.returncode != 0 and "SslAuthenticationException" in refused.stdout + refused.stderr
