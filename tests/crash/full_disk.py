"""`python -m tests.crash.full_disk MOUNT [kill] [forked]`: a broker on a file system without a free
byte, for test_full_disk.py, which runs it in a mount namespace. Prints a line of JSON for each
step.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from tests import broker as brokers_of_tests
from tests.broker import Broker
from tests.crash.workload import EARLIEST, create_topics, list_offset, produce, read_log, wait_until
from tests.kafka_connection import KafkaConnection

KAFKA_STORAGE_ERROR = 56
RECORDS, RECORD_BYTES, SEGMENT_BYTES = 200, 20_000, 65536
FLOOR_BYTES = 2 << 20  # log.dirs.free.bytes.min: more than is given up at start, and small compared to what is deleted


def emit(step: str, **found: object) -> None:
    print(json.dumps({"step": step, **found}), flush=True)


def free_bytes(mount: Path) -> int:
    about = os.statvfs(mount)
    return about.f_bavail * about.f_frsize


def fill(mount: Path) -> None:
    """Fills the disk to the last block."""
    with open(mount / "others", "ab", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def start(broker: Broker) -> None:
    """As Broker.start, whose error file would be on the full disk."""
    with tempfile.TemporaryFile("w+") as errors:
        broker.process = broker.run(broker.command(), errors)
        assert broker.process.stdout is not None
        line = broker.process.stdout.readline()
        errors.seek(0)
        assert line.startswith("mqd ready"), f"{line}{errors.read()}\n{broker.logs(20)}"


def use(broker: Broker, records: int) -> int:
    """Reads all, is refused when it writes, deletes some; returns how many are left."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        read = len(read_log(kafka, "t", 0).records)
        error, _ = produce(kafka, "t", 0, bytes(RECORD_BYTES))
        low = (
            next(iter(admin.delete_records([TopicPartition("t", 0, RECORDS - records + 50)]).values()))
            .result(20)
            .low_watermark
        )
        left = len(read_log(kafka, "t", 0).records)
        emit("used", read=read, expected=records, error=error, low=low, left=left)
        return left


def make_room(broker: Broker, mount: Path) -> None:
    """By deleting a topic and by retention; then it accepts records again, automatically."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap, "log_level": 0})
    admin.delete_topics(["other"])["other"].result(20)
    entry = ConfigEntry("retention.bytes", str(SEGMENT_BYTES), incremental_operation=AlterConfigOpType.SET)
    next(
        iter(
            admin.incremental_alter_configs(
                [ConfigResource(ConfigResource.Type.TOPIC, "old", incremental_configs=[entry])]
            ).values()
        )
    ).result(20)
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        wait_until(lambda: list_offset(kafka, "old", 0, EARLIEST) > 0, 60, broker.logs)
        wait_until(lambda: free_bytes(mount) > 2 * FLOOR_BYTES, 60, broker.logs)
        wait_until(lambda: produce(kafka, "t", 0, b"again")[0] == 0, 60, broker.logs)
    emit("room", free=free_bytes(mount))


def main() -> None:
    mount, kill = Path(sys.argv[1]), "kill" in sys.argv[2:]
    brokers_of_tests.is_forked = "forked" in sys.argv[2:]
    broker = Broker(
        mount / "data", config={"log.dirs.free.bytes.min": str(FLOOR_BYTES), "log.retention.check.interval.ms": "500"}
    )
    with contextlib.ExitStack() as stack:
        stack.callback(broker.stop)
        broker.start()
        small = {"segment.bytes": str(SEGMENT_BYTES)}
        create_topics(broker.bootstrap, {"t": 1, "other": 1, "old": 1}, {"t": small, "other": small, "old": small})
        with KafkaConnection("127.0.0.1", broker.port) as kafka:
            for topic in ("t", "other", "old"):
                for _ in range(RECORDS):
                    assert produce(kafka, topic, 0, bytes(RECORD_BYTES))[0] == 0
        left = RECORDS
        for round_number in range(3):
            if kill and round_number:
                broker.kill_all()
            else:
                broker.stop()
            fill(mount)
            emit("full", free=free_bytes(mount))
            began = time.monotonic()
            start(broker)
            emit("started", seconds=time.monotonic() - began)
            left = use(broker, left)
        make_room(broker, mount)
    emit("ended")


if __name__ == "__main__":
    main()
