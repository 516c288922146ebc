"""Access control lists: a rule (AclBinding) and a filter for rules (AclFilter), with Kafka's
enum values and matching rules (KIP-11, KIP-290).

A rule allows or denies one operation to one principal from one host on the resources that its
pattern names. Hosts are compared as addresses: an IPv6 address may be written in any of its forms.
"""

import ipaddress
from enum import IntEnum
from functools import lru_cache

import msgspec


class ResourceType(IntEnum):
    UNKNOWN, ANY, TOPIC, GROUP, CLUSTER, TRANSACTIONAL_ID, DELEGATION_TOKEN, USER = range(8)


class PatternType(IntEnum):
    """`MATCH` and `ANY` are for filters only: `MATCH` selects the rules that apply to a name, `ANY`
    the rules of every pattern type.
    """

    UNKNOWN, ANY, MATCH, LITERAL, PREFIXED = range(5)


class Operation(IntEnum):
    UNKNOWN, ANY, ALL, READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = range(9)
    CLUSTER_ACTION, DESCRIBE_CONFIGS, ALTER_CONFIGS, IDEMPOTENT_WRITE = range(9, 13)
    CREATE_TOKENS, DESCRIBE_TOKENS, TWO_PHASE_COMMIT = range(13, 16)


class Permission(IntEnum):
    UNKNOWN, ANY, DENY, ALLOW = range(4)


WILDCARD = "*"  # as a literal pattern's name: every resource of the type; as a host: every host
EVERY_USER = "User:*"
CLUSTER_NAME = "kafka-cluster"  # the only resource of type CLUSTER

EVERY_OPERATION = sum(1 << operation for operation in Operation if operation >= Operation.READ)
"""A mask of all operations; an Operation is the number of its bit."""

_DESCRIBE_BIT = 1 << Operation.DESCRIBE
ALLOWED_BY: dict[int, int] = {
    Operation.ALL: EVERY_OPERATION,
    **{operation: 1 << operation for operation in Operation if operation >= Operation.READ},
    Operation.READ: 1 << Operation.READ | _DESCRIBE_BIT,
    Operation.WRITE: 1 << Operation.WRITE | _DESCRIBE_BIT,
    Operation.DELETE: 1 << Operation.DELETE | _DESCRIBE_BIT,
    Operation.ALTER: 1 << Operation.ALTER | _DESCRIBE_BIT,
    Operation.ALTER_CONFIGS: 1 << Operation.ALTER_CONFIGS | 1 << Operation.DESCRIBE_CONFIGS,
}
"""Operation of an ALLOW rule -> mask of the operations that the rule allows (some imply others)."""


# gc=False: there may be a hundred thousand of these, and they are never part of a reference cycle
class AclBinding(msgspec.Struct, frozen=True, gc=False, array_like=True, order=True):
    resource_type: int
    pattern_type: int
    name: str
    principal: str
    host: str
    operation: int
    permission: int

    def __str__(self) -> str:
        """The rule as text for logs and tools."""
        pattern = "" if self.pattern_type == PatternType.LITERAL else "prefix "
        return (
            f"{name_of(Permission, self.permission)} {self.principal} {name_of(Operation, self.operation)} on"
            f" {name_of(ResourceType, self.resource_type)} {pattern}{self.name} from {self.host}"
        )

    def covers(self, name: str) -> bool:
        """Whether the pattern matches the resource `name` of the rule's resource type."""
        if self.pattern_type == PatternType.PREFIXED:
            return name.startswith(self.name)
        return self.name in (name, WILDCARD)


class AclFilter(msgspec.Struct, frozen=True):
    """A filter for rules; None and ANY match everything."""

    resource_type: int = ResourceType.ANY
    pattern_type: int = PatternType.ANY
    name: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: int = Operation.ANY
    permission: int = Permission.ANY

    def matches(self, binding: AclBinding) -> bool:
        return (
            self.resource_type in (ResourceType.ANY, binding.resource_type)
            and self._matches_pattern(binding)
            and self.principal in (None, binding.principal)
            and self.host in (None, binding.host)
            and self.operation in (Operation.ANY, binding.operation)
            and self.permission in (Permission.ANY, binding.permission)
        )

    def only_match(self) -> AclBinding | None:
        """The only rule that the filter can match; None if it could match several."""
        if (
            self.name is None
            or self.principal is None
            or self.host is None
            or self.pattern_type in (PatternType.ANY, PatternType.MATCH)
            or self.resource_type == ResourceType.ANY
            or self.operation == Operation.ANY
            or self.permission == Permission.ANY
        ):
            return None
        return AclBinding(
            self.resource_type, self.pattern_type, self.name, self.principal, self.host, self.operation, self.permission
        )

    def _matches_pattern(self, binding: AclBinding) -> bool:
        if self.pattern_type not in (PatternType.ANY, PatternType.MATCH, binding.pattern_type):
            return False
        if self.name is None:
            return True
        if self.pattern_type == PatternType.MATCH:
            return binding.covers(self.name)
        return self.name == binding.name


def unrecognized_field(rule: AclBinding | AclFilter) -> str:
    """The name of a field whose number this version does not know; "" if it knows all of them."""
    values = (
        ("resource type", ResourceType, rule.resource_type),
        ("pattern type", PatternType, rule.pattern_type),
        ("operation", Operation, rule.operation),
        ("permission", Permission, rule.permission),
    )
    return next((name for name, enum, value in values if not 0 < value < len(enum)), "")


def contains_unknown(rule: AclBinding | AclFilter) -> bool:
    """Whether a field has Kafka's number for UNKNOWN, which no client sends."""
    return 0 in (rule.resource_type, rule.pattern_type, rule.operation, rule.permission)


def name_of(enum: type[IntEnum], value: int) -> str:
    """Kafka's name of the value; UNKNOWN(n) for one that this version does not know."""
    try:
        return enum(value).name
    except ValueError:
        return f"UNKNOWN({value})"


@lru_cache(4096)
def canonical_host(host: str) -> str:
    """The canonical spelling of an address; an IPv4-mapped IPv6 address becomes the IPv4 address.
    Any other text is returned unchanged.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(address)
