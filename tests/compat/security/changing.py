"""Brokers with every mechanism, whose certificates, keys, passwords and tokens change and whose
processes are killed on the test's request.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import confluent_kafka
import confluent_kafka.admin
import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from mqd.base import cluster_key
from mqd.protocol import messages as m
from mqd.security import client, pki
from tests.certificates import Authority
from tests.cluster import Cluster, Member
from tests.compat.security.pairs import Way
from tests.interaction.security.secured import set_password
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually
from tests.unit.security.host_files import NOW, authority, config_of, write

PATIENCE_S = 240
ISSUER = "https://issuer.example"
TOKEN_S = 20  # clients get another one before it expires
PORTS = {"SASL_SSL": 3, "SASL_PLAINTEXT": 4, "SSL": 5}  # after the plain one
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER")
TOKEN = "token"  # a delegation token, by SCRAM-SHA-256
CREATE_TOKEN, EXPIRE_TOKEN = 38, 40
DYING = ("worker", "acceptor", "controller")


def _password_of(token: m.CreateDelegationTokenResponse) -> str:
    return base64.b64encode(token.hmac).decode()


class Issuer:
    """Signs tokens; its public keys are in a file, the old one beside the new one."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.token_file = folder / "keys.json", folder / "token"
        self._keys: list[tuple[str, ec.EllipticCurvePrivateKey]] = []
        self._over = threading.Event()
        self.change()
        self._thread = threading.Thread(target=self._renew, daemon=True)
        self._thread.start()

    def change(self) -> None:
        self._keys = [*self._keys[-1:], (secrets.token_hex(4), ec.generate_private_key(ec.SECP256R1()))]
        published = []
        for kid, key in self._keys:
            made = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key()))
            published.append({**made, "kid": kid, "use": "sig"})
        write(self.keys, json.dumps({"keys": published}).encode())

    def token(self) -> tuple[str, float]:
        kid, key = self._keys[-1]
        now = time.time()
        claims = {"sub": "alice", "iss": ISSUER, "aud": "kafka", "iat": int(now), "exp": now + TOKEN_S}
        return jwt.encode(claims, key, "ES256", {"kid": kid}), now + TOKEN_S

    def _renew(self) -> None:
        """The file for clients that read it, always with a fresh token."""
        while True:
            write(self.token_file, self.token()[0].encode())
            if self._over.wait(1):
                return

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class Changing(Cluster):
    """One broker, or three that require certificates of each other."""

    def __init__(self, directory: Path, count: int) -> None:
        super().__init__(directory, count, workers=2 if count == 1 else 1)
        self.folder, self.count = directory, count
        self.ca, self.clients = Authority("Broker CA"), [Authority("Client CA")]
        self.ca_file = self.ca.write(directory / "ca.pem")
        self.issuer = Issuer(directory)
        self.key = directory / "cluster.key"
        cluster_key.make(self.key)
        self._passwords: dict[str, str] = {}
        self._tokens: dict[str, m.CreateDelegationTokenResponse] = {}
        secret = secrets.token_urlsafe(12)
        self._key_steps = self._deaths = 0
        self.changes: Counter[str] = Counter()
        self._trust()
        for node_id, member in self.brokers.items():
            member.start_seconds = PATIENCE_S
            listeners = [f"{name}://{member.address}:{member.port + more}" for name, more in PORTS.items()]
            member.config |= {
                **config_of(directory / f"host-{node_id}", pki.issue_host(authority(), node_id, NOW), node_id),
                "cluster.key.file": str(self.key),
                "listeners": ",".join([member.config["listeners"], *listeners]),
                "ssl.keystore.location": str(self._certify(member)),
                "listener.name.ssl.ssl.client.auth": "required",
                "listener.name.ssl.ssl.truststore.location": str(directory / "clients.pem"),
                "sasl.enabled.mechanisms": ",".join(MECHANISMS),
                "sasl.oauthbearer.jwks.endpoint.url": self.issuer.keys.as_uri(),
                "sasl.oauthbearer.expected.issuer": ISSUER,
                "sasl.oauthbearer.expected.audience": "kafka",
                "delegation.token.secret.key": secret,
            }

    def stop(self) -> None:
        super().stop()
        self.issuer.close()

    def _certify(self, member: Member) -> Path:
        file = self.folder / f"broker-{member.node_id}.pem"
        identity = self.ca.issue("broker", member.address, "localhost")
        write(file, identity.key_pem() + identity.chain_pem())
        return file

    def _trust(self) -> None:
        """Trusts clients of the last two authorities."""
        trusted = b"".join(one.write(self.folder / "one.pem").read_bytes() for one in self.clients[-2:])
        write(self.folder / "clients.pem", trusted)

    # -- what clients get --------------------------------------------------------------------------

    def topics(self, names: Sequence[str]) -> None:
        admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": self.bootstrap})
        own = {"min.insync.replicas": "2"} if self.count > 1 else {}
        topics = [confluent_kafka.admin.NewTopic(name, 3, self.count, config=own) for name in names]
        for made in admin.create_topics(topics).values():
            made.result(PATIENCE_S)

    def values(self, topic: str) -> Counter[str]:
        """All values of the topic."""
        consumer = confluent_kafka.Consumer({"bootstrap.servers": self.bootstrap, "group.id": "the test's own"})
        found: Counter[str] = Counter()
        try:
            places = [confluent_kafka.TopicPartition(topic, partition, 0) for partition in range(3)]
            ends = {place.partition: consumer.get_watermark_offsets(place, PATIENCE_S)[1] for place in places}
            consumer.assign(places)
            end = time.monotonic() + PATIENCE_S
            while found.total() < sum(ends.values()):
                assert time.monotonic() < end, (found.total(), ends)
                found.update(one.value().decode() for one in consumer.consume(1000, 0.2) if one.error() is None)
            return found
        finally:
            consumer.close()

    def way(self, protocol: str, mechanism: str, user: str, folder: Path) -> Way:
        addresses = [f"{member.address}:{member.port + PORTS[protocol]}" for member in self]
        settings = {"bootstrap.servers": ",".join(addresses), "security.protocol": protocol}
        if protocol != "SASL_PLAINTEXT":
            settings["ssl.ca.location"] = str(self.ca_file)
        if protocol == "SSL":
            own = str(self.clients[-1].issue(user).write(folder / f"{user}.pem"))
            settings |= {"ssl.certificate.location": own, "ssl.key.location": own}
        else:
            settings["sasl.mechanisms"] = "SCRAM-SHA-256" if mechanism == TOKEN else mechanism
            if mechanism != "OAUTHBEARER" and user not in self._passwords:
                self._set_password(user)
            if mechanism == TOKEN:
                if user not in self._tokens:
                    self._create_token(user)
                made = self._tokens[user]
                settings |= {"sasl.username": made.token_id, "sasl.password": _password_of(made)}
            elif mechanism != "OAUTHBEARER":
                settings |= {"sasl.username": user, "sasl.password": self._passwords[user]}
        return Way(settings, self.issuer.token, self.issuer.token_file, folder, mechanism == TOKEN)

    def _set_password(self, user: str) -> None:
        """On any host; the others get it within the bound of their lease."""
        self._passwords[user] = secrets.token_urlsafe(12)
        self._wait("the controller takes a password", lambda: self._tried(self.brokers[1], user))
        self._wait_until_accepted(user, self._passwords[user])

    def _tried(self, member: Member, user: str) -> bool:
        try:
            set_password(member, user, self._passwords[user])
            return True
        except (OSError, EOFError):
            return False

    def _create_token(self, user: str) -> None:
        request = m.CreateDelegationTokenRequest(max_lifetime_ms=-1)
        with self._authenticated(self.brokers[1], user, self._passwords[user]) as kafka:
            made = kafka.call(CREATE_TOKEN, 3, request)
        assert made.error_code == 0
        self._tokens[user] = made
        self._wait_until_accepted(made.token_id, _password_of(made))

    def _wait_until_accepted(self, user: str, password: str) -> None:
        words = f"every host accepts {user}"
        self._wait(words, lambda: not any(self._refuses(member, user, password) for member in self))

    # -- changes ---------------------------------------------------------------------------------

    def change_certificates(self) -> None:
        """The certificates of listeners, and of hosts for each other."""
        for node_id, member in self.brokers.items():
            self._certify(member)
            pair = pki.issue_host(authority(), node_id, NOW)
            write(self.folder / f"host-{node_id}" / "host.pem", pair.key + pair.certificate)
        self.changes["certificates"] += 1

    def change_cluster_key(self) -> None:
        """One of the three steps; each host has applied the one before."""
        if self._key_steps:
            words = f"taken: {self._key_steps} steps of the cluster's key"
            self._wait(words, lambda: all(self._taken(member) for member in self))
        self._loaded_before = {member.node_id: self._loads(member) for member in self}
        cluster_key.rotate(self.key)
        self._key_steps += 1
        self.changes["steps of the cluster's key"] += 1

    @staticmethod
    def _loads(member: Member) -> int:
        return sum(
            file.read_text(errors="replace").count("cluster key reloaded")
            for file in (member.data_dir / "logs").glob("*.log")
        )

    def _taken(self, member: Member) -> bool:
        """Applied by its controller, acceptor and workers, unless they were started since."""
        return self._loads(member) > self._loaded_before[member.node_id]

    def change_proofs(self, protocol: str, mechanism: str, users: Sequence[str]) -> None:
        """Changes the users' passwords, the authority of their certificates, or the key that signs
        their tokens.
        """
        if protocol == "SSL":
            self.clients.append(Authority(f"Client CA {len(self.clients)}"))
            self._trust()
            self.changes["authorities of clients"] += 1
        elif mechanism == "OAUTHBEARER":
            self.issuer.change()
            self.changes["keys of the issuer"] += 1
        elif mechanism == TOKEN:
            for user in users:
                old = self._tokens[user]
                self._create_token(user)
                request = m.ExpireDelegationTokenRequest(hmac=old.hmac, expiry_time_period_ms=-1)
                with self._authenticated(self.brokers[1], user, self._passwords[user]) as kafka:
                    assert kafka.call(EXPIRE_TOKEN, 2, request).error_code == 0
                self._wait_until_refused(old.token_id, _password_of(old))
                self.changes["delegation tokens"] += 1
        else:
            before = dict(self._passwords)
            for user in users:
                self._set_password(user)
                self.changes["passwords"] += 1
            self._wait_until_refused(users[-1], before[users[-1]])

    def _wait_until_refused(self, user: str, password: str) -> None:
        words = f"every host refuses what {user} had before"
        self._wait(words, lambda: all(self._refuses(member, user, password) for member in self))

    def _refuses(self, member: Member, user: str, password: str) -> bool:
        try:
            with self._authenticated(member, user, password):
                return False
        except client.NotAuthenticated:
            return True

    @staticmethod
    @contextlib.contextmanager
    def _authenticated(member: Member, user: str, password: str) -> Iterator[KafkaConnection]:
        settings = {"sasl.mechanism": "SCRAM-SHA-256", "sasl.username": user, "sasl.password": password}
        own = client.security_from_properties({"security.protocol": "SASL_PLAINTEXT", **settings})
        with KafkaConnection.connect(member.address, member.port + PORTS["SASL_PLAINTEXT"]) as kafka:
            own.authenticate(lambda key, request, version: kafka.call(key, version, request))
            yield kafka

    def kill(self) -> None:
        """Kills one process, a different one each time."""
        self.wait_until_ready()
        role = DYING[self._deaths % len(DYING)]
        member = self.brokers[1 + self._deaths // len(DYING) % self.count]
        self._deaths += 1
        for pid in member.pids(role)[:1]:
            os.kill(pid, signal.SIGKILL)
            self.changes[f"{role}s killed"] += 1

    def wait_until_ready(self) -> None:
        for member in self:
            member.wait_until_ready(PATIENCE_S)

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        eventually(condition, lambda: f"{what}\n{self.logs()[-6000:]}", PATIENCE_S)
