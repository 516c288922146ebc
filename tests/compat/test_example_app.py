"""An application written for confluent_kafka runs with only its import changed: over librdkafka,
over mqd's shared memory and over mqd's TCP, with the same results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker

APPLICATION = Path(__file__).parent / "example_app.py"


# where the engine is not in between, one backend is enough
@pytest.mark.parametrize(
    "library", [("confluent_kafka",), ("mqd", "shm"), ("mqd", "tcp"), ("mqd", "auto")], ids="-".join
)
def test_the_application(shared_broker: Broker, io_backend: str, library: tuple[str, ...]) -> None:
    if io_backend != "epoll" and library != ("mqd", "shm"):
        pytest.skip("tried with the other engine")
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    name = f"{library[0]}-{(library[1:] or ('x',))[0]}"
    topics = [NewTopic(topic, 3, 1, config={"flush.on.ack": "false"}) for topic in (f"orders-{name}", f"bills-{name}")]
    for future in admin.create_topics(topics).values():
        future.result(20)
    done = subprocess.run(
        [sys.executable, str(APPLICATION), library[0], shared_broker.bootstrap, *library[1:]],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=APPLICATION.parents[2],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout) == {"orders": 500, "committed": 500, "bills": 500}
