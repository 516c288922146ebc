"""`mqd cluster`: the hosts of a cluster, who controls it, and the secret that they share."""

import os
from pathlib import Path

import click

from mqd.cli.common import CliError


@click.group(short_help="Hosts, controllers and the key of a cluster.")
def command() -> None:
    """Hosts, controllers and the key of a cluster."""


@command.command("key")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def key(file: Path) -> None:
    """Make a cluster's key and write it to FILE, readable by you alone.

    Copy FILE to every host of the cluster and start each with cluster.key.file=FILE: hosts that do not have it are turned away.
    """
    from base64 import urlsafe_b64encode

    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise CliError(f"{file} exists already; a key that hosts use must not be replaced on one of them alone: choose another name") from error
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
    with open(fd, "wb") as out:
        out.write(urlsafe_b64encode(os.urandom(32)) + b"\n")
        out.flush()
        os.fsync(out.fileno())
    click.echo(f"{file}: copy it to every host of the cluster, and start each with --set cluster.key.file=FILE")
