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


@command.command("local")
@click.option("--brokers", "count", type=click.IntRange(1, 9), default=3, show_default=True, help="How many.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="Where everything is kept.  [default: beside the broker's, with -cluster]")
@click.option("--port", type=click.IntRange(1, 65533), default=9092, show_default=True, help="Port for clients, on 127.0.0.1, 127.0.0.2, ...; the next two are used between brokers.")
@click.option("--workers", type=click.IntRange(1, 64), default=1, show_default=True, help="Worker processes of each broker.")
def local(count: int, data_dir: Path | None, port: int, workers: int) -> None:
    """Start a cluster on this machine, in the foreground, for trying things out.

    Each broker has an address and a data directory of its own, and is an ordinary one: stop, kill or restart any of them meanwhile. Ctrl-C stops all.
    """
    import shlex
    import signal

    from mqd.base.paths import default_data_dir
    from mqd.cli import local_cluster

    default = default_data_dir()
    brokers = local_cluster.members(data_dir or default.with_name(default.name + "-cluster"), count, port, workers)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with local_cluster.LocalCluster(brokers) as cluster:
        cluster.wait_ready()
        click.echo(local_cluster.guide(brokers))
        while (ended := cluster.next_end()) is not None:
            click.echo(f"broker {ended.node_id} has ended; to start it again: {shlex.join(['mqd', *ended.arguments()])}")
