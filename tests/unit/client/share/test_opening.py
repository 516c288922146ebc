"""Opening and stopping a share consumer's runner."""

from __future__ import annotations

import pytest

from mqd.client.config import TransportChoice, read
from mqd.client.messages import KafkaError, KafkaException
from mqd.client.share import opening
from mqd.client.share.share_config import ShareConfig
from tests.certificates import Authority
from tests.unit.client.client_broker import FakeBroker


def test_stopping_before_the_first_request_closes_the_attachments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads stayed until the process ended."""
    broker = FakeBroker()
    monkeypatch.setattr(opening, "opener", lambda *_: broker.attach)
    settings = read({"bootstrap.servers": "127.0.0.1:1", "group.id": "g"})
    opened = opening.open_share_runner(settings, ShareConfig(settings), TransportChoice("shm", "/nowhere", "test"))
    assert opened.choice.transport == "shm" and [client.closed for client in broker.clients] == [False, False]
    opened.runner.stop()
    assert [client.closed for client in broker.clients] == [True, True]


def test_a_certificate_that_only_librdkafka_can_use_is_refused_at_once() -> None:
    """It was noticed at the first connection only, whose thread it ended."""
    identity = Authority().issue("client")
    settings = read(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "group.id": "g",
            "security.protocol": "SSL",
            "ssl.certificate.pem": identity.chain_pem().decode(),
            "ssl.key.pem": identity.key_pem().decode(),
        }
    )
    config, choice = ShareConfig(settings), TransportChoice("tcp", None, "test")
    with pytest.raises(KafkaException, match="inline client certificate") as raised:
        opening.open_share_runner(settings, config, choice).runner.stop()
    assert raised.value.args[0].code() == KafkaError._INVALID_ARG
