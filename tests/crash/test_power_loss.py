"""Power cuts: load is recorded together with the journal of the file layer; for any point in time
possible disks are rebuilt, and brokers started on them.

Records acknowledged before the cut (the client's clock is the journal's) must exist, and records
that consumers read must not change. Time is monotonic ns throughout.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.crash.checker import Acknowledged, History, Violation, check, make_value, summary
from tests.crash.file_model import SYNC_DONE, WRITE, Disk, Operation, Tree, read_journals
from tests.crash.processes import kill_and_wait
from tests.crash.workload import Load, create_topics, produce, read_all
from tests.kafka_connection import ConnectionEnded, KafkaConnection

TOPICS = {"plain": 3, "rolling": 3}
RELAXED = {"relaxed": 2}
RETRIED = {"retried": 1}
ALL_TOPICS = {**TOPICS, **RELAXED, **RETRIED}
CONFIG = {
    "rolling": {"segment.bytes": "32768", "segment.index.bytes": "4096"},
    "relaxed": {"flush.on.ack": "false", "segment.bytes": "65536"},
}
CUTS_PER_RECORDING = 20


@dataclasses.dataclass
class TopicChange:
    """0 = did not happen (yet)."""

    created_ns: int = 0
    delete_begun_ns: int = 0
    deleted_ns: int = 0


@dataclasses.dataclass
class Recording:
    root: Path
    operations: list[Operation]
    history: History
    retries: Retries
    changes: dict[str, TopicChange]
    begin_ns: int  # topics exist from here on
    end_ns: int


class Retries(threading.Thread):
    """An idempotent producer without librdkafka: one batch at a time, and a way to resend one after
    the power cut, like a producer that got no response.
    """

    NAME, PRODUCER_ID = "retries", 1 << 40

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port = port
        self._ending = threading.Event()
        self.sent = 0
        self.acknowledged: list[Acknowledged] = []

    def run(self) -> None:
        while not self._ending.is_set():
            try:
                with KafkaConnection("127.0.0.1", self._port, timeout_s=10) as kafka:
                    while not self._ending.is_set():
                        counter = len(self.acknowledged)
                        self.sent = counter + 1
                        error, offset = self.send(kafka, counter)
                        if error == 0:
                            self.acknowledged.append(
                                Acknowledged(self.NAME, counter, "retried", 0, offset, time.monotonic_ns())
                            )
                        self._ending.wait(0.005)
            except (ConnectionEnded, OSError):
                self._ending.wait(0.02)  # a worker was killed: the same batch again

    def end(self) -> None:
        self._ending.set()
        self.join(15)

    def send(self, kafka: KafkaConnection, counter: int) -> tuple[int, int]:
        return produce(
            kafka,
            "retried",
            0,
            make_value(self.NAME, counter),
            producer_id=self.PRODUCER_ID,
            producer_epoch=0,
            base_sequence=counter,
        )

    def check_after_restart(self, port: int, at_ns: int) -> list[Violation]:
        """A lost response looks like a lost record: the last acknowledged batch and the one in
        flight are sent again.
        """
        acknowledged = [ack for ack in self.acknowledged if ack.at_ns < at_ns]
        violations = []
        with KafkaConnection("127.0.0.1", port, timeout_s=10) as kafka:
            if acknowledged:
                last = acknowledged[-1]
                response = self.send(kafka, last.counter)
                if response != (0, last.offset):
                    violations.append(
                        Violation("duplicate", f"a repeated batch of offset {last.offset} is answered with {response}")
                    )
            due = acknowledged[-1].offset + 1 if acknowledged else 0
            response = self.send(kafka, len(acknowledged))
            if response != (0, due):
                violations.append(
                    Violation("reordered", f"the batch that follows offset {due - 1} is answered with {response}")
                )
        return violations


def record(directory: Path, seed: int, config: dict[str, str], kills: bool, stops: bool = False) -> Recording:
    """A few seconds of load with topics that are created and deleted; with `kills` a worker and the
    controller die in the middle. Ends with kill -9 of all processes, or cleanly, so that nothing is
    done without being reported.
    """
    directory.mkdir()
    broker = Broker(directory / "data", config=config, environment={"MQD_FILE_JOURNAL": str(directory / "journal")})
    chance = random.Random(f"{seed} record")
    changes: dict[str, TopicChange] = {}
    try:
        broker.start()
        create_topics(broker.bootstrap, ALL_TOPICS, CONFIG)
        begin_ns = time.monotonic_ns()
        retries = Retries(broker.port)
        retries.start()
        with Load(broker, TOPICS, relaxed=RELAXED, seed=seed, local=True) as load:
            admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
            for turn in range(6):
                load.wait_for_progress()
                _change_topics(admin, changes, turn)
                time.sleep(chance.uniform(0.1, 0.3))
                if kills and turn in (2, 4):
                    kill_and_wait(broker, chance.choice(("mqd-worker-0", "mqd-worker-1", "mqd-controller")))
            load.wait_for_progress()
            end_ns = time.monotonic_ns()
            _ = broker.stop() if stops else broker.kill_all()
            retries.end()
            for client in (*load.producers, *load.consumers):
                client.end()
            for producer in load.producers:
                while producer.is_alive():
                    # no response will arrive; it may still send the rest of its burst
                    producer._producer.purge()
                    producer.join(0.1)
        assert not [error for one in load.producers for error in one.errors if "fatal" in error]
        history = load.history()
        history.acknowledged += retries.acknowledged
        history.sent[retries.NAME] = retries.sent + 1
        history.idempotent.add(retries.NAME)
        return Recording(
            broker.data_dir, read_journals(directory, "journal"), history, retries, changes, begin_ns, end_ns
        )
    finally:
        broker.kill_all()


def _change_topics(admin: AdminClient, changes: dict[str, TopicChange], turn: int) -> None:
    change = changes[f"extra-{turn}"] = TopicChange()
    admin.create_topics([NewTopic(f"extra-{turn}", 2, 1)])[f"extra-{turn}"].result(60)
    change.created_ns = time.monotonic_ns()
    if turn % 2:
        change = changes[f"extra-{turn - 1}"]
        change.delete_begun_ns = time.monotonic_ns()
        admin.delete_topics([f"extra-{turn - 1}"])[f"extra-{turn - 1}"].result(60)
        change.deleted_ns = time.monotonic_ns()


def count_before(operations: list[Operation], at_ns: int) -> int:
    return sum(operation.time_ns < at_ns for operation in operations)


def restart_and_check(
    recording: Recording, tree: Tree, at_ns: int, directory: Path, twice: bool = False
) -> list[Violation]:
    """Starts a broker on the rebuilt disk. Raises BrokerFailed when it does not start by itself."""
    data_dir = directory / "data"
    tree.write_to(data_dir, str(recording.root))
    broker = Broker(data_dir)
    try:
        broker.start()
        violations = recording.retries.check_after_restart(broker.port, at_ns)
        found = read_all(broker.port, ALL_TOPICS)
        violations += check(recording.history.until(at_ns), found, volatile_topics=RELAXED)
        violations += _check_topics(broker, recording.changes, at_ns)
        with Load(broker, TOPICS, relaxed=RELAXED, seed=10**6, producers=1, consumers=0) as load:
            load.wait_for_progress()
        if twice:
            broker.kill_all()
            broker.start()
            again = read_all(broker.port, ALL_TOPICS)
            for key, log in found.items():
                if again[key].records[: len(log.records)] != log.records:
                    violations.append(Violation("changed", f"{key} reads differently after another restart"))
        return violations
    except AssertionError as error:
        raise AssertionError(f"{error}\n{broker.logs()}") from error
    finally:
        broker.kill_all()


def _check_topics(broker: Broker, changes: dict[str, TopicChange], at_ns: int) -> list[Violation]:
    found = set(AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0}).list_topics(timeout=60).topics)
    violations = []
    for name, change in changes.items():
        if 0 < change.created_ns < at_ns and not 0 < change.delete_begun_ns < at_ns and name not in found:
            violations.append(Violation("lost", f"topic {name}, whose creation was confirmed"))
        if 0 < change.deleted_ns < at_ns and name in found:
            violations.append(Violation("undead", f"topic {name}, whose deletion was confirmed"))
    return violations


@pytest.mark.timeout(3600)
def test_nothing_acknowledged_is_lost_in_a_power_cut(tmp_path, rounds, seed):
    left, number = rounds(4, 200), 0
    while left > 0:
        now = min(left, CUTS_PER_RECORDING)
        left -= now
        backend = ("io_uring", "epoll")[number % 2]
        recording = record(
            tmp_path / f"recording-{number}", seed * 100 + number, {"io.backend": backend}, kills=number % 3 == 0
        )
        chance = random.Random(f"{seed} cuts {number}")
        cuts = sorted(chance.randrange(recording.begin_ns, recording.end_ns) for _ in range(now))
        disk, position = Disk(), 0
        for cut, at_ns in enumerate(cuts):
            while position < len(recording.operations) and recording.operations[position].time_ns < at_ns:
                disk.apply(recording.operations[position])
                position += 1
            state_seed = f"{seed} {number} {cut}"
            tree = disk.harshest() if cut % 4 == 0 else disk.power_cut(random.Random(state_seed))
            directory = tmp_path / f"cut-{number}-{cut}"
            violations = restart_and_check(recording, tree, at_ns, directory, twice=cut % 5 == 0)
            assert not violations, (
                f"seed {seed}, recording {number}, cut {cut} of {now} ({directory}, {backend}):\n{summary(violations)}"
            )
            shutil.rmtree(directory)
        shutil.rmtree(recording.root.parent)
        number += 1


# -- the test itself -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("power") / "recording", 7, {}, kills=False, stops=True)


def _replayed(recording: Recording, at_ns: int, ignore: Callable[[Operation], bool] = lambda operation: False) -> Disk:
    disk = Disk(ignore)
    for operation in recording.operations[: count_before(recording.operations, at_ns)]:
        disk.apply(operation)
    return disk


def test_the_journal_has_every_change(recording: Recording):
    """A change that bypasses the file layer would not be tested here."""
    disk = _replayed(recording, 2**63)
    reported = {
        path: content for path, content in disk.present().files.items() if path.startswith(f"{recording.root}/")
    }
    by_tools = ("logs/", "run/")  # not data: supervisord's, sockets
    found = {
        str(path)
        for path in recording.root.rglob("*")
        if path.is_file() and not str(path.relative_to(recording.root)).startswith(by_tools)
    }
    past = {path for path in found - set(reported) if Path(path).name not in (".lock", "reserve", "up.stderr")}
    assert not past, past
    assert set(reported) <= found
    different = [path for path in reported if Path(path).read_bytes() != reported[path]]
    assert not different, different


def _one_flush_that_matters(recording: Recording) -> tuple[Acknowledged, Operation]:
    """An acknowledged record, and the only flush before its acknowledgement that covers it."""
    for ack in reversed(
        [one for one in recording.history.acknowledged if one.topic == "plain" and one.at_ns < recording.end_ns]
    ):
        mark = f"/{ack.topic}-{ack.partition}/"
        ours = [
            one
            for one in recording.operations
            if mark in one.path and one.path.endswith(".log") and one.time_ns < ack.at_ns
        ]
        value = make_value(ack.producer, ack.counter)
        written = next((one.sequence for one in ours if one.kind == WRITE and value in one.data), None)
        covering = [one for one in ours if one.kind == SYNC_DONE and written is not None and one.reference > written]
        if len(covering) == 1:
            return ack, covering[0]
    raise AssertionError("no acknowledgement rests on a single flush")


def test_a_disk_that_ignores_one_flush_is_detected(recording: Recording, tmp_path: Path):
    """Proves that the test above can fail: the flush on which an acknowledgement depends is
    ignored.
    """
    ack, flush = _one_flush_that_matters(recording)
    at_ns = ack.at_ns + 1
    honest = _replayed(recording, at_ns).harshest()
    assert restart_and_check(recording, honest, at_ns, tmp_path / "honest") == []
    lying = _replayed(recording, at_ns, ignore=lambda operation: operation is flush).harshest()
    violations = restart_and_check(recording, lying, at_ns, tmp_path / "lying")
    assert "lost" in {one.kind for one in violations}, summary(violations)
