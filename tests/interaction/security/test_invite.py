"""`mqd cluster invite` on a host, `mqd up --join` on another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqd.cli import secure
from tests.broker import Broker
from tests.interaction.security.secured import SecureBroker
from tests.polling import PATIENCE_S
from tests.ports import free_ports


class Joining(Broker):
    token = ""

    def command(self) -> list[str]:
        return [*super().command(), "--join", self.token]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Broker, Joining]]:
    ports = free_ports(3)

    def config(address: str) -> dict[str, str]:
        return {
            "listeners": f"SASL_SSL://{address}:{ports[0]}",
            "inter.broker.listener": f"{address}:{ports[1]}",
            "controller.listener": f"{address}:{ports[2]}",
        }

    first = SecureBroker(tmp_path / "one", 1, {**config("127.0.0.1"), "cluster.seeds": f"127.0.0.1:{ports[2]}"})
    second = Joining(tmp_path / "two", 1, config("127.0.0.2"))
    with first:
        try:
            yield first, second
        finally:
            second.stop()


@pytest.mark.slow
def test_a_host_joins_by_a_token(hosts: tuple[Broker, Joining]) -> None:
    first, second = hosts
    command = [sys.executable, "-m", "mqd.cli.main", "cluster", "invite", "2", "--data-dir", str(first.data_dir)]
    inviting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert inviting.stdout is not None and inviting.stderr is not None
        line = inviting.stdout.readline().split()
        assert line[:3] == ["mqd", "up", "--join"], inviting.stderr.read()
        second.token = line[3]
        second.start()
        _, errors = inviting.communicate(timeout=PATIENCE_S)
        assert inviting.returncode == 0 and "host 2 at 127.0.0.1 has its certificates" in errors
    finally:
        if inviting.poll() is None:
            inviting.send_signal(signal.SIGINT)
            inviting.wait(PATIENCE_S)
    admin = secure.files(second.data_dir).admin
    said, end = "", time.monotonic() + PATIENCE_S
    while "brokers in service: 1, 2" not in said:
        assert time.monotonic() < end, said
        found = subprocess.run(
            [sys.executable, "-m", "mqd.cli.main", "cluster", "status"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "MQD_CLIENT_CONFIG": str(admin), "MQD_BOOTSTRAP": f"127.0.0.2:{second.port}"},
        )
        said = found.stdout + found.stderr
    second.stop()
    second.start()  # with the same command: the token has been used, and is no longer needed
