"""Confinement of a broker's processes after their start: no core files, no system calls that they
never make, no access to unrelated files. An attacker who can run code in one of them then reaches
little beyond that process.

`process.sandbox` and `core.files.allow` control it; mqd/base/sandbox.py implements it. A restriction
that the kernel or a container does not support is skipped; the log and `mqd status` show this.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mqd.base import logging, sandbox
from mqd.base.paths import Layout

_SYSTEM_DIRECTORIES = (
    *("/usr", "/lib", "/lib64", "/bin", "/etc", "/opt", "/nix/store", "/proc", "/sys"),
    *("/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager"),  # targets of the link /etc/resolv.conf
)
_SHARED_MEMORY = "/dev/shm"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_FILE_PROPERTIES = (".location", ".file")
_FILE_VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "OPENSSL_CONF", "OPENSSL_MODULES", "PYTHONHOME", "TZDIR")
_URL_PROPERTY, _FILE_URL = "sasl.oauthbearer.jwks.endpoint.url", "file://"


def hide_memory(config: Mapping[str, str]) -> str:
    """Prevents core files, unless core.files.allow is true. Returns the restrictions in force, as
    text; "" if there are none.
    """
    if config.get("core.files.allow") == "true":
        return ""
    return _apply([("no core files", sandbox.hide_memory)])


def confine(config: Mapping[str, str], places: Layout | None, makes_ring: bool = False) -> str:
    """Returns the restrictions in force, as text. `places`: directories that this process writes
    to; if None, its access to files is not restricted. `makes_ring`: the process will open an
    io_uring, and then call refuse_more_rings.
    """
    memory_restriction = hide_memory(config)
    if config.get("process.sandbox") == "off":
        return memory_restriction or "nothing"
    calls = sandbox.DENIED_CALLS if makes_ring else sandbox.DENIED_CALLS | sandbox.RING_CALLS
    steps: list[tuple[str, Callable[[], None]]] = [("no new privileges", sandbox.give_up_privileges)]
    if places is not None:
        readable = [*_SYSTEM_DIRECTORIES, *_code_directories(), *_configured_directories(config)]
        writable = _own_directories(config, places)
        steps.append(("Landlock", lambda: sandbox.restrict_files(readable, writable, _DEVICES)))
    steps.append(("seccomp", lambda: sandbox.refuse_system_calls(calls.values())))
    return ", ".join(filter(None, [memory_restriction, _apply(steps)])) or "nothing"


def refuse_more_rings(config: Mapping[str, str]) -> None:
    """Called once a worker has opened its ring. The operations of that ring are restricted; those
    of another ring would not be.
    """
    if config.get("process.sandbox") != "off":
        _apply([("seccomp", lambda: sandbox.refuse_system_calls(sandbox.RING_CALLS.values()))])


def _apply(steps: Iterable[tuple[str, Callable[[], None]]]) -> str:
    applied = []
    for name, step in steps:
        try:
            step()
        except OSError as error:
            logging.get("sandbox").warning("part of process.sandbox is not in force here", reason=str(error))
        else:
            applied.append(name)
    return ", ".join(applied)


def _code_directories() -> list[str]:
    """The directories of Python and its modules, which are imported on first use. Bytecode may be
    elsewhere; without access to it each start would compile each module.
    """
    package = Path(__file__).resolve().parents[1]
    prefixes = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(package)]
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    directories = [path for path in (*prefixes, sys.pycache_prefix, *sys.path, *libraries) if path]
    return [*directories, *(os.path.realpath(path) for path in directories)]


def _configured_directories(config: Mapping[str, str]) -> list[str]:
    """The directories of the files that are named in the configuration or the environment. Access
    to the files alone is not enough: a file is often replaced with another of the same name, or is
    a link into another directory.
    """
    files = [value for name, value in config.items() if name.endswith(_FILE_PROPERTIES) and value]
    urls = [value for name, value in config.items() if name.endswith(_URL_PROPERTY)]
    files += [path for name in _FILE_VARIABLES if (path := os.environ.get(name))]
    files += [url.removeprefix(_FILE_URL) for url in urls if url.startswith(_FILE_URL)]
    paths = [path for file in files for path in (os.path.abspath(file), os.path.realpath(file))]
    return [path if os.path.isdir(path) else os.path.dirname(path) for path in paths]


def _own_directories(config: Mapping[str, str], places: Layout) -> list[str]:
    log_dirs = [path for path in config.get("log.dirs", "").split(",") if path]
    return [str(places.data_dir), str(places.run_dir), *log_dirs, _SHARED_MEMORY]
