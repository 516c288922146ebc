"""The record of this host's last session as a broker. From it the next session decides whether this
host's replicas may have lost something (R9 of the cluster's rules).

DATA_DIR/metadata/session: one line of JSON, replaced as a whole. A session counts as ended cleanly
if that was recorded at its end, or if the machine has not been restarted since and the log
directories are on the same devices: all writes of its processes are then in the page cache or on
disk, even after kill -9 (a replica's position is reported only after write()).
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mqd import native


class Session(msgspec.Struct, frozen=True):
    broker_epoch: int
    directory_id: str
    boot_id: str  # /proc/sys/kernel/random/boot_id
    devices: list[int]  # st_dev of log.dirs
    clean: bool


def boot_id() -> str:
    """The id of the current boot; "" if the system does not provide it: then a session counts as
    ended cleanly only if that was recorded at its end.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def devices(log_dirs: Iterable[str]) -> list[int]:
    device_numbers = []
    for path in log_dirs:
        try:
            device_numbers.append(os.stat(path).st_dev)
        except OSError:
            device_numbers.append(-1)
    return device_numbers


def clean_epoch(path: Path, directory_id: str, boot_now: str, devices_now: list[int]) -> int:
    """The broker epoch of the last session if it ended cleanly, otherwise -1. `boot_now`,
    `devices_now`: the results of boot_id() and devices().
    """
    try:
        last = msgspec.json.decode(path.read_bytes(), type=Session)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return -1
    is_same_boot = bool(boot_now) and last.boot_id == boot_now
    is_cache_intact = is_same_boot and last.devices == devices_now and -1 not in devices_now
    return last.broker_epoch if last.directory_id == directory_id and (last.clean or is_cache_intact) else -1


def write(path: Path, session: Session) -> None:
    """Durable on return. Raises native.NativeError."""
    native.file_replace(path, msgspec.json.encode(session) + b"\n")
