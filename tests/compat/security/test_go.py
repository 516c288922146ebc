"""franz-go over TLS and with every SASL mechanism it knows: transactions, a group, a client without
the proof.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from tests.broker import Broker, free_port
from tests.certificates import Authority
from tests.compat.go_client import build_go_client, round_trip
from tests.interaction.security.secured import PASSWORDS, set_password
from tests.interaction.security.test_cluster_secure import secure_cluster

pytestmark = pytest.mark.slow  # Go compiles its client for a minute of CPU
ISSUER = "https://issuer.example"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")


class Secured:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.ca, self.clients = Authority("Broker CA"), Authority("Client CA")
        self.ca_file = self.ca.write(root / "ca.pem")
        self.signer = ec.generate_private_key(ec.SECP256R1())
        published = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self.signer.public_key()))
        (root / "keys.json").write_text(json.dumps({"keys": [{**published, "kid": "one", "use": "sig"}]}))
        self.ports = {name: free_port() for name in ("SASL_SSL", "SSL")}
        listeners = [f"{name}://127.0.0.1:{port}" for name, port in self.ports.items()]
        self.broker = Broker(
            root / "data",
            config={
                "listeners": ",".join(["PLAINTEXT://127.0.0.1:0", *listeners]),
                "ssl.keystore.location": str(self.ca.issue("broker").write(root / "broker.pem")),
                "listener.name.ssl.ssl.client.auth": "required",
                "listener.name.ssl.ssl.truststore.location": str(self.clients.write(root / "clients.pem")),
                "sasl.enabled.mechanisms": ",".join(MECHANISMS),
                "sasl.oauthbearer.jwks.endpoint.url": (root / "keys.json").as_uri(),
                "sasl.oauthbearer.expected.issuer": ISSUER,
                "sasl.oauthbearer.expected.audience": "kafka",
                "connections.max.reauth.ms": "2000",
            },
        )

    def token(self) -> str:
        claims = {"sub": "alice", "iss": ISSUER, "aud": "kafka", "exp": time.time() + 300}
        return jwt.encode(claims, self.signer, "ES256", {"kid": "one"})


@pytest.fixture(scope="module")
def program() -> Path:
    return build_go_client()


@pytest.fixture(scope="module")
def secured(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("go"))
    with made.broker:
        set_password(made.broker, "alice", PASSWORDS["alice"])
        yield made


@pytest.mark.timeout(700)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_mechanism_over_tls(program: Path, secured: Secured, mechanism: str) -> None:
    words = {"seeds": f"127.0.0.1:{secured.ports['SASL_SSL']}", "ca": secured.ca_file, "mechanism": mechanism}
    proof = secured.token() if mechanism == "OAUTHBEARER" else PASSWORDS["alice"]
    done = round_trip(program, **words, user="alice", password=proof, topic=f"go-{mechanism}")
    assert (done.returncode, done.stdout) == (0, "read 100\n"), done.stderr
    refused = round_trip(program, **words, user="alice", password="no.such.proof", topic="go-refused", seconds=5)
    assert refused.returncode == 1 and refused.stdout == "" and "auth" in refused.stderr, refused.stderr


def test_a_certificate_on_both_sides(program: Path, secured: Secured, tmp_path: Path) -> None:
    words = {"seeds": f"127.0.0.1:{secured.ports['SSL']}", "ca": secured.ca_file, "topic": "go-certificate"}
    done = round_trip(program, **words, cert=secured.clients.issue("alice").write(tmp_path / "alice.pem"))
    assert (done.returncode, done.stdout) == (0, "read 100\n"), done.stderr
    for name, more in {
        "no certificate": {},
        "a foreign one": {"cert": Authority("Other").issue("alice").write(tmp_path / "other.pem")},
    }.items():
        refused = round_trip(program, **words, **more, seconds=5)
        assert refused.returncode == 1 and refused.stdout == "", name


def test_three_brokers(program: Path, tmp_path: Path) -> None:
    """As `mqd cluster local --secure` makes them: SCRAM over TLS, the coordinators on several hosts."""
    with secure_cluster(tmp_path / "cluster") as (port, data_dir):
        admin = dict(
            line.split("=", 1)
            for line in (data_dir / "broker-1" / "secure" / "admin.properties").read_text().splitlines()
        )
        done = round_trip(
            program,
            seeds=",".join(f"127.0.0.{node_id}:{port}" for node_id in (1, 2, 3)),
            ca=admin["ssl.ca.location"],
            mechanism=admin.get("sasl.mechanisms", admin.get("sasl.mechanism")),
            user=admin["sasl.username"],
            password=admin["sasl.password"],
            topic="go-cluster",
            seconds=60,
        )
        assert (done.returncode, done.stdout) == (0, "read 100\n"), done.stderr
