"""Peers from Debian's packages, unpacked into a cache below .build: no root, nothing installed.
`apt-get download` and `dpkg -x` do the work.

The lists of the machine's own apt are used; where it has none (a fresh container), they are fetched
into the cache.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path

from perf.peers.maven import CACHE
from perf.peers.peer import Unavailable

APT_SECONDS = 300


def _run(command: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=APT_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{command[0]} did not get its packages within {APT_SECONDS} s") from None


def apt_reason(message: str) -> str:
    """The first error in apt's output, without the addresses in it."""
    for line in message.splitlines():
        if line.startswith("E: "):
            return " ".join(word for word in line[3:].split() if "://" not in word)[:200]
    return "apt gave no reason"


def _own_lists(place: Path, architecture: str | None = None) -> list[str]:
    """Options that keep apt's state in the cache, with lists fetched into it."""
    state = place.parent / f"apt-{architecture or 'own'}"
    for part in ("lists/partial", "archives/partial"):
        (state / part).mkdir(parents=True, exist_ok=True)
    options = ["-o", f"Dir::State::lists={state / 'lists'}", "-o", f"Dir::Cache={state}", "-o", "Debug::NoLocking=1"]
    if architecture is not None:  # a foreign architecture, which this machine need not have enabled
        foreign = (f"APT::Architecture={architecture}", f"APT::Architectures={architecture}")
        options += [word for option in (*foreign, "Dir::State::status=/dev/null") for word in ("-o", option)]
    _run(["apt-get", *options, "update"], place)
    return options


def unpack(packages: Sequence[str], architecture: str | None = None) -> Path:
    """A directory with the packages' files in it, of this machine's or another architecture (arm64).
    Raises Unavailable.
    """
    key = hashlib.sha256(" ".join([*packages, architecture or ""]).encode()).hexdigest()[:12]
    root = CACHE / f"{packages[0]}-{key}"
    if (root / "complete").exists():
        return root
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no {tool} here: it is taken from Debian's packages")
    archives = CACHE / f"{packages[0]}-{key}-archives"
    shutil.rmtree(archives, ignore_errors=True)
    archives.mkdir(parents=True)
    done = None if architecture else _run(["apt-get", "download", *packages], archives)
    if done is None or done.returncode:
        done = _run(["apt-get", *_own_lists(archives, architecture), "download", *packages], archives)
    if done.returncode:
        raise Unavailable(f"its packages cannot be obtained: {apt_reason(done.stderr)}")
    for archive in sorted(archives.glob("*.deb")):
        if (dpkg := _run(["dpkg", "-x", str(archive), str(root)], archives)).returncode:
            raise Unavailable(f"{archive.name} cannot be unpacked: {dpkg.stderr.strip()[:200]}")
    shutil.rmtree(archives)
    (root / "complete").touch()
    return root


def program(root: Path, *places: str) -> str:
    """The first of these files that exists. Raises Unavailable."""
    for place in places:
        if (root / place).exists():
            return str(root / place)
    raise Unavailable(f"its packages do not contain {places[0]}")


def library_path(root: Path) -> str:
    return ":".join(str(place) for place in sorted(root.glob("usr/lib/*-linux-gnu*")))


def packaged_on(root: Path, package: str) -> str:
    """The day of an unpacked package, as 2023-11-27: that of the newest entry in Debian's changelog; "":
    the package has none.
    """
    path = root / f"usr/share/doc/{package}/changelog.Debian.gz"
    if not path.exists():
        return ""
    changelog = gzip.decompress(path.read_bytes()).decode()
    signature = next(line for line in changelog.splitlines() if line.startswith(" -- "))
    return parsedate_to_datetime(signature.partition(">  ")[2]).date().isoformat()
