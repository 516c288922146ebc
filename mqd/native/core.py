"""The one module that imports cffi's extension: `ffi` and `lib`, errors, and helpers for the other
modules of this package.

1. A failing call raises NativeError with the cause and the remedy; `check` and `failure` create it
   from the core's last error on this thread.
2. `bytes_of` checks that a buffer is contiguous and, unless the caller allows read-only memory,
   writable. Its result keeps the buffer alive.

Concurrency: calls of `lib` release the GIL. An error is read on the thread whose call failed,
before its next call.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from mqd._native import ffi, lib

E_LAYOUT = lib.MQD_E_LAYOUT
E_CORRUPT = lib.MQD_E_CORRUPT
E_FULL = lib.MQD_E_FULL
E_INVALID = lib.MQD_E_INVALID
E_STALE = lib.MQD_E_STALE


def enumeration(name: str, prefix: str) -> dict[str, int]:
    """The members of a C enum by their Python names, without the prefix."""
    members = ffi.typeof(f"enum {name}").relements
    return {key.removeprefix(prefix): value for key, value in sorted(members.items(), key=lambda item: item[1])}


class NativeError(OSError):
    """A call into the core failed. `errno` (also `code`) is the system's errno or one of E_*; the
    message names the cause and the remedy.
    """

    @property
    def code(self) -> int:
        return self.errno or 0


def failure(path: str | os.PathLike[str] | None = None) -> NativeError:
    """The exception for the call that has just failed on this thread, to be raised."""
    code, message = lib.mqd_error_code(), ffi.string(lib.mqd_error_message()).decode("utf-8", "replace")
    return NativeError(code, message, os.fspath(path)) if path is not None else NativeError(code, message)


def check(result: int, path: str | os.PathLike[str] | None = None) -> int:
    if result < 0:
        raise failure(path)
    return result


def bytes_of(buffer: Any, writable: bool = True) -> Any:
    """The bytes of a buffer for C, without a copy. Raises ValueError or TypeError when they are not
    contiguous or not writable.
    """
    return ffi.from_buffer("uint8_t[]", buffer, require_writable=writable)


def copy_in(source: msgspec.Struct, target: Any) -> Any:
    """Copies each field of `source` to the field of that name in `target`, and returns `target`."""
    for name in source.__struct_fields__:
        setattr(target, name, getattr(source, name))
    return target


def checked_topic_id(topic_id: bytes) -> bytes:
    if len(topic_id) != 16:
        raise NativeError(E_INVALID, f"a topic id has 16 bytes, not {len(topic_id)}")
    return topic_id
