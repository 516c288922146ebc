"""Includes of native/ only go down: a folder knows the folders below it and no other. Calls upward
go through function pointers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
ROOMS = (
    "base",
    "shm",
    "io",
    "tls",
    "codec",
    "wire",
    "replica",
    "share",
    "log",
    "server",
    "client",
)  # each may include those before it
APART = {("client", "server")}  # the client library never knows the broker's side
FILES_MAX = 30  # of one folder


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((NATIVE / room).rglob("*.[ch]"))]


def room_of(path: Path) -> str:
    return path.relative_to(NATIVE).parts[0]


def includes(text: str) -> Iterator[str]:
    yield from re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)


def climbs(room: str, text: str) -> list[str]:
    """The includes of a file in `room` that it may not have."""
    found = []
    for name in includes(text):
        to = name.split("/")[0]
        if name == "native.h":  # plain declarations for Python, below every folder
            continue
        if to not in ROOMS or ROOMS.index(to) > ROOMS.index(room) or (room, to) in APART:
            found.append(name)
    return found


def test_all_folders_are_listed() -> None:
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir() and path.name != "build"}
    assert folders - {"tests", "examples", "__pycache__"} == set(ROOMS)
    assert {path.name for path in NATIVE.glob("*.[ch]")} == {"native.h"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(NATIVE)))
def test_includes_go_down(path: Path) -> None:
    text = path.read_text()
    assert climbs(room_of(path), text) == []
    assert [name for name in includes(text) if not (NATIVE / name).is_file()] == [], (
        "includes name the file from native/ on"
    )


def test_an_include_that_climbs_is_found() -> None:
    assert climbs("wire", '#include "log/segment.h"\n#include "base/error.h"') == ["log/segment.h"]
    assert climbs("client", '#include "server/reactor.h"') == ["server/reactor.h"]
    assert climbs("log", '#include "segment.h"') == ["segment.h"]


def test_no_folder_is_crowded() -> None:
    folders = [path for room in ROOMS for path in (NATIVE / room, *(NATIVE / room).rglob("*")) if path.is_dir()]
    assert {
        str(folder): count
        for folder in folders
        if (count := sum(path.is_file() for path in folder.iterdir())) > FILES_MAX
    } == {}
