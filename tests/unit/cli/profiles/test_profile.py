"""`mqd profile`, and the effect of --profile on a command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from mqd.cli import main
from mqd.cli.common import CliError, Settings, options
from mqd.cli.main import cli
from mqd.cli.profiles import store


@click.command()
@options
def seen(settings: Settings) -> None:
    click.echo(f"{settings.bootstrap} {os.environ.get('MQD_CLIENT_CONFIG', '')}")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new user, and a command `cluster` that only prints its connection settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("MQD_BOOTSTRAP", "MQD_CLIENT_CONFIG", "MQD_PROFILE"):
        monkeypatch.setenv(name, "")  # so that changes by a command are undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(main.LazyGroup, "get_command", _get_command)
    return tmp_path


_real_command = main.LazyGroup.get_command


def _get_command(self: main.LazyGroup, ctx: click.Context, name: str) -> click.Command | None:
    return seen if name == "cluster" else _real_command(self, ctx, name)


def call(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words), standalone_mode=False)


def said(*words: str) -> str:
    done = call(*words)
    assert done.exception is None, done.exception
    return done.output.strip()


def test_add_list_show_remove(home: Path) -> None:
    config = home / "admin.properties"
    config.write_text("security.protocol=SSL\n")
    said("profile", "add", "production", "-b", "a:9092,b:9092", "--client-config", str(config))
    said("profile", "add", "test", "-b", "[::1]:9092")
    assert json.loads(said("profile", "list", "--format", "json")) == [
        {"name": "production", "bootstrap": "a:9092,b:9092", "client_config": str(config)},
        {"name": "test", "bootstrap": "[::1]:9092", "client_config": None},
    ]
    assert said("profile", "show", "production") == f"-b a:9092,b:9092 --client-config {config}"
    assert [line.split() for line in said("profile", "list").splitlines()[1:]] == [
        ["production", "a:9092,b:9092", str(config)],
        ["test", "[::1]:9092", "-"],
    ]
    said("profile", "remove", "test")
    assert list(store.read()) == ["production"]
    assert store.path().stat().st_mode & 0o777 == 0o600
    assert config.exists()


def test_a_command_uses_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, other = home / "admin.properties", home / "other.properties"
    config.write_text("")
    other.write_text("")
    said("profile", "add", "production", "-b", "a:9092", "--client-config", str(config))
    said("profile", "add", "test", "-b", "t:9092")
    assert said("--profile", "production", "cluster") == f"a:9092 {config}"
    assert said("cluster", "--profile", "production") == f"a:9092 {config}"
    assert said("--profile", "production", "cluster", "--profile", "test") == "t:9092"
    # options given explicitly take precedence
    assert said("--profile", "production", "cluster", "-b", "x:1") == f"x:1 {config}"
    assert said("cluster", "--client-config", str(other), "--profile", "production") == f"a:9092 {other}"
    # a profile replaces both variables: no credentials go to another cluster
    monkeypatch.setenv("MQD_CLIENT_CONFIG", str(other))
    monkeypatch.setenv("MQD_BOOTSTRAP", "env:1")
    assert said("--profile", "test", "cluster") == "t:9092"


def test_the_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said("profile", "add", "test", "-b", "t:9092")
    said("profile", "add", "production", "-b", "a:9092")
    monkeypatch.setenv("MQD_PROFILE", "test")
    assert said("cluster") == "t:9092"
    assert said("cluster", "--profile", "production") == "a:9092"
    assert said("profile", "list").splitlines()[2].split() == ["*", "test", "t:9092", "-"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "nowhere", "cluster"], "there is no profile 'nowhere'; the profiles are test"),
        (["profile", "show", "nowhere"], "there is no profile 'nowhere'"),
        (["profile", "remove", "nowhere"], "there is no profile 'nowhere'"),
        (["profile", "add", "test", "-b", "other:9092"], "--replace replaces it"),
        (["profile", "add", "../x", "-b", "other:9092"], "invalid profile name '../x': use at most 64 letters"),
        (["profile", "add", "x", "-b", "other"], "-b takes HOST:PORT"),
        (["profile", "add", "x", "-b", "other:99999"], "-b takes HOST:PORT"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    said("profile", "add", "test", "-b", "t:9092")
    done = call(*words)
    assert isinstance(done.exception, click.ClickException) and message in str(done.exception.format_message())
    assert store.read() == {"test": store.Profile("t:9092")}


def test_a_profile_whose_file_is_gone(home: Path) -> None:
    config = home / "admin.properties"
    config.write_text("")
    said("profile", "add", "test", "-b", "t:9092", "--client-config", str(config))
    config.unlink()
    done = call("--profile", "test", "cluster")
    assert isinstance(done.exception, CliError) and "does not exist; use mqd profile add --replace" in str(
        done.exception
    )
    said("profile", "add", "test", "-b", "t:9092", "--replace")
    assert said("--profile", "test", "cluster") == "t:9092"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": {"bootstrap": 3}}', '{"a": {"bootstrap": "b:1", "x": 1}}']
)
def test_a_damaged_file_is_named_and_kept(text: str) -> None:
    store.path().parent.mkdir(parents=True)
    store.path().write_text(text)
    for words in (["profile", "list"], ["profile", "add", "x", "-b", "t:9092"]):
        done = call(*words)
        assert isinstance(done.exception, CliError) and "is not a valid profiles file" in str(done.exception)
    assert store.path().read_text() == text
