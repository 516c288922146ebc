"""The table of rights, asked of a broker by every way in, beside what Apache Kafka showed.

Quick: the newest version of each API over TCP, metadata asked by an administrator first, whose answer
the worker keeps; and through shared memory by a client of another user. Slow: the oldest versions;
and Apache Kafka itself, which must still show what is recorded.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perf.peers.peer import Unavailable
from tests.broker import Broker, free_port
from tests.interaction.security.secured import set_password
from tests.judge.rights.recorded import Found, recorded
from tests.judge.rights.sides import SETTINGS, apache_kafka, plain
from tests.judge.rights.table import PASSWORD, USER, Ask, Row, advertised, asking, prepare, rows, run
from tests.kafka_connection import KafkaConnection
from tests.other_user import LOGIN, OtherUser, why_not

# a share of the APIs: what a client may is decided in the same place, whichever way it came
THROUGH_MEMORY = {0, 1, 2, 3, 8, 9, 11, 15, 19, 20, 22, 24, 26, 28, 30, 32, 60, 68, 75}


class Users(Broker):
    """A broker with an authorizer; alice authenticates on `users_port`, or is nobody's process."""

    def __init__(self, data_dir: Path, **config: str) -> None:
        self.users_port = free_port()
        super().__init__(
            data_dir,
            workers=2,
            config={
                **SETTINGS,
                "listeners": f"PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:{self.users_port}",
                "sasl.enabled.mechanisms": "PLAIN",
                "local.socket.permissions": "0666",
                "local.principal.mapping.rules": f"RULE:{LOGIN}/{USER}/",
                **config,
            },
        )

    def alice(self) -> KafkaConnection:
        return plain(self.users_port)

    def admin(self) -> KafkaConnection:
        return KafkaConnection("127.0.0.1", self.port)

    def other_user(self) -> OtherUser:
        return OtherUser(Path(self.status()["client_socket"]))


@pytest.fixture(scope="module")
def broker() -> Iterator[Users]:
    # not in pytest's directory, which other users cannot pass
    directory = Path(tempfile.mkdtemp(prefix="mqd-rights-"))
    directory.chmod(0o711)
    try:
        with Users(directory / "data") as broker, asking(broker.admin) as admin:
            set_password(broker, USER, PASSWORD)
            prepare(admin)
            yield broker
    finally:
        shutil.rmtree(directory)


def differences(found: Found, wanted: Found) -> list[str]:
    return [
        f"{name}: Apache Kafka shows {wanted[name]}, mqd {answer}"
        for name, answer in found.items()
        if answer != wanted[name]
    ]


def assert_as_recorded(admin: Ask, connect: Callable[[], Any], which: Callable[[Row], bool]) -> None:
    wanted = recorded()
    asked = [row for row in rows(advertised(admin)) if row.name in wanted and which(row)]
    with asking(connect) as alice:
        found = run(admin, alice, asked, before=admin)
    assert found and not differences(found, wanted), "\n".join(differences(found, wanted))


def is_newest(row: Row) -> bool:
    return row.is_newest


def test_tcp(broker: Users) -> None:
    with asking(broker.admin) as admin:
        assert_as_recorded(admin, broker.alice, is_newest)


@pytest.mark.slow
def test_tcp_in_the_oldest_version(broker: Users) -> None:
    with asking(broker.admin) as admin:
        missing = recorded().keys() - {row.name for row in rows(advertised(admin))}
        assert not missing
        assert_as_recorded(admin, broker.alice, lambda row: not row.is_newest)


def test_shared_memory_of_another_user(broker: Users) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with asking(broker.admin) as admin:
        assert_as_recorded(admin, broker.other_user, lambda row: row.is_newest and row.api_key in THROUGH_MEMORY)


@pytest.mark.slow
def test_apache_kafka_still_shows_what_is_recorded(tmp_path: Path) -> None:
    try:
        with (
            apache_kafka(tmp_path) as (admin_port, port),
            asking(lambda: KafkaConnection("127.0.0.1", admin_port)) as admin,
            asking(lambda: plain(port)) as alice,
        ):
            prepare(admin)
            found = run(admin, alice, rows(advertised(admin)))
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    wanted = recorded()
    assert found.keys() == wanted.keys()
    assert found == wanted
