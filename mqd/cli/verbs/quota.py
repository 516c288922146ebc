"""`mqd quota`: list, set, delete the quotas of clients, by client id."""

import re
from typing import Any

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, human_bytes, options

_KEYS = {"produce": "producer_byte_rate", "fetch": "consumer_byte_rate", "requests": "request_percentage"}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_DESCRIBE, _ALTER = 48, 49
_EXACT, _DEFAULT, _ANY = 0, 1, 2


class Rate(click.ParamType):
    """Bytes per second: 500000, 500k, 10MB, 10MiB/s."""

    name = "BYTES/S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?(?:/s)?", str(value).strip(), re.IGNORECASE)
        rate = round(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
        if rate < 1:
            self.fail(f"{value!r} is not a rate such as 500000, 500k, 10MB or 10MiB", param, ctx)
        return rate


@click.group(help="Show and change how much clients may produce, fetch and ask, by client id.")
def command() -> None:
    pass


def _client(name: str | None, default: bool) -> str | None:
    """The client id, None = the default of all. Raises click.UsageError."""
    if (name is not None) == default:
        raise click.UsageError("name a client id, or give --default for all that have no quota of their own")
    return name


def _shown(client: str | None) -> str:
    return "the default of all clients" if client is None else f"client {client}"


def _found(settings: Settings, match_type: int, name: str | None) -> list[tuple[str | None, dict[str, float]]]:
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeClientQuotasRequest

    wanted = DescribeClientQuotasRequest.ComponentData(entity_type="client-id", match_type=match_type, match=name)
    with Broker(settings.bootstrap) as broker:
        answer = broker.ask(_DESCRIBE, DescribeClientQuotasRequest(components=[wanted], strict=True))
    check("quotas", answer.error_code, answer.error_message)
    found = [
        (entry.entity[0].entity_name, {value.key: value.value for value in entry.values})
        for entry in answer.entries or []
    ]
    return sorted(found, key=lambda entry: (entry[0] is None, entry[0] or ""))


def _text(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:g} %" if key == "request_percentage" else f"{human_bytes(value)}/s"


@command.command("list")
@options
@click.argument("client", required=False)
@click.option("--default", is_flag=True, help="Only the default of all clients.")
def list_(settings: Settings, client: str | None, default: bool) -> None:
    """Show the quotas that are set: of all clients, or of one client id."""
    if client is not None and default:
        raise click.UsageError("a client id and --default exclude each other")
    found = _found(settings, _DEFAULT if default else _ANY if client is None else _EXACT, client)
    if settings.json:
        emit_json([{"client_id": name, **{key: quotas.get(key) for key in _KEYS.values()}} for name, quotas in found])
    elif found:
        rows = [
            ("<default>" if name is None else name, *(_text(key, quotas.get(key)) for key in _KEYS.values()))
            for name, quotas in found
        ]
        emit_table(("CLIENT", "PRODUCE", "FETCH", "REQUESTS"), rows)
    else:
        click.echo(f"no quota is set{'' if client is None and not default else ' for ' + _shown(client)}")


def _alter(settings: Settings, client: str | None, operations: dict[str, float | None], dry_run: bool) -> None:
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import AlterClientQuotasRequest

    entry = AlterClientQuotasRequest.EntryData(
        entity=[AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name=client)],
        ops=[
            AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in operations.items()
        ],
    )
    with Broker(settings.bootstrap) as broker:
        (answer,) = broker.ask(_ALTER, AlterClientQuotasRequest(entries=[entry], validate_only=dry_run)).entries
    check(_shown(client), answer.error_code, answer.error_message)


@command.command("set")
@options
@click.argument("client", required=False)
@click.option(
    "--default",
    is_flag=True,
    help="The default of all clients without a quota of their own; each client id gets it for itself.",
)
@click.option("--produce", type=Rate(), help="What it may send, on all brokers' connections together: 500k, 10MB.")
@click.option("--fetch", type=Rate(), help="What it may read.")
@click.option(
    "--requests",
    type=click.FloatRange(0, min_open=True),
    metavar="PERCENT",
    help="Time that its requests may take, 100 is one worker.",
)
@click.option("--dry-run", is_flag=True, help="Let the broker check, change nothing.")
def set_(
    settings: Settings,
    client: str | None,
    default: bool,
    produce: int | None,
    fetch: int | None,
    requests: float | None,
    dry_run: bool,
) -> None:
    """Limit CLIENT; what is not named stays as it is."""
    client = _client(client, default)
    given = {_KEYS["produce"]: produce, _KEYS["fetch"]: fetch, _KEYS["requests"]: requests}
    wanted: dict[str, float | None] = {key: float(value) for key, value in given.items() if value is not None}
    if not wanted:
        raise click.UsageError("nothing to set; give --produce, --fetch or --requests")
    _alter(settings, client, wanted, dry_run)
    if settings.json:
        emit_json({"client_id": client, "set": wanted, "changed": not dry_run})
    else:
        words = ", ".join(f"{name} {_text(key, wanted[key])}" for name, key in _KEYS.items() if key in wanted)
        click.echo(f"{_shown(client)} {'could be' if dry_run else 'is'} limited: {words}")


@command.command()
@options
@click.argument("client", required=False)
@click.option("--default", is_flag=True, help="The default of all clients.")
@click.option("--produce", is_flag=True, help="Only what it may send.")
@click.option("--fetch", is_flag=True, help="Only what it may read.")
@click.option("--requests", is_flag=True, help="Only the time of its requests.")
def delete(settings: Settings, client: str | None, default: bool, produce: bool, fetch: bool, requests: bool) -> None:
    """Remove the quotas of CLIENT: all of them, or those named."""
    client = _client(client, default)
    named = {"produce": produce, "fetch": fetch, "requests": requests}
    keys = [_KEYS[name] for name, wanted in named.items() if wanted] or list(_KEYS.values())
    before = dict(_found(settings, _DEFAULT if client is None else _EXACT, client)).get(client, {})
    gone = [key for key in keys if key in before]
    if not gone:
        raise CliError(f"{_shown(client)} has no such quota; mqd quota list shows them")
    _alter(settings, client, dict.fromkeys(gone), False)
    if settings.json:
        emit_json({"client_id": client, "removed": gone})
    else:
        click.echo(
            f"{_shown(client)} is no longer limited: {', '.join(name for name, key in _KEYS.items() if key in gone)}"
        )


__all__ = ["CliError", "command"]
