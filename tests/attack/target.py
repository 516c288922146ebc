"""A secured broker as an operator would run it, with the needs of its attackers and witnesses: one
user with rights, one without any, an issuer of tokens, certificates of its own authority and of
another one.
"""

from __future__ import annotations

import collections
import json
import ssl
import time
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from mqd.base.paths import layout
from mqd.protocol.messages import CreateAclsRequest, CreateTopicsRequest
from mqd.security import client
from tests.broker import Broker
from tests.certificates import Authority
from tests.interaction.security.secured import set_password
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port

ADMIN, ALICE, MALLORY = "admin", "alice", "mallory"
PASSWORDS = {ADMIN: "admin's s3cret", ALICE: "alice's s3cret", MALLORY: "mallory's own"}
TOPICS = {"good": 3, "good-latency": 1}
SACRIFICE = "bad-sacrifice"  # its files are corrupted, segments included
ISSUER, AUDIENCE = "https://issuer.example", "kafka"
CREATE_TOPICS, CREATE_ACLS = 19, 30
ALLOW, ANY_HOST, OF_TOPIC, OF_GROUP, PREFIXED, LITERAL, ALL = 3, "*", 2, 3, 4, 3, 2


class SecuredConnection(KafkaConnection):
    """Over TLS, and authenticated by SCRAM."""

    def __init__(self, port: int, ca: Path, user: str, host: str = "127.0.0.1", timeout_s: float = 20.0) -> None:
        super().__init__(host, port, timeout_s=timeout_s)
        try:
            context = ssl.create_default_context(cafile=str(ca))
            self.socket = context.wrap_socket(self.socket, server_hostname=host)
            self.prove(user, PASSWORDS[user])
        except BaseException:
            self.socket.close()
            raise

    def prove(self, user: str, password: str, mechanism: str = "SCRAM-SHA-256") -> None:
        settings = {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}
        proof = client.security_from_properties({"security.protocol": "SASL_SSL", **settings})
        proof.authenticate(lambda key, request, version: self.call(key, version, request))


class Target:
    """`front_port`: the port given to its clients, possibly a proxy's."""

    def __init__(self, folder: Path, front_port: int) -> None:
        self.folder, self.front_port = folder, front_port
        folder.mkdir(parents=True, exist_ok=True)
        self.authority, self.foreign = Authority(), Authority("Somebody Else's CA")
        self.ca = self.authority.write(folder / "ca.pem")
        self.keystore = self.authority.issue("broker").write(folder / "broker.pem")
        self.issuer_key = rsa.generate_private_key(65537, 2048)
        self.keys = folder / "keys.json"
        published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(self.issuer_key.public_key()))
        self.keys.write_text(json.dumps({"keys": [{**published, "kid": "one", "use": "sig"}]}))
        self.wrong_clients = wrong_clients(self.authority, self.foreign, folder)
        self.received: list[bytes] = []  # a successful SCRAM exchange, as sent by its client
        self.proven: collections.deque[KafkaConnection] = collections.deque()  # mallory's, idle
        self.sasl_port, self.mutual_port, self.metrics_port = free_port(), free_port(), free_port()
        self.broker = Broker(folder / "data", config=self._config())
        self.broker.port = self.tls_port = free_port()

    def _config(self) -> dict[str, str]:
        return {
            "listeners": f"SASL_SSL://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:{self.sasl_port},SSL://127.0.0.1:{self.mutual_port}",
            "advertised.listeners": f"SASL_SSL://127.0.0.1:{self.front_port}",
            "authorizer.class.name": "standard",
            "super.users": f"User:{ADMIN}",
            "auto.create.topics.enable": "false",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.num.partitions": "4",
            "max.connections": "20000",
            "metrics.listener": f"http://127.0.0.1:{self.metrics_port}",
            "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN,OAUTHBEARER",
            "sasl.oauthbearer.jwks.endpoint.url": self.keys.as_uri(),
            "sasl.oauthbearer.expected.issuer": ISSUER,
            "sasl.oauthbearer.expected.audience": AUDIENCE,
            "ssl.keystore.location": str(self.keystore),
            "listener.name.ssl.ssl.client.auth": "required",
            "listener.name.ssl.ssl.truststore.location": str(self.ca),
        }

    def start(self) -> Target:
        self.broker.start()
        for user, password in PASSWORDS.items():
            set_password(self.broker, user, password)
        with self.connect(ADMIN) as admin:
            made = admin.call(
                CREATE_TOPICS,
                7,
                CreateTopicsRequest(
                    topics=[
                        CreateTopicsRequest.Topic(name=name, num_partitions=count, replication_factor=1)
                        for name, count in {**TOPICS, SACRIFICE: 2}.items()
                    ],
                    timeout_ms=30_000,
                ),
            )
            assert not any(one.error_code for one in made.topics), made
            rules = [(OF_TOPIC, "good"), (OF_GROUP, "good")]
            response = admin.call(
                CREATE_ACLS, 3, CreateAclsRequest(creations=[rule(kind, name, PREFIXED) for kind, name in rules])
            )
            assert not any(one.error_code for one in response.results), response
        return self

    def connect(self, user: str, port: int | None = None) -> SecuredConnection:
        return SecuredConnection(port or self.tls_port, self.ca, user)

    def librdkafka(self, user: str) -> dict[str, object]:
        """Settings of a client that connects through the proxy."""
        return {
            "bootstrap.servers": f"127.0.0.1:{self.front_port}",
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "SCRAM-SHA-256",
            "sasl.username": user,
            "sasl.password": PASSWORDS[user],
            "ssl.ca.location": str(self.ca),
        }

    def token(self, **claims: object) -> str:
        """A token of the issuer: valid unless `claims` change it."""
        now = time.time()
        good = {"sub": ALICE, "iss": ISSUER, "aud": AUDIENCE, "exp": now + 300, **claims}
        return jwt.encode(good, self.issuer_key, "RS256", {"kid": "one"})

    @property
    def local_socket(self) -> Path:
        return layout(self.broker.data_dir).client_socket


def rule(kind: int, name: str, pattern: int, user: str = ALICE, operation: int = ALL, permission: int = ALLOW):
    return CreateAclsRequest.AclCreation(
        resource_type=kind,
        resource_name=name,
        resource_pattern_type=pattern,
        principal=f"User:{user}",
        host=ANY_HOST,
        operation=operation,
        permission_type=permission,
    )


def wrong_clients(authority: Authority, foreign: Authority, folder: Path) -> dict[str, ssl.SSLContext]:
    """Clients with invalid certificates."""
    return {
        "none": _client(None),
        "foreign": _client(foreign.issue(ALICE).write(folder / "foreign.pem")),
        "late": _client(authority.issue(ALICE, days=-2).write(folder / "late.pem")),
    }


def _client(pem: Path | None) -> ssl.SSLContext:
    """Accepts any broker."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if pem is not None:
        context.load_cert_chain(str(pem))
    return context
