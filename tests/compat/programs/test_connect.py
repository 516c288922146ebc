"""Kafka Connect, while its workers and the broker's processes are killed. Distributed: each record
of a source with exactly-once support exists once. Standalone: the lines of a file arrive at least
once, through a topic, in another file.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from tests.broker import Broker
from tests.compat.java_client import build_java, java_program
from tests.compat.programs.program import CommittedReader, Program, difference, kill_process
from tests.crash.workload import wait_until
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_S = 180.0
TASKS = 2
STAGE = 400  # numbers of each task between two kills: two seconds of work
KILLS = ("worker-0", "mqd-acceptor", "worker-1", "mqd-worker-0", "broker")
INTERNAL = ("connect-configs", "connect-offsets", "connect-status")
COMMON = {
    "plugin.discovery": "service_load",
    "key.converter": "org.apache.kafka.connect.storage.StringConverter",
    "value.converter": "org.apache.kafka.connect.storage.StringConverter",
}
EXACTLY_ONCE = "enabled"


def write(path: Path, settings: dict[str, str]) -> str:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    return str(path)


def build() -> Path:
    home = build_java(Path(__file__).parent / "connect", "programs-connect")
    # with this Connect finds the source without scanning every class of every library
    manifest = home / "classes/META-INF/services/org.apache.kafka.connect.source.SourceConnector"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text("mqd.programs.Numbers\n")
    return home


class Worker(Program):
    """A worker of the distributed mode, and its REST interface on loopback."""

    def __init__(self, home: Path, broker: Broker, directory: Path, number: int) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        settings = {
            "bootstrap.servers": broker.bootstrap,
            "group.id": "connect",
            "listeners": self.url,
            **COMMON,
            "config.storage.topic": INTERNAL[0],
            "offset.storage.topic": INTERNAL[1],
            "status.storage.topic": INTERNAL[2],
            "config.storage.replication.factor": "1",
            "offset.storage.replication.factor": "1",
            "offset.storage.partitions": "3",
            "status.storage.replication.factor": "1",
            "status.storage.partitions": "3",
            "exactly.once.source.support": EXACTLY_ONCE,
            "session.timeout.ms": "6000",
            "heartbeat.interval.ms": "1000",
            "scheduled.rebalance.max.delay.ms": "1000",
        }
        path = write(directory / f"worker-{number}.properties", settings)
        super().__init__(
            java_program(home, "org.apache.kafka.connect.cli.ConnectDistributed", path),
            directory / f"worker-{number}.out",
        )

    def ask(self, path: str, method: str = "GET", body: object = None) -> Any:
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def tasks(self, connector: str) -> list[str]:
        """Their states. Empty while the worker does not respond."""
        try:
            return [
                task["state"] + task.get("trace", "") for task in self.ask(f"/connectors/{connector}/status")["tasks"]
            ]
        except OSError:
            return []

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(condition, PATIENCE_S, lambda: f"{what}\n{self.tail()}")

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            try:
                return bool(self.ask("/")["version"])
            except OSError:
                assert not self.ended(), self.tail()
                return False

        self.wait_until(answers, "the worker answers")

    def create(self, name: str, config: dict[str, str]) -> None:
        def created() -> bool:
            try:
                return bool(self.ask(f"/connectors/{name}/config", "PUT", config))
            except urllib.error.HTTPError as refused:
                assert refused.code in (409, 500), refused.read()  # a rebalance is in progress
                return False
            except OSError:
                return False

        self.wait_until(created, f"{name} is created")
        self.wait_until(lambda: set(self.tasks(name)) == {"RUNNING"}, f"{name} runs: {self.tasks(name)}")


def set_limit(path: Path, number: int) -> None:
    """Takes effect at once: a task reads it continuously."""
    path.with_suffix(".new").write_text(str(number))
    os.replace(path.with_suffix(".new"), path)


def kill(broker: Broker, victim: str, workers: list[Worker]) -> None:
    if victim.startswith("worker-"):
        workers[int(victim.removeprefix("worker-"))].restart()
    else:
        kill_process(broker, victim)


def test_each_record_of_a_source_is_there_once(start_broker, tmp_path: Path) -> None:
    home = build()
    broker: Broker = start_broker(workers=2, config={"group.initial.rebalance.delay.ms": "0"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("numbers", TASKS, 1)])["numbers"].result(60)
    limit, sunk = tmp_path / "limit", tmp_path / "sunk"
    reader = CommittedReader(broker.bootstrap, {"numbers": TASKS})
    workers = [Worker(home, broker, tmp_path, number) for number in range(2)]
    with ExitStack() as stack:
        for worker in workers:
            stack.enter_context(worker)
        for worker in workers:
            worker.wait_until_it_answers()
        workers[0].create(
            "source",
            {
                "connector.class": "mqd.programs.Numbers",
                "tasks.max": str(TASKS),
                "exactly.once.support": "required" if EXACTLY_ONCE == "enabled" else "requested",
                "topic": "numbers",
                "limit": str(limit),
            },
        )
        workers[1].create(
            "sink",
            {
                "connector.class": "org.apache.kafka.connect.file.FileStreamSinkConnector",
                "tasks.max": "1",
                "topics": "numbers",
                "file": str(sunk),
            },
        )
        for done, victim in enumerate(KILLS):
            set_limit(limit, STAGE * (done + 1))
            reader.read_until(TASKS * (STAGE * done + STAGE // 2), PATIENCE_S, workers)
            kill(broker, victim, workers)
        last = STAGE * (len(KILLS) + 1)
        set_limit(limit, last)
        reader.read_until(TASKS * last, PATIENCE_S, workers)
        reader.read(3.0)  # records that should not exist
        expected = {("numbers", task): [f"{task} {number}" for number in range(last)] for task in range(TASKS)}
        assert not (problem := difference(expected, reader.values)), "\n".join(
            [problem, *(each.tail() for each in workers)]
        )
        workers[0].wait_until(
            lambda: {line for values in expected.values() for line in values} == set(sunk.read_text().splitlines()),
            "the sink has each record",
        )
    reader.close()
    for topic in INTERNAL:
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        found = admin.describe_configs([resource])[resource].result(60)
        assert found["cleanup.policy"].value == "compact", topic


LINES = 400
LINE_KILLS = ("mqd-acceptor", "program", "mqd-worker-0", "broker", "program")


def test_each_line_of_a_file_arrives_through_a_topic(start_broker, tmp_path: Path) -> None:
    home = build()
    broker: Broker = start_broker(workers=1, config={"group.initial.rebalance.delay.ms": "0"})
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("lines", 1, 1)])["lines"].result(60)
    source, sunk = tmp_path / "source", tmp_path / "sunk"
    source.touch()
    settings = {
        "bootstrap.servers": broker.bootstrap,
        "listeners": f"http://127.0.0.1:{free_port()}",
        **COMMON,
        "offset.storage.file.filename": str(tmp_path / "offsets"),
        "offset.flush.interval.ms": "500",
        "consumer.session.timeout.ms": "6000",
        "consumer.heartbeat.interval.ms": "1000",
    }
    connectors = {
        "source": {"connector.class": "FileStreamSource", "topic": "lines", "file": str(source)},
        "sink": {"connector.class": "FileStreamSink", "topics": "lines", "file": str(sunk)},
    }
    files = [
        write(tmp_path / f"{name}.properties", {"name": name, "tasks.max": "1", **own})
        for name, own in connectors.items()
    ]
    worker = write(tmp_path / "standalone.properties", settings)
    program = Program(
        java_program(home, "org.apache.kafka.connect.cli.ConnectStandalone", worker, *files),
        tmp_path / "standalone.out",
    )

    def sunk_lines() -> list[str]:
        return sunk.read_text().splitlines() if sunk.exists() else []

    def wait_for(count: int) -> None:
        wait_until(
            lambda: len(set(sunk_lines())) >= count or program.ended(),
            PATIENCE_S,
            lambda: f"{len(set(sunk_lines()))} lines of {count}\n{program.tail()}",
        )
        assert not program.ended(), program.tail()

    written = 0
    with program:
        for victim in (*LINE_KILLS, None):
            begun = written
            for _ in range(LINES // 10):
                with open(source, "a") as output:
                    output.writelines(f"line {number}\n" for number in range(written, written + 10))
                written += 10
                time.sleep(0.01)  # lines arrive while Connect works
            if victim is None:
                break
            wait_for(begun + 1)
            if victim == "program":
                program.restart()
            else:
                kill_process(broker, victim)
        wait_for(written)
    expected = [f"line {number}" for number in range(written)]
    assert list(dict.fromkeys(sunk_lines())) == expected  # possibly repeated, but none lost and none out of order
