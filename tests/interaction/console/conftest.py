"""One broker for all pages, with a plain listener, whose clients have all rights, and one with
users.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mqd.security.client import ClientSecurity
from tests.broker import Broker
from tests.console_client import Browser, options
from tests.interaction.security.secured import Secured


@pytest.fixture(scope="package")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    brokers: list[Broker] = []

    def start(config: dict[str, str]) -> Broker:
        brokers.append(Broker(tmp_path_factory.mktemp("console"), config=config))
        return brokers[-1].start()

    rights = {
        "authorizer.class.name": "standard",
        "super.users": "User:ANONYMOUS;User:alice",
        "auto.create.topics.enable": "false",
        "offsets.topic.num.partitions": "2",
        "share.coordinator.state.topic.num.partitions": "2",
        "transaction.state.log.num.partitions": "2",
        "transaction.partition.verification.enable": "false",  # so that a transaction can be left hanging
    }
    try:
        yield Secured(start, **rights)
    finally:
        for broker in brokers:
            broker.stop()


@pytest.fixture
def browser(secured: Secured) -> Browser:
    return Browser(options(secured.broker.bootstrap))


@pytest.fixture
def login_browser(secured: Secured) -> Browser:
    """Of a console to which users log in."""
    settings = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanisms": "SCRAM-SHA-256"}
    return Browser(options(secured.bootstrap, ClientSecurity(settings)))
