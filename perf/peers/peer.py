"""The base class of peers: obtaining, starting, probing, stopping, and accounting."""

from __future__ import annotations

import abc
import dataclasses
import os
import shutil
import subprocess
import time
from pathlib import Path

from perf.accounting import pss_bytes
from perf.peers import processes
from perf.peers.processes import PeerFailed

START_SECONDS = 60.0
# If this program is killed, the kernel ends the servers that it started.
DIES_WITH_PARENT = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


class Unavailable(RuntimeError):
    """The peer cannot be obtained on this machine; the message says why, and is shown in the table."""


@dataclasses.dataclass(frozen=True)
class Load:
    """One point of the comparison. `durable`: records are on disk before they are acknowledged. `acks`:
    Kafka's 0, 1 or all; peers without that choice always acknowledge.
    """

    record_bytes: int = 1024
    acks: str = "all"
    compression: str = "none"
    partitions: int = 6
    durable: bool = False
    replicas: int = 1

    def label(self) -> str:
        size = f"{self.record_bytes // 1024} KiB" if self.record_bytes % 1024 == 0 else f"{self.record_bytes} B"
        parts = [size, f"acks={self.acks}"]
        if self.compression != "none":
            parts.append(self.compression)
        parts.append(f"{self.partitions} partition{'s' if self.partitions != 1 else ''}")
        if self.replicas != 1:
            parts.append(f"{self.replicas} replicas")
        parts.append("fsync before the acknowledgement" if self.durable else "no fsync")
        return ", ".join(parts)


def described(version: str, *facts: str) -> str:
    """A version with what is known of it: "2.15.3 (2026-11-11)"; empty facts are left out."""
    known = ", ".join(fact for fact in facts if fact)
    return f"{version} ({known})" if known else version


class Peer(abc.ABC):
    """One server on loopback with a data directory of its own, which drop() deletes.

    `name`: in tables; `protocol`: determines the load generator. Subclasses define `prepare`, `command`,
    `is_ready`, and the creation and deletion of topics.
    """

    name: str
    protocol: str
    settings: str  # for docs/performance.md: differences from an empty configuration, and who recommends them
    brokers: int = 1
    flush_settings: str = ""  # the setting for `durable`; "" when there is none

    def __init__(self, directory: Path, heap: str = "1G") -> None:
        self.directory = directory
        self.heap = heap
        self.port = 0
        self.start_seconds = 0.0
        self.process: subprocess.Popen | None = None
        self._others: list[subprocess.Popen] = []  # helpers that are its processes too

    # -- defined by each peer --

    @abc.abstractmethod
    def prepare(self) -> None:
        """Gets programs and writes configuration. Raises Unavailable."""

    @abc.abstractmethod
    def version(self) -> str: ...

    @abc.abstractmethod
    def command(self) -> list[str]: ...

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether a client could work with it now. OSError, EOFError and ValueError also mean: not yet."""

    @abc.abstractmethod
    def make_topic(self, name: str, load: Load) -> None: ...

    @abc.abstractmethod
    def drop_topic(self, name: str) -> None: ...

    def environment(self) -> dict[str, str]:
        return {}

    def unsupported_reason(self, load: Load) -> str:
        """Why this load cannot be run against the peer; "": it can."""
        if load.replicas != self.brokers:
            return f"has {self.brokers} of the {load.replicas} brokers"
        if load.durable and not self.flush_settings:
            return "does not fsync before it acknowledges"
        return ""

    # -- start and stop --

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def start(self) -> None:
        """Sets start_seconds, the time from the command until is_ready(). Raises PeerFailed."""
        began = time.monotonic()
        self.launch()
        try:
            processes.wait_until_ready(self.is_ready, self._exit_reason, START_SECONDS)
        except PeerFailed as error:
            self.stop()
            raise PeerFailed(f"{self.name} {error}\n{self.log_tail()}") from None
        self.start_seconds = time.monotonic() - began

    def launch(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        log = open(self.directory / "output.log", "ab")
        with log:
            self.process = subprocess.Popen(
                [*DIES_WITH_PARENT, *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self.environment()},
                cwd=self.directory,
                start_new_session=True,
            )

    def _exit_reason(self) -> str:
        assert self.process is not None
        code = self.process.poll()
        return "" if code is None else f"ended with exit code {code}"

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        roots = [process.pid for process in (self.process, *self._others) if process is not None]
        processes.stop(roots)
        self.process = None
        self._others = []

    def drop(self) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def log_tail(self, lines: int = 15) -> str:
        path = self.directory / "output.log"
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""

    def kill_leader(self, topic: str) -> None:
        """Kills the broker that leads the topic's first partition. Only for clusters."""
        raise NotImplementedError

    # -- accounting --

    def pids(self) -> list[int]:
        return processes.tree([process.pid for process in (self.process, *self._others) if process is not None])

    def cpu_spent(self) -> processes.CpuSeconds:
        return processes.cpu_spent(self.pids())

    def pss_bytes(self) -> int:
        return pss_bytes(self.pids())

    def topic_disk_bytes(self, topic: str) -> int:
        """The disk usage of all directories with the topic's name. Other topics are being deleted
        meanwhile, so the difference of the whole data directory would be wrong, and directories may
        vanish during the search (os.walk ignores them; Path.rglob would raise).
        """
        return sum(
            processes.disk_bytes(Path(parent, name))
            for parent, names, _ in os.walk(self.data)
            for name in names
            if topic in name
        )
