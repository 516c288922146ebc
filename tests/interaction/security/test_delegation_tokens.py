"""Clients that authenticate with a delegation token, compared with the password of its owner."""

from __future__ import annotations

import base64
import json
import pickle
import re
import shlex
import time
from pathlib import Path

import confluent_kafka
import pytest
from click.testing import CliRunner

from mqd.cli.main import cli
from mqd.protocol import messages as m
from mqd.protocol.errors import ErrorCode
from mqd.security import client
from mqd.spark import driver, reading
from mqd.spark.options import source_options
from mqd.spark.tokens import DelegationToken
from mqd.spark.wire import MqdReadError
from tests.broker import Broker
from tests.interaction.security.secured import Secured
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import PATIENCE_S

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
    client.security_from_properties(known).authenticate(lambda key, request, version: kafka.call(key, version, request))
    return kafka


def create(kafka: KafkaConnection, **more) -> tuple[m.CreateDelegationTokenResponse, str]:
    """The response and the token's password."""
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
        token, password = create(owner, max_lifetime_ms=5000)
    with connect(secured, token.token_id, password, True) as kafka:
        assert kafka.call(METADATA, 12, m.MetadataRequest(topics=None)).brokers
        with pytest.raises(ConnectionEnded):
            while time.time() < token.max_timestamp_ms / 1000 + PATIENCE_S:
                kafka.call(METADATA, 12, m.MetadataRequest(topics=None))
                time.sleep(0.02)
        assert time.time() > token.max_timestamp_ms / 1000 - 0.1, "it ended before its token"
    with pytest.raises(client.NotAuthenticated):
        connect(secured, token.token_id, password, True)


def test_librdkafka_uses_a_token_as_user_and_password(secured: Secured) -> None:
    with connect(secured) as owner:
        token, password = create(owner)
    settings = secured.client(token.token_id, "SCRAM-SHA-512", password)
    producer = confluent_kafka.Producer(settings)
    failed: list[object] = []
    producer.produce("by-token", b"value", on_delivery=lambda error, _: failed.append(error))
    assert producer.flush(60) == 0 and failed == [None]


# -- mqd token -------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"


class Commands:
    def __init__(self, secured: Secured, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self._directory = monkeypatch, directory
        monkeypatch.setenv("MQD_BOOTSTRAP", secured.bootstrap)
        monkeypatch.chdir(directory)
        for user in ("alice", "bob"):
            text = "".join(f"{name}={value}\n" for name, value in secured.client(user).items() if name[0] != "l")
            (directory / user).write_text(text)

    def run(self, *words: str, user: str = "alice") -> tuple[int, str]:
        self._monkeypatch.setenv("MQD_CLIENT_CONFIG", str(self._directory / user))
        result = CliRunner().invoke(cli, words)
        return result.exit_code, result.output

    def ok(self, *words: str, **more: str) -> str:
        code, said = self.run(*words, **more)
        assert code == 0, said
        return said

    def listed(self, user: str = "alice") -> dict[str, dict]:
        return {one["id"]: one for one in json.loads(self.ok("token", "list", "--format", "json", user=user))}


@pytest.fixture
def commands(secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(secured, tmp_path, monkeypatch)


def test_the_commands_of_the_page(commands: Commands, tmp_path: Path) -> None:
    block = re.search(r"^(mqd token create.*?)^```", PAGE.read_text(), re.M | re.S)
    assert block is not None
    said = [commands.ok(*shlex.split(line)[1:]) for line in block[1].splitlines()]
    token_id = re.search(r"token (\S+) of User:alice", said[0])[1]  # type: ignore[index]
    assert token_id in said[-1] and "password" not in said[0]
    assert (tmp_path / "job.properties").stat().st_mode & 0o777 == 0o600
    code, said_to_token = commands.run("token", "list", user="job.properties")
    assert code == 1 and "DELEGATION_TOKEN_REQUEST_NOT_ALLOWED" in said_to_token
    assert commands.listed()[token_id]["renewers"] == ["User:ren"]
    commands.ok("token", "renew", token_id, "--for", "90s")
    assert commands.listed()[token_id]["expires_ms"] < (time.time() + 91) * 1000
    commands.ok("token", "expire", token_id, "--in", "5s")
    commands.ok("token", "expire", token_id)
    code, gone = commands.run("token", "expire", token_id)
    assert code == 1 and "mqd token list" in gone
    assert token_id not in commands.listed()


def test_a_token_for_another_user(commands: Commands) -> None:
    code, refused = commands.run("token", "create", "--owner", "alice", user="bob")
    assert code == 1 and "DELEGATION_TOKEN_AUTHORIZATION_FAILED" in refused
    commands.ok("acl", "allow", "bob", "create-tokens", "user/alice")
    made = json.loads(commands.ok("token", "create", "--owner", "alice", "--format", "json", user="bob"))
    assert made["owner"] == "User:alice" and commands.listed("bob")[made["id"]]["requester"] == "User:bob"
    java = Path("java.properties")
    commands.ok("token", "create", "--out-format", "java", "-o", str(java))
    assert 'tokenauth="true"' in java.read_text()


# -- Spark -----------------------------------------------------------------------------------------


def spark_options(secured: Secured, user: str = "alice") -> dict[str, str]:
    known = secured.client(user)
    return {
        "kafka.bootstrap.servers": secured.bootstrap,
        "kafka.security.protocol": secured.protocol,
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.jaas.config": client.jaas_config("plain.PlainLoginModule", user, known["sasl.password"]),
        "subscribe": "by-token-spark",
    }


def test_a_query_reads_with_a_token_and_without_a_password(secured: Secured, caplog: pytest.LogCaptureFixture) -> None:
    """The driver's part and an executor's, without Spark's JVM."""
    values = [b"one", b"two"]
    producer = confluent_kafka.Producer(secured.client("alice"))
    for value in values:
        producer.produce("by-token-spark", value)
    assert producer.flush(60) == 0
    with connect(secured) as owner, DelegationToken(spark_options(secured)) as token:
        password = spark_options(secured)["kafka.sasl.jaas.config"].split('"')[3]
        assert password not in repr(token.options) and token.options["subscribe"] == "by-token-spark"
        pickled = pickle.dumps(source_options(token.options, streaming=False))
        assert password.encode() not in pickled
        options = pickle.loads(pickled)
        tasks = driver.plan_batch(options)
        found = [
            row for task in tasks for batch in reading.read_range(options, ("value",), task) for row in batch["value"]
        ]
        assert [one.as_py() for one in found] == values
        token.renew()
        tokens = owner.call(DESCRIBE, 3, m.DescribeDelegationTokenRequest(owners=None)).tokens
        assert token.expires_ms in [one.expiry_timestamp for one in tokens if one.token_id == token.token_id]
    assert not caplog.records
    with pytest.raises(MqdReadError, match="not authenticated"):
        driver.plan_batch(options)
