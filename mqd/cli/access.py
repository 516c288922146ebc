"""Reads and changes the users with passwords, the rules (ACLs) and the quotas of a cluster. Used by
`mqd user`, `mqd acl`, `mqd quota` and the console.
"""

from __future__ import annotations

import secrets
from typing import Any

from mqd.cli import acl_text
from mqd.cli.common import CliError, Settings, human_bytes
from mqd.cli.kafka_request import Broker, check
from mqd.protocol.messages import (
    AlterClientQuotasRequest,
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteAclsRequest,
    DescribeAclsRequest,
    DescribeClientQuotasRequest,
    DescribeUserScramCredentialsRequest,
)
from mqd.security import scram
from mqd.security.acl import AclBinding, AclFilter, Operation, PatternType, Permission, ResourceType

DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS = 29, 30, 31
DESCRIBE_QUOTAS, ALTER_QUOTAS = 48, 49
DESCRIBE_USERS, ALTER_USERS = 50, 51
PASSWORD_BYTES = 20  # 160 bits cannot be guessed, so few iterations are enough


# -- users -----------------------------------------------------------------------------------------


def users(settings: Settings) -> dict[str, list[tuple[int, int]]]:
    """User -> the (mechanism, iterations) of each of its passwords. Raises CliError."""
    with Broker(settings.bootstrap) as broker:
        response = broker.request(DESCRIBE_USERS, DescribeUserScramCredentialsRequest(users=None))
    check("users", response.error_code, response.error_message)
    return {
        result.user: sorted((info.mechanism, info.iterations) for info in result.credential_infos)
        for result in response.results
    }


def mechanism_name(number: int) -> str:
    return next((name for name, code in scram.MECHANISM_NUMBERS.items() if code == number), str(number))


def generated_password() -> str:
    return secrets.token_urlsafe(PASSWORD_BYTES)


class SaltedPassword:
    """The salts of a password, and the keys that each mechanism derives from it."""

    def __init__(self, password: str, is_generated: bool) -> None:
        self.iterations = scram.ITERATIONS_MIN if is_generated else scram.ITERATIONS_MAX
        self.salts = {mechanism: secrets.token_bytes(scram.SALT_BYTES) for mechanism in scram.MECHANISMS}
        self.keys = {
            mechanism: scram.salted_password(mechanism, password.encode(), salt, self.iterations)
            for mechanism, salt in self.salts.items()
        }


def set_password(settings: Settings, name: str, salted: SaltedPassword) -> None:
    """Raises CliError."""
    request_class = AlterUserScramCredentialsRequest
    upsertions = [
        request_class.ScramCredentialUpsertion(
            name=name,
            mechanism=scram.MECHANISM_NUMBERS[mechanism],
            iterations=salted.iterations,
            salt=salt,
            salted_password=salted.keys[mechanism],
        )
        for mechanism, salt in salted.salts.items()
    ]
    _alter_users(settings, name, [request_class(upsertions=[upsertion]) for upsertion in upsertions])


def require_user(settings: Settings, name: str) -> list[tuple[int, int]]:
    """The (mechanism, iterations) of the user's passwords. Raises CliError if there is no such
    user.
    """
    mechanisms = users(settings).get(name)
    if mechanisms is None:
        raise CliError(f"there is no user {name}; mqd user list shows all users")
    return mechanisms


def delete_user(settings: Settings, name: str) -> None:
    """Raises CliError."""
    request_class = AlterUserScramCredentialsRequest
    mechanisms = require_user(settings, name)
    deletions = [request_class.ScramCredentialDeletion(name=name, mechanism=number) for number, _ in mechanisms]
    _alter_users(settings, name, [request_class(deletions=[deletion]) for deletion in deletions])


def _alter_users(settings: Settings, name: str, requests: list[AlterUserScramCredentialsRequest]) -> None:
    """Sends one mechanism per request: Apache Kafka refuses two for the same user in one request."""
    with Broker(settings.bootstrap) as broker:
        for request in requests:
            for result in broker.request(ALTER_USERS, request).results:
                check(f"user {name}", result.error_code, result.error_message)


# -- rules -----------------------------------------------------------------------------------------


def parse_rules(permission: str, principal: str, operations: str, resource: str, host: str) -> list[AclBinding]:
    """Rules from the arguments of `mqd acl allow`. Raises ValueError."""
    kind, pattern, name = acl_text.parse_resource(resource)
    full_principal = acl_text.parse_principal(principal)
    return [
        AclBinding(kind, pattern, name, full_principal, host, operation, Permission[permission.upper()])
        for operation in acl_text.parse_operations(operations, kind)
    ]


def parse_filter(
    principal: str | None, operation: str | None, resource: str | None, host: str | None, permission: str | None
) -> AclFilter:
    """A filter from the options of `mqd acl list`; an option that is None matches anything. Raises
    ValueError.
    """
    kind, pattern, name = ResourceType.ANY, PatternType.ANY, None
    if resource is not None:
        kind, pattern, name = acl_text.parse_resource(resource)
    return AclFilter(
        kind,
        pattern,
        name,
        acl_text.parse_principal(principal) if principal is not None else None,
        host,
        acl_text.parse_operation(operation) if operation is not None else Operation.ANY,
        Permission[permission.upper()] if permission is not None else Permission.ANY,
    )


def rules(settings: Settings, acl_filter: AclFilter) -> list[AclBinding]:
    """Raises CliError."""
    with Broker(settings.bootstrap) as broker:
        response = broker.request(DESCRIBE_ACLS, DescribeAclsRequest(**_filter_fields(acl_filter)))
    check("access control lists", response.error_code, response.error_message)
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
        for resource in response.resources
        for acl in resource.acls
    )


def create_rules(settings: Settings, bindings: list[AclBinding]) -> None:
    """Raises CliError."""
    creations = [
        CreateAclsRequest.AclCreation(
            resource_type=rule.resource_type,
            resource_name=rule.name,
            resource_pattern_type=rule.pattern_type,
            principal=rule.principal,
            host=rule.host,
            operation=rule.operation,
            permission_type=rule.permission,
        )
        for rule in bindings
    ]
    with Broker(settings.bootstrap) as broker:
        response = broker.request(CREATE_ACLS, CreateAclsRequest(creations=creations))
    for result in response.results:
        check("access control lists", result.error_code, result.error_message)


def remove_rules(settings: Settings, acl_filter: AclFilter) -> list[AclBinding]:
    """Returns the rules that were removed. Raises CliError."""
    request = DeleteAclsRequest(filters=[DeleteAclsRequest.Filter(**_filter_fields(acl_filter))])
    with Broker(settings.bootstrap) as broker:
        (result,) = broker.request(DELETE_ACLS, request).filter_results
    check("access control lists", result.error_code, result.error_message)
    return sorted(
        AclBinding(
            acl.resource_type,
            acl.pattern_type,
            acl.resource_name,
            acl.principal,
            acl.host,
            acl.operation,
            acl.permission_type,
        )
        for acl in result.matching_acls
    )


def _filter_fields(acl_filter: AclFilter) -> dict[str, Any]:
    return {
        "resource_type_filter": acl_filter.resource_type,
        "resource_name_filter": acl_filter.name,
        "pattern_type_filter": acl_filter.pattern_type,
        "principal_filter": acl_filter.principal,
        "host_filter": acl_filter.host,
        "operation": acl_filter.operation,
        "permission_type": acl_filter.permission,
    }


# -- quotas ----------------------------------------------------------------------------------------

QUOTA_KEYS = {
    "produce": "producer_byte_rate",
    "fetch": "consumer_byte_rate",
    "request-time": "request_percentage",
    "partition-changes": "controller_mutation_rate",
    "connections": "connection_creation_rate",
}
# kind of a quota's entity -> its noun, singular and plural
ENTITY_NOUNS = {"user": ("user", "users"), "client-id": ("client", "clients"), "ip": ("address", "addresses")}
_EXACT, _DEFAULT = 0, 1
# Kafka's entity types -> names, a user first; None: the default for all entities of the type
QuotaEntity = dict[str, str | None]


def entity_text(entity: QuotaEntity) -> str:
    """ "client app of user alice", "the default for all clients"."""
    words = [
        f"the default for all {ENTITY_NOUNS[kind][1]}" if name is None else f"{ENTITY_NOUNS[kind][0]} {name}"
        for kind, name in entity.items()
    ]
    return " of ".join(reversed(words))


def quota_text(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "request_percentage":
        return f"{value:g} %"
    return (
        f"{value:g}/s"
        if key in (QUOTA_KEYS["partition-changes"], QUOTA_KEYS["connections"])
        else f"{human_bytes(value)}/s"
    )


def quota_label(name: str) -> str:
    """Returns a key of QUOTA_KEYS as words, for display."""
    return name.replace("-", " ")


def quotas(settings: Settings, entity: QuotaEntity) -> list[tuple[QuotaEntity, dict[str, float]]]:
    """The quotas of this entity, or of all entities if `entity` is empty. Raises CliError."""
    requested = [
        DescribeClientQuotasRequest.ComponentData(
            entity_type=kind, match_type=_DEFAULT if name is None else _EXACT, match=name
        )
        for kind, name in entity.items()
    ]
    with Broker(settings.bootstrap) as broker:
        response = broker.request(
            DESCRIBE_QUOTAS, DescribeClientQuotasRequest(components=requested, strict=bool(entity))
        )
    check("quotas", response.error_code, response.error_message)
    selected = []
    for entry in response.entries or []:
        names = {part.entity_type: part.entity_name for part in entry.entity}
        ordered = {kind: names[kind] for kind in ENTITY_NOUNS if kind in names}
        selected.append((ordered, {value.key: value.value for value in entry.values}))
    return sorted(
        selected, key=lambda pair: [(kind not in pair[0], pair[0].get(kind) or "\uffff") for kind in ENTITY_NOUNS]
    )


def set_quotas(settings: Settings, entity: QuotaEntity, values: dict[str, float | None], dry_run: bool) -> None:
    """Sets quotas; the value None removes one. Raises CliError."""
    entry = AlterClientQuotasRequest.EntryData(
        entity=[
            AlterClientQuotasRequest.EntityData(entity_type=kind, entity_name=name) for kind, name in entity.items()
        ],
        ops=[
            AlterClientQuotasRequest.OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in values.items()
        ],
    )
    with Broker(settings.bootstrap) as broker:
        (response,) = broker.request(
            ALTER_QUOTAS, AlterClientQuotasRequest(entries=[entry], validate_only=dry_run)
        ).entries
    check(entity_text(entity), response.error_code, response.error_message)


def remove_quotas(settings: Settings, entity: QuotaEntity, keys: list[str]) -> list[str]:
    """Returns those of `keys` that were set. Raises CliError if none was."""
    removed = existing_quotas(settings, entity, keys)
    set_quotas(settings, entity, dict.fromkeys(removed), False)
    return removed


def existing_quotas(settings: Settings, entity: QuotaEntity, keys: list[str]) -> list[str]:
    """Returns those of `keys` that are set. Raises CliError if none is."""
    existing = {key for _, values in quotas(settings, entity) for key in values}
    present = [key for key in keys if key in existing]
    if not present:
        raise CliError(f"{entity_text(entity)} has none of these quotas; mqd quota list shows its quotas")
    return present
