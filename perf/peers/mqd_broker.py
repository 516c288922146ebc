"""mqd itself, as `mqd up` starts it: its defaults, and its default number of workers."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version as installed_version

from perf.loading import ROOT
from perf.peers.kafka_protocol import KafkaProtocolPeer
from perf.peers.peer import Load
from perf.peers.processes import free_port


class Mqd(KafkaProtocolPeer):
    name = "mqd"
    settings = "`mqd up` with its defaults; the comparison without fsync sets `flush.on.ack=false` on the topic"
    flush_settings = "default (`flush.on.ack=true`)"

    def prepare(self) -> None:
        self.port = free_port()

    def version(self) -> str:
        commit = subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        return installed_version("mqd") + (f" ({commit})" if commit else "")

    def command(self) -> list[str]:
        return [
            sys.executable,
            "-m",
            "mqd.cli.main",
            "up",
            "--data-dir",
            str(self.data),
            "--port",
            str(self.port),
            "--set",
            "admin.port=0",
            "--set",
            "core.files.allow=true",  # so that any user can measure its memory
        ]

    def topic_config(self, load: Load) -> dict[str, str]:
        return {} if load.durable else {"flush.on.ack": "false"}
