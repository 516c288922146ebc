"""The generated files are those that the table gives."""

from __future__ import annotations

import re

import pytest

from mqd.protocol import generate
from mqd.protocol.errors import ERRORS, ErrorCode


@pytest.mark.parametrize("name", sorted(generate.FILES))
def test_a_generated_file_is_current(name: str) -> None:
    assert (generate.ROOT / name).read_text() == generate.FILES[name](), "run: python -m mqd.protocol.generate"


def test_every_code_has_its_name_in_both_languages() -> None:
    assert {int(code): code.name for code in ErrorCode} == {error.code: error.name for error in ERRORS.values()}
    native = re.findall(r"MQD_KAFKA_\w+ = (-?\d+)", generate.native_codes())
    assert sorted(map(int, native)) == sorted(ERRORS)
    assert len({generate.native_name(error.name) for error in ERRORS.values()}) == len(ERRORS)


def test_only_the_generated_header_numbers_kafkas_errors() -> None:
    others = [
        str(path.relative_to(generate.ROOT))
        for path in (generate.ROOT / "native").rglob("*.[ch]")
        if "build" not in path.parts
        and path.name != "kafka_errors.h"
        and re.search(r"^\s*MQD_KAFKA_\w+ = -?\d", path.read_text(), re.M)
    ]
    assert others == []
