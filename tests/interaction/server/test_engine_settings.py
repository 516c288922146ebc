"""Settings of the engine whose effect is only visible in a running broker: each is checked at the
place where it takes effect.
"""

from __future__ import annotations

import contextlib
import os
import re
import urllib.request
from pathlib import Path

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from mqd.protocol.messages import MetadataRequest
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S, eventually

METADATA = 3
STRIPE_BYTES = 1 << 20


def _cpus_of_threads(pid: int) -> set[str]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            lines = (task / "status").read_text().splitlines()
            found |= {line.split(":")[1].strip() for line in lines if line.startswith("Cpus_allowed_list:")}
    return found


def test_settings_of_the_engine_take_effect(start_broker) -> None:
    cpu = min(os.sched_getaffinity(0))
    broker = start_broker(
        workers=1,
        config={
            "worker.cpus": str(cpu),
            "worker.spin.us": "50",
            "worker.loop.profile": "true",
            "log.flush.linger.us": "1000",
            "broker.rack": "cellar",
            "log.stripe.bytes": str(STRIPE_BYTES),
            "sendfile.bytes.min": "0",
            "read.fd.count.max": "16",
        },
    )
    assert str(cpu) in _cpus_of_threads(broker.pid("mqd-worker-0")), "no thread of the worker is pinned to worker.cpus"

    with KafkaConnection(port=broker.port) as kafka:
        assert [one.rack for one in kafka.call(METADATA, 12, MetadataRequest()).brokers] == ["cellar"]

    admin = AdminClient({"bootstrap.servers": broker.bootstrap})  # must outlive its futures
    for created in admin.create_topics([NewTopic("t", 1, 1)]).values():
        created.result(60)
    outcomes: list[object] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
    for number in range(100):
        producer.produce("t", b"%d" % number, on_delivery=lambda error, _: outcomes.append(error))
    assert producer.flush(60) == 0 and outcomes == [None] * 100

    consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "unused", "enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0, 0)])
    values = [message.value() for message in consumer.consume(100, timeout=60)]
    consumer.close()
    assert values == [b"%d" % number for number in range(100)]

    (segment,) = (broker.data_dir / "log" / "t-0").glob("*.log")

    def reserved_bytes() -> int:
        """Measured after one more record: an idle partition releases its preallocated space."""
        producer.produce("t", b"x")
        assert producer.flush(60) == 0
        found = segment.stat().st_blocks * 512
        return found if found >= STRIPE_BYTES else 0

    reserved = eventually(reserved_bytes, "a helper thread reserves space")
    assert reserved % STRIPE_BYTES == 0, f"{reserved} bytes are reserved, which is no multiple of log.stripe.bytes"
    assert segment.stat().st_size < 65536, "preallocation must not change the size of the file"

    page = urllib.request.urlopen(f"http://127.0.0.1:{broker.status()['metrics_port']}/metrics", timeout=PATIENCE_S)
    written = re.findall(r"^mqd_loop_(?:write|allocation)_seconds_count{.*} (\S+)", page.read().decode(), re.MULTILINE)
    assert len(written) == 2 and sum(map(float, written)) > 0, "worker.loop.profile measures nothing"
