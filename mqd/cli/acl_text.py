"""The text form of rules in `mqd acl`: `alice`, `read,write`, `topic/orders-*`."""

from mqd.security.acl import (
    CLUSTER_NAME,
    WILDCARD,
    AclBinding,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    name_of,
)

RESOURCES = {
    "topic": ResourceType.TOPIC,
    "group": ResourceType.GROUP,
    "cluster": ResourceType.CLUSTER,
    "transactional-id": ResourceType.TRANSACTIONAL_ID,
    "token": ResourceType.DELEGATION_TOKEN,
    "user": ResourceType.USER,
}
_RESOURCE_WORDS = {kind: word for word, kind in RESOURCES.items()}
OPERATIONS = {
    operation.name.lower().replace("_", "-"): operation for operation in Operation if operation >= Operation.ALL
}
_OPERATION_WORDS = {operation: word for word, operation in OPERATIONS.items()}
# The operations that exist for each resource type; ALL means all of these.
_OPERATIONS_OF: dict[ResourceType, tuple[Operation, ...]] = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
    ResourceType.TRANSACTIONAL_ID: (Operation.DESCRIBE, Operation.WRITE, Operation.TWO_PHASE_COMMIT),
    ResourceType.DELEGATION_TOKEN: (Operation.DESCRIBE,),
    ResourceType.USER: (Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS),
}


def parse_principal(word: str) -> str:
    """`alice` is User:alice, `*` every user. Raises ValueError."""
    if not word:
        raise ValueError("the principal is empty")
    return word if ":" in word else f"User:{word}"


def parse_resource(word: str) -> tuple[ResourceType, PatternType, str]:
    """`topic/orders`, `topic/orders-*` (a prefix), `topic/*` (all), `cluster`. Raises ValueError."""
    kind, slash, name = word.partition("/")
    if kind not in RESOURCES:
        raise ValueError(
            f"{word!r} is not a resource: it must begin with {', '.join(f'{known}/' for known in RESOURCES)}"
        )
    if kind == "cluster":
        if name not in ("", CLUSTER_NAME):
            raise ValueError(f"{word!r}: there is only one cluster; write 'cluster'")
        return ResourceType.CLUSTER, PatternType.LITERAL, CLUSTER_NAME
    if not slash or not name:
        raise ValueError(f"{word!r} does not name a {kind}; write {kind}/NAME, {kind}/PREFIX* or {kind}/*")
    if kind == "user" and name != WILDCARD:
        name = parse_principal(name)  # Kafka names this resource by its principal
    if name != WILDCARD and name.endswith("*"):
        return RESOURCES[kind], PatternType.PREFIXED, name[:-1]
    return RESOURCES[kind], PatternType.LITERAL, name


def parse_operation(word: str, kind: ResourceType | None = None) -> Operation:
    """Raises ValueError, including for an operation that does not exist for the resource type."""
    parsed = OPERATIONS.get(word.strip().lower().replace("_", "-"))
    if parsed is None:
        raise ValueError(f"{word.strip()!r} is not an operation; use one of {', '.join(OPERATIONS)}")
    if kind is not None and parsed != Operation.ALL and parsed not in _OPERATIONS_OF[kind]:
        used_words = ", ".join(_OPERATION_WORDS[used] for used in _OPERATIONS_OF[kind])
        raise ValueError(f"a {_RESOURCE_WORDS[kind]} has no operation {word.strip()}; it has {used_words}")
    return parsed


def parse_operations(words: str, kind: ResourceType) -> list[Operation]:
    return list(dict.fromkeys(parse_operation(word, kind) for word in words.split(",")))


def resource_text(binding: AclBinding) -> str:
    if binding.resource_type == ResourceType.CLUSTER:
        return "cluster"
    kind = _RESOURCE_WORDS.get(ResourceType(binding.resource_type), name_of(ResourceType, binding.resource_type))
    name = binding.name.removeprefix("User:") if binding.resource_type == ResourceType.USER else binding.name
    return f"{kind}/{name}{'*' if binding.pattern_type == PatternType.PREFIXED else ''}"


def rule_columns(binding: AclBinding) -> tuple[str, str, str, str, str]:
    """Returns the columns: principal, permission, operation, resource, host."""
    word = _OPERATION_WORDS.get(Operation(binding.operation), name_of(Operation, binding.operation))
    permission = name_of(Permission, binding.permission).lower()
    return binding.principal, permission, word, resource_text(binding), binding.host
