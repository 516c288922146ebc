"""Redis Streams: XADD and XREAD on an append-only file, as Redis's own persistence page recommends
for data that matters.
"""

from __future__ import annotations

import socket
import subprocess

from perf.peers import debian, processes
from perf.peers.peer import Load, described
from perf.peers.processes import PeerFailed, free_port
from perf.peers.stream_peer import StreamPeer

PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")


class RedisStreams(StreamPeer):
    name = "Redis Streams"
    protocol = "redis"
    settings = (
        "Debian's package; `appendonly yes`, `appendfsync everysec` (its default), no snapshots, the append-only file"
        " rewritten between measurements and not during one; a stream is a key, kept in memory as a whole"
    )
    flush_settings = "`appendfsync always`"

    def prepare(self) -> None:
        self._root = debian.unpack(PACKAGES)
        self._program = debian.program(self._root, "usr/bin/redis-server")
        self.port = free_port()
        self._always = False

    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": debian.library_path(self._root)}

    def version(self) -> str:
        done = subprocess.run([self._program, "--version"], capture_output=True, text=True, env=self.environment())
        version = next((word.removeprefix("v=") for word in done.stdout.split() if word.startswith("v=")), "unknown")
        return described(version, "Debian", debian.packaged_on(self._root, "redis-server"))

    def command(self) -> list[str]:
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.data),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "auto-aof-rewrite-percentage": "0",
        }
        return [self._program, *(word for key, value in settings.items() for word in (f"--{key}", value))]

    def make_topic(self, name: str, load: Load) -> None:
        if load.durable != self._always:
            self._command(f"CONFIG SET appendfsync {'always' if load.durable else 'everysec'}")
            self._always = load.durable
        super().make_topic(name, load)

    def drop_topic(self, name: str) -> None:
        """Deletes the stream. Its records are still in the append-only file then, so that is rewritten."""
        super().drop_topic(name)
        self._command("BGREWRITEAOF", b"already in progress")

    def _command(self, command: str, also: bytes = b"+") -> None:
        """`also`: what a successful response may contain instead of "+". Raises PeerFailed."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            connection.sendall(f"{command}\r\n".encode())
            answer = connection.recv(1000)
        if not answer.startswith(b"+") and also not in answer:
            raise PeerFailed(f"{self.name}: {command}: {answer.decode(errors='replace').strip()}")

    def topic_disk_bytes(self, topic: str) -> int:
        """The size of the append-only file, which all streams share and which only grows in between."""
        return processes.disk_bytes(self.data)
