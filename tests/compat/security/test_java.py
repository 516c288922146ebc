"""Kafka's own tools with delegation tokens, with the settings that `mqd client-config java` writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.cli.verbs.client_config import format_settings
from mqd.security import client
from tests.broker import Broker
from tests.compat.kafka_tools import KafkaTools
from tests.interaction.security.secured import Secured

pytestmark = pytest.mark.slow  # a JVM for each step


TOKENS = "org.apache.kafka.tools.DelegationTokenCommand"


def test_kafka_delegation_tokens_and_a_client_that_uses_one(
    kafka_tools: KafkaTools, start_broker: Callable[..., Broker], tmp_path: Path
) -> None:
    rights = {"authorizer.class.name": "standard", "super.users": "User:alice"}
    secured = Secured(start_broker, **{"delegation.token.secret.key": "secret", **rights})

    def settings(name: str, user: str, password: str | None = None, **more: str) -> tuple[str, ...]:
        known = {key: str(value) for key, value in secured.client(user, "SCRAM-SHA-256", password).items()}
        file = tmp_path / name
        file.write_text(
            format_settings("java", secured.bootstrap, client.security_from_properties({**known, **more}).settings)
        )
        return "--bootstrap-server", secured.bootstrap, "--command-config", str(file)

    alice, bob = settings("alice", "alice"), settings("bob", "bob")

    def run(tool: str, *words: str) -> str:
        done = kafka_tools.run(tool, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def found(said: str) -> dict[str, tuple[str, str]]:
        """(HMAC, owner) by id, from the table that the tool prints."""
        rows = re.findall(r"^(\S{22})\s+(\S{86}==)\s+(User:\S+)", said, re.M)
        return {token_id: (token_hmac, owner) for token_id, token_hmac, owner in rows}

    made = found(run(TOKENS, *alice, "--create", "--max-life-time-period", "-1", "--renewer-principal", "User:bob"))
    ((token_id, (token_hmac, owner)),) = made.items()
    assert owner == "User:alice"
    # without owners the tool requests no owner's tokens, and Kafka shows none
    assert found(run(TOKENS, *bob, "--describe")) == {}
    assert found(run(TOKENS, *bob, "--describe", "--owner-principal", "User:alice")) == made, "a renewer sees it"
    by_token = settings("token", token_id, token_hmac, **{"sasl.tokenauth": "true"})
    assert "tokenauth" in (tmp_path / "token").read_text()
    produced = run("org.apache.kafka.tools.VerifiableProducer", *by_token, "--topic", "t", "--max-messages", "10")
    assert '"acked":10' in produced, "bob could not: it has the rights of alice"
    refused = kafka_tools.run(TOKENS, *by_token, "--create", "--max-life-time-period", "-1")
    assert "Delegation Token requests are not allowed" in refused.stdout + refused.stderr
    run(TOKENS, *bob, "--renew", "--renew-time-period", "60000", "--hmac", token_hmac)
    run(TOKENS, *bob, "--expire", "--expiry-time-period", "-1", "--hmac", token_hmac)
    assert found(run(TOKENS, *alice, "--describe", "--owner-principal", "User:alice")) == {}
    ended = kafka_tools.run("org.apache.kafka.tools.TopicCommand", *by_token, "--list")
    assert ended.returncode != 0 and "invalid credentials" in ended.stdout + ended.stderr
    other = kafka_tools.run(TOKENS, *bob, "--create", "--max-life-time-period", "-1", "--owner-principal", "User:alice")
    assert "Delegation Token authorization failed" in other.stdout + other.stderr
    rule = ("--add", "--allow-principal", "User:bob", "--operation", "CreateTokens", "--user-principal", "User:alice")
    run("org.apache.kafka.tools.AclCommand", *alice, *rule)
    run(TOKENS, *bob, "--create", "--max-life-time-period", "-1", "--owner-principal", "User:alice")
