"""Shared by copy jobs in transactions, on one broker or on several: their members as processes that
are restarted when they end, and the report when the output differs from the input.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.crash.workload import wait_until

ROOT = Path(__file__).resolve().parents[2]
# Killed members should be noticed soon.
QUICK_GROUPS = {
    "group.min.session.timeout.ms": "1000",
    "group.initial.rebalance.delay.ms": "100",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "2000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "300",
}


def copy_job(settings: dict) -> list[str]:
    return [sys.executable, "-m", "tests.crash.copy_job", json.dumps(settings)]


class Member:
    """One process of the job; `tend` restarts it when it has ended. `command`: its command line, by
    its settings.
    """

    def __init__(
        self,
        bootstrap: str,
        directory: Path,
        number: int,
        settings: dict,
        command: Callable[[dict], list[str]] = copy_job,
    ) -> None:
        self.settings = {**settings, "bootstrap": bootstrap, "name": f"copy-{number}"}
        self._command = command
        self.output = directory / f"copy-{number}.log"
        self.lives = 0
        self.process: subprocess.Popen[bytes] | None = None

    def tend(self) -> None:
        if self.process is not None and self.process.poll() is None:
            return
        self.lives += 1
        settings = {**self.settings, "seed": f"{self.settings['seed']}.{self.lives}"}
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(self._command(settings), cwd=ROOT, stdout=output, stderr=output)

    def end(self, how: signal.Signals) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def tail(self) -> str:
        assert self.process is not None
        if self.process.poll() is None:
            size = self.output.stat().st_size
            self.process.send_signal(signal.SIGUSR1)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: self.output.stat().st_size > size, 1, str)
        return f"--- {self.output.name}, life {self.lives}\n" + "\n".join(
            self.output.read_text(errors="replace").splitlines()[-16:]
        )


def difference(expected: list[bytes], found: list[bytes]) -> str:
    lost, more = set(expected) - set(found), set(found) - set(expected)
    first = next(
        (at for at, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other),
        min(len(expected), len(found)),
    )
    context = f"from {first}: {expected[first : first + 3]} became {found[first : first + 3]}"
    return f"{len(lost)} lost, {len(found) - len(set(found))} twice, {len(more)} from nowhere; {context}"
