"""Real brokers in network namespaces: started as a user starts them, killed, stopped and continued process by process, their disks filled.

A host's files lie below `directory`; with `disk_bytes` on a file system of its own (tmpfs) of that size, so that it can be filled without harm to others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.broker import Broker
from tests.chaos.network import Network

PORT = 9092
START_SECONDS = 60.0
BALLAST = "ballast"


class ChaosHost(Broker):
    """One host. Processes by name as `mqd status` has them: mqd-keeper, mqd-acceptor, mqd-controller, mqd-worker-N."""

    def __init__(self, network: Network, name: str, node_id: int, data_dir: Path, seeds: str, workers: int, config: dict[str, str], disk_bytes: int = 0) -> None:
        address = network.address(name)
        own = {
            "listeners": f"PLAINTEXT://{address}:{PORT}", "inter.broker.listener": f"{address}:{PORT + 1}", "controller.listener": f"{address}:{PORT + 2}",
            "node.id": str(node_id), "cluster.seeds": seeds, "listeners.insecure.allow": "true",  # the namespaces are nobody else's
        }  # fmt: skip
        super().__init__(data_dir, workers, own | config)
        self.port = PORT
        self.network, self.name, self.node_id, self.address = network, name, node_id, address
        self.disk_bytes = disk_bytes
        self._stopped: list[int] = []

    @property
    def bootstrap(self) -> str:
        return f"{self.address}:{PORT}"

    def command(self) -> list[str]:
        return self.network.run(self.name, super().command())

    def start(self) -> ChaosHost:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        if self.disk_bytes and not os.path.ismount(self.data_dir):
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={self.disk_bytes}", "tmpfs", str(self.data_dir)], check=True)
        super().start()
        return self

    def unmount(self) -> None:
        if os.path.ismount(self.data_dir):
            subprocess.run(["umount", "-l", str(self.data_dir)], check=False)

    # -- processes -------------------------------------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def processes(self) -> dict[str, int]:
        """Empty when the keeper does not answer."""
        with contextlib.suppress(Exception):
            return {one["name"]: one["pid"] for one in self.status()["processes"]}
        return {}

    def all_pids(self) -> list[int]:
        """supervisord first, then everything below it."""
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
        """kill -9 of these processes; supervisord starts successors. Those that were there."""
        now = self.processes()
        killed = []
        for name in names:
            with contextlib.suppress(ProcessLookupError, KeyError):
                os.kill(now[name], signal.SIGKILL)
                killed.append(name)
        return killed

    def pause(self, names: Iterable[str] | None = None) -> None:
        """SIGSTOP: these, or every process of the host (its kernel goes on: sockets take data until they are full)."""
        pids = self.all_pids() if names is None else [pid for name, pid in self.processes().items() if name in set(names)]
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

    # -- disk --------------------------------------------------------------------------------------------------------------------

    def fill_disk(self) -> None:
        """Until nothing goes any more. Only on a file system of its own."""
        assert self.disk_bytes, "the disk of this machine is not ours to fill"
        with (self.data_dir / BALLAST).open("wb", buffering=0) as file:  # what is buffered would fail at the close once more
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(1 << 20))

    def free_disk(self) -> None:
        (self.data_dir / BALLAST).unlink(missing_ok=True)


class ChaosCluster:
    """`hosts` by node id, from 1; the first `voters` are the seeds. Clients run in the namespace "client"."""

    def __init__(self, network: Network, directory: Path, count: int = 3, workers: int = 1, config: dict[str, str] | None = None, disk_bytes: int = 0) -> None:
        self.network, self.directory = network, directory
        self._workers, self._config, self._disk_bytes = workers, dict(config or {}), disk_bytes
        self._seeds = ",".join(f"{network.address(f'n{number}')}:{PORT + 2}" for number in range(1, count + 1))
        self.hosts: dict[int, ChaosHost] = {number: self._host(number) for number in range(1, count + 1)}

    def _host(self, number: int) -> ChaosHost:
        data_dir = self.directory / f"n{number}"
        return ChaosHost(self.network, f"n{number}", number, data_dir, self._seeds, self._workers, {"cluster.key.file": str(self._key()), **self._config}, self._disk_bytes)

    def _key(self) -> Path:
        path = self.directory / "cluster.key"
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text("a secret of this test, and of no cluster else\n")
        return path

    @property
    def bootstrap(self) -> str:
        return ",".join(host.bootstrap for host in self.hosts.values())

    def add(self, number: int) -> ChaosHost:
        """A host that joins; its name n<number> must be in the network."""
        host = self.hosts[number] = self._host(number)
        host.start()
        return host

    def start(self) -> ChaosCluster:
        with ThreadPoolExecutor(len(self.hosts)) as pool:
            list(pool.map(ChaosHost.start, [host for host in self.hosts.values() if not host.runs]))
        return self

    def whole(self) -> bool:
        """Every host runs and says that it is ready."""
        try:
            return all(host.runs and host.status()["ready"] for host in self.hosts.values())
        except Exception:  # a keeper that does not answer yet
            return False

    def wait_whole(self, seconds: float = START_SECONDS) -> None:
        until = time.monotonic() + seconds
        while not self.whole():
            if time.monotonic() > until:
                raise AssertionError(f"not all hosts are ready within {seconds:.0f} s\n{self.logs()}")
            time.sleep(0.1)  # other processes: nothing to wait on

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
        for host in self.hosts.values():
            host.resume()
            with contextlib.suppress(Exception):
                host.kill_all()
            host.unmount()
