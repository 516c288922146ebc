"""The checker itself: a history of a correct cluster passes, and each kind of anomaly, planted into
it, is found with its name.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from perf import revision
from tests.chaos import __main__ as command
from tests.chaos import history as histories
from tests.chaos import total
from tests.chaos.checker import check, name_of, summary
from tests.chaos.history import Commit, End, FinalLog, History, Place, Poll, Send
from tests.chaos.run import Plan, Result

PLACES: list[Place] = [("t", 0), ("t", 1), ("u", 0)]


@dataclass
class Sound:
    """A model of a correct cluster, with clients on it; markers take offsets too."""

    rng: random.Random
    # offset, value, committed
    logs: dict[Place, list[tuple[int, str, bool]]] = field(default_factory=lambda: {place: [] for place in PLACES})
    ends: dict[Place, int] = field(default_factory=lambda: dict.fromkeys(PLACES, 0))
    history: History = field(default_factory=History)
    now: int = 1_000
    numbers: dict[str, int] = field(default_factory=dict)

    def time(self) -> int:
        self.now += self.rng.randrange(1, 1_000_000)
        return self.now

    def append(self, place: Place, value: str, committed: bool) -> int:
        offset = self.ends[place]
        self.ends[place] += 1
        self.logs[place].append((offset, value, committed))
        return offset

    def send(self, client: str, place: Place, txn: int | None = None, committed: bool = True, fate: str = "ok") -> None:
        number = self.numbers[client] = self.numbers.get(client, -1) + 1
        begin = self.time()
        written = fate == "ok" or (fate == "info" and self.rng.random() < 0.5)
        offset = self.append(place, name_of(client, number), committed) if written else -1
        self.history.sends.append(
            Send(client, number, *place, fate, offset if fate == "ok" else -1, begin, self.time(), txn)
        )

    def transaction(self, client: str, txn: int) -> None:
        wish = self.rng.choice(("commit", "commit", "abort"))
        known = self.rng.random() < 0.8
        commits = wish == "commit" and (known or self.rng.random() < 0.5)
        places = self.rng.sample(PLACES, 2)
        for _ in range(self.rng.randrange(2, 5)):
            self.send(client, self.rng.choice(places), txn, commits)
        self.history.ends.append(End(client, txn, wish, "ok" if known else "info", self.time(), self.time()))
        for place in places:
            self.ends[place] += 1  # the marker

    def consume(self, client: str) -> None:
        for epoch in range(3):
            for place in PLACES:
                committed = [one for one in self.logs[place] if one[2]]
                start = self.rng.randrange(len(committed))
                for offset, value, _ in committed[start : start + 40]:
                    self.history.polls.append(Poll(client, epoch, *place, offset, value, self.time()))

    def group(self) -> None:
        """Two members alternately, each from the group's committed offset; some read without
        committing.
        """
        position = dict.fromkeys(PLACES, 0)
        for turn in range(30):
            client, place = f"m{turn % 2}", self.rng.choice(PLACES)
            batch = [one for one in self.logs[place] if one[2] and one[0] >= position[place]][
                : self.rng.randrange(1, 30)
            ]
            for offset, value, _ in batch:
                self.history.polls.append(Poll(client, turn, *place, offset, value, self.time()))
            if batch and self.rng.random() < 0.8:
                position[place] = batch[-1][0] + 1
                self.history.commits.append(Commit(client, "g", *place, position[place], self.time(), self.time()))

    def final(self) -> dict[Place, FinalLog]:
        return {
            place: FinalLog(
                0,
                self.ends[place],
                [(offset, value) for offset, value, _ in log],
                [(offset, value) for offset, value, committed in log if committed],
            )
            for place, log in self.logs.items()
        }


def sound(seed: int) -> tuple[History, dict[Place, FinalLog]]:
    model = Sound(random.Random(seed))
    for turn in range(60):
        for client in ("p1", "p2"):
            model.send(client, model.rng.choice(PLACES), fate=model.rng.choice(("ok",) * 8 + ("info", "fail")))
        model.transaction("x1", turn)
    model.consume("c1")
    model.consume("c2")
    model.group()
    return model.history, model.final()


@pytest.mark.parametrize("seed", range(20))
def test_a_correct_history_passes(seed: int) -> None:
    found = check(*sound(seed))
    assert not found, summary(found)


# -- planted ---------------------------------------------------------------------------------------

Planting = Callable[[History, dict[Place, FinalLog]], None]


def _acknowledged(history: History, txn: bool = False) -> Send:
    committed = {(end.client, end.txn) for end in history.ends if end.wish == "commit" and end.status == "ok"}
    return [
        send
        for send in history.sends
        if send.status == "ok" and ((send.client, send.txn) in committed if txn else send.txn is None)
    ][20]


def _without(log: FinalLog, value: str, everywhere: bool = True) -> FinalLog:
    return FinalLog(
        log.start,
        log.end,
        [one for one in log.all if one[1] != value] if everywhere else log.all,
        [one for one in log.committed if one[1] != value],
    )


def _drop_seen(history: History, value: str) -> None:
    history.polls[:] = [poll for poll in history.polls if poll.value != value]


def lost(history: History, final: dict[Place, FinalLog]) -> None:
    send = _acknowledged(history)
    place = (send.topic, send.partition)
    final[place] = _without(final[place], name_of(send.client, send.number))
    _drop_seen(history, name_of(send.client, send.number))


def duplicate(history: History, final: dict[Place, FinalLog]) -> None:
    send = _acknowledged(history)
    log = final[(send.topic, send.partition)]
    for values in (log.all, log.committed):
        values.append((log.end, name_of(send.client, send.number)))


def reordered(history: History, final: dict[Place, FinalLog]) -> None:
    """Two records of unknown outcome in the wrong order: no acknowledgement contradicts it."""
    for number in (1_000, 1_001):
        history.sends.append(Send("p9", number, "t", 0, "info", -1, 1, 2))
    log = final[("t", 0)]
    for values in (log.all, log.committed):
        values += [(log.end, "p9:1001"), (log.end + 1, "p9:1000")]


def inconsistent(history: History, final: dict[Place, FinalLog]) -> None:
    first, second = [index for index, poll in enumerate(history.polls) if (poll.topic, poll.partition) == ("t", 0)][:2]
    value = history.polls[second].value
    history.polls[first] = dataclasses.replace(history.polls[first], value=value)


def aborted_read(history: History, final: dict[Place, FinalLog]) -> None:
    aborted = {(end.client, end.txn) for end in history.ends if end.wish == "abort" and end.status == "ok"}
    send = next(send for send in history.sends if (send.client, send.txn) in aborted)
    history.polls.append(
        Poll(
            "c9", 0, send.topic, send.partition, send.offset, name_of(send.client, send.number), history.polls[-1].at_ns
        )
    )


def refused_read(history: History, final: dict[Place, FinalLog]) -> None:
    send = next(send for send in history.sends if send.status == "fail")
    log = final[(send.topic, send.partition)]
    for values in (log.all, log.committed):
        values.append((log.end, name_of(send.client, send.number)))


def precommitted_read(history: History, final: dict[Place, FinalLog]) -> None:
    send = _acknowledged(history, txn=True)
    history.polls.append(
        Poll("c9", 0, send.topic, send.partition, send.offset, name_of(send.client, send.number), send.begin_ns)
    )


def torn(history: History, final: dict[Place, FinalLog]) -> None:
    """Of a transaction with unknown outcome one record is visible and the other is not."""
    history.sends += [
        Send("x9", 0, "t", 0, "ok", final[("t", 0)].end, 1, 2, 7),
        Send("x9", 1, "t", 1, "ok", final[("t", 1)].end, 1, 2, 7),
    ]
    history.ends.append(End("x9", 7, "commit", "info", 3, 4))
    for place, value, committed in ((("t", 0), "x9:0", True), (("t", 1), "x9:1", False)):
        log = final[place]
        log.all.append((log.end, value))
        if committed:
            log.committed.append((log.end, value))


def hanging(history: History, final: dict[Place, FinalLog]) -> None:
    log = final[("u", 0)]
    history.sends.append(Send("x9", 0, "u", 0, "ok", log.end, 1, 2, 7))
    history.ends.append(End("x9", 7, "commit", "ok", 3, 4))
    log.all.append((log.end, "x9:0"))


def nonmonotonic_poll(history: History, final: dict[Place, FinalLog]) -> None:
    poll = history.polls[5]
    history.polls.insert(8, poll)


def poll_skip(history: History, final: dict[Place, FinalLog]) -> None:
    del history.polls[6]


def nonmonotonic_send(history: History, final: dict[Place, FinalLog]) -> None:
    """The second gets the first's offset; neither was read."""
    first = _acknowledged(history)
    index = next(
        index
        for index, send in enumerate(history.sends)
        if (send.client, send.topic, send.partition) == (first.client, first.topic, first.partition)
        and send.number > first.number
        and send.status == "ok"
    )
    history.sends[index] = dataclasses.replace(history.sends[index], offset=first.offset)


def vanished(history: History, final: dict[Place, FinalLog]) -> None:
    history.sends.append(Send("p9", 0, "t", 0, "info", -1, 1, 2))
    history.polls.append(Poll("c9", 0, "t", 0, final[("t", 0)].end + 5, "p9:0", history.polls[-1].at_ns))


def unsent(history: History, final: dict[Place, FinalLog]) -> None:
    history.polls.append(Poll("c9", 0, "t", 0, final[("t", 0)].end + 5, "p1:99999", history.polls[-1].at_ns))


def corrupt(history: History, final: dict[Place, FinalLog]) -> None:
    final[("t", 0)].all.append((final[("t", 0)].end, "deadbeef"))


def offset_regression(history: History, final: dict[Place, FinalLog]) -> None:
    """A fenced member commits a position that it read long ago."""
    first, last = history.commits[0], max(commit.end_ns for commit in history.commits)
    later = next(
        commit
        for commit in history.commits
        if (commit.topic, commit.partition) == (first.topic, first.partition) and commit.offset > first.offset
    )
    assert later
    history.commits.append(dataclasses.replace(first, client="m0", begin_ns=last + 1, end_ns=last + 2))


def passed_over(history: History, final: dict[Place, FinalLog]) -> None:
    commit = history.commits[0]
    seen = next(
        poll
        for poll in history.polls
        if poll.client == commit.client
        and (poll.topic, poll.partition) == (commit.topic, commit.partition)
        and poll.offset < commit.offset
    )
    history.polls[:] = [
        poll
        for poll in history.polls
        if not (
            poll.client.startswith("m")
            and (poll.topic, poll.partition, poll.offset) == (seen.topic, seen.partition, seen.offset)
        )
    ]


def gap(history: History, final: dict[Place, FinalLog]) -> None:
    log = final[("t", 0)]
    log.all[3], log.all[4] = log.all[4], log.all[3]


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (lost, "lost"),
        (duplicate, "duplicate"),
        (reordered, "reordered"),
        (inconsistent, "inconsistent"),
        (aborted_read, "aborted-read"),
        (refused_read, "aborted-read"),
        (precommitted_read, "precommitted-read"),
        (torn, "torn"),
        (hanging, "hanging"),
        (nonmonotonic_poll, "nonmonotonic-poll"),
        (poll_skip, "poll-skip"),
        (nonmonotonic_send, "nonmonotonic-send"),
        (vanished, "vanished"),
        (offset_regression, "offset-regression"),
        (passed_over, "passed-over"),
        (unsent, "unsent"),
        (corrupt, "corrupt"),
        (gap, "gap"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_anomaly_is_found(plant: Planting, kind: str, seed: int) -> None:
    history, final = sound(seed)
    plant(history, final)
    assert kind in {anomaly.kind for anomaly in check(history, final)}


def test_unknown_outcomes_are_not_anomalies() -> None:
    history, final = sound(1)
    history.sends.append(Send("p9", 0, "t", 0, "info", -1, 1, 2))  # not in the log: it may never have been written
    # its commit's outcome is unknown, and it is not in the log
    history.sends.append(Send("x9", 0, "t", 0, "ok", final[("t", 0)].end, 1, 2, 3))
    history.ends.append(End("x9", 3, "commit", "info", 3, 4))
    history.sends.append(Send("p9", 1, "t", 0, "ok", 0, 1, 2))  # below the log's start: retention has deleted it
    final[("t", 0)] = FinalLog(
        1, final[("t", 0)].end, final[("t", 0)].all[1:], [one for one in final[("t", 0)].committed if one[0] >= 1]
    )
    history.sends[:] = [
        send
        for send in history.sends
        if (send.topic, send.partition, send.offset) != ("t", 0, 0) or send.client == "p9"
    ]
    history.polls[:] = [poll for poll in history.polls if (poll.topic, poll.partition, poll.offset) != ("t", 0, 0)]
    assert not check(history, final), summary(check(history, final))


# -- files -----------------------------------------------------------------------------------------


def test_histories_are_read_back(tmp_path: Path) -> None:
    writer = histories.Writer(tmp_path / "x1.jsonl", "x1")
    send = Send("x1", 4, "t", 1, "ok", 17, 10, 20, 3)
    writer.write("send", **{name: value for name, value in dataclasses.asdict(send).items() if name != "client"})
    writer.write("ask", txn=3, wish="commit", begin_ns=30)
    writer.write("ask", txn=4, wish="commit", begin_ns=31)
    writer.write("end", txn=3, wish="commit", status="ok", begin_ns=30, end_ns=40)
    writer.write("poll", epoch=0, topic="t", partition=1, offset=17, value="x1:4", at_ns=50)
    writer.write("error", text="a broker went away")
    writer.worked(True)
    writer.worked(False)
    writer.flush()
    with (tmp_path / "x1.jsonl").open("a") as file:
        file.write('{"kind": "send", "cli')  # killed while it wrote
    history = histories.read(tmp_path.glob("*.jsonl"))
    assert history.sends == [send] and len(history.polls) == 1 and history.notes[0]["text"] == "a broker went away"
    assert {end.txn: end.status for end in history.ends} == {3: "ok", 4: "info"}
    (counts,) = history.alive["x1"].values()
    assert counts == [1, 1]
    (tmp_path / "y.jsonl").write_text("{broken}\n" + json.dumps({"kind": "error", "client": "y"}) + "\n\n\n")
    with pytest.raises(ValueError):
        histories.read(tmp_path.glob("*.jsonl"))


def test_availability_counts_client_seconds() -> None:
    history = History(alive={"a": {10: [5, 0], 11: [0, 3], 12: [1, 1]}, "b": {10: [1, 0]}})
    assert histories.served(history, ["a", "b"], 10, 14) == (3, 8)


def test_pieces_add_up(tmp_path: Path) -> None:
    run = {
        "seed": 1,
        "seconds": 90.0,
        "ok": True,
        "faults": 9,
        "acknowledged": 100,
        "unknown": 1,
        "refused": 2,
        "polled": 300,
        "transactions": 7,
        "transactions_unknown": 0,
        "fault_seconds": 95,
        "writer_seconds": 380,
        "writer_seconds_served": 285,
        "reader_seconds": 95,
        "reader_seconds_served": 95,
        "writers_available": 0.75,
        "readers_available": 1.0,
        "heal_s": 2.5,
        "kinds": {"pair": [100, 130], "flap": [0, 20]},
        "anomalies": {},
        "failure": "",
    }
    old = {name: value for name, value in run.items() if "_second" not in name} | {"seed": 2, "writers_available": 0.5}
    for number, one in enumerate((run, old)):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(one) + "\nnot a line of ours\n")
    added = total.of_files(sorted(tmp_path.glob("*.jsonl")))
    assert (
        added.clean
        and added.runs == added.ended == 2
        and added.seconds == 185
        and added.faults == 18
        and added.sums["acknowledged"] == 200
    )
    assert added.client_seconds == {"writer": [285 + 180, 380 + 360], "reader": [95 + 90, 95 + 90]}
    assert added.kinds == {"pair": [200, 260], "flap": [0, 40]} and "pair           200 of 260" in total.report(added)
    assert "650 of 925 client seconds (70.27 %)" in total.report(added)
    torn, stuck = (
        run | {"seed": 3, "anomalies": {"torn": 2}},
        {"seed": 4, "seconds": 90.0, "faults": 3, "anomalies": {}, "failure": "AssertionError: no progress\nlogs"},
    )
    found = total.add_up(json.dumps(one) for one in (run, torn, stuck))
    assert (
        not found.clean
        and found.anomalies == {"torn": 2}
        and found.failures == ["seed 4: AssertionError: no progress"]
        and (found.runs, found.ended) == (3, 2)
    )
    assert not total.add_up([]).clean, "nothing was run"


def test_a_recorded_run_has_its_date_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs recorded before they had them are still added up."""
    numbers = {"writers_available": 1.0, "readers_available": 1.0, "heal_s": 0.5}

    def completed(plan: Plan, directory: Path, log: Callable[[str], None]) -> Callable[[], Result]:
        return lambda: Result(plan, numbers=dict(numbers))

    monkeypatch.setattr(command, "Run", completed)
    monkeypatch.setattr(command.network, "why_not", lambda: "")
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    results = tmp_path / "results.jsonl"
    older = {"seed": 6, "seconds": 90.0, "faults": 1, "anomalies": {}, "failure": "", **numbers}
    results.write_text(json.dumps(older) + "\n")
    assert command.main(["--seed", "7", "--results", str(results), "--directory", str(tmp_path)]) == 0
    line = json.loads(results.read_text().splitlines()[-1])
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(line["date"])
    assert datetime.timedelta(0) <= age < datetime.timedelta(minutes=10)
    assert (line["seed"], line["commit"]) == (7, revision.commit())
    added = total.of_files([results])
    assert added.clean and added.seeds == [6, 7] and added.ended == 2
