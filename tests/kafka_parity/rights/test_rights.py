"""The table of rights on a broker through every transport, compared with Apache Kafka's recorded
results.

Quick: the newest version of each API over TCP, with metadata requested by a super user first, whose
response the worker caches; and through shared memory by a client of another user. Slow: the oldest
versions; hosts of a cluster that forward requests for that client; and Apache Kafka itself, which
must still match the record.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from mqd.acceptor.local.relay import RELAYED_APIS
from mqd.protocol import KNOWN
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.protocol.headers import SUPPORTED
from mqd.protocol.messages import message_class
from mqd.security.acl import Operation, Permission
from perf.peers.peer import Unavailable
from tests.broker import Broker
from tests.cluster import Cluster
from tests.interaction.security.secured import set_password
from tests.kafka_connection import KafkaConnection
from tests.kafka_parity.rights import stories
from tests.kafka_parity.rights.recorded import Found, recorded
from tests.kafka_parity.rights.sides import SETTINGS, apache_kafka, plain
from tests.kafka_parity.rights.table import (
    PASSWORD,
    TOKEN_OWNER,
    USER,
    Ask,
    Granting,
    Row,
    advertised,
    asking,
    make_topic,
    prepare,
    prepare_token,
    remove_topic,
    rows,
    run,
)
from tests.local_connection import LocalConnection
from tests.other_user import LOGIN, OtherUser, why_not
from tests.ports import free_port
from tests.unit.acceptor.rights_cases import NAME, topic

OPERATOR = "operator"
# a share of the APIs: rights are checked in one place for every transport
THROUGH_MEMORY = {0, 1, 2, 3, 8, 9, 11, 15, 19, 20, 22, 24, 26, 28, 30, 32, 39, 40, 41, 60, 68, 75}


# requests that another host may handle: envelopes to coordinators and leaders, relays of batches
ASKED_OF_OTHERS = {0, *RELAYED_APIS}
REPLICATED = {
    "default.replication.factor": "1",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
}
ALICE_IS_NOBODY = {"local.socket.permissions": "0666", "local.principal.mapping.rules": f"RULE:{LOGIN}/{USER}/"}


class Users(Broker):
    """A broker with an authorizer; alice authenticates on `users_port`, or runs as the user
    `nobody`.
    """

    def __init__(self, data_dir: Path) -> None:
        self.users_port = free_port()
        super().__init__(
            data_dir,
            workers=1,
            config={
                **SETTINGS,
                "super.users": f"{SETTINGS['super.users']};User:{OPERATOR}",
                "listeners": f"PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:{self.users_port}",
                "sasl.enabled.mechanisms": "PLAIN",
                **ALICE_IS_NOBODY,
            },
        )

    def operator(self) -> KafkaConnection:
        """A super user at alice's listener and worker."""
        return plain(self.users_port, OPERATOR)

    def alice(self) -> KafkaConnection:
        return plain(self.users_port)

    def admin(self) -> KafkaConnection:
        return KafkaConnection("127.0.0.1", self.port)


def local_socket(broker: Broker) -> Path:
    return Path(broker.status()["client_socket"])


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """Not in pytest's directory, which other users cannot traverse."""
    made = Path(tempfile.mkdtemp(prefix="mqd-rights-"))
    made.chmod(0o711)
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def broker(directory: Path) -> Iterator[Users]:
    with Users(directory / "data") as broker, asking(broker.admin) as admin:
        for user in (USER, OPERATOR, TOKEN_OWNER):
            set_password(broker, user, PASSWORD)
        prepare(admin)
        with asking(lambda: plain(broker.users_port, TOKEN_OWNER)) as owner:
            prepare_token(owner)
        yield broker


def differences(found: Found, wanted: Found) -> list[str]:
    return [
        f"{name}: Apache Kafka shows {wanted[name]}, mqd {response}"
        for name, response in found.items()
        if response != wanted[name]
    ]


def assert_as_recorded(
    admin: Ask,
    connect: Callable[[], Any],
    which: Callable[[Row], bool],
    before: Ask | None = None,
    others: Sequence[Ask] = (),
) -> None:
    wanted = recorded()
    asked = [row for row in rows(advertised(admin)) if row.name in wanted and which(row)]
    with asking(connect) as alice:
        found = run(admin, alice, asked, before=before, others=others)
    assert found and not differences(found, wanted), "\n".join(differences(found, wanted))


def is_newest(row: Row) -> bool:
    return row.is_newest


def test_tcp(broker: Users) -> None:
    with asking(broker.admin) as admin, asking(broker.operator) as operator:
        # for a new API, record Apache Kafka's results: python -m tests.kafka_parity.rights
        assert not {row.name for row in rows(advertised(admin))} - recorded().keys()
        assert_as_recorded(admin, broker.alice, is_newest, before=operator)


@pytest.fixture
def story_topic(broker: Users) -> Iterator[str]:
    yield stories.STORY
    with asking(broker.admin) as admin:
        remove_topic(admin, stories.STORY)


@pytest.mark.usefixtures("story_topic")
@pytest.mark.parametrize("story", stories.STORIES)
def test_revoked_rights(broker: Users, story: Callable[[Ask, Ask], stories.Steps]) -> None:
    with asking(broker.admin) as admin, asking(broker.alice) as alice:
        assert story(admin, alice) == stories.TOLD[story.__name__]


BETWEEN_HOSTS = sorted(KNOWN.keys() - SUPPORTED.keys())


@pytest.mark.parametrize("api_key", BETWEEN_HOSTS)
def test_apis_between_hosts_are_refused_to_every_client(broker: Users, api_key: int) -> None:
    """By closing the connection, as for an unknown API; even for a super user."""
    request = message_class(api_key, "Request")()
    for connect in (broker.admin, broker.operator, broker.alice):
        with asking(connect) as ask:
            assert api_key not in {one.api_key for one in ask(18, 0, m.ApiVersionsRequest()).api_keys}
            assert ask(api_key, KNOWN[api_key].min_version, request) is None


def test_the_apis_between_hosts() -> None:
    """Envelope, the states of share groups (83 to 87), and mqd's own (20,000 and above)."""
    assert BETWEEN_HOSTS == [58, 83, 84, 85, 86, 87, 20_000]


def test_a_session_is_its_principals(broker: Users, story_topic: str) -> None:
    """Apache Kafka lets any client continue it, with its own rights."""
    with asking(broker.admin) as admin, asking(broker.alice) as alice:
        make_topic(admin, story_topic)
        opened = admin(1, 11, stories.fetch(0, 0))
        taken = alice(1, 11, stories.fetch(opened.session_id, 1))
    assert (taken.error_code, taken.responses) == (int(E.FETCH_SESSION_ID_NOT_FOUND), [])


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
        assert_as_recorded(
            admin, lambda: OtherUser(local_socket(broker)), lambda row: row.is_newest and row.api_key in THROUGH_MEMORY
        )


def test_segments_of_another_user(broker: Users) -> None:
    """The files themselves: a mapped file is not revoked by a later response."""
    if reason := why_not():
        pytest.skip(reason)
    with asking(broker.admin) as admin, contextlib.closing(OtherUser(local_socket(broker))) as alice:
        topic_id, granting = make_topic(admin, NAME), Granting(admin)
        for right, is_given in ((Operation.DESCRIBE, False), (Operation.READ, True), (Operation.WRITE, False)):
            granting.grant(((topic(right), Permission.ALLOW),))
            error, content = alice.send_request(topic_id, 0)
            assert (error, bool(content)) == ((0, True) if is_given else (int(E.TOPIC_AUTHORIZATION_FAILED), False))


@pytest.mark.slow
def test_hosts_that_forward_requests(directory: Path) -> None:
    """Whichever host alice is attached to: at least two of three are neither the coordinator of her
    group nor the leader of her partition.
    """
    if reason := why_not():
        pytest.skip(reason)
    key = directory / "cluster.key"
    subprocess.run([sys.executable, "-m", "mqd.cli.main", "cluster", "key", str(key)], check=True)
    config = {**SETTINGS, **ALICE_IS_NOBODY, **REPLICATED, "cluster.key.file": str(key)}
    cluster, admins = Cluster(directory / "cluster", 3, config=config), contextlib.ExitStack()
    with cluster, admins:
        asks = [admins.enter_context(asking(lambda host=host: LocalConnection(local_socket(host)))) for host in cluster]
        prepare(asks[0])
        for number, host in enumerate(cluster):
            assert_as_recorded(
                asks[number],
                lambda host=host: OtherUser(local_socket(host)),
                lambda row: row.is_newest and row.api_key in ASKED_OF_OTHERS,
                others=asks,
            )


@pytest.mark.slow
@pytest.mark.timeout(900)  # a thousand rows, most with their own rules: 300 s do not suffice on a busy machine
def test_apache_kafka_still_matches_the_record(tmp_path: Path) -> None:
    try:
        with (
            apache_kafka(tmp_path) as (admin_port, port),
            asking(lambda: KafkaConnection("127.0.0.1", admin_port)) as admin,
            asking(lambda: plain(port)) as alice,
            asking(lambda: plain(port, TOKEN_OWNER)) as owner,
        ):
            prepare(admin)
            prepare_token(owner)
            found = run(admin, alice, rows(advertised(admin)))
            told = {story.__name__: story(admin, alice) for story in stories.STORIES}
    except Unavailable as reason:
        pytest.skip(f"Apache Kafka cannot be had: {reason}")
    wanted = recorded()
    assert found.keys() == wanted.keys()
    assert found == wanted
    assert told == stories.TOLD
