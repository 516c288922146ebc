"""NATS JetStream: file streams of one replica. Acknowledged records are in the page cache; the server
syncs every two minutes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from perf.peers import golang
from perf.peers.peer import described
from perf.peers.processes import free_port
from perf.peers.stream_peer import StreamPeer

MODULE, PACKAGE = Path(__file__).parent / "nats", "github.com/nats-io/nats-server/v2"


class NatsJetStream(StreamPeer):
    name = "NATS JetStream"
    protocol = "nats"
    settings = (
        "built from its Go module; `nats-server -js`, file storage, one replica, its defaults; read by pull consumers"
        " without acknowledgements, 500 records ahead as `nats.go` does"
    )

    def prepare(self) -> None:
        self._program = str(golang.program(MODULE, PACKAGE))
        self.port = free_port()

    def version(self) -> str:
        output = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        version = (output.stdout or output.stderr).strip().removeprefix("nats-server: v")
        return described(version, golang.released_on(MODULE, PACKAGE))

    def command(self) -> list[str]:
        return [
            self._program,
            "--addr",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--jetstream",
            "--store_dir",
            str(self.data),
        ]
