"""A principal's rights, decided in the simplest way: every rule is checked for every request."""

from __future__ import annotations

import random

from mqd.security.acl import AclBinding, Operation, PatternType, Permission, ResourceType

DESCRIBING = {Operation.DESCRIBE, Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
DESCRIBING_CONFIGS = {Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS}

NAMES = ["a", "ab", "abc", "ab-c", "b", "*", "*x", "ä", "äb", "äbc", "日本", "日本語", "𝒳", "𝒳y", "a" * 249]
PRINCIPALS = ["User:alice", "User:bob", "User:*", "User:ANONYMOUS", "User:ünï:code", "User:CN=x,O=y"]
HOSTS = ["10.0.0.1", "10.0.0.2", "127.0.0.1"]
TYPES = [ResourceType.TOPIC, ResourceType.GROUP, ResourceType.TRANSACTIONAL_ID]
OPERATIONS = [operation for operation in Operation if operation >= Operation.READ]


def random_binding(chance: random.Random) -> AclBinding:
    return AclBinding(
        chance.choice(TYPES),
        chance.choice([PatternType.LITERAL, PatternType.PREFIXED]),
        chance.choice(NAMES),
        chance.choice(PRINCIPALS),
        chance.choice(["*", "*", *HOSTS]),
        chance.choice([Operation.ALL, *OPERATIONS]),
        chance.choice([Permission.ALLOW, Permission.ALLOW, Permission.DENY]),
    )


def names_resource(binding: AclBinding, resource_type: int, name: str) -> bool:
    if binding.resource_type != resource_type:
        return False
    if binding.pattern_type == PatternType.LITERAL:
        return binding.name == name or binding.name == "*"
    return name.startswith(binding.name)


def concerns(binding: AclBinding, principal: str, host: str, operation: int) -> bool:
    if binding.principal not in (principal, "User:*") or binding.host not in (host, "*"):
        return False
    if binding.operation in (operation, Operation.ALL):
        return True
    if binding.permission == Permission.DENY:
        return False
    return (operation == Operation.DESCRIBE and binding.operation in DESCRIBING) or (
        operation == Operation.DESCRIBE_CONFIGS and binding.operation in DESCRIBING_CONFIGS
    )


def decide(
    bindings: list[AclBinding],
    super_users: set[str],
    allow_everyone: bool,
    principal: str,
    host: str,
    operation: int,
    resource_type: int,
    name: str,
) -> bool:
    if principal in super_users:
        return True
    naming = [binding for binding in bindings if names_resource(binding, resource_type, name)]
    if not naming:
        return allow_everyone
    deciding = [binding.permission for binding in naming if concerns(binding, principal, host, operation)]
    return Permission.DENY not in deciding and Permission.ALLOW in deciding
