"""Additions of `--secured` to the cluster of a chaos run: an authorizer, TLS between hosts, a
listener with TLS and passwords for the clients (User:app), another for guests (guests/), which must
re-authenticate every REAUTHENTICATE_MS, and files that change while everything runs. The tests' own
requests come from a super user with a certificate. No listener off loopback lacks authentication.
"""

from __future__ import annotations

import datetime
import ssl
import time
from collections.abc import Mapping
from pathlib import Path

from mqd.base import cluster_key
from mqd.security import pki
from tests.chaos.network import Network
from tests.kafka_connection import KafkaConnection
from tests.unit.security.host_files import write

PORT, GUESTS_PORT = 9096, 9097
GUARDED, GUARDED_PARTITIONS = "guarded", 3
APP, APP_PASSWORD = "app", "the clients' password"
OPERATOR = "operator"
REAUTHENTICATE_MS = 10_000
BOUND_MS = 5_500  # broker.session.timeout.ms: the bound on revocations in docs/security.md
KEY_STEP_SECONDS = 30.0  # hosts that were stopped for a fault have reloaded the key by then
CONFIG = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super.users": f"User:CN={OPERATOR}",
    "listener.security.protocol.map": "OPERATOR:SSL,SASL_SSL:SASL_SSL,GUESTS:SASL_SSL",
    "listener.name.operator.ssl.client.auth": "required",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN",
    "ssl.keystore.type": "PEM",
    "listener.name.guests.connections.max.reauth.ms": str(REAUTHENTICATE_MS),
    "connection.failed.authentication.delay.ms": "0",
    "broker.session.timeout.ms": str(BOUND_MS),
    "cluster.tls": "required",
}


class Security:
    """The files and their changes. They are not on the hosts' disks, which faults remove."""

    def __init__(self, directory: Path, network: Network) -> None:
        self._directory, self._network = directory, network
        self._authority = pki.make_authority("mqd chaos", _now())
        directory.mkdir(parents=True)
        write(self.ca, self._authority.certificate)
        cluster_key.make(self.key)
        operator = pki.issue(self._authority, OPERATOR, [], _now())
        write(self._operator, operator.key + operator.certificate)
        self.operator_file.write_text("".join(f"{name}={value}\n" for name, value in self.operator().items()))
        self._key_steps, self._stepped_at = 0, 0.0

    @property
    def ca(self) -> Path:
        return self._directory / "ca.pem"

    @property
    def _operator(self) -> Path:
        return self._directory / "operator.pem"

    @property
    def operator_file(self) -> Path:
        """For `mqd --client-config`."""
        return self._directory / "operator.properties"

    @property
    def key(self) -> Path:
        return self._directory / "cluster.key"

    def config(self, number: int) -> dict[str, str]:
        address = self._network.address(f"n{number}")
        folder = self._directory / f"n{number}"
        if not folder.exists():
            folder.mkdir()
            self.renew(number)
        return {
            **CONFIG,
            "listeners": f"OPERATOR://{address}:9092,SASL_SSL://{address}:{PORT},GUESTS://{address}:{GUESTS_PORT}",
            "listener.name.operator.ssl.truststore.type": "PEM",
            "listener.name.operator.ssl.truststore.location": str(self.ca),
            "cluster.key.file": str(self.key),
            "ssl.keystore.location": str(folder / "broker.pem"),
            "cluster.tls.certificate.file": str(folder / "host.pem"),
            "cluster.tls.ca.file": str(self.ca),
        }

    def renew(self, number: int) -> None:
        """Creates new keys and certificates of this host, for its clients and for other hosts."""
        folder, address = self._directory / f"n{number}", self._network.address(f"n{number}")
        broker = pki.issue(self._authority, f"broker {number}", [address], _now())
        host = pki.issue_host(self._authority, number, _now())
        write(folder / "broker.pem", broker.key + broker.certificate)
        write(folder / "host.pem", host.key + host.certificate)

    def rotate_key(self) -> str:
        """The next of the three steps, unless the previous one was just made."""
        if time.monotonic() - self._stepped_at < KEY_STEP_SECONDS:
            return "the cluster's key has just changed"
        cluster_key.rotate(self.key)
        self._key_steps, self._stepped_at = self._key_steps + 1, time.monotonic()
        return f"step {self._key_steps} of changes of the cluster's key"

    def operator(self) -> dict[str, str]:
        """librdkafka's settings of the super user."""
        return {
            "security.protocol": "SSL",
            "ssl.ca.location": str(self.ca),
            "ssl.certificate.location": str(self._operator),
            "ssl.key.location": str(self._operator),
        }

    def login(self) -> dict[str, str]:
        """librdkafka's settings of the clients."""
        return {
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(self.ca),
            "sasl.mechanisms": "SCRAM-SHA-256",
            "sasl.username": APP,
            "sasl.password": APP_PASSWORD,
        }


def connect(host: str, port: int, settings: Mapping[str, str], timeout_s: float) -> KafkaConnection:
    """`settings`: librdkafka's; over TLS if they name a CA, with the certificate that they name."""
    kafka = KafkaConnection(host, port, timeout_s=timeout_s)
    if "ssl.ca.location" not in settings:
        return kafka
    try:
        context = ssl.create_default_context(cafile=settings["ssl.ca.location"])
        if certificate := settings.get("ssl.certificate.location"):
            context.load_cert_chain(certificate)
        kafka.socket = context.wrap_socket(kafka.socket, server_hostname=host)
    except OSError:
        kafka.close()
        raise
    return kafka


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
