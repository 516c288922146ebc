"""The generated files match their tables."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from mqd.protocol import generate, messages
from mqd.protocol.errors import ERRORS, ErrorCode
from mqd.protocol.schema import FAMILY_NAMES


@pytest.mark.parametrize("name", sorted(generate.FILES))
def test_a_generated_file_is_current(name: str) -> None:
    assert (generate.ROOT / name).read_text() == generate.FILES[name](), "run: python -m mqd.protocol.generate"


def test_every_code_has_its_name_in_both_languages() -> None:
    assert {int(code): code.name for code in ErrorCode} == {error.code: error.name for error in ERRORS.values()}
    native = re.findall(r"MQD_KAFKA_\w+ = (-?\d+)", generate.render_native_error_codes())
    assert sorted(map(int, native)) == sorted(ERRORS)
    assert len({generate.native_error_name(error.name) for error in ERRORS.values()}) == len(ERRORS)


def test_only_the_generated_header_numbers_kafkas_errors() -> None:
    others = [
        str(path.relative_to(generate.ROOT))
        for path in (generate.ROOT / "native").rglob("*.[ch]")
        if "build" not in path.parts
        and path.name != "kafka_errors.h"
        and re.search(r"^\s*MQD_KAFKA_\w+ = -?\d", path.read_text(), re.M)
    ]
    assert others == []


def test_a_type_checker_sees_each_family_and_no_other() -> None:
    folder = generate.ROOT / "mqd/protocol/messages"
    families = sorted(set(FAMILY_NAMES.values()))
    source = (folder / "__init__.py").read_text()
    assert re.findall(r"^    from mqd\.protocol\.messages\.(\w+) import \*$", source, re.M) == families
    assert sorted(path.stem for path in folder.glob("*.py")) == ["__init__", *families]


def test_every_class_belongs_to_its_message() -> None:
    for name in messages.__all__:
        cls = getattr(messages, name)
        message, root = messages.message_of(cls)
        assert (message.name, root) == (name, message.root)
        for struct in message.structs.values():
            assert messages.message_of(getattr(cls, struct.name)) == (message, struct)
            assert getattr(cls, struct.name).__struct_fields__ == tuple(field.name for field in struct.fields)


def test_other_classes_have_no_message() -> None:
    with pytest.raises(KeyError):
        messages.message_of(type("MetadataRequest", (), {}))


def test_only_requested_families_are_imported() -> None:
    code = (
        "import sys; from mqd.protocol.messages import MetadataRequest; "
        "print(*(name for name in sys.modules if name.startswith('mqd.protocol.messages.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["mqd.protocol.messages.cluster"]
