"""The keeper with processes that only live and die: which are admitted, what they receive, how fast
a death is noticed, how everything shuts down.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mqd import native
from mqd.base import paths
from mqd.shm import locks, segments
from mqd.shm.attach import KeeperError, connect_keeper, send_message
from mqd.shm.keeper_messages import Hello, SetLogLevel
from mqd.shm.tools import KeeperConnection
from tests.broker import pause
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_port

WORKERS = 2

# A process of the broker that attaches, reports events as JSON lines, and ends with its parents.
# "r" on its stdin: Ready. "x": exit 0.
CHILD = """
import json, os, select, sys, time
from mqd.shm.attach import KeeperClient, KeeperError
def say(**what):
    print(json.dumps(what | {"at": time.monotonic()}), flush=True)
try:
    client = KeeperClient.connect(sys.argv[1], sys.argv[2], int(sys.argv[3]))
except KeeperError as error:
    say(refused=str(error))
    sys.exit(0)
say(attached=client.endpoint_index, generation=client.generation, broker=client.welcome.generation, eventfds=client.eventfds, handoffs=client.handoff_fds,
    inodes=[os.fstat(fd).st_ino for fd in client.handoff_fds], locks=len(client.lock_fds), listeners=client.welcome.listeners, config=client.config)
poll = select.poll()
for fd in (0, client.fileno(), *client.parent_fds):
    poll.register(fd, select.POLLIN)
while True:
    ready = {fd for fd, _ in poll.poll()}
    if ready & set(client.parent_fds):
        say(parent=client.parent_death())
        sys.exit(0)
    if client.fileno() in ready:
        try:
            for notice in client.receive():
                say(**{type(notice).__name__: {name: getattr(notice, name) for name in notice.__struct_fields__}})
                if type(notice).__name__ == "Shutdown":
                    sys.exit(0)
        except KeeperError as error:
            say(parent=str(error))
            sys.exit(0)
    if 0 in ready:
        order = os.read(0, 1)
        if order == b"r":
            client.report_ready("metrics_port=1234" if sys.argv[2] == "acceptor" else "")
        elif order == b"c":
            client.close()
            time.sleep(60)
        else:
            sys.exit(0)
"""


class Child:
    def __init__(self, run_dir: Path, role: str, index: int = 0):
        self.role, self.index = role, index
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(run_dir), role, str(index)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._rest = b""

    def receive(self, timeout_s: float = PATIENCE_S) -> dict:
        """The next event that it reports."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            assert select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0], (
                f"{self.role} {self.index} says nothing"
            )
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, f"{self.role} {self.index} ended"
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def report(self, order: bytes) -> None:
        self.process.stdin.write(order)

    def kill(self) -> float:
        """Returns when the process is dead."""
        at = time.monotonic()
        self.process.kill()
        return at

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdin.close()
        self.process.stdout.close()


class Host:
    """A keeper with its own data directory."""

    def __init__(self, data_dir: Path, **environment: str):
        self.places = paths.layout(data_dir)
        self.children: list[Child] = []
        self.port = free_port()
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("MQD_", "SUPERVISOR_"))},
            "MQD_DATA_DIR": str(data_dir),
            "MQD_WORKERS": str(WORKERS),
            "MQD_LISTENERS": f"PLAINTEXT://127.0.0.1:{self.port}",
            "MQD_RECEIVE_ARENA_BYTES": str(1 << 20),
            "MQD_SOCKET_REQUEST_MAX_BYTES": str(1 << 19),
            "MQD_MESSAGE_MAX_BYTES": str(1 << 18),
            **environment,
        }
        data_dir.mkdir(parents=True, exist_ok=True)
        self.log = data_dir / "keeper.log"
        with self.log.open("ab") as log:
            self.keeper = subprocess.Popen(
                [sys.executable, "-m", "mqd.keeper"], env=environment, stdout=log, stderr=log
            )

    def tool(self) -> KeeperConnection:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return KeeperConnection(self.places.data_dir)
            except KeeperError:
                assert self.keeper.poll() is None and time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.01)

    def child(self, role: str, index: int = 0) -> Child:
        child = Child(self.places.run_dir, role, index)
        self.children.append(child)
        return child

    def every_process(self) -> list[Child]:
        """All processes, attached and ready."""
        children = [
            *(self.child("worker", index) for index in range(WORKERS)),
            self.child("acceptor"),
            self.child("controller"),
        ]
        for child in children:
            child.seen = child.receive()
            assert "attached" in child.seen, child.seen
            child.report(b"r")
        self.wait(lambda status: status.ready)
        return children

    def wait(self, condition) -> None:
        with self.tool() as tool:
            eventually(lambda: condition(tool.status()), self.log.read_text)

    def end(self) -> None:
        self.keeper.kill()
        self.keeper.wait(PATIENCE_S)
        for child in self.children:
            child.end()
        segments.clean(segments.prefix(self.places.data_dir))


@pytest.fixture
def host(tmp_path):
    made = Host(tmp_path / "data")
    yield made
    made.end()


def test_each_process_receives_its_own_descriptors(host):
    workers, (acceptor, controller) = (children := host.every_process())[:WORKERS], children[WORKERS:]
    assert [child.seen["attached"] for child in children] == [0, 1, 2, 3]
    assert {child.seen["broker"] for child in children} == {workers[0].seen["broker"]}
    assert all(len(child.seen["eventfds"]) == WORKERS + 2 for child in children)
    assert [len(child.seen["handoffs"]) for child in children] == [1, 1, WORKERS, 0]
    assert [child.seen["locks"] for child in children] == [2, 2, 0, 0]
    assert acceptor.seen["listeners"] == [["127.0.0.1", host.port]]
    assert controller.seen["config"]["log.dirs"] == str(host.places.log_dir)
    assert controller.seen["config"]["worker.count"] == str(WORKERS)


def test_status_lists_processes_and_ports(host):
    children = host.every_process()
    with host.tool() as tool:
        status = tool.status()
    assert status.ready and (status.host, status.port, status.metrics_port) == ("127.0.0.1", host.port, 1234)
    assert {(one.role, one.pid) for one in status.processes} == {("keeper", host.keeper.pid)} | {
        (one.role, one.process.pid) for one in children
    }
    assert (status.connections, status.partitions) == ([0] * WORKERS, [0] * WORKERS)
    about = json.loads(host.places.broker_json.read_text())
    assert about["ready"] and about["port"] == host.port and about["ending"] is None


@pytest.mark.parametrize("victim", ["worker", "acceptor", "controller"])
def test_a_death_is_noticed_within_50_ms(host, victim):
    children = host.every_process()
    dying = next(child for child in children if child.role == victim)
    others = [child for child in children if child is not dying]
    delays = []
    for _ in range(3):  # the machine may be busy, but the keeper must not be slow three times
        killed = dying.kill()
        notices = [child.receive() for child in others]
        for notice in notices:
            death = notice["Death"]
            assert (death["role"], death["index"], death["pid"]) == (victim, 0, dying.process.pid)
            assert death["generation"] == dying.seen["generation"] and death["endpoint"] == dying.seen["attached"]
        delays.append(max(notice["at"] for notice in notices) - killed)
        if delays[-1] <= 0.05:
            break
        dying.end()
        successor = host.child(victim)
        successor.seen = successor.receive()
        successor.report(b"r")
        dying = successor
    assert min(delays) <= 0.05, delays
    host.wait(lambda status: not status.ready)


def test_a_successor_gets_the_same_descriptors_and_another_generation(host):
    children = host.every_process()
    before = children[0].seen
    children[0].kill()
    successor = host.child("worker", 0)
    after = successor.receive()
    assert after["generation"] > before["generation"]
    assert after["inodes"] == before["inodes"] and after["attached"] == before["attached"]
    successor.report(b"r")
    host.wait(
        lambda status: (
            status.ready and next(one for one in status.processes if one.name == "mqd-worker-0").restart_count == 1
        )
    )


def test_a_socket_handed_over_survives_both_processes(host):
    """A socket in transfer from the acceptor to a worker survives the death of either, and arrives
    at the worker's successor.
    """
    children = host.every_process()
    children[0].kill()
    children[2].kill()
    host.wait(lambda status: sum(one.state == "dead" for one in status.processes) == 2)
    ours, theirs = socket.socketpair()
    # in its own process: the keeper kills a process that closes its connection and does not end
    program = (
        "import os, socket, sys\n"
        "from mqd.shm.attach import KeeperClient\n"
        "client = KeeperClient.connect(sys.argv[1], 'acceptor')\n"
        "handoff = socket.socket(fileno=client.handoff_fds[0])\n"
        "socket.send_fds(handoff, [b'x'], [int(sys.argv[2])])\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", program, str(host.places.run_dir), str(theirs.fileno())]
    subprocess.run(command, pass_fds=[theirs.fileno()], check=True, timeout=PATIENCE_S)
    theirs.close()
    ours.settimeout(PATIENCE_S)
    worker = SocketTakingWorker(host, "worker", 0)
    assert worker == b"here"
    ours.close()


def SocketTakingWorker(host: Host, role: str, index: int) -> bytes:
    """Attaches as a worker in its own process, takes one socket from the hand-off and writes to it."""
    program = (
        "import os, socket, sys\n"
        "from mqd.shm.attach import KeeperClient\n"
        "client = KeeperClient.connect(sys.argv[1], sys.argv[2], int(sys.argv[3]))\n"
        "handoff = socket.socket(fileno=client.handoff_fds[0]); handoff.settimeout(10)\n"
        "data, fds, _, _ = socket.recv_fds(handoff, 16, 1)\n"
        "sys.stdout.write('here' if data == b'x' and len(fds) == 1 else 'nothing')\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, str(host.places.run_dir), role, str(index)],
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
        check=True,
    ).stdout


def test_a_second_process_of_a_role_is_refused(host):
    children = host.every_process()
    refused = host.child("worker", 0).receive()["refused"]
    assert f"another mqd-worker-0 runs as pid {children[0].process.pid}" in refused


def test_a_worker_with_an_invalid_index_is_refused(host):
    host.tool().close()
    assert f"it has {WORKERS} workers" in host.child("worker", 64).receive()["refused"]
    assert "no gardener 0" in host.child("gardener").receive()["refused"]


def _refusal(host: Host, hello: Hello) -> str:
    host.tool().close()
    from mqd.shm.attach import _decode, receive_packet

    connection = connect_keeper(host.places.keeper_socket)
    send_message(connection, hello)
    response = _decode(receive_packet(connection)[0])
    connection.close()
    return response.reason


def test_another_build_is_refused_with_a_remedy(host):
    assert "mqd down, mqd up" in _refusal(host, Hello("worker", 0, os.getpid(), native.abi_hash() ^ 1))


def test_a_process_cannot_call_under_another_pid(host):
    assert "is not the pid of the sender" in _refusal(host, Hello("worker", 0, 1, native.abi_hash()))


def test_an_invalid_message_closes_only_its_senders_connection(host):
    children = host.every_process()
    connections = []
    for packet in (b"\0", b"\xc1" * 100, b"x" * 100_000, os.urandom(64)):
        connection = connect_keeper(host.places.keeper_socket)
        connection.send(packet)
        connections.append(connection)
    for connection in connections:
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b""
        connection.close()
    with host.tool() as tool:
        assert tool.status().ready
    assert all(child.process.poll() is None for child in children)


def test_idle_tools_are_bounded(host):
    host.tool().close()
    connections = [connect_keeper(host.places.keeper_socket) for _ in range(140)]
    with host.tool() as tool:
        assert not tool.status().ready
    connections[0].settimeout(PATIENCE_S)
    assert connections[0].recv(1) == b""  # the oldest was closed
    for connection in connections:
        connection.close()


def test_the_log_level_is_changed_while_it_runs(host):
    with host.tool() as tool:
        assert tool.status().log_level == "info"
        assert tool.request(SetLogLevel("debug")).log_level == "debug"
        with pytest.raises(KeeperError, match="not a log level"):
            tool.request(SetLogLevel("loud"))
        assert tool.status().log_level == "debug"


def test_a_process_that_disconnects_without_ending_is_killed(host):
    """It may still use the descriptors and memory that its successor is about to get."""
    children = host.every_process()
    children[1].report(b"c")
    assert children[1].process.wait(PATIENCE_S) == -signal.SIGKILL
    assert "Death" in children[0].receive()


def test_restarts_in_a_crash_loop_are_delayed(host):
    host.tool().close()
    starts = []
    for _ in range(6):
        child = host.child("worker", 0)
        child.receive()
        starts.append(time.monotonic())
        child.kill()
    assert starts[-1] - starts[-2] >= 0.2 > 0


def test_sigterm_to_the_keeper_ends_all_processes(host):
    children = host.every_process()
    host.keeper.terminate()
    assert all("received a request to stop" in child.receive()["Shutdown"]["reason"] for child in children)
    assert host.keeper.wait(PATIENCE_S) == 0
    assert all(child.process.wait(PATIENCE_S) == 0 for child in children)
    assert not host.places.keeper_socket.exists() and not host.places.broker_json.exists()
    assert not segments.unlink(segments.control_name(segments.prefix(host.places.data_dir)))
    assert not locks.is_locked(host.places.lock)


def test_the_directory_stays_locked_until_a_dead_keepers_processes_have_ended(host):
    children = host.every_process()
    pause(children[1].process.pid)
    host.keeper.kill()
    for child in (children[0], children[2], children[3]):
        assert child.receive()["parent"] == "the keeper ended"
        assert child.process.wait(PATIENCE_S) == 0
    assert locks.is_locked(host.places.lock)  # a worker is still running: no new broker may start
    children[1].process.send_signal(signal.SIGCONT)
    assert children[1].process.wait(PATIENCE_S) == 0
    assert not locks.is_locked(host.places.lock)


def test_supervisords_death_ends_all_processes(tmp_path):
    supervisor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    host = Host(tmp_path / "data", MQD_RUN_SUPERVISOR_PID=str(supervisor.pid))
    try:
        children = host.every_process()
        supervisor.kill()
        for child in children:
            message = child.receive()
            assert message.get("parent") == "supervisord ended" or message["Shutdown"]["reason"] == "supervisord ended"
            assert child.process.wait(PATIENCE_S) == 0
        assert host.keeper.wait(PATIENCE_S) == 0
    finally:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdin.close()
        host.end()


def test_segments_of_a_killed_broker_are_removed_and_its_generation_is_not_reused(tmp_path):
    first = Host(tmp_path / "data")
    seen = first.child("controller").receive()
    first.keeper.kill()
    first.keeper.wait()
    first.children[0].end()
    base = segments.prefix(first.places.data_dir)
    orphan = segments.arena_name(base, 60)
    segments.create(orphan, 4096)
    second = Host(tmp_path / "data")
    try:
        again = second.child("controller").receive()
        assert again["broker"] > seen["broker"]
        assert not segments.unlink(orphan)
    finally:
        second.end()


def _failure(host: Host) -> str:
    assert host.keeper.wait(PATIENCE_S) == 2, host.log.read_text()
    return host.log.read_text().splitlines()[-1]


def test_a_second_keeper_on_the_directory_is_refused(host):
    host.tool().close()
    second = Host(host.places.data_dir)
    try:
        assert f"another broker (pid {host.keeper.pid}) is using {host.places.data_dir}" in _failure(second)
        with host.tool() as tool:
            assert tool.status().port == host.port
    finally:
        second.keeper.kill()


def test_a_port_in_use_names_port_and_holder(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        port = taken.getsockname()[1]
        host = Host(tmp_path / "data", MQD_LISTENERS=f"PLAINTEXT://127.0.0.1:{port}")
        try:
            failure = _failure(host)
        finally:
            host.end()
    assert f"port {port} is in use by" in failure and f"(pid {os.getpid()})" in failure and "--port" in failure


def test_another_nodes_directory_is_refused(tmp_path):
    first = Host(tmp_path / "data", MQD_NODE_ID="1")
    first.tool().close()
    meta = first.places.meta_properties.read_text()
    first.end()
    second = Host(tmp_path / "data", MQD_NODE_ID="2")
    try:
        assert "belongs to node.id 1" in _failure(second) and "--node-id 1" in _failure(second)
        assert second.places.meta_properties.read_text() == meta
    finally:
        second.end()


def test_an_unknown_property_stops_the_start(tmp_path):
    host = Host(tmp_path / "data", MQD_LOG_RETENTION_HUORS="1")
    try:
        assert "log.retention.huors" in _failure(host)
    finally:
        host.end()


def test_two_brokers_run_side_by_side(host, tmp_path):
    host.every_process()
    other = Host(tmp_path / "other")
    try:
        other.every_process()
        with host.tool() as one, other.tool() as two:
            assert one.status().ready and two.status().ready and one.status().port != two.status().port
    finally:
        other.end()
