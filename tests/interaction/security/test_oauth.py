"""OAUTHBEARER: tokens of an issuer whose keys are in a file, and connections that end with them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import aiokafka
import aiokafka.abc
import confluent_kafka
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import MetadataRequest, SaslAuthenticateRequest, SaslHandshakeRequest
from tests.broker import Broker
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S
from tests.ports import free_port

ISSUER = "https://issuer.example"


class Issuing:
    """A broker that accepts tokens, and their issuer."""

    def __init__(self, start_broker: Callable[..., Broker], folder: Path) -> None:
        self.key = rsa.generate_private_key(65537, 2048)
        self.file = folder / "keys.json"
        published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.key.public_key()))
        self.file.write_text(json.dumps({"keys": [{**published, "kid": "one", "use": "sig"}]}))
        self.port = free_port()
        self.broker = start_broker(
            config={
                "listeners": f"PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:{self.port}",
                "sasl.enabled.mechanisms": "OAUTHBEARER",
                "sasl.oauthbearer.jwks.endpoint.url": self.file.as_uri(),
                "sasl.oauthbearer.expected.issuer": ISSUER,
                "sasl.oauthbearer.expected.audience": "kafka",
                "sasl.oauthbearer.clock.skew.seconds": "0",
            }
        )
        self.bootstrap = f"127.0.0.1:{self.port}"
        self.issued = 0

    def token(self, seconds: float = 300, audience: str = "kafka", user: str = "alice") -> str:
        self.issued += 1
        claims = {"sub": user, "iss": ISSUER, "aud": audience, "exp": time.time() + seconds}
        return jwt.encode(claims, self.key, "RS256", {"kid": "one"})

    def settings(self, seconds: float = 300) -> dict:
        def issue(_config: str) -> tuple[str, float]:
            return self.token(seconds), time.time() + seconds

        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": "OAUTHBEARER",
            "oauth_cb": issue,
            "log_level": 0,
        }


@pytest.fixture
def issuing(start_broker: Callable[..., Broker], tmp_path: Path) -> Issuing:
    return Issuing(start_broker, tmp_path)


def test_clients_renew_their_tokens(issuing: Issuing) -> None:
    """librdkafka re-authenticates before its token expires, while it produces (KIP-368)."""
    failures: list[object] = []
    producer = confluent_kafka.Producer(
        {**issuing.settings(seconds=4), "on_delivery": lambda error, _: failures.append(error) if error else None}
    )
    end, sent = time.monotonic() + 9, 0
    while time.monotonic() < end:
        producer.produce("t", b"%d" % sent)
        producer.poll(0.02)
        sent += 1
    assert producer.flush(PATIENCE_S) == 0 and failures == []
    assert issuing.issued >= 2, "its token was renewed"

    class Provider(aiokafka.abc.AbstractTokenProvider):
        async def token(self) -> str:
            return issuing.token()

    async def story() -> int:
        consumer = aiokafka.AIOKafkaConsumer(
            "t",
            bootstrap_servers=issuing.bootstrap,
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauth_token_provider=Provider(),
            auto_offset_reset="earliest",
        )
        async with consumer:
            found = 0
            while found < sent:
                batches = await asyncio.wait_for(consumer.getmany(timeout_ms=1000), PATIENCE_S)
                found += sum(map(len, batches.values()))
            return found

    assert asyncio.run(story()) == sent


def present(kafka: KafkaConnection, token: str) -> object:
    kafka.call(17, 1, SaslHandshakeRequest(mechanism="OAUTHBEARER"))
    message = b"n,,\x01auth=Bearer " + token.encode() + b"\x01\x01"
    return kafka.call(36, 2, SaslAuthenticateRequest(auth_bytes=message))


def test_a_connection_ends_with_its_token(issuing: Issuing) -> None:
    with KafkaConnection(port=issuing.port) as kafka:
        found = present(kafka, issuing.token(seconds=5))
        assert found.error_code == 0 and 0 < found.session_lifetime_ms <= 5000
        began = time.monotonic()
        with pytest.raises(ConnectionEnded):
            while time.monotonic() < began + PATIENCE_S:
                kafka.call(3, 12, MetadataRequest())


@pytest.mark.parametrize("claim", [{"audience": "another"}, {"user": "x" * 256}])
def test_a_refused_token_gets_the_error_of_rfc_7628(issuing: Issuing, claim: dict[str, str]) -> None:
    with KafkaConnection(port=issuing.port) as kafka:
        found = present(kafka, issuing.token(**claim))
        assert found.error_code == 0 and json.loads(found.auth_bytes) == {"status": "invalid_token"}
        found = kafka.call(36, 2, SaslAuthenticateRequest(auth_bytes=b"\x01"))
        assert found.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
        with pytest.raises(ConnectionEnded):
            kafka.call(3, 12, MetadataRequest())
