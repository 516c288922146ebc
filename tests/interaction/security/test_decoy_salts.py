"""The salt that a cluster returns for an unknown user: the same at each host and after a restart
with another key, and without revealing the secret from which it is derived.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mqd.base import cluster_key
from mqd.protocol.messages import (
    AlterUserScramCredentialsRequest,
    DescribeConfigsRequest,
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)
from mqd.security import scram
from tests.cluster import Cluster, Member
from tests.interaction.traffic import eventually
from tests.kafka_connection import KafkaConnection

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
NAMES = [f"nobody-{number}" for number in range(8)]


def salts(member: Member) -> list[str]:
    found = []
    for name in NAMES:
        with KafkaConnection(member.address, member.port + 3, timeout_s=30) as kafka:
            kafka.call(17, 1, SaslHandshakeRequest(mechanism="SCRAM-SHA-256"))
            response = kafka.call(36, 2, SaslAuthenticateRequest(auth_bytes=f"n,,n={name},r=abc".encode()))
            found.append(response.auth_bytes.decode().split(",")[1])
    return found


def test_salts_are_the_same_on_all_hosts(tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    cluster_key.make(key)
    with Cluster(tmp_path, 2, config={"cluster.key.file": str(key)}) as cluster:
        pass
    for member in cluster:
        member.config["listeners"] += f",SASL_PLAINTEXT://{member.address}:{member.port + 3}"
    one, two = cluster.brokers.values()
    with cluster:
        with KafkaConnection(one.address, one.port, timeout_s=30) as admin:
            salted = scram.salted_password("SCRAM-SHA-256", b"a password", b"a salt of alice", 4096)
            made = AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
                name="alice", mechanism=1, iterations=4096, salt=b"a salt of alice", salted_password=salted
            )
            response = admin.call(51, 0, AlterUserScramCredentialsRequest(upsertions=[made]))
            assert response.results[0].error_code == 0
            asked = DescribeConfigsRequest.Resource(4, "", [scram.DECOY_SECRET_PROPERTY])
            (shown,) = admin.call(32, 4, DescribeConfigsRequest(resources=[asked])).results
            assert [(entry.is_sensitive, entry.value) for entry in shown.configs] == [(True, None)]
        before = salts(one)
        eventually(lambda: salts(two) == before, "the other host shows the same")
        assert len(set(before)) == len(NAMES)
    key.unlink()
    cluster_key.make(key)
    with cluster:
        assert salts(one) == salts(two) == before
