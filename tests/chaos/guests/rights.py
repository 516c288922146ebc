"""Requests of guests (process.py) that must not have been served, found in their history: pure.

    served-revoked      a request was served that began later than the bound after the response to a
                        revocation, before the right was granted again
    void-password       a client was authenticated with a password later than the bound after it was
                        replaced or deleted
    outlived            a request was served that began after the time at which the guests' listener
                        requires re-authentication
    written-unasked     a record whose writer was refused is in the log
    guest-lost          a guest's record that was acknowledged is not

A change without a response may still take effect, for DELAYED_S: with such a grant, no revocation
in that time counts, and a password set so is never void.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.chaos.checker import Anomaly
from tests.chaos.history import FinalLog

DELAYED_S = 60
FOREVER = 1 << 63
_MS = 1_000_000


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The lines of guests; the last one of a killed process may be truncated."""
    kinds = ("right", "password", "login", "asked")
    lines = [line for path in sorted(paths) for line in path.read_text().split("\n") if line.endswith("}")]
    return [one for one in map(json.loads, lines) if one["kind"] in kinds]


class _Judge:
    def __init__(self, bound_ms: int, reauthenticate_ms: int) -> None:
        self.bound_ns, self.lifetime_ns = bound_ms * _MS, reauthenticate_ms * _MS
        self.found: list[Anomaly] = []
        self.counts: Counter[str] = Counter()
        self.revoked: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
        self.passwords: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def learn(self, lines: list[dict[str, Any]]) -> None:
        rights: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
        for one in lines:
            if one["kind"] == "right":
                rights[(one["user"], one["operation"])].append(one)
            elif one["kind"] == "password" and one["status"] != "begun":
                self.passwords[one["user"]].append(one)
                self.counts["passwords"] += one["status"] == "ok"
        for right, changes in rights.items():
            self._learn(right, changes)

    def _learn(self, right: tuple[str, int], changes: list[dict[str, Any]]) -> None:
        grants = [one for one in changes if one["change"] == "grant"]
        answered = {one["begin_ns"] for one in grants if one["status"] == "ok"}
        delayed = [one["begin_ns"] for one in grants if one["begin_ns"] not in answered]
        for one in changes:
            if one["change"] != "revoke" or one["status"] != "ok":
                continue
            self.counts["revocations"] += 1
            if any(0 <= one["begin_ns"] - grant < DELAYED_S * 1000 * _MS for grant in delayed):
                continue
            again = min((grant["begin_ns"] for grant in grants if grant["begin_ns"] >= one["end_ns"]), default=FOREVER)
            self.revoked[right].append((one["end_ns"] + self.bound_ns, again))

    def judge(self, one: dict[str, Any]) -> None:
        if one["kind"] == "login":
            self._login(one)
        elif one["kind"] == "asked":
            self._requested(one)

    def _login(self, one: dict[str, Any]) -> None:
        changes = self.passwords[one["user"]]
        may_come = any(
            change["number"] == one["number"] and (change["status"] != "ok" or change["deletes"]) for change in changes
        )
        void = not may_come and any(
            change["number"] > one["number"]
            and change["status"] == "ok"
            and change["end_ns"] + self.bound_ns < one["login_begin_ns"]
            for change in changes
        )
        self.counts["logins"] += one["served"]
        self.counts["void logins"] += void
        if void and one["served"]:
            self.found.append(Anomaly("void-password", f"{one['host']} let {one['user']} in: {_report(one)}"))

    def _requested(self, one: dict[str, Any]) -> None:
        self.counts["served"] += one["served"]
        self.counts["denied"] += one["denied"]
        for since, until in self.revoked[(one["user"], one["operation"])]:
            if since < one["begin_ns"] and one["end_ns"] < until:
                self.counts["beyond the bound"] += 1
                if one["served"]:
                    late = (one["begin_ns"] - since) / _MS
                    text = f"{one['host']} served {one['user']} {late:.0f} ms beyond the bound: {_report(one)}"
                    self.found.append(Anomaly("served-revoked", text))
        age_ns = one["begin_ns"] - one["login_end_ns"]
        if one["served"] and age_ns > self.lifetime_ns:
            text = (
                f"{one['host']} served {one['user']} {age_ns / _MS:.0f} ms after it had authenticated: {_report(one)}"
            )
            self.found.append(Anomaly("outlived", text))

    def judge_log(self, lines: list[dict[str, Any]], logs: list[FinalLog]) -> None:
        there = {bytes.fromhex(value).decode(errors="replace") for log in logs for _, value in log.all}
        for one in lines:
            for value in one.get("refused", ()):
                if value in there:
                    self.found.append(Anomaly("written-unasked", f"{value}, {one['host']}: {_report(one)}"))
            for value in one.get("written", ()):
                self.counts["guests' records"] += 1
                if value not in there:
                    self.found.append(Anomaly("guest-lost", f"{value}, {one['host']}: {_report(one)}"))


def _report(one: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in one.items() if name not in ("kind", "client", "written")})


def check(
    lines: list[dict[str, Any]], logs: list[FinalLog], bound_ms: int, reauthenticate_ms: int
) -> tuple[list[Anomaly], Counter[str]]:
    """`logs`: the records of the guarded topic at the end. Also returns how many cases were
    checked.
    """
    judge = _Judge(bound_ms, reauthenticate_ms)
    judge.learn(lines)
    for one in lines:
        judge.judge(one)
    judge.judge_log(lines, logs)
    return judge.found, judge.counts
