"""An exactly-once copy job while workers, the acceptor and the job's own members are killed at
random under load: the output is the input, every record once, in order.

`MQD_CRASH_SEED=N` runs other histories; the message of a failure has the history.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
from pathlib import Path

import pytest

from mqd.shm.attach import KeeperError
from tests.broker import Broker
from tests.crash.copying import QUICK_GROUPS, Member, difference
from tests.crash.processes import kill, status, wait_until_healthy
from tests.crash.workload import IDEMPOTENT, LoadProducer, create_topics, read_all, wait_until
from tests.interaction.transactional import connect, fetch_committed, producers, read_committed
from tests.kafka_connection import ConnectionEnded

PARTITIONS, MEMBERS = 3, 3
BROKER_VICTIMS = ("mqd-acceptor", "mqd-worker-0", "mqd-worker-1")
COPIED_SECONDS = 60.0
RUNS = 20


class Job:
    """`story` records the actions, shown on failure."""

    def __init__(self, broker: Broker, directory: Path, seed: str, protocol: str, transport: str = "tcp") -> None:
        self.broker = broker
        self.chance = random.Random(seed)
        is_static = protocol == "classic" and self.chance.random() < 0.3
        self.history = [f"seed {seed}, {protocol}, {transport}{', static members' if is_static else ''}"]
        create_topics(broker.bootstrap, {"source": PARTITIONS, "target": PARTITIONS})
        self.loads = [
            LoadProducer(
                f"load-{number}",
                broker.bootstrap,
                {"source": PARTITIONS},
                self.chance.randrange(1 << 30),
                300,
                IDEMPOTENT,
            )
            for number in range(2)
        ]
        self.members = []
        for number in range(MEMBERS):
            consumer = (
                {"group.protocol": "consumer"}
                if protocol == "consumer"
                else {"session.timeout.ms": 2_000, "heartbeat.interval.ms": 200}
            )
            if is_static:
                consumer["group.instance.id"] = f"member-{number}"
            settings = {
                "group": "copy",
                "source": "source",
                "target": "target",
                "seed": seed,
                "consumer": consumer,
                "transport": transport,
            }
            self.members.append(Member(broker.bootstrap, directory, number, settings))

    def __enter__(self) -> Job:
        for one in self.loads:
            one.start()
        self.tend()
        return self

    def __exit__(self, *_exc: object) -> None:
        for load in self.loads:
            load.end()
        for member in self.members:
            member.end(signal.SIGTERM)
        for load in self.loads:
            load.join(70)

    def tend(self) -> None:
        for member in self.members:
            member.tend()

    def report(self) -> str:
        return "\n".join(["; ".join(self.history), *(member.tail() for member in self.members), self.broker.logs()])

    def copied(self) -> list[int]:
        """The last stable offset of each partition."""
        with contextlib.suppress(OSError, ConnectionEnded, AssertionError), connect(self.broker) as kafka:
            found = [fetch_committed(kafka, "target", index) for index in range(PARTITIONS)]
            return [one.last_stable_offset for one in found if one.error_code == 0]
        return []

    def wait_until_it_copies(self) -> None:
        before = sum(self.copied())
        self.wait(lambda: sum(self.copied()) > before, "it copies")

    def wait(self, condition, what: str, seconds: float = COPIED_SECONDS) -> None:
        def tended() -> bool:
            self.tend()
            return condition()

        wait_until(tended, seconds, lambda: f"{what}: {self.report()}")

    def kill_at_random(self) -> None:
        threading.Event().wait(self.chance.uniform(0, 0.8))  # a random moment under load
        victims = self.chance.sample(
            (*BROKER_VICTIMS, *(f"copy-{number}" for number in range(MEMBERS))), self.chance.choice((1, 1, 2))
        )
        self.history.append(f"kill {' and '.join(victims)}")
        before = {}
        for victim in victims:
            if victim in BROKER_VICTIMS:
                with contextlib.suppress(KeeperError, ProcessLookupError):
                    before[victim] = kill(self.broker, victim)
            else:
                self.members[int(victim[-1])].end(signal.SIGKILL)
        self.tend()
        if before and self.chance.random() < 0.7:  # otherwise the next one is killed while the broker is not healthy
            wait_until_healthy(self.broker, before)

    def finish(self) -> None:
        for load in self.loads:
            load.end()
        wait_until_healthy(self.broker, {})
        for load in self.loads:
            load.join(70)
            assert not load.errors and not load.is_alive(), f"{load.errors} {self.report()}"
        source = {
            partition: [value for _, value in log.records]
            for (_, partition), log in read_all(self.broker.port, {"source": PARTITIONS}).items()
        }

        def output() -> dict[int, list[bytes]]:
            with connect(self.broker) as kafka:
                return {index: read_committed(kafka, "target", index) for index in range(PARTITIONS)}

        self.wait(
            lambda: sum(map(len, output().values())) >= sum(map(len, source.values())),
            f"all {[len(one) for one in source.values()]} are copied",
        )
        for member in self.members:
            member.end(signal.SIGTERM)
        for index, values in output().items():
            assert values == source[index], (
                f"partition {index} of {[len(one) for one in source.values()]}:"
                f" {difference(source[index], values)}\n{self.report()}"
            )
        with connect(self.broker) as kafka:
            left = [
                one
                for index in range(PARTITIONS)
                for one in producers(kafka, "target", index)
                if one.current_txn_start_offset >= 0
            ]
        assert not left, f"a transaction stays open: {left}\n{self.report()}"
        assert status(self.broker).ready


# Both I/O backends with both group protocols, alternately.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("run", [pytest.param(run, marks=[] if run < 1 else [pytest.mark.slow]) for run in range(RUNS)])
def test_a_copy_job_under_kills_copies_every_record_once(start_broker, tmp_path, rounds, seed, run):
    backend, protocol = ("epoll", "io_uring")[run & 1], ("classic", "consumer")[(run ^ run >> 1) & 1]
    broker = start_broker(config={"io.backend": backend, **QUICK_GROUPS})
    with Job(broker, tmp_path, f"{seed}.{run}", protocol) as job:
        job.wait_until_it_copies()
        for _ in range(rounds(2, 12)):
            job.kill_at_random()
        job.wait_until_it_copies()
        job.finish()
