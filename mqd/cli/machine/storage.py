"""The storage of directories: the file system, and the block devices below it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class FileSystem(NamedTuple):
    """`device`: major:minor. `options`: mount and file-system options by name; "" for an option
    without a value.
    """

    kind: str
    mount_point: Path
    device: str
    options: dict[str, str]


class Device(NamedTuple):
    """A disk or an array. `directory`: its directory in /sys."""

    name: str
    directory: Path


def read_text(path: Path) -> str | None:
    """None: this kernel does not have the file, or this user may not read it."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def read_number(path: Path) -> int | None:
    text = read_text(path)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _unescape(word: str) -> str:
    r"""Replaces the escapes of proc(5), such as \040 for a space."""
    return word.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")


def _options(*lists: str) -> dict[str, str]:
    options = {}
    for option in ",".join(lists).split(","):
        name, _, value = option.partition("=")
        options[name] = value
    return options


def file_system_of(root: Path, directory: Path) -> FileSystem | None:
    """The innermost mounted file system that contains `directory`, which is an absolute path
    without symbolic links. None: not known.
    """
    best: FileSystem | None = None
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        mount, _, system = line.partition(" - ")
        mount_fields, system_fields = mount.split(), system.split()
        if len(mount_fields) < 6 or len(system_fields) < 3:
            continue
        mount_point = Path(_unescape(mount_fields[4]))
        # >=: a later mount on the same directory hides an earlier one
        is_inner = best is None or len(mount_point.parts) >= len(best.mount_point.parts)
        if directory.is_relative_to(mount_point) and is_inner:
            options = _options(mount_fields[5], system_fields[2])
            best = FileSystem(system_fields[0], mount_point, mount_fields[2], options)
    return best


def devices_of(root: Path, major_minor: str) -> list[Device]:
    """Returns the device and all devices below it, such as the disks of an array. A partition is
    represented by its disk. Returns [] if `major_minor` is not a block device.
    """
    devices: dict[str, Device] = {}

    def visit(directory: Path) -> None:
        if (directory / "partition").exists():
            directory = directory.parent
        if directory.name in devices or not directory.is_dir():
            return
        devices[directory.name] = Device(directory.name, directory)
        slaves = directory / "slaves"
        for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
            visit(slave.resolve())

    link = root / "sys/dev/block" / major_minor
    if link.exists():
        visit(link.resolve())
    return list(devices.values())
