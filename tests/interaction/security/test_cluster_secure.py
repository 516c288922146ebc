"""`mqd cluster local --secure`: three brokers with one authority and one admin."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from mqd.cli import secure
from tests.polling import PATIENCE_S
from tests.ports import free_ports
from tests.preloaded import PRELOADED


@contextlib.contextmanager
def secure_cluster(data_dir: Path) -> Iterator[tuple[int, Path]]:
    """(port, data directory)"""
    port = free_ports(3)[0]
    command = ["cluster", "local", "--secure", "--brokers", "3", "--port", str(port), "--data-dir", str(data_dir)]
    process = subprocess.Popen(
        [sys.executable, "-m", "mqd.cli.main", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(PATIENCE_S), "the cluster is not ready"
        assert process.stdout.readline() == "3 brokers are ready:\n", process.stderr.read()
        yield port, data_dir
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    with secure_cluster(tmp_path / "cluster") as made:
        yield made


def test_one_admin_at_every_broker(cluster: tuple[int, Path]) -> None:
    port, data_dir = cluster
    admin = secure.files(data_dir / "broker-3").admin
    keys = {secure.files(data_dir / f"broker-{node_id}").key.read_bytes() for node_id in (1, 2, 3)}
    assert len(keys) == 1 and len(keys.pop()) > 40, "hosts prove themselves by a key of their own"
    settings = dict(line.split("=", 1) for line in admin.read_text().splitlines())
    assert Path(settings["ssl.ca.location"]).parent == admin.parent
    bootstrap = ",".join(f"127.0.0.{node_id}:{port}" for node_id in (1, 2, 3))

    def mqd(*words: str) -> str:
        environment = {**os.environ, "MQD_CLIENT_CONFIG": str(admin), "MQD_BOOTSTRAP": bootstrap}
        found = PRELOADED.run(*words, timeout=PATIENCE_S, environment=environment)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    mqd("topic", "create", "t", "--partitions", "6", "--replication-factor", "3")
    producer = confluent_kafka.Producer({**settings, "bootstrap.servers": bootstrap, "log_level": 0})
    for number in range(600):
        producer.produce("t", b"%d" % number, partition=number % 6)
    assert producer.flush(PATIENCE_S) == 0
    consumer = confluent_kafka.Consumer(
        {**settings, "bootstrap.servers": bootstrap, "group.id": "g", "auto.offset.reset": "earliest", "log_level": 0}
    )
    consumer.subscribe(["t"])
    found: set[int] = set()
    end = time.monotonic() + PATIENCE_S
    while len(found) < 600 and time.monotonic() < end:
        found |= {int(message.value()) for message in consumer.consume(600, 1.0) if message.error() is None}
    consumer.close()
    assert found == set(range(600))
    assert "brokers in service: 1, 2, 3" in mqd("cluster", "status")
