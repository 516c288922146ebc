"""Python's copies of enums have the members of the C core's."""

from __future__ import annotations

from enum import IntEnum
from os.path import commonprefix

import pytest

from mqd.native import batches, client, compacting, control, core, links, reactor, reader, tls

ENUMS = [
    value
    for module in (batches, client, compacting, control, links, reactor, reader, tls)
    for value in vars(module).values()
    if isinstance(value, type) and issubclass(value, IntEnum) and value.__module__ == module.__name__
]


def test_the_enums_are_found() -> None:
    assert len(ENUMS) >= 14


@pytest.mark.parametrize("cls", ENUMS, ids=lambda cls: cls.__name__)
def test_an_enum_has_every_member_of_its_c_enum(cls: type[IntEnum]) -> None:
    name = (cls.__doc__ or "").removeprefix("enum ").rstrip(".")
    ours = {member.name: int(member) for member in cls}
    theirs = {key: value for key, value in core.enumeration(name, "").items() if not key.endswith("_COUNT")}
    assert sorted(theirs.values()) == sorted(ours.values())
    prefix = commonprefix([theirs_name.removesuffix(ours_name) for theirs_name, ours_name in zip(theirs, ours)])
    assert {key.removeprefix(prefix): value for key, value in theirs.items()} == ours
