"""`mqd cluster key`: the secret by which the hosts of a cluster prove that they belong together."""

from pathlib import Path

import click

from mqd.cli.common import CliError


class _Key(click.Group):
    """`mqd cluster key FILE` makes a key; the other words are commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["make", *args])


@click.group("key", cls=_Key, short_help="The key by which hosts prove that they belong together.")
def key() -> None:
    """The key by which the hosts of a cluster prove that they belong together."""


@key.command("make")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def key_make(file: Path) -> None:
    """Make a cluster's key and write it to FILE, readable by you alone.

    Copy FILE to every host of the cluster and start each with cluster.key.file=FILE: hosts that do
    not have it are turned away. `mqd cluster key FILE` does the same.
    """
    from mqd.base import cluster_key

    try:
        cluster_key.make(file)
    except FileExistsError as error:
        raise CliError(
            f"{file} exists already; a key that hosts use must not be replaced on one of them alone: choose another"
            " name, or change it step by step with `mqd cluster key rotate`"
        ) from error
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
    click.echo(f"{file}: copy it to every host of the cluster, and start each with --set cluster.key.file=FILE")


@key.command("rotate")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def key_rotate(file: Path) -> None:
    """Take the next of three steps from the key in FILE to a new one, while the cluster runs.

    \b
    1  hosts accept a new key beside the old one
    2  hosts prove themselves by the new key, and still accept the old one
    3  the old key is gone

    Run it three times, on one host. After each step copy FILE to all hosts, replacing theirs; they
    read it within seconds (each logs "cluster key loaded again"). Take the next step when all have
    it: a host that lacks one is turned away until it has it.
    """
    from mqd.base import cluster_key

    try:
        step = cluster_key.rotate(file)
    except (OSError, ValueError) as error:
        raise CliError(f"{file} cannot be changed: {error}") from error
    now = {
        1: "a new key is accepted beside the old one",
        2: "hosts prove themselves by the new key; the old one is still accepted",
        3: "the old key is gone",
    }[step]
    click.echo(f"step {step} of 3: {now}")
    then = "the rotation is done" if step == 3 else f"run this again for step {step + 1}"
    click.echo(f"copy {file} to every host of the cluster; when all have loaded it, {then}")
