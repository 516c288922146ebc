"""The aarch64 wheel on an aarch64 Python under qemu-user: a whole broker, a producer and a
consumer, with checksums by that processor's instructions.

qemu and the Python are Debian's packages, unpacked and not installed; dependencies of mqd come from
PyPI for that architecture. Emulated system calls are this kernel's, so shared memory, semaphores
and sockets are real.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from perf.peers import debian
from perf.peers.peer import Unavailable
from tests.packages import building
from tests.packages.test_wheels import CLIENT
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
LIMIT_S = 300  # bounds a hang; emulation is some 20 times slower
PYTHON = (
    *("python3.11", "python3.11-minimal", "libpython3.11-minimal", "libpython3.11-stdlib", "libc6", "libgcc-s1"),
    *("libstdc++6", "libexpat1", "zlib1g", "libssl3", "libffi8", "libuuid1", "libbz2-1.0", "liblzma5", "libcrypt1"),
)
CHECKSUMS = """
import ctypes, platform
from mqd import _native
library = ctypes.CDLL(_native.__file__)
library.mqd_crc32c_available.restype = ctypes.c_bool
library.mqd_crc32c_using.restype = library.mqd_crc32c.restype = ctypes.c_uint32
library.mqd_crc32c_using.argtypes = ctypes.c_int, ctypes.c_uint32, ctypes.c_char_p, ctypes.c_size_t
long = bytes(range(256)) * 40
for kind in range(4):
    assert library.mqd_crc32c_available(kind), kind
    assert library.mqd_crc32c_using(kind, 0, b"123456789", 9) == 0xE3069283, kind
    assert library.mqd_crc32c_using(kind, 0, long, len(long)) == library.mqd_crc32c_using(0, 0, long, len(long)), kind
print(platform.machine())
"""


class Emulated:
    """`python` is a shell script that starts the emulated Python, so the kernel needs no qemu
    registration: this package starts processes with sys.executable.
    """

    def __init__(self, place: Path, qemu: Path, root: Path) -> None:
        self.place, self.python = place, place / "python"
        words = [str(qemu), "-L", str(root), str(root / "usr/bin/python3.11")]
        self.python.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        self.python.chmod(0o755)
        site = place / "site"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site), "--only-binary=:all:"]
        for platform in ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"):
            command += ["--platform", platform]
        command += ["--python-version", "3.11", "--implementation", "cp", str(building.wheel("aarch64"))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr
        (site / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(self.python)!r}\n")
        self.environment = {"PYTHONPATH": str(site), "HOME": str(place), "PATH": os.defpath}

    def run(self, *words: str, given: str | None = None) -> str:
        done = subprocess.run(
            [str(self.python), *words],
            cwd=self.place,
            env=self.environment,
            input=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    try:
        qemu = debian.unpack(["qemu-user-static"]) / "usr/bin/qemu-aarch64-static"
        root = debian.unpack(PYTHON, "arm64")
    except Unavailable as why:
        pytest.skip(f"qemu-user-static and an aarch64 Python: {why}")
    yield Emulated(tmp_path_factory.mktemp("aarch64"), qemu, root)


def test_checksums_by_the_processor(emulated: Emulated) -> None:
    assert emulated.run("-c", CHECKSUMS) == "aarch64\n"


def test_a_broker_and_its_clients(emulated: Emulated) -> None:
    data, port = str(emulated.place / "data"), free_port()
    command = [str(emulated.python), "-m", "mqd", "up", "--workers", "1", "--port", str(port), "--data-dir", data]
    with subprocess.Popen(
        command,
        cwd=emulated.place,
        env=emulated.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("mqd ready on"), line + process.stdout.read()
            assert emulated.run("-c", CLIENT, f"127.0.0.1:{port}").startswith("read|1000|")
            emulated.run("-m", "mqd", "down", "--data-dir", data)
            assert process.wait(LIMIT_S) == 0
        finally:
            process.terminate()  # not kill: it would leave the broker's processes
            process.wait(LIMIT_S)
    emulated.run("-m", "mqd", "log", "verify", str(emulated.place / "data" / "log"))
