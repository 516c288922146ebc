"""AlterReplicaLogDirs on a real broker with two log directories: partitions move while they are
written and read and while processes die; exactly one copy is current, and none is lost.
"""

import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from mqd.log import moving
from mqd.protocol import ErrorCode
from mqd.protocol.messages import AlterReplicaLogDirsRequest, DeleteRecordsRequest, DescribeLogDirsRequest
from mqd.protocol.records import Record, decode_records
from tests.broker import Broker
from tests.compat import topics
from tests.crash import processes
from tests.kafka_connection import ConnectionEnded, KafkaConnection
from tests.polling import eventually
from tests.tiers import quick

DEADLINE_S = 60
RETRIABLE = {
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.NOT_LEADER_OR_FOLLOWER,
    ErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.REQUEST_TIMED_OUT,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
}


@pytest.fixture
def two_disks(start_broker, io_backend: str, tmp_path: Path) -> tuple[Broker, list[Path]]:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    return (
        start_broker(
            config={"io.backend": io_backend, "log.dirs": ",".join(map(str, disks)), "log.segment.bytes": "65536"}
        ),
        disks,
    )


def move(broker: Broker, topic: str, partition: int, disk: Path | str, version: int = 2) -> int:
    expected = AlterReplicaLogDirsRequest.AlterReplicaLogDirTopic(name=topic, partitions=[partition])
    request = AlterReplicaLogDirsRequest(
        dirs=[AlterReplicaLogDirsRequest.AlterReplicaLogDir(path=str(disk), topics=[expected])]
    )
    with topics.connect(broker) as connection:
        return connection.call(34, version, request).results[0].partitions[0].error_code


def where(broker: Broker, topic: str, partition: int) -> dict[str, bool]:
    """Directory -> whether the replica there is the future one."""
    with topics.connect(broker) as connection:
        results = connection.call(35, 4, DescribeLogDirsRequest(topics=None)).results
    return {
        result.log_dir: one.is_future_key
        for result in results
        for described in result.topics
        if described.name == topic
        for one in described.partitions
        if one.partition_index == partition
    }


def copies(disks: list[Path], topic: str) -> list[str]:
    """All files and directories of the topic's partitions on both disks."""
    return sorted(
        f"{disk.name}/{path.name}" for disk in disks for path in disk.iterdir() if path.name.startswith(topic)
    )


def read_all(broker: Broker, topic: str, partition: int, end: int) -> list[bytes]:
    values: list[bytes] = []
    responses: Counter[int] = Counter()  # error codes since the last record
    deadline = time.monotonic() + DEADLINE_S
    with topics.connect(broker) as connection:
        while len(values) < end:
            got = topics.fetch(connection, topic, len(values), partition)
            responses[got.error_code] += 1
            assert got.error_code in {0, *RETRIABLE}, got.error_code
            assert time.monotonic() < deadline, unreadable(
                broker,
                topic,
                partition,
                f"{len(values)} of {end} records; answers since, by error code: {dict(responses)}; last: {got}",
            )
            if got.records:
                responses.clear()
            values += [record.value for record in decode_records(got.records or b"") if record.offset >= len(values)]
    return values


def unreadable(broker: Broker, topic: str, partition: int, what: str) -> str:
    """Diagnostics of a partition that should be readable."""
    disks = [Path(disk) for disk in broker.config["log.dirs"].split(",")]
    files = {
        f"{disk.name}/{path.name}": sorted(f"{file.name} {file.stat().st_size}" for file in path.iterdir())
        for disk in disks
        for path in disk.glob(f"{topic}-*")
    }
    return f"{what}\nthe metadata: {where(broker, topic, partition)}\nthe disks: {files}\n{broker.logs()}"


class Writer:
    """Writes numbered records, one after the other, until stopped; a record that gets an error or
    no response is written again under the next number.
    """

    def __init__(self, broker: Broker, topic: str, partition: int) -> None:
        self.acknowledged: dict[int, bytes] = {}  # offset -> value
        self.refused = 0
        self._broker, self._topic, self._partition = broker, topic, partition
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                with topics.connect(self._broker) as connection:
                    while not self._stop.is_set():
                        number += 1
                        self._one(connection, b"%d-" % number + b"v" * 3000)
            except (OSError, ConnectionEnded):
                time.sleep(0.01)  # its worker is being restarted

    def _one(self, connection: KafkaConnection, value: bytes) -> None:
        response = topics.produce(connection, self._topic, topics.batch_of(value), self._partition)
        if response.error_code == 0:
            assert response.base_offset not in self.acknowledged
            self.acknowledged[response.base_offset] = value
        else:
            assert response.error_code in RETRIABLE, response.error_code
            self.refused += 1
            time.sleep(0.001)

    def __enter__(self) -> "Writer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        assert self.acknowledged
        found = read_all(self._broker, self._topic, self._partition, max(self.acknowledged) + 1)
        assert all(found[offset] == value for offset, value in self.acknowledged.items()), (
            "an acknowledged record is not what was written"
        )


def test_a_partition_moves_while_it_is_written_and_read(two_disks) -> None:
    broker, disks = two_disks
    topic = topics.create_topic(broker, "moved", 2)
    for partition in range(2):
        with topics.connect(broker) as connection:
            for number in range(50):
                topics.must_produce(connection, topic, b"%d" % number * 2000, partition=partition)
    with Writer(broker, topic, 0) as writer:
        for _ in range(4):
            (here,) = where(broker, topic, 0)
            there = next(disk for disk in disks if str(disk) != here)
            written = len(writer.acknowledged)
            # LEADER_NOT_AVAILABLE while the last switch is still opening the log
            eventually(lambda there=there: move(broker, topic, 0, there) == 0)
            eventually(lambda there=there: where(broker, topic, 0) == {str(there): False})
            eventually(lambda written=written: len(writer.acknowledged) > written + 20)
    writer.check()
    assert sum(copy.endswith(f"/{topic}-0") for copy in copies(disks, topic)) <= 2
    eventually(lambda: len(copies(disks, topic)) == 2 and not list((there / f"{topic}-0").glob("moved-here")))
    broker.stop()
    broker.start()
    writer.check()
    assert where(broker, topic, 0) == {str(there): False} and len(copies(disks, topic)) == 2


def test_impossible_moves_are_refused_and_moving_back_cancels_a_move(two_disks) -> None:
    broker, disks = two_disks
    topic = topics.create_topic(broker, "refused", 1)
    for version in (1, 2):
        assert (
            move(broker, topic, 0, "/nowhere", version)
            == move(broker, topic, 0, "b", version)
            == ErrorCode.LOG_DIR_NOT_FOUND
        )
        assert (
            move(broker, topic, 7, disks[0], version)
            == move(broker, "no-such-topic", 0, disks[0], version)
            == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        )
    (here,) = where(broker, topic, 0)
    there = next(disk for disk in disks if str(disk) != here)
    assert move(broker, topic, 0, here) == 0 and list(where(broker, topic, 0)) == [here]
    for _ in range(3):  # in any order, the partition ends in its first directory
        eventually(lambda: move(broker, topic, 0, there) == 0)
        eventually(lambda: move(broker, topic, 0, here) == 0)  # closed during the switch
        eventually(lambda: where(broker, topic, 0) == {here: False} and len(copies(disks, topic)) == 1)
        topics_served(broker, topic)


def topics_served(broker: Broker, topic: str) -> None:
    def served() -> bool:
        with topics.connect(broker) as connection:
            return topics.produce(connection, topic, topics.batch_of(b"x")).error_code == 0

    eventually(served)


def test_a_deleted_topic_leaves_nothing_of_its_moves(two_disks) -> None:
    broker, disks = two_disks
    for _ in range(3):
        topic = topics.create_topic(broker, "gone", 2)
        for partition in range(2):
            for disk in disks:
                move(broker, topic, partition, disk)
        topics.delete_topic(broker, topic)
        eventually(lambda topic=topic: copies(disks, topic) == [])


@pytest.mark.parametrize("victim", quick(["worker", "mqd-controller", "all"], ["all"]))
def test_kills_leave_one_current_copy_and_lose_none(two_disks, victim: str) -> None:
    broker, disks = two_disks
    chance = random.Random(victim)
    topic = topics.create_topic(broker, "killed", 1)
    with topics.connect(broker) as connection:
        for number in range(100):
            topics.must_produce(connection, topic, b"%d" % number * 10_000)
    with Writer(broker, topic, 0) as writer:
        for _ in range(2):
            (here,) = [disk for disk, future in where(broker, topic, 0).items() if not future]
            there = next(disk for disk in disks if str(disk) != here)
            eventually(lambda there=there: move(broker, topic, 0, there) == 0)
            time.sleep(chance.uniform(0, 0.3))  # at any point of the move
            if victim == "all":
                broker.kill_all()
                broker.start()
            else:
                for name in [
                    name for name in processes.pids(broker) if name.startswith(f"mqd-{victim}") or name == victim
                ]:
                    processes.kill_and_wait(broker, name)
            eventually(lambda: len(where(broker, topic, 0)) == 1)
            eventually(lambda: len(copies(disks, topic)) == 1)
    writer.check()


def test_a_full_or_broken_target_leaves_the_partition_in_place(two_disks) -> None:
    broker, disks = two_disks
    topic = topics.create_topic(broker, "stays", 1)
    topics_served(broker, topic)
    (here,) = where(broker, topic, 0)
    there = next(disk for disk in disks if str(disk) != here)
    shutil.rmtree(there)
    there.write_text("not a directory any more")
    try:
        assert move(broker, topic, 0, there) == ErrorCode.KAFKA_STORAGE_ERROR
        topics_served(broker, topic)
    finally:
        there.unlink()
        there.mkdir()


def move_elsewhere(broker: Broker, disks: list[Path], topic: str) -> Path:
    """The directory in which it is afterwards."""
    (here,) = where(broker, topic, 0)
    there = next(disk for disk in disks if str(disk) != here)
    eventually(lambda: move(broker, topic, 0, there) == 0)
    eventually(lambda: where(broker, topic, 0) == {str(there): False})
    return there


@pytest.mark.slow
def test_a_partition_moves_while_it_is_compacted(start_broker, io_backend: str, tmp_path: Path) -> None:
    disks = [tmp_path / "a", tmp_path / "b"]
    for disk in disks:
        disk.mkdir()
    broker = start_broker(
        config={"io.backend": io_backend, "log.dirs": ",".join(map(str, disks)), "log.cleaner.backoff.ms": "1"}
    )
    topic = topics.create_topic(
        broker, "compacted", 1, cleanup_policy="compact", min_cleanable_dirty_ratio="0.01", segment_bytes="65536"
    )
    keys = [b"key-%d" % number for number in range(30)]
    stop, written = threading.Event(), 0

    def write() -> None:
        nonlocal written
        with topics.connect(broker) as connection:
            while not stop.is_set():
                values = [
                    Record(
                        key=keys[(written + at) % 30],
                        value=b"%d " % (written + at) + b"v" * 2000,
                        timestamp_ms=1_700_000_000_000,
                    )
                    for at in range(10)
                ]
                response = topics.produce(connection, topic, topics.batch_of(*values))
                assert response.error_code in {0, *RETRIABLE}, response.error_code
                written += 10 if response.error_code == 0 else 0
                time.sleep(0.002)  # unlimited, it would outrun a copy of such small segments

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(6):
            before = written
            there = move_elsewhere(broker, disks, topic)
            eventually(lambda before=before: written > before + 300)
    finally:
        stop.set()
        writer.join()
    newest: dict[bytes | None, bytes | None] = {}
    with topics.connect(broker) as connection:
        for number, key in enumerate(keys):
            last = topics.batch_of(Record(key=key, value=b"last %d" % number, timestamp_ms=1_700_000_000_000))
            # the last move may still be switching
            eventually(lambda last=last: topics.produce(connection, topic, last).error_code not in RETRIABLE)
        offset, end = 0, topics.list_offset(connection, topic, topics.LATEST).offset
        while offset < end:
            got = topics.fetch(connection, topic, offset)
            # compaction continues, and may replace segments faster than a slow machine can list
            # them
            assert got.error_code in {0, *RETRIABLE}, got.error_code
            if got.error_code:
                continue
            records = [record for record in decode_records(got.records or b"") if record.offset >= offset]
            assert [record.offset for record in records] == sorted({record.offset for record in records})
            newest.update({record.key: record.value for record in records})
            offset = records[-1].offset + 1
    assert newest == {key: b"last %d" % number for number, key in enumerate(keys)}
    eventually(lambda: copies(disks, topic) == [f"{there.name}/{topic}-0"])


def test_deleted_records_do_not_reappear_after_an_interrupted_move(two_disks) -> None:
    """The source's checkpoint has the log start offset. A kill after the metadata names the target
    and before the target's checkpoint is written must not lose it.
    """
    broker, disks = two_disks
    topic = topics.create_topic(broker, "started", 1)
    with topics.connect(broker) as connection:
        topics.must_produce(connection, topic, *(b"%d" % number for number in range(10)))
        partition = DeleteRecordsRequest.Partition(partition_index=0, offset=4)
        (response,) = connection.call(
            21,
            2,
            DeleteRecordsRequest(
                topics=[DeleteRecordsRequest.Topic(name=topic, partitions=[partition])], timeout_ms=60_000
            ),
        ).topics
        assert response.partitions[0].error_code == 0
    there = move_elsewhere(broker, disks, topic)
    marker = there / f"{topic}-0" / moving.MARKER
    eventually(lambda: not marker.exists())
    broker.kill_all()
    for checkpoint in there.glob("log-start-offset-checkpoint.*"):
        checkpoint.unlink()
    marker.write_text("from elsewhere\nlog_start_offset 4\n")
    for _ in range(2):  # the second start has only its own checkpoint
        broker.start()
        with topics.connect(broker) as connection:
            assert topics.list_offset(connection, topic, topics.EARLIEST).offset == 4
        assert not marker.exists()
        broker.kill_all()
