"""`mqd top` against a real broker: one snapshot, JSON, and live in a terminal of tmux."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from tests.broker import Broker
from tests.interaction.command_line import CommandLine
from tests.interaction.traffic import create_topic, eventually
from tests.interaction.transactional import connect

TOPIC, GROUP = "flights", "billing\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("cli-top") / "data", workers=1) as running:
        with connect(running) as kafka:
            create_topic(kafka, TOPIC, 2)
        produce(running, 30)
        consumer = Consumer({"bootstrap.servers": running.bootstrap, "group.id": GROUP})
        consumer.commit(offsets=[TopicPartition(TOPIC, 0, 4)], asynchronous=False)
        consumer.close()
        yield running


def produce(broker: Broker, count: int) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(count):
        producer.produce(TOPIC, b"value", partition=number % 2)
    assert producer.flush(60) == 0


@pytest.fixture
def mqd(broker: Broker, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> CommandLine:
    return CommandLine(broker, monkeypatch, capfdbinary)


def test_once(mqd: CommandLine, broker: Broker) -> None:
    code, out, _ = mqd("top", "--once", "--every", "0.2", "--data-dir", str(broker.data_dir))
    lines = out.splitlines()
    assert code == 0 and lines[0].startswith(f"mqd top of {broker.bootstrap}, ") and "\x1b" not in out
    assert {"mqd-worker-0", "mqd-acceptor", "mqd-controller"} <= {line.split()[0] for line in lines if line}
    group = next(line for line in lines if line.startswith("billing"))
    assert group.split()[1:3] == ["Empty", "11"] and not group.split()[3].startswith("-")
    assert any(line.split()[:3] == [TOPIC, "2", "0"] for line in lines)


def test_as_json_without_a_data_directory(mqd: CommandLine, broker: Broker) -> None:
    found = mqd.json("top", "--every", "0.2", "-b", broker.bootstrap)
    assert found["processes"] == [] and found["seconds"] >= 0.2
    (topic,) = (one for one in found["topics"] if one["name"] == TOPIC)
    assert (topic["partitions"], topic["records_in_s"], topic["records_read_s"]) == (2, 0.0, 0.0)
    (group,) = found["groups"]
    assert (group["name"], group["state"], group["lag"], group["behind_s"]) == (GROUP, "Empty", 11, None)


def test_without_a_terminal_the_message_names_the_alternative(mqd: CommandLine, broker: Broker) -> None:
    code, _, error = mqd("top", "-b", broker.bootstrap)
    assert code == 1 and "--once" in error


def test_live_in_a_terminal(broker: Broker, tmp_path: Path) -> None:
    """Rates appear while records are written; q restores the terminal."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: apt-get install tmux")

    def tmux(*arguments: str) -> str:
        command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout

    top = f"{sys.executable} -m mqd.cli.main top --every 0.2 -b {broker.bootstrap}; echo done; exec cat"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    command = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30"]
    subprocess.run([*command, top], check=True, env=environment, timeout=20)
    try:

        def shows_rate() -> bool:
            produce(broker, 200)
            lines = tmux("capture-pane", "-p").splitlines()
            return any(line.startswith(TOPIC) and int(line.split()[2]) > 0 for line in lines)

        eventually(shows_rate, "a rate in the terminal")
        screen = tmux("capture-pane", "-p")
        assert "q quits" in screen and "LAG" in screen and len(screen.splitlines()) <= 30
        tmux("send-keys", "q")
        eventually(lambda: tmux("capture-pane", "-p").strip() == "done", "the former screen")
    finally:
        tmux("kill-server")
