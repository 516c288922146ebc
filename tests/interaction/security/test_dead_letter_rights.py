"""Dead letters and their redrive on a broker with an authorizer: a worker needs no right on the
dead-letter topic, and a redrive needs every one of the rights that docs/operations.md names.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import AcknowledgeType, ShareConsumer

from tests.broker import Broker
from tests.client_reading import read_all
from tests.interaction.coordinator.test_dead_letters import Dead
from tests.interaction.coordinator.test_share_groups import committed, polled
from tests.interaction.security.secured import PASSWORDS, Secured
from tests.preloaded import PRELOADED

pytestmark = pytest.mark.slow


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    """The plain listener is the administrator's."""
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path / "data", **options))
        return brokers[-1].start()

    rights = {
        "authorizer.class.name": "standard",
        "super.users": "User:ANONYMOUS",
        "group.share.delivery.count.limit": "2",
    }
    try:
        yield Secured(start, **rights)
    finally:
        for broker in brokers:
            broker.stop()


class Alice:
    """Her commands, and the administrator's commands about her."""

    def __init__(self, secured: Secured, directory: Path) -> None:
        self._admin = secured.broker.bootstrap
        self._address = secured.bootstrap
        self._file = directory / "alice.properties"
        self._file.write_text(
            "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=SCRAM-SHA-256\nsasl.username=alice\n"
            f"sasl.password={PASSWORDS['alice']}\n"
        )

    def __call__(self, line: str) -> tuple[int, str]:
        environment = {**os.environ, "MQD_BOOTSTRAP": self._address, "MQD_CLIENT_CONFIG": str(self._file)}
        done = PRELOADED.run(*shlex.split(line)[1:], environment=environment)
        return done.returncode, done.stdout + done.stderr

    def allow(self, operation: str, resource: str) -> None:
        self._administer("acl", "allow", "alice", operation, resource)

    def take_away(self, operation: str, resource: str) -> None:
        self._administer("acl", "remove", resource, "--principal", "alice", "--operation", operation)

    def _administer(self, *words: str) -> None:
        done = PRELOADED.run(*words, environment={**os.environ, "MQD_BOOTSTRAP": self._admin})
        assert done.returncode == 0, done.stderr


@pytest.mark.timeout(300)
def test_a_worker_and_a_redrive_have_the_rights_that_they_need(secured: Secured, tmp_path: Path) -> None:
    dead = Dead(secured.broker.bootstrap)
    dead.create_letters()
    dead.name_letters()
    dead.produce("rejected")
    alice = Alice(secured, tmp_path)
    for resource in (f"topic/{dead.topic}", f"group/{dead.group}"):
        alice.allow("read", resource)
    worker = ShareConsumer(
        {**secured.client("alice"), "group.id": dead.group, "share.acknowledgement.mode": "explicit"}
    )
    worker.subscribe([dead.topic])
    with worker:
        ((_, message),) = polled(worker)
        worker.acknowledge(message, AcknowledgeType.REJECT)
        committed(worker)
    dead.read(1)

    needed = [
        ("read", f"topic/{dead.letters}"),
        ("read", f"topic/{dead.topic}"),
        ("write", f"topic/{dead.topic}"),
        ("describe-configs", f"topic/{dead.topic}"),
        ("describe", "topic/__consumer_offsets"),
        ("read", "group/mqd-redrive:*"),
        ("write", "transactional-id/mqd-redrive:*"),
    ]
    redrive = f"mqd queue redrive {dead.letters}"
    for right in needed:
        alice.allow(*right)
    for right in needed:
        alice.take_away(*right)
        code, printed = alice(redrive)
        assert code == 1 and "1 record moved" not in printed and "uthoriz" in printed, f"without {right}: {printed}"
        alice.allow(*right)
    code, printed = alice(redrive)
    assert code == 0 and "1 record moved" in printed, printed
    assert [one.value() for one in read_all(secured.broker, dead.topic, 2)] == [b"rejected"] * 2
