"""`mqd up`, `mqd down`, `mqd status`, `mqd log-level`: one host's broker from start to shutdown."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from mqd.base import paths
from mqd.protocol.messages import CreateTopicsRequest
from mqd.shm import locks, segments
from mqd.shm.tools import KeeperConnection
from tests import broker
from tests.kafka_connection import KafkaConnection
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_port
from tests.preloaded import COMMAND, PRELOADED
from tests.tiers import quick

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("MQD_", "SUPERVISOR_"))}
FAST = ("--workers", "2")
CREATE_TOPICS = 19


def mqd(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return PRELOADED.run(*map(str, arguments), timeout=PATIENCE_S * 2, environment={**ENVIRONMENT, **environment})


class Up:
    """`mqd up` as a child process; stdout and stderr are kept."""

    def __init__(
        self,
        data_dir: Path,
        *arguments: object,
        command: list[str] | None = None,
        executed: bool = False,
        **environment: str,
    ) -> None:
        """`executed`: executes `mqd up`, even in the quick tier, as a `command` always does."""
        self.data_dir = data_dir
        self.places = paths.layout(data_dir)
        self.port = free_port()
        words = ["up", "--data-dir", str(data_dir), "--port", str(self.port), *FAST, *map(str, arguments)]
        self.errors = data_dir.parent / f"{data_dir.name[:20]}.stderr"
        with self.errors.open("w") as errors:
            if broker.is_forked and not executed and command is None:
                self.process = PRELOADED.start_piped(words, errors, environment={**ENVIRONMENT, **environment})
                return
            self.process = subprocess.Popen(
                command or [*COMMAND, *words],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**ENVIRONMENT, **environment},
                start_new_session=True,
            )

    def ready(self) -> str:
        assert select.select([self.process.stdout], [], [], PATIENCE_S)[0], self.history()
        line = self.process.stdout.readline()
        assert line.startswith("mqd ready"), self.history()
        return line

    def wait(self, condition) -> dict:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with KeeperConnection(self.data_dir) as tool:
                status = tool.status()
            if condition(status):
                return status
            assert time.monotonic() < deadline, self.history()
            time.sleep(0.02)

    def pids(self) -> dict[str, int]:
        with KeeperConnection(self.data_dir) as tool:
            return {one.name: one.pid for one in tool.status().processes if one.pid}

    def history(self) -> str:
        logs = [path.read_text(errors="replace")[-3000:] for path in sorted(self.places.logs_dir.glob("*.log"))]
        return "\n---\n".join([self.errors.read_text(), *logs])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start(tmp_path):
    started: list[Up] = []

    def one(*arguments: object, name: str = "data", **options) -> Up:
        started.append(Up(tmp_path / name, *arguments, **options))
        return started[-1]

    yield one
    for up in started:
        up.end()


def _ended(pids) -> bool:
    return not any(broker.is_alive(pid) for pid in pids)


def _wait_ended(pids) -> None:
    eventually(lambda: _ended(pids))


def _nothing_left(up: Up) -> None:
    assert not locks.is_locked(up.places.lock) and not locks.is_locked(up.places.supervisor_lock)
    assert not up.places.keeper_socket.exists()
    assert not any(name.startswith(segments.prefix(up.data_dir)[1:]) for name in os.listdir("/dev/shm"))


@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], [signal.SIGTERM]))
def test_one_line_when_it_serves_and_a_clean_end(start, number):
    up = start(executed=True)
    line = up.ready()
    assert f"127.0.0.1:{up.port}" in line
    with socket.create_connection(("127.0.0.1", up.port), timeout=PATIENCE_S):
        pass
    pids = up.pids()
    up.process.send_signal(number)
    assert up.process.wait(PATIENCE_S) == 0, up.history()
    assert up.process.stdout.read() == ""
    assert up.errors.read_text() == ""
    assert _ended(pids.values())
    _nothing_left(up)


def test_a_client_that_connects_first_creates_a_topic(start):
    """The broker accepts connections some milliseconds before the controller has admitted it. Without
    a wait it would refuse the topic then, because no broker could hold it."""
    for name in ("new", "after a stop"):
        up = start(executed=True)
        topic = CreateTopicsRequest.Topic(name=name.replace(" ", "-"), num_partitions=1, replication_factor=1)
        with eventually(partial(_connect, up.port), up.history, pause_s=0.001) as connection:
            created = connection.call(CREATE_TOPICS, 5, CreateTopicsRequest(topics=[topic], timeout_ms=30_000))
        assert (created.topics[0].error_code, created.topics[0].error_message) == (0, None), name
        up.end()


def _connect(port: int) -> KafkaConnection | None:
    try:
        return KafkaConnection("127.0.0.1", port)
    except ConnectionRefusedError:
        return None


def test_nohup_is_respected(start, tmp_path):
    data_dir, port = tmp_path / "data", free_port()
    up = start(
        command=[
            "nohup",
            sys.executable,
            "-m",
            "mqd.cli.main",
            "up",
            "--data-dir",
            str(data_dir),
            "--port",
            str(port),
            *FAST,
        ]
    )
    up.ready()
    up.process.send_signal(signal.SIGHUP)
    # wait for evidence that supervisord is running after the signal
    os.kill(up.pids()["mqd-worker-0"], signal.SIGTERM)
    up.wait(lambda status: status.ready and any(one.restart_count == 1 for one in status.processes))
    up.process.terminate()
    assert up.process.wait(PATIENCE_S) == 0


def test_status_as_json_and_as_text(start):
    up = start()
    up.ready()
    done = mqd("status", "--data-dir", up.data_dir, "--format", "json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert status["ready"] is True and status["port"] == up.port and status["log_level"] == "info"
    assert sorted(process["role"] for process in status["processes"]) == [
        "acceptor",
        "controller",
        "keeper",
        "supervisord",
        "worker",
        "worker",
    ]
    assert {process["name"]: process["pid"] for process in status["processes"]}["supervisord"] == up.process.pid
    assert [worker["index"] for worker in status["workers"]] == [0, 1]
    text = mqd("status", "--data-dir", up.data_dir).stdout
    assert text.startswith(f"ready on 127.0.0.1:{up.port}") and "mqd-worker-1" in text


def test_status_and_down_without_a_broker(tmp_path):
    done = mqd("status", "--data-dir", tmp_path, "--format", "json")
    assert done.returncode == 3 and json.loads(done.stdout)["ready"] is False
    done = mqd("down", "--data-dir", tmp_path)
    assert done.returncode == 3 and f"no broker is running in {tmp_path}" in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert mqd("log-level", "debug", "--data-dir", tmp_path).returncode == 3


def test_down_stops_the_broker_and_waits(start):
    up = start()
    up.ready()
    pids = up.pids()
    done = mqd("down", "--data-dir", up.data_dir, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"data_dir": str(up.data_dir), "stopped": True}
    assert _ended(pids.values())
    assert up.process.wait(PATIENCE_S) == 0
    _nothing_left(up)


def test_down_never_touches_another_process_with_the_same_pid(tmp_path):
    unrelated = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    places = paths.layout(tmp_path)
    places.run_dir.mkdir()
    places.supervisor_lock.write_text(f"{unrelated.pid}\n")
    places.lock.write_text(f"{unrelated.pid}\n")
    assert mqd("down", "--data-dir", tmp_path).returncode == 3
    assert unrelated.poll() is None
    unrelated.communicate(b"\n")


def test_a_second_broker_on_the_directory_is_refused_and_the_first_continues(start):
    up = start()
    up.ready()
    done = mqd("up", "--data-dir", up.data_dir, "--port", free_port())
    assert done.returncode == 1 and done.stdout == ""
    assert (
        f"another broker (pid {up.pids()['mqd-keeper']}) is using {up.data_dir}" in done.stderr
        and "mqd down --data-dir" in done.stderr
    )
    up.wait(lambda status: status.ready)


def test_a_port_in_use_is_reported_before_anything_starts(start, tmp_path):
    up = start()
    up.ready()
    done = mqd("up", "--data-dir", tmp_path / "other", "--port", up.port)
    assert done.returncode == 1 and f"port {up.port} is in use by" in done.stderr
    assert not list((tmp_path / "other" / "logs").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "log.retention.huors=1"), "did you mean log.retention.hours"),
        (("--set", "log.segment.bytes=many"), "log.segment.bytes cannot be 'many'"),
        (("--set", "listeners=PLAINTEXT://0.0.0.0:9092"), "listeners.insecure.allow"),
        (("--set", "nonsense"), "KEY=VALUE"),
        (("--workers", "65"), "65"),
    ],
)
def test_a_wrong_configuration_is_reported_before_anything_starts(tmp_path, arguments, message):
    done = mqd("up", "--data-dir", tmp_path / "data", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_directory_that_cannot_be_written_is_reported_before_anything_starts():
    done = mqd("up", "--data-dir", "/proc/mqd-data")
    assert done.returncode == 1 and "/proc/mqd-data" in done.stderr and done.stdout == ""


def test_another_nodes_directory_is_refused(start):
    up = start("--node-id", "7")
    up.ready()
    up.end()
    done = mqd("up", "--data-dir", up.data_dir, "--port", up.port, "--node-id", "8")
    assert done.returncode == 1 and "belongs to node.id 7" in done.stderr and "--node-id 7" in done.stderr


def test_the_keepers_death_ends_the_broker_with_a_reason(start):
    up = start()
    up.ready()
    pids = up.pids()
    os.kill(pids["mqd-keeper"], signal.SIGKILL)
    assert up.process.wait(PATIENCE_S) == 1
    assert "keeper ended (killed by a signal)" in up.errors.read_text()
    _wait_ended(pids.values())
    again = start()
    again.ready()  # leftovers of the dead broker do not prevent it


def test_a_dead_worker_is_restarted_at_once(start):
    up = start()
    up.ready()
    before = up.pids()
    os.kill(before["mqd-worker-0"], signal.SIGKILL)
    status = up.wait(lambda status: status.ready and any(one.restart_count == 1 for one in status.processes))
    after = {one.name: one.pid for one in status.processes}
    assert {name for name in after if after[name] != before[name]} == {"mqd-worker-0"}


def test_sigterm_to_the_acceptor_restarts_it(start):
    up = start()
    up.ready()
    before = up.pids()
    os.kill(before["mqd-acceptor"], signal.SIGTERM)
    up.wait(
        lambda status: (
            status.ready
            and any(one.name == "mqd-acceptor" and one.pid != before["mqd-acceptor"] for one in status.processes)
        )
    )


def test_supervisords_death_ends_all_processes_and_the_next_start_works(start):
    up = start()
    up.ready()
    pids = up.pids()
    up.process.kill()
    up.process.wait()
    _wait_ended(pids.values())
    assert not locks.is_locked(up.places.lock)
    start().ready()


def test_a_start_after_everything_was_killed(start):
    up = start()
    up.ready()
    pids = up.pids()
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    up.process.wait()
    _wait_ended(pids.values())  # until then they hold locks and ports
    start().ready()


def test_the_log_level_changes_while_it_runs(start):
    up = start()
    up.ready()
    assert mqd("log-level", "--data-dir", up.data_dir).stdout == "info\n"
    assert mqd("log-level", "debug", "--data-dir", up.data_dir).stdout == "debug\n"
    assert json.loads(mqd("log-level", "--data-dir", up.data_dir, "--format", "json").stdout) == {"log_level": "debug"}
    assert mqd("log-level", "loud", "--data-dir", up.data_dir).returncode == 2


LONG_NAME = "d" * 120


@pytest.mark.parametrize("name", quick(["a directory with blanks", LONG_NAME], [LONG_NAME]))
def test_directories_with_unusual_names(start, name):
    up = start(name=name)
    up.ready()
    assert mqd("status", "--data-dir", up.data_dir).returncode == 0
    assert mqd("down", "--data-dir", up.data_dir).returncode == 0


def test_a_directory_name_that_supervisord_cannot_parse_is_refused(tmp_path):
    done = mqd("up", "--data-dir", tmp_path / "100%")
    assert done.returncode == 1 and "percent sign" in done.stderr


def test_json_log_lines(start):
    up = start("--set", "logging.format=json")
    up.ready()
    lines = (up.places.logs_dir / "mqd-keeper.log").read_text().splitlines()
    assert any(json.loads(line)["message"] == "the broker is ready" for line in lines)


FORBID_IO_URING = """
import ctypes, os, struct, sys
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]  # setup: EPERM
text = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(text))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_io_uring_that_is_forced_and_forbidden_is_reported_at_once(tmp_path):
    """By a seccomp profile, as containers have: the first worker's report suffices."""
    data_dir = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-c", FORBID_IO_URING, "-m", "mqd.cli.main", "up", "--data-dir", data_dir]
        + ["--port", str(free_port()), "--workers", "1", "--set", "io.backend=io_uring"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENVIRONMENT,
    )
    assert done.returncode == 1 and "mqd-worker-0 does not start (exit status 2): " in done.stderr, done.stderr
    assert "set io.backend=auto" in done.stderr
    log = (data_dir / "logs" / "mqd-worker-0.log").read_text()
    assert log.count("set io.backend=auto") <= 2, log  # the line and its traceback: one start only


@pytest.mark.slow  # test_foreign_supervisord.py has one in the quick tier
@pytest.mark.parametrize("end", ["supervisord", "keeper"])
def test_a_supervisord_run_by_the_user(start, tmp_path, end):
    data_dir, port = tmp_path / "own", free_port()
    places = paths.layout(data_dir)
    paths.create(places)
    configuration = Path(sys.modules["mqd"].__file__).parent / "supervisord.conf"
    up = start(
        name="own",
        command=[sys.executable, "-m", "supervisor.supervisord", "-c", str(configuration)],
        MQD_DATA_DIR=str(data_dir),
        MQD_RUN_DIR=str(places.run_dir),
        MQD_CONFIG="",
        MQD_WORKERS="1",
        MQD_PYTHON=sys.executable,
        MQD_LISTENERS=f"PLAINTEXT://127.0.0.1:{port}",
    )
    deadline = time.monotonic() + PATIENCE_S
    while mqd("status", "--data-dir", data_dir).returncode != 0:
        assert time.monotonic() < deadline, up.history()
    pids = up.pids()
    assert pids["supervisord"] == up.process.pid and len(pids) == 5
    if end == "supervisord":
        assert mqd("down", "--data-dir", data_dir).returncode == 0
    else:
        os.kill(pids["mqd-keeper"], signal.SIGKILL)
    assert up.process.wait(PATIENCE_S) == 0
    _wait_ended(pids.values())


def test_a_process_that_fails_to_start_ends_the_broker_and_its_last_log_lines_are_shown(tmp_path):
    places = paths.layout(tmp_path / "data")
    paths.create(places)
    (tmp_path / "supervisord.conf").write_text(
        f"[supervisord]\nnodaemon=true\nsilent=true\nlogfile={places.logs_dir}/supervisord.log\npidfile={places.supervisor_pid}\n"
        f'[program:mqd-keeper]\ncommand="{sys.executable}" -c "input()"\nautorestart=false\nstartsecs=0\npriority=999\n'
        f'[program:mqd-worker]\ncommand="{sys.executable}" -c "raise SystemExit(\'no such'
        " library')\"\nautorestart=unexpected\nexitcodes=0\nstartsecs=0\n"
        f"redirect_stderr=true\nstdout_logfile={places.logs_dir}/mqd-worker.log\n"
    )
    program = (
        "import sys\nfrom pathlib import Path\nfrom mqd.base import paths\nfrom mqd.keeper.supervise import run\n"
        "print(run(Path(sys.argv[1]), paths.layout(sys.argv[2]), print))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "supervisord.conf", places.data_dir],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENVIRONMENT,
    )
    assert "mqd-worker does not start (exit status 1): no such library" in done.stdout, done.stderr
