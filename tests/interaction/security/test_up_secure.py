"""`mqd up --secure`: the commands of docs/security.md, run literally."""

from __future__ import annotations

import datetime
import os
import re
import shlex
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import confluent_kafka
import pytest

from mqd.base.properties_file import parse_properties
from mqd.cli import secure
from mqd.security import client, pki
from tests.broker import Broker
from tests.interaction.security.secured import SecureBroker, done, mqd
from tests.polling import PATIENCE_S
from tests.ports import free_port
from tests.preloaded import PRELOADED

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def broker(tmp_path: Path):
    with SecureBroker(tmp_path / "data") as found:
        yield found


def librdkafka(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines())


def typed() -> list[list[str]]:
    """The commands of "In five minutes" in docs/security.md, without the start and the export."""
    page = (ROOT / "docs" / "security.md").read_text()
    block = re.search(r"^export MQD_CLIENT_CONFIG=.*?\n(.*?)^```", page, re.M | re.S)
    assert block is not None
    return [shlex.split(line) for line in block[1].splitlines()]


def test_the_commands_of_the_page(broker: Broker, tmp_path: Path) -> None:
    password = ""
    for command in typed():
        assert command[0] == "mqd"
        printed = done(mqd(broker, *command[1:], stdin=f"{password}\n", cwd=tmp_path))
        if command[1:3] == ["user", "create"]:
            password = printed.split("password ")[1].strip()
    text = (tmp_path / "alice.properties").read_text()
    java = {name: value for name, (value, _) in parse_properties(text).items()}
    settings = {
        **client.security_from_properties(java).settings,
        "bootstrap.servers": f"localhost:{broker.port}",
        "log_level": 0,
    }
    producer = confluent_kafka.Producer(settings)
    producer.produce("orders", b"one")
    assert producer.flush(PATIENCE_S) == 0
    consumer = confluent_kafka.Consumer({**settings, "group.id": "orders", "auto.offset.reset": "earliest"})
    consumer.subscribe(["orders"])
    assert consumer.poll(PATIENCE_S).value() == b"one"
    consumer.close()
    refused: list[confluent_kafka.KafkaError] = []
    producer.produce("payments", b"one", on_delivery=lambda error, _: refused.append(error))
    producer.flush(PATIENCE_S)
    assert refused[0].code() == confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_a_restart_keeps_certificates_and_users(broker: Broker) -> None:
    places = secure.files(broker.data_dir)
    before = {file: file.read_bytes() for file in places[1:5]}
    assert not places.pending.exists()
    done(mqd(broker, "topic", "create", "kept"))
    broker.stop()
    broker.start()
    assert {file: file.read_bytes() for file in places[1:5]} == before
    assert "kept" in done(mqd(broker, "topic", "list"))


@pytest.mark.parametrize("words", [(), ("--port", "0"), ("--set", "listeners=PLAINTEXT://127.0.0.1:0")])
def test_without_the_flag_no_listener_is_opened(tmp_path: Path, words: tuple[str, ...]) -> None:
    secure.prepare(tmp_path, 1, ["localhost"])
    command = [sys.executable, "-m", "mqd.cli.main", "up", "--data-dir", str(tmp_path), *words]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 1 and "start it with --secure" in found.stderr


def test_the_broker_authenticates_itself(broker: Broker) -> None:
    places = secure.files(broker.data_dir)
    trusting = ssl.create_default_context(cafile=str(places.ca))
    for host in ("localhost", "127.0.0.1"):
        plain = socket.create_connection((host, broker.port), PATIENCE_S)
        with trusting.wrap_socket(plain, server_hostname=host) as connection:
            assert connection.version() == "TLSv1.3"
    plain = socket.create_connection(("127.0.0.1", broker.port), PATIENCE_S)
    with plain, pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(plain, server_hostname="localhost")
    plain = socket.create_connection(("127.0.0.1", broker.port), PATIENCE_S)
    with plain, pytest.raises(ssl.SSLCertVerificationError, match="elsewhere.example"):  # SNI of another server
        trusting.wrap_socket(plain, server_hostname="elsewhere.example")


def test_a_client_without_tls_or_without_a_user_gets_an_error(broker: Broker, tmp_path: Path) -> None:
    places = secure.files(broker.data_dir)
    settings = librdkafka(places.admin.read_text())
    environment = {name: value for name, value in os.environ.items() if name != "MQD_CLIENT_CONFIG"}
    plain = PRELOADED.run("-b", f"localhost:{broker.port}", "topic", "list", environment=environment)
    assert plain.returncode != 0 and "--client-config" in plain.stderr, plain.stderr
    places.admin.write_text("".join(f"{k}={v}\n" for k, v in {**settings, "sasl.password": "wrong"}.items()))
    wrong = mqd(broker, "cluster", "status")
    assert wrong.returncode != 0 and "invalid credentials" in wrong.stderr
    for words in (("topic", "list"), ("consume", "orders", "-e"), ("produce", "orders")):
        wrong = mqd(broker, *words, stdin="x\n")
        assert wrong.returncode == 1 and "invalid credentials" in wrong.stderr and "sasl.password" in wrong.stderr
    other = pki.make_authority("another", datetime.datetime.now(datetime.UTC)).certificate
    (tmp_path / "other.pem").write_bytes(other)
    for ca, reason in ((tmp_path / "other.pem", "certificate"), (tmp_path / "absent.pem", "absent.pem: there is no")):
        places.admin.write_text("".join(f"{k}={v}\n" for k, v in {**settings, "ssl.ca.location": str(ca)}.items()))
        wrong = mqd(broker, "topic", "list")
        assert wrong.returncode in (1, 2) and reason in wrong.stderr and "ssl.ca.location" in wrong.stderr


def test_settings_of_the_user_win(tmp_path: Path) -> None:
    plain = free_port()
    listeners = f"SASL_SSL://127.0.0.1:0,PLAINTEXT://127.0.0.1:{plain}"
    with SecureBroker(tmp_path / "data", config={"listeners": listeners, "super.users": "User:ANONYMOUS"}) as broker:
        found = confluent_kafka.Producer({"bootstrap.servers": f"127.0.0.1:{plain}", "log_level": 0})
        found.produce("t", b"value")
        assert found.flush(PATIENCE_S) == 0
        done(mqd(broker, "topic", "list"))
