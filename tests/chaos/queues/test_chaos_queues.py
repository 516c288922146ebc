"""The judge: a history of a correct cluster passes, and each kind of anomaly, planted into it, is found with
its name. And one short run.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import network
from tests.chaos.checker import name_of, summary
from tests.chaos.history import End, FinalLog, History, Place, Poll, Send
from tests.chaos.queues import (
    ACCEPT,
    DELIVERIES_MAX,
    DUE,
    JOBS,
    LATER,
    LETTERS,
    PARTITIONS,
    REJECT,
    RELEASE,
    UNIQUE,
    VIEW,
    outcome_of,
    tag_of,
)
from tests.chaos.queues.judge import STALE_NS, check
from tests.chaos.queues.run import QueueRun
from tests.chaos.run import Plan

REASON = network.why_not()
S = 1_000_000_000
LATE = 1_000 * S  # when everything has been delivered


class Sound:
    """What clients of a correct cluster record, and the final logs."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.history = History()
        self.logs: dict[Place, list[tuple[int, str, bool]]] = {
            (topic, partition): [] for topic, count in PARTITIONS.items() for partition in range(count)
        }
        self.now = S
        for number in range(200):
            self._send("p1", number, JOBS)
            self._send("p2", number, LATER)
        for number in range(0, 200, 4):
            self._transaction(number)
        self._share()
        self._schedule()
        for number in range(100):
            self._append(UNIQUE, name_of(self.rng.choice(("d1", "d2")), number))
            for _ in range(2):
                self.note("unique", number=number)

    def note(self, kind: str, client: str = "s1", **fields: Any) -> dict[str, Any]:
        self.history.notes.append({"kind": kind, "client": client, **fields})
        return self.history.notes[-1]

    def time(self) -> int:
        self.now += self.rng.randrange(1, 1_000_000)
        return self.now

    def _append(self, topic: str, value: str, committed: bool = True) -> Place:
        partition = self.rng.randrange(PARTITIONS[topic])
        log = self.logs[(topic, partition)]
        log.append((log[-1][0] + 1 if log else 0, value, committed))
        return str(partition), log[-1][0]

    def _send(self, client: str, number: int, topic: str, txn: int | None = None, committed: bool = True) -> None:
        value, begin = name_of(client, number), self.time()
        partition, offset = self._append(topic, value, committed)
        self.history.sends.append(Send(client, number, topic, int(partition), "ok", offset, begin, self.time(), txn))
        if topic == LATER:
            # every tenth cancels one that is not delivered
            is_cancel = number % 10 == 9
            fields = {"cancels": number - 1} if is_cancel else {"due_ms": self.now // 10**6, "due_ns": self.now}
            self.note("due", client, number=number, **fields)

    def _transaction(self, number: int) -> None:
        wish = self.rng.choice(("commit", "abort"))
        for index in range(4):
            self._send("x1", number + index, JOBS if index % 2 else LATER, number, wish == "commit")
        self.history.ends.append(End("x1", number, wish, "ok", self.time(), self.time()))

    def committed(self, topic: str) -> list[tuple[int, int, str]]:
        return [
            (partition, offset, value)
            for (name, partition), log in self.logs.items()
            if name == topic
            for offset, value, is_committed in log
            if is_committed
        ]

    def _share(self) -> None:
        for partition, offset, value in self.committed(JOBS):
            for count in range(1, DELIVERIES_MAX + 1):
                self.note("delivered", value=value, count=count, partition=partition, offset=offset, at_ns=self.time())
                outcome = outcome_of(int(value.rpartition(":")[2]), count)
                self.note("settle", value=value, count=count, outcome=outcome)
                self.note("settled", value=value, count=count, outcome=outcome, status="ok", at_ns=self.time())
                if outcome == REJECT or count == DELIVERIES_MAX:
                    self._append(LETTERS, value)
                if outcome != RELEASE:
                    break

    def _schedule(self) -> None:
        due = {name_of(line["client"], line["number"]): line for line in self.notes("due")}
        committed = {value for _, _, value in self.committed(LATER)}
        cancelled = {
            name_of(line["client"], line["cancels"])
            for value, line in due.items()
            if "cancels" in line and value in committed
        }
        for value in sorted(committed - cancelled):
            if "cancels" not in due[value]:
                partition, offset = self._append(DUE, value)
                at_ns = LATE + self.time()
                self.note("arrived", "c1", value=value, time_ms=at_ns // 10**6, at_ns=at_ns)
                self.history.polls.append(Poll("c1", 0, DUE, int(partition), offset, value, at_ns))

    def notes(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.history.notes if line["kind"] == kind]

    def finish(self) -> tuple[History, dict[Place, FinalLog]]:
        final = {}
        for (topic, partition), log in self.logs.items():
            if topic == LATER:
                continue
            parts = [(offset, value) for offset, value, _ in log], [row[:2] for row in log if row[2]]
            final[(topic, partition)] = FinalLog(0, len(log), *parts)
            if topic == JOBS:
                final[(VIEW, partition)] = FinalLog(
                    0, len(log), *([one for one in part if _tagged(one)] for part in parts)
                )
        for (topic, partition), log in final.items():
            for offset, value in log.committed if topic in (JOBS, VIEW) else ():
                self.history.polls.append(Poll("c1", 0, topic, partition, offset, value, LATE + self.time()))
        return self.history, final


def _tagged(record: tuple[int, str]) -> bool:
    return tag_of(int(record[1].rpartition(":")[2])) == "a"


def sound(seed: int) -> tuple[History, dict[Place, FinalLog]]:
    return Sound(seed).finish()


@pytest.mark.parametrize("seed", range(10))
def test_a_correct_history_passes(seed: int) -> None:
    found, counts = check(*sound(seed))
    assert not found, summary(found)
    assert all(counts[name] > 10 for name in ("accepted", "letters", "delivered", "cancelled", "viewed", "ids")), counts


# -- planted ---------------------------------------------------------------------------------------

Final = dict[Place, FinalLog]


def _lines(history: History, kind: str, **fields: object) -> list[dict[str, Any]]:
    return [
        line
        for line in history.notes
        if line["kind"] == kind and all(line[name] == value for name, value in fields.items())
    ]


def _drop(history: History, **fields: object) -> None:
    history.notes[:] = [line for line in history.notes if any(line.get(key) != one for key, one in fields.items())]


def _remove(final: Final, topic: str, value: str) -> None:
    for place, log in final.items():
        if place[0] == topic:
            for part in (log.all, log.committed):
                part[:] = [one for one in part if one[1] != value]


def _add(final: Final, place: Place, value: str) -> None:
    log = final[place]
    for part in (log.all, log.committed):
        part.append((log.end, value))


def never_accepted(history: History, final: Final) -> None:
    value = _lines(history, "settled", outcome=ACCEPT)[5]["value"]
    for kind in ("settle", "settled"):
        _drop(history, kind=kind, value=value)


def refused_and_lost(history: History, final: Final) -> None:
    _lines(history, "settled", outcome=ACCEPT)[5]["status"] = "INVALID_RECORD_STATE"


def letter_lost(history: History, final: Final) -> None:
    _remove(final, LETTERS, _lines(history, "settled", outcome=REJECT)[2]["value"])


def exhausted_and_lost(history: History, final: Final) -> None:
    _remove(final, LETTERS, _lines(history, "delivered", count=DELIVERIES_MAX)[0]["value"])


def finished_twice(history: History, final: Final) -> None:
    history.notes.append({**_lines(history, "settled", outcome=ACCEPT)[5], "client": "s2"})


def delivered_again(history: History, final: Final) -> None:
    line = _lines(history, "delivered", count=1)[0]
    history.notes.append({**line, "client": "s2", "count": 2, "at_ns": LATE})


def delivered_again_much_later(history: History, final: Final) -> None:
    line = _lines(history, "delivered", count=1)[0]
    history.notes.append({**line, "client": "s2", "at_ns": LATE + STALE_NS})


def beyond_the_limit(history: History, final: Final) -> None:
    line = _lines(history, "delivered", count=DELIVERIES_MAX)[0]
    history.notes.append({**line, "count": DELIVERIES_MAX + 1})


def aborted_job(history: History, final: Final) -> None:
    aborted = {end.txn for end in history.ends if end.wish == "abort"}
    send = next(send for send in history.sends if send.txn in aborted and send.topic == JOBS)
    fields = {"partition": send.partition, "offset": send.offset, "count": 1, "at_ns": LATE}
    history.notes.append({"kind": "delivered", "client": "s1", "value": name_of("x1", send.number), **fields})


def letter_twice(history: History, final: Final) -> None:
    _add(final, (LETTERS, 0), final[(LETTERS, 1)].committed[0][1])


def letter_of_an_accepted_job(history: History, final: Final) -> None:
    _add(final, (LETTERS, 0), _lines(history, "settled", outcome=ACCEPT)[5]["value"])


def early_by_the_reader(history: History, final: Final) -> None:
    line = _lines(history, "arrived")[3]
    line["at_ns"] = _due_of(history, line)["due_ns"] - 1


def early_by_the_broker(history: History, final: Final) -> None:
    line = _lines(history, "arrived")[3]
    line["time_ms"] = _due_of(history, line)["due_ms"] - 1


def _due_of(history: History, arrived: dict[str, Any]) -> dict[str, Any]:
    lines = _lines(history, "due")
    return next(line for line in lines if name_of(line["client"], line["number"]) == arrived["value"])


def delivered_twice(history: History, final: Final) -> None:
    _add(final, (DUE, 0), final[(DUE, 1)].committed[0][1])


def not_delivered(history: History, final: Final) -> None:
    value = final[(DUE, 0)].committed[4][1]
    _remove(final, DUE, value)
    history.polls[:] = [poll for poll in history.polls if (poll.topic, poll.value) != (DUE, value)]


def cancelled_by_an_aborted_record(history: History, final: Final) -> None:
    """The cancelled one is not delivered, though its cancellation was aborted."""
    aborted = {end.txn for end in history.ends if end.wish == "abort"}
    send = next(send for send in history.sends if send.txn in aborted and send.topic == LATER)
    history.notes.append({"kind": "due", "client": "x1", "number": send.number, "cancels": 4})
    _remove(final, DUE, "p2:4")
    history.polls[:] = [poll for poll in history.polls if (poll.topic, poll.value) != (DUE, "p2:4")]


def a_cancellation_delivered(history: History, final: Final) -> None:
    line = next(line for line in _lines(history, "due", client="p2") if "cancels" in line)
    _add(final, (DUE, 0), name_of("p2", line["number"]))


def a_record_missing_in_the_view(history: History, final: Final) -> None:
    del final[(VIEW, 0)].committed[3]


def a_record_too_many_in_the_view(history: History, final: Final) -> None:
    other = next(one for one in final[(JOBS, 0)].all if not _tagged(one))
    final[(VIEW, 0)].all[:] = sorted([*final[(VIEW, 0)].all, other])


def skipped_by_the_views_reader(history: History, final: Final) -> None:
    index = [index for index, poll in enumerate(history.polls) if (poll.topic, poll.partition) == (VIEW, 1)]
    del history.polls[index[2]]


def same_id(history: History, final: Final) -> None:
    number = final[(UNIQUE, 0)].committed[0][1].rpartition(":")[2]
    _add(final, (UNIQUE, 1), name_of("d9", int(number)))


def id_lost(history: History, final: Final) -> None:
    _remove(final, UNIQUE, final[(UNIQUE, 0)].committed[0][1])


def job_lost(history: History, final: Final) -> None:
    _remove(final, JOBS, "p1:8")


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (never_accepted, "share-lost"),
        (refused_and_lost, "share-lost"),
        (exhausted_and_lost, "share-lost"),
        (finished_twice, "share-twice"),
        (delivered_again, "share-again"),
        (delivered_again_much_later, "share-again"),
        (beyond_the_limit, "share-count"),
        (aborted_job, "share-uncommitted"),
        (letter_lost, "letter-lost"),
        (letter_twice, "letter-twice"),
        (letter_of_an_accepted_job, "letter-wrong"),
        (early_by_the_reader, "schedule-early"),
        (early_by_the_broker, "schedule-early"),
        (delivered_twice, "schedule-twice"),
        (not_delivered, "schedule-lost"),
        (cancelled_by_an_aborted_record, "schedule-lost"),
        (a_cancellation_delivered, "schedule-wrong"),
        (a_record_missing_in_the_view, "view-differs"),
        (a_record_too_many_in_the_view, "view-differs"),
        (skipped_by_the_views_reader, "view-poll-skip"),
        (same_id, "unique-twice"),
        (id_lost, "unique-lost"),
        (job_lost, "lost"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_anomaly_is_found(plant: Callable[[History, Final], None], kind: str, seed: int) -> None:
    history, final = sound(seed)
    plant(history, final)
    assert kind in {anomaly.kind for anomaly in check(history, final)[0]}


def test_what_faults_may_do_is_no_anomaly() -> None:
    history, final = sound(1)
    # its lock had ended, and it was handed out before another member accepted it
    stale = _lines(history, "delivered", count=1)[0]
    history.notes.append({**stale, "client": "s2", "at_ns": stale["at_ns"] + 10 * S})
    # accepted, and the response was lost
    _lines(history, "settled", outcome=ACCEPT)[7]["status"] = "unknown"
    # killed before it wrote the outcome
    value = _lines(history, "settled", outcome=ACCEPT)[9]["value"]
    _drop(history, kind="settled", value=value)
    # cancelled too late
    cancelled = next(line for line in _lines(history, "due", client="p2") if "cancels" in line)
    _add(final, (DUE, 0), name_of("p2", cancelled["cancels"]))
    found, _ = check(history, final)
    assert not found, summary(found)


@pytest.mark.skipif(bool(REASON), reason=REASON)
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run(tmp_path: Path) -> None:
    result = QueueRun(Plan(7, 30.0, ["kill-process", "kill-host", "pair"], queues=True), tmp_path)()
    assert result.ok, result.line() + "\n" + summary(result.anomalies)
    counts = ("accepted", "letters", "delivered", "cancelled", "viewed", "ids")
    assert all(result.numbers[name] > 20 for name in counts), result.numbers
