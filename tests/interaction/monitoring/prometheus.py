"""Prometheus and promtool, installed, or unpacked from Debian's package without root."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from mqd.cli.verbs.monitoring import RULES_FILE, prometheus_config
from perf.peers.debian import program, unpack
from perf.peers.peer import Unavailable
from tests.ports import free_port


def find(name: str) -> str:
    """The program's path. Skips the test if it cannot be installed."""
    installed = shutil.which(name)
    if installed:
        return installed
    try:
        return program(unpack(["prometheus"]), str(Path("usr/bin") / name))
    except Unavailable as error:
        pytest.skip(f"{name}: {error}; apt-get install prometheus")


class Prometheus:
    """A real Prometheus, which scrapes and evaluates every second."""

    def __init__(self, directory: Path, targets: list[str], rules: str) -> None:
        text = prometheus_config(tuple(targets), None, None).replace("scrape_interval: 15s", "scrape_interval: 1s")
        text = text.replace("global:\n", "global:\n  evaluation_interval: 1s\n")
        (directory / "prometheus.yml").write_text(text)
        (directory / RULES_FILE).write_text(rules)
        self.port = free_port()
        self._log = (directory / "prometheus.log").open("wb")
        self.process = subprocess.Popen(
            [
                find("prometheus"),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def get(self, path: str) -> object:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=60) as response:
            return json.load(response)["data"]

    def alerts(self) -> list[dict[str, str]]:
        """The labels of the firing alerts."""
        try:
            found = self.get("alerts")
        except OSError:
            return []
        return [one["labels"] for one in found["alerts"] if one["state"] == "firing"]  # type: ignore[index]

    def firing(self) -> set[str]:
        return {labels["alertname"] for labels in self.alerts()}

    def healthy_targets(self) -> int:
        try:
            found = self.get("targets?state=active")
        except OSError:
            return 0
        return sum(one["health"] == "up" for one in found["activeTargets"])  # type: ignore[index]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()
