"""Builds mqd._native from native/: reads the public headers and passes them to cffi."""

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = (
    "native.h",
    "shm/api.h",
    "wire/api.h",
    "tls/api.h",
    "server/api.h",
    "replica/rules.h",
    "log/compaction/api.h",
    "log/views/view_cache.h",
    "client/client.h",
    "client/reader.h",
    "client/columns.h",
)


def declarations() -> str:
    """The public headers in the form that cffi's parser accepts: no C-only lines, no include guard."""
    text = "".join((HERE / name).read_text() for name in HEADERS)
    text = re.sub(r"/\* MQD_CDEF_OFF \*/.*?/\* MQD_CDEF_ON \*/", "", text, flags=re.S)
    return re.sub(r"^#(ifndef|endif|define MQD_\w+_H$).*$", "", text, flags=re.M)


FOLDERS = ("base", "shm", "io", "tls", "codec", "wire", "replica", "share", "log", "server", "client")


# GCC for a generic x86-64 zeroes and copies structs of more than 128 bytes with `rep stos` and `rep
# movs`, which take some 15 ns to start, four times per request. Other compilers have no such
# option and need none.
UNROLL_OPTIONS = [f"-mmem{name}-strategy=unrolled_loop:512:noalign,libcall:-1:noalign" for name in ("set", "cpy")]


def supported_options(options: list[str]) -> list[str]:
    """The options if the C compiler knows them all; otherwise none."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    command = [*compiler, *options, "-E", "-x", "c", os.devnull]
    try:
        return options if subprocess.run(command, capture_output=True).returncode == 0 else []
    except OSError:  # no compiler: the build reports that itself
        return []


def files(pattern: str) -> list[str]:
    return sorted(os.path.relpath(path, HERE.parent) for folder in FOLDERS for path in (HERE / folder).rglob(pattern))


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "mqd._native",
    "".join(f'#include "{name}"\n' for name in HEADERS),
    sources=files("*.c"),
    include_dirs=["native"],
    depends=["native/native.h", *files("*.h")],
    # No -march: a wheel must run on every x86-64; the CRC's implementation is chosen at run time.
    extra_compile_args=[
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O3",
        "-g",
        "-fno-strict-aliasing",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-pthread",
        "-DNDEBUG",
        *supported_options(UNROLL_OPTIONS),
    ],
    extra_link_args=["-pthread", "-ldl"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
