"""`mqd quota`: list, set and delete client quotas, by client id, user, both, or address."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import CliError as CliError
from mqd.cli.common import Settings, emit_json, emit_table, options

if TYPE_CHECKING:
    from mqd.cli.access import QuotaEntity

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


class Rate(click.ParamType):
    """Bytes per second: 500000, 500k, 10MB, 10MiB/s."""

    name = "BYTES/S"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([kmg]i?)?b?(?:/s)?", str(value).strip(), re.IGNORECASE)
        rate = round(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
        if rate < 1:
            self.fail(f"{value!r} is not a rate such as 500000, 500k, 10MB or 10MiB", param, ctx)
        return rate


@click.group(help="Show and change the quotas of clients: bytes, requests, changed partitions, connections.")
def command() -> None:
    pass


def _entity_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that name an entity: the parameters of _entity()."""
    for decorate in (
        click.option(
            "--default-ip", is_flag=True, help="The default for all addresses; it applies to each separately."
        ),
        click.option("--ip", metavar="ADDRESS", help="An address that clients connect from."),
        click.option("--default-user", is_flag=True, help="The default for all users; it applies to each separately."),
        click.option(
            "--user", metavar="NAME", help="A user; with CLIENT or --default, only those clients of the user."
        ),
        click.option(
            "--default", is_flag=True, help="The default for all clients; it applies to each client id separately."
        ),
        click.argument("client", required=False),
    ):
        function = decorate(function)
    return function


def _entity(
    client: str | None, default: bool, user: str | None, default_user: bool, ip: str | None, default_ip: bool
) -> QuotaEntity:
    """Returns {} if no entity is named. Raises click.UsageError."""
    from mqd.cli import access

    entity: QuotaEntity = {}
    options_by_kind = {"user": (user, default_user), "client-id": (client, default), "ip": (ip, default_ip)}
    for kind, (name, is_default) in options_by_kind.items():
        if name is not None and is_default:
            raise click.UsageError(f"a {access.ENTITY_NOUNS[kind][0]} and the default for all are mutually exclusive")
        if name is not None or is_default:
            entity[kind] = name
    if "ip" in entity and len(entity) > 1:
        raise click.UsageError("a quota applies either to an address, or to a user and client")
    return entity


def _required_entity(**entity_options: Any) -> QuotaEntity:
    entity = _entity(**entity_options)
    if not entity:
        raise click.UsageError(
            "name a client id, or give --user or --ip; --default, --default-user or --default-ip for all that have no"
            " quota of their own"
        )
    return entity


def _check_limits_apply(entity: QuotaEntity, keys: Collection[str]) -> None:
    """Raises click.UsageError for a limit that does not apply to this kind of entity."""
    from mqd.cli import access

    if any((key == access.QUOTA_KEYS["connections"]) != ("ip" in entity) for key in keys):
        raise click.UsageError(
            "--connections needs --ip or --default-ip; --produce, --fetch, --request-time and --partition-changes"
            " cannot be used with them"
        )


def _short_text(entity: QuotaEntity) -> str:
    from mqd.cli import access

    return ", ".join(
        f"{access.ENTITY_NOUNS[kind][0]} {'<default>' if name is None else name}" for kind, name in entity.items()
    )


@command.command("list")
@options
@_entity_options
def list_(settings: Settings, **entity_options: Any) -> None:
    """Show the quotas that are set: all of them, or those of the client, user or address."""
    from mqd.cli import access

    requested = _entity(**entity_options)
    quotas_by_entity = access.quotas(settings, requested)
    if settings.json:
        emit_json(
            [
                {"entity": entity, **{key: quotas.get(key) for key in access.QUOTA_KEYS.values()}}
                for entity, quotas in quotas_by_entity
            ]
        )
    elif quotas_by_entity:
        rows = [
            (_short_text(entity), *(access.quota_text(key, quotas.get(key)) for key in access.QUOTA_KEYS.values()))
            for entity, quotas in quotas_by_entity
        ]
        emit_table(("ENTITY", *(access.quota_label(name).upper() for name in access.QUOTA_KEYS)), rows)
    else:
        click.echo(f"no quota is set{' for ' + access.entity_text(requested) if requested else ''}")


@command.command("set")
@options
@_entity_options
@click.option(
    "--produce",
    type=Rate(),
    help="Bytes per second that may be sent, on all connections to a broker together: 500k, 10MB.",
)
@click.option(
    "--fetch", type=Rate(), help="Bytes per second that may be read, on all connections to a broker together."
)
@click.option(
    "--request-time",
    type=click.FloatRange(0, min_open=True),
    metavar="PERCENT",
    help="Worker time that requests may take; 100 means one whole worker.",
)
@click.option(
    "--partition-changes",
    type=click.FloatRange(0, min_open=True),
    metavar="N/S",
    help="Partitions that may be created and deleted each second.",
)
@click.option(
    "--connections", type=click.IntRange(1), metavar="N/S", help="Connections that an address may open each second."
)
@click.option("--dry-run", is_flag=True, help="Have the broker check the request without changing anything.")
def set_(
    settings: Settings,
    produce: int | None,
    fetch: int | None,
    request_time: float | None,
    partition_changes: float | None,
    connections: int | None,
    dry_run: bool,
    **entity_options: Any,
) -> None:
    """Limit CLIENT, a user, a user's client or an address; other limits stay unchanged."""
    from mqd.cli import access

    entity = _required_entity(**entity_options)
    limits = dict(
        zip(access.QUOTA_KEYS.values(), (produce, fetch, request_time, partition_changes, connections), strict=True)
    )
    requested: dict[str, float | None] = {key: float(value) for key, value in limits.items() if value is not None}
    if not requested:
        raise click.UsageError(
            "nothing to set; give --produce, --fetch, --request-time, --partition-changes or --connections"
        )
    _check_limits_apply(entity, requested)
    access.set_quotas(settings, entity, requested, dry_run)
    if settings.json:
        emit_json({"entity": entity, "set": requested, "changed": not dry_run})
    else:
        limits_text = ", ".join(
            f"{access.quota_label(name)} {access.quota_text(key, requested[key])}"
            for name, key in access.QUOTA_KEYS.items()
            if key in requested
        )
        click.echo(f"{access.entity_text(entity)} {'would be' if dry_run else 'is'} limited: {limits_text}")


@command.command()
@options
@_entity_options
@click.option("--produce", is_flag=True, help="Only the limit for sending.")
@click.option("--fetch", is_flag=True, help="Only the limit for reading.")
@click.option("--request-time", is_flag=True, help="Only the limit for the time of requests.")
@click.option("--partition-changes", is_flag=True, help="Only the limit for creating and deleting partitions.")
@click.option("--connections", is_flag=True, help="Only the limit for opening connections.")
def delete(
    settings: Settings,
    produce: bool,
    fetch: bool,
    request_time: bool,
    partition_changes: bool,
    connections: bool,
    **entity_options: Any,
) -> None:
    """Remove the quotas of CLIENT, a user, a user's client or an address: all, or those named."""
    from mqd.cli import access

    entity = _required_entity(**entity_options)
    selected = dict(
        zip(access.QUOTA_KEYS.values(), (produce, fetch, request_time, partition_changes, connections), strict=True)
    )
    keys = [key for key, is_selected in selected.items() if is_selected] or list(access.QUOTA_KEYS.values())
    removed = access.remove_quotas(settings, entity, keys)
    if settings.json:
        emit_json({"entity": entity, "removed": removed})
    else:
        names = ", ".join(access.quota_label(name) for name, key in access.QUOTA_KEYS.items() if key in removed)
        click.echo(f"{access.entity_text(entity)} is no longer limited: {names}")
