"""`mqd cluster key` and `mqd cluster invite`: admit a host to a cluster."""

from pathlib import Path

import click
import msgspec

from mqd.cli.common import CliError


class _KeyGroup(click.Group):
    """`mqd cluster key FILE` is short for `mqd cluster key make FILE`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["make", *args])


@click.group("key", cls=_KeyGroup, short_help="The key with which hosts authenticate to each other.")
def key() -> None:
    """The key with which the hosts of a cluster authenticate to each other."""


@key.command("make")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def key_make(file: Path) -> None:
    """Make a cluster's key and write it to FILE, readable by you alone.

    Copy FILE to every host of the cluster and start each with cluster.key.file=FILE: hosts that do
    not have it are refused. `mqd cluster key FILE` does the same.
    """
    from mqd.base import cluster_key

    try:
        cluster_key.make(file)
    except FileExistsError as error:
        raise CliError(
            f"{file} exists already; a key that hosts use must not be replaced on only one of them: choose another"
            " name, or change it step by step with `mqd cluster key rotate`"
        ) from error
    except OSError as error:
        raise CliError(f"cannot write {file}: {error.strerror}") from error
    click.echo(f"{file}: copy it to every host of the cluster, and start each with --set cluster.key.file=FILE")


@key.command("rotate")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def key_rotate(file: Path) -> None:
    """Take the next of three steps that replace the key in FILE while the cluster runs.

    \b
    1  hosts accept a new key in addition to the old one
    2  hosts authenticate with the new key, and still accept the old one
    3  the old key is removed

    Run it three times, on one host. After each step copy FILE to all hosts, replacing theirs; they
    read it within seconds (each logs "cluster key reloaded"). Take the next step when all have
    it: a host that is two steps behind is refused until it has the file.
    """
    from mqd.base import cluster_key

    try:
        step = cluster_key.rotate(file)
    except (OSError, ValueError) as error:
        raise CliError(f"{file} cannot be changed: {error}") from error
    effect = {
        1: "a new key is accepted in addition to the old one",
        2: "hosts authenticate with the new key; the old one is still accepted",
        3: "the old key is removed",
    }[step]
    click.echo(f"step {step} of 3: {effect}")
    next_step = "the rotation is done" if step == 3 else f"run this again for step {step + 1}"
    click.echo(f"copy {file} to every host of the cluster; when all have loaded it, {next_step}")


class _RunningBroker(msgspec.Struct):
    """The relevant part of run/broker.json."""

    node_id: int
    seeds: list[str] = []
    controller_listener: tuple[str, int] | None = None  # as announced to other hosts


@click.command("invite")
@click.argument("node_id", type=click.IntRange(0))
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Data directory of the broker on this host.  [env: MQD_DATA_DIR]",
)
@click.option(
    "--listen", metavar="HOST:PORT", help="Address on this host at which the new host fetches its certificates."
)
@click.option(
    "--minutes", type=click.IntRange(1, 24 * 60), default=15, show_default=True, help="How long to wait for the host."
)
def invite(node_id: int, data_dir: Path | None, listen: str | None, minutes: int) -> int:
    """Admit a new host, with the id NODE_ID, to a cluster that `mqd up --secure` runs.

    Prints a token and waits until the new host has used it: `mqd up --join TOKEN` there fetches the
    CA certificate, certificates of its own, the cluster's key and the client settings of the user
    admin. The token works once; Ctrl-C revokes it. Run this on a host that has
    DATA_DIR/secure/ca.key, while its broker runs.
    """
    from mqd.base import cluster_config
    from mqd.base.paths import default_data_dir, layout
    from mqd.cli import secure
    from mqd.cli.joining import Invitation

    places = layout(data_dir or default_data_dir())
    try:
        running = msgspec.json.decode(places.broker_json.read_bytes(), type=_RunningBroker)
    except (OSError, msgspec.MsgspecError) as error:
        raise CliError(
            f"no broker is running in {places.data_dir}: {error}; start it with `mqd up --secure`"
        ) from error
    if running.controller_listener is None:
        raise CliError(
            'this broker does not listen for other hosts; "One host grows to three" in docs/operations.md shows how to'
            " restart it"
        )
    if node_id == running.node_id:
        raise CliError(f"{node_id} is the id of this host; choose another id for the new host")
    seeds = {*running.seeds, cluster_config.format_address(*running.controller_listener)}
    try:
        host, port = cluster_config.parse_address(listen) if listen else (running.controller_listener[0], 0)
    except ValueError as error:
        raise CliError(f"--listen: {error}") from error
    invitation = Invitation(
        secure.files(places.data_dir),
        node_id,
        ",".join(sorted(seeds)),
        (host, port),
        minutes * 60.0,
        lambda line: click.echo(line, err=True),
    )
    click.echo(f"on the new host, within {minutes} minutes:", err=True)
    click.echo(f"mqd up --join {invitation.token}")
    if not invitation.run():
        raise CliError("the token has expired; no host has used it")
    return 0
