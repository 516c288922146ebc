"""Clients that prove who they are by a delegation token, at a broker and beside its owner's password."""

from __future__ import annotations

import base64
import time

import confluent_kafka
import pytest

from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode
from mqd.security import client
from tests.broker import Broker
from tests.interaction.security.secured import Secured
from tests.kafka_connection import ConnectionEnded, KafkaConnection

CREATE, RENEW, EXPIRE, DESCRIBE, METADATA = 38, 39, 40, 41, 3
RIGHTS = {"authorizer.class.name": "standard", "super.users": "User:alice"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory):
    brokers: list[Broker] = []

    def start(**options) -> Broker:
        brokers.append(Broker(tmp_path_factory.mktemp("secured"), **options))
        return brokers[-1].start()

    yield Secured(start, **{"delegation.token.secret.key": "secret", **RIGHTS})
    for broker in brokers:
        broker.stop()


def connect(secured: Secured, user: str = "alice", password: str | None = None, is_token: bool = False):
    kafka = secured.connect()
    settings = {**secured.client(user, password=password), "sasl.tokenauth": "true" if is_token else "false"}
    known = {name: str(value) for name, value in settings.items()}
    client.of_properties(known).authenticate(lambda key, request, version: kafka.call(key, version, request))
    return kafka


def create(kafka: KafkaConnection, **more) -> tuple[m.CreateDelegationTokenResponse, str]:
    """The answer and the token's password."""
    response = kafka.call(CREATE, 3, m.CreateDelegationTokenRequest(**{"max_lifetime_ms": -1, **more}))
    assert response.error_code == 0
    return response, base64.b64encode(response.hmac).decode()


@pytest.mark.parametrize("is_token", [True, False])
def test_a_token_has_its_owners_rights_and_creates_no_other(secured: Secured, is_token: bool) -> None:
    with connect(secured) as owner:
        token, password = create(owner)
        with connect(secured, token.token_id, password, is_token) as kafka:
            assert kafka.call(METADATA, 12, m.MetadataRequest(topics=None)).brokers
            assert kafka.call(29, 3, m.DescribeAclsRequest(1, operation=1, permission_type=1)).error_code == 0
            for key, request in (
                (CREATE, m.CreateDelegationTokenRequest()),
                (RENEW, m.RenewDelegationTokenRequest(hmac=token.hmac, renew_period_ms=-1)),
                (EXPIRE, m.ExpireDelegationTokenRequest(hmac=token.hmac, expiry_time_period_ms=-1)),
                (DESCRIBE, m.DescribeDelegationTokenRequest(owners=None)),
            ):
                refused = kafka.call(key, 2, request).error_code
                assert refused == ErrorCode.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
        assert owner.call(EXPIRE, 2, m.ExpireDelegationTokenRequest(token.hmac, -1)).error_code == 0
        with pytest.raises(client.NotAuthenticated):
            connect(secured, token.token_id, password, is_token)


def test_a_connection_ends_with_its_token(secured: Secured) -> None:
    with connect(secured) as owner:
        token, password = create(owner, max_lifetime_ms=2000)
    with connect(secured, token.token_id, password, True) as kafka:
        assert kafka.call(METADATA, 12, m.MetadataRequest(topics=None)).brokers
        time.sleep(max(0.0, token.max_timestamp_ms / 1000 - time.time()) + 0.1)
        with pytest.raises(ConnectionEnded):
            kafka.call(METADATA, 12, m.MetadataRequest(topics=None))
    with pytest.raises(client.NotAuthenticated):
        connect(secured, token.token_id, password, True)


def test_librdkafka_uses_a_token_as_user_and_password(secured: Secured) -> None:
    with connect(secured) as owner:
        token, password = create(owner)
    settings = secured.client(token.token_id, "SCRAM-SHA-512", password)
    producer = confluent_kafka.Producer(settings)
    failed: list[object] = []
    producer.produce("by-token", b"value", on_delivery=lambda error, _: failed.append(error))
    assert producer.flush(20) == 0 and failed == [None]
