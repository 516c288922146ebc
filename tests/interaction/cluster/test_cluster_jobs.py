"""examples/jobs on three hosts while its workers, the timer, the broker's other processes and whole
hosts are killed: each job has its result, none begins before it is due, and effects are counted.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cluster import Cluster
from tests.compat.programs.program import Program, kill_process
from tests.crash.workload import wait_until
from tests.interaction.cluster.test_cluster_dead_letters import CLUSTER_CONFIG
from tests.interaction.cluster_clients import all_in_sync
from tests.interaction.server.test_schedules import timer_pid
from tests.polling import eventually

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "jobs"
SECONDS = 120.0
WORKER_COUNT = 4
PAUSE_S = 0.08  # between two jobs
WORKERS, TIMER, HOST = "a worker of jobs", "mqd-timer", "broker"
KILLS = {WORKERS: 120, TIMER: 30, "mqd-acceptor": 25, "mqd-worker-0": 8, "mqd-worker-1": 7, HOST: 10}
# jobs that may have been done and not confirmed when a process died: of each worker the current one
# and the one whose acknowledgement is in flight
AGAIN = {WORKERS: 2, TIMER: 0}
TASKS = """
import os, time
from jobs import Queue

queue = Queue("jobs", {bootstrap!r}, attempts=8)
effects = os.open({effects!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@queue.task
def work(number, seconds=0.0, fails=0):
    if queue.attempt <= fails:
        raise ConnectionError(f"attempt {{queue.attempt}}")
    began = time.time()
    time.sleep(seconds)
    os.write(effects, f"{{number}} {{began}}\\n".encode())
    return number * number


@queue.task
def poison(number):
    raise ValueError(f"{{number}} cannot be done")
"""


class Sender(threading.Thread):
    """Sends jobs of all kinds until it is stopped. `due`: the earliest start by job number."""

    def __init__(self, tasks: ModuleType, rng: random.Random) -> None:
        super().__init__(name="sender")
        self._tasks, self._rng, self._stopped = tasks, rng, threading.Event()
        self.results: dict[int, Any] = {}
        self.poisonous: set[int] = set()
        self.due: dict[int, float] = {}

    def run(self) -> None:
        number = 0
        while not self._stopped.wait(PAUSE_S):
            number += 1
            self._send(number)

    def _send(self, number: int) -> None:
        work, rng = self._tasks.work, self._rng
        self.due[number] = time.time()
        match rng.choices(["now", "slow", "flaky", "urgent", "later", "poison"], [50, 5, 10, 10, 22, 3])[0]:
            case "now":
                result = work.delay(number)
            case "slow":
                result = work.delay(number, seconds=rng.uniform(0.2, 1.5))
            case "flaky":
                result = work.delay(number, fails=rng.randint(1, 3))
            case "urgent":
                result = work.apply_async([number], urgent=True)
            case "later":
                countdown = rng.uniform(0.2, 20.0)
                self.due[number] += int(1000 * countdown) / 1000
                result = work.apply_async([number], countdown=countdown)
            case _:
                self.poisonous.add(number)
                result = self._tasks.poison.delay(number)
        self.results[number] = result

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@contextlib.contextmanager
def tasks_of(cluster: Cluster, directory: Path) -> Iterator[ModuleType]:
    """The module that the workers run, imported here as a sender imports it."""
    effects = directory / "effects"
    effects.touch()
    (directory / "tasks.py").write_text(TASKS.format(bootstrap=cluster.bootstrap, effects=str(effects)))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        patch.syspath_prepend(str(directory))
        yield importlib.import_module("tasks")
        for name in ("tasks", "jobs"):
            sys.modules.pop(name)


def effects_of(directory: Path) -> dict[int, list[float]]:
    """By job number, when each effect was begun."""
    found: dict[int, list[float]] = collections.defaultdict(list)
    for line in (directory / "effects").read_text().splitlines():
        number, began = line.split()
        found[int(number)].append(float(began))
    return found


@pytest.mark.timeout(1800)
def test_each_job_is_done_over_two_hundred_kills(tmp_path: Path) -> None:
    rng = random.Random(20)
    kills = [name for name, count in KILLS.items() for _ in range(count)]
    rng.shuffle(kills)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(Cluster(tmp_path / "cluster", workers=2, config=CLUSTER_CONFIG))
        tasks = stack.enter_context(tasks_of(cluster, tmp_path))
        tasks.queue.create(partitions=4, replicas=3)
        command = ["env", "-C", str(tmp_path), sys.executable, str(EXAMPLE / "jobs.py"), "tasks:queue"]
        workers = [Program(command, tmp_path / f"worker-{number}") for number in range(WORKER_COUNT)]
        for worker in workers:
            stack.enter_context(worker)
        sender = Sender(tasks, rng)
        sender.start()
        stack.callback(sender.stop)

        def state() -> str:
            return "\n".join([*(worker.tail(2_000) for worker in workers), cluster.logs()])

        def in_service() -> bool:
            names = ("jobs", "jobs-urgent", "jobs-later", "jobs-results", "__consumer_offsets", "__share_group_state")
            return all(all_in_sync(cluster, name) for name in (*names, "__transaction_state"))

        def timers() -> list[int]:
            return [pid for pid in map(timer_pid, cluster) if pid]

        for name in kills:
            before = len(effects_of(tmp_path))
            wait_until(lambda: len(effects_of(tmp_path)) > before, SECONDS, state)  # noqa: B023
            if name == WORKERS:
                rng.choice(workers).restart()
            elif name == TIMER:
                os.kill(rng.choice(eventually(timers, state, SECONDS)), signal.SIGKILL)
            else:
                wait_until(in_service, SECONDS, state)
                kill_process(rng.choice(list(cluster)), name)
        sender.stop()
        failed: dict[int, str] = {}
        JobFailed = importlib.import_module("jobs").JobFailed  # noqa: N806
        for number, result in sender.results.items():
            try:
                value = result.get(timeout=SECONDS)
                assert number not in sender.poisonous and value == number * number
            except JobFailed as failure:
                failed[number] = str(failure)
        effects = effects_of(tmp_path)
    assert failed.keys() == sender.poisonous, failed
    assert effects.keys() == sender.results.keys() - sender.poisonous
    early = {number: times for number, times in effects.items() if min(times) < sender.due[number]}
    assert not early, "before it was due"
    again = sum(len(times) - 1 for times in effects.values())
    allowed = sum(count * AGAIN.get(name, 2 * WORKER_COUNT) for name, count in KILLS.items())
    print(f"{len(sender.results)} jobs, {len(failed)} given up, {again} effects more than once, {len(kills)} kills")
    assert again <= allowed
