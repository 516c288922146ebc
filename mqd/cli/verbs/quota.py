"""`mqd quota`: list, set, delete the quotas of clients: by client id, user, both, or address."""

import re
from collections.abc import Callable
from typing import Any

import click

from mqd.cli.common import CliError as CliError
from mqd.cli.common import Settings, emit_json, emit_table, human_bytes, options

_KEYS = {
    "produce": "producer_byte_rate",
    "fetch": "consumer_byte_rate",
    "requests": "request_percentage",
    "changes": "controller_mutation_rate",
    "connections": "connection_creation_rate",
}
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_DESCRIBE, _ALTER = 48, 49
_EXACT, _DEFAULT = 0, 1
_NOUNS = {"user": ("user", "users"), "client-id": ("client", "clients"), "ip": ("address", "addresses")}
# Kafka's entity types and names, a user first; None: the default of all
Entity = dict[str, str | None]


class Rate(click.ParamType):
    """Bytes per second: 500000, 500k, 10MB, 10MiB/s."""

    name = "BYTES/S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)?b?(?:/s)?", str(value).strip(), re.IGNORECASE)
        rate = round(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
        if rate < 1:
            self.fail(f"{value!r} is not a rate such as 500000, 500k, 10MB or 10MiB", param, ctx)
        return rate


@click.group(help="Show and change how much clients may produce, fetch, ask and change, and how fast they may connect.")
def command() -> None:
    pass


def _entity_options(function: Callable[..., None]) -> Callable[..., None]:
    """The parameters that entity() takes."""
    for decorate in (
        click.option("--default-ip", is_flag=True, help="The default of all addresses; each gets it for itself."),
        click.option("--ip", metavar="ADDRESS", help="An address that clients connect from."),
        click.option("--default-user", is_flag=True, help="The default of all users; each gets it for itself."),
        click.option("--user", metavar="NAME", help="A user; with CLIENT or --default, only these clients of it."),
        click.option("--default", is_flag=True, help="The default of all clients; each client id gets it for itself."),
        click.argument("client", required=False),
    ):
        function = decorate(function)
    return function


def _entity(
    client: str | None, default: bool, user: str | None, default_user: bool, ip: str | None, default_ip: bool
) -> Entity:
    """{}: none is named. Raises click.UsageError."""
    found: Entity = {}
    named = {"user": (user, default_user), "client-id": (client, default), "ip": (ip, default_ip)}
    for kind, (name, is_default) in named.items():
        if name is not None and is_default:
            raise click.UsageError(f"a {_NOUNS[kind][0]} and the default of all exclude each other")
        if name is not None or is_default:
            found[kind] = name
    if "ip" in found and len(found) > 1:
        raise click.UsageError("quotas of an address are not of users or clients too")
    return found


def _one_entity(**named: Any) -> Entity:
    found = _entity(**named)
    if not found:
        raise click.UsageError(
            "name a client id, or give --user or --ip; --default, --default-user or --default-ip for all that have no"
            " quota of their own"
        )
    return found


def _shown(entity: Entity) -> str:
    """ "client app of user alice", "the default of all clients"."""
    words = [
        f"the default of all {_NOUNS[kind][1]}" if name is None else f"{_NOUNS[kind][0]} {name}"
        for kind, name in entity.items()
    ]
    return " of ".join(reversed(words))


def _short(entity: Entity) -> str:
    return ", ".join(f"{_NOUNS[kind][0]} {'<default>' if name is None else name}" for kind, name in entity.items())


def _found(settings: Settings, entity: Entity) -> list[tuple[Entity, dict[str, float]]]:
    """{}: of all."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeClientQuotasRequest

    requested = [
        DescribeClientQuotasRequest.ComponentData(
            entity_type=kind, match_type=_DEFAULT if name is None else _EXACT, match=name
        )
        for kind, name in entity.items()
    ]
    with Broker(settings.bootstrap) as broker:
        answer = broker.request(_DESCRIBE, DescribeClientQuotasRequest(components=requested, strict=bool(entity)))
    check("quotas", answer.error_code, answer.error_message)
    found = []
    for entry in answer.entries or []:
        names = {part.entity_type: part.entity_name for part in entry.entity}
        ordered = {kind: names[kind] for kind in _NOUNS if kind in names}
        found.append((ordered, {value.key: value.value for value in entry.values}))
    return sorted(found, key=lambda one: [(kind not in one[0], one[0].get(kind) or "\uffff") for kind in _NOUNS])


def _text(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "request_percentage":
        return f"{value:g} %"
    return f"{value:g}/s" if key in (_KEYS["changes"], _KEYS["connections"]) else f"{human_bytes(value)}/s"


@command.command("list")
@options
@_entity_options
def list_(settings: Settings, **named: Any) -> None:
    """Show the quotas that are set: all of them, or those of the client, user or address."""
    entity = _entity(**named)
    found = _found(settings, entity)
    if settings.json:
        emit_json([{"entity": of, **{key: quotas.get(key) for key in _KEYS.values()}} for of, quotas in found])
    elif found:
        rows = [(_short(of), *(_text(key, quotas.get(key)) for key in _KEYS.values())) for of, quotas in found]
        emit_table(("OF", *(name.upper() for name in _KEYS)), rows)
    else:
        click.echo(f"no quota is set{' for ' + _shown(entity) if entity else ''}")


def _alter(settings: Settings, entity: Entity, operations: dict[str, float | None], dry_run: bool) -> None:
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import AlterClientQuotasRequest

    entry = AlterClientQuotasRequest.EntryData(
        entity=[
            AlterClientQuotasRequest.EntityData(entity_type=kind, entity_name=name) for kind, name in entity.items()
        ],
        ops=[
            AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in operations.items()
        ],
    )
    with Broker(settings.bootstrap) as broker:
        (answer,) = broker.request(_ALTER, AlterClientQuotasRequest(entries=[entry], validate_only=dry_run)).entries
    check(_shown(entity), answer.error_code, answer.error_message)


@command.command("set")
@options
@_entity_options
@click.option("--produce", type=Rate(), help="What it may send, on all connections to a broker together: 500k, 10MB.")
@click.option("--fetch", type=Rate(), help="What it may read.")
@click.option(
    "--requests",
    type=click.FloatRange(0, min_open=True),
    metavar="PERCENT",
    help="Time that its requests may take, 100 is one worker.",
)
@click.option(
    "--changes",
    type=click.FloatRange(0, min_open=True),
    metavar="N/S",
    help="Partitions that it may create and delete each second.",
)
@click.option(
    "--connections", type=click.IntRange(1), metavar="N/S", help="Of an address: connections that it may open."
)
@click.option("--dry-run", is_flag=True, help="Let the broker check, change nothing.")
def set_(
    settings: Settings,
    produce: int | None,
    fetch: int | None,
    requests: float | None,
    changes: float | None,
    connections: int | None,
    dry_run: bool,
    **named: Any,
) -> None:
    """Limit CLIENT, a user, a user's client or an address; what is not named stays as it is."""
    entity = _one_entity(**named)
    given = dict(zip(_KEYS.values(), (produce, fetch, requests, changes, connections), strict=True))
    requested: dict[str, float | None] = {key: float(value) for key, value in given.items() if value is not None}
    if not requested:
        raise click.UsageError("nothing to set; give --produce, --fetch, --requests, --changes or --connections")
    _alter(settings, entity, requested, dry_run)
    if settings.json:
        emit_json({"entity": entity, "set": requested, "changed": not dry_run})
    else:
        words = ", ".join(f"{name} {_text(key, requested[key])}" for name, key in _KEYS.items() if key in requested)
        click.echo(f"{_shown(entity)} {'could be' if dry_run else 'is'} limited: {words}")


@command.command()
@options
@_entity_options
@click.option("--produce", is_flag=True, help="Only what it may send.")
@click.option("--fetch", is_flag=True, help="Only what it may read.")
@click.option("--requests", is_flag=True, help="Only the time of its requests.")
@click.option("--changes", is_flag=True, help="Only the partitions that it may create and delete.")
@click.option("--connections", is_flag=True, help="Only the connections that it may open.")
def delete(
    settings: Settings, produce: bool, fetch: bool, requests: bool, changes: bool, connections: bool, **named: Any
) -> None:
    """Remove the quotas of CLIENT, a user, a user's client or an address: all, or those named."""
    entity = _one_entity(**named)
    chosen = dict(zip(_KEYS.values(), (produce, fetch, requests, changes, connections), strict=True))
    keys = [key for key, is_chosen in chosen.items() if is_chosen] or list(_KEYS.values())
    before = {key for _, quotas in _found(settings, entity) for key in quotas}
    gone = [key for key in keys if key in before]
    if not gone:
        raise CliError(f"{_shown(entity)} has no such quota; mqd quota list shows them")
    _alter(settings, entity, dict.fromkeys(gone), False)
    if settings.json:
        emit_json({"entity": entity, "removed": gone})
    else:
        click.echo(
            f"{_shown(entity)} is no longer limited: {', '.join(name for name, key in _KEYS.items() if key in gone)}"
        )
