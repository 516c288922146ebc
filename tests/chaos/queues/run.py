"""One run with queues: `python -m tests.chaos --queues`."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tests.chaos import commands, run
from tests.chaos.checker import Anomaly
from tests.chaos.history import FinalLog, History, Place
from tests.chaos.hosts import PORT, Targets
from tests.chaos.queues import DELIVERIES_MAX, DUE, GROUP, JOBS, LATER, LETTERS, LOCK_S, PARTITIONS, UNIQUE, VIEW, judge
from tests.chaos.run import CREATE, Client, Plan, Run

CONFIG = run.CONFIG | {
    "share.coordinator.state.topic.num.partitions": "5",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.share.record.lock.duration.ms": f"{LOCK_S * 1000:.0f}",
    "group.share.delivery.count.limit": str(DELIVERIES_MAX),
    # members on a host that is cut off, or that are killed, do not hold partitions for long
    "group.share.min.session.timeout.ms": "3000",
    "group.share.session.timeout.ms": "5000",
    "group.share.min.heartbeat.interval.ms": "500",
    "group.share.heartbeat.interval.ms": "500",
}
TOPIC_CONFIG = {
    LETTERS: {"errors.deadletterqueue.group.enable": "true"},
    LATER: {"schedule.to": DUE},
    UNIQUE: {
        "dedup.window.ms": "36000000",
        "message.timestamp.type": "LogAppendTime",
        "compression.type": "uncompressed",
    },
}
GROUP_CONFIG = (
    "share.auto.offset.reset=earliest",
    "share.isolation.level=read_committed",
    f"errors.deadletterqueue.topic.name={LETTERS}",
    "errors.deadletterqueue.copy.record.enable=true",
)
SHARERS = ("s1", "s2", "s3")
KILLED = (*SHARERS, "d1")  # clients that are killed among the faults
# Deliveries are early, and ids expire, by a host whose clock is ahead: the clock is what is promised.
WITHOUT = frozenset({"wall-clock"})


class QueueRun(Run):
    config = CONFIG
    targets = Targets((JOBS, LATER, DUE, UNIQUE, LETTERS, "__share_group_state"), (*Targets.processes, "mqd-timer"))
    reader_role = "queue-reader"
    progress = {
        "p1": '"status": "ok"',
        "p2": '"status": "ok"',
        "x1": '"kind": "end"',
        "c1": '"kind": "arrived"',
        "d1": '"kind": "unique"',
        "d3": '"kind": "unique"',
        **dict.fromkeys(SHARERS, '"status": "ok"'),
    }

    def __init__(self, plan: Plan, directory: Path, *more: object) -> None:
        super().__init__(plan, directory, *more)  # type: ignore[arg-type]
        self.topics = PARTITIONS
        self.read_topics = {**PARTITIONS, VIEW: PARTITIONS[JOBS]}
        del self.read_topics[LATER]  # it deletes what it has delivered
        self._kills = random.Random(f"{plan.seed} kills of clients")

    def _prepare(self) -> None:
        # the target of the schedule before the schedule
        for name in (JOBS, DUE, *TOPIC_CONFIG):
            self._script(CREATE, self.cluster.operator, {name: PARTITIONS[name]}, TOPIC_CONFIG.get(name, {}))
        view = {"view.of": JOBS, "view.filter": "tag = 'a'"}
        self._script(CREATE, self.cluster.operator, {VIEW: -1}, view)
        done = commands.mqd(self.cluster, "config", "set", f"group/{GROUP}", *GROUP_CONFIG)
        assert done.done, done.output

    def _load(self) -> list[Client]:
        jobs, later = {JOBS: PARTITIONS[JOBS]}, {LATER: PARTITIONS[LATER]}
        return [
            Client(self, "queue-producer", "p1", jobs),
            Client(self, "queue-producer", "p2", later),
            Client(self, "queue-transactor", "x1", jobs | later),
            Client(self, "queue-consumer", "c1", jobs | {VIEW: PARTITIONS[JOBS], DUE: PARTITIONS[DUE]}),
            Client(self, "queue-share", "s1", {}),
            Client(self, "queue-share", "s2", {}),
            Client(self, "queue-share", "s3", {}, mqd=True),
            Client(self, "queue-dedup", "d1", {}),
            Client(self, "queue-dedup", "d2", {}),
            Client(self, "queue-dedup-transactor", "d3", {}),
        ]

    def _after_fault(self) -> None:
        if self._kills.random() < 0.4:
            name = self._kills.choice(KILLED)
            self.log(f"  kill -9 of client {name}")
            next(client for client in self.clients if client.name == name).kill()
        super()._after_fault()

    def _drain(self) -> None:
        self._end_clients([client for client in self.clients if client.name not in (*SHARERS, "c1")])
        self.log("waiting for what is scheduled, and for the share group")
        self._module(
            "client",
            {
                "role": "queue-drain",
                "name": "drain",
                "topics": {},
                "history": str(self.directory / "drain.jsonl"),
                "seed": 0,
                "hosts": [[host.address, PORT] for host in self.cluster],
                **self.reached(),
            },
        )

    def _check(self, found: History, final: dict[Place, FinalLog]) -> tuple[list[Anomaly], Counter[str]]:
        return judge.check(found, final)
