"""The checker of guests' histories: a correct one passes, each planted breach is found with its
name. And real brokers, one cluster with a planted bug: its workers do not apply revocations.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import network
from tests.chaos.guests import rights
from tests.chaos.history import FinalLog
from tests.chaos.run import Plan, Run

S = 1_000_000_000
BOUND_MS, LIFETIME_MS = 5_000, 10_000
Line = dict[str, Any]


def right(change: str, at: float, status: str = "ok") -> Line:
    times = {"begin_ns": int(at * S), "end_ns": int((at + 0.1) * S)}
    return {"kind": "right", "user": "g", "operation": 3, "change": change, "status": status, **times}


def password(number: int, at: float, status: str = "ok", deletes: bool = False) -> Line:
    times = {"begin_ns": int(at * S), "end_ns": int((at + 0.1) * S)}
    return {"kind": "password", "user": "g", "number": number, "deletes": deletes, "status": status, **times}


def login(number: int, at: float, served: bool = True) -> Line:
    times = {"login_begin_ns": int(at * S), "login_end_ns": int((at + 0.1) * S)}
    return {"kind": "login", "user": "g", "host": "h", "number": number, "served": served, **times}


def requested(at: float, served: bool, since: float | None = None, **more: Any) -> Line:
    times = {"begin_ns": int(at * S), "end_ns": int((at + 0.01) * S)}
    proof = login(1, at - 1 if since is None else since)
    return {**proof, "kind": "asked", "operation": 3, "served": served, "denied": not served, **times, **more}


SOUND = [
    password(1, 1),
    login(1, 2),
    right("grant", 3, "begun"),
    right("grant", 3),
    requested(4, True, written=["a"]),
    right("revoke", 5),
    requested(9, True),  # within the bound
    requested(11, False, refused=["b"]),
    password(2, 12),
    login(1, 14),  # within the bound
    login(1, 18, served=False),
    right("grant", 20, "begun"),
    requested(20.05, True),  # the grant is in flight
    right("grant", 20),
    requested(25, True),
]
LOG = [FinalLog(0, 1, [(0, b"a".hex())], [])]


def found(lines: list[Line], logs: list[FinalLog] | None = None) -> list[str]:
    return [one.kind for one in rights.check(lines, LOG if logs is None else logs, BOUND_MS, LIFETIME_MS)[0]]


def test_a_correct_history_passes() -> None:
    anomalies, counts = rights.check(SOUND, LOG, BOUND_MS, LIFETIME_MS)
    assert not anomalies
    assert (counts["beyond the bound"], counts["void logins"], counts["revocations"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("kind", "planted"),
    [
        ("served-revoked", requested(11.5, True)),
        ("void-password", login(1, 18)),
        ("outlived", requested(19.9, True, since=9, operation=4)),
    ],
)
def test_a_planted_breach_is_found(kind: str, planted: Line) -> None:
    assert found([*SOUND, planted]) == [kind]


def test_refused_records_are_not_in_the_log_and_accepted_ones_are() -> None:
    assert found(SOUND, [FinalLog(0, 2, [(0, b"b".hex())], [])]) == ["guest-lost", "written-unasked"]


@pytest.mark.parametrize(
    "doubt",
    [
        [right("grant", 4.5, "begun"), right("grant", 4.5, "info")],  # it may take effect late
        # and so may one whose outcome the warden did not live to write
        [right("grant", 4.5, "begun")],
    ],
)
def test_a_grant_that_may_come_late_is_no_breach(doubt: list[Line]) -> None:
    assert found([*SOUND, *doubt, requested(11.5, True)]) == []


def test_a_password_that_may_come_late_is_not_void() -> None:
    lines = [password(1, 1, "info"), password(2, 2), login(1, 60)]
    assert found(lines, []) == []


def test_truncated_lines_and_those_of_other_clients_are_skipped(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(one) for one in [*SOUND, {"kind": "alive", "client": "guests"}])
    (tmp_path / "guests.jsonl").write_text(text + '\n{"kind": "asked", "user"')
    assert rights.read(tmp_path.glob("guests*.jsonl")) == SOUND


REASON = network.why_not()
FORGETS = """
from mqd.security.acl import Permission
from mqd.worker.subjects import Subjects

def change(self, put, removed):
    self._rules.change({key: one for key, one in put.items() if one.permission == Permission.ALLOW}, ())

Subjects.change = change
"""


def forgetful(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers never apply the removal of a right."""
    (directory / "sitecustomize.py").write_text(FORGETS)
    monkeypatch.setenv("PYTHONPATH", str(directory))


def sound(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", [sound, forgetful])
def test_a_secured_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None]) -> None:
    plant(tmp_path, monkeypatch)
    result = Run(
        Plan(7, 60.0, ["pair", "kill-process", "certificates", "cluster-key"], secured=True), tmp_path / "run"
    )()
    assert not result.failure, result.failure
    kinds = {one.kind for one in result.anomalies}
    if plant is sound:
        assert not kinds, result.line() + "\n" + "\n".join(str(one) for one in result.anomalies[:20])
        assert result.numbers["beyond the bound"] > 50 and result.numbers["void logins"] > 0
    else:
        assert "served-revoked" in kinds, result.line()
