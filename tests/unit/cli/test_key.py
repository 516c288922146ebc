"""`mqd key`."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from mqd.cli.main import cli
from mqd.client.encryption.keys import KeyFile


def _run(*arguments: str) -> str:
    done = CliRunner().invoke(cli, ["key", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def _ids(file: Path) -> list[str]:
    return [one["id"] for one in json.loads(_run("list", str(file), "--format", "json"))]


def test_a_rotation_in_steps(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert "seals from now on" in _run("create", str(file), "--id", "one")
    assert file.stat().st_mode & 0o777 == 0o600
    data_key = bytes(32)
    key_id, wrapped = KeyFile(file).wrap(data_key)
    assert key_id == "one"
    assert "can open values; it seals them after" in _run("create", str(file), "--id", "two")
    assert _ids(file) == ["one", "two"] and KeyFile(file).wrap(data_key)[0] == "one"
    file.chmod(0o640)
    _run("rotate", str(file), "two")
    assert _ids(file) == ["two", "one"] and file.stat().st_mode & 0o777 == 0o640
    _run("rotate", str(file))
    assert _ids(file)[1:] == ["two", "one"]
    provider = KeyFile(file)
    assert provider.wrap(data_key)[0] == _ids(file)[0] and provider.unwrap("one", wrapped) == data_key
    shown = _run("list", str(file)).splitlines()
    assert shown[1].endswith("seals and opens") and shown[2].split() == ["two", "opens"]
    assert list(tmp_path.iterdir()) == [file]


def test_invalid_commands_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    _run("create", str(file), "--id", "one")
    before = file.read_text()
    for arguments, message in (
        (("create", str(file), "--id", "one"), "already has a key 'one'"),
        (("create", str(file), "--id", "#x"), "'#x' is not a key id"),
        (("create", str(file), "--id", "a,b"), "is not a key id"),
        (("rotate", str(file), "three"), "has no key 'three'; it has one"),
    ):
        done = CliRunner().invoke(cli, ["key", *arguments])
        assert done.exit_code == 1 and message in done.output, done.output
    assert file.read_text() == before
    assert CliRunner().invoke(cli, ["key", "list", str(tmp_path / "none")]).exit_code != 0
