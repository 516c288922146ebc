"""The systemd unit of a broker, as text. For `mqd service`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

STATE = Path("/var/lib")
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}")
WATCHDOG_S = 120  # a process whose loop hangs exits after 60 s; systemd stops the whole broker only if that fails

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
# in a cluster it is ready when enough other hosts run; a log that was not closed cleanly is scanned first
TimeoutStartSec=infinity
TimeoutStopSec=60
Restart=on-failure
RestartSec=1
# the broker notifies systemd while each of its processes responds within 5 s
WatchdogSec={watchdog_s}
{places}
# where clients on this host find the broker; not below /tmp, which is the service's own
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
    """One word of a unit's line: systemd.service(5), "COMMAND LINES"."""
    text = text.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    return text if re.fullmatch(r"[\w@%+=:,./$-]+", text) else '"' + text.replace('"', '\\"') + '"'


def _places(data_dir: Path, others: Sequence[Path]) -> str:
    lines = []
    if data_dir.is_relative_to(STATE) and data_dir != STATE:
        lines += [f"StateDirectory={data_dir.relative_to(STATE)}", "StateDirectoryMode=0700"]
    else:
        others = [data_dir, *others]
    lines += [
        f"ReadWritePaths={quoted(str(path))}"
        for path in others
        if not path.is_relative_to(data_dir) or path == data_dir
    ]
    return "\n".join(lines)


def unit(name: str, user: str, data_dir: Path, start: Sequence[str], others: Sequence[Path] = ()) -> str:
    """`start`: the program and its arguments. `others`: log directories outside the data directory.
    All paths are absolute.
    """
    below_home = any(path.is_relative_to(home) for path in (data_dir, *others) for home in ("/home", "/root"))
    return _UNIT.format(
        name=name,
        user=user,
        start=" ".join(quoted(word) for word in start),
        watchdog_s=WATCHDOG_S,
        places=_places(data_dir, others),
        protect_home="read-only" if below_home else "yes",
    )
