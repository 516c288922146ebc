"""kill -9 under load: of one process, of all of them, and while topics are created and deleted. No
acknowledged record is lost, no repair is needed.
"""

from __future__ import annotations

import random
import threading
import time

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.crash.checker import check, summary
from tests.crash.processes import kill, kill_and_wait, pids, wait_until_healthy
from tests.crash.workload import Load, create_topics, read_all
from tests.polling import eventually

ROUNDS_PER_LOAD = 10
SMALL_SEGMENTS = {"segment.bytes": "131072", "segment.index.bytes": "65536"}
RELAXED = {"flush.on.ack": "false"}


def start_load(broker: Broker, label: str, seed: int) -> Load:
    topics = {f"plain-{label}": 3, f"rolling-{label}": 2}
    relaxed = {f"relaxed-{label}": 2}
    create_topics(
        broker.bootstrap, {**topics, **relaxed}, {f"rolling-{label}": SMALL_SEGMENTS, f"relaxed-{label}": RELAXED}
    )
    return Load(broker, topics, relaxed=relaxed, seed=seed)


def conclude(load: Load, history: str) -> None:
    final = load.finish()
    violations = check(load.history(), final)
    assert not violations, f"{history}\n{summary(violations)}\n{load.broker.logs()}"
    assert not load.errors(), f"{history}\n{load.errors()[:10]}\n{load.broker.logs()}"


# The quick tier tests each kind of process and each backend once; the long one all combinations.
QUICK = [("epoll", "mqd-worker-0"), ("io_uring", "mqd-acceptor"), ("epoll", "mqd-controller")]
LONG = [
    (backend, victim)
    for backend in ("epoll", "io_uring")
    for victim in ("mqd-worker-0", "mqd-worker-1", "mqd-acceptor", "mqd-controller")
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("io_backend", "victim"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in LONG]
)
def test_one_process_is_killed_again_and_again(start_broker, rounds, seed, io_backend, victim):
    """50 rounds each in the long tier, half of them on each I/O backend."""
    broker = start_broker(config={"io.backend": io_backend})
    chance = random.Random(f"{seed} {victim} {io_backend}")
    left = rounds(2, 25)
    while left > 0:
        now = min(left, ROUNDS_PER_LOAD)
        left -= now
        with start_load(broker, str(left), seed * 1000 + left) as load:
            load.wait_for_progress()
            for _ in range(now):
                time.sleep(chance.uniform(0, 0.4))  # a random moment under load
                kill_and_wait(broker, victim)
                load.wait_for_progress()
            conclude(load, f"{now} kills of {victim}, seed {seed}")


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_several_processes_are_killed_at_once(start_broker, rounds, seed):
    """A worker, and at the same moment its peers or the processes that would report its death."""
    broker = start_broker()
    chance = random.Random(f"{seed} several")
    names = ["mqd-worker-0", "mqd-worker-1", "mqd-acceptor", "mqd-controller"]
    with start_load(broker, "s", seed) as load:
        load.wait_for_progress()
        for _ in range(rounds(2, 25)):
            time.sleep(chance.uniform(0, 0.3))
            victims = chance.sample(names, chance.randrange(2, 5))
            before = {name: kill(broker, name) for name in victims}
            wait_until_healthy(broker, before)
            load.wait_for_progress()
        conclude(load, f"kills of several processes, seed {seed}")


@pytest.mark.timeout(1800)
def test_everything_is_killed_at_once(start_broker, rounds, seed):
    """Including supervisord and keeper; the broker is restarted on the same directory."""
    broker = start_broker()
    chance = random.Random(f"{seed} all")
    left = rounds(2, 50)
    while left > 0:
        now = min(left, ROUNDS_PER_LOAD)
        left -= now
        with start_load(broker, str(left), seed * 1000 + left) as load:
            load.wait_for_progress()
            for _ in range(now):
                time.sleep(chance.uniform(0, 0.4))
                broker.kill_all()
                broker.start()
                load.wait_for_progress()
            conclude(load, f"{now} kills of everything, seed {seed}")


def test_a_clean_stop_under_load_loses_nothing(start_broker, rounds, seed):
    broker = start_broker()
    with start_load(broker, "c", seed) as load:
        load.wait_for_progress()
        for _ in range(rounds(1, 10)):
            assert broker.stop() == 0, broker.logs()
            broker.start()
            load.wait_for_progress()
        conclude(load, f"clean stops, seed {seed}")


class _TopicChanges(threading.Thread):
    """Creates and deletes topics, one after the other, and records confirmed changes; the state
    after a failure or timeout is unknown.
    """

    def __init__(self, bootstrap: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._admin = AdminClient(
            {
                "bootstrap.servers": bootstrap,
                "log_level": 0,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
            }
        )
        self._chance = random.Random(f"{seed} topics")
        self._ending = threading.Event()
        self.existing: set[str] = set()
        self.deleted: set[str] = set()
        self.unknown: set[str] = set()
        self.refused: list[str] = []

    def run(self) -> None:
        number = 0
        while not self._ending.is_set():
            if len(self.existing) > 1 and self._chance.random() < 0.4:  # one is left for the records
                name = self._chance.choice(sorted(self.existing))
                self.existing.discard(name)
                confirmed = self._confirmed(self._admin.delete_topics([name], request_timeout=5)[name])
                (self.deleted if confirmed else self.unknown).add(name)
            else:
                name = f"made-{number}"
                number += 1
                confirmed = self._confirmed(self._admin.create_topics([NewTopic(name, 3, 1)], request_timeout=5)[name])
                (self.existing if confirmed else self.unknown).add(name)

    def _confirmed(self, future) -> bool:
        try:
            future.result(60)
            return True
        except Exception as error:  # noqa: BLE001 - librdkafka's KafkaException, or a timeout: unknown either way
            self.refused.append(str(error))
            return False

    def end(self) -> None:
        self._ending.set()
        self.join(30)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "victim",
    [
        "mqd-worker-0",
        pytest.param("mqd-acceptor", marks=pytest.mark.slow),
        pytest.param("mqd-controller", marks=pytest.mark.slow),
        pytest.param("everything", marks=pytest.mark.slow),
    ],
)
def test_kills_while_topics_come_and_go(start_broker, rounds, seed, victim):
    """Confirmed creations exist and accept records; confirmed deletions are gone, and their names
    reusable on the disk; a change in progress is done or not.
    """
    broker = start_broker()
    chance = random.Random(f"{seed} topics {victim}")
    changes = _TopicChanges(broker.bootstrap, seed)
    changes.start()
    for _ in range(rounds(2, 20)):
        count = len(changes.existing) + len(changes.deleted)
        eventually(
            lambda: len(changes.existing) + len(changes.deleted) > count + 1,
            lambda: f"no topic changes {changes.refused[-3:]}\n{broker.logs()}",
        )  # noqa: B023
        time.sleep(chance.uniform(0, 0.1))
        if victim == "everything":
            broker.kill_all()
            broker.start()
        else:
            kill_and_wait(broker, victim)
    changes.end()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    found = {name for name in admin.list_topics(timeout=60).topics if name.startswith("made-")}
    assert changes.existing <= found <= changes.existing | changes.unknown, (
        f"{changes.existing - found} {found & changes.deleted}\n{broker.logs()}"
    )
    with Load(broker, dict.fromkeys(found, 3), seed=seed, producers=1, consumers=1, rate=2000) as load:
        load.wait_for_progress()
        conclude(load, f"topics with kills of {victim}, seed {seed}")

    def left_over() -> set[str]:
        """A process that died between creating a directory and naming its topic leaves an empty
        one, which the next topic of that name uses.
        """
        paths = [path for path in broker.data_dir.glob("**/made-*-*") if path.name.rpartition("-")[0] not in found]
        return {path.name for path in paths if (path / "partition.metadata").exists()}

    eventually(lambda: not left_over(), lambda: f"on disk: {left_over()}\n{broker.logs()}")


def test_reading_is_the_same_after_each_restart(start_broker, seed):
    """The recovery truncated: a read after a restart begins with all records that were read before."""
    broker = start_broker()
    with start_load(broker, "r", seed) as load:
        load.wait_for_progress()
        conclude(load, f"before any kill, seed {seed}")
        topics = load.topics
    before = read_all(broker.port, topics)
    for victim in (None, "mqd-worker-0", "mqd-worker-1"):
        if victim is None:
            broker.kill_all()
            broker.start()
        else:
            kill_and_wait(broker, victim)
        assert read_all(broker.port, topics) == before, broker.logs()
    assert set(pids(broker)) >= {"mqd-worker-0", "mqd-worker-1", "mqd-acceptor", "mqd-controller", "mqd-keeper"}
