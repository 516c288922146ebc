"""Peers' processes: whole process trees are measured and stopped, by pid; a start waits for a
response and reports why there is none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.peers import processes
from perf.peers.peer import Load, Peer
from perf.peers.processes import PeerFailed

# A parent that ignores SIGTERM, with a child that does too; it prints the child's pid, then waits.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('there', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_process_tree_is_stopped_even_if_it_ignores_sigterm() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert sorted(processes.tree([parent.pid])) == sorted([parent.pid, child])
        processes.stop([parent.pid], seconds=0.3)
        assert not processes.alive(parent.pid) and not processes.alive(child)
        parent.returncode = -9  # reaped by stop


def test_a_dead_process_is_not_measured_as_idle() -> None:
    assert processes.cpu_seconds([os.getpid()]) > 0
    with pytest.raises(PeerFailed, match="ended while it was measured"):
        processes.cpu_seconds([2**22 + 1])
    assert processes.tree([2**22 + 1]) == []
    processes.stop([])


def test_user_and_system_time_are_parts_of_the_total() -> None:
    before = processes.cpu_spent([os.getpid()])
    until = time.process_time() + 0.3
    while time.process_time() < until:
        os.stat(".")
    spent = processes.cpu_spent([os.getpid()]) - before
    assert spent.total >= 0.3 and spent.system > 0
    assert spent.user + spent.system == pytest.approx(spent.total, abs=0.05), "ticks of 10 ms, one of each at both ends"


def test_disk_usage_counts_allocated_blocks(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    (tmp_path / "below").mkdir()
    with open(tmp_path / "below" / "hole", "wb") as hole:
        hole.truncate(50_000_000)
    assert 100_000 <= processes.disk_bytes(tmp_path) < 300_000


class Script(Peer):
    name, protocol, settings = "script", "none", ""
    script = "import time; time.sleep(60)"
    polls = 0

    def prepare(self) -> None: ...

    def version(self) -> str:
        return "1"

    def command(self) -> list[str]:
        return [sys.executable, "-c", self.script]

    def is_ready(self) -> bool:
        self.polls += 1
        if self.polls < 3:
            raise ConnectionRefusedError
        return self.polls > 3

    def make_topic(self, name: str, load: Load) -> None: ...

    def drop_topic(self, name: str) -> None: ...


def test_a_peer_is_started_when_it_responds_and_leaves_no_files(tmp_path: Path) -> None:
    peer = Script(tmp_path / "peer")
    peer.start()
    assert peer.polls == 4 and peer.running() and peer.start_seconds > 0
    (peer.data / "topic-peers00001-0").mkdir()
    (peer.data / "topic-peers00001-0" / "log").write_bytes(b"x" * 10_000)
    (peer.data / "other").write_bytes(b"x" * 10_000)
    assert 10_000 <= peer.topic_disk_bytes("peers00001") < 30_000
    assert peer.pss_bytes() > 0 and len(peer.pids()) == 1
    pid = peer.pids()[0]
    peer.drop()
    assert not processes.alive(pid) and not (tmp_path / "peer").exists()


def test_a_directory_that_vanishes_during_the_search_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = Script(tmp_path)
    for name in ("peers00001-0", "peers00002-0-delete"):
        (peer.data / name).mkdir(parents=True)
    (peer.data / "peers00001-0" / "log").write_bytes(b"x" * 10_000)
    scandir = os.scandir

    def scan(path: str | Path) -> Iterator[os.DirEntry[str]]:
        if os.fspath(path).endswith("-delete"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", scan)
    assert peer.topic_disk_bytes("peers00001") >= 10_000


def test_a_peer_that_ends_at_once_is_reported_with_the_reason(tmp_path: Path) -> None:
    peer = Script(tmp_path / "peer")
    peer.script = "print('no such setting'); raise SystemExit(3)"
    peer.is_ready = lambda: False  # type: ignore[method-assign]
    with pytest.raises(PeerFailed, match="(?s)script ended with exit code 3.*no such setting"):
        peer.start()
    assert not peer.running()


def test_peers_that_cannot_flush_are_marked() -> None:
    assert "fsync" in Script(Path("x")).unsupported_reason(Load(durable=True))
    assert Script(Path("x")).unsupported_reason(Load()) == ""
