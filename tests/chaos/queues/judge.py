"""Invariants of share groups, schedules, views and deduplication, from the clients' histories and the
final logs. Pure. Jobs are checked by tests/chaos/checker.py as well.

    share-lost         a committed job has neither been accepted nor become a dead letter, though the
                       group's lag is 0
    share-twice        a job has two confirmed final acknowledgements
    share-again        a job was delivered again after a confirmed final acknowledgement
    share-count        it was delivered more often than the limit allows
    share-uncommitted  a delivered job is not among the committed ones, or at another offset
    letter-lost        a job whose rejection was confirmed has no dead letter
    letter-twice       a job has two committed dead letters
    letter-wrong       a dead letter of a job that was accepted, or is not committed
    schedule-early     a record was delivered before it was due
    schedule-twice     a record was delivered twice to consumers of committed records
    schedule-lost      a committed record that no committed record cancels was not delivered
    schedule-wrong     a record was delivered that is not committed, or only cancels another
    view-differs       the view's final log is not the filtered one of its base
    view-*, due-*      a consumer of the view, of the schedule's target: as in checker.py
    unique-twice       two committed records have the same id
    unique-lost        no committed record has an id that was acknowledged
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from tests.chaos import checker
from tests.chaos.checker import Anomaly, Checker, name_of
from tests.chaos.history import FinalLog, History, Place, Send
from tests.chaos.queues import ACCEPT, DELIVERIES_MAX, DUE, JOBS, LATER, LETTERS, LOCK_S, REJECT, UNIQUE, VIEW, tag_of

# the acknowledgement had no effect
REFUSED = frozenset({"INVALID_RECORD_STATE"})
# A member may have got a job before another one accepted it, and only looks at it now. Its lock had
# ended, and it does not look later than this.
STALE_NS = int(4 * LOCK_S * 1e9)


class _Judge:
    def __init__(self, history: History, final: dict[Place, FinalLog]) -> None:
        self.history, self.final = history, final
        self.found: list[Anomaly] = []
        self.counts: Counter[str] = Counter()
        self.fate_of: Callable[[Send], str] = Checker(history, {}).fate
        self.lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in history.notes:
            self.lines[line["kind"]].append(line)
        self.jobs = self._committed(JOBS)
        self.letters = self._committed(LETTERS)

    def add(self, kind: str, text: str) -> None:
        self.found.append(Anomaly(kind, text))

    def _committed(self, topic: str) -> dict[str, list[Place]]:
        """Value -> its partitions and offsets."""
        found: dict[str, list[Place]] = defaultdict(list)
        for partition, log in self._logs(topic).items():
            for offset, value in log.committed:
                found[value].append((str(partition), offset))
        return found

    def _logs(self, topic: str) -> dict[int, FinalLog]:
        return {place[1]: log for place, log in self.final.items() if place[0] == topic}

    def _part(self, sent_to: str, read_from: str) -> History:
        return History(
            sends=[send for send in self.history.sends if send.topic == sent_to],
            ends=self.history.ends,
            polls=[poll for poll in self.history.polls if poll.topic == read_from],
        )

    def check_jobs(self) -> None:
        self.found += checker.check(
            self._part(JOBS, JOBS), {(JOBS, partition): log for partition, log in self._logs(JOBS).items()}
        )

    # -- share groups ------------------------------------------------------------------------------

    def check_deliveries(self) -> None:
        final_by: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in self.lines["settled"]:
            if line["status"] == "ok" and line["outcome"] in (ACCEPT, REJECT):
                final_by[line["value"]].append(line)
        for value, lines in final_by.items():
            if len(lines) > 1:
                self.add("share-twice", f"{value} was finished by {_members(lines)}")
        for line in self.lines["delivered"]:
            value, place = line["value"], (str(line["partition"]), line["offset"])
            if place not in self.jobs.get(value, ()):
                self.add("share-uncommitted", f"{line['client']} got {value} at {place}, committed: {self.jobs[value]}")
            if not 1 <= line["count"] <= DELIVERIES_MAX:
                self.add("share-count", f"{line['client']} got {value} with delivery count {line['count']}")
            for end in final_by.get(value, ())[:1]:
                is_stale = line["count"] <= end["count"] and line["at_ns"] < end["at_ns"] + STALE_NS
                if line["at_ns"] > end["at_ns"] and not is_stale:
                    self.add(
                        "share-again",
                        f"{line['client']} got {value} (delivery {line['count']})"
                        f" {(line['at_ns'] - end['at_ns']) / 1e9:.1f} s after {end['client']} had finished delivery"
                        f" {end['count']} ({end['outcome']})",
                    )
        self.counts.update(
            deliveries=len(self.lines["delivered"]),
            accepted=sum(lines[0]["outcome"] == ACCEPT for lines in final_by.values()),
            rejected=sum(lines[0]["outcome"] == REJECT for lines in final_by.values()),
        )
        self._check_ends(final_by)

    def _check_ends(self, final_by: dict[str, list[dict[str, Any]]]) -> None:
        """Each job was accepted, or has one dead letter."""
        refused = Counter(
            line["value"] for line in self.lines["settled"] if line["outcome"] == ACCEPT and line["status"] in REFUSED
        )
        tried = Counter(line["value"] for line in self.lines["settle"] if line["outcome"] == ACCEPT)
        accepted = {value for value, lines in final_by.items() if lines[0]["outcome"] == ACCEPT}
        for value, places in self.jobs.items():
            if value not in self.letters and tried[value] <= refused[value]:
                self.add("share-lost", f"{value} at {places} was neither accepted nor is it a dead letter")
        for value, lines in final_by.items():
            if lines[0]["outcome"] == REJECT and value not in self.letters:
                self.add("letter-lost", f"{value} was rejected by {_members(lines)}")
        for value, places in self.letters.items():
            if len(places) > 1:
                self.add("letter-twice", f"{value} has letters at {places}")
            if value in accepted or value not in self.jobs:
                self.add(
                    "letter-wrong", f"{value} at {places}: " + ("accepted" if value in accepted else "no such job")
                )
        self.counts.update(letters=len(self.letters))

    # -- schedules ---------------------------------------------------------------------------------

    def check_schedule(self) -> None:
        due = {name_of(line["client"], line["number"]): line for line in self.lines["due"]}
        fates = {
            name_of(send.client, send.number): self.fate_of(send) for send in self.history.sends if send.topic == LATER
        }
        cancelled = {
            name_of(line["client"], line["cancels"])
            for value, line in due.items()
            if "cancels" in line and fates.get(value, "maybe") != "never"
        }
        delivered = self._committed(DUE)
        for value, fate in fates.items():
            if fate == "written" and value not in delivered and value not in cancelled and "cancels" not in due[value]:
                self.add("schedule-lost", f"{value}, due {due[value]['due_ms']}")
        for value, places in delivered.items():
            if len(places) > 1:
                self.add("schedule-twice", f"{value} is at {places}")
            # a record without a line was sent by a client that was killed
            if fates.get(value, "maybe") == "never" or value not in due or "cancels" in due[value]:
                self.add("schedule-wrong", f"{value} ({fates.get(value)}, {due.get(value)}) is at {places}")
        late_ms = [0]
        for line in self.lines["arrived"]:
            at = due.get(line["value"])
            if at is None or "cancels" in at:
                continue
            late_ms.append(line["time_ms"] - at["due_ms"])
            if line["time_ms"] < at["due_ms"] or line["at_ns"] < at["due_ns"]:
                self.add("schedule-early", f"{line['value']}, due {at}, arrived {line}")
        watched = Checker(self._part(LATER, DUE), {(DUE, index): log for index, log in self._logs(DUE).items()})
        watched.check_polls()
        self.found += [dataclasses.replace(one, kind=f"due-{one.kind}") for one in watched.found]
        self.counts.update(
            scheduled=len(fates),
            delivered=len(delivered),
            cancelled=len(cancelled - delivered.keys()),
            late_ms=max(late_ms),
        )

    # -- views -------------------------------------------------------------------------------------

    def check_view(self) -> None:
        expected = {(VIEW, partition): _selected(log) for partition, log in self._logs(JOBS).items()}
        for place, wanted in expected.items():
            found = self.final[place]
            for name in ("start", "end", "all", "committed"):
                if getattr(found, name) != getattr(wanted, name):
                    self.add(
                        "view-differs", f"{place} {name}: {_difference(getattr(wanted, name), getattr(found, name))}"
                    )
        reader = Checker(self._part(JOBS, VIEW), expected)
        reader.check_polls()
        self.found += [dataclasses.replace(one, kind=f"view-{one.kind}") for one in reader.found]
        self.counts.update(viewed=sum(len(log.committed) for log in expected.values()))

    # -- deduplication -----------------------------------------------------------------------------

    def check_unique(self) -> None:
        by_id: dict[str, list[str]] = defaultdict(list)
        for value, places in self._committed(UNIQUE).items():
            by_id[value.rpartition(":")[2]] += [f"{value} at {place}" for place in places]
        for number, places in by_id.items():
            if len(places) > 1:
                self.add("unique-twice", f"id {number}: {', '.join(places)}")
        acknowledged = {str(line["number"]) for line in self.lines["unique"]}
        for number in sorted(acknowledged - by_id.keys()):
            self.add("unique-lost", f"id {number} was acknowledged")
        self.counts.update(ids=len(by_id), ids_acknowledged=len(self.lines["unique"]))


def _members(lines: list[dict[str, Any]]) -> str:
    return ", ".join(f"{line['client']} ({line['outcome']}, delivery {line['count']})" for line in lines)


def _selected(log: FinalLog) -> FinalLog:
    def selected(records: list[tuple[int, str]]) -> list[tuple[int, str]]:
        return [(offset, value) for offset, value in records if tag_of(int(value.rpartition(":")[2])) == "a"]

    return FinalLog(log.start, log.end, selected(log.all), selected(log.committed))


def _difference(wanted: Any, found: Any) -> str:
    if not isinstance(wanted, list):
        return f"{found} instead of {wanted}"
    missing, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    return f"{len(missing)} are missing, {missing[:3]}; {len(more)} too many, {more[:3]}"


def check(history: History, final: dict[Place, FinalLog]) -> tuple[list[Anomaly], Counter[str]]:
    """The anomalies, and how much there was to judge. `final`: of all topics but the schedule, which deletes
    what it has delivered.
    """
    judge = _Judge(history, final)
    judge.check_jobs()
    judge.check_deliveries()
    judge.check_schedule()
    judge.check_view()
    judge.check_unique()
    return judge.found, judge.counts
