"""Commands among the faults: an invalid command ends a run, a refused one does not. Without a
cluster, except for one run.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.chaos import commands, faults, members, network
from tests.chaos.hosts import Targets
from tests.chaos.run import Plan, Run

REASON = network.why_not()
UNREACHABLE = "127.0.0.1:1"


class Hosts:
    """Three that no client reaches, and a fourth that may join; commands run here, outside any
    namespace.
    """

    bootstrap, spare, security, targets = UNREACHABLE, 4, None, Targets()
    operator = {"bootstrap.servers": UNREACHABLE}
    network = SimpleNamespace(run=lambda _name, words: list(words))

    def __init__(self) -> None:
        self.done: list[str] = []  # to the fourth
        self.founders = tuple(self._host(number) for number in (1, 2, 3))
        self.hosts = {host.node_id: host for host in self.founders}

    def _host(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(
            node_id=number,
            name=f"n{number}",
            runs=True,
            **{name: partial(self.done.append, name) for name in ("start", "stop", "empty")},
        )

    def __iter__(self):
        return iter(self.hosts.values())

    def add(self, number: int) -> None:
        self.hosts[number] = self._host(number)

    def remove(self, number: int) -> None:
        self.done.append("remove")
        del self.hosts[number]

    def logs(self) -> str:
        return ""


class Answers:
    """Replaces `commands.mqd`: the responses of a cluster, by the beginning of the command;
    otherwise it succeeds. `asked`: all commands.
    """

    def __init__(self, responses: dict[str, commands.Report]) -> None:
        self.answers, self.requested = responses, []

    def __call__(self, _cluster: Hosts, *words: str, seconds: float = 20.0) -> commands.Report:
        text = " ".join(words)
        self.requested.append(text)
        return next(
            (reported for begin, reported in self.answers.items() if text.startswith(begin)),
            commands.Report(True, "nothing moves"),
        )


def status(*voters: int) -> commands.Report:
    return commands.Report(True, json.dumps({"voters": voters}))


REFUSED = commands.Report(False, "mqd: not now")


def planted(words: Sequence[str]) -> type[faults.Operator]:
    class Planted(faults.Operator):
        def words(self) -> tuple[str, ...]:
            return tuple(words)

    return Planted


def test_every_command_of_an_operator_is_valid() -> None:
    """All random choices: no host is reached, and the command itself is valid."""
    known = {faults.Operator(Hosts(), random.Random(seed)).words() for seed in range(200)}
    kinds = {
        tuple(
            word for word in words if not word.replace(",", "").isdigit() and word not in ("plain", "mixed", "atomic")
        ): words
        for words in known
    }
    assert len(kinds) == 4, kinds
    for words in kinds.values():
        output = commands.mqd(Hosts(), *words)
        assert not output.done and "cannot reach a broker" in output.text, output


def test_every_command_of_a_change_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = Answers({"cluster status": status(1, 2, 3, 4)})
    with monkeypatch.context() as patch:
        patch.setattr(commands, "mqd", requested)
        for kind in sorted(faults.CHANGES):
            for seed in range(4):
                change = faults.KINDS[kind](Hosts(), random.Random(seed))
                members.join(change.cluster)
                change.begin()
                change.end()
        requested.answers = {"cluster status": status(1, 2, 3), "cluster balance": REFUSED}
        hosts = Hosts()
        members.join(hosts)
        members.leave(hosts, empty=True)
    kinds = {" ".join(word for word in words.split() if not word.isdigit()) for words in requested.requested}
    assert kinds == {
        "cluster add-voter",
        "cluster remove-voter",
        "cluster drain",
        "cluster drain --no-wait",
        "cluster drain --cancel",
        "cluster balance --no-wait",
        "cluster forget",
        "cluster status --format json",
    }
    for words in kinds:
        one = words.split()
        output = commands.mqd(Hosts(), *one, *(["4"] if one[1] not in ("balance", "status") else []))
        assert not output.done and "cannot reach a broker" in output.text, output


@pytest.mark.parametrize(
    ("responses", "done", "member"),
    [
        ({"cluster status": status(1, 2, 3)}, ["stop", "remove", "empty"], False),
        ({"cluster status": status(1, 2, 4)}, [], True),
        ({"cluster status": REFUSED}, [], True),
        ({"cluster status": status(1, 2, 3), "cluster drain 4": REFUSED}, [], True),
        ({"cluster status": status(1, 2, 3), "cluster forget": REFUSED}, ["stop", "start"], True),
        (
            {
                "cluster status": status(1, 2, 3),
                "cluster forget": commands.Report(False, "mqd: node 4: not registered (BROKER_ID_NOT_REGISTERED)"),
            },
            ["stop", "remove", "empty"],
            False,
        ),
    ],
    ids=["leaves", "votes", "voters unknown", "not empty", "not forgotten", "forgotten before"],
)
def test_the_fourth_host_leaves_only_when_nothing_needs_it(
    responses: dict[str, commands.Report], done: list[str], member: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "mqd", Answers(responses))
    monkeypatch.setattr(members, "FORGET_SECONDS", -1.0)
    hosts = Hosts()
    members.join(hosts)
    members.leave(hosts, empty=True)
    assert (hosts.done, hosts.spare in hosts.hosts) == (done, member)


@pytest.mark.parametrize(
    ("responses", "missing"),
    [
        ({"cluster drain 2": REFUSED}, "drain 2"),
        ({"cluster add-voter 3": REFUSED}, "add-voter 3"),
        ({"cluster balance": commands.Report(True, "1 partition moved")}, "1 partition moved"),
    ],
    ids=["drained", "no voter", "moving"],
)
def test_members_that_do_not_settle_are_a_failure(
    responses: dict[str, commands.Report], missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = (1, 2) if "cluster add-voter 3" in responses else (1, 2, 3)
    monkeypatch.setattr(commands, "mqd", Answers({"cluster status": status(*votes), **responses}))
    monkeypatch.setattr(members, "SETTLE_SECONDS", -1.0)
    with pytest.raises(AssertionError, match=missing):
        members.settle(Hosts(), stays=True)


@pytest.mark.parametrize("stays", [True, False])
def test_members_settle(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "mqd", Answers({"cluster status": status(1, 2, 3)}))
    hosts = Hosts()
    members.join(hosts)
    members.settle(hosts, stays)
    assert list(hosts.hosts) == [1, 2, 3, *([4] if stays else [])]


def test_changes_end_after_other_faults_have_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "mqd", Answers({}))
    run = Run(Plan(1, 1.0, ["voters"]), tmp_path)
    soon, late = (faults.Voters(Hosts(), random.Random(1)) for _ in range(2))
    for change, left, amid in ((soon, 1, True), (late, 2, False)):
        change.begin()
        change.left, change.amid = left, amid
    changes: list[faults.Change] = [soon, late]
    run._end_changes(changes, amid=False)
    assert changes == [soon, late], "no fault has come yet"
    run._end_changes(changes, amid=True)
    assert changes == [late]
    run._end_changes(changes, amid=True)
    assert changes == [late], "not in the midst of it"
    run._end_changes(changes, amid=False)
    assert changes == []


@pytest.mark.parametrize(
    "words",
    [
        ("cluster", "balance", "--bootstrap-server", UNREACHABLE),
        ("cluster", "rebalance"),
        ("topic", "reassign", "plain", "--replication-factor", "x"),
    ],
    ids=" ".join,
)
def test_an_invalid_command_is_not_a_refusal(words: tuple[str, ...]) -> None:
    with pytest.raises(commands.HarnessFailed, match=words[1]):
        planted(words)(Hosts(), random.Random(1)).begin()


@pytest.mark.parametrize(
    ("code", "output", "ends"),
    [
        (0, "3 partitions move", False),
        (1, "mqd: topic plain: A partition reassignment is in progress (REASSIGNMENT_IN_PROGRESS)", False),
        (3, "mqd: cannot reach a broker", False),
        (2, "mqd: No such option", True),
        (1, "mqd: unknown topic config (INVALID_CONFIG)", True),
        (0, "refused: KafkaError{code=INVALID_CONFIG,val=40}", True),
        (1, "mqd: replica.lag is not a known property", True),
        (1, "mqd: TypeError: no (this is a bug in mqd; MQD_DEBUG=1 shows the traceback)", True),
        (-11, "", True),
    ],
)
def test_refusals(code: int, output: str, ends: bool) -> None:
    if ends:
        with pytest.raises(commands.HarnessFailed):
            commands.judged(["mqd"], code, output, commands.MAY_BE_REFUSED)
    else:
        assert commands.judged(["mqd"], code, output, commands.MAY_BE_REFUSED).done == (code == 0)


def test_an_internal_error_is_not_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools of operator.py exit with 0 when they are refused."""
    monkeypatch.setattr(
        faults.Tools,
        "begin",
        lambda fault: commands.run(fault.cluster, ["tests.chaos.operator", "reassing", UNREACHABLE, "1", "t"]),
    )
    with pytest.raises(commands.HarnessFailed, match="reassing"):
        faults.Tools(Hosts(), random.Random(1)).begin()


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.slow
def test_a_run_with_an_invalid_command_fails_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(faults.KINDS, "operator", planted(("cluster", "balance", "--bootstrap-server", UNREACHABLE)))
    run = Run(Plan(1, 30.0, ["operator"]), tmp_path)
    result = run()
    assert not result.ok and result.failure.startswith(
        "HarnessFailed: mqd.cli.main cluster balance --bootstrap-server"
    ), result.failure
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in (*run.network.names, "hub") if run.network.namespace(name) in left], left
