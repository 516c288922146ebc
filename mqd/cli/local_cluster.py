"""`mqd cluster local`: a cluster of several brokers on this machine, each with its own data
directory and loopback address, for trying things out.

The brokers are ordinary brokers, started with the commands that are printed: each can be stopped,
killed or restarted independently while the cluster runs. A broker that exits does not affect the
others; Ctrl-C shuts down the remaining brokers cleanly.
"""

import os
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mqd.cli import secure
from mqd.cli.common import CliError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


class Member(msgspec.Struct):
    """One broker of the cluster."""

    node_id: int
    address: str
    port: int
    data_dir: Path
    seeds: str
    workers: int
    secured: bool = False
    assignments: tuple[str, ...] = ()  # NAME=VALUE
    process: subprocess.Popen[str] | None = None
    ready_line: str = ""  # printed when the broker became ready

    @property
    def bootstrap(self) -> str:
        return f"{self.address}:{self.port}"

    def arguments(self) -> list[str]:
        """The arguments after `mqd`."""
        return [
            "up",
            "--node-id",
            str(self.node_id),
            "--data-dir",
            str(self.data_dir),
            "--workers",
            str(self.workers),
            "--cluster-seeds",
            self.seeds,
            "--set",
            f"listeners={'SASL_SSL' if self.secured else 'PLAINTEXT'}://{self.bootstrap}",
            *(["--secure"] if self.secured else []),
            *(word for assignment in self.assignments for word in ("--set", assignment)),
        ]

    def start(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MQD_") or name == "MQD_DEBUG"
        }
        with open(self.data_dir / "stderr", "wb") as errors:
            # a separate session: Ctrl-C reaches only this process, which then shuts the brokers
            # down cleanly
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mqd.cli.main", *self.arguments()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )

    def last_error(self) -> str:
        lines = (self.data_dir / "stderr").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("mqd: ") if lines else f"its logs are in {self.data_dir / 'logs'}"


def members(
    data_dir: Path, count: int, port: int, workers: int, secured: bool = False, assignments: Sequence[str] = ()
) -> list[Member]:
    """Brokers 1 to `count` on 127.0.0.1, 127.0.0.2, ...; all are seeds."""
    seeds = ",".join(f"127.0.0.{node_id}:{port + 2}" for node_id in range(1, count + 1))
    return [
        Member(
            node_id,
            f"127.0.0.{node_id}",
            port,
            data_dir / f"broker-{node_id}",
            seeds,
            workers,
            secured,
            tuple(assignments),
        )
        for node_id in range(1, count + 1)
    ]


def make_certificates(brokers: list[Member]) -> None:
    """Creates one certificate authority and one admin user for all brokers. Raises CliError."""
    first = brokers[0]
    secure.prepare(first.data_dir, first.node_id, [first.address])
    for member in brokers[1:]:
        if not secure.is_secured(member.data_dir):
            secure.share(first.data_dir, member.data_dir)


class LocalCluster:
    """`with LocalCluster(...) as cluster: cluster.wait_ready()`. The end of the block stops every
    broker that is still running. Raises CliError.
    """

    def __init__(self, brokers: list[Member]) -> None:
        self.brokers = brokers
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> "LocalCluster":
        try:
            for member in self.brokers:
                member.start()
                assert member.process is not None and member.process.stdout is not None
                self._selector.register(member.process.stdout, selectors.EVENT_READ, member)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_ready(self) -> None:
        """Waits until all brokers are ready: the cluster forms once all seeds have found each
        other.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while pending := [member for member in self.brokers if not member.ready_line]:
            events = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise CliError(
                    f"broker {pending[0].node_id} was not ready within {START_TIMEOUT_S:.0f} s:"
                    f" {pending[0].last_error()}"
                )
            for key, _ in events:
                member: Member = key.data
                line = key.fileobj.readline()  # type: ignore[union-attr]  # a pipe's text stream
                if not line:
                    raise CliError(f"broker {member.node_id} did not start: {member.last_error()}")
                if line.startswith("mqd ready"):
                    member.ready_line = line.strip()

    def wait_for_exit(self) -> Member | None:
        """Waits until a broker exits, and returns it. Returns None when no broker is running."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if not key.fileobj.readline():  # type: ignore[union-attr]  # a pipe's text stream
                    self._selector.unregister(key.fileobj)
                    key.data.process.wait()
                    return key.data
        return None

    def stop(self) -> None:
        """Stops all brokers at the same time. Each transfers its leaderships to brokers that are
        still running, if there are any.
        """
        running = [member for member in self.brokers if member.process is not None and member.process.poll() is None]
        for member in running:
            assert member.process is not None
            member.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for member in running:
            assert member.process is not None
            try:
                member.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        for member in self.brokers:
            if member.process is not None and member.process.stdout is not None:
                member.process.stdout.close()


def guide(brokers: list[Member]) -> str:
    """Commands to try with the cluster."""
    first, last = brokers[0], brokers[-1]
    bootstrap = ",".join(member.bootstrap for member in brokers)
    restart_command = shlex.join(["mqd", *last.arguments()])
    credentials = f"  export MQD_CLIENT_CONFIG={secure.files(first.data_dir).admin}"
    lines = [f"  broker {member.node_id}  {member.bootstrap}  data in {member.data_dir}" for member in brokers]
    return "\n".join(
        [
            f"{len(brokers)} brokers are ready:",
            *lines,
            "",
            *(["Act as the user admin in this shell:", credentials] if first.secured else []),
            "Look at it:",
            f"  mqd cluster status -b {first.bootstrap}",
            (
                f"  mqd topic create flights --partitions 6 --replication-factor {min(3, len(brokers))} -b"
                f" {first.bootstrap}"
            ),
            f"  mqd topic describe flights -b {first.bootstrap}",
            f"  mqd produce flights -b {bootstrap}",
            "Stop a broker, check the status again, start it again:",
            f"  mqd down --data-dir {last.data_dir}",
            f"  {restart_command}",
            "",
            "Ctrl-C stops all of them; the next start continues with their data.",
        ]
    )
