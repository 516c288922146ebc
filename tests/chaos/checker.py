"""Invariants of a cluster under any faults, like Jepsen's Kafka workload: clients' histories and
the final logs in, anomalies out. Pure.

    lost                an acknowledged record (outside a transaction, or of a committed one) is not
                        in the final log
    duplicate           a record of an idempotent or transactional producer is in its partition
                        twice
    reordered           two records of one producer are in a partition in another order than they
                        were sent
    inconsistent        one (partition, offset) has two values: in the final logs, at consumers, in
                        acknowledgements
    aborted-read        a record of an aborted transaction, or one that certainly was not written,
                        was seen by a reader of committed records (G1a)
    precommitted-read   a record was seen by such a reader before a commit of its transaction was
                        requested
    torn                of one transaction some records are visible at the end and others are not
    hanging             a record of a committed transaction is in the log, and readers of committed
                        records do not reach it
    nonmonotonic-poll   within one assignment a consumer went back in a partition
    poll-skip           within one assignment a consumer skipped a committed record
    nonmonotonic-send   acknowledged offsets of one producer in one partition decrease
    vanished            a record that a consumer of committed records saw is not in the final log
    offset-regression   a group's committed offset went back: a commit was accepted that began after
                        a higher one had been acknowledged
    passed-over         a group has committed beyond a record that none of its members received
    unsent, corrupt     a record was read that no producer sent, or bytes that no producer created
    gap                 the final reader did not reach the end of a log

Cycles of reads and writes between transactions are not an anomaly: Kafka's transactions do not
isolate writes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from tests.chaos.history import Commit, End, FinalLog, History, Place, Send


@dataclasses.dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


def name_of(client: str, number: int) -> str:
    return f"{client}:{number}"


class Checker:
    def __init__(self, history: History, final: dict[Place, FinalLog]) -> None:
        self.history, self.final = history, final
        self.found: list[Anomaly] = []
        self.sends: dict[str, Send] = {name_of(send.client, send.number): send for send in history.sends}
        self.ends: dict[tuple[str, int], End] = {(end.client, end.txn): end for end in history.ends}
        self.committed_at: dict[str, list[tuple[Place, int]]] = defaultdict(list)  # value -> where it is, committed
        self.anywhere_at: dict[str, list[tuple[Place, int]]] = defaultdict(list)
        for place, log in final.items():
            for offset, value in log.committed:
                self.committed_at[value].append((place, offset))
            for offset, value in log.all:
                self.anywhere_at[value].append((place, offset))

    def add(self, kind: str, text: str) -> None:
        self.found.append(Anomaly(kind, text))

    def fate(self, send: Send) -> str:
        """ "written": must be visible; "never": must not be; "maybe"."""
        if send.txn is None:
            return {"ok": "written", "fail": "never"}.get(send.status, "maybe")
        end = self.ends.get((send.client, send.txn))
        if end is None:
            return "never"  # no commit was requested
        if end.status != "ok":
            return "maybe" if end.wish == "commit" else "never"
        if end.wish == "abort":
            return "never"
        return "written" if send.status == "ok" else "maybe"

    # -- the final logs ----------------------------------------------------------------------------

    def check_final(self) -> None:
        for (topic, partition), log in self.final.items():
            where = f"{topic}-{partition}"
            for values, kind in ((log.all, "all records"), (log.committed, "committed records")):
                latest = -1
                for offset, _ in values:
                    if offset <= latest:
                        self.add("gap", f"{where}: the final reader of {kind} got offset {offset} after {latest}")
                    latest = offset
            last: dict[str, tuple[int, int]] = {}
            for offset, value in log.all:
                self._known(value, f"{where} offset {offset} in the final log")
                client, _, number = value.rpartition(":")
                if value in self.sends:
                    before = last.get(client)
                    if before is not None and before[0] > int(number):
                        self.add("reordered", f"{where}: {value} at {offset} after {client}:{before[0]} at {before[1]}")
                    last[client] = max(last.get(client, (-1, -1)), (int(number), offset))
        for value, places in self.anywhere_at.items():
            if len(places) > 1:
                self.add("duplicate", f"{value} is at {_report(places)}")

    def _known(self, value: str, where: str) -> bool:
        client, _, number = value.rpartition(":")
        if not client or not number.isdigit():
            self.add("corrupt", f"{where}: {value[:60]}")
            return False
        if value not in self.sends:
            self.add("unsent", f"{where}: {value} was never sent")
            return False
        return True

    def check_sends(self) -> None:
        for value, send in self.sends.items():
            fate, where = self.fate(send), f"{send.topic}-{send.partition}"
            visible = self.committed_at.get(value)
            if fate == "written" and not visible and self._covered(send):
                there = self.anywhere_at.get(value)
                if there and there[0][1] > max((offset for offset, _ in self.final[there[0][0]].committed), default=-1):
                    self.add(
                        "hanging",
                        f"{value} at {_report(there)} was committed, and readers of committed records do not get there",
                    )
                else:
                    self.add(
                        "lost",
                        f"{value} was acknowledged at {where} offset {send.offset}"
                        + (", and is not among the committed records" if there else ""),
                    )
            if fate == "never" and visible:
                self.add("aborted-read", f"{value} was aborted or refused, and is at {_report(visible)}")
        latest: dict[tuple[str, Place], Send] = {}
        for send in sorted(self.history.sends, key=lambda send: (send.client, send.number)):
            if send.status == "ok" and send.offset >= 0:
                key = (send.client, (send.topic, send.partition))
                before = latest.get(key)
                if before is not None and before.offset >= send.offset:
                    self.add(
                        "nonmonotonic-send",
                        f"{send.client}: number {send.number} was acknowledged at {send.topic}-{send.partition} offset"
                        f" {send.offset}, {before.number} at {before.offset}",
                    )
                latest[key] = send

    def _covered(self, send: Send) -> bool:
        """Retention may have deleted records before the log's start; nothing else may be missing."""
        log = self.final.get((send.topic, send.partition))
        return log is not None and not 0 <= send.offset < log.start

    # -- one value for each offset -----------------------------------------------------------------

    def check_offsets(self) -> None:
        message: dict[tuple[str, int, int], tuple[str, str]] = {}

        def report(topic: str, partition: int, offset: int, value: str, who: str) -> None:
            before = message.setdefault((topic, partition, offset), (value, who))
            if before[0] != value:
                self.add(
                    "inconsistent",
                    f"{topic}-{partition} offset {offset}: {before[1]} says {before[0]}, {who} says {value}",
                )

        for (topic, partition), log in self.final.items():
            for offset, value in log.all:
                report(topic, partition, offset, value, "the final log")
            for offset, value in log.committed:
                report(topic, partition, offset, value, "the final log of committed records")
        for send in self.history.sends:
            if send.status == "ok" and send.offset >= 0 and self.fate(send) != "never":
                report(
                    send.topic, send.partition, send.offset, name_of(send.client, send.number), "its acknowledgement"
                )
        for poll in self.history.polls:
            report(poll.topic, poll.partition, poll.offset, poll.value, poll.client)

    # -- consumers (all of them read committed records) --------------------------------------------

    def check_polls(self) -> None:
        committed = {place: [offset for offset, _ in log.committed] for place, log in self.final.items()}
        known = {place: dict(log.committed) for place, log in self.final.items()}
        index = {
            place: {offset: number for number, offset in enumerate(offsets)} for place, offsets in committed.items()
        }
        due: dict[tuple[str, int, Place], int] = {}
        for poll in self.history.polls:
            place = (poll.topic, poll.partition)
            where = f"{poll.client} (assignment {poll.epoch}) {poll.topic}-{poll.partition} offset {poll.offset}"
            before = due.get((poll.client, poll.epoch, place))
            due[(poll.client, poll.epoch, place)] = max(poll.offset, before if before is not None else -1)
            if before is not None and poll.offset <= before:
                self.add("nonmonotonic-poll", f"{where} after {before}")
            elif (
                before is not None
                and before in index.get(place, ())
                and poll.offset in index[place]
                and index[place][poll.offset] != index[place][before] + 1
            ):
                missed = committed[place][index[place][before] + 1]
                self.add("poll-skip", f"{where} after {before}: {known[place][missed]} at {missed} was passed over")
            self._check_seen(poll.value, poll.at_ns, where, place, poll.offset)

    def _check_seen(self, value: str, at_ns: int, where: str, place: Place, offset: int) -> None:
        if not self._known(value, where):
            return
        send = self.sends[value]
        if self.fate(send) == "never":
            self.add("aborted-read", f"{where}: {value} was aborted or refused")
        elif send.txn is not None:
            end = self.ends.get((send.client, send.txn))
            if end is not None and at_ns < end.begin_ns:
                self.add(
                    "precommitted-read",
                    f"{where}: {value} was seen {(end.begin_ns - at_ns) / 1e6:.1f} ms before anybody asked to commit"
                    " its transaction",
                )
        log = self.final.get(place)
        if log is not None and offset >= log.start and value not in self.committed_at:
            self.add("vanished", f"{where}: {value} is not in the final log")

    # -- transactions ------------------------------------------------------------------------------

    def check_transactions(self) -> None:
        parts: dict[tuple[str, int], list[Send]] = defaultdict(list)
        for send in self.history.sends:
            if send.txn is not None and send.status == "ok":
                parts[(send.client, send.txn)].append(send)
        for (client, txn), sends in parts.items():
            covered = [send for send in sends if self._covered(send)]
            there = [send for send in covered if name_of(client, send.number) in self.committed_at]
            if there and len(there) < len(covered):
                missing = next(send for send in covered if send not in there)
                self.add(
                    "torn",
                    f"transaction {txn} of {client}: {len(there)} of {len(covered)} records are visible,"
                    f" {client}:{missing.number} for {missing.topic}-{missing.partition} is not",
                )

    # -- groups ------------------------------------------------------------------------------------

    def check_groups(self) -> None:
        commits: dict[tuple[str, Place], list[Commit]] = defaultdict(list)
        members: dict[str, set[str]] = defaultdict(set)
        for commit in self.history.commits:
            commits[(commit.group, (commit.topic, commit.partition))].append(commit)
            members[commit.group].add(commit.client)
        polled: dict[tuple[str, Place], set[int]] = defaultdict(set)
        for poll in self.history.polls:
            polled[(poll.client, (poll.topic, poll.partition))].add(poll.offset)
        for (group, place), ones in commits.items():
            self._check_regression(group, place, ones)
            given = set().union(*(polled[(client, place)] for client in members[group]))
            end = max(commit.offset for commit in ones)
            log = self.final.get(place)
            missed = (
                [offset for offset, _ in log.committed if offset < end and offset not in given]
                if log is not None
                else []
            )
            if missed:
                self.add(
                    "passed-over",
                    f"group {group} committed {place[0]}-{place[1]} up to {end}; {len(missed)} records were given to no"
                    f" member, the first at {missed[0]}",
                )

    def _check_regression(self, group: str, place: Place, ones: list[Commit]) -> None:
        """Compared with the highest commit acknowledged before this one began."""
        acknowledged = sorted(ones, key=lambda commit: commit.end_ns)
        number, highest = 0, None
        for commit in sorted(ones, key=lambda commit: commit.begin_ns):
            while number < len(acknowledged) and acknowledged[number].end_ns < commit.begin_ns:
                if highest is None or acknowledged[number].offset > highest.offset:
                    highest = acknowledged[number]
                number += 1
            if highest is not None and commit.offset < highest.offset:
                self.add(
                    "offset-regression",
                    f"group {group} {place[0]}-{place[1]}: {commit.client} committed {commit.offset} after"
                    f" {highest.client} had committed {highest.offset}",
                )


def _report(places: list[tuple[Place, int]]) -> str:
    return ", ".join(f"{topic}-{partition} offset {offset}" for (topic, partition), offset in places[:4])


def check(history: History, final: dict[Place, FinalLog]) -> list[Anomaly]:
    checker = Checker(history, final)
    checker.check_final()
    checker.check_sends()
    checker.check_offsets()
    checker.check_polls()
    checker.check_transactions()
    checker.check_groups()
    return checker.found


def summary(anomalies: list[Anomaly], lines: int = 6) -> str:
    """How many of each kind, and the first of each."""
    kinds: dict[str, list[Anomaly]] = defaultdict(list)
    for one in anomalies:
        kinds[one.kind].append(one)
    return "\n".join(
        line
        for kind, ones in kinds.items()
        for line in (f"{kind} x {len(ones)}", *(f"    {one.text}" for one in ones[:lines]))
    )
