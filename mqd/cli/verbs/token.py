"""`mqd token`: delegation tokens (KIP-48), which users give to programs instead of a password."""

import base64
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, options
from mqd.cli.verbs.client_config import FORMATS
from mqd.cli.verbs.txn import Duration

if TYPE_CHECKING:
    from mqd.protocol.messages import CreateDelegationTokenResponse

_CREATE, _RENEW, _EXPIRE, _DESCRIBE = 38, 39, 40, 41


@click.group(help="Create, list, renew and expire delegation tokens.")
def command() -> None:
    pass


def _user(word: str) -> tuple[str, str]:
    """(type, name) of TYPE:NAME; `alice` stands for User:alice."""
    kind, colon, name = word.partition(":")
    return (kind, name) if colon else ("User", word)


def _time_text(timestamp_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp_ms / 1000))


@command.command()
@options
@click.option(
    "--owner", help="The user that the token represents; you need CREATE_TOKENS on that user.  [default: yourself]"
)
@click.option("--renewer", "renewers", multiple=True, help="A user that may also renew and expire the token.")
@click.option(
    "--max-lifetime",
    type=Duration(),
    help="The token ends after this time, such as 12h or 7d, however often it is renewed.",
)
@click.option(
    "--format",
    "file_format",
    type=click.Choice(list(FORMATS)),
    default="librdkafka",
    show_default=True,
    help="Format of the file that --out writes.",
)
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write a client's settings here.")
def create(
    settings: Settings,
    owner: str | None,
    renewers: tuple[str, ...],
    max_lifetime: int | None,
    file_format: str,
    out: Path | None,
) -> None:
    """Create a token. Its password is printed, or written with the other settings of a client."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import CreateDelegationTokenRequest

    request = CreateDelegationTokenRequest(
        renewers=[
            CreateDelegationTokenRequest.CreatableRenewers(principal_type=kind, principal_name=name)
            for kind, name in map(_user, renewers)
        ],
        max_lifetime_ms=-1 if max_lifetime is None else max_lifetime,
    )
    if owner is not None:
        request.owner_principal_type, request.owner_principal_name = _user(owner)
    with Broker(settings.bootstrap) as broker:
        response = broker.request(_CREATE, request)
    check("token", response.error_code, None)
    password = base64.b64encode(response.hmac).decode()
    if out is not None:
        _save(settings, file_format, out, response, password)
    shown = {
        "id": response.token_id,
        "owner": f"{response.principal_type}:{response.principal_name}",
        **({} if out is not None else {"password": password}),
        "expires_ms": response.expiry_timestamp_ms,
        "max_ms": response.max_timestamp_ms,
    }
    if settings.json:
        emit_json(shown)
        return
    click.echo(f"token {response.token_id} of {shown['owner']}, until {_time_text(response.expiry_timestamp_ms)}")
    click.echo(f"password {password}" if out is None else f"{out} has the settings of a client that uses the token")


def _save(
    settings: Settings, file_format: str, out: Path, response: "CreateDelegationTokenResponse", password: str
) -> None:
    from mqd.cli import client_security
    from mqd.cli.verbs import client_config
    from mqd.security import scram
    from mqd.security.client import TOKEN_AUTH

    chosen = dict(client_security.current().settings)
    chosen.update({"sasl.username": response.token_id, "sasl.password": password, TOKEN_AUTH: "true"})
    if chosen.get("sasl.mechanisms") not in scram.MECHANISMS:  # tokens are for SCRAM alone
        chosen["sasl.mechanisms"] = "SCRAM-SHA-512"
    client_config.save(out, client_config.format_settings(file_format, settings.bootstrap, chosen))


def _describe_tokens(settings: Settings, owners: tuple[str, ...] = ()) -> list[Any]:
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeDelegationTokenRequest

    requested = [
        DescribeDelegationTokenRequest.DescribeDelegationTokenOwner(principal_type=kind, principal_name=name)
        for kind, name in map(_user, owners)
    ]
    with Broker(settings.bootstrap) as broker:
        response = broker.request(_DESCRIBE, DescribeDelegationTokenRequest(owners=requested or None))
    check("tokens", response.error_code, None)
    return sorted(response.tokens, key=lambda one: (one.principal_name, one.issue_timestamp))


@command.command("list")
@options
@click.option("--owner", "owners", multiple=True, help="Only those that this user owns, has requested or may renew.")
def list_(settings: Settings, owners: tuple[str, ...]) -> None:
    """Show the tokens that you may see, without their passwords."""
    found = _describe_tokens(settings, owners)
    if settings.json:
        emit_json(
            [
                {
                    "id": one.token_id,
                    "owner": f"{one.principal_type}:{one.principal_name}",
                    "requester": f"{one.token_requester_principal_type}:{one.token_requester_principal_name}",
                    "renewers": [f"{each.principal_type}:{each.principal_name}" for each in one.renewers],
                    "issued_ms": one.issue_timestamp,
                    "expires_ms": one.expiry_timestamp,
                    "max_ms": one.max_timestamp,
                }
                for one in found
            ]
        )
    elif found:
        rows = [
            (
                one.token_id,
                f"{one.principal_type}:{one.principal_name}",
                ",".join(each.principal_name for each in one.renewers) or "-",
                _time_text(one.expiry_timestamp),
                _time_text(one.max_timestamp),
            )
            for one in found
        ]
        emit_table(("TOKEN", "OWNER", "RENEWERS", "EXPIRES", "MAX EXPIRY"), rows)
    else:
        click.echo("there is no token that you may see")


def _change(settings: Settings, token_id: str, api_key: int, request: Any, word: str) -> None:
    from mqd.cli.kafka_request import Broker, check

    known = next((one for one in _describe_tokens(settings) if one.token_id == token_id), None)
    if known is None:
        raise CliError(f"no token {token_id} is visible to you; mqd token list shows the tokens that are")
    request.hmac = known.hmac
    with Broker(settings.bootstrap) as broker:
        response = broker.request(api_key, request)
    check(f"token {token_id}", response.error_code, None)
    if settings.json:
        emit_json({"id": token_id, "expires_ms": response.expiry_timestamp_ms})
    else:
        click.echo(f"token {token_id} {word} {_time_text(response.expiry_timestamp_ms)}")


@command.command()
@options
@click.argument("token_id")
@click.option("--for", "period", type=Duration(), help="How long from now.  [default: delegation.token.expiry.time.ms]")
def renew(settings: Settings, token_id: str, period: int | None) -> None:
    """Extend TOKEN_ID, at most to its maximum lifetime."""
    from mqd.protocol.messages import RenewDelegationTokenRequest

    request = RenewDelegationTokenRequest(renew_period_ms=-1 if period is None else period)
    _change(settings, token_id, _RENEW, request, "is valid until")


@command.command()
@options
@click.argument("token_id")
@click.option("--in", "period", type=Duration(), help="End it after this time.  [default: immediately]")
def expire(settings: Settings, token_id: str, period: int | None) -> None:
    """End TOKEN_ID. Connections that use it end at their next authentication."""
    from mqd.protocol.messages import ExpireDelegationTokenRequest

    request = ExpireDelegationTokenRequest(expiry_time_period_ms=-1 if period is None else period)
    _change(settings, token_id, _EXPIRE, request, "ends at")
