"""`mqd config`: get and set the properties of topic/NAME, group/NAME and broker/ID."""

import sys
from typing import Any

import click

from mqd.cli.common import CliError, Settings, complete_topic, emit_json, emit_table, options, pairs


@click.group(help="Show and change the configuration of topics, groups and brokers.")
def command() -> None:
    pass


def _complete_resource(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    if incomplete.startswith("topic/"):
        return ["topic/" + name for name in complete_topic(ctx, parameter, incomplete.removeprefix("topic/"))]
    return [kind for kind in ("topic/", "group/", "broker/") if kind.startswith(incomplete)]


def _complete_setting(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    from mqd.base.properties import BROKER, GROUP, TOPIC

    kind = str(ctx.params.get("resource", "")).partition("/")[0]
    table = {"topic": TOPIC, "group": GROUP}.get(kind, BROKER)
    return [name + "=" for name, prop in table.items() if prop.dynamic and name.startswith(incomplete)]


def _resource(admin: Any, text: str) -> Any:
    """Parses topic/NAME, group/NAME, broker/ID, or `broker` if the cluster has only one broker."""
    from confluent_kafka.admin import ConfigResource, ResourceType

    from mqd.cli.librdkafka import metadata

    kind, _, name = text.partition("/")
    if kind == "topic" and name:
        return ConfigResource(ResourceType.TOPIC, name)
    if kind == "group" and name:
        return ConfigResource(ResourceType.GROUP, name)
    if kind == "broker" and (not name or name.isdecimal()):
        brokers = sorted(metadata(admin).brokers)
        if name and int(name) not in brokers:
            raise CliError(f"there is no broker {name}; there are: {', '.join(map(str, brokers))}")
        if not name and len(brokers) > 1:
            raise CliError(f"there are several brokers; name one: {', '.join(f'broker/{one}' for one in brokers)}")
        return ConfigResource(ResourceType.BROKER, str(int(name) if name else brokers[0]))
    raise click.UsageError(f"{text!r} is not topic/NAME, group/NAME or broker/ID")


@command.command()
@options
@click.argument("resource", shell_complete=_complete_resource)
@click.argument("keys", nargs=-1, metavar="[KEY...]")
@click.option("--all", "show_defaults", is_flag=True, help="Also show properties with their default value.")
def get(settings: Settings, resource: str, keys: tuple[str, ...], show_defaults: bool) -> None:
    """Show the configuration of topic/NAME, group/NAME or broker/ID: the properties that were set, or
    the given KEYs.
    """
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import ConfigSource

    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, admin_client, resource_error

    admin = admin_client(settings.bootstrap)
    requested = _resource(admin, resource)
    try:
        entries = admin.describe_configs([requested], request_timeout=REQUEST_TIMEOUT_S)[requested].result()
    except KafkaException as error:
        raise resource_error(resource, error) from None
    missing = [key for key in keys if key not in entries]
    if missing:
        raise CliError(f"{resource} has no property {', '.join(missing)}; mqd config get {resource} --all lists all")
    shown_entries = [entries[name] for name in keys or sorted(entries)]
    if not keys and not show_defaults:
        shown_entries = [
            entry
            for entry in shown_entries
            if not entry.is_default and entry.source != ConfigSource.DEFAULT_CONFIG.value
        ]
    sources = {source.value: source.name.removesuffix("_CONFIG").lower().replace("_", " ") for source in ConfigSource}
    if settings.json:
        emit_json(
            [
                {
                    "name": entry.name,
                    "value": entry.value,
                    "source": sources.get(entry.source, "unknown"),
                    "read_only": entry.is_read_only,
                    "sensitive": entry.is_sensitive,
                }
                for entry in shown_entries
            ]
        )
    elif keys and not sys.stdout.isatty():
        for entry in shown_entries:
            click.echo(f"{entry.name}={'' if entry.value is None else entry.value}")
    elif not shown_entries:
        click.echo(f"nothing is set on {resource}; --all shows the defaults")
    else:
        rows = [
            (
                entry.name,
                "(hidden)" if entry.is_sensitive else "" if entry.value is None else entry.value,
                sources.get(entry.source, "unknown"),
            )
            for entry in shown_entries
        ]
        emit_table(("PROPERTY", "VALUE", "SET BY"), rows)


def alter(settings: Settings, resource: str, values: dict[str, str], deleted: list[str]) -> None:
    """Sets and unsets properties of a resource in one request; prints the changes."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry

    from mqd.cli.librdkafka import REQUEST_TIMEOUT_S, admin_client, resource_error

    admin = admin_client(settings.bootstrap)
    target = _resource(admin, resource)
    for name, value in values.items():
        target.add_incremental_config(ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET))
    for name in deleted:
        target.add_incremental_config(ConfigEntry(name, None, incremental_operation=AlterConfigOpType.DELETE))
    try:
        admin.incremental_alter_configs([target], request_timeout=REQUEST_TIMEOUT_S)[target].result()
    except KafkaException as error:
        raise resource_error(resource, error) from None
    if settings.json:
        emit_json({"resource": resource, "set": values, "unset": deleted})
    else:
        for name, value in values.items():
            click.echo(f"{resource}: {name}={value}")
        for name in deleted:
            click.echo(f"{resource}: {name} reset to its default")


@command.command("set")
@options
@click.argument("resource", shell_complete=_complete_resource)
@click.argument("values", nargs=-1, required=True, metavar="KEY=VALUE...", shell_complete=_complete_setting)
def set_(settings: Settings, resource: str, values: tuple[str, ...]) -> None:
    """Set properties of topic/NAME, group/NAME or broker/ID; others stay unchanged."""
    alter(settings, resource, pairs(values, "config set"), [])


@command.command()
@options
@click.argument("resource", shell_complete=_complete_resource)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
def unset(settings: Settings, resource: str, keys: tuple[str, ...]) -> None:
    """Reset properties of topic/NAME, group/NAME or broker/ID to their defaults."""
    alter(settings, resource, {}, list(keys))
