"""A broker with users: a plain listener on the first port, for the test itself, and one with SASL."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from mqd.base.paths import layout
from mqd.cli import local_controller, secure
from mqd.cluster.host import messages
from mqd.cluster.metadata.records import ScramCredential
from mqd.security import scram
from tests.broker import Broker
from tests.kafka_connection import KafkaConnection
from tests.ports import free_port
from tests.preloaded import PRELOADED

PASSWORDS = {"alice": "alice's s3cret", "bob": "bob's, s3cret="}


def set_password(broker: Broker, user: str, password: str) -> None:
    """Through the controller's socket, as the broker's own user."""
    credentials = []
    for mechanism, number in scram.MECHANISM_NUMBERS.items():
        made = scram.make_verifier(mechanism, password)
        credentials.append(ScramCredential(user, number, made.salt, made.iterations, made.stored_key, made.server_key))
    response = local_controller.change(
        layout(broker.data_dir).controller_socket, messages.AlterScramCredentials([], credentials), 20
    )
    assert not any(one.error for one in response.users), response


class Secured:
    def __init__(
        self, start_broker: Callable[..., Broker], protocol: str = "SASL_PLAINTEXT", ca: str = "", **config: str
    ) -> None:
        """`ca`: the CA file that clients trust, where the protocol has TLS."""
        self.port, self.protocol, self.ca = free_port(), protocol, ca
        self.broker = start_broker(
            config={
                "listeners": f"PLAINTEXT://127.0.0.1:0,{protocol}://127.0.0.1:{self.port}",
                "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512,PLAIN",
                **config,
            }
        )
        for user, password in PASSWORDS.items():
            self.set_password(user, password)

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.port}"

    def set_password(self, user: str, password: str) -> None:
        set_password(self.broker, user, password)

    def connect(self, **options) -> KafkaConnection:
        """To the listener with SASL, without authenticating."""
        return KafkaConnection("127.0.0.1", self.port, **options)

    def client(self, user: str = "alice", mechanism: str = "SCRAM-SHA-256", password: str | None = None) -> dict:
        """librdkafka's settings."""
        return {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.protocol,
            "sasl.mechanisms": mechanism,
            "sasl.username": user,
            "sasl.password": PASSWORDS[user] if password is None else password,
            "log_level": 0,
            **({"ssl.ca.location": self.ca} if self.ca else {}),
        }


class SecureBroker(Broker):
    """A broker started by `mqd up --secure`."""

    def command(self) -> list[str]:
        return [*super().command(), "--secure"]


def mqd(
    broker: Broker, *words: str, stdin: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command as the admin that `mqd up --secure` created."""
    return PRELOADED.run(  # without a terminal: passwords are read from stdin
        "-b",
        f"localhost:{broker.port}",
        *words,
        given=stdin,
        cwd=cwd,
        environment={**os.environ, "MQD_CLIENT_CONFIG": str(secure.files(broker.data_dir).admin)},
    )


def done(found: subprocess.CompletedProcess[str]) -> str:
    """Returns its output; fails unless the exit code is 0."""
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout
