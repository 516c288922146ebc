"""native/replica/ built once more for the simulator, with planted bugs that can be switched on
(native/replica/planted.h). The broker's own build has none.

The library is made where the sources are compiled: .build/replica_rules/HASH, by the hash of what
goes in, so that runs beside each other share it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

from cffi import FFI

ROOT = Path(__file__).resolve().parents[3]
NATIVE = ROOT / "native"
HEADER, PLANTED_HEADER = NATIVE / "replica" / "rules.h", NATIVE / "replica" / "planted.h"
SOURCES = [NATIVE / "replica" / "rules.c", NATIVE / "replica" / "follow.c", NATIVE / "base" / "assert.c"]
FLAGS = ["-std=gnu11", "-D_GNU_SOURCE", "-DMQD_PLANTED", "-O2", "-g", "-fno-strict-aliasing", "-Wall", "-Wextra"]
NAME = "_replica_rules"


def declarations() -> str:
    """Both headers as cffi's parser wants them, the planted ones with them."""
    planted = re.search(r"/\* MQD_PLANTED_ON \*/(.*?)/\* MQD_PLANTED_OFF \*/", PLANTED_HEADER.read_text(), re.S)
    assert planted is not None
    text = re.sub(r"^#(?!define MQD_REPLICA_[A-Z_]+ ).*$", "", HEADER.read_text(), flags=re.M)
    return planted[1] + text


def _load(directory: Path) -> ModuleType | None:
    for path in directory.glob(f"{NAME}*.so"):
        spec = importlib.util.spec_from_file_location(NAME, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    return None


def _built() -> ModuleType:
    builder = FFI()
    builder.cdef(declarations())
    builder.set_source(
        NAME,
        '#include "replica/planted.h"\n#include "replica/rules.h"\n',
        sources=[str(path) for path in SOURCES],
        include_dirs=[str(NATIVE)],
        extra_compile_args=FLAGS,
    )
    parts = [declarations(), " ".join(FLAGS), *(path.read_text() for path in [*SOURCES, HEADER, PLANTED_HEADER])]
    directory = ROOT / ".build" / "replica_rules" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = _load(directory)
        if module is None:
            builder.compile(tmpdir=str(directory))
            module = _load(directory)
        assert module is not None, f"{directory} holds no library"
        return module


_module = _built()
ffi, lib = _module.ffi, _module.lib
