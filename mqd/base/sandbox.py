"""Kernel mechanisms by which a process confines itself: core files, new privileges, system calls
(seccomp), files (Landlock). mqd/security/confinement.py has the policy.

Each function affects the calling process, is irreversible, and raises OSError where the kernel or
the container does not support it. x86_64 and aarch64.
"""

import ctypes
import errno
import os
import platform
import resource
import stat
import struct
import threading
import time
from collections.abc import Iterable

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SET_MODE_FILTER = 1
# apply to all threads; do not turn on mitigations in the CPU, which would slow down the process
_ALL_THREADS, _SPECULATION_ALLOWED = 1, 4
_X32_BIT = 0x40000000
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_AT_SYSTEM_CALL, _AT_ARCHITECTURE = 0, 4  # in struct seccomp_data

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_ONLY_VERSION, _RULE_PATH_BENEATH = 1, 1
OPEN_TIMEOUT_S = 2.0  # for the directories to open
THREAD_END_TIMEOUT_S = 1.0  # for a thread that has ended to disappear from /proc
LANDLOCK_VERSION_MIN = 2  # 5.19: renaming between directories can be allowed
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIRECTORY, _REMOVE_FILE, _MAKE_DIRECTORY, _MAKE_FILE = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_MAKE_SOCKET, _REFER, _TRUNCATE = 1 << 9, 1 << 13, 1 << 14
_VERSION_2_RIGHTS = (1 << 14) - 1
_READ = _READ_FILE | _READ_DIRECTORY
_WRITE_FILES = _WRITE_FILE | _TRUNCATE
_WRITE = _WRITE_FILES | _REMOVE_DIRECTORY | _REMOVE_FILE | _MAKE_DIRECTORY | _MAKE_FILE | _MAKE_SOCKET | _REFER
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

# the system calls to deny: name -> number on (x86_64, aarch64); None: the architecture has no such
# call
DENIED_CALLS: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    # programs, privileges
    "execve": (59, 221),
    "execveat": (322, 281),
    "setuid": (105, 146),
    "setgid": (106, 144),
    "setreuid": (113, 145),
    "setregid": (114, 143),
    "setresuid": (117, 147),
    "setresgid": (119, 149),
    "setgroups": (116, 159),
    "setfsuid": (122, 151),
    "setfsgid": (123, 152),
    "capset": (126, 91),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # namespaces and file systems
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "lookup_dcookie": (212, 18),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    # the machine
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
# operations of an io_uring bypass the filter; a worker creates its ring before this call is denied
RING_CALLS = {"io_uring_setup": (425, 425)}
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, call_name: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call_name}: {os.strerror(number)}")
    return result


def _system_call(number: int, call_name: str, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), call_name)


def hide_memory() -> None:
    """Disables core files and keeps other processes of this user from reading this one's memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def give_up_privileges() -> None:
    """Ensures that programs that this process starts gain no rights; the functions below require
    this.
    """
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def filter_program(machine: str, calls: Iterable[tuple[int | None, int | None]]) -> bytes:
    """Returns a BPF filter that makes these calls, and all calls of another architecture, fail with
    EPERM. The filter reads only the call's number and architecture, so the kernel caches its decisions by number.
    """
    column = list(_AUDIT_ARCH).index(machine)
    numbers = [number for pair in calls if (number := pair[column]) is not None]
    tests = [(_JUMP_IF_AT_LEAST, _X32_BIT)] if machine == "x86_64" else []
    tests += [(_JUMP_IF_EQUAL, number) for number in numbers]
    program = [
        (_LOAD, 0, 0, _AT_ARCHITECTURE),
        (_JUMP_IF_EQUAL, 0, len(tests) + 2, _AUDIT_ARCH[machine]),
        (_LOAD, 0, 0, _AT_SYSTEM_CALL),
        *((code, len(tests) - index, 0, value) for index, (code, value) in enumerate(tests)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *row) for row in program)


def refuse_system_calls(calls: Iterable[tuple[int | None, int | None]]) -> None:
    """Installs the filter for all threads, present and future."""
    machine = platform.machine()
    if machine not in _SECCOMP:
        raise OSError(errno.ENOSYS, f"seccomp: no table of system calls for {machine}")
    program = ctypes.create_string_buffer(filter_program(machine, calls))
    header = struct.pack("@HP", (len(program) - 1) // 8, ctypes.addressof(program))
    flags = ctypes.c_ulong(_ALL_THREADS | _SPECULATION_ALLOWED)
    if _system_call(_SECCOMP[machine], "seccomp", ctypes.c_long(_SET_MODE_FILTER), flags, header):
        raise OSError(errno.EBUSY, "seccomp: a thread has a filter of its own")


def restrict_files(readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Lets this process open only files below these paths, and start no program. Missing paths
    are skipped. Open files stay open. Call it before any thread starts: running threads are not
    restricted.
    """
    version = _system_call(_LANDLOCK_CREATE, "Landlock", None, ctypes.c_size_t(0), ctypes.c_uint(_ONLY_VERSION))
    if version < LANDLOCK_VERSION_MIN:
        raise OSError(errno.ENOSYS, f"Landlock: the kernel has version {version}, and {LANDLOCK_VERSION_MIN} is needed")
    rights = [(readable, _READ), (writable, _READ | _WRITE), (devices, _READ | _WRITE_FILES)]
    opened = _open_paths([(path, access) for paths, access in rights for path in dict.fromkeys(paths)])
    try:
        if not _is_only_thread():
            raise OSError(errno.EBUSY, "Landlock: other threads are running already")
        _restrict(version, opened)
    finally:
        for fd, _ in opened:
            os.close(fd)


def _is_only_thread() -> bool:
    """Whether this is the only thread; one that has just ended may still be listed for a moment."""
    until_s = time.monotonic() + THREAD_END_TIMEOUT_S
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.001)
    return True


def _restrict(version: int, opened: Iterable[tuple[int, int]]) -> None:
    handled = _VERSION_2_RIGHTS | (_TRUNCATE if version >= 3 else 0)
    ruleset = _system_call(
        _LANDLOCK_CREATE, "Landlock", struct.pack("=Q", handled), ctypes.c_size_t(8), ctypes.c_uint(0)
    )
    try:
        for fd, rights in opened:
            rule = struct.pack("=Qi", rights & handled, fd)
            _system_call(
                _LANDLOCK_ADD,
                "Landlock",
                ctypes.c_int(ruleset),
                ctypes.c_int(_RULE_PATH_BENEATH),
                rule,
                ctypes.c_uint(0),
            )
        _system_call(_LANDLOCK_RESTRICT, "Landlock", ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


def _open_paths(paths: Iterable[tuple[str, int]]) -> list[tuple[int, int]]:
    """Returns descriptors of the existing paths, with their rights. A thread opens them, because a
    disk may hang, and this process must start anyway.
    """
    opened: list[tuple[int, int]] = []

    def collect() -> None:
        for path, rights in paths:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:
                continue
            is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
            opened.append((fd, rights if is_directory else rights & _FILE_RIGHTS))

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(OPEN_TIMEOUT_S)
    if thread.is_alive():
        raise OSError(errno.ETIMEDOUT, "Landlock: a directory does not respond")
    return opened
