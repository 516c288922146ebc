"""Unmodified clients over TLS: producing and consuming, long polls, clients with certificates,
refusals and their errors; certificates that change while clients work, workers that die.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from tests.broker import Broker
from tests.certificates import Authority, Identity
from tests.compat import clients, topics
from tests.compat.messages import PARTITION_COUNT, Message, messages_of
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import eventually
from tests.ports import free_port
from tests.tiers import quick

NOT_USED = "a changed certificate cannot be used; the previous one stays in use"
WAIT_SECONDS = 30
API_VERSIONS = 18


class Secured:
    """A broker with a plain listener for the tests' own requests, and listeners with TLS."""

    def __init__(self, root: Path, backend: str):
        self.root = root
        self.ca, self.client_ca = Authority("Broker CA"), Authority("Client CA")
        self.ca_file = self.ca.write(root / "ca.pem")
        self.keystore = self.ca.issue("broker").write(root / "broker.pem")
        self.ports = {name: free_port() for name in ("SSL", "MUTUAL", "OLD")}
        listeners = [f"{name}://127.0.0.1:{port}" for name, port in self.ports.items()]
        self.broker = Broker(
            root / "data",
            config={
                "io.backend": backend,
                "listeners": ",".join(["PLAINTEXT://127.0.0.1:0", *listeners]),
                "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,SSL:SSL,MUTUAL:SSL,OLD:SSL",
                "ssl.keystore.location": str(self.keystore),
                "listener.name.mutual.ssl.client.auth": "required",
                "listener.name.mutual.ssl.truststore.location": str(self.client_ca.write(root / "client-ca.pem")),
                "listener.name.old.ssl.enabled.protocols": "TLSv1.2",
                "listener.name.old.ssl.cipher.suites": "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
                "listener.name.old.ssl.keystore.location": str(
                    self.ca.issue("old").write_pkcs12(root / "old.p12", "secret")
                ),
                "listener.name.old.ssl.keystore.password": "secret",
            },
        )

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self.ports[name]}"

    def log(self) -> str:
        return self.broker.logs()

    def wait_for_log(self, part: str) -> None:
        eventually(lambda: part in self.log(), lambda: f"in the log: {part}\n{self.log()[-3000:]}")

    def wait_for_refusals(self, count: int) -> None:
        """Waits until workers have refused a changed certificate this many times."""
        eventually(lambda: self.log().count(NOT_USED) >= count, lambda: self.log()[-3000:])

    def context(self, identity: Identity | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca_file)
        if identity is not None:
            context.load_cert_chain(identity.write(self.root / "client.pem"))
        return context

    def connect(self, name: str = "SSL", context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", self.ports[name]), timeout=WAIT_SECONDS)
        return (context or self.context()).wrap_socket(plain, server_hostname="localhost")


@pytest.fixture(scope="module", params=["epoll", pytest.param("io_uring", marks=pytest.mark.slow)])
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("tls"), request.param)
    with made.broker:
        yield made


def options_of(client: str, secured: Secured, certificate: Path | None = None) -> dict[str, object]:
    if client in ("confluent-kafka", "kcat"):
        own = {"ssl.certificate.location": certificate, "ssl.key.location": certificate} if certificate else {}
        return {"security.protocol": "ssl", "ssl.ca.location": secured.ca_file, **own} | {}
    if client == "kafka-python":
        own = {"ssl_certfile": str(certificate)} if certificate else {}
        return {"security_protocol": "SSL", "ssl_cafile": str(secured.ca_file), **own}
    context = ssl.create_default_context(cafile=secured.ca_file)
    if certificate:
        context.load_cert_chain(certificate)
    return {"security_protocol": "SSL", "ssl_context": context}


def texts(options: dict[str, object]) -> dict[str, object]:
    return {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "listener"),  # each run of kcat reads all system certificates: four CPU seconds
    quick(
        list(itertools.product(clients.NAMES, ("SSL", "MUTUAL", "OLD"))),
        lambda one: one[1] != "OLD" and one != ("kcat", "MUTUAL"),
    ),
)
def test_a_client_produces_and_consumes(secured: Secured, tmp_path: Path, name: str, listener: str) -> None:
    client = clients.client_of(name, tmp_path)
    certificate = secured.client_ca.issue("alice").write(tmp_path / "alice.pem") if listener == "MUTUAL" else None
    options = texts(options_of(name, secured, certificate))
    topic = topics.create_topic(secured.broker, "tls", PARTITION_COUNT)
    messages = [clients.as_written(name, message) for message in messages_of(name, "none")]
    client.produce(secured.address(listener), topic, messages, **options)
    counts = {
        partition: sum(message.partition == partition for message in messages) for partition in range(PARTITION_COUNT)
    }
    found = client.consume(secured.address(listener), topic, counts, **options)
    for partition in range(PARTITION_COUNT):
        written = [clients.as_read(name, message) for message in messages if message.partition == partition]
        assert [(message.key, message.value) for _, message in found[partition]] == [
            (message.key, message.value) for message in written
        ]


def test_a_long_poll_ends_when_a_record_comes(secured: Secured) -> None:
    topic = topics.create_topic(secured.broker, "poll")
    settings = texts(options_of("confluent-kafka", secured))
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": secured.address("SSL"), "group.id": "poll", "fetch.wait.max.ms": 20_000, **settings}
    )
    consumer.assign([confluent_kafka.TopicPartition(topic, 0, 0)])
    try:
        assert consumer.poll(1.5) is None  # by then the fetch waits at the broker
        clients.Confluent().produce(secured.address("SSL"), topic, [Message(0, None, b"now")], **settings)
        message = consumer.poll(10)
        assert message is not None and message.value() == b"now"
    finally:
        consumer.close()


@pytest.mark.timeout(120)
def test_a_large_record(secured: Secured) -> None:
    """More than half of the receive arena: decrypted into separate memory."""
    topic = topics.create_topic(secured.broker, "large", max_message_bytes="40000000")
    settings = texts(options_of("confluent-kafka", secured))
    value = random.Random(7).randbytes(24_000_000)
    client = clients.Confluent()
    client.produce(
        secured.address("SSL"), topic, [Message(0, None, value)], **{**settings, "message.max.bytes": 40_000_000}
    )
    sizes = {"fetch.message.max.bytes": 40_000_000, "receive.message.max.bytes": 120_000_000}
    found = client.consume(secured.address("SSL"), topic, {0: 1}, **{**settings, **sizes})
    assert found[0][0][1].value == value


# -- refusals and their errors ----------------------------------------------------------------------


def refused(secured: Secured, name: str, context: ssl.SSLContext) -> str:
    """The client's error. With TLS 1.3 it appears when the client reads."""
    with pytest.raises((ssl.SSLError, ConnectionError)) as caught, secured.connect(name, context) as connection:
        if connection.recv(1) == b"":
            raise ConnectionResetError("closed")
    return str(caught.value)


def test_clients_need_a_certificate_that_a_trusted_ca_signed(secured: Secured) -> None:
    refused(secured, "MUTUAL", secured.context())
    secured.wait_for_log("peer did not return a certificate")
    assert "unknown ca" in refused(secured, "MUTUAL", secured.context(Authority("Other CA").issue("mallory"))).lower()
    secured.wait_for_log("the client's certificate is refused: self-signed certificate in certificate chain")
    assert "expired" in refused(secured, "MUTUAL", secured.context(secured.client_ca.issue("late", days=-1))).lower()
    secured.wait_for_log("the client's certificate is refused: certificate has expired")


def test_a_client_that_does_not_trust_the_broker_is_named(secured: Secured) -> None:
    for _ in range(10):
        refused(secured, "SSL", ssl.create_default_context())
    line = "the client refuses the connection: tlsv1 alert unknown ca"
    secured.wait_for_log(line)
    # also of those that reset the connection before the broker read their alert
    assert [one for one in secured.log().splitlines() if line in one and "(client 127.0.0.1:" not in one] == []


def test_versions_and_ciphers_are_those_configured(secured: Secured) -> None:
    with secured.connect("OLD") as connection:
        assert connection.version() == "TLSv1.2"
        assert connection.cipher() is not None and connection.cipher()[0] == "ECDHE-ECDSA-AES256-GCM-SHA384"
        assert connection.compression() is None
    with secured.connect("SSL") as connection:
        assert connection.version() == "TLSv1.3"
    context = secured.context()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    assert "version" in refused(secured, "OLD", context).lower()
    context = secured.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("ECDHE-ECDSA-AES128-SHA256:AES128-GCM-SHA256")  # no AEAD; no forward secrecy
    refused(secured, "SSL", context)
    secured.wait_for_log("no shared cipher")


def test_plain_text_and_tls_on_the_wrong_listener(secured: Secured) -> None:
    with KafkaConnection("127.0.0.1", secured.ports["SSL"]) as kafka, pytest.raises(ConnectionEnded):
        kafka.call(API_VERSIONS, 3)
    with socket.create_connection(("127.0.0.1", secured.ports["SSL"]), timeout=WAIT_SECONDS) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert plain.recv(100) == b""
    secured.wait_for_log("plain text on a TLS listener")
    plain = socket.create_connection(("127.0.0.1", secured.broker.port), timeout=WAIT_SECONDS)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        secured.context().wrap_socket(plain, server_hostname="localhost")
    secured.wait_for_log("TLS on a plain-text listener")


def test_sessions_resume_at_any_worker(secured: Secured) -> None:
    context = secured.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2  # the session exists when the handshake ends
    with secured.connect("SSL", context) as connection:
        session = connection.session
    held, reused = [], 0
    for _ in range(6):  # in parallel, so that both workers get some
        plain = socket.create_connection(("127.0.0.1", secured.ports["SSL"]), timeout=WAIT_SECONDS)
        connection = context.wrap_socket(plain, server_hostname="localhost", session=session)
        reused += connection.session_reused or 0
        held.append(connection)
    for connection in held:
        connection.close()
    assert reused == 6


# -- change while clients work ----------------------------------------------------------------------


class Traffic:
    """A producer that never stops; every acknowledgement is recorded."""

    def __init__(self, secured: Secured, topic: str):
        settings = texts(options_of("confluent-kafka", secured))
        self.producer = confluent_kafka.Producer(
            {"bootstrap.servers": secured.address("SSL"), "acks": "all", **settings}
        )
        self.topic = topic
        self.sent, self.failures, self.acknowledged = 0, [], []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.producer.produce(self.topic, b"%d" % self.sent + b"." * 2000, on_delivery=self._on_delivery)
            self.sent += 1
            self.producer.poll(0.001)

    def _on_delivery(self, error: confluent_kafka.KafkaError | None, message: confluent_kafka.Message) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            self.acknowledged.append(message.value())

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.producer.flush(WAIT_SECONDS) == 0


def serial_of(secured: Secured) -> int:
    from cryptography import x509

    with secured.connect("SSL") as connection:
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


def wait_for_serial(secured: Secured, serial: int) -> None:
    both_workers = range(4)
    eventually(lambda: {serial_of(secured) for _ in both_workers} == {serial}, f"the certificate {serial}")


@pytest.mark.timeout(120)
def test_certificates_change_under_load_and_invalid_ones_are_ignored(secured: Secured, tmp_path: Path) -> None:
    topic = topics.create_topic(secured.broker, "reload")
    with Traffic(secured, topic) as traffic:
        for _ in range(2):
            fresh = secured.ca.issue("broker")
            os.replace(fresh.write(tmp_path / "fresh.pem"), secured.keystore)
            wait_for_serial(secured, fresh.certificate.serial_number)
        other = secured.ca.issue("broker")
        nonsense = [b"nonsense", b"", other.key_pem() + fresh.chain_pem(), other.chain_pem()]
        for content in nonsense:
            (tmp_path / "bad.pem").write_bytes(content)
            refused = secured.log().count(NOT_USED)
            os.replace(tmp_path / "bad.pem", secured.keystore)
            secured.wait_for_refusals(refused + 2)  # both workers
            assert serial_of(secured) == fresh.certificate.serial_number
        secured.wait_for_log("does not belong to the first certificate")
        os.replace(other.write(tmp_path / "other.pem"), secured.keystore)
        wait_for_serial(secured, other.certificate.serial_number)
    assert traffic.acknowledged and not traffic.failures, traffic.failures[:3]


@pytest.mark.timeout(120)
def test_killed_workers_lose_nothing_acknowledged(secured: Secured) -> None:
    topic = topics.create_topic(secured.broker, "kills", 2)
    with Traffic(secured, topic) as traffic:
        for _ in range(2):
            for pid in secured.broker.pids("worker"):
                os.kill(pid, signal.SIGKILL)
            secured.broker.wait_until_ready()
            before = len(traffic.acknowledged)
            eventually(
                lambda before=before: len(traffic.acknowledged) >= before + 50, lambda: str(traffic.failures[:3])
            )
    wanted = set(traffic.acknowledged)
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": secured.address("SSL"),
            "group.id": "kills",
            **texts(options_of("confluent-kafka", secured)),
        }
    )
    try:
        consumer.assign([confluent_kafka.TopicPartition(topic, partition, 0) for partition in range(2)])
        deadline = time.monotonic() + WAIT_SECONDS
        while wanted:
            assert time.monotonic() < deadline, len(wanted)
            for message in consumer.consume(1000, 0.2):
                wanted.discard(message.value())
    finally:
        consumer.close()
