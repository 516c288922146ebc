"""The keeper's settings, the owner of its directory, and corner cases of its loop that healthy
processes do not reach.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import msgspec
import pytest

from mqd.base import paths
from mqd.base.config import load_broker
from mqd.base.property_values import ConfigError
from mqd.cli.verbs import up
from mqd.cli.verbs.up import _listeners_with_port
from mqd.keeper import identity, loop, settings, sockets
from mqd.shm.attach import KeeperClient
from mqd.shm.keeper_messages import Death, Shutdown, Welcome
from tests.broker import is_alive
from tests.polling import PATIENCE_S, eventually


@pytest.fixture
def places(tmp_path):
    made = paths.layout(tmp_path / "data")
    paths.create(made)
    return made


def resolved(places, **overrides) -> settings.Settings:
    return settings.resolve(
        load_broker(None, {}, {name.replace("_", "."): value for name, value in overrides.items()}), places
    )


def test_the_keeper_loads_the_settings_that_up_resolved(places):
    reported = resolved(places, worker_count="3", num_partitions="7")
    settings.save(reported)
    environment = {
        "MQD_DATA_DIR": str(places.data_dir),
        "MQD_RUN_RESOLVED": str(places.resolved_config),
        "MQD_NUM_PARTITIONS": "9",
    }
    assert settings.load(environment) == reported


def test_a_keeper_without_up_reads_file_and_environment(places, tmp_path):
    (tmp_path / "server.properties").write_text("num.partitions=5\nnode.id=4\n")
    loaded = settings.load(
        {
            "MQD_DATA_DIR": str(places.data_dir),
            "MQD_CONFIG": str(tmp_path / "server.properties"),
            "MQD_WORKERS": "3",
            "MQD_NODE_ID": "6",
            "MQD_PYTHON": "x",
        }
    )
    assert (
        loaded.worker_count,
        loaded.config["worker.count"],
        loaded.config["num.partitions"],
        loaded.config["node.id"],
    ) == (3, "3", "5", "6")
    assert loaded.log_dirs == [str(places.log_dir)]


def test_log_dirs_become_absolute_and_differ(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolved(places, log_dirs="one,two").log_dirs == [str(tmp_path / "one"), str(tmp_path / "two")]
    (tmp_path / "link").symlink_to(tmp_path / "one")
    (tmp_path / "one").mkdir()
    with pytest.raises(ConfigError, match="twice"):
        resolved(places, log_dirs="one,link")
    with pytest.raises(ConfigError, match="at most 32"):
        resolved(places, log_dirs=",".join(f"d{number}" for number in range(33)))


def test_internal_variables_are_not_properties():
    environment = {
        "MQD_WORKERS": "2",
        "MQD_FILE_JOURNAL": "/j",
        "MQD_RUN_DIR": "/r",
        "MQD_SOCKET": "/s",
        "MQD_SOCKET_REQUEST_MAX_BYTES": "1",
        "MQD_NODE_ID": "3",
        "HOME": "/h",
    }
    assert settings.properties_environment(environment) == {
        "MQD_SOCKET_REQUEST_MAX_BYTES": "1",
        "MQD_NODE_ID": "3",
        "HOME": "/h",
    }


@pytest.mark.parametrize(
    ("listeners", "expected"),
    [
        (None, "PLAINTEXT://127.0.0.1:7000"),
        ("PLAINTEXT://[::1]:9092", "PLAINTEXT://[::1]:7000"),
        ("PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093", "PLAINTEXT://127.0.0.1:7000"),
    ],
)
def test_port_replaces_the_first_listeners(listeners, expected):
    overrides = {"listeners": listeners, "controller.listener.names": "CONTROLLER"} if listeners else {}
    assert _listeners_with_port(load_broker(None, {}, overrides), 7000) == expected


def test_the_file_is_read_once_because_it_may_be_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("num.partitions=7\nlisteners=PLAINTEXT://127.0.0.1:1\n",))
    writer.start()
    loaded, _ = up._load_settings(tmp_path / "data", pipe, {}, 7000, secured=False)
    writer.join()
    assert loaded.config["num.partitions"] == "7" and loaded.config["listeners"] == "PLAINTEXT://127.0.0.1:7000"


def test_an_identity_is_created_once(places):
    first = identity.load_or_create(places, 5)
    assert len(first.cluster_id) == 22 and first.node_id == 5
    assert identity.load_or_create(places, 5) == first
    with pytest.raises(identity.IdentityError, match="--node-id 5"):
        identity.load_or_create(places, 6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "version=2\ncluster.id=x\nnode.id=1\ndirectory.id=y\n",
        "version=1\ncluster.id=x\nnode.id=one\ndirectory.id=y\n",
        "\0\xff",
    ],
)
def test_an_invalid_identity_is_refused_and_left_unchanged(places, text):
    places.meta_properties.write_bytes(text.encode("latin-1"))
    with pytest.raises(identity.IdentityError, match="meta.properties"):
        identity.load_or_create(places, 1)
    assert places.meta_properties.read_bytes() == text.encode("latin-1")


def test_generations_increase_even_when_the_clock_goes_back(places, monkeypatch):
    seen = [identity.next_generation(places)]
    monkeypatch.setattr(identity, "now_ms", lambda: 5)
    seen += [identity.next_generation(places), identity.next_generation(places)]
    places.generation.write_text("garbage")
    assert seen == sorted(set(seen))
    assert identity.next_generation(places) == 5


def test_a_broker_starts_on_a_full_disk(places, monkeypatch):
    def full(path, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(identity.native, "file_replace", full)
    assert identity.next_generation(places) > 0


def test_boot_id_has_16_bytes_and_does_not_change():
    assert len(identity.boot_id()) == 16 and identity.boot_id() == identity.boot_id()


def test_listening_fails_with_a_reason():
    with pytest.raises(sockets.ListenError, match="no such address"):
        sockets.listen("192.0.2.1", 0)
    with pytest.raises(sockets.ListenError, match="not known"):
        sockets.listen("no-such-host.invalid", 0)


def test_a_free_port_can_be_requested_on_every_kind_of_address():
    for host in ("127.0.0.1", "localhost", ""):
        listener = sockets.listen(host, 0)
        assert listener.getsockname()[1] > 0 and not listener.getblocking()
        listener.close()


def test_an_unused_port_has_no_holder():
    assert sockets.port_holder(1) is None


# -- the loop --------------------------------------------------------------------------------------


@pytest.fixture
def keeper(places):
    return loop.Keeper(resolved(places, worker_count="2"), types.SimpleNamespace(cluster=None), 0)


def _live(keeper, index=0):
    """A live process of the keeper that does not read its messages."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = keeper.processes[index]
    process.connection, process.pid, process.pidfd = ours, child.pid, os.pidfd_open(child.pid)
    keeper._watch(ours, keeper._on_packet, ours, process)
    return process, child, theirs


def _end(process, child, theirs):
    child.kill()
    child.wait()
    child.stdin.close()
    theirs.close()
    process.connection.close()
    os.close(process.pidfd)


def test_notices_wait_for_a_slow_process_in_order(keeper):
    process, child, theirs = _live(keeper)
    sent = [Death("worker", 1, 1, number, number) for number in range(loop.NOTICE_COUNT_MAX)]
    for death in sent:
        keeper._broadcast(death)
    assert process.notices and child.poll() is None
    got = []
    theirs.setblocking(False)
    while len(got) < len(sent):
        try:
            got.append(msgspec.msgpack.decode(theirs.recv(4096), type=Death))
        except BlockingIOError:
            for key, mask in keeper._selector.select(5):
                key.data(mask)
    assert got == sent and not process.notices
    _end(process, child, theirs)


def test_a_process_that_never_reads_is_killed_without_delaying_others(keeper):
    process, child, theirs = _live(keeper)
    began = time.monotonic()
    while child.poll() is None:
        keeper._broadcast(Death("worker", 1, 1, 1, 1))
        assert time.monotonic() - began < PATIENCE_S
    assert child.returncode == -signal.SIGKILL
    _end(process, child, theirs)


def test_the_restart_delay_grows_for_a_process_that_keeps_dying(keeper):
    process = keeper.processes[0]
    waits = []
    for _ in range(8):
        waits.append(keeper._hold_back_s(process))
        process.death_times_s.append(time.monotonic())
    assert waits[:3] == [0, 0, 0] and waits[3:] == sorted(waits[3:]) and 0 < waits[3] <= loop.HOLD_BACK_S_MAX
    process.death_times_s.clear()
    process.death_times_s.extend([time.monotonic() - loop.DEATH_WINDOW_S] * 8)
    assert keeper._hold_back_s(process) == 0


def test_an_event_of_a_connection_that_was_closed_in_the_same_turn_is_not_delivered(keeper):
    """Two ready sources; the first one's callback closes the second."""
    pairs = [socket.socketpair(), socket.socketpair()]
    seen = []

    def callback(number):
        seen.append(number)
        keeper._forget(pairs[1 - number][0])
        pairs[1 - number][0].close()
        keeper._done = True

    for number, (ours, theirs) in enumerate(pairs):
        keeper._watch(ours, callback, number)
        theirs.send(b"x")
    for key, mask in keeper._selector.select(0):
        keeper._deliver(key, mask)
    assert len(seen) == 1
    for pair in pairs:
        for one in pair:
            one.close()


# -- attached processes in asyncio -----------------------------------------------------------------


class _Loop:
    """A client over a socket pair, without a keeper; its parent is a child of the test."""

    def __init__(self):
        self.keeper_end, self.own_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.client = KeeperClient.__new__(KeeperClient)
        self.client._connection = self.own_end
        self.client._parent_fds = [(os.pidfd_open(self.parent.pid), "the keeper ended")]
        self.client._endpoint = None
        self.client.welcome = types.SimpleNamespace(supervisor_is_own=True)
        self.seen: list[tuple] = []

    def send(self, message) -> None:
        self.keeper_end.send(msgspec.msgpack.encode(message))

    async def run(self, count: int) -> list[tuple]:
        enough = asyncio.Event()

        def note(kind):
            def callback(what):
                self.seen.append((kind, what))
                if len(self.seen) == count:
                    enough.set()

            return callback

        running = asyncio.get_running_loop()
        self.client.watch(running, note("death"), note("shutdown"), note("parent"))
        await asyncio.wait_for(enough.wait(), 20)
        for _ in range(10):  # let other callbacks run: a second notice would be wrong
            await asyncio.sleep(0)
        return self.seen

    def close(self) -> None:
        self.parent.kill()
        self.parent.wait()
        self.parent.stdin.close()
        self.client.close()
        self.keeper_end.close()


@pytest.fixture
def attached():
    made = _Loop()
    yield made
    made.close()


def test_notices_arrive_in_order(attached):
    death = Death("acceptor", 0, 2, 1, 99)
    attached.send(death)
    attached.send(Shutdown("because"))
    assert asyncio.run(attached.run(2)) == [("death", death), ("shutdown", "because")]


def test_the_keepers_end_is_reported_once(attached):
    attached.keeper_end.close()
    attached.parent.kill()
    [(kind, reason)] = asyncio.run(attached.run(1))
    assert kind == "parent" and reason == "the keeper ended"


def test_a_shutdown_is_not_followed_by_a_parents_death(attached):
    attached.send(Shutdown("because"))
    attached.keeper_end.close()
    attached.parent.kill()
    assert asyncio.run(attached.run(1)) == [("shutdown", "because")]


def test_a_welcome_fits_into_one_packet_with_the_largest_broker(places):
    """66 endpoints, 64 hand-offs and 32 directories: the kernel passes at most 253 descriptors, and
    a message has at most MESSAGE_BYTES_MAX.
    """
    from mqd.shm.attach import DESCRIPTOR_COUNT_MAX, MESSAGE_BYTES_MAX

    config = load_broker(None, {}, {})
    config["log.dirs"] = ",".join("/" + "d" * 250 for _ in range(32))
    names = ["/mqd-0123456789abcdef-arena-65"] * 66
    welcome = Welcome(
        65, 1, 64, "c", "l", names, [1 << 32] * 66, 1, 1, [("127.0.0.1", 65535)] * 8, 66, 64, 8, 33, config
    )
    assert len(msgspec.msgpack.encode(welcome)) < MESSAGE_BYTES_MAX
    assert DESCRIPTOR_COUNT_MAX >= 66 + 64 + 8 + 33


@pytest.mark.slow
def test_a_process_that_does_not_end_is_finally_killed(tmp_path):
    from mqd.shm.tools import KeeperConnection
    from tests.ports import free_port

    data_dir = tmp_path / "data"
    command = [
        sys.executable,
        "-m",
        "mqd.cli.main",
        "up",
        "--data-dir",
        str(data_dir),
        "--port",
        str(free_port()),
        "--workers",
        "1",
    ]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert up.stdout.readline().startswith("mqd ready")
    with KeeperConnection(data_dir) as tool:
        pid = next(one.pid for one in tool.status().processes if one.role == "worker")
    os.kill(pid, signal.SIGSTOP)
    up.terminate()
    assert up.wait(60) == 1
    assert "did not end in time" in up.stderr.read()
    eventually(lambda: not is_alive(pid), "a process that was killed has ended")
