"""Profiles: the clusters that a user has given names. They are stored in
~/.config/mqd/profiles.json, which may be edited by hand:

{"production": {"bootstrap": "10.0.0.1:9092,10.0.0.2:9092",
                "client_config": "/home/me/admin.properties"}}
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mqd.cli.common import CliError

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
BYTES_MAX = 1 << 20


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`client_config`: an absolute path; None: no authentication."""

    bootstrap: str
    client_config: str | None = None


def path() -> Path:
    """The file, in the XDG configuration directory."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "mqd" / "profiles.json"


def read() -> dict[str, Profile]:
    """The profiles by name. Raises CliError."""
    file = path()
    try:
        with open(file, "rb") as opened:
            profiles = msgspec.json.decode(opened.read(BYTES_MAX), type=dict[str, Profile])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CliError(f"{file}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CliError(f"{file} is not a valid profiles file: {error}; repair it, or move it away") from error
    return dict(sorted(profiles.items()))


def get(name: str) -> Profile:
    """Raises CliError."""
    profiles = read()
    if name not in profiles:
        existing = f"the profiles are {', '.join(profiles)}" if profiles else "there are none yet"
        raise CliError(f"there is no profile {name!r}; {existing}. mqd profile add creates one")
    return profiles[name]


@contextlib.contextmanager
def edit() -> Iterator[dict[str, Profile]]:
    """Yields the profiles, and writes them if the block ends without an error. A lock keeps
    other commands from changing them meanwhile. Raises CliError.
    """
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(file.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            profiles = read()
            yield profiles
            new = file.with_suffix(".new")
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
                opened.write(msgspec.json.format(msgspec.json.encode(dict(sorted(profiles.items()))), indent=1) + b"\n")
                opened.flush()
                os.fsync(opened.fileno())
            new.replace(file)
    except OSError as error:
        raise CliError(f"{error.filename or file}: {error.strerror}") from error
