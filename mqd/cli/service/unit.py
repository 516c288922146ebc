"""The systemd unit of a broker, as text. For `mqd service`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

STATE = Path("/var/lib")
HOMES = ("/home", "/root")  # what ProtectHome= hides
NAME_PATTERN = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}")
# longer than the 60 s after which a process whose event loop hangs exits by itself: systemd stops
# the whole broker only if that fails
WATCHDOG_S = 120

_UNIT = """\
# Written by `mqd service install`; run it again to change its options. To override settings:
# systemctl edit {name}

[Unit]
Description=mqd message queue ({name})
Documentation=man:systemd.service(5)
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
NotifyAccess=main
User={user}
Group={user}
ExecStart={start}
# in a cluster, ready once enough other hosts are up; logs that were not closed cleanly are scanned first
TimeoutStartSec=infinity
TimeoutStopSec=60
Restart=on-failure
RestartSec=1
# the broker notifies systemd as long as each of its processes responds within 5 s
WatchdogSec={watchdog_s}
{directories}
# where clients on this host find the broker; not in /tmp, because the service has a private /tmp
RuntimeDirectory=mqd
RuntimeDirectoryMode=0755
RuntimeDirectoryPreserve=yes
UMask=0077
LimitNOFILE=1048576
LimitCORE=0
OOMScoreAdjust=-500

NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
PrivateDevices=yes
PrivateMounts=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_NETLINK AF_UNIX
SystemCallArchitectures=native
SystemCallErrorNumber=EPERM
SystemCallFilter=@system-service
SystemCallFilter=seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self

[Install]
WantedBy=multi-user.target
"""


def quoted(text: str) -> str:
    """Quotes one word of a command, as systemd.service(5) describes in "COMMAND LINES"."""
    return quoted_path(text.replace("$", "$$"))


def quoted_path(text: str) -> str:
    """Quotes one word of a list of paths, in which systemd does not expand variables."""
    text = text.replace("\\", "\\\\").replace("%", "%%")
    return text if re.fullmatch(r"[\w@%+=:,./$-]+", text) else '"' + text.replace('"', '\\"') + '"'


def _is_state_directory(data_dir: Path) -> bool:
    """Whether systemd creates the directory and gives it to the user (StateDirectory=)."""
    return data_dir.is_relative_to(STATE) and data_dir != STATE


def required_dirs(data_dir: Path, other_log_dirs: Sequence[Path]) -> list[Path]:
    """The directories that must exist before the service starts, because systemd does not create
    them.
    """
    outside = [path for path in other_log_dirs if not path.is_relative_to(data_dir)]
    return outside if _is_state_directory(data_dir) else [data_dir, *outside]


def _directory_settings(data_dir: Path, other_log_dirs: Sequence[Path]) -> str:
    lines = []
    if _is_state_directory(data_dir):
        lines += [f"StateDirectory={quoted_path(str(data_dir.relative_to(STATE)))}", "StateDirectoryMode=0700"]
    lines += [f"ReadWritePaths={quoted_path(str(path))}" for path in required_dirs(data_dir, other_log_dirs)]
    return "\n".join(lines)


def unit(
    name: str,
    user: str,
    data_dir: Path,
    start: Sequence[str],
    other_log_dirs: Sequence[Path] = (),
    read_paths: Sequence[Path] = (),
) -> str:
    """Returns the text of the unit. `start`: the program and its arguments. `other_log_dirs`:
    log directories outside the data directory. `read_paths`: files and directories that the service
    reads. All paths are absolute.
    """
    below_home = any(path.is_relative_to(home) for path in (data_dir, *other_log_dirs, *read_paths) for home in HOMES)
    return _UNIT.format(
        name=name,
        user=user,
        start=" ".join(quoted(word) for word in start),
        watchdog_s=WATCHDOG_S,
        directories=_directory_settings(data_dir, other_log_dirs),
        protect_home="read-only" if below_home else "yes",
    )
