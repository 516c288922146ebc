"""Privileges that a process drops: the system call filter in a model of its machine, and the
kernel's errors in a process that has applied it.
"""

import errno
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from mqd.base import sandbox

HEADERS = {"x86_64": "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "/usr/include/asm-generic/unistd.h"}
ALL = {**sandbox.DENIED_CALLS, **sandbox.RING_CALLS}
ALLOWED = {"read": (0, 63), "openat": (257, 56), "sendfile": (40, 71), "clone3": (435, 435), "landlock": (446, 446)}


def verdict(program: bytes, architecture: int, number: int) -> int:
    """Runs the filter as the kernel does; returns its result."""
    rows = list(struct.iter_unpack("=HBBI", program))
    at, accumulator = 0, 0
    while True:
        code, yes, no, value = rows[at]
        at += 1
        if code == 0x20:
            accumulator = {0: number, 4: architecture}[value]
        elif code == 0x06:
            return value
        else:
            at += yes if (accumulator == value if code == 0x15 else accumulator >= value) else no


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_refuses_exactly_the_calls_in_the_table(machine):
    column = list(HEADERS).index(machine)
    architecture = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    program = sandbox.filter_program(machine, ALL.values())
    refused = {pair[column] for pair in ALL.values()} - {None}
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    for number in range(500):
        assert verdict(program, architecture, number) == (refuse if number in refused else allow), number
    assert not refused & {pair[column] for pair in ALLOWED.values()}
    assert verdict(program, 0x40000003, 3) == refuse  # 32 bits
    assert verdict(program, architecture, 0x40000000) == (refuse if machine == "x86_64" else allow)  # x32


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_system_call_numbers_match_the_kernels(machine):
    header = Path(HEADERS[machine])
    if not header.exists():
        pytest.skip(f"{header} is not here to compare with")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name: int(number) for name, number in found}
    own = {name: pair[list(HEADERS).index(machine)] for name, pair in ALL.items()}
    assert own == {name: numbers.get(name) for name in ALL}


PROGRAM = """
import os, sys, threading
from mqd.base import sandbox

own, other = sys.argv[1:]
kept = os.open(f"{other}/kept", os.O_RDONLY)
sandbox.hide_memory()
sandbox.give_up_privileges()
sandbox.restrict_files(["/proc", "/nowhere"], [own], ["/dev/null"])
sandbox.refuse_system_calls([*sandbox.DENIED_CALLS.values(), *sandbox.RING_CALLS.values()])


def tell(what, action):
    try:
        action()
    except OSError as error:
        print(what, error.errno)
    else:
        print(what, "done")


def reopened(fd, flags=os.O_RDONLY):
    return os.open(f"/proc/self/fd/{fd}", flags)


def all_of_it():
    os.makedirs(f"{own}/a/b")
    os.close(os.open(f"{own}/file", os.O_RDWR | os.O_CREAT))
    tell("moved", lambda: os.rename(f"{own}/file", f"{own}/a/b/file"))
    tell("reopened", lambda: reopened(os.open(f"{own}/a/b/file", os.O_RDONLY), os.O_RDWR | os.O_TRUNC))
    tell("memory", lambda: reopened(os.memfd_create("x"), os.O_RDWR))
    tell("device", lambda: os.open("/dev/null", os.O_WRONLY))
    tell("read", lambda: os.pread(kept, 1, 0))
    tell("open", lambda: os.open(f"{other}/kept", os.O_RDONLY))
    tell("again", lambda: reopened(kept))
    tell("make", lambda: os.mkdir(f"{other}/made"))
    tell("run", lambda: os.execv(sys.executable, ["python"]))
    tell("root", lambda: os.chroot("/"))
    tell("rights", lambda: os.setresuid(0, 0, 0))


thread = threading.Thread(target=all_of_it)
thread.start()
thread.join()
print("status", *(line.split()[1] for line in open("/proc/self/status") if line.startswith(("NoNewPrivs", "Seccomp:"))))
"""


def test_a_confined_process(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    (other / "kept").write_text("x")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(own), str(other)], capture_output=True, text=True, timeout=60
    )
    if "Landlock: version" in ran.stderr or "not implemented" in ran.stderr or "not supported" in ran.stderr:
        pytest.skip(f"this kernel does not have it: {ran.stderr.splitlines()[-1]}")
    assert ran.returncode == 0, ran.stderr
    done, denied, refused = "done", str(errno.EACCES), str(errno.EPERM)
    assert dict(line.split(maxsplit=1) for line in ran.stdout.splitlines()) == {
        **dict.fromkeys(("moved", "reopened", "memory", "device", "read"), done),
        **dict.fromkeys(("open", "again", "make"), denied),
        **dict.fromkeys(("run", "root", "rights"), refused),
        "status": "1 2",
    }


def test_a_thread_that_already_runs_would_not_be_confined():
    program = (
        "import threading, time\nfrom mqd.base import sandbox\nsandbox.give_up_privileges()\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nsandbox.restrict_files([], ['/'], [])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and "Landlock" in ran.stderr


def test_a_directory_that_hangs_does_not_hang_the_start():
    program = (
        "import os, time\nfrom mqd.base import sandbox\nsandbox.give_up_privileges()\nreal = os.open\n"
        "sandbox.OPEN_TIMEOUT_S = 0.2\n"
        "os.open = lambda path, flags: time.sleep(60) if path == '/hangs' else real(path, flags)\n"
        "try:\n    sandbox.restrict_files(['/usr', '/hangs'], ['/tmp'], [])\n"
        "except OSError as error:\n    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert "a directory does not respond" in ran.stdout or "version" in ran.stdout, ran.stderr
