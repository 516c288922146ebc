"""`mqd profile`: add, list, show, remove."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mqd.cli.common import CliError, emit_json, emit_table
from mqd.cli.profiles import store
from mqd.cli.profiles.store import Profile

_format = click.option(
    "--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True
)


@click.group(short_help="Names for clusters and their credentials.")
def command() -> None:
    """Names for clusters and their credentials: `mqd --profile NAME ...`, or MQD_PROFILE.

    A profile is an address and a client's properties file.
    """


def _complete(_ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    try:
        return [name for name in store.read() if name.startswith(incomplete)]
    except CliError:
        return []


def _checked_bootstrap(text: str) -> str:
    """Returns `text`. Raises click.UsageError unless it is HOST:PORT[,...]."""
    for broker in text.split(","):
        host, colon, port = broker.rpartition(":")
        if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
            raise click.UsageError(f"-b takes HOST:PORT[,...], not {broker!r}")
    return text


@command.command()
@click.argument("name", metavar="NAME")
@click.option("-b", "--bootstrap", required=True, metavar="HOST:PORT[,...]", help="Brokers of the cluster.")
@click.option(
    "--client-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Client's properties file: security.protocol, sasl.*, ssl.*. Each command reads the file again.",
)
@click.option("--replace", is_flag=True, help="Replace the profile of this name.")
def add(name: str, bootstrap: str, client_config: Path | None, replace: bool) -> None:
    """Give a cluster the name NAME."""
    if not store.NAME_PATTERN.fullmatch(name):
        raise click.UsageError(f"invalid profile name {name!r}: use at most 64 letters, digits, '.', '_' and '-'")
    profile = Profile(_checked_bootstrap(bootstrap), str(client_config.absolute()) if client_config else None)
    with store.edit() as profiles:
        if name in profiles and profiles[name] != profile and not replace:
            raise CliError(f"profile {name} exists already, for {profiles[name].bootstrap}; --replace replaces it")
        profiles[name] = profile
    click.echo(f"profile {name} now refers to {bootstrap}")


@command.command("list")
@_format
def list_(output_format: str) -> None:
    """List the profiles; * marks the profile that MQD_PROFILE names."""
    profiles = store.read()
    if output_format == "json":
        emit_json([{"name": name, **_as_json(profile)} for name, profile in profiles.items()])
        return
    current = os.environ.get("MQD_PROFILE")
    emit_table(
        ("", "NAME", "BOOTSTRAP", "CLIENT CONFIG"),
        [
            ("*" if name == current else "", name, profile.bootstrap, profile.client_config or "-")
            for name, profile in profiles.items()
        ],
    )


def _as_json(profile: Profile) -> dict[str, str | None]:
    return {"bootstrap": profile.bootstrap, "client_config": profile.client_config}


@command.command()
@click.argument("name", metavar="NAME", shell_complete=_complete)
@_format
def show(name: str, output_format: str) -> None:
    """Show the profile NAME as options to pass to other commands."""
    profile = store.get(name)
    if output_format == "json":
        emit_json(_as_json(profile))
        return
    click.echo(
        f"-b {profile.bootstrap}" + (f" --client-config {profile.client_config}" if profile.client_config else "")
    )


@command.command()
@click.argument("name", metavar="NAME", shell_complete=_complete)
def remove(name: str) -> None:
    """Remove the profile NAME; the client's properties file stays."""
    store.get(name)
    with store.edit() as profiles:
        profiles.pop(name, None)
    click.echo(f"removed profile {name}")
