"""Builds mqd._native from native/*.c: reads the public header, hands it to cffi, nothing else."""

import os
import re
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
HEADERS = ("mqd_native.h", "mqd_replica.h", "mqd_compact_api.h", "mqd_client.h", "mqd_client_reader.h", "mqd_columns.h")


def declarations() -> str:
    """The public header as cffi's parser wants it: no C-only lines, no include guard."""
    text = "".join((HERE / name).read_text() for name in HEADERS)
    text = re.sub(r"/\* MQD_CDEF_OFF \*/.*?/\* MQD_CDEF_ON \*/", "", text, flags=re.S)
    return re.sub(r"^#(ifndef|endif|define MQD_\w+_H$).*$", "", text, flags=re.M)


sources = sorted(os.path.relpath(path, HERE.parent) for path in HERE.glob("*.c"))
ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "mqd._native",
    "".join(f'#include "{name}"\n' for name in HEADERS),
    sources=sources,
    include_dirs=["native"],
    depends=sorted(os.path.relpath(path, HERE.parent) for path in HERE.glob("*.h")),
    # -mtune=generic: a wheel must run on every x86-64; the CRC is dispatched at run time.
    extra_compile_args=["-std=gnu11", "-D_GNU_SOURCE", "-O3", "-g", "-fno-strict-aliasing", "-Wall", "-Wextra", "-Wno-unused-parameter", "-pthread", "-DNDEBUG"],
    extra_link_args=["-pthread"],
)

if __name__ == "__main__":
    ffibuilder.compile(verbose=True)
