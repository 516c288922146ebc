"""Third-party clients authenticate, and are refused with wrong credentials. Every client with every
mechanism, under kills: tests/compat/security/test_mechanisms.py.
"""

from __future__ import annotations

import asyncio
import ssl
import subprocess
import time

import aiokafka
import confluent_kafka
import confluent_kafka.admin
import kafka
import kafka.errors
import pytest

import mqd
from mqd.cli import secure
from tests.broker import Broker
from tests.interaction.security.secured import PASSWORDS, Secured
from tests.interaction.share_members import configure_group
from tests.polling import PATIENCE_S
from tests.preloaded import PRELOADED

MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@pytest.fixture(scope="module", params=["SASL_PLAINTEXT", "SASL_SSL"])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    brokers: list[Broker] = []
    tls: dict[str, str] = {}
    if request.param == "SASL_SSL":
        places = secure.prepare(tmp_path_factory.mktemp("certificates"), 1, ["127.0.0.1"])
        tls = {"ca": str(places.ca), "ssl.keystore.type": "PEM", "ssl.keystore.location": str(places.broker)}

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path_factory.mktemp("secured"), **options))
        return brokers[-1].start()

    yield Secured(start, request.param, **tls)
    for broker in brokers:
        broker.stop()


def pythons(secured: Secured, mechanism: str, user: str = "alice", password: str | None = None) -> dict:
    """Settings of kafka-python and aiokafka."""
    return {
        "bootstrap_servers": secured.bootstrap,
        "security_protocol": secured.protocol,
        "sasl_mechanism": mechanism,
        "sasl_plain_username": user,
        "sasl_plain_password": PASSWORDS[user] if password is None else password,
        **({"ssl_context": ssl.create_default_context(cafile=secured.ca)} if secured.ca else {}),
    }


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_librdkafka(secured: Secured, mechanism: str) -> None:
    settings, topic = secured.client("bob", mechanism), f"librdkafka-{mechanism}"
    producer = confluent_kafka.Producer(settings)
    producer.produce(topic, b"value")
    assert producer.flush(PATIENCE_S) == 0
    consumer = confluent_kafka.Consumer({**settings, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    assert consumer.poll(PATIENCE_S).value() == b"value"
    consumer.close()


def test_share_consumer(secured: Secured) -> None:
    settings, group = secured.client("bob", "SCRAM-SHA-512"), "share-consumer"
    configure_group(settings, group, "share.auto.offset.reset", "earliest")
    producer = confluent_kafka.Producer(settings)
    producer.produce(group, b"value")
    assert producer.flush(PATIENCE_S) == 0
    with mqd.ShareConsumer({**settings, "group.id": group, "transport": "tcp"}) as consumer:
        consumer.subscribe([group])
        assert [message.value() for message in consumer.poll(PATIENCE_S)] == [b"value"]
        assert set(consumer.commit_sync(PATIENCE_S).values()) == {None}
    wrong = {**secured.client("bob", "SCRAM-SHA-512", "wrong"), "group.id": group, "transport": "tcp"}
    with mqd.ShareConsumer(wrong) as consumer, pytest.raises(confluent_kafka.KafkaException) as refused:
        consumer.subscribe([group])
        consumer.poll(PATIENCE_S)
    assert refused.value.args[0].code() == confluent_kafka.KafkaError._AUTHENTICATION


def test_kafka_python(secured: Secured) -> None:
    topic, mechanism = "kafka-python", "SCRAM-SHA-256"
    producer = kafka.KafkaProducer(**pythons(secured, mechanism, "bob"))
    producer.send(topic, b"value").get(PATIENCE_S)
    producer.close()
    consumer = kafka.KafkaConsumer(
        topic, **pythons(secured, mechanism), auto_offset_reset="earliest", consumer_timeout_ms=PATIENCE_S * 1000
    )
    assert next(consumer).value == b"value"
    consumer.close()


def test_aiokafka(secured: Secured) -> None:
    async def story() -> None:
        topic, mechanism = "aiokafka", "SCRAM-SHA-512"
        async with aiokafka.AIOKafkaProducer(**pythons(secured, mechanism)) as producer:
            await producer.send_and_wait(topic, b"value")
        async with aiokafka.AIOKafkaConsumer(
            topic, **pythons(secured, mechanism, "bob"), auto_offset_reset="earliest"
        ) as consumer:
            assert (await asyncio.wait_for(consumer.getone(), PATIENCE_S)).value == b"value"

    asyncio.run(story())


def refusal(settings: dict) -> confluent_kafka.KafkaError:
    """librdkafka's error for a refused connection."""
    errors: list[confluent_kafka.KafkaError] = []
    admin = confluent_kafka.admin.AdminClient({**settings, "error_cb": errors.append})
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        admin.poll(0.1)
        for error in errors:
            if error.code() == confluent_kafka.KafkaError._AUTHENTICATION:
                return error
    raise AssertionError(f"no refusal within {PATIENCE_S} s: {errors}")


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_wrong_password_and_an_unknown_user_get_the_same_error(secured: Secured, mechanism: str) -> None:
    wrong = refusal(secured.client("alice", mechanism, "wrong")).str()
    unknown = refusal({**secured.client("alice", mechanism), "sasl.username": "nobody"}).str()
    text = f"invalid credentials with SASL mechanism {mechanism}"
    assert text in wrong and text in unknown


def test_a_mechanism_that_is_not_enabled(secured: Secured) -> None:
    settings = {**secured.client(), "sasl.mechanisms": "OAUTHBEARER", "sasl.oauthbearer.config": "principal=alice"}
    settings = {name: value for name, value in settings.items() if name not in ("sasl.username", "sasl.password")}
    settings["enable.sasl.oauthbearer.unsecure.jwt"] = True
    assert "Unsupported" in refusal(settings).str() or "mechanism" in refusal(settings).str()


def test_kafka_python_is_refused(secured: Secured) -> None:
    with pytest.raises(kafka.errors.KafkaError):
        kafka.KafkaProducer(**pythons(secured, "SCRAM-SHA-512", "alice", "wrong"), bootstrap_timeout_ms=3000)


def test_the_command_line(secured: Secured, tmp_path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in secured.client().items() if name != "log_level"))

    def mqd(*words: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        return PRELOADED.run("-b", secured.bootstrap, *words, given=stdin)

    told = ("--client-config", str(file))
    assert mqd(*told, "topic", "create", "typed").returncode == 0
    assert mqd("produce", "typed", *told, stdin="hello\n").returncode == 0
    read = mqd("consume", "typed", *told, "-e")
    assert "hello" in read.stdout, read
    described = mqd(*told, "cluster", "status")
    assert described.returncode == 0, described.stderr
    file.write_text(file.read_text().replace(PASSWORDS["alice"], "wrong"))
    refused = mqd(*told, "cluster", "status")
    assert refused.returncode != 0 and "invalid credentials" in refused.stderr and "user alice" in refused.stderr


def test_a_changed_password(secured: Secured) -> None:
    """An open connection continues; the next one needs the new password."""
    secured.set_password("carol", "first")
    producer = confluent_kafka.Producer(secured.client("carol", password="first"))
    producer.produce("changing", b"before")
    assert producer.flush(PATIENCE_S) == 0
    secured.set_password("carol", "second")
    producer.produce("changing", b"after")
    assert producer.flush(PATIENCE_S) == 0
    assert refusal(secured.client("carol", password="first")).code() == confluent_kafka.KafkaError._AUTHENTICATION
    other = confluent_kafka.Producer(secured.client("carol", password="second"))
    other.produce("changing", b"again")
    assert other.flush(PATIENCE_S) == 0
