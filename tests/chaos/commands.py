"""An operator's commands, run in the clients' namespace while the cluster is under faults: their
result, or their refusal.

A refusal is caused by faults: no host reached, no controller, not enough brokers, a move in
progress already. An invalid command, an unknown property or an internal error of the program says
nothing about the cluster; counted as a refusal it would hide that a kind of fault has no effect. It
ends the run (HarnessFailed).
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mqd.cli.common import EXIT_FAILED, EXIT_UNREACHABLE

if TYPE_CHECKING:
    from tests.chaos.hosts import ChaosCluster

CLIENTS = "client"
ROOT = Path(__file__).resolve().parents[2]
MAY_BE_REFUSED = (EXIT_FAILED, EXIT_UNREACHABLE)
NEVER_REFUSED = (
    "INVALID_CONFIG",
    "not a known property",
    "this is a bug in mqd",
    "it is not mqd, or an older version",
    "does not speak the Kafka protocol",
)
TEXT_MAX = 160


class HarnessFailed(AssertionError):
    """The tests made an invalid request; the message has the command and its output."""


@dataclasses.dataclass(frozen=True)
class Report:
    done: bool
    output: str

    @property
    def text(self) -> str:
        """Its last line, refused or not."""
        return ("" if self.done else "refused: ") + self.output.strip().rpartition("\n")[2][-TEXT_MAX:]


def judged(words: Sequence[str], code: int, output: str, refusals: Collection[int]) -> Report:
    """`refusals`: the program's exit codes for a refusal. Raises HarnessFailed."""
    wrong = next((text for text in NEVER_REFUSED if text in output), "")
    if wrong or code not in (0, *refusals):
        raise HarnessFailed(f"{' '.join(words)} (exit {code}): {output.strip()[-2000:]}")
    return Report(code == 0, output)


def run(cluster: ChaosCluster, words: Sequence[str], refusals: Collection[int] = (), seconds: float = 30.0) -> Report:
    """A Python module in the clients' namespace. Raises HarnessFailed."""
    command = cluster.network.run(CLIENTS, [sys.executable, "-m", *words])
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Report(False, "no answer")
    return judged(words, done.returncode, f"{done.stderr}{done.stdout}", refusals)


def mqd(cluster: ChaosCluster, *words: str, seconds: float = 20.0) -> Report:
    """`mqd WORDS`, on any host of the cluster. Raises HarnessFailed."""
    security = [] if cluster.security is None else ["--client-config", str(cluster.security.operator_file)]
    return run(cluster, ["mqd.cli.main", *words, "--bootstrap", cluster.bootstrap, *security], MAY_BE_REFUSED, seconds)
