"""The Java worker of examples/java, as described in docs/queues.md."""

from __future__ import annotations

import subprocess
import uuid
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from tests.broker import Broker
from tests.compat.java_client import build_java_client
from tests.interaction.share_members import begin_at_first_record

pytestmark = pytest.mark.slow  # a JVM that compiles
PROGRAM = Path(__file__).parents[3] / "examples" / "java" / "queue" / "Worker.java"


@pytest.mark.timeout(200)
def test_the_worker_of_the_page(shared_broker: Broker) -> None:
    name = f"jobs-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": shared_broker.bootstrap})
    admin.create_topics([NewTopic(name, 3)])[name].result(60)
    begin_at_first_record(shared_broker.bootstrap, name)
    libraries = build_java_client() / "libraries"
    quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"
    command = ["java", "-Xmx256m", "-XX:+UseSerialGC", quiet, "-cp", f"{libraries}/*", str(PROGRAM)]
    done = subprocess.run([*command, shared_broker.bootstrap, name, name], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "99 accepted, 1 rejected, 1 released\n"
