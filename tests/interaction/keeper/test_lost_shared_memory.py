"""The effects of systemd's RemoveIPC= when the broker's user logs out: names in /dev/shm and System
V semaphores disappear while the broker runs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from mqd.shm import credits, segments
from tests.interaction.traffic import create_topic, eventually, must_produce, read_batches
from tests.kafka_connection import KafkaConnection
from tests.local_connection import LocalConnection


def test_processes_that_die_are_restarted_and_serve(start_broker):
    broker = start_broker(workers=2)
    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        create_topic(kafka, "lost-memory", 2)
        for partition in (0, 1):
            must_produce(kafka, "lost-memory", partition, b"before")
    base = segments.prefix(broker.data_dir)
    names = [entry for entry in os.listdir("/dev/shm") if f"/{entry}".startswith(base)]
    assert len(names) == 6
    for name in names:
        os.unlink(f"/dev/shm/{name}")
    credits.remove(segments.control_name(base))

    for name in ("mqd-worker-0", "mqd-worker-1", "mqd-acceptor", "mqd-controller"):
        pid = broker.pid(name)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid, name=name: broker.pid(name) not in (pid, 0, None), f"a successor of {name}")
        broker.wait_until_ready()

    with KafkaConnection("127.0.0.1", broker.port) as kafka:
        for partition in (0, 1):
            must_produce(kafka, "lost-memory", partition, b"after")
            held = b"".join(read_batches(kafka, "lost-memory", partition))
            assert b"before" in held and b"after" in held
    with LocalConnection(Path(broker.status()["client_socket"])) as local:
        must_produce(local, "lost-memory", 0, b"through memory")
    assert broker.stop() == 0
