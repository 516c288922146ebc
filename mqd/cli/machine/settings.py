"""The settings of a machine, the values that suit a broker, and why. All files are read below a
root directory, which is / except in tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mqd.cli.machine.storage import Device, FileSystem, devices_of, file_system_of, read_number, read_text

SWAPPINESS_MAX, SWAPPINESS_WANTED = 10, 1
DIRTY_BACKGROUND_PERCENT_MAX, DIRTY_PERCENT_MAX = 5, 40
BACKLOG_MIN = 4096
OPEN_FILES_MIN = 100_000
LOCKED_BYTES_MIN = 64 << 20
INOTIFY_MIN = 512
READ_AHEAD_KB = {"ssd": 256, "disk": 2048}
STRIPE_CACHE_MIN = 4096
STRIPED_LEVELS = ("raid0", "raid4", "raid5", "raid6", "raid10")
PARITY_DISKS = {"raid4": 1, "raid5": 1, "raid6": 2}
TESTED_FILE_SYSTEMS = ("ext4", "xfs")
COPY_ON_WRITE_FILE_SYSTEMS = ("btrfs", "zfs", "bcachefs")
NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "glusterfs", "9p", "fuse.sshfs")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class Setting(NamedTuple):
    """`writes`: file -> text that `mqd tune --apply` writes to the file. If `writes` is empty and a
    change is needed, `how` describes it. `is_risk`: the current value puts records at risk.
    """

    name: str
    now: str
    wanted: str
    is_good: bool
    why: str
    writes: Mapping[Path, str] = {}
    how: str = ""
    is_risk: bool = False


def selected_value(text: str) -> str:
    """The value in brackets, if the kernel lists several: "none" of "[none] mq-deadline"."""
    return text.split("[", 1)[1].split("]", 1)[0] if "[" in text and "]" in text else text


def read_settings(root: Path, directories: Iterable[Path]) -> list[Setting]:
    """All settings that this machine has, those of its disks first."""
    return [*_storage(root, directories), *_memory(root), *_network(root), *_cpus(root), *_limits(root)]


# -- file systems and disks ------------------------------------------------------------------------


def _storage(root: Path, directories: Iterable[Path]) -> Iterator[Setting]:
    visited: set[str] = set()
    for directory in directories:
        file_system = file_system_of(root, directory)
        if file_system is None:
            yield Setting(
                f"{directory}: file system",
                "not known",
                "ext4 or xfs",
                False,
                "it is not in /proc/self/mountinfo, so its disk is unknown",
                how=f"mqd bench disk {directory} measures how fast it is",
            )
            continue
        if file_system.device in visited:
            continue
        visited.add(file_system.device)
        devices = devices_of(root, file_system.device)
        yield from _file_system(file_system, directory)
        yield from _stripes(file_system, devices)
        for device in devices:
            if device.name not in visited:
                visited.add(device.name)
                yield from _device(device)


def _file_system(file_system: FileSystem, directory: Path) -> Iterator[Setting]:
    place, kind = file_system.mount_point, file_system.kind
    measure = f"mqd bench disk {directory} measures how fast it is"
    if kind in TESTED_FILE_SYSTEMS:
        yield Setting(f"{place}: file system", kind, "ext4 or xfs", True, "mqd is tested on these two")
    elif kind in MEMORY_FILE_SYSTEMS:
        why = "this is memory: all records are lost when the machine restarts"
        yield Setting(
            f"{place}: file system", kind, "ext4 or xfs", False, why, how="move the data directory", is_risk=True
        )
    elif kind in COPY_ON_WRITE_FILE_SYSTEMS:
        why = "it copies on write: a flush writes more than the records, and files become fragmented"
        yield Setting(f"{place}: file system", kind, "ext4 or xfs", False, why, how=measure)
    elif kind in NETWORK_FILE_SYSTEMS:
        why = "the disk is across a network: flushes wait for it, and a lost connection stops the broker"
        yield Setting(f"{place}: file system", kind, "ext4 or xfs", False, why, how=measure)
    else:
        why = f"mqd has not been tested on {kind}: whether a flush reaches the disk there is not known"
        yield Setting(f"{place}: file system", kind, "ext4 or xfs", False, why, how=measure)
    if kind not in TESTED_FILE_SYSTEMS:
        return
    barrier = "nobarrier" if "nobarrier" in file_system.options or file_system.options.get("barrier") == "0" else "on"
    yield Setting(
        f"{place}: barriers",
        barrier,
        "on",
        barrier == "on",
        "without barriers a power cut can lose records that acks=all has acknowledged"
        if barrier != "on"
        else "a flush reaches the disk, not only its cache",
        how=f"remove nobarrier and barrier=0 from {place} in /etc/fstab, and mount it again",
        is_risk=barrier != "on",
    )
    atime_option = next(
        (option for option in ("noatime", "strictatime", "relatime") if option in file_system.options), "strictatime"
    )
    yield Setting(
        f"{place}: access times",
        atime_option,
        "noatime or relatime",
        atime_option != "strictatime",
        "with strictatime each read of a segment writes its inode, which flushes then wait for",
        how=f"mount -o remount,noatime {place}, and noatime in /etc/fstab",
    )
    if "discard" in file_system.options:
        yield Setting(
            f"{place}: discard",
            "on",
            "off",
            False,
            "each deleted segment makes the SSD erase blocks immediately, and flushes wait for that",
            how=f"mount -o remount,nodiscard {place}; systemctl enable --now fstrim.timer trims it weekly",
        )


def _is_rotational(device: Device) -> bool:
    return read_number(device.directory / "queue/rotational") == 1


def _device(device: Device) -> Iterator[Setting]:
    scheduler = device.directory / "queue/scheduler"
    schedulers = read_text(scheduler)
    is_rotational = _is_rotational(device)
    if schedulers is not None and schedulers != "none":
        suitable = ("mq-deadline",) if is_rotational else ("none", "mq-deadline")
        available = [name for name in suitable if name in schedulers.replace("[", " ").replace("]", " ").split()]
        is_good = selected_value(schedulers) in suitable
        yield Setting(
            f"{device.name}: I/O scheduler",
            selected_value(schedulers),
            suitable[0],
            is_good,
            "a spinning disk needs its requests sorted, with a deadline for each"
            if is_rotational
            else "an SSD needs no sorting, and fair schedulers delay flushes",
            {scheduler: available[0]} if available and not is_good else {},
            "" if available or is_good else f"modprobe {suitable[-1]}, then mqd tune --apply",
        )
    read_ahead = device.directory / "queue/read_ahead_kb"
    kilobytes, wanted = read_number(read_ahead), READ_AHEAD_KB["disk" if is_rotational else "ssd"]
    array = _array(device)
    if array is not None:
        wanted = max(wanted, 2 * array.stripe_kb)
    if kilobytes is not None:
        yield Setting(
            f"{device.name}: read-ahead",
            f"{kilobytes} KB",
            f"{wanted} KB or more",
            kilobytes >= wanted,
            "consumers that are behind read segments from the beginning to the end",
            {} if kilobytes >= wanted else {read_ahead: str(wanted)},
        )
    if array is not None:
        yield from _raid(device, array)


class RaidArray(NamedTuple):
    """A software RAID. `stripe_kb`: how much data one stripe holds, on all disks together; 0: the
    array is not striped.
    """

    level: str
    stripe_kb: int


def _array(device: Device) -> RaidArray | None:
    level = read_text(device.directory / "md/level")
    if level is None:
        return None
    disks = read_number(device.directory / "md/raid_disks") or 0
    chunk_kb = (read_number(device.directory / "md/chunk_size") or 0) // 1024
    if level not in STRIPED_LEVELS:
        return RaidArray(level, 0)
    data_disks = disks // 2 if level == "raid10" else disks - PARITY_DISKS.get(level, 0)
    return RaidArray(level, chunk_kb * max(data_disks, 1))


def _raid(device: Device, array: RaidArray) -> Iterator[Setting]:
    missing = read_number(device.directory / "md/degraded")
    if missing is not None:
        yield Setting(
            f"{device.name}: missing disks",
            str(missing),
            "0",
            missing == 0,
            "the array has less redundancy, or none" if missing else "every disk of the array is present",
            how=f"mdadm --detail /dev/{device.name} shows which; mdadm --add replaces a disk",
            is_risk=missing > 0,
        )
    cache = device.directory / "md/stripe_cache_size"
    entries = read_number(cache)
    if entries is not None and array.level in PARITY_DISKS:
        yield Setting(
            f"{device.name}: stripe cache",
            str(entries),
            f"{STRIPE_CACHE_MIN} or more",
            entries >= STRIPE_CACHE_MIN,
            f"{array.level} reads old data to compute parity, unless this cache holds a whole stripe"
            f" ({array.stripe_kb} KB)",
            {} if entries >= STRIPE_CACHE_MIN else {cache: str(STRIPE_CACHE_MIN)},
        )


def _stripes(file_system: FileSystem, devices: Sequence[Device]) -> Iterator[Setting]:
    array = next((array for array in map(_array, devices) if array is not None and array.stripe_kb), None)
    if array is None or file_system.kind not in TESTED_FILE_SYSTEMS:
        return
    # xfs counts in sectors of 512 bytes, ext4 in blocks of 4 KiB
    width = file_system.options.get("swidth") or file_system.options.get("stripe") or "0"
    units = int(width) if width.isdecimal() else 0
    now_kb = units // 2 if file_system.kind == "xfs" else 4 * units
    yield Setting(
        f"{file_system.mount_point}: stripe",
        f"{now_kb} KB" if now_kb else "not known to the file system",
        f"{array.stripe_kb} KB",
        now_kb == array.stripe_kb,
        "files that begin on a stripe are written without reading parity first",
        how=f"it is set when the file system is created: mkfs.{file_system.kind} detects the stripe of an array",
    )


# -- memory ----------------------------------------------------------------------------------------


def has_swap(root: Path) -> bool:
    return len((read_text(root / "proc/swaps") or "").splitlines()) > 1  # the first line is the header


def _memory(root: Path) -> Iterator[Setting]:
    vm = root / "proc/sys/vm"
    swappiness = read_number(vm / "swappiness")
    uses_swap = has_swap(root)
    if swappiness is not None:
        is_good = swappiness <= SWAPPINESS_MAX or not uses_swap
        yield Setting(
            "vm.swappiness",
            str(swappiness),
            str(SWAPPINESS_WANTED) if uses_swap else "any (no swap)",
            is_good,
            "a high value swaps out the broker's own memory to cache more of its segments"
            if uses_swap
            else "there is no swap, so it has no effect",
            {} if is_good else {vm / "swappiness": str(SWAPPINESS_WANTED)},
        )
    for name, limit, why in (
        (
            "dirty_background_ratio",
            DIRTY_BACKGROUND_PERCENT_MAX,
            "little unwritten data accumulates, so a flush is short",
        ),
        ("dirty_ratio", DIRTY_PERCENT_MAX, "a burst of writes is not blocked while gigabytes are written"),
    ):
        share, in_bytes = read_number(vm / name), read_number(vm / name.replace("ratio", "bytes"))
        if share is None:
            continue
        is_good = bool(in_bytes) or share <= limit
        yield Setting(
            f"vm.{name}",
            f"{in_bytes} bytes" if in_bytes else f"{share} %",
            f"{limit} % or less",
            is_good,
            why,
            {} if is_good else {vm / name: str(limit)},
        )
    huge = root / "sys/kernel/mm/transparent_hugepage/enabled"
    pages = read_text(huge)
    if pages is not None:
        is_good = selected_value(pages) != "always"
        yield Setting(
            "transparent huge pages",
            selected_value(pages),
            "madvise",
            is_good,
            "with always, the kernel stalls processes while it assembles huge pages",
            {} if is_good else {huge: "madvise"},
        )


# -- network ---------------------------------------------------------------------------------------


def _network(root: Path) -> Iterator[Setting]:
    for name, why in (
        (
            "core/somaxconn",
            "limits the connections that wait to be accepted, for example when clients reconnect after a restart",
        ),
        ("ipv4/tcp_max_syn_backlog", "limits the connections that are being opened at the same time"),
    ):
        path = root / "proc/sys/net" / name
        current = read_number(path)
        if current is not None:
            is_good = current >= BACKLOG_MIN
            writes = {} if is_good else {path: str(BACKLOG_MIN)}
            yield Setting(f"net.{name.replace('/', '.')}", str(current), f"{BACKLOG_MIN} or more", is_good, why, writes)
    cpus = _cpu_numbers(root)
    interfaces = root / "sys/class/net"
    for interface in sorted(interfaces.iterdir()) if interfaces.is_dir() else ():
        yield from _interrupts(root, interface, cpus)


def _interrupts(root: Path, interface: Path, cpus: Sequence[int]) -> Iterator[Setting]:
    """The interrupts of a network card with several queues; they should not all go to one CPU."""
    irq_dir = interface / "device/msi_irqs"
    irqs = sorted(int(irq.name) for irq in irq_dir.iterdir() if irq.name.isdigit()) if irq_dir.is_dir() else []
    files = [root / f"proc/irq/{irq}/smp_affinity_list" for irq in irqs]
    affinities = {path: affinity for path in files if (affinity := read_text(path)) is not None}
    if len(affinities) < 2 or len(cpus) < 2:
        return
    is_good = len(set(affinities.values())) > 1 or not next(iter(affinities.values())).isdigit()
    yield Setting(
        f"{interface.name}: interrupts",
        f"all of {len(affinities)} on CPU {next(iter(affinities.values()))}" if not is_good else "on several CPUs",
        "spread over the CPUs",
        is_good,
        "one CPU receives all packets, and the worker on that CPU gets no time",
        {} if is_good else {path: str(cpus[index % len(cpus)]) for index, path in enumerate(affinities)},
    )


# -- CPUs ------------------------------------------------------------------------------------------


def _cpu_numbers(root: Path) -> list[int]:
    """The CPUs that are online. A CPU that cannot be taken offline may have no `online` file."""
    folder = root / "sys/devices/system/cpu"
    names = [entry.name[3:] for entry in folder.iterdir() if entry.name.startswith("cpu")] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit() and read_number(folder / f"cpu{name}/online") != 0)


def _cpus(root: Path) -> Iterator[Setting]:
    folder = root / "sys/devices/system"
    governors = {
        path: governor
        for cpu in _cpu_numbers(root)
        if (governor := read_text(path := folder / f"cpu/cpu{cpu}/cpufreq/scaling_governor")) is not None
    }
    if governors:
        slow = [path for path, governor in governors.items() if governor != "performance"]
        yield Setting(
            "CPU governor",
            ", ".join(sorted(set(governors.values()))),
            "performance",
            not slow,
            "a CPU that saves power between requests takes longer to handle the next one",
            {path: "performance" for path in slow},
        )
    clock = folder / "clocksource/clocksource0"
    source, available = (
        read_text(clock / "current_clocksource"),
        (read_text(clock / "available_clocksource") or "").split(),
    )
    if source is not None and (source == "tsc" or "tsc" in available):
        yield Setting(
            "clock source",
            source,
            "tsc",
            source == "tsc",
            "reading another clock takes a system call or a device access",
            {} if source == "tsc" else {clock / "current_clocksource": "tsc"},
        )
    nodes = folder / "node"
    count = (
        sum(node.name[4:].isdigit() for node in nodes.iterdir() if node.name.startswith("node"))
        if nodes.is_dir()
        else 1
    )
    if count > 1:
        lists = "; ".join(f"node {node}: {read_text(nodes / f'node{node}/cpulist')}" for node in range(count))
        yield Setting(
            "NUMA",
            f"{count} nodes",
            "worker.cpus set",
            True,
            f"a worker that stays on the node of its network card and disk does not access another node's memory"
            f" ({lists})",
            how="set worker.cpus to the CPUs of one node, in the broker's configuration",
        )


# -- limits ----------------------------------------------------------------------------------------


def _kernel_version(root: Path) -> tuple[int, ...]:
    """The major and minor version; (0, 0) if unknown."""
    version = (read_text(root / "proc/sys/kernel/osrelease") or "").split(".")[:2]
    return tuple(map(int, version)) if len(version) == 2 and all(map(str.isdigit, version)) else (0, 0)


def _limits(root: Path) -> Iterator[Setting]:
    limits = {}
    for line in (read_text(root / "proc/self/limits") or "").splitlines()[1:]:
        limits[line[:25].strip()] = line[25:].split()
    for name, key, minimum, minimum_text, why, how in (
        (
            "open files",
            "Max open files",
            OPEN_FILES_MIN,
            str(OPEN_FILES_MIN),
            "each connection and segment takes one",
            "set nofile in /etc/security/limits.d; mqd service install sets it for the service",
        ),
        (
            "locked memory",
            "Max locked memory",
            LOCKED_BYTES_MIN if _kernel_version(root) < (5, 12) else 0,
            f"{LOCKED_BYTES_MIN >> 20} MiB",
            "this kernel counts io_uring's rings against this limit",
            "set memlock in /etc/security/limits.d, or LimitMEMLOCK in the unit",
        ),
    ):
        fields = limits.get(key)
        if not fields or len(fields) < 2 or not minimum:
            continue
        hard = fields[1]
        is_good = hard == "unlimited" or (hard.isdigit() and int(hard) >= minimum)
        yield Setting(
            f"limit: {name}", hard, f"{minimum_text} or more", is_good, f"{why} (hard limit of this shell)", how=how
        )
    path = root / "proc/sys/fs/inotify/max_user_instances"
    instances = read_number(path)
    if instances is not None:
        is_good = instances >= INOTIFY_MIN
        yield Setting(
            "fs.inotify.max_user_instances",
            str(instances),
            f"{INOTIFY_MIN} or more",
            is_good,
            "the broker uses inotify to detect that a local client has released its memory",
            {} if is_good else {path: str(INOTIFY_MIN)},
        )
    disabled = read_number(root / "proc/sys/kernel/io_uring_disabled")
    if disabled is not None:
        yield Setting(
            "kernel.io_uring_disabled",
            str(disabled),
            "0",
            disabled == 0,
            "without io_uring the broker uses epoll and threads, which takes more CPU",
            how="sysctl -w kernel.io_uring_disabled=0, if this machine's policy allows it",
        )
