"""A real systemd as the first process of new namespaces, over a copy of this machine's files that
is discarded (an overlay in memory). It changes nothing on the machine: the kernel's settings are
read-only there, and units that would change them do not start. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.polling import eventually

SYSTEMD = Path("/usr/lib/systemd/systemd")
PYTHON = Path("/usr/bin/python3")  # one that a service may run: it has no access to home directories
HOME = Path("/opt/mqd")  # where the wheel is installed
LIMIT_S = 900  # bounds a hang
_PASSED = ("PATH", "PIP_", "SSL_", "REQUESTS_", "http", "HTTP", "no_proxy", "NO_PROXY")
# units that concern hardware, the kernel and other services of this machine
_MASKED = """
    dev-hugepages.mount dev-mqueue.mount proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount
    sys-kernel-config.mount sys-kernel-debug.mount sys-kernel-tracing.mount systemd-binfmt.service
    systemd-modules-load.service systemd-random-seed.service systemd-remount-fs.service
    systemd-sysctl.service systemd-udevd.service systemd-udev-trigger.service systemd-update-utmp.service
    kmod-static-nodes.service modprobe@.service apt-daily.timer apt-daily-upgrade.timer
    console-getty.service getty.target
"""

_FILES = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs tmpfs "$PLACE"
mkdir "$PLACE/changed" "$PLACE/work" "$PLACE/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$PLACE/changed,workdir=$PLACE/work" "$PLACE/root"
cd "$PLACE/root"
mount -t proc proc proc
mount -t tmpfs -o mode=755 tmpfs dev
for node in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0"; do
    mknod -m 666 dev/${node%% *} c ${node#* }
done
ln -s /proc/self/fd dev/fd
mkdir dev/pts dev/shm
mount -t tmpfs -o mode=1777 tmpfs dev/shm
# with this machine's network: the dependencies come from the package registry
cp "$WHEEL" opt/
chroot . "$PYTHON" -m venv --without-pip "$HOME_OF_MQD"
chroot . "$PIP" -m pip --python "$HOME_OF_MQD/bin/python" install --quiet "/opt/$(basename "$WHEEL")"
rm -rf etc/systemd/system/*.wants etc/systemd/system/default.target etc/systemd/system/multi-user.target
for unit in $MASKED; do ln -sf /dev/null "etc/systemd/system/$unit"; done
touch dev/console
mount --bind "$CONSOLE" dev/console
exec unshare --pid --net --cgroup --fork --kill-child bash -c "$BOOT"
"""
_BOOT = r"""
set -eu
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mkdir -p mnt
pivot_root . mnt
umount -l /mnt
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin "$SYSTEMD" --system --log-target=console \
    --unit=multi-user.target <>/dev/console >&0 2>&1
"""


class SystemdMachine:
    """Use as a context manager. Skips the test where systemd or root are missing."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        for program in (SYSTEMD, PYTHON):
            if not program.exists():
                pytest.skip(f"there is no {program} here: apt-get install systemd python3-venv")
        if os.geteuid() != 0:
            pytest.skip("systemd's namespaces need root")
        if shutil.which("nsenter") is None:
            pytest.skip("there is no nsenter here: apt-get install util-linux")
        self._directory, self._wheel = directory, wheel
        self.console = ""

    def __enter__(self) -> SystemdMachine:
        place = self._directory / "place"
        place.mkdir()
        self._master, slave = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED)}
        environment |= {
            "PLACE": str(place),
            "WHEEL": str(self._wheel),
            "PYTHON": str(PYTHON),
            "PIP": sys.executable,
            "HOME_OF_MQD": str(HOME),
            "MASKED": _MASKED,
            "CONSOLE": os.ttyname(slave),
            "SYSTEMD": str(SYSTEMD),
            "BOOT": _BOOT,
        }
        command = ["unshare", "--mount", "--uts", "--ipc", "--kill-child", "--fork", "bash", "-c", _FILES]
        self._process = subprocess.Popen(command, env=environment, stdout=slave, stderr=slave, stdin=subprocess.DEVNULL)
        self._slave = slave
        threading.Thread(target=self._read_console, daemon=True).start()
        try:
            eventually(self._is_up, lambda: f"systemd is up\n{self.console[-5000:]}", LIMIT_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # and with it all processes in the namespaces
        self._process.wait(60)
        os.close(self._slave)

    def _read_console(self) -> None:
        while self._process.poll() is None:
            readable, _, _ = select.select([self._master], [], [], 0.5)
            if readable:
                with contextlib.suppress(OSError):  # its last writer has ended
                    self.console += os.read(self._master, 65536).decode(errors="replace")
        os.close(self._master)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.console[-5000:]
        self._pid = self._systemd()
        return bool(self._pid) and self.run("systemctl", "is-active", "multi-user.target", checked=False) == "active\n"

    def _systemd(self) -> int:
        """Its pid here; 0: not yet."""
        waiting = [self._process.pid]
        while waiting:
            pid = waiting.pop()
            try:
                if Path(f"/proc/{pid}/comm").read_text() == "systemd\n":
                    return pid
                waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            except OSError:
                continue
        return 0

    def run(self, *command: str, checked: bool = True, within_s: float = LIMIT_S) -> str:
        """Its standard output, and errors if it may fail. As root, on that machine."""
        inside = ["nsenter", "--target", str(self._pid), "--all", "--root", "--wd=/", "env", "-i"]
        done = subprocess.run(
            [*inside, f"PATH={HOME}/bin:/usr/sbin:/usr/bin", "LC_ALL=C.UTF-8", *command],
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        if checked:
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.console[-3000:]}"
            return done.stdout
        return done.stdout + done.stderr
