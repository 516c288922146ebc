"""A supervisord that also runs other programs: it includes the output of `mqd up
--print-supervisord include`, the broker never stops it, and supervisorctl works.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mqd.base import paths, schedule_files
from mqd.shm import locks
from mqd.shm.attach import KeeperError
from mqd.shm.tools import KeeperConnection
from tests.broker import is_alive
from tests.polling import PATIENCE_S, eventually
from tests.ports import free_port

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("MQD_", "SUPERVISOR_"))}
CONFIGURATION = """
[supervisord]
nodaemon = true
silent = true
logfile = {here}/supervisord.log
pidfile = {here}/supervisord.pid

[unix_http_server]
file = {here}/s.sock

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface

[supervisorctl]
serverurl = unix://{here}/s.sock

[program:innocent]
command = "{python}" -c "import time; time.sleep(1000)"
startsecs = 0

[include]
files = {here}/conf.d/*.conf
"""


def mqd(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mqd.cli.main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S * 2, env=ENVIRONMENT)


def wait_ready(data_dir: Path, history: Callable[[], str]) -> None:
    def is_ready() -> bool:
        try:
            with KeeperConnection(data_dir) as tool:
                return tool.status().ready
        except KeeperError:
            return False

    eventually(is_ready, history)


def value_of(port: int, name: str) -> str:
    done = mqd("-b", f"127.0.0.1:{port}", "--format", "json", "config", "get", "broker/1", name)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(done.stdout)
    return entry["value"]


class Supervisord:
    """A real supervisord, with one program of the user's and the broker's."""

    def __init__(self, here: Path, *options: str):
        self.here, self.data_dir, self.port = here, here / "data", free_port()
        self.places = paths.layout(self.data_dir)
        (here / "conf.d").mkdir()
        (here / "supervisord.conf").write_text(CONFIGURATION.format(here=here, python=sys.executable))
        done = mqd(
            *("up", "--data-dir", self.data_dir, "--port", self.port, "--workers", 2),
            *("--set", "auto.create.topics.enable=false", "--print-supervisord", "include", *options),
        )
        assert done.returncode == 0, done.stderr
        self.printed = done.stderr
        (here / "conf.d" / "mqd.conf").write_text(done.stdout)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "supervisor.supervisord", "-c", str(here / "supervisord.conf")],
            env=ENVIRONMENT,
            cwd=here,
        )

    def ctl(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(self.here / "supervisord.conf")]
        done = subprocess.run(
            [*command, *arguments], capture_output=True, text=True, timeout=PATIENCE_S * 2, env=ENVIRONMENT
        )
        return done.stdout + done.stderr

    def states(self) -> dict[str, str]:
        return {line.split()[0]: line.split()[1] for line in self.ctl("status").splitlines()}

    def unrelated(self) -> str:
        return self.ctl("pid", "innocent").strip()

    def pids(self) -> dict[str, int]:
        with KeeperConnection(self.data_dir) as tool:
            return {one.name: one.pid for one in tool.status().processes if one.pid}

    def serves(self) -> dict[str, int]:
        """Waits until the broker is ready."""
        wait_ready(self.data_dir, self.history)
        return self.pids()

    def ended(self, pids: dict[str, int]) -> None:
        def alive() -> list[str]:
            return [name for name, pid in pids.items() if is_alive(pid)]

        eventually(lambda: not alive(), lambda: f"the end of {alive()}\n{self.history()}")

    def history(self) -> str:
        logs = sorted([*self.places.logs_dir.glob("*.log"), self.here / "supervisord.log"])
        return "\n---\n".join(path.read_text(errors="replace")[-3000:] for path in logs)


@pytest.fixture
def supervisord(tmp_path, request):
    one = Supervisord(tmp_path, *getattr(request, "param", ()))
    yield one
    one.process.terminate()
    try:
        one.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        one.process.kill()
        one.process.wait()


@pytest.mark.slow
def test_starting_and_stopping_the_broker_leaves_the_other_program_running(supervisord):
    pids = supervisord.serves()
    assert set(pids) == {"mqd-keeper", "mqd-controller", "mqd-acceptor", "mqd-worker-0", "mqd-worker-1"}
    assert value_of(supervisord.port, "auto.create.topics.enable") == "false"
    unrelated = supervisord.unrelated()

    assert mqd("down", "--data-dir", supervisord.data_dir).returncode == 0
    supervisord.ended(pids)
    assert supervisord.process.poll() is None and supervisord.unrelated() == unrelated
    states = supervisord.states()
    assert (states.pop("innocent"), states.pop("mqd-timer")) == ("RUNNING", "STOPPED")  # it is started when needed
    assert set(states.values()) == {"EXITED"}, states  # not BACKOFF: the keeper would be started again

    supervisord.ctl("start", "mqd-keeper", "mqd-controller", "mqd-worker:*", "mqd-acceptor")
    assert set(supervisord.serves().values()).isdisjoint(pids.values())
    again = supervisord.pids()
    supervisord.ctl("stop", "mqd-keeper")
    supervisord.ended(again)
    assert not locks.is_locked(supervisord.places.lock)
    assert "shutting down" in (supervisord.places.logs_dir / "mqd-keeper.log").read_text()
    assert supervisord.process.poll() is None and supervisord.unrelated() == unrelated


@pytest.mark.slow
def test_the_timer_ends_with_the_broker(supervisord):
    supervisord.serves()
    bootstrap = f"127.0.0.1:{supervisord.port}"
    for one in (("orders",), ("later", "--config", "schedule.to=orders")):
        done = mqd("-b", bootstrap, "topic", "create", *one)
        assert done.returncode == 0, done.stderr
    eventually(lambda: "mqd-timer" in supervisord.pids(), supervisord.history)
    pids = supervisord.pids()
    supervisord.ctl("stop", "mqd-keeper")
    supervisord.ended(pids)
    assert set(supervisord.states().values()) == {"RUNNING", "EXITED", "STOPPED"}  # the other program; the keeper
    assert not schedule_files.may_run(supervisord.places.run_dir), "a timer forked just before would stay"

    supervisord.ctl("start", "mqd-keeper", "mqd-controller", "mqd-worker:*", "mqd-acceptor")
    supervisord.serves()
    eventually(lambda: "mqd-timer" in supervisord.pids(), supervisord.history)
    assert schedule_files.may_run(supervisord.places.run_dir)


@pytest.mark.slow
def test_a_keeper_that_was_killed_is_started_again_with_the_others(supervisord):
    pids = supervisord.serves()
    unrelated = supervisord.unrelated()
    os.kill(pids["mqd-keeper"], signal.SIGKILL)
    supervisord.ended(pids)
    assert set(supervisord.serves().values()).isdisjoint(pids.values())
    assert supervisord.process.poll() is None and supervisord.unrelated() == unrelated


@pytest.mark.slow
@pytest.mark.parametrize("supervisord", [["--secure"]], indirect=True)
def test_a_secured_broker_gets_its_first_user(supervisord):
    command = ("user", "admin", "--data-dir", supervisord.data_dir)
    assert f"mqd user admin --data-dir {supervisord.data_dir}" in supervisord.printed
    supervisord.serves()
    settings = supervisord.data_dir / "secure" / "admin.properties"
    status = ("cluster", "status", "-b", f"127.0.0.1:{supervisord.port}", "--client-config", settings)
    assert "not authenticated" in mqd(*status).stderr
    for outcome in ("User:admin created", "User:admin exists"):
        done = mqd(*command)
        assert done.returncode == 0 and outcome in done.stdout, done.stderr
    done = mqd(*status)
    assert done.returncode == 0 and "brokers in service: 1" in done.stdout, done.stderr


@pytest.mark.slow
def test_stopping_supervisord_stops_the_broker(supervisord):
    pids = supervisord.serves()
    unrelated = int(supervisord.unrelated())
    supervisord.process.kill()
    supervisord.process.wait()
    try:
        supervisord.ended(pids)
    finally:
        os.kill(unrelated, signal.SIGKILL)


def test_supervisorctl_talks_to_mqd_up(start_broker, tmp_path):
    broker = start_broker()
    places = paths.layout(broker.data_dir)
    assert places.supervisor_socket.stat().st_mode & 0o777 == 0o700
    whole = tmp_path / "whole.conf"
    printed = mqd("up", "--data-dir", broker.data_dir, "--print-supervisord", "whole")
    whole.write_text(printed.stdout)
    done = subprocess.run(
        [sys.executable, "-m", "supervisor.supervisorctl", "-c", str(whole), "status"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENVIRONMENT,
    )
    states = {line.split()[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert states["mqd-keeper"] == states["mqd-acceptor"] == "RUNNING", done.stdout + done.stderr


def test_a_whole_configuration_serves_with_nothing_in_the_environment(tmp_path):
    data_dir, port = tmp_path / "data", free_port()
    (tmp_path / "server.properties").write_text("num.partitions=7\n")
    printed = mqd(
        *("up", "--data-dir", data_dir, "--port", port, "--workers", 1),
        *("--config", tmp_path / "server.properties", "--print-supervisord", "whole"),
    )
    (tmp_path / "whole.conf").write_text(printed.stdout)
    process = subprocess.Popen(
        [sys.executable, "-m", "supervisor.supervisord", "-c", str(tmp_path / "whole.conf")],
        env={"PATH": os.environ["PATH"]},
        cwd="/",
    )
    try:
        wait_ready(data_dir, lambda: f"exit status {process.poll()}")
        assert value_of(port, "num.partitions") == "7"
        assert mqd("down", "--data-dir", data_dir).returncode == 0
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
