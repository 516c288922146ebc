"""READ on a topic is all that the commands need to read it."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AclOperation, NewTopic

from tests.broker import Broker
from tests.interaction.security.secured import Secured
from tests.interaction.security.test_rights_of_clients import admin, grant, rule
from tests.polling import PATIENCE_S
from tests.preloaded import PRELOADED

READS = [("consume", "orders", "-e"), ("cat", "-C", "-t", "orders", "-e"), ("cat", "-Q", "-t", "orders:0:0")]


@pytest.fixture
def secured(tmp_path: Path):
    broker = Broker(tmp_path / "data", workers=2)

    def start(config: dict[str, str]) -> Broker:
        broker.config.update(config)
        return broker.start()

    yield Secured(start, **{"authorizer.class.name": "standard", "super.users": "User:ANONYMOUS"})
    broker.stop()


def test_a_user_with_read_on_the_topic_reads_it(secured: Secured, tmp_path: Path) -> None:
    administrator = admin(secured)
    administrator.create_topics([NewTopic("orders", 1)])["orders"].result(PATIENCE_S)
    producer = Producer({"bootstrap.servers": secured.broker.bootstrap})
    producer.produce("orders", b"first")
    assert producer.flush(PATIENCE_S) == 0
    grant(secured, rule("alice", AclOperation.READ, "orders"))
    file = tmp_path / "alice.properties"
    file.write_text("".join(f"{name}={value}\n" for name, value in secured.client().items() if name != "log_level"))
    for words in READS:
        done = PRELOADED.run("-b", secured.bootstrap, "--client-config", str(file), *words)
        assert done.returncode == 0, (words, done.stderr)
        assert ("first" if "-Q" not in words else "orders [0] offset 0") in done.stdout
