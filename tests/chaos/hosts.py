"""Real brokers in network namespaces: started as by a user, killed, stopped and continued process
by process, their disks filled.

Features of a real host that a namespace lacks: `power_loss()` leaves a possible disk content after
a power cut (tests/crash/file_model.py; with `journal`), and `wall_clock()` moves its clock
(wall_clock.c, preloaded; with `clocks`).

A host's files are below `directory`; with `Extras.disk_bytes` on a separate file system (tmpfs) of
that size, so that it can be filled without affecting others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.broker import Broker
from tests.chaos import secured
from tests.chaos.network import Network
from tests.chaos.secured import Security
from tests.crash.file_model import CREATE, MKDIR, SYNCFS_BEGIN, SYNCFS_DONE, WRITE, Disk, Operation, Tree, read_journals

PORT = 9092
START_SECONDS = 90.0
BALLAST = "ballast"
NOT_DATA = ("logs", "run")  # of supervisord, and sockets
SHIM = Path(__file__).with_name("wall_clock.c")


@dataclasses.dataclass(frozen=True)
class Extras:
    """Optional features of a run's hosts."""

    disk_bytes: int = 0
    journal: bool = False
    clocks: bool = False


@dataclasses.dataclass(frozen=True)
class Targets:
    """What faults hit by name: topics that operators move and configure, processes that are killed or stopped."""

    topics: tuple[str, ...] = ("plain", "mixed", "atomic")
    processes: tuple[str, ...] = ("mqd-worker-0", "mqd-controller", "mqd-acceptor")


class ChaosHost(Broker):
    """One host. Process names as in `mqd status`: mqd-keeper, mqd-acceptor, mqd-controller,
    mqd-worker-N.
    """

    start_seconds = START_SECONDS

    def __init__(
        self,
        network: Network,
        name: str,
        node_id: int,
        data_dir: Path,
        seeds: str,
        workers: int,
        config: dict[str, str],
        extras: Extras = Extras(),
    ) -> None:
        address = network.address(name)
        own = {
            "listeners": f"PLAINTEXT://{address}:{PORT}",
            "inter.broker.listener": f"{address}:{PORT + 1}",
            "controller.listener": f"{address}:{PORT + 2}",
            "node.id": str(node_id),
            "cluster.seeds": seeds,
        }
        environment = {}
        self._clock = data_dir.with_name(f"{name}.clock")
        self._journal = data_dir.with_name(f"{name}.journal")
        self._on_disk = Tree()  # after the last power cut
        if extras.journal:
            environment["MQD_FILE_JOURNAL"] = str(self._journal / "journal")
        if extras.clocks:
            environment |= {"CHAOS_WALL_CLOCK": str(self._clock), "LD_PRELOAD": str(wall_clock_shim(data_dir.parent))}
        super().__init__(data_dir, workers, own | config, environment)
        self.port = PORT
        self.network, self.name, self.node_id, self.address = network, name, node_id, address
        self.extras = extras
        self._stopped: list[int] = []

    @property
    def bootstrap(self) -> str:
        return f"{self.address}:{PORT}"

    def command(self) -> list[str]:
        return self.network.run(self.name, super().command())

    def start(self) -> ChaosHost:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self.extras.disk_bytes and not os.path.ismount(self.data_dir):
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={self.extras.disk_bytes}", "tmpfs", str(self.data_dir)],
                check=True,
            )
        if self.extras.journal:
            self._journal.mkdir(exist_ok=True)
        if self.extras.clocks and not self._clock.exists():
            self.wall_clock(0.0)
        super().start()
        return self

    def unmount(self, keep: bool = False) -> None:
        """`keep`: its files are copied beside the mount point, for analysis."""
        if os.path.ismount(self.data_dir):
            if keep:
                self.free_disk()
                subprocess.run(
                    [
                        "cp",
                        "-r",
                        "--sparse=always",
                        str(self.data_dir),
                        str(self.data_dir.with_name(f"{self.name}.kept")),
                    ],
                    check=False,
                )
            subprocess.run(["umount", "-l", str(self.data_dir)], check=False)

    # -- processes ---------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> dict[str, int]:
        """Empty when the keeper does not respond."""
        with contextlib.suppress(Exception):
            return {one["name"]: one["pid"] for one in self.status()["processes"] if one["pid"] is not None}
        return {}

    def all_pids(self) -> list[int]:
        """supervisord first, then all processes below it."""
        if self.process is None:
            return []
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                waiting += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        return found

    def kill(self, names: Iterable[str]) -> list[str]:
        """kill -9 of these processes; supervisord starts successors. Returns those that existed."""
        now = self.processes()
        killed = []
        for name in names:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(now[name], signal.SIGKILL)
                killed.append(name)
        return killed

    def pause(self, names: Iterable[str] | None = None) -> None:
        """SIGSTOP of these, or of all processes of the host (its kernel continues: sockets accept
        data until they are full).
        """
        pids = (
            self.all_pids() if names is None else [pid for name, pid in self.processes().items() if name in set(names)]
        )
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._stopped.append(pid)

    def resume(self) -> None:
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    def kill_all(self) -> None:
        self.resume()
        super().kill_all()

    # -- power, clock ------------------------------------------------------------------------------

    def power_loss(self, chance: random.Random, harshest: bool) -> None:
        """kill -9 of all processes, and a random part of the unflushed data is lost; `harshest`:
        all of it. The next start is another boot.
        """
        assert self.extras.journal, "the journal of flushes was not kept"
        self.kill_all()
        disk = self.disk()
        tree = disk.harshest() if harshest else disk.power_cut(chance)
        for path in self.data_dir.iterdir():
            if path.is_dir() and path.name not in NOT_DATA:
                shutil.rmtree(path)
            elif not path.is_dir():
                path.unlink()
        tree.write_to(self.data_dir, str(self.data_dir))
        session = self.data_dir / "metadata" / "session"
        if session.exists():
            session.write_text(json.dumps(json.loads(session.read_text()) | {"boot_id": "another"}) + "\n")
            tree.files[str(session)] = session.read_bytes()
        shutil.rmtree(self._journal)
        self._on_disk = tree

    def empty(self) -> None:
        """Another machine with the same name and empty disks."""
        assert not self.runs
        for path in self.data_dir.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        shutil.rmtree(self._journal, ignore_errors=True)
        self._on_disk = Tree()

    def disk(self) -> Disk:
        """As reported by the file layer."""
        disk = Disk()
        for operation in (*_as_operations(self._on_disk, str(self.data_dir)), *read_journals(self._journal, "journal")):
            disk.apply(operation)
        return disk

    def wall_clock(self, ahead_s: float) -> None:
        """Its wall clock jumps to this many seconds ahead of the machine's (behind: negative).
        Running processes see it at once.
        """
        assert self.extras.clocks, "its clock is the machine's"
        with self._clock.open("r+b" if self._clock.exists() else "wb", buffering=0) as file:
            file.write(struct.pack("=q", int(ahead_s * 1e9)))

    # -- disk --------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """Until no more can be written. Only on a separate file system."""
        assert self.extras.disk_bytes, "the disk of this machine is not ours to fill"
        # buffered data would fail again at the close
        with (self.data_dir / BALLAST).open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))

    def free_disk(self) -> None:
        (self.data_dir / BALLAST).unlink(missing_ok=True)


def _as_operations(tree: Tree, root: str) -> Iterator[Operation]:
    """Makes the files below `root` durable."""
    for path in sorted(path for path in tree.directories if path.startswith(root + "/")):
        yield Operation(MKDIR, path, 0, 0, 0)
    for path, data in tree.files.items():
        yield Operation(CREATE, path, 0, 0, 0, reference=1)
        yield Operation(WRITE, path, 0, 0, 0, length=len(data), data=data)
    yield Operation(SYNCFS_BEGIN, root, 0, 0, 1)
    yield Operation(SYNCFS_DONE, root, 0, 0, 2, reference=1)


def wall_clock_shim(directory: Path) -> Path:
    """Built once, in the directory of the hosts' files."""
    built = directory / "wall_clock.so"
    if not built.exists():
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(built), str(SHIM), "-ldl"], check=True)
    return built


class ChaosCluster:
    """`hosts` by node id, from 1: the members. `count` of them found the cluster: its seeds and
    voters. One more (`spare`) may join and leave. Clients run in the namespace "client".
    """

    def __init__(
        self,
        network: Network,
        directory: Path,
        count: int = 3,
        workers: int = 1,
        config: dict[str, str] | None = None,
        extras: Extras = Extras(),
        security: Security | None = None,
        targets: Targets = Targets(),
    ) -> None:
        self.network, self.directory, self.security, self.targets = network, directory, security, targets
        self.keep = True  # the content of file systems that vanish at the end; False if nothing was found
        self._workers, self._config, self._extras = workers, dict(config or {}), extras
        self._seeds = ",".join(f"{network.address(f'n{number}')}:{PORT + 2}" for number in range(1, count + 1))
        self.hosts: dict[int, ChaosHost] = {number: self._host(number) for number in range(1, count + 1)}
        self.founders = tuple(self.hosts.values())
        self.spare = count + 1
        self._away: dict[int, ChaosHost] = {}  # hosts that have left; their disks are kept

    def _host(self, number: int) -> ChaosHost:
        data_dir = self.directory / f"n{number}"
        return ChaosHost(
            self.network,
            f"n{number}",
            number,
            data_dir,
            self._seeds,
            self._workers,
            {**self._config, **self._access(number)},
            self._extras,
        )

    def _access(self, number: int) -> dict[str, str]:
        if self.security is not None:
            return self.security.config(number)
        path = self.directory / "cluster.key"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text("a secret of this test, and of no cluster else\n")
        # the namespaces belong to this run
        return {"cluster.key.file": str(path), "listeners.insecure.allow": "true"}

    @property
    def bootstrap(self) -> str:
        return ",".join(host.bootstrap for host in self.hosts.values())

    @property
    def operator(self) -> dict[str, str]:
        """librdkafka's settings for the tests' own requests, with all rights."""
        security = {} if self.security is None else self.security.operator()
        return {"bootstrap.servers": self.bootstrap, **security}

    @property
    def clients_bootstrap(self) -> str:
        """Of the listener with client authentication, where there is one."""
        port = PORT if self.security is None else secured.PORT
        return ",".join(f"{host.address}:{port}" for host in self.hosts.values())

    def add(self, number: int) -> ChaosHost:
        """A host that joins, with the disk it left with; its name n<number> must exist in the
        network.
        """
        host = self.hosts[number] = self._away.pop(number, None) or self._host(number)
        host.start()
        return host

    def remove(self, number: int) -> ChaosHost:
        """It has been stopped permanently; faults and checks ignore it."""
        host = self._away[number] = self.hosts.pop(number)
        assert not host.runs
        return host

    def start(self) -> ChaosCluster:
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(ChaosHost.start, [host for host in self.hosts.values() if not host.runs]))
        return self

    def whole(self) -> bool:
        """Every host runs and reports that it is ready."""
        try:
            return all(host.runs and host.status()["ready"] for host in self.hosts.values())
        except Exception:  # a keeper that does not respond yet
            return False

    def wait_healthy(self, seconds: float = START_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not self.whole():
            if time.monotonic() > until:
                raise AssertionError(f"not all hosts are ready within {seconds:.0f} s\n{self.logs()}")
            time.sleep(0.1)  # other processes: there is no event to wait for

    def logs(self, lines: int = 25) -> str:
        return "\n".join(f"=== host {number}\n{host.logs(lines)}" for number, host in self.hosts.items())

    def __iter__(self) -> Iterator[ChaosHost]:
        return iter(self.hosts.values())

    def __enter__(self) -> ChaosCluster:
        try:
            return self.start()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_exc: object) -> None:
        for host in (*self.hosts.values(), *self._away.values()):
            host.resume()
            with contextlib.suppress(Exception):
                host.kill_all()
            host.unmount(self.keep)
