"""The file with the cluster's keys. It is created once and copied to every host of the cluster.
A rotation has three steps; after each step, the file is copied to every host again.

    SECRET                          one key: every release reads this format
    # keys of an mqd cluster, step 1      several: hosts authenticate with the first and accept all
    OLD
    NEW
    # keys of an mqd cluster, step 2
    NEW
    OLD

A host that is one step behind is still accepted, and accepts the others, so the order in which
hosts get the file does not matter.
"""

import os
import secrets
from pathlib import Path

from mqd.base.cluster_config import KEY_FILE_BYTES_MAX, KEYS_HEAD, split_keys

_STEP_1, _STEP_2 = (KEYS_HEAD + b", step %d" % step for step in (1, 2))


def make(path: Path) -> None:
    """Creates the file with a new key. Raises OSError, such as FileExistsError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    _write(fd, _new_key() + b"\n")


def rotate(path: Path) -> int:
    """Takes the next step and returns its number; after the third the file has one key. Raises
    OSError; ValueError if it is not a key file.
    """
    content = path.read_bytes()
    keys = split_keys(content)
    head = content.splitlines()[0] if content else b""
    if len(content) > KEY_FILE_BYTES_MAX or not all(keys) or (head.startswith(KEYS_HEAD) and len(keys) != 2):
        raise ValueError("it does not hold a cluster key")
    if head.startswith(_STEP_1):
        step, lines = 2, [_STEP_2, keys[1], keys[0]]
    elif head.startswith(_STEP_2):
        step, lines = 3, [keys[0]]
    elif not head.startswith(KEYS_HEAD) and len(keys) == 1 and b"\n" not in keys[0]:
        step, lines = 1, [_STEP_1, keys[0], _new_key()]
    else:
        raise ValueError(
            "it was not written by `mqd cluster key`; edit it by hand: hosts authenticate with the first key"
        )
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    _write(fd, b"".join(line + b"\n" for line in lines))
    temporary.replace(path)
    return step


def _new_key() -> bytes:
    return secrets.token_urlsafe(32).encode()


def _write(fd: int, content: bytes) -> None:
    with open(fd, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
