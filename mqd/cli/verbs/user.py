"""`mqd user`: users and their passwords (SCRAM), kept in the cluster's metadata."""

import secrets
from pathlib import Path

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, options

_DESCRIBE, _ALTER = 50, 51
_ALL = ("SCRAM-SHA-256", "SCRAM-SHA-512")
# A generated password has 190 bits: more iterations would cost clients, not those who guess.
_GENERATED_ITERATIONS, _TYPED_ITERATIONS = 4096, 16384
_NOT_FOUND = 91  # RESOURCE_NOT_FOUND


@click.group(help="List, create and delete users.")
def command() -> None:
    pass


@command.command("list")
@options
def list_(settings: Settings) -> None:
    """Show the users and the mechanisms that know their password."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeUserScramCredentialsRequest
    from mqd.security.scram import NUMBERS

    with Broker(settings.bootstrap) as broker:
        answer = broker.ask(_DESCRIBE, DescribeUserScramCredentialsRequest(users=None))
    check("users", answer.error_code, answer.error_message)
    names = {number: name for name, number in NUMBERS.items()}
    found = {
        result.user: {names.get(one.mechanism, str(one.mechanism)): one.iterations for one in result.credential_infos}
        for result in sorted(answer.results, key=lambda result: result.user)
    }
    if settings.json:
        emit_json([{"user": user, "mechanisms": mechanisms} for user, mechanisms in found.items()])
    elif found:
        rows = [
            (user, ", ".join(f"{name} ({count} iterations)" for name, count in sorted(mechanisms.items())))
            for user, mechanisms in found.items()
        ]
        emit_table(("USER", "MECHANISMS"), rows)
    else:
        click.echo("there are no users")


@command.command("create")
@options
@click.argument("user")
@click.option("--password-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Its password.")
@click.option("--generate", is_flag=True, help="Make a password and print it.")
@click.option(
    "--mechanism", "mechanisms", type=click.Choice(_ALL), multiple=True, help="Only this one.  [default: both]"
)
def create(
    settings: Settings, user: str, password_file: Path | None, generate: bool, mechanisms: tuple[str, ...]
) -> None:
    """Create a user, or give it another password. The password is asked for unless it is in a file
    or generated; it does not leave this process.
    """
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import AlterUserScramCredentialsRequest
    from mqd.security.scram import NUMBERS, SALT_BYTES, salted_password

    password, iterations = _password(password_file, generate)
    upsertions = []
    for mechanism in mechanisms or _ALL:
        salt = secrets.token_bytes(SALT_BYTES)
        upsertions.append(
            AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
                name=user,
                mechanism=NUMBERS[mechanism],
                iterations=iterations,
                salt=salt,
                salted_password=salted_password(mechanism, password.encode(), salt, iterations),
            )
        )
    with Broker(settings.bootstrap) as broker:
        answer = broker.ask(_ALTER, AlterUserScramCredentialsRequest(upsertions=upsertions))
    for result in answer.results:
        check(f"user {user}", result.error_code, result.error_message)
    if settings.json:
        emit_json({"user": user, **({"password": password} if generate else {})})
    else:
        click.echo(f"user {user}" + (f", password {password}" if generate else ""))


def _password(file: Path | None, generate: bool) -> tuple[str, int]:
    """The password and the iterations that it needs. Raises click.UsageError, CliError."""
    if file is not None and generate:
        raise click.UsageError("--password-file and --generate exclude each other")
    if generate:
        return secrets.token_urlsafe(24), _GENERATED_ITERATIONS
    password = (
        file.read_text().rstrip("\n")
        if file is not None
        else click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    )
    if not password:
        raise CliError("the password is empty")
    return password, _TYPED_ITERATIONS


@command.command("delete")
@options
@click.argument("users", nargs=-1, required=True)
def delete(settings: Settings, users: tuple[str, ...]) -> None:
    """Delete users. Rules for them stay; their open connections last until they must authenticate
    again.
    """
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import AlterUserScramCredentialsRequest, DescribeUserScramCredentialsRequest

    asked = DescribeUserScramCredentialsRequest(
        users=[DescribeUserScramCredentialsRequest.UserName(name=user) for user in dict.fromkeys(users)]
    )
    with Broker(settings.bootstrap) as broker:
        found = broker.ask(_DESCRIBE, asked)
        check("users", found.error_code, found.error_message)
        for result in found.results:
            check(f"user {result.user}", result.error_code, result.error_message)
        deletions = [
            AlterUserScramCredentialsRequest.ScramCredentialDeletion(name=result.user, mechanism=one.mechanism)
            for result in found.results
            for one in result.credential_infos
        ]
        answer = broker.ask(_ALTER, AlterUserScramCredentialsRequest(deletions=deletions))
    for result in answer.results:
        if result.error_code != _NOT_FOUND:  # deleted by another in the meantime
            check(f"user {result.user}", result.error_code, result.error_message)
    if settings.json:
        emit_json([{"user": user, "deleted": True} for user in dict.fromkeys(users)])
    else:
        click.echo("deleted " + ", ".join(dict.fromkeys(users)))
