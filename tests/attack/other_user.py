"""Attacks of a user of this machine without rights: the broker's files and sockets, its processes,
its shared memory, and the socket for local clients. Runs in a child process of the user `nobody`.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pwd
import random
import signal
import socket
import struct
from collections import Counter
from pathlib import Path

from mqd.base.paths import layout
from tests.attack.target import Target
from tests.other_user import LOGIN, why_not

WAIT_S = 120.0
MAGIC = b"MQDL"


def attack(target: Target, rng: random.Random, count: int) -> tuple[Counter[str], list[str]]:
    """The outcomes of `count` connections to the sockets, and the successful attacks."""
    if reason := why_not():
        return Counter({reason: 1}), []
    broker = target.broker
    pids = [process["pid"] for process in broker.running()]
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=_child, args=(theirs, broker.data_dir, pids, rng.getrandbits(60), count), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(WAIT_S), "the other user's process does not end"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _child(pipe, data_dir: Path, pids: list[int], seed: int, count: int) -> None:
    user = pwd.getpwnam(LOGIN)
    os.setgroups([])
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    rng, outcomes, found = random.Random(seed), Counter[str](), []
    paths = layout(data_dir)
    found += _files(data_dir)
    found += _processes(pids)
    sockets = [paths.client_socket, paths.keeper_socket, paths.controller_socket, paths.supervisor_socket]
    for _ in range(count):
        outcomes[_frames(rng.choice(sockets), rng)] += 1
    pipe.send((outcomes, found))


def _files(data_dir: Path) -> list[str]:
    """Every file that can be opened, locked or written is a finding."""
    found = []
    for root, folders, files in os.walk(data_dir):
        for name in (*folders, *files):
            path = Path(root, name)
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                found.append(f"{path} can be read")
    for name in (".lock", "authentication.seed", "run/broker.json", "log", "metadata"):
        with contextlib.suppress(OSError), open(data_dir / name) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(f"{name} can be locked")
    for name in os.listdir("/dev/shm"):
        if "mqd" in name:
            with contextlib.suppress(OSError):
                os.close(os.open(f"/dev/shm/{name}", os.O_RDONLY))
                found.append(f"/dev/shm/{name} can be read")
    return found


def _processes(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        for name in ("mem", "environ", "maps", "fd", "auxv", "syscall", "stack"):
            with contextlib.suppress(OSError):
                path = f"/proc/{pid}/{name}"
                os.listdir(path) if name == "fd" else os.close(os.open(path, os.O_RDONLY))
                # environ and mem open lazily: only reading them shows access
                if name == "fd" or Path(path).read_bytes()[:1]:
                    found.append(f"{path} can be read")
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
            found.append(f"process {pid} can be signalled")
    return found


def _frames(path: Path, rng: random.Random) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        try:
            connection.connect(str(path))
            hello = MAGIC + struct.pack("<IIQ", rng.getrandbits(3), rng.getrandbits(32), rng.getrandbits(64))
            data = rng.choice((hello, rng.randbytes(rng.randrange(1, 2000)), hello + bytes(200), b"\0" * 64))
            descriptors = [0] * rng.choice((0, 0, 1, 4))
            socket.send_fds(connection, [data], descriptors) if descriptors else connection.sendall(data)
            connection.settimeout(0.05)
            return f"{path.name}: {'answered' if connection.recv(4096) else 'closed'}"
        except TimeoutError:
            return f"{path.name}: waits"
        except OSError as error:
            return f"{path.name}: {type(error).__name__}"
