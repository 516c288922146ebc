"""`mqd acl`: access control lists. `allow`, `deny`, `remove`, `list` change and show the rules;
`explain` and `test` evaluate them as the broker does (mqd/security/authorizer.py).
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, options

if TYPE_CHECKING:
    from mqd.cluster.host import messages
    from mqd.security.acl import AclBinding
    from mqd.security.authorizer import Authorizer, Verdict

_DESCRIBE_CONFIGS = 32
_BROKER = 4  # Kafka's resource type for the configuration of a broker
TIMEOUT_S = 30.0
_HOST = click.option("--from", "host", default="*", metavar="ADDRESS", help="Only for clients at this address.")
_DATA_DIR = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Send the change directly to the controller of the broker with this data directory. Needs no ACLs, but"
    " must run as the Unix user of that broker.",
)


@click.group(help="Allow or deny what clients do, explain decisions, and test the rules.")
def command() -> None:
    pass


def _or_usage_error(parse: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return parse(*arguments)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _change_through_controller(data_dir: Path, change: "messages.Change") -> "messages.Response":
    from mqd.base.paths import layout
    from mqd.cli import local_controller
    from mqd.cli.kafka_request import check

    response = local_controller.change(layout(data_dir).controller_socket, change, TIMEOUT_S)
    check("access control lists", response.error, response.message)
    return response


def _create(
    settings: Settings,
    permission: str,
    principal: str,
    operations: str,
    resource: str,
    host: str,
    data_dir: Path | None,
) -> None:
    from mqd.cli import access
    from mqd.cluster.host import messages

    rules = _or_usage_error(access.parse_rules, permission, principal, operations, resource, host)
    if data_dir is not None:
        _change_through_controller(data_dir, messages.CreateAcls(rules))
    else:
        access.create_rules(settings, rules)
    _emit(settings, rules, "")


@command.command()
@options
@click.argument("principal")
@click.argument("operations")
@click.argument("resource")
@_HOST
@_DATA_DIR
def allow(settings: Settings, principal: str, operations: str, resource: str, host: str, data_dir: Path | None) -> None:
    """Allow PRINCIPAL (alice, or '*') to perform OPERATIONS (read,write or all) on RESOURCE.

    RESOURCE: topic/NAME, group/NAME, transactional-id/NAME, cluster; NAME may be PREFIX* or *.
    """
    _create(settings, "ALLOW", principal, operations, resource, host, data_dir)


@command.command()
@options
@click.argument("principal")
@click.argument("operations")
@click.argument("resource")
@_HOST
@_DATA_DIR
def deny(settings: Settings, principal: str, operations: str, resource: str, host: str, data_dir: Path | None) -> None:
    """Forbid PRINCIPAL to perform OPERATIONS on RESOURCE, whatever other rules allow."""
    _create(settings, "DENY", principal, operations, resource, host, data_dir)


def _emit(settings: Settings, rules: list["AclBinding"], empty_text: str) -> None:
    from mqd.cli.acl_text import rule_columns

    columns = ("principal", "permission", "operation", "resource", "host")
    if settings.json:
        emit_json([dict(zip(columns, rule_columns(rule), strict=True)) for rule in rules])
    elif rules:
        emit_table(tuple(column.upper() for column in columns), [rule_columns(rule) for rule in rules])
    else:
        click.echo(empty_text)


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--principal", help="Only rules for this principal: alice, or '*' for the rules that apply to every user."
        ),
        click.option("--operation", help="Only rules for this operation: read, write, all, ..."),
        click.option("--permission", type=click.Choice(["allow", "deny"])),
        click.option("--from", "host", metavar="ADDRESS", help="Only rules for this address."),
    ):
        function = option(function)
    return function


@command.command("list")
@options
@click.argument("resource", required=False)
@_filters
def list_(
    settings: Settings,
    resource: str | None,
    principal: str | None,
    operation: str | None,
    permission: str | None,
    host: str | None,
) -> None:
    """Show the rules: all, or those of one RESOURCE, written as in `mqd acl allow`."""
    from mqd.cli import access

    acl_filter = _or_usage_error(access.parse_filter, principal, operation, resource, host, permission)
    _emit(settings, access.rules(settings, acl_filter), "there is no rule")


@command.command()
@options
@click.argument("resource", required=False)
@_filters
@click.option("--all", "remove_all", is_flag=True, help="Remove all rules; needed when no other option selects any.")
@click.option("--dry-run", is_flag=True, help="Show what would be removed.")
@_DATA_DIR
def remove(
    settings: Settings,
    resource: str | None,
    principal: str | None,
    operation: str | None,
    permission: str | None,
    host: str | None,
    remove_all: bool,
    dry_run: bool,
    data_dir: Path | None,
) -> None:
    """Remove the rules that match, and show them."""
    from mqd.cli import access
    from mqd.cluster.host import messages

    if not remove_all and not any((resource, principal, operation, permission, host)):
        raise click.UsageError("select the rules: a RESOURCE, --principal, ..., or --all")
    if dry_run and data_dir is not None:
        raise click.UsageError("--dry-run reads the rules from a broker: leave out --data-dir")
    acl_filter = _or_usage_error(access.parse_filter, principal, operation, resource, host, permission)
    if dry_run:
        _emit(settings, access.rules(settings, acl_filter), "no rule matches")
        return
    if data_dir is not None:
        removed = [
            rule
            for rules in _change_through_controller(data_dir, messages.DeleteAcls([acl_filter])).removed_acls
            for rule in rules
        ]
    else:
        removed = access.remove_rules(settings, acl_filter)
    _emit(settings, sorted(removed), "no rule matches")


# -- decisions -------------------------------------------------------------------------------------


def _authorizer(settings: Settings) -> "Authorizer":
    """The cluster's rules, with the settings of the queried broker."""
    from mqd.cli import access
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeClusterRequest, DescribeConfigsRequest
    from mqd.security.acl import AclFilter
    from mqd.security.authorizer import Authorizer
    from mqd.security.principal import super_users

    rules = access.rules(settings, AclFilter())
    with Broker(settings.bootstrap) as broker:
        node_id = broker.request(60, DescribeClusterRequest()).controller_id
        requested = DescribeConfigsRequest.Resource(
            resource_type=_BROKER,
            resource_name=str(node_id),
            configuration_keys=["super.users", "allow.everyone.if.no.acl.found"],
        )
        (response,) = broker.request(_DESCRIBE_CONFIGS, DescribeConfigsRequest(resources=[requested])).results
    check("the broker's super.users", response.error_code, response.error_message)
    config = {config_entry.name: config_entry.value or "" for config_entry in response.configs}
    authorizer = Authorizer(super_users(config["super.users"]), config["allow.everyone.if.no.acl.found"] == "true")
    authorizer.replace({index.to_bytes(16, "big"): rule for index, rule in enumerate(rules)})
    return authorizer


def _verdict(authorizer: "Authorizer", principal: str, operation: str, resource: str, host: str) -> "Verdict":
    """Raises ValueError unless the query names one operation and one resource."""
    from mqd.cli import acl_text
    from mqd.security.acl import Operation, PatternType

    kind, pattern, name = acl_text.parse_resource(resource)
    requested = acl_text.parse_operation(operation, kind)
    if pattern == PatternType.PREFIXED or requested == Operation.ALL:
        raise ValueError("a query needs one operation and one resource")
    return authorizer.explain(acl_text.parse_principal(principal), host, requested, kind, name)


@command.command()
@options
@click.argument("principal")
@click.argument("operation")
@click.argument("resource")
@click.option(
    "--from", "host", default="127.0.0.1", metavar="ADDRESS", help="The client's address.  [default: 127.0.0.1]"
)
def explain(settings: Settings, principal: str, operation: str, resource: str, host: str) -> None:
    """Show whether PRINCIPAL may perform OPERATION on RESOURCE, and which rule decides."""
    from mqd.cli.acl_text import rule_columns

    verdict = _or_usage_error(_verdict, _authorizer(settings), principal, operation, resource, host)
    rule = " ".join(rule_columns(verdict.binding)) if verdict.binding is not None else None
    if settings.json:
        emit_json({"allowed": verdict.is_allowed, "reason": verdict.reason, "rule": rule})
    else:
        outcome = f"{'allowed' if verdict.is_allowed else 'denied'}: {verdict.reason}"
        click.echo(f"{outcome}: {rule}" if rule else outcome)


_EXPECTATION = re.compile(r"(\S+) (can|cannot) (\S+) (\S+)(?: from (\S+))?")


@command.command()
@options
@click.argument("file", type=click.File("r"))
def test(settings: Settings, file: Any) -> None:
    """Check the expectations in FILE, one per line; fails if the rules contradict any.

    A line: `alice can read topic/orders`, `bob cannot write topic/orders from 10.0.0.7`.
    """
    authorizer = _authorizer(settings)
    contradicted, count = [], 0
    for number, text in enumerate(file, 1):
        line = text.partition("#")[0].strip()
        if not line:
            continue
        match = _EXPECTATION.fullmatch(" ".join(line.split()))
        if match is None:
            raise CliError(f"{file.name}:{number}: expected PRINCIPAL can|cannot OPERATION RESOURCE, not {line!r}", 2)
        try:
            verdict = _verdict(authorizer, match[1], match[3], match[4], match[5] or "127.0.0.1")
        except ValueError as error:
            raise CliError(f"{file.name}:{number}: {error}", 2) from None
        count += 1
        if verdict.is_allowed != (match[2] == "can"):
            contradicted.append({"line": number, "text": line, "reason": verdict.reason})
    if settings.json:
        emit_json({"checked": count, "wrong": contradicted})
    for expectation in contradicted:
        click.echo(
            f"{file.name}:{expectation['line']}: {expectation['text']}: does not hold: {expectation['reason']}",
            err=True,
        )
    if contradicted:
        raise CliError(f"{len(contradicted)} of {count} expectations do not hold")
    if not settings.json:
        click.echo(f"all {count} expectations hold")
