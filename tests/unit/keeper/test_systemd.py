"""The messages to systemd, and when its watchdog is fed; systemd and the keeper are simulated."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from mqd.keeper.systemd import PROBE_S, RESPONSE_S, ServiceManager, WatchdogFeeder
from mqd.shm.keeper_messages import Probed, ProbeQuery


class World:
    """A notify socket, a keeper's socket, and the time."""

    def __init__(self, directory: Path) -> None:
        self.now_s = 100.0
        self.manager_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager_socket.bind(str(directory / "notify"))
        self.manager_socket.setblocking(False)
        self.keeper = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.keeper.bind(str(directory / "keeper.sock"))
        self.keeper.listen(1)
        self.keeper.settimeout(5)
        self.dispatchers: dict[int, WatchdogFeeder] = {}
        self.feeder = WatchdogFeeder(
            ServiceManager(str(directory / "notify"), 120.0),
            directory / "keeper.sock",
            self.dispatchers,
            lambda: self.now_s,
        )

    def told(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.manager_socket.recv(4096).decode())
            except BlockingIOError:
                return found

    def keeper_answers(self, silent: list[str]) -> None:
        connection, _ = self.keeper.accept()
        with connection:
            assert msgspec.msgpack.decode(connection.recv(4096), type=ProbeQuery).within_s == RESPONSE_S
            connection.send(msgspec.msgpack.encode(Probed(silent)))
            (waiting,) = self.dispatchers.values()
            assert waiting.readable()
            waiting.handle_read_event()

    def close(self) -> None:
        self.feeder.close()
        self.manager_socket.close()
        self.keeper.close()


@pytest.fixture
def world(tmp_path: Path):
    found = World(tmp_path)
    yield found
    found.close()


def test_the_watchdog_is_fed_when_all_have_responded(world: World) -> None:
    world.feeder.tick()
    world.keeper_answers([])
    assert world.told() == ["WATCHDOG=1", "STATUS=every process answers"] and not world.dispatchers
    world.feeder.tick()
    assert not world.dispatchers  # it is not time yet
    world.now_s += PROBE_S
    world.feeder.tick()
    world.keeper_answers([])
    assert world.told() == ["WATCHDOG=1"]


def test_the_watchdog_is_not_fed_while_one_is_silent(world: World) -> None:
    world.feeder.tick()
    world.keeper_answers(["mqd-worker-1"])
    assert world.told() == ["STATUS=does not answer: mqd-worker-1"]
    world.now_s += PROBE_S
    world.feeder.tick()
    world.keeper_answers([])
    assert world.told() == ["WATCHDOG=1", "STATUS=every process answers"]


def test_the_watchdog_is_not_fed_while_the_keeper_is_silent_and_no_second_request_is_sent(world: World) -> None:
    world.feeder.tick()
    for _ in range(2):
        world.now_s += PROBE_S
        world.feeder.tick()
    assert world.told() == []
    world.now_s += PROBE_S
    world.feeder.tick()
    assert world.told() == ["STATUS=the keeper does not answer"] and len(world.dispatchers) == 1
    world.keeper_answers([])
    assert world.told() == ["WATCHDOG=1", "STATUS=every process answers"]


def test_a_dead_keeper_or_invalid_responses_do_not_feed_the_watchdog(world: World) -> None:
    world.feeder.tick()
    connection, _ = world.keeper.accept()
    connection.send(b"nonsense")
    world.feeder.handle_read_event()
    connection.close()
    world.keeper.close()
    world.now_s += PROBE_S
    world.feeder.tick()
    assert world.told() == ["STATUS=the keeper's response is malformed", "STATUS=the keeper is unreachable"]
    assert not world.dispatchers


def test_systemd_s_variables_are_taken_from_the_environment(tmp_path: Path) -> None:
    environment = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "120000000", "WATCHDOG_PID": "7", "PATH": "/bin"}
    assert ServiceManager.from_environment(dict(environment), 7).watchdog_s == 120.0
    assert ServiceManager.from_environment(dict(environment), 8).watchdog_s == 0.0
    ServiceManager.from_environment(environment, 7)
    assert environment == {"PATH": "/bin"}
    ServiceManager.from_environment({}, 7).notify("READY=1")  # without systemd: nothing


def test_an_abstract_address(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0mqd-test-{tmp_path}"[:100])
        address = manager.getsockname().decode().replace("\0", "@")
        ServiceManager(address).notify("READY=1", "STATUS=x")
        assert manager.recv(100) == b"READY=1\nSTATUS=x"
