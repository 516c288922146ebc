"""`mqd user`: users that authenticate with a password (SCRAM, PLAIN): create, list, delete."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, options

if TYPE_CHECKING:
    from mqd.cli.access import SaltedPassword
    from mqd.cluster.metadata.records import ScramCredential

TIMEOUT_S = 30.0
_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Send the change directly to the controller of the broker with this data directory. Needs no ACLs, but"
    " must run as the Unix user of that broker.",
)


@click.group(help="Create, list and delete users that authenticate with a password.")
def command() -> None:
    pass


def _password(read_stdin: bool) -> tuple[str, bool]:
    """Returns the password, and whether it was generated."""
    from mqd.cli import access

    if not read_stdin:
        return access.generated_password(), True
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise CliError("there is no password on stdin; without --password-stdin one is generated", 2)
    return line, False


@command.command()
@options
@click.argument("name")
@click.option("--password-stdin", is_flag=True, help="Read the password from stdin; otherwise one is generated.")
@click.option(
    "--replace",
    is_flag=True,
    help="Set a new password if the user exists; the old one stops working. Implied by --data-dir.",
)
@_DATA_DIR
def create(settings: Settings, name: str, password_stdin: bool, replace: bool, data_dir: Path | None) -> None:
    """Create NAME, or with --replace set its password. A generated password is printed once."""
    from mqd.cli import access
    from mqd.security import principal

    try:
        principal_name = principal.user(name)
    except ValueError as error:
        raise CliError(str(error), 2) from None
    if not replace and data_dir is None and name in access.users(settings):
        raise CliError(f"the user {name} exists; --replace gives it a new password, and the old one stops working")
    password, generated = _password(password_stdin)
    salted = access.SaltedPassword(password, generated)
    if data_dir is not None:
        _change_through_controller(data_dir, [], _credentials(name, salted))
    else:
        access.set_password(settings, name, salted)
    if settings.json:
        emit_json({"principal": principal_name, **({"password": password} if generated else {})})
    else:
        click.echo(f"{principal_name}{f', password {password}' if generated else ': password set'}")


@command.command()
@click.option("--data-dir", type=click.Path(path_type=Path), help="The broker's data directory.  [env: MQD_DATA_DIR]")
def admin(data_dir: Path | None) -> None:
    """Create the user `admin` of a new secured broker that your own supervisord has started.

    `mqd up --secure` does this itself. The password is in DATA_DIR/secure/admin.properties. Run
    this command once in a cluster, on its first host.
    """
    from mqd.base.paths import default_data_dir, layout
    from mqd.cli import secure

    places = layout(data_dir or default_data_dir())
    files = secure.files(places.data_dir)
    if not secure.is_secured(places.data_dir):
        raise CliError(f"{places.data_dir} is not the data directory of a broker that mqd up --secure prepared")
    admin_exists = not files.pending.exists()
    secure.make_admin(places)
    click.echo(
        f"User:{secure.ADMIN} {'exists' if admin_exists else 'created'}; its client settings are in {files.admin}"
    )


def _credentials(name: str, salted: "SaltedPassword") -> "list[ScramCredential]":
    from mqd.cluster.metadata.records import ScramCredential
    from mqd.security import scram

    verifiers = {
        mechanism: scram.verifier_of(mechanism, salted.keys[mechanism], salt, salted.iterations)
        for mechanism, salt in salted.salts.items()
    }
    return [
        ScramCredential(
            name,
            scram.MECHANISM_NUMBERS[mechanism],
            verifier.salt,
            salted.iterations,
            verifier.stored_key,
            verifier.server_key,
        )
        for mechanism, verifier in verifiers.items()
    ]


def _change_through_controller(
    data_dir: Path, removals: list[tuple[str, int]], credentials: "list[ScramCredential]"
) -> None:
    from mqd.base.paths import layout
    from mqd.cli import local_controller
    from mqd.cli.kafka_request import check
    from mqd.cluster.host import messages
    from mqd.security.scram import new_decoy_secret

    change = messages.AlterScramCredentials(removals, credentials, new_decoy_secret())
    response = local_controller.change(layout(data_dir).controller_socket, change, TIMEOUT_S)
    check("users", response.error, response.message)
    for result in response.users:
        check(f"user {result.user}", result.error, result.message)


@command.command("list")
@options
def list_(settings: Settings) -> None:
    """Show the users that have a password."""
    from mqd.cli import access

    rows = [
        (user, access.mechanism_name(mechanism), str(iterations))
        for user, credentials in sorted(access.users(settings).items())
        for mechanism, iterations in credentials
    ]
    if settings.json:
        emit_json([dict(zip(("user", "mechanism", "iterations"), row, strict=True)) for row in rows])
    elif rows:
        emit_table(("USER", "MECHANISM", "ITERATIONS"), rows)
    else:
        click.echo("there is no user")


@command.command()
@options
@click.argument("name")
def delete(settings: Settings, name: str) -> None:
    """Remove NAME's password. Connections that use it end at their next authentication."""
    from mqd.cli import access

    access.delete_user(settings, name)
    if settings.json:
        emit_json({"user": name, "deleted": True})
    else:
        click.echo(
            f"user {name} is deleted; ACLs that name it are not, and its open connections last until they must"
            " authenticate again"
        )
