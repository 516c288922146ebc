"""Deleted users, changed passwords and expired tokens: open connections are, as in Kafka, served
until they must re-authenticate, and no longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from mqd.protocol import messages as m
from mqd.security import client
from tests.broker import Broker
from tests.interaction.security.secured import Secured
from tests.interaction.security.test_delegation_tokens import METADATA, RIGHTS, connect, create
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.tiers import quick

BOUND_S = 4.0  # connections.max.reauth.ms
CLOCKS_S = 0.1  # between the broker's clock and ours
EXPIRE, ALTER = 40, 51


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path_factory.mktemp("secured"), **options))
        return brokers[-1].start()

    bound = {"listener.name.sasl_plaintext.connections.max.reauth.ms": str(int(BOUND_S * 1000))}
    yield Secured(start, **{"delegation.token.secret.key": "secret"}, **RIGHTS, **bound)
    for broker in brokers:
        broker.stop()


def delete(secured: Secured, user: str) -> None:
    gone = [m.AlterUserScramCredentialsRequest.ScramCredentialDeletion(user, mechanism) for mechanism in (1, 2)]
    with connect(secured) as admin:
        response = admin.call(ALTER, 0, m.AlterUserScramCredentialsRequest(deletions=gone))
    assert not any(one.error_code for one in response.results), response


def prove(secured: Secured, kafka: KafkaConnection, user: str, password: str, is_token: bool = False) -> int:
    """Authenticates by SCRAM, possibly on an open connection; returns the session lifetime in ms.
    Raises client.NotAuthenticated.
    """
    lifetimes: list[int] = []

    def ask(key: int, request: object, version: int) -> object:
        response = kafka.call(key, version, request)
        lifetimes.append(getattr(response, "session_lifetime_ms", 0))
        return response

    settings = {**secured.client(user, password=password), "sasl.tokenauth": "true" if is_token else "false"}
    client.security_from_properties({name: str(value) for name, value in settings.items()}).authenticate(ask)
    return lifetimes[-1]


def is_served(kafka: KafkaConnection) -> bool:
    try:
        return bool(kafka.call(METADATA, 12, m.MetadataRequest(topics=None)).brokers)
    except (ConnectionEnded, OSError):
        return False


ENDS: dict[str, Callable[[Secured], None]] = {
    "deleted": lambda secured: delete(secured, "dan"),
    "changed": lambda secured: secured.set_password("dan", "second"),
}


@pytest.mark.parametrize("how", quick(ENDS, ["changed"]))
def test_an_open_connection_is_served_until_it_must_authenticate_again(secured: Secured, how: str) -> None:
    secured.set_password("dan", "first")
    began = time.monotonic()
    with connect(secured, "dan", "first") as kafka, connect(secured, "dan", "first") as other:
        over = time.monotonic() + BOUND_S
        ENDS[how](secured)
        with pytest.raises(client.NotAuthenticated):
            connect(secured, "dan", "first")
        assert is_served(kafka) and is_served(other)
        with pytest.raises(client.NotAuthenticated):
            prove(secured, other, "dan", "first")
        assert not is_served(other), "what no longer proves itself is not served until its time"
        sent = time.monotonic()
        while is_served(kafka):  # some of the requests sent before the end may be served after it
            assert sent < over + CLOCKS_S, "a request was served after the bound"
            sent = time.monotonic()
        assert time.monotonic() > began + BOUND_S - CLOCKS_S, "it ended before the bound"


def test_an_open_connection_continues_with_the_new_password(secured: Secured) -> None:
    secured.set_password("eve", "first")
    with connect(secured, "eve", "first") as kafka:
        secured.set_password("eve", "second")
        prove(secured, kafka, "eve", "second")
        assert is_served(kafka)


def test_an_expired_token_does_not_authenticate_again(secured: Secured) -> None:
    with connect(secured) as owner:
        token, password = create(owner, max_lifetime_ms=60_000)
        with connect(secured, token.token_id, password, True) as kafka:
            assert owner.call(EXPIRE, 2, m.ExpireDelegationTokenRequest(token.hmac, -1)).error_code == 0
            assert is_served(kafka), "as in Kafka"
            with pytest.raises(client.NotAuthenticated):
                prove(secured, kafka, token.token_id, password, True)
            assert not is_served(kafka)


def test_a_token_lives_no_longer_than_the_listener_allows(secured: Secured) -> None:
    """The shorter of the token's expiry and connections.max.reauth.ms, in milliseconds."""
    with connect(secured) as owner:
        for lifetime_ms, most_ms in ((60_000, BOUND_S * 1000), (1_000, 1_000)):
            token, password = create(owner, max_lifetime_ms=lifetime_ms)
            with secured.connect() as kafka:
                assert 0 < prove(secured, kafka, token.token_id, password, True) <= most_ms


def test_removing_rights_takes_effect_at_once(secured: Secured) -> None:
    """The remedy where waiting is not an option: docs/security.md."""
    secured.set_password("finn", "first")
    allowed = m.CreateAclsRequest.AclCreation(2, "*", 3, "User:finn", "*", 8, 3)  # DESCRIBE every topic
    denied = m.CreateAclsRequest.AclCreation(2, "*", 3, "User:finn", "*", 2, 2)  # ALL
    topic = m.CreateTopicsRequest.Topic(name="seen", num_partitions=1, replication_factor=1)
    with connect(secured) as admin, connect(secured, "finn", "first") as kafka:
        admin.call(19, 7, m.CreateTopicsRequest(topics=[topic], timeout_ms=60_000))
        admin.call(30, 3, m.CreateAclsRequest([allowed]))
        assert [one.name for one in kafka.call(METADATA, 12, m.MetadataRequest(topics=None)).topics] == ["seen"]
        admin.call(30, 3, m.CreateAclsRequest([denied]))
        assert kafka.call(METADATA, 12, m.MetadataRequest(topics=None)).topics == []
