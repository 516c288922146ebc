"""No secret of a running broker is visible to others: in arguments, environments, logs,
configurations that clients can read, or files other than the secret's own.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource

from mqd.base import paths
from mqd.cli import secure
from tests.broker import LOOKED_INTO, Broker
from tests.certificates import Authority
from tests.interaction.security.secured import SecureBroker, done, mqd

KEY_PASSWORD, STORE_PASSWORD = "the-passphrase-of-the-key", "the-password-of-the-store"
USER_PASSWORD, WRONG_PASSWORD = "alice-was-here-2026", "not-the-password-of-alice"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """With passwords given in every possible way: a referenced file, a referenced variable, a
    variable of its own.
    """
    place = tmp_path_factory.mktemp("secrets")
    authority = Authority("elsewhere")
    keystore = authority.issue("metrics").write(place / "metrics.pem", KEY_PASSWORD)
    (place / "secrets.properties").write_text(f"key={KEY_PASSWORD}\n")
    config = {
        "listeners": "SASL_SSL://127.0.0.1:0",
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN",
        "metrics.listener": "https://localhost:0",
        "listener.name.metrics.ssl.keystore.location": str(keystore),
        "listener.name.metrics.ssl.key.password": f"${{file:{place}/secrets.properties:key}}",
        "ssl.truststore.password": "${env:STORE_PASSWORD}",
        "logging.level": "debug",
    }
    environment = {"STORE_PASSWORD": STORE_PASSWORD, "MQD_SSL_KEYSTORE_PASSWORD": STORE_PASSWORD}
    authority.write(place / "ca.pem")
    with SecureBroker(place / "data", config=config, environment=environment) as found:
        yield found


def secrets_of(broker: Broker) -> dict[str, bytes]:
    places = secure.files(broker.data_dir)
    admin = dict(line.split("=", 1) for line in places.admin.read_text().splitlines())
    keys = [line for line in places.broker.read_bytes().splitlines() if b"-----" not in line]
    return {
        "passphrase": KEY_PASSWORD.encode(),
        "password of the store": STORE_PASSWORD.encode(),
        "alice's password": USER_PASSWORD.encode(),
        "a wrong password": WRONG_PASSWORD.encode(),
        "the admin's password": admin["sasl.password"].encode(),
        "the cluster's key": places.key.read_bytes().strip(),
        "the token of the metrics": places.metrics_token.read_bytes().strip(),
        "the broker's key": keys[1],
    }


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended
                found += map(int, (task / "children").read_text().split())
    return found


def test_no_secret_can_be_found(broker: Broker) -> None:
    places = secure.files(broker.data_dir)
    done(mqd(broker, "user", "create", "alice", "--password-stdin", stdin=f"{USER_PASSWORD}\n"))
    done(mqd(broker, "topic", "create", "orders"))
    admin = dict(line.split("=", 1) for line in places.admin.read_text().splitlines())
    common = {**admin, "bootstrap.servers": f"localhost:{broker.port}", "log_level": 0}
    for user, password in (("alice", WRONG_PASSWORD), ("nobody-we-know", WRONG_PASSWORD), ("alice", USER_PASSWORD)):
        for mechanism in ("SCRAM-SHA-512", "PLAIN"):
            client = {**common, "sasl.username": user, "sasl.password": password, "sasl.mechanisms": mechanism}
            with contextlib.suppress(confluent_kafka.KafkaException):
                AdminClient(client).list_topics(timeout=3)
    asking = AdminClient(common)
    described = asking.describe_configs([ConfigResource("broker", "1")])
    entries = {name: entry for future in described.values() for name, entry in future.result(timeout=30).items()}
    assert entries["ssl.keystore.password"].is_sensitive and entries["ssl.keystore.password"].value is None
    said = {
        "DescribeConfigs": repr({name: (entry.value, entry.synonyms) for name, entry in entries.items()}).encode(),
        "mqd config": done(mqd(broker, "config", "get", "broker/1", "--all")).encode(),
        "mqd status": done(mqd(broker, "status", "--data-dir", str(broker.data_dir))).encode(),
        "mqd user": done(mqd(broker, "user", "list")).encode(),
    }
    assert b"alice" in said["mqd user"]
    assert broker.process is not None
    for pid in descendants(broker.process.pid):
        said[f"arguments of {pid}"] = Path(f"/proc/{pid}/cmdline").read_bytes()
        if pid != broker.process.pid:  # its environment is the one it was started with
            said[f"environment of {pid}"] = Path(f"/proc/{pid}/environ").read_bytes()
    assert len([name for name in said if name.startswith("environment")]) == 5
    for file in broker.data_dir.rglob("*"):
        if file.is_file() and places.directory not in file.parents:
            with contextlib.suppress(FileNotFoundError):  # such as the temporary file of a checkpoint
                said[str(file.relative_to(broker.data_dir))] = file.read_bytes()
    assert {"logs/mqd-acceptor.log", "logs/audit.log", "up.stderr"} <= said.keys()
    secrets = secrets_of(broker)
    assert {
        (name, where) for name, secret in secrets.items() for where, text in said.items() if secret in text
    } == set()
    assert not paths.layout(broker.data_dir).resolved_config.exists()


def test_the_search_finds_a_secret_that_is_visible(broker: Broker) -> None:
    """The environment with which the broker was started contains one, and only its user may read
    it.
    """
    assert broker.process is not None
    environment = Path(f"/proc/{broker.process.pid}/environ")
    assert STORE_PASSWORD.encode() in environment.read_bytes()
    if not LOOKED_INTO:
        assert environment.stat().st_uid == 0  # not dumpable: owned by root, from the point of view of other users


def test_metrics_require_the_token(broker: Broker) -> None:
    url = broker.status()["metrics_url"]
    assert url.startswith("https://localhost:")
    trusting = ssl.create_default_context(cafile=str(broker.data_dir.parent / "ca.pem"))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(url, timeout=60, context=trusting)
    token = secure.files(broker.data_dir).metrics_token.read_text().strip()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60, context=trusting) as response:
        assert b"mqd_worker_running" in response.read()


def test_an_unusable_token_stops_the_start(tmp_path: Path) -> None:
    words = ["up", "--data-dir", str(tmp_path / "data"), "--port", "0", "--set", f"metrics.token.file={tmp_path}/none"]
    found = subprocess.run(
        [sys.executable, "-m", "mqd.cli.main", *words], capture_output=True, text=True, timeout=60, env={**os.environ}
    )
    assert found.returncode == 2 and "metrics.token.file" in found.stderr and "cannot be read" in found.stderr
