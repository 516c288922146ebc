"""The wheel as installed by users: on every Python that is found, without a compiler, and run
outside the checkout.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packages import building
from tests.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
LIMIT_S = 300  # bounds a hang
VERSIONS = ("3.11", "3.12", "3.13")
CLIENT = """
import sys, mqd
from mqd.admin import AdminClient, NewTopic
settings = {"bootstrap.servers": sys.argv[1], "transport": "shm"}
admin = AdminClient(settings)
for future in admin.create_topics([NewTopic("lines", 2, 1)]).values():
    future.result(120)
producer = mqd.Producer(settings)
producer.produce_batch("lines", [b"%d" % number for number in range(1000)])
assert producer.flush(120) == 0
consumer = mqd.Consumer(settings | {"group.id": "readers", "auto.offset.reset": "earliest"})
consumer.subscribe(["lines"])
values = []
while len(values) < 1000:
    values += [message.value() for message in consumer.consume(1000, 120)]
consumer.close()
assert sorted(map(int, values)) == list(range(1000))
print("read", len(values), mqd.__file__, mqd._native.__file__, sep="|")
"""


class Installed:
    """A virtual environment with the wheel; `run` runs a command of its bin/ in an empty folder."""

    def __init__(self, python: str, place: Path) -> None:
        self.place, self.bin = place, place / "venv" / "bin"
        subprocess.run([python, "-m", "venv", str(place / "venv")], check=True, timeout=LIMIT_S)
        self.environment = building.without_compilers(self.bin)
        self.run("python", "-m", "pip", "install", "--quiet", f"{building.wheel(os.uname().machine)}[demo]")

    def start(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.place,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, given: str | None = None) -> str:
        with self.start(*command) as process:
            try:
                output, _ = process.communicate(given, timeout=LIMIT_S)
            finally:
                process.send_signal(signal.SIGINT)  # not kill: it would leave a broker's processes
        assert process.returncode == 0, f"{command}: {process.returncode}\n{output}"
        return output

    @contextlib.contextmanager
    def running(self, *command: str, ready: str) -> Iterator[str]:
        """`command` while it runs, from the line that begins with `ready`; ended by ctrl-C."""
        with self.start(*command) as process:
            alarm = threading.Timer(LIMIT_S, process.kill)
            alarm.start()
            try:
                assert process.stdout is not None
                message = ""
                for line in process.stdout:
                    message += line
                    if ready in line:
                        break
                else:
                    pytest.fail(f"{command} ended:\n{message}")
                yield line
            finally:
                process.send_signal(signal.SIGINT)  # not kill: it would leave the broker's processes
                rest = process.stdout.read() if process.stdout is not None else ""
                alarm.cancel()
            assert process.wait() in (0, 130), rest


def python_of(version: str) -> str:
    """A Python of that version: this one, one of the path, or one of pyenv's. Skips the test."""
    found = [sys.executable, *(f"{folder}/python{version}" for folder in os.get_exec_path())]
    found += [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    for python in found:
        command = [python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stdout.strip()
        except OSError:
            continue
        if output == version:
            return python
    pytest.skip(f"no Python {version} here")


@pytest.fixture(scope="module", params=VERSIONS)
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(python_of(request.param), tmp_path_factory.mktemp(f"installed-{request.param}"))


def test_the_sdist(tmp_path: Path) -> None:
    """All that is needed to build, test and read it."""
    (archive,) = building.dist().glob("mqd-*.tar.gz")
    with tarfile.open(archive) as unpacked:
        names = {name.partition("/")[2] for name in unpacked.getnames()}
    known = subprocess.run(["git", "ls-files"], cwd=building.ROOT, capture_output=True, text=True)
    if known.returncode == 0:
        assert set(known.stdout.splitlines()) - names == set()
    assert {"LICENSE", "native/native.h", "tests/README.md", "docs/install.md", "supervisord.conf"} <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]


def test_a_client_and_a_broker(installed: Installed) -> None:
    assert installed.run("mqd", "--version") == installed.run("python", "-m", "mqd", "--version")
    data = str(installed.place / "data")
    with installed.running("mqd", "up", "--port", "0", "--data-dir", data, ready="mqd ready on") as line:
        bootstrap = line.split()[3]
        _, count, package, native = installed.run("python", "-c", CLIENT, bootstrap).strip().split("|")
        assert count == "1000" and all(Path(file).is_relative_to(installed.bin.parent) for file in (package, native))
        installed.run("mqd", "produce", "words", "-b", bootstrap, given="one\ntwo\n")
        output = installed.run("mqd", "consume", "words", "-b", bootstrap, "-o", "beginning", "-e", "-f", "%v\\n")
        assert "one" in output and "two" in output
    check_checksums(Path(native))


def check_checksums(native: Path) -> None:
    """Built for any machine, it still uses this one's instructions."""
    with open("/proc/cpuinfo") as file:
        words = set(file.read().split())
    available = ctypes.CDLL(str(native)).mqd_crc32c_available
    available.restype = ctypes.c_bool
    assert [available(kind) for kind in (0, 1)] == [True, True]
    assert available(2) == bool(words & {"sse4_2", "crc32"})
    assert available(3) == bool(words >= {"sse4_2", "pclmulqdq"} or words >= {"crc32", "pmull"})


def test_the_demo(installed: Installed) -> None:
    assert "336,776" in installed.run("mqd", "demo")


def test_a_cluster_on_this_machine(installed: Installed) -> None:
    data, port = str(installed.place / "cluster"), free_ports(3)[0]
    command = ("mqd", "cluster", "local", "--data-dir", data, "--port", str(port))
    with installed.running(*command, ready="3 brokers are ready"):
        bootstrap = f"127.0.0.1:{port}"
        installed.run("mqd", "topic", "create", "kept", "-p", "3", "-r", "3", "-b", bootstrap)
        installed.run("mqd", "produce", "kept", "-b", bootstrap, given="one\n")
        assert "one" in installed.run("mqd", "consume", "kept", "-b", bootstrap, "-o", "beginning", "-e")
