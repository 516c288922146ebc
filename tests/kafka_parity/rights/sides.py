"""Both brokers with an authorizer, an administrator on a plain listener, and alice on one with SASL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqd.protocol import messages as m
from tests.compat.kafka_tools import KafkaCluster, KafkaTools
from tests.kafka_connection import KafkaConnection
from tests.kafka_parity.rights.table import PASSWORD, TOKEN_OWNER, USER
from tests.ports import free_port

SETTINGS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": "User:ANONYMOUS",
    "auto.create.topics.enable": "false",
    "delegation.token.secret.key": "a secret of the parity tests",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}


def plain(port: int, user: str = USER) -> KafkaConnection:
    """Alice, authenticated by PLAIN."""
    connection = KafkaConnection("127.0.0.1", port)
    connection.call(17, 1, m.SaslHandshakeRequest(mechanism="PLAIN"))
    given = m.SaslAuthenticateRequest(auth_bytes=f"\0{user}\0{PASSWORD}".encode())
    response = connection.call(36, 2, given)
    assert response.error_code == 0, response
    return connection


@contextmanager
def apache_kafka(directory: Path) -> Iterator[tuple[int, int]]:
    """(the administrator's port, alice's). Raises perf.peers.peer.Unavailable."""
    cluster = KafkaCluster(KafkaTools(directory), directory, 1)
    broker, port = cluster.brokers[1], free_port()
    login = "org.apache.kafka.common.security.plain.PlainLoginModule"
    users = " ".join(f'user_{user}="{PASSWORD}"' for user in (USER, TOKEN_OWNER))
    cluster._settings = {
        **SETTINGS,
        "listeners": f"PLAINTEXT://{broker.bootstrap},USERS://127.0.0.1:{port},CONTROLLER://{broker.controller}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,USERS:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.users.plain.sasl.jaas.config": f"{login} required {users};",
    }
    with cluster:
        yield broker.port, port
