"""Damage to the broker's own processes and files: kills, pauses, and bytes that change on disk.

Files derived from the log (indexes, snapshots, checkpoints) may be damaged in any topic: the broker
rebuilds them. Segments are damaged in one topic only, whose records may then be lost; nothing else
may be.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

from mqd.base.paths import layout
from tests.attack.target import SACRIFICE
from tests.broker import Broker
from tests.crash.processes import wait_until_healthy

VICTIMS = ("mqd-worker-0", "mqd-worker-1", "mqd-acceptor", "mqd-controller")
DERIVED = {".index", ".timeindex", ".txnindex", ".txnsum", ".snapshot"}
CHECKPOINTS = ("recovery-point-offset-checkpoint", "replication-offset-checkpoint", "log-start-offset-checkpoint")
HEALTHY_S = 240.0


def kill_or_pause(broker: Broker, rng: random.Random) -> str:
    """Returns when the broker is healthy again."""
    victims = rng.sample(VICTIMS, rng.choice((1, 1, 1, 2, 3)))
    pids = {name: pid for name in victims if (pid := broker.pid(name))}
    if rng.random() < 0.4:
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.05, 2.0))  # how long they are stopped
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
        return f"pause {' '.join(victims)}"
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    wait_until_healthy(broker, pids, HEALTHY_S)
    return f"kill {' '.join(victims)}"


def damage_and_restart(broker: Broker, rng: random.Random) -> list[str]:
    """Some files change while no process runs. Returns when the broker is ready again."""
    broker.kill_all() if rng.random() < 0.5 else broker.stop()
    found = [damage(rng.choice(damageable(broker)), rng) for _ in range(rng.choice((2, 4, 6)))]
    broker.start()
    return found


def damageable(broker: Broker) -> list[Path]:
    paths = layout(broker.data_dir)
    return sorted(
        path
        for path in paths.log_dir.rglob("*")
        if path.is_file()
        and (path.suffix in DERIVED or path.name.startswith(CHECKPOINTS) or path.parent.name.startswith(SACRIFICE))
    )


def damage(path: Path, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    how = rng.choice(("flip", "cut", "zeros", "more", "lost", "garbage"))
    match how:
        case "flip" if data:
            for _ in range(rng.choice((1, 8, 64))):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case "cut":
            del data[rng.randrange(len(data) + 1) :]
        case "zeros" if data:
            at = rng.randrange(len(data))
            data[at : at + 512] = bytes(len(data[at : at + 512]))
        case "more":
            data += rng.randbytes(rng.randrange(1, 5000))
        case "lost":
            path.unlink()
            return f"lost {path.parent.name}/{path.name}"
        case _:
            data[:] = rng.randbytes(rng.randrange(1, 5000))
    path.write_bytes(data)
    return f"{how} {path.parent.name}/{path.name}"
