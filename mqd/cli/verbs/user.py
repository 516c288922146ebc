"""`mqd user`: users that authenticate by a password (SCRAM, PLAIN): create, list, delete."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, options

if TYPE_CHECKING:
    from mqd.cluster.metadata.records import ScramCredential

_DESCRIBE, _ALTER = 50, 51
PASSWORD_BYTES = 20  # 160 bits: no attacker computes their way to it, so few iterations do
TIMEOUT_S = 30.0
_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Ask the controller of the broker on this host that has this data directory, as its user: needs no rights.",
)


@click.group(help="Create, list and delete users that authenticate by a password.")
def command() -> None:
    pass


def _password(read_stdin: bool) -> tuple[str, bool]:
    """(password, whether it was generated)."""
    import secrets

    if not read_stdin:
        return secrets.token_urlsafe(PASSWORD_BYTES), True
    line = sys.stdin.readline().rstrip("\r\n")
    if not line:
        raise CliError("there is no password on stdin; without --password-stdin one is generated", 2)
    return line, False


@command.command()
@options
@click.argument("name")
@click.option("--password-stdin", is_flag=True, help="Read the password from stdin; otherwise one is generated.")
@_DATA_DIR
def create(settings: Settings, name: str, password_stdin: bool, data_dir: Path | None) -> None:
    """Create NAME, or set its password. A generated password is printed once."""
    from mqd.security import principal, scram

    try:
        who = principal.user(name)
    except ValueError as error:
        raise CliError(str(error), 2) from None
    password, generated = _password(password_stdin)
    iterations = scram.ITERATIONS_MIN if generated else scram.ITERATIONS_MAX
    _alter(settings, name, password, iterations, data_dir)
    if settings.json:
        emit_json({"principal": who, **({"password": password} if generated else {})})
    else:
        click.echo(f"{who}{f', password {password}' if generated else ': password set'}")


def _alter(settings: Settings, name: str, password: str, iterations: int, data_dir: Path | None) -> None:
    import secrets

    from mqd.cli.kafka_request import Broker, check
    from mqd.cluster.metadata.records import ScramCredential
    from mqd.protocol.messages import AlterUserScramCredentialsRequest
    from mqd.security import scram

    salts = {mechanism: secrets.token_bytes(scram.SALT_BYTES) for mechanism in scram.MECHANISMS}
    salted = {
        mechanism: scram.salted_password(mechanism, password.encode(), salt, iterations)
        for mechanism, salt in salts.items()
    }
    if data_dir is not None:
        made = {
            mechanism: scram.verifier_of(mechanism, salted[mechanism], salt, iterations)
            for mechanism, salt in salts.items()
        }
        credentials = [
            ScramCredential(name, scram.NUMBERS[mechanism], one.salt, iterations, one.stored_key, one.server_key)
            for mechanism, one in made.items()
        ]
        _locally(data_dir, [], credentials)
        return
    request = AlterUserScramCredentialsRequest(
        upsertions=[
            AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
                name=name,
                mechanism=scram.NUMBERS[mechanism],
                iterations=iterations,
                salt=salts[mechanism],
                salted_password=salted[mechanism],
            )
            for mechanism in salts
        ]
    )
    with Broker(settings.bootstrap) as broker:
        for result in broker.request(_ALTER, request).results:
            check(f"user {name}", result.error_code, result.error_message)


def _locally(data_dir: Path, removals: list[tuple[str, int]], credentials: "list[ScramCredential]") -> None:
    from mqd.base.paths import layout
    from mqd.cli import local_controller
    from mqd.cli.kafka_request import check
    from mqd.cluster.host import messages
    from mqd.security.scram import new_decoy_secret

    change = messages.AlterScramCredentials(removals, credentials, new_decoy_secret())
    answer = local_controller.change(layout(data_dir).controller_socket, change, TIMEOUT_S)
    check("users", answer.error, answer.message)
    for one in answer.users:
        check(f"user {one.user}", one.error, one.message)


def _found(settings: Settings) -> dict[str, list[tuple[int, int]]]:
    """By user: (mechanism, iterations)."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeUserScramCredentialsRequest

    with Broker(settings.bootstrap) as broker:
        answer = broker.request(_DESCRIBE, DescribeUserScramCredentialsRequest(users=None))
    check("users", answer.error_code, answer.error_message)
    return {one.user: [(info.mechanism, info.iterations) for info in one.credential_infos] for one in answer.results}


@command.command("list")
@options
def list_(settings: Settings) -> None:
    """Show the users that have a password."""
    from mqd.security import scram

    words = {number: mechanism for mechanism, number in scram.NUMBERS.items()}
    rows = [
        (user, words.get(mechanism, str(mechanism)), str(iterations))
        for user, known in sorted(_found(settings).items())
        for mechanism, iterations in known
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
    """Remove NAME's password. Its connections end when they authenticate again."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import AlterUserScramCredentialsRequest

    known = _found(settings).get(name)
    if known is None:
        raise CliError(f"there is no user {name}; mqd user list shows them")
    request = AlterUserScramCredentialsRequest(
        deletions=[
            AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=name, mechanism=mechanism)
            for mechanism, _ in known
        ]
    )
    with Broker(settings.bootstrap) as broker:
        for result in broker.request(_ALTER, request).results:
            check(f"user {name}", result.error_code, result.error_message)
    if settings.json:
        emit_json({"user": name, "deleted": True})
    else:
        click.echo(
            f"user {name} is deleted; what access control lists say of it stays, and so do open connections until they"
            " must authenticate again"
        )
