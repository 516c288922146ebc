"""`mqd acl`: who may do what, as access control lists in the cluster's metadata."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from mqd.cli.common import CliError, Settings, emit_json, emit_table, options

_DESCRIBE, _CREATE, _DELETE = 29, 30, 31
_OPERATIONS = [
    "all",
    "read",
    "write",
    "create",
    "delete",
    "alter",
    "describe",
    "cluster-action",
    "describe-configs",
    "alter-configs",
    "idempotent-write",
    "create-tokens",
    "describe-tokens",
    "two-phase-commit",
]
_TYPES = {"topic": "TOPIC", "group": "GROUP", "cluster": "CLUSTER", "txn": "TRANSACTIONAL_ID", "user": "USER"}
_RULE = re.compile(r"(?P<principal>\S+)\s+(?P<operation>\S+)\s+(?P<resource>\S+)(?:\s+from\s+(?P<host>\S+))?")


@click.group(help="Allow, deny and explain what users may do.")
def command() -> None:
    """RESOURCE is topic:NAME, group:NAME, txn:TRANSACTIONAL-ID, user:PRINCIPAL or cluster. A name
    that ends in * is a prefix; * alone is every name.
    """


# -- words -----------------------------------------------------------------------------------------


def _principal(text: str) -> str:
    return text if ":" in text else f"User:{text}"


def _operations(text: str) -> list[int]:
    """Raises click.UsageError."""
    from mqd.security.acl import Operation

    found = []
    for word in filter(None, (part.strip().lower() for part in text.split(","))):
        if word not in _OPERATIONS:
            raise click.UsageError(f"{word!r} is no operation; there are {', '.join(_OPERATIONS)}")
        found.append(int(Operation[word.replace("-", "_").upper()]))
    return found


def _resource(text: str) -> tuple[int, int, str]:
    """(resource type, pattern type, name). Raises click.UsageError."""
    from mqd.security.acl import CLUSTER_NAME, WILDCARD, PatternType, ResourceType

    kind, _, name = text.partition(":")
    if kind not in _TYPES or (not name and kind != "cluster"):
        raise click.UsageError(
            f"{text!r} is no resource; say topic:NAME, group:NAME, txn:ID, user:PRINCIPAL or cluster"
        )
    resource_type = int(ResourceType[_TYPES[kind]])
    if kind == "cluster":
        return resource_type, int(PatternType.LITERAL), CLUSTER_NAME
    if name != WILDCARD and name.endswith("*"):
        return resource_type, int(PatternType.PREFIXED), name[:-1]
    return resource_type, int(PatternType.LITERAL), name


def _shown(binding: Any) -> tuple[str, str, str, str, str]:
    """A rule in the words that the commands take."""
    from mqd.security.acl import CLUSTER_NAME, Operation, PatternType, Permission, ResourceType, name_of

    kind = name_of(ResourceType, binding.resource_type)
    word = {name: short for short, name in _TYPES.items()}.get(kind, kind.lower())
    name = binding.name + ("*" if binding.pattern_type == PatternType.PREFIXED else "")
    resource = "cluster" if (kind, name) == ("CLUSTER", CLUSTER_NAME) else f"{word}:{name}"
    operation = name_of(Operation, binding.operation).lower().replace("_", "-")
    return name_of(Permission, binding.permission).lower(), binding.principal, operation, resource, binding.host


# -- rules -----------------------------------------------------------------------------------------


def _rules(settings: Settings) -> list[Any]:
    """All rules of the cluster. Raises CliError."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DescribeAclsRequest
    from mqd.security.acl import AclBinding

    anything = DescribeAclsRequest(resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1)
    with Broker(settings.bootstrap) as broker:
        answer = broker.ask(_DESCRIBE, anything)
    check("rules", answer.error_code, answer.error_message)
    return sorted(
        AclBinding(
            resource.resource_type,
            resource.pattern_type,
            resource.resource_name,
            acl.principal,
            acl.host,
            acl.operation,
            acl.permission_type,
        )
        for resource in answer.resources
        for acl in resource.acls
    )


def _create(settings: Settings, principal: str, operations: str, resource: str, host: str, permission: int) -> None:
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import CreateAclsRequest

    resource_type, pattern_type, name = _resource(resource)
    creations = [
        CreateAclsRequest.AclCreation(
            resource_type=resource_type,
            resource_name=name,
            resource_pattern_type=pattern_type,
            principal=_principal(principal),
            host=host,
            operation=operation,
            permission_type=permission,
        )
        for operation in _operations(operations)
    ]
    with Broker(settings.bootstrap) as broker:
        answer = broker.ask(_CREATE, CreateAclsRequest(creations=creations))
    for result in answer.results:
        check(resource, result.error_code, result.error_message)
    words = ("allow" if permission == _allow() else "deny", _principal(principal), operations, resource)
    if settings.json:
        emit_json({"rules": len(creations)})
    else:
        click.echo(" ".join(words) + ("" if host == "*" else f" from {host}"))


def _allow() -> int:
    from mqd.security.acl import Permission

    return int(Permission.ALLOW)


def _deny() -> int:
    from mqd.security.acl import Permission

    return int(Permission.DENY)


_HOST = click.option("--host", default="*", show_default=True, help="Only from this address.")


@command.command("allow")
@options
@click.argument("principal")
@click.argument("operations")
@click.argument("resource")
@_HOST
def allow(settings: Settings, principal: str, operations: str, resource: str, host: str) -> None:
    """Allow PRINCIPAL the OPERATIONS, as in: mqd acl allow alice read,write topic:orders"""
    _create(settings, principal, operations, resource, host, _allow())


@command.command("deny")
@options
@click.argument("principal")
@click.argument("operations")
@click.argument("resource")
@_HOST
def deny(settings: Settings, principal: str, operations: str, resource: str, host: str) -> None:
    """Deny PRINCIPAL the OPERATIONS, whatever else allows them."""
    _create(settings, principal, operations, resource, host, _deny())


@command.command("list")
@options
@click.option("--principal", help="Only the rules of this one.")
@click.option("--resource", help="Only the rules that apply to this resource.")
def list_(settings: Settings, principal: str | None, resource: str | None) -> None:
    """Show the rules."""
    from mqd.security.acl import AclFilter, PatternType

    kind, _, name = _resource(resource) if resource else (1, 1, None)
    wanted = AclFilter(
        resource_type=kind,
        pattern_type=int(PatternType.MATCH) if resource else 1,
        name=name,
        principal=_principal(principal) if principal else None,
    )
    found = [rule for rule in _rules(settings) if wanted.matches(rule)]
    if settings.json:
        keys = ("permission", "principal", "operation", "resource", "host")
        emit_json([dict(zip(keys, _shown(rule), strict=True)) for rule in found])
    elif found:
        emit_table(("", "PRINCIPAL", "OPERATION", "RESOURCE", "FROM"), [_shown(rule) for rule in found])
    else:
        click.echo("there are no rules" if not principal and not resource else "no rule matches")


@command.command("remove")
@options
@click.argument("principal")
@click.argument("operations", required=False)
@click.argument("resource", required=False)
@click.option("--all", "everything", is_flag=True, help="All rules of the principal.")
def remove(settings: Settings, principal: str, operations: str | None, resource: str | None, everything: bool) -> None:
    """Remove the rules that allow or deny PRINCIPAL the OPERATIONS on RESOURCE."""
    from mqd.cli.kafka_request import Broker, check
    from mqd.protocol.messages import DeleteAclsRequest

    if everything == (resource is not None):
        raise click.UsageError("name operations and a resource, or say --all for every rule of the principal")
    resource_type, pattern_type, name = _resource(resource) if resource else (1, 1, None)
    filters = [
        DeleteAclsRequest.Filter(
            resource_type_filter=resource_type,
            resource_name_filter=name,
            pattern_type_filter=pattern_type,
            principal_filter=_principal(principal),
            operation=operation,
            permission_type=1,
        )
        for operation in (_operations(operations) if operations else [1])
    ]
    with Broker(settings.bootstrap) as broker:
        answer = broker.ask(_DELETE, DeleteAclsRequest(filters=filters))
    count = 0
    for result in answer.filter_results:
        check(resource or principal, result.error_code, result.error_message)
        count += len(result.matching_acls)
    if settings.json:
        emit_json({"removed": count})
    elif count:
        click.echo(f"removed {count} rule{'' if count == 1 else 's'}")
    else:
        raise CliError("no rule matches; mqd acl list shows those there are")


# -- questions -------------------------------------------------------------------------------------


def _judge(rules: Iterable[Any]) -> Any:
    """The broker's own decisions over these rules, but for super users, whom it alone knows."""
    from mqd.security.authorizer import Authorizer

    judge = Authorizer()
    judge.replace({number.to_bytes(16, "big"): rule for number, rule in enumerate(rules)})
    return judge


def _verdict(judge: Any, principal: str, operation: str, resource: str, host: str) -> Any:
    resource_type, _, name = _resource(resource)
    (number,) = _operations(operation)
    return judge.explain(_principal(principal), host, number, resource_type, name)


@command.command("explain")
@options
@click.argument("principal")
@click.argument("operation")
@click.argument("resource")
@click.option("--host", default="127.0.0.1", show_default=True, help="The client's address.")
def explain(settings: Settings, principal: str, operation: str, resource: str, host: str) -> None:
    """Say whether PRINCIPAL may do OPERATION on RESOURCE, and which rule says so. What super.users
    of the brokers say is not known here.
    """
    found = _verdict(_judge(_rules(settings)), principal, operation, resource, host)
    rule = "" if found.binding is None else " ".join(_shown(found.binding)[:4]) + f" from {found.binding.host}"
    if settings.json:
        emit_json({"allowed": found.allowed, "reason": found.reason, "rule": rule or None})
    else:
        click.echo(f"{'allowed' if found.allowed else 'denied'}: {found.reason}" + (f": {rule}" if rule else ""))


@command.command("test")
@options
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def test(settings: Settings, file: Path) -> int:
    """Check the rules against FILE: one expectation a line, # begins a comment.

    \b
    allow alice read topic:orders
    deny  bob   write topic:orders from 10.0.0.7

    Exit status 1: one does not hold.
    """
    judge, failures, count = _judge(_rules(settings)), [], 0
    for number, line in enumerate(file.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        expected, _, rest = text.partition(" ")
        match = _RULE.fullmatch(rest.strip())
        if expected not in ("allow", "deny") or match is None:
            raise CliError(f"{file} line {number} is not: allow|deny PRINCIPAL OPERATION RESOURCE [from HOST]")
        count += 1
        found = _verdict(judge, match["principal"], match["operation"], match["resource"], match["host"] or "127.0.0.1")
        if found.allowed != (expected == "allow"):
            failures.append(f"line {number}: {text}: {found.reason}")
    if settings.json:
        emit_json({"expectations": count, "failures": failures})
    else:
        for failure in failures:
            click.echo(failure)
        click.echo(f"{count - len(failures)} of {count} hold")
    return 1 if failures else 0
