"""The load generator (native/): built when its sources are newer, run pinned to a CPU of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / ".build" / "perf"
SOURCES = Path(__file__).resolve().parent / "native"
LOCAL_SOURCES = SOURCES / "local"
# the parts of native/ that the C client needs, beside its own files (native/client)
LOCAL_PARTS = (
    "wire/batch.c",
    "base/crc32c.c",
    "base/error.c",
    "shm/local_layout.c",
    "shm/layout.c",
    "shm/slot.c",
    "wire/wire.c",
)
WORKER_CPU = 0


def client_cpu() -> int:
    """The last CPU that this process may use; the worker's when there is only one (rates are then
    meaningless, but CPU time is still valid).
    """
    return max(os.sched_getaffinity(0))


class LoadFailed(RuntimeError):
    """The load generator failed; the message is its own."""


def build() -> Path:
    """The program, compiled if necessary. Raises LoadFailed."""
    program = BUILD / "load"
    newest = max(source.stat().st_mtime for source in SOURCES.iterdir() if source.is_file())
    if not program.exists() or program.stat().st_mtime < newest:
        _compile(program, ["-O2"], sorted(SOURCES.glob("*.c")), ["-ldl"])
    return program


@functools.cache
def build_local() -> Path:
    """The load generator for shared memory, with the C client in it, compiled if necessary, once in a
    run. Raises LoadFailed.
    """
    program, native = BUILD / "local", ROOT / "native"
    sources = [
        *sorted(LOCAL_SOURCES.glob("*.c")),
        *sorted((native / "client").glob("*.c")),
        *(native / name for name in LOCAL_PARTS),
    ]
    newest = max(path.stat().st_mtime for path in (*sources, *native.rglob("*.h")))
    if not program.exists() or program.stat().st_mtime < newest:
        # the client's other parts need more of the core: unreachable sections are omitted, and so is
        # what they refer to
        _compile(
            program,
            ["-O3", "-DNDEBUG", "-fno-strict-aliasing", "-ffunction-sections", "-fdata-sections", f"-I{native}"],
            sources,
            ["-Wl,--gc-sections", "-pthread"],
        )
    return program


def _compile(program: Path, flags: list[str], sources: list[Path], link: list[str]) -> None:
    BUILD.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    command = [
        compiler,
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-g",
        "-Wall",
        "-Wextra",
        *flags,
        "-o",
        str(program),
        *map(str, sources),
        *link,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise LoadFailed(f"{compiler} cannot build the load generator:\n{done.stderr}")


def _words(what: str, arguments: dict[str, object]) -> list[str]:
    return [
        "taskset",
        "-c",
        str(client_cpu()),
        str(build()),
        what,
        *(f"{name}={value}" for name, value in arguments.items()),
    ]


def run(what: str, *, timeout_s: float = 120, **arguments: object) -> dict:
    """Runs the load generator. Returns its JSON. Raises LoadFailed."""
    try:
        done = subprocess.run(_words(what, arguments), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"load {what} {arguments}: not done within {timeout_s:.0f} s") from None
    if done.returncode:
        raise LoadFailed(f"load {what} {arguments}: {done.stderr.strip() or done.stdout.strip()}")
    return json.loads(done.stdout)


@contextlib.contextmanager
def parked(**arguments: object) -> Iterator[None]:
    """Runs caught-up consumers for as long as the block runs."""
    with subprocess.Popen(
        _words("parked", arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise LoadFailed(f"load parked {arguments}: exit {process.wait()}")
        yield
        process.stdin.close()
