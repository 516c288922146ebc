"""Commands among the faults: what is no command ends a run, what is refused does not. Without a cluster, but for one run."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos import commands, faults, network
from tests.chaos.run import Plan, Run

REASON = network.why_not()
NOBODY = "127.0.0.1:1"


class Hosts:
    """Three that nobody reaches; commands run here, in no namespace."""

    bootstrap = NOBODY
    network = SimpleNamespace(run=lambda _name, words: list(words))

    def __iter__(self):
        return iter([SimpleNamespace(node_id=number, name=f"n{number}", runs=True) for number in (1, 2, 3)])


def planted(words: Sequence[str]) -> type[faults.Operator]:
    class Planted(faults.Operator):
        def words(self) -> tuple[str, ...]:
            return tuple(words)

    return Planted


def test_every_command_of_an_operator_is_one() -> None:
    """All that chance can choose: nobody is reached, and nothing is wrong with the command."""
    known = {faults.Operator(Hosts(), random.Random(seed)).words() for seed in range(200)}
    kinds = {tuple(word for word in words if not word.replace(",", "").isdigit() and word not in ("plain", "mixed", "atomic")): words for words in known}
    assert len(kinds) == 4, kinds
    for words in kinds.values():
        told = commands.mqd(Hosts(), *words)
        assert not told.done and "cannot reach a broker" in told.text, told


@pytest.mark.parametrize("words", [("cluster", "balance", "--bootstrap-server", NOBODY), ("cluster", "rebalance"), ("topic", "reassign", "plain", "--replication-factor", "x")], ids=" ".join)
def test_no_command_is_no_refusal(words: tuple[str, ...]) -> None:
    with pytest.raises(commands.HarnessFailed, match=words[1]):
        planted(words)(Hosts(), random.Random(1)).begin()


@pytest.mark.parametrize(
    ("code", "output", "ends"),
    [
        (0, "3 partitions move", False), (1, "mqd: topic plain: A partition reassignment is in progress (REASSIGNMENT_IN_PROGRESS)", False), (3, "mqd: cannot reach a broker", False),
        (2, "mqd: No such option", True), (1, "mqd: unknown topic config (INVALID_CONFIG)", True), (0, "refused: KafkaError{code=INVALID_CONFIG,val=40}", True),
        (1, "mqd: replica.lag is not a known property", True), (1, "mqd: TypeError: no (this is a fault of mqd's; MQD_DEBUG=1 shows where)", True), (-11, "", True),
    ],
)  # fmt: skip
def test_what_is_a_refusal(code: int, output: str, ends: bool) -> None:
    if ends:
        with pytest.raises(commands.HarnessFailed):
            commands.judged(["mqd"], code, output, commands.MAY_BE_REFUSED)
    else:
        assert commands.judged(["mqd"], code, output, commands.MAY_BE_REFUSED).done == (code == 0)


def test_a_program_that_fails_by_itself_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools of operator.py end well when they are refused."""
    monkeypatch.setattr(faults.Tools, "begin", lambda fault: commands.run(fault.cluster, ["tests.chaos.operator", "reassing", NOBODY, "1"]))
    with pytest.raises(commands.HarnessFailed, match="reassing"):
        faults.Tools(Hosts(), random.Random(1)).begin()


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.slow
def test_a_run_with_a_wrong_command_fails_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(faults.KINDS, "operator", planted(("cluster", "balance", "--bootstrap-server", NOBODY)))
    run = Run(Plan(1, 30.0, ["operator"]), tmp_path)
    result = run()
    assert not result.ok and result.failure.startswith("HarnessFailed: mqd.cli.main cluster balance --bootstrap-server"), result.failure
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in (*run.network.names, "hub") if run.network.namespace(name) in left], left
