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


def _parse_principal(text: str) -> tuple[str, str]:
    """Parses TYPE:NAME to (type, name); `alice` stands for User:alice."""
    kind, colon, name = text.partition(":")
    return (kind, name) if colon else ("User", text)


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
    help="The token expires after this time, such as 12h or 7d, however often it is renewed.",
)
@click.option(
    "--out-format",
    "file_format",
    type=click.Choice(list(FORMATS)),
    default="librdkafka",
    show_default=True,
    help="Format of the file that --out writes.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write client settings with the token and its password to this file.",
)
def create(
    settings: Settings,
    owner: str | None,
    renewers: tuple[str, ...],
    max_lifetime: int | None,
    file_format: str,
    out: Path | None,
) -> None:
    """Create a token. Its password is printed; with --out it is written to the file instead."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import CreateDelegationTokenRequest

    request = CreateDelegationTokenRequest(
        renewers=[
            CreateDelegationTokenRequest.CreatableRenewers(principal_type=kind, principal_name=name)
            for kind, name in map(_parse_principal, renewers)
        ],
        max_lifetime_ms=-1 if max_lifetime is None else max_lifetime,
    )
    if owner is not None:
        request.owner_principal_type, request.owner_principal_name = _parse_principal(owner)
    with Broker(settings.bootstrap) as broker:
        response = broker.request(_CREATE, request)
    check("token", response.error_code, None)
    password = base64.b64encode(response.hmac).decode()
    if out is not None:
        _save_client_settings(settings, file_format, out, response, password)
    fields = {
        "id": response.token_id,
        "owner": f"{response.principal_type}:{response.principal_name}",
        **({} if out is not None else {"password": password}),
        "expires_ms": response.expiry_timestamp_ms,
        "max_ms": response.max_timestamp_ms,
    }
    if settings.json:
        emit_json(fields)
        return
    click.echo(
        f"token {response.token_id} of {fields['owner']}, valid until {_time_text(response.expiry_timestamp_ms)}"
    )
    click.echo(f"password {password}" if out is None else f"wrote client settings with the token to {out}")


def _save_client_settings(
    settings: Settings, file_format: str, out: Path, response: "CreateDelegationTokenResponse", password: str
) -> None:
    from mqd.cli import client_security
    from mqd.cli.verbs import client_config
    from mqd.security import scram
    from mqd.security.client import TOKEN_AUTH

    client_settings = dict(client_security.current().settings)
    client_settings.update({"sasl.username": response.token_id, "sasl.password": password, TOKEN_AUTH: "true"})
    if client_settings.get("sasl.mechanisms") not in scram.MECHANISMS:  # tokens work with SCRAM only
        client_settings["sasl.mechanisms"] = "SCRAM-SHA-512"
    client_config.save(out, client_config.format_settings(file_format, settings.bootstrap, client_settings))


def _describe_tokens(settings: Settings, owners: tuple[str, ...] = ()) -> list[Any]:
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeDelegationTokenRequest

    requested = [
        DescribeDelegationTokenRequest.DescribeDelegationTokenOwner(principal_type=kind, principal_name=name)
        for kind, name in map(_parse_principal, owners)
    ]
    with Broker(settings.bootstrap) as broker:
        response = broker.request(_DESCRIBE, DescribeDelegationTokenRequest(owners=requested or None))
    check("tokens", response.error_code, None)
    return sorted(response.tokens, key=lambda token: (token.principal_name, token.issue_timestamp))


@command.command("list")
@options
@click.option("--owner", "owners", multiple=True, help="Only tokens that this user owns, has requested or may renew.")
def list_(settings: Settings, owners: tuple[str, ...]) -> None:
    """Show the tokens that you may see, without their passwords."""
    tokens = _describe_tokens(settings, owners)
    if settings.json:
        emit_json(
            [
                {
                    "id": token.token_id,
                    "owner": f"{token.principal_type}:{token.principal_name}",
                    "requester": f"{token.token_requester_principal_type}:{token.token_requester_principal_name}",
                    "renewers": [f"{renewer.principal_type}:{renewer.principal_name}" for renewer in token.renewers],
                    "issued_ms": token.issue_timestamp,
                    "expires_ms": token.expiry_timestamp,
                    "max_ms": token.max_timestamp,
                }
                for token in tokens
            ]
        )
    elif tokens:
        rows = [
            (
                token.token_id,
                f"{token.principal_type}:{token.principal_name}",
                ",".join(renewer.principal_name for renewer in token.renewers) or "-",
                _time_text(token.expiry_timestamp),
                _time_text(token.max_timestamp),
            )
            for token in tokens
        ]
        emit_table(("TOKEN", "OWNER", "RENEWERS", "EXPIRES", "MAX EXPIRY"), rows)
    else:
        click.echo("there is no token that you may see")


def _change_expiry(settings: Settings, token_id: str, api_key: int, request: Any, outcome: str) -> None:
    from mqd.cli.kafka_request import Broker, check

    token = next((token for token in _describe_tokens(settings) if token.token_id == token_id), None)
    if token is None:
        raise CliError(f"no token {token_id} is visible to you; mqd token list shows the tokens that are")
    request.hmac = token.hmac
    with Broker(settings.bootstrap) as broker:
        response = broker.request(api_key, request)
    check(f"token {token_id}", response.error_code, None)
    if settings.json:
        emit_json({"id": token_id, "expires_ms": response.expiry_timestamp_ms})
    else:
        click.echo(f"token {token_id} {outcome} {_time_text(response.expiry_timestamp_ms)}")


@command.command()
@options
@click.argument("token_id")
@click.option("--for", "period", type=Duration(), help="How long from now.  [default: delegation.token.expiry.time.ms]")
def renew(settings: Settings, token_id: str, period: int | None) -> None:
    """Extend TOKEN_ID, but not beyond its maximum lifetime."""
    from mqd.protocol.messages import RenewDelegationTokenRequest

    request = RenewDelegationTokenRequest(renew_period_ms=-1 if period is None else period)
    _change_expiry(settings, token_id, _RENEW, request, "is valid until")


@command.command()
@options
@click.argument("token_id")
@click.option("--in", "period", type=Duration(), help="Expire it after this time.  [default: immediately]")
def expire(settings: Settings, token_id: str, period: int | None) -> None:
    """Expire TOKEN_ID. Connections that use it end when they next have to re-authenticate."""
    from mqd.protocol.messages import ExpireDelegationTokenRequest

    request = ExpireDelegationTokenRequest(expiry_time_period_ms=-1 if period is None else period)
    _change_expiry(settings, token_id, _EXPIRE, request, "expires at")
