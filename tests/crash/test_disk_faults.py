"""Disks that fail a flush and disks that are full, under load: only their own partitions are
affected, nothing unflushed is acknowledged, and the broker recovers when space returns.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from mqd.protocol.errors import ErrorCode
from tests.broker import Broker
from tests.broker_files import faults_file
from tests.crash.checker import check, make_value, summary
from tests.crash.file_model import Disk, read_journals
from tests.crash.processes import kill_and_wait
from tests.crash.workload import Load, create_topics, fetch_records, produce, read_all, read_log
from tests.kafka_connection import KafkaConnection
from tests.polling import eventually

RETRIABLE_WHEN_FULL = {ErrorCode.KAFKA_STORAGE_ERROR}


class Faulty:
    """A broker whose faults can be switched while it runs."""

    def __init__(self, broker: Broker, control: Path) -> None:
        self.broker = broker
        self.control = control

    def set(self, *rules: str) -> None:
        """Applies to every call that begins after this."""
        ready = self.control.with_suffix(".new")
        ready.write_text("\n".join(rules))
        ready.rename(self.control)


@pytest.fixture
def start_faulty(start_broker, tmp_path):
    def start(directories: int = 1, environment: dict[str, str] | None = None, **config: str) -> Faulty:
        control = faults_file(tmp_path / "data")
        if directories > 1:
            config["log.dirs"] = ",".join(str(tmp_path / "data" / f"disk-{number}") for number in range(directories))
        return Faulty(
            start_broker(config=config, environment={"MQD_FILE_FAULTS": f"@{control}", **(environment or {})}), control
        )

    return start


def partitions_by_disk(broker: Broker, topic: str) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for path in sorted(broker.data_dir.glob(f"disk-*/{topic}-*")):
        found.setdefault(path.parent.name, []).append(int(path.name.rpartition("-")[2]))
    return found


# -- a failed flush --------------------------------------------------------------------------------


def test_a_failed_flush_fences_its_directory_only(start_faulty):
    faulty = start_faulty(directories=2)
    broker = faulty.broker
    create_topics(broker.bootstrap, {"t": 8})
    places = partitions_by_disk(broker, "t")
    assert len(places) == 2, places
    bad, good = places["disk-0"], places["disk-1"]
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        for partition in (*bad, *good):
            assert produce(kafka, "t", partition, b"before") == (0, 0)
        faulty.set("sync:EIO:disk-0")
        for partition in bad:
            assert produce(kafka, "t", partition, b"not acknowledged")[0] == ErrorCode.KAFKA_STORAGE_ERROR
        faulty.set()
        for turn in range(3):
            for partition in good:
                assert produce(kafka, "t", partition, b"after") == (0, turn + 1)
            for partition in bad:
                assert produce(kafka, "t", partition, b"still fenced")[0] == ErrorCode.KAFKA_STORAGE_ERROR
        for partition in good:
            assert len(read_log(kafka, "t", partition).records) == 4
        for partition in bad:  # unflushed records are not readable, flushed ones still are
            found, high_watermark = fetch_records(kafka, "t", partition, 0)
            assert ([value for _, value in found], high_watermark) == ([b"before"], 1)
    logs = [broker.data_dir / "logs" / f"mqd-worker-{worker}.log" for worker in (0, 1)]

    def logged() -> str:
        return "".join(log.read_text() for log in logs)

    # The worker's reactor refuses at once; its Python loop writes the line a moment later.
    eventually(lambda: "disk-0" in logged() and "flush failed" in logged(), logged)


def test_a_directory_fails_under_load_and_the_others_continue(start_faulty, seed):
    faulty = start_faulty(directories=2)
    broker = faulty.broker
    create_topics(broker.bootstrap, {"t": 8})
    places = partitions_by_disk(broker, "t")
    with Load(broker, {"t": 8}, seed=seed, consumers=1) as load:
        load.wait_for_progress()
        faulty.set("sync:EIO:disk-0")
        failed_ns = time.monotonic_ns()
        good = {partition for partition in places["disk-1"]}

        def acknowledged_since(partitions: set[int]) -> set[int]:
            return {
                ack.partition for one in load.producers for ack in one.acknowledged if ack.at_ns > failed_ns + 10**9
            } & partitions

        eventually(
            lambda: acknowledged_since(good) == good, lambda: f"{acknowledged_since(good)} of {good}\n{broker.logs()}"
        )
        late = acknowledged_since(set(places["disk-0"]))
        assert not late, f"acknowledged on a directory that cannot flush: {late}"
        faulty.set()
        broker.kill_all()  # restarted on a healthy disk
        broker.start()
        load.wait_for_progress()
        final = load.finish()
        violations = check(load.history(), final)
        assert not violations and not load.errors(), f"{summary(violations)} {load.errors()[:5]}\n{broker.logs()}"


@pytest.mark.parametrize("restarted", ["workers", "everything"])
def test_pages_dropped_by_a_failed_flush_are_not_trusted_after_a_restart(start_faulty, tmp_path, restarted):
    """After a failed flush the kernel may drop the pages or mark them clean: a successor finds the
    bytes in the page cache, and no flush will ever write them. If they were acknowledged, the next
    power cut would lose them. So they must be written again.
    """
    faulty = start_faulty(environment={"MQD_FILE_JOURNAL": str(tmp_path / "journal")})
    broker = faulty.broker
    create_topics(broker.bootstrap, {"t": 1})
    sound, doubtful = make_value("p", 0), make_value("p", 1)
    identity = {"producer_id": 4711, "producer_epoch": 0}
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        assert produce(kafka, "t", 0, sound, base_sequence=0, **identity) == (0, 0)
        faulty.set("sync:EIO:t-0/")
        assert produce(kafka, "t", 0, doubtful, base_sequence=1, **identity)[0] == ErrorCode.KAFKA_STORAGE_ERROR
    faulty.set()
    if restarted == "workers":
        for name in ("mqd-worker-0", "mqd-worker-1"):
            kill_and_wait(broker, name)
    else:
        eventually(lambda: bool(list(broker.data_dir.glob("log/flush-failed.*"))), broker.logs)
        broker.kill_all()
        broker.start()
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        assert produce(kafka, "t", 0, doubtful, base_sequence=1, **identity) == (0, 1)  # the producer's own retry
        assert [value for _, value in read_log(kafka, "t", 0).records] == [sound, doubtful]
    acknowledged_ns = time.monotonic_ns()
    eventually(lambda: not list(broker.data_dir.glob("log/flush-failed.*")), broker.logs)
    broker.kill_all()
    disk = Disk()
    for operation in read_journals(tmp_path, "journal"):
        if operation.time_ns < acknowledged_ns:
            disk.apply(operation)
    content = b"".join(
        content for path, content in disk.harshest().files.items() if "/t-0/" in path and path.endswith(".log")
    )
    assert doubtful in content, "acknowledged, and only in the page cache"


# -- a full disk -----------------------------------------------------------------------------------


def test_a_full_disk_refuses_produce_and_nothing_else(start_faulty):
    faulty = start_faulty()
    broker = faulty.broker
    create_topics(broker.bootstrap, {"t": 2, "other": 1}, {"t": {"segment.bytes": "4096"}})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        for number in range(40):
            assert produce(kafka, "t", 0, b"%d" % number * 100)[0] == 0
        # the metadata log has its own reserve, which no rule can free
        faulty.set("write:ENOSPC:/log/", "open:ENOSPC:.tmp", "fallocate:ENOSPC", "mkdir:ENOSPC")
        error, _ = produce(kafka, "t", 0, b"too much")
        assert error in RETRIABLE_WHEN_FULL, error
        assert len(read_log(kafka, "t", 0).records) == 40  # Fetch
        lows = admin.delete_records([Place("t", 0, 20)])
        assert next(iter(lows.values())).result(60).low_watermark == 20
        assert read_log(kafka, "t", 0).log_start_offset == 20
        admin.delete_topics(["other"])["other"].result(60)
        entry = ConfigEntry("retention.ms", "3600000", incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, "t", incremental_configs=[entry])
        next(iter(admin.incremental_alter_configs([resource]).values())).result(60)
        described = next(
            iter(admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, "t")]).values())
        ).result(60)
        assert described["retention.ms"].value == "3600000"
        assert produce(kafka, "t", 1, b"too much")[0] in RETRIABLE_WHEN_FULL
        faulty.set()
        eventually(lambda: produce(kafka, "t", 0, b"space again")[0] == 0, broker.logs)
        assert read_log(kafka, "t", 0).records[-1][1] == b"space again"
    admin.create_topics([NewTopic("new", 1, 1)])["new"].result(60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_disks_that_fill_up_again_and_again_under_load(start_faulty, rounds, seed):
    """Also in the middle of a write: the disk accepts some more bytes and then refuses. Clients
    only wait; now and then a worker dies while it is full.
    """
    faulty = start_faulty()
    broker = faulty.broker
    chance = random.Random(f"{seed} full")
    create_topics(broker.bootstrap, {"plain": 3, "rolling": 2}, {"rolling": {"segment.bytes": "65536"}})
    with Load(broker, {"plain": 3, "rolling": 2}, seed=seed) as load:
        for number in range(rounds(2, 20)):
            load.wait_for_progress()
            budget = chance.choice((0, chance.randrange(1, 50_000)))
            # The metadata log has ballast for a disk that is really full: it is not limited here,
            # because a worker's successor needs a new leader epoch.
            faulty.set(
                *(f"write:ENOSPC:/{topic}-:budget={budget}" for topic in ("plain", "rolling")), "fallocate:ENOSPC"
            )
            time.sleep(chance.uniform(0.2, 0.8))
            if number % 4 == 1:
                kill_and_wait(broker, chance.choice(("mqd-worker-0", "mqd-worker-1")))
            faulty.set()
        load.wait_for_progress(70)
        final = load.finish()
        violations = check(load.history(), final)
        assert not violations and not load.errors(), (
            f"seed {seed}: {summary(violations)} {load.errors()[:5]}\n{broker.logs()}"
        )
    assert read_all(broker.port, {"plain": 3}).keys() == {("plain", 0), ("plain", 1), ("plain", 2)}


def test_a_topic_cannot_be_created_on_a_disk_that_refuses_the_metadata_log(start_faulty):
    """A refused change is reported and has no effect; the same change succeeds when the disk
    accepts it.
    """
    faulty = start_faulty()
    admin = AdminClient({"bootstrap.servers": faulty.broker.bootstrap, "log_level": 0})
    create_topics(faulty.broker.bootstrap, {"first": 1})
    faulty.set("write:EIO:__cluster_metadata", "write:EIO:metadata")
    with pytest.raises(KafkaException) as refused:
        admin.create_topics([NewTopic("refused", 1, 1)])["refused"].result(60)
    assert refused.value.args[0].code() != KafkaError.UNKNOWN, refused.value
    assert "refused" not in admin.list_topics(timeout=60).topics
    faulty.set()
    admin.create_topics([NewTopic("refused", 1, 1)])["refused"].result(60)
    assert "refused" in admin.list_topics(timeout=60).topics
