"""The APIs of delegation tokens on mqd and on Apache Kafka, with the same requests in the same
order: error codes, names and times are equal.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode as E
from mqd.security import client
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaCluster, KafkaTools
from tests.interaction.security.secured import PASSWORDS, Secured
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CREATE, RENEW, EXPIRE, DESCRIBE = 38, 39, 40, 41
BOTH = {
    "delegation.token.secret.key": "secret",
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS;User:alice",
}
Seen = list[Any]


@contextmanager
def kafka_side(kafka_tools: KafkaTools, directory: Path) -> Iterator[tuple[int, int]]:
    """Ports: plain, and with SASL."""
    port, module = free_port(), "org.apache.kafka.common.security"
    users = " ".join(f'user_{user}="{password}"' for user, password in PASSWORDS.items())
    own = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256",
        "listener.name.sasl_plaintext.plain.sasl.jaas.config": f"{module}.plain.PlainLoginModule required {users};",
        "listener.name.sasl_plaintext.scram-sha-256.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
    }
    settings = {**BOTH, **own}
    cluster = KafkaCluster(kafka_tools, directory, 1, settings)
    broker = cluster.brokers[1]
    settings["listeners"] = (
        f"PLAINTEXT://{broker.bootstrap},CONTROLLER://{broker.controller},SASL_PLAINTEXT://127.0.0.1:{port}"
    )
    with cluster:
        yield broker.port, port


class Side:
    def __init__(self, plain_port: int, sasl_port: int) -> None:
        self._plain_port, self._sasl_port = plain_port, sasl_port
        self._open: dict[str, KafkaConnection] = {}
        self.seen: Seen = []

    def by(self, user: str, password: str | None = None, mechanism: str = "PLAIN") -> KafkaConnection:
        if user not in self._open:
            if not user:
                self._open[user] = KafkaConnection.connect("127.0.0.1", self._plain_port)
                return self._open[user]
            kafka = self._open[user] = KafkaConnection.connect("127.0.0.1", self._sasl_port)
            settings = {
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": mechanism,
                "sasl.username": user,
                "sasl.password": PASSWORDS[user] if password is None else password,
                "sasl.tokenauth": "false" if password is None else "true",
            }
            client.security_from_properties(settings).authenticate(
                lambda key, request, version: kafka.call(key, version, request)
            )
        return self._open[user]

    def close(self) -> None:
        for kafka in self._open.values():
            kafka.close()

    def create(self, user: str, version: int = 3, renewers: tuple[str, ...] = (), **more: Any) -> Any:
        names = [m.CreateDelegationTokenRequest.CreatableRenewers(*one.split(":")) for one in renewers]
        request = m.CreateDelegationTokenRequest(**{"max_lifetime_ms": -1, "renewers": names, **more})
        made = self.by(user).call(CREATE, version, request)
        names = (made.principal_type, made.principal_name)
        requester = (made.token_requester_principal_type, made.token_requester_principal_name)
        lives = (
            made.expiry_timestamp_ms - made.issue_timestamp_ms,
            made.max_timestamp_ms - made.issue_timestamp_ms,
            made.issue_timestamp_ms if made.error_code else 0,
        )
        self.seen.append(("create", made.error_code, names, requester, lives, len(made.token_id), len(made.hmac)))
        return made

    def change(self, user: str, key: int, token_hmac: bytes, period_ms: int, version: int = 2) -> None:
        """The expiry is compared to the second."""
        kinds: dict[int, Any] = {RENEW: m.RenewDelegationTokenRequest, EXPIRE: m.ExpireDelegationTokenRequest}
        now_ms = time.time() * 1000
        changed = self.by(user).call(key, version, kinds[key](token_hmac, period_ms))
        until_ms = changed.expiry_timestamp_ms
        self.seen.append(
            (key, changed.error_code, until_ms if changed.error_code else round((until_ms - now_ms) / 5000))
        )

    def settle(self, told: Callable[[dict[str, Any]], bool]) -> None:
        """Kafka acknowledges a change before its broker and its controller apply it."""

        def is_seen() -> bool:
            found = self.by("alice").call(DESCRIBE, 3, m.DescribeDelegationTokenRequest(owners=None))
            return told({one.token_id: one for one in found.tokens})

        eventually(is_seen, "the change is seen")
        # Apache Kafka's controller has its own cache, and no request shows when it is up to date
        time.sleep(0.5)

    def describe(self, user: str, owners: list[str] | None, expected: int) -> None:
        asked = owners and [
            m.DescribeDelegationTokenRequest.DescribeDelegationTokenOwner("User", name) for name in owners
        ]
        deadline = time.monotonic() + PATIENCE_S
        while True:  # Kafka's broker gets a token after the response to its creation
            found = self.by(user).call(DESCRIBE, 3, m.DescribeDelegationTokenRequest(owners=asked))
            if len(found.tokens) == expected or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        tokens = [
            (
                one.principal_name,
                one.token_requester_principal_name,
                one.expiry_timestamp - one.issue_timestamp,
                one.max_timestamp - one.issue_timestamp,
                [(each.principal_type, each.principal_name) for each in one.renewers],
                len(one.hmac),
            )
            for one in found.tokens
        ]
        self.seen.append(("describe", user, owners, found.error_code, sorted(tokens)))


def story(side: Side) -> Seen:
    for version in (1, 2, 3):
        made = side.create("alice", version, ("User:bob",))
    side.create("alice", max_lifetime_ms=60_000)
    side.create("bob", owner_principal_type="User", owner_principal_name="alice")
    carol = side.create("alice", owner_principal_type="User", owner_principal_name="carol")
    side.create("alice", renewers=("Group:g",))
    side.create("bob", owner_principal_type="User", owner_principal_name="")
    for user, owners, expected in (
        ("alice", None, 6),
        ("alice", [], 0),
        ("alice", ["bob"], 4),
        ("bob", None, 4),
        ("bob", ["carol"], 0),
        ("bob", ["alice"], 3),
    ):
        side.describe(user, owners, expected)
    side.settle(lambda tokens: len(tokens) == 6)
    for user, key, token_hmac, period_ms in (
        ("bob", RENEW, made.hmac, 60_000),
        ("alice", RENEW, made.hmac, -1),
        ("alice", RENEW, made.hmac, 1 << 40),
        ("alice", RENEW, b"nothing", -1),
        ("alice", EXPIRE, b"nothing", -1),
        ("alice", RENEW, carol.hmac, -1),
        ("alice", EXPIRE, carol.hmac, -1),
        ("bob", EXPIRE, made.hmac, 3_600_000),
        ("bob", EXPIRE, made.hmac, 0),
    ):
        side.change(user, key, token_hmac, period_ms)
    side.settle(lambda tokens: tokens[made.token_id].expiry_timestamp < time.time() * 1000)
    side.change("alice", RENEW, made.hmac, -1, 1)
    side.change("alice", EXPIRE, made.hmac, 5, 1)
    side.change("alice", EXPIRE, made.hmac, -1)
    side.settle(lambda tokens: made.token_id not in tokens)
    side.change("alice", RENEW, made.hmac, -1)
    side.describe("alice", None, 5)
    token = side.create("alice")
    side.settle(lambda tokens: token.token_id in tokens)
    side.by(token.token_id, base64.b64encode(token.hmac).decode(), "SCRAM-SHA-256")
    for user in (token.token_id, ""):
        side.create(user)
        side.change(user, RENEW, token.hmac, -1)
        side.change(user, EXPIRE, token.hmac, -1)
        found = side.by(user).call(DESCRIBE, 3, m.DescribeDelegationTokenRequest(owners=None))
        side.seen.append(("describe", found.error_code, found.tokens))
    return side.seen


def test_both_brokers_respond_alike(
    kafka_tools: KafkaTools, start_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    secured = Secured(start_broker, **BOTH)
    own = Side(secured.broker.port, secured.port)
    mqds = story(own)
    own.close()
    with kafka_side(kafka_tools, tmp_path) as ports:
        theirs = Side(*ports)
        kafkas = story(theirs)
        theirs.close()
    assert mqds == kafkas
    codes = {one[1] for one in mqds if isinstance(one[1], int)}
    assert codes >= {
        E.DELEGATION_TOKEN_NOT_FOUND,
        E.DELEGATION_TOKEN_OWNER_MISMATCH,
        E.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED,
        E.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
        E.DELEGATION_TOKEN_EXPIRED,
        E.INVALID_PRINCIPAL_TYPE,
    }
