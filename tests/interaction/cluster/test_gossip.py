"""Gossip between real processes on loopback: joining through a seed, kill -9, a pause, goodbye, a
restart, datagrams of an unknown host, another cluster's key.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqd.base import paths
from mqd.cluster.membership import death_notice
from tests.broker import is_alive, pause
from tests.cluster import Cluster
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_ports
from tests.tiers import quick

ROOT = Path(__file__).resolve().parents[3]
KEY = "k" * 32


class Process:
    def __init__(self, node_id: int, port: int, directory: Path, seeds: list[int], key: str = KEY) -> None:
        directory.mkdir(exist_ok=True)
        self.node_id, self.port, self.directory = node_id, port, directory
        command = [
            sys.executable,
            "-m",
            "tests.interaction.cluster.gossiping",
            str(node_id),
            str(port),
            str(directory),
            ",".join(map(str, seeds)),
            key,
        ]
        self.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[dict] = []
        self._queue: queue.Queue[dict] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.wait(lambda line: line.get("started") == node_id)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))

    def wait(self, expected: Callable[[dict], bool], seconds: float = PATIENCE_S) -> dict:
        """The first line for which the condition holds, even if it was read earlier."""
        for line in self.lines:
            if expected(line):
                return line
        until = time.monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"node {self.node_id} did not say it within {seconds} s; it said {self.lines[-20:]}"
                ) from None
            self.lines.append(line)
            if expected(line):
                return line

    def forget(self) -> None:
        while not self._queue.empty():
            self._queue.get()
        self.lines.clear()

    def sees(self, node_id: int, state: str, seconds: float = 20.0) -> dict:
        return self.wait(lambda line: line.get("member") == node_id and line["state"] == state, seconds)

    def report(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def counts(self) -> dict:
        self.forget()
        self.report("counts")
        return self.wait(lambda line: "counts" in line)

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def one(node_id: int, port: int, seeds: list[int], name: str = "", key: str = KEY) -> Process:
        process = Process(node_id, port, tmp_path / (name or f"node-{node_id}"), seeds, key)
        started.append(process)
        return process

    yield one
    for process in started:
        process.end()


def test_hosts_join_die_leave_and_return(start: Callable[..., Process]) -> None:
    ports = free_ports(3)
    one, two, three = (start(number, port, ports[:1]) for number, port in enumerate(ports, 1))
    for each in (one, two, three):
        for other in {1, 2, 3} - {each.node_id}:
            assert each.sees(other, "alive")["rack"] == f"rack-{other % 2}"
    two.report("controller 7")
    for each in (one, three):
        each.wait(lambda line: line.get("controller") == 2 and line["epoch"] == 7)

    for each in (one, two):
        each.forget()
    os.kill(three.process.pid, signal.SIGKILL)
    for each in (one, two):
        each.sees(3, "suspect")
        before = each.sees(3, "dead")
    three.process.wait()

    back = start(3, ports[2], ports[:1])
    for each in (one, two):
        assert (
            each.wait(lambda line: line.get("member") == 3 and line["state"] == "alive")["incarnation"]
            > before["incarnation"]
        )
    back.sees(1, "alive")

    for each in (one, two):
        each.forget()
    back.process.send_signal(signal.SIGTERM)
    back.wait(lambda line: line.get("left") == 3)
    for each in (one, two):
        each.sees(3, "left")
        assert not [line for line in each.lines if line.get("member") == 3 and line["state"] == "dead"]


def test_a_pause_is_survived_and_the_seed_that_forgot_everything_is_found_again(start: Callable[..., Process]) -> None:
    ports = free_ports(3)
    one, two, three = (start(number, port, ports[:1]) for number, port in enumerate(ports, 1))
    for each in (one, two, three):
        for other in {1, 2, 3} - {each.node_id}:
            each.sees(other, "alive")
    for each in (one, two, three):
        each.forget()
    pause(two.process.pid)
    for each in (one, three):
        each.sees(2, "dead")
        each.forget()
    os.kill(two.process.pid, signal.SIGCONT)
    for each in (one, three):
        each.sees(2, "alive")
    accused = [line for line in two.lines if line.get("state") == "dead"]
    assert accused == [], "a host that was stopped suspects no other"

    for each in (two, three):
        each.forget()
    os.kill(one.process.pid, signal.SIGKILL)
    for each in (two, three):
        each.sees(1, "dead")
        each.forget()
    one.process.wait()
    again = start(1, ports[0], [])  # the first seed restarts, knowing no other host
    for each in (two, three):
        each.sees(1, "alive")
        again.sees(each.node_id, "alive")


REFUSED = 50  # of 430 datagrams: the kernel drops those that a busy process does not read in time


def test_datagrams_of_unknown_hosts_change_nothing(start: Callable[..., Process]) -> None:
    """Random bytes, repeated and damaged datagrams, and a host with another key: nothing changes."""
    ports = free_ports(3)
    one, two = start(1, ports[0], ports[:1]), start(2, ports[1], ports[:1])
    one.sees(2, "alive")
    two.sees(1, "alive")
    start(3, ports[2], ports[:1], key="other" * 8)
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for size in range(0, 1500, 7):
        sender.sendto(b"mqg1" + os.urandom(size), ("127.0.0.1", ports[0]))
        sender.sendto(os.urandom(size), ("127.0.0.1", ports[0]))
    with socket.create_connection(("127.0.0.1", ports[0])) as stream:
        stream.sendall(os.urandom(4096))
    sender.close()
    eventually(lambda: one.counts()["counts"].get("refused", 0) >= REFUSED)
    assert one.counts()["living"] == [2]
    assert two.counts()["living"] == [1]


def test_the_incarnation_is_counted_on_disk(tmp_path: Path) -> None:
    from mqd.controller.gossip import directory_bytes, next_life, store_life

    path = tmp_path / "gossip-life"
    assert [next_life(path) for _ in range(3)] == [1, 2, 3]
    store_life(path, 40)
    assert next_life(path) == 41
    for damage in ("", "x", "-5", "9" * 400):
        path.write_text(damage)
        assert next_life(path) >= 1
    assert directory_bytes("AAAAAAAAAAAAAAAAAAAAAQ") == b"\0" * 15 + b"\x01" and len(directory_bytes("anything")) == 16


def test_brokers_of_a_cluster_gossip(tmp_path: Path) -> None:
    """The controllers' gossip, on the controller's listener: all know all; a stopped broker has
    left, and a killed one is dead and comes back.
    """
    with Cluster(tmp_path) as cluster:

        def log_has(node_id: int, text: str) -> None:
            path = cluster.brokers[node_id].data_dir / "logs"
            eventually(
                lambda: any(text in file.read_text(errors="replace") for file in path.glob("*controller*")),
                lambda: f"broker {node_id} says {text!r}\n{cluster.logs()}",
            )

        for node_id in (1, 2, 3):
            for other in {1, 2, 3} - {node_id}:
                log_has(node_id, f"node={other} state=alive")
        cluster.brokers[3].stop()
        log_has(1, "node=3 state=left")
        cluster.brokers[2].kill_all()
        log_has(1, "node=2 state=dead")
        cluster.brokers[2].start()
        log_has(1, "node=2 state=alive before=dead")


@pytest.mark.parametrize(
    "victim_leads", quick([False, True], [True]), ids=["another host leads the quorum", "it led the quorum"]
)
def test_a_keeper_proves_that_its_broker_is_dead(tmp_path: Path, victim_leads: bool) -> None:
    """Controller, acceptor and worker of a host are killed at once: the others learn it from the
    keeper, long before a session or a lease would have expired.
    """
    times = {
        "broker.session.timeout.ms": "60000",
        "broker.heartbeat.interval.ms": "1000",
        "controller.quorum.fetch.timeout.ms": "30000",
    }
    with Cluster(tmp_path, config=times) as cluster:

        def logs(node_id: int) -> str:
            return "".join(
                file.read_text(errors="replace") for file in (cluster.brokers[node_id].data_dir / "logs").glob("*.log")
            )

        def wait(condition: Callable[[], bool], what: str) -> None:
            eventually(condition, lambda: f"{what}\n{cluster.logs()}")

        active_here = "this host is the active controller  "
        wait(lambda: any(active_here in logs(node_id) for node_id in (1, 2, 3)), "no active controller")
        active = next(node_id for node_id in (1, 2, 3) if active_here in logs(node_id))
        victim = active if victim_leads else next(node_id for node_id in (1, 2, 3) if node_id != active)
        others = [node_id for node_id in (1, 2, 3) if node_id != victim]
        instructions = paths.run_dir(cluster.brokers[victim].data_dir) / death_notice.INSTRUCTIONS_NAME
        wait(
            lambda: instructions.exists() and json.loads(instructions.read_bytes())["led"] == victim_leads,
            "the controller leaves no instructions",
        )
        # A worker takes tens of milliseconds to end, in which supervisord could start the next
        # controller, so that at no time all would have ended. So the keeper is stopped until all
        # have.
        (keeper,) = cluster.brokers[victim].pids("keeper")
        pids = [pid for role in ("controller", "acceptor", "worker") for pid in cluster.brokers[victim].pids(role)]
        assert len(pids) == 3
        pause(keeper)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait(lambda: not any(is_alive(pid) for pid in pids), "a process does not end")
        os.kill(keeper, signal.SIGCONT)
        wait(
            lambda: "all processes that act as the broker have ended; notifying the voters" in logs(victim),
            "the keeper says nothing",
        )
        for node_id in others:
            wait(
                lambda node_id=node_id: (
                    f"processes of its host have ended  node={victim} all=True led={victim_leads}" in logs(node_id)
                ),
                "a host was not told",
            )
        if victim_leads:
            wait(lambda: any(active_here in logs(node_id) for node_id in others), "no host is elected")
        cluster.brokers[victim].wait_until_ready(60)
