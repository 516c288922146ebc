"""RabbitMQ streams: one node with the stream plugin, driven by its stream protocol. Streams never fsync
(RabbitMQ's own documentation): they rely on the page cache and on replicas.

Debian's erl has an absolute path in it, so a small erl of our own replaces it; the Erlang port mapper
is started beside the node and counted as one of its processes.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from perf.peers import debian
from perf.peers.peer import DIES_WITH_PARENT, Unavailable, described
from perf.peers.processes import PeerFailed, free_port
from perf.peers.stream_peer import StreamPeer

ERLANG = (
    "base",
    "asn1",
    "crypto",
    "public-key",
    "mnesia",
    "runtime-tools",
    "ssl",
    "eldap",
    "inets",
    "os-mon",
    "parsetools",
    "syntax-tools",
    "tools",
    "xmerl",
)
PACKAGES = ("rabbitmq-server", *(f"erlang-{name}" for name in ERLANG))

ERL = """#!/bin/sh
ROOTDIR={root}
BINDIR={emulator}
EMU=beam
PROGNAME=erl
export ROOTDIR BINDIR EMU PROGNAME
exec "$BINDIR/erlexec" "$@"
"""


class RabbitmqStreams(StreamPeer):
    name = "RabbitMQ streams"
    protocol = "rabbitmq"
    settings = (
        "Debian's package; one node, `rabbitmq_stream` enabled, its defaults; 100 records per publish frame and 10"
        " credits per reader, the defaults of its Java client"
    )

    def prepare(self) -> None:
        self._root = root = debian.unpack(PACKAGES)
        self._erlang = root / "usr/lib/erlang"
        homes = sorted((root / "usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
        emulators = sorted(self._erlang.glob("erts-*/bin"))
        if not homes or not emulators:
            raise Unavailable("its packages contain no RabbitMQ or no Erlang")
        self._home, self._emulator = homes[-1], emulators[-1]
        self._libraries = debian.library_path(root)
        self.port, self._amqp, self._mapper, self._distribution = (free_port() for _ in range(4))
        self._write_files()

    @property
    def amqp_port(self) -> int:
        return self._amqp

    def _write_files(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        erl = self.directory / "bin" / "erl"
        erl.parent.mkdir(exist_ok=True)
        erl.write_text(ERL.format(root=self._erlang, emulator=self._emulator))
        erl.chmod(0o755)
        (self.directory / "enabled_plugins").write_text("[rabbitmq_stream].\n")
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self._amqp}\nstream.listeners.tcp.1 = 127.0.0.1:{self.port}\n"
        )

    def version(self) -> str:
        version = self._home.name.removeprefix("rabbitmq_server-")
        erlang = self._emulator.parent.name.removeprefix("erts-")
        day = debian.packaged_on(self._root, "rabbitmq-server")
        return described(version, "Debian", day, f"Erlang {erlang}")

    def environment(self) -> dict[str, str]:
        place: Path = self.directory
        return {
            "PATH": f"{place / 'bin'}:{self._erlang / 'bin'}:{os.environ.get('PATH', '')}",
            "HOME": str(place),
            "LD_LIBRARY_PATH": self._libraries,
            "ERL_EPMD_PORT": str(self._mapper),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"peer{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": str(self.data),
            "RABBITMQ_LOG_BASE": str(place / "log"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "enabled_plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(place / "none"),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def start(self) -> None:
        mapper = [*DIES_WITH_PARENT, str(self._emulator / "epmd"), "-port", str(self._mapper), "-address", "127.0.0.1"]
        self._others = [
            subprocess.Popen(mapper, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ]
        if self._others[0].poll() is not None:
            raise PeerFailed("Erlang's port mapper did not start")
        super().start()

    def command(self) -> list[str]:
        return [str(self._home / "sbin" / "rabbitmq-server")]
