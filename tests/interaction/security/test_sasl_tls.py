"""SASL inside TLS: passwords and tokens prove a client on a listener that other hosts may reach."""

from __future__ import annotations

import asyncio
import ssl

import aiokafka
import confluent_kafka
import pytest

from tests.broker import Broker, free_port
from tests.certificates import Authority
from tests.interaction.security.secured import PASSWORDS, Secured

PATIENCE_S = 20


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory):
    root, port, brokers = tmp_path_factory.mktemp("secured"), free_port(), []
    ca = Authority()

    def start(**options) -> Broker:
        brokers.append(Broker(root / "data", **options))
        return brokers[-1].start()

    made = Secured(
        start,
        **{
            "listeners": f"PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:{port}",
            "ssl.keystore.location": str(ca.issue("broker").write(root / "broker.pem")),
        },
    )
    made.port = port
    ca.write(root / "ca.pem")
    yield made, root / "ca.pem"
    for broker in brokers:
        broker.stop()


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_librdkafka(secured, mechanism: str) -> None:
    broker, ca = secured
    settings = {**broker.client("alice", mechanism), "security.protocol": "SASL_SSL", "ssl.ca.location": str(ca)}
    topic = f"tls-{mechanism}"
    producer = confluent_kafka.Producer(settings)
    for number in range(50):
        producer.produce(topic, b"%d" % number * 5000)
    assert producer.flush(PATIENCE_S) == 0
    consumer = confluent_kafka.Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    assert [consumer.poll(PATIENCE_S).value()[:1] for _ in range(3)] == [b"0", b"1", b"2"]
    consumer.close()


def test_a_wrong_password_is_refused(secured) -> None:
    broker, ca = secured
    settings = broker.client("alice", "SCRAM-SHA-256", "wrong")
    found: list[confluent_kafka.KafkaError] = []
    producer = confluent_kafka.Producer(
        {**settings, "security.protocol": "SASL_SSL", "ssl.ca.location": str(ca), "error_cb": found.append}
    )
    producer.produce("tls-refused", b"value")
    producer.flush(3)
    assert any(error.code() == confluent_kafka.KafkaError._AUTHENTICATION for error in found), found
    producer.purge()


def test_aiokafka(secured) -> None:
    asyncio.run(_aiokafka(secured))


async def _aiokafka(secured) -> None:
    broker, ca = secured
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=broker.bootstrap,
        security_protocol="SASL_SSL",
        ssl_context=ssl.create_default_context(cafile=ca),
        sasl_mechanism="SCRAM-SHA-512",
        sasl_plain_username="bob",
        sasl_plain_password=PASSWORDS["bob"],
    )
    await producer.start()
    try:
        assert (await producer.send_and_wait("tls-aiokafka", b"v" * 300_000)).offset == 0
    finally:
        await producer.stop()
