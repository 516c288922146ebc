"""A pure folder of native/ built separately for tests, with planted bugs that can be switched on
(its planted_bugs.h). The broker's own build has none.

The library is built in .build/NAME/HASH of the source tree; the hash covers all inputs, so that
parallel runs share it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from cffi import FFI

ROOT = Path(__file__).resolve().parents[1]
NATIVE = ROOT / "native"
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-DMQD_PLANTED", "-O2", "-g", "-fno-strict-aliasing", "-Wall", "-Wextra"]


def _declarations(headers: Sequence[str], planted: str) -> str:
    """The headers in a form that cffi can parse, including the planted bugs."""
    bugs = re.search(
        r"/\* MQD_PLANTED_CDEF_ON \*/(.*?)/\* MQD_PLANTED_CDEF_OFF \*/", (NATIVE / planted).read_text(), re.S
    )
    assert bugs is not None
    text = "".join((NATIVE / header).read_text() for header in headers)
    return bugs[1] + re.sub(r"^#(?!define MQD_[A-Z_]+ -?(?:0x)?[\da-f]+$).*$", "", text, flags=re.M)


def _load(directory: Path, name: str) -> ModuleType | None:
    for path in directory.glob(f"{name}*.so"):
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return None


def build(name: str, room: str, headers: Sequence[str], below: Sequence[str] = ()) -> ModuleType:
    """A module with `ffi` and `lib`. `headers`: headers of the folder to declare, without those
    that they include. `below`: files of other folders that it needs.
    """
    planted = f"{room}/planted_bugs.h"
    declarations = _declarations(headers, planted)
    sources = [*sorted((NATIVE / room).glob("*.c")), NATIVE / "base" / "assert.c", *(NATIVE / one for one in below)]
    builder = FFI()
    builder.cdef(declarations)
    builder.set_source(
        f"_{name}",
        "".join(f'#include "{header}"\n' for header in (planted, *headers)),
        sources=[str(path) for path in sources],
        include_dirs=[str(NATIVE)],
        extra_compile_args=FLAGS,
    )
    parts = [declarations, " ".join(FLAGS)]
    parts += [path.read_text() for path in [*sources, *sorted((NATIVE / room).glob("*.h"))]]
    directory = ROOT / ".build" / name / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = _load(directory, f"_{name}")
        if module is None:
            builder.compile(tmpdir=str(directory))
            module = _load(directory, f"_{name}")
        assert module is not None, f"{directory} holds no library"
        return module
