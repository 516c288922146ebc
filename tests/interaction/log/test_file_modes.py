"""Other users can neither read nor lock a broker's files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.broker import Broker
from tests.polling import eventually


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def write(broker: Broker) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap, "acks": "all"})
    producer.produce("private", b"value")
    assert producer.flush(30) == 0


def open_to_others(directory: Path) -> list[str]:
    """Files and directories that other users may read, write or traverse; sockets are protected by
    local.socket.permissions.
    """
    found = []
    for path in (directory, *directory.rglob("*")):
        if path.name == "up.stderr":  # tests/broker.py created it
            continue
        try:
            about = path.lstat()
        except FileNotFoundError:  # such as the temporary file of a checkpoint
            continue
        if not stat.S_ISLNK(about.st_mode) and stat.S_IMODE(about.st_mode) & 0o077:
            found.append(f"{stat.filemode(about.st_mode)} {path.relative_to(directory)}")
    return found


def test_only_the_brokers_user_may_access_files(start_broker, tmp_path: Path, usual_umask: None) -> None:
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir(mode=0o755)
    (elsewhere / ".lock").touch(mode=0o644)
    broker = start_broker(config={"log.dirs": str(elsewhere)})
    write(broker)
    assert open_to_others(broker.data_dir) == [] and open_to_others(elsewhere) == []
    eventually(lambda: "open to other users; its permissions were restricted" in broker.logs(200))
    os.kill(broker.pid("mqd-worker-0"), 9)
    broker.wait_until_ready()
    write(broker)
    assert broker.stop() == 0
    assert open_to_others(broker.data_dir) == [] and open_to_others(elsewhere) == []


def test_others_may_traverse_directories_to_a_shared_socket(start_broker, usual_umask: None) -> None:
    broker = start_broker(config={"local.socket.permissions": "0666"})
    write(broker)
    assert (
        stat.S_IMODE(broker.data_dir.stat().st_mode) == 0o711
        and stat.S_IMODE((broker.data_dir / "run").stat().st_mode) == 0o711
    )
    assert [name for name in open_to_others(broker.data_dir) if not name.endswith((" .", " run", "client.sock"))] == []
