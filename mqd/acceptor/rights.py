"""The rights that each request needs: one table, checked before the handler runs. The rights are
those of Kafka's KafkaApis and ControllerApis.

A rule applies to a request as a whole (WholeRule) or to each of its elements (ElementRule). Denied
elements are answered here with Kafka's error code, and the handler gets the request without them.
Rights that the table cannot express are checked by the handlers (Context.authorize). An API that is
not in the table is denied to all clients, so APIs that need no check here are listed, too: as
BY_HANDLER or OPEN.

Requests of other hosts of the cluster, which have proven that they hold its key, are not checked.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from mqd.acceptor.broker import Context
from mqd.acceptor.failures import Failure, failed_response
from mqd.base.views import VIEW_OF
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import message_class
from mqd.security.acl import CLUSTER_NAME, Operation, ResourceType

DENIAL_ERRORS: dict[int, int] = {
    ResourceType.TOPIC: int(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
    ResourceType.GROUP: int(ErrorCode.GROUP_AUTHORIZATION_FAILED),
    ResourceType.CLUSTER: int(ErrorCode.CLUSTER_AUTHORIZATION_FAILED),
    ResourceType.TRANSACTIONAL_ID: int(ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED),
}
"""Resource type -> the error code of a denial."""

# (context, header, request, element) -> 0 or Kafka's error code; for a WholeRule, the element is the
# request
Check = Callable[[Context, RequestHeader, Any, Any], int]


class WholeRule(NamedTuple):
    check: Check


class ElementRule(NamedTuple):
    field: str  # a field of the request
    response_field: str  # a field of the response
    check: Check
    parts_field: str = ""  # a field of an element, emptied in the response if the element is denied
    is_group_first: bool = False  # the handler checks the group even if no element is left; see AuthorizedRequest


class AuthorizedRequest(NamedTuple):
    """`request`: the part for the handler; None: nothing is left. `denied_response`: the response
    to the denied part, to be joined with the handler's response. With `is_group_first`, if the
    handler refuses the whole request, its response is the only one.
    """

    request: object | None
    denied_response: object | None = None
    joined_field: str = ""  # the field of both responses that lists the elements
    is_group_first: bool = False

    def complete(self, response: Any) -> object | None:
        if self.denied_response is None:
            return response
        if response is None:
            return self.denied_response
        if self.is_group_first and response.error_code:
            return response
        getattr(response, self.joined_field).extend(getattr(self.denied_response, self.joined_field))
        return response


def authorize(context: Context, header: RequestHeader, request: object) -> AuthorizedRequest:
    if context.broker.authorizer is None or context.origin.is_trusted:
        return AuthorizedRequest(request)
    for rule in RIGHTS.get(header.api_key, (NOT_LISTED,)):
        if isinstance(rule, WholeRule):
            error = rule.check(context, header, request, request)
            if error:
                return AuthorizedRequest(
                    None, _error_response(header, None if _is_refused_without_elements(header) else request, error)
                )
        else:
            return _authorize_elements(context, header, request, rule)
    return AuthorizedRequest(request)


def _authorize_elements(context: Context, header: RequestHeader, request: Any, rule: ElementRule) -> AuthorizedRequest:
    allowed: list[Any] = []
    denied: dict[int, list[Any]] = {}
    for element in getattr(request, rule.field):
        error = rule.check(context, header, request, element)
        (denied.setdefault(error, []) if error else allowed).append(element)
    if not denied:
        return AuthorizedRequest(request)
    elements: list[object] = []
    for error, refused_elements in denied.items():
        if rule.parts_field:
            refused_elements = [
                msgspec.structs.replace(element, **{rule.parts_field: []}) for element in refused_elements
            ]
        part = msgspec.structs.replace(request, **{rule.field: refused_elements})
        elements += getattr(_error_response(header, part, error), rule.response_field)
    denied_response = message_class(header.api_key, "Response")(**{rule.response_field: elements})
    is_handled = allowed or rule.is_group_first
    rest = msgspec.structs.replace(request, **{rule.field: allowed}) if is_handled else None
    return AuthorizedRequest(rest, denied_response, rule.response_field, rule.is_group_first)


def _is_refused_without_elements(header: RequestHeader) -> bool:
    """Whether Kafka's refusal of the whole request lists no elements: AddPartitionsToTxn 4 and up,
    OffsetDelete, DescribeQuorum, UpdateFeatures, AlterShareGroupOffsets, DeleteShareGroupOffsets.
    """
    return header.api_key in (47, 55, 57, 91, 92) or (header.api_key == 24 and header.api_version >= 4)


def _error_response(header: RequestHeader, request: object, error: int) -> object:
    response = failed_response(header, request, Failure(error, error_message(error)))
    # None: the request has no elements, and the response has no field for an error
    return response if response is not None else message_class(header.api_key, "Response")()


# -- rules -----------------------------------------------------------------------------------------


def _name_getter(attribute: str) -> Callable[[Any], str]:
    return lambda element: element if isinstance(element, str) else getattr(element, attribute)


def requires(resource_type: ResourceType, operation: Operation, attribute: str = "name") -> Check:
    name = _name_getter(attribute)

    def check(context: Context, header: RequestHeader, request: Any, element: Any) -> int:
        return 0 if context.authorize(operation, resource_type, name(element)) else DENIAL_ERRORS[resource_type]

    return check


def cluster(operation: Operation) -> WholeRule:
    def check(context: Context, header: RequestHeader, request: Any, _: Any) -> int:
        return (
            0
            if context.authorize(operation, ResourceType.CLUSTER, CLUSTER_NAME)
            else DENIAL_ERRORS[ResourceType.CLUSTER]
        )

    return WholeRule(check)


def group(operation: Operation) -> WholeRule:
    return WholeRule(requires(ResourceType.GROUP, operation, "group_id"))


def transaction(operation: Operation) -> WholeRule:
    return WholeRule(requires(ResourceType.TRANSACTIONAL_ID, operation, "transactional_id"))


def topics(
    operation: Operation, field: str = "topics", response_field: str = "topics", attribute: str = "name"
) -> ElementRule:
    return ElementRule(field, response_field, requires(ResourceType.TOPIC, operation, attribute))


def _check_committed_topic(context: Context, header: RequestHeader, request: Any, topic: Any) -> int:
    """A topic with an unknown id is left to the handler."""
    image = context.broker.metadata.by_id(topic.topic_id) if not topic.name else None
    name = topic.name or (image.name if image is not None else "")
    allowed = not name or context.authorize(Operation.READ, ResourceType.TOPIC, name)
    return 0 if allowed else DENIAL_ERRORS[ResourceType.TOPIC]


def _check_sync_group(context: Context, header: RequestHeader, request: Any, _: Any) -> int:
    """A request that lacks a field of its version is left to the handler, which refuses it."""
    if header.api_version >= 5 and (request.protocol_type is None or request.protocol_name is None):
        return 0
    return requires(ResourceType.GROUP, Operation.READ, "group_id")(context, header, request, request)


_RESOURCE_OF_KEY_TYPE = {0: ResourceType.GROUP, 1: ResourceType.TRANSACTIONAL_ID}
SHARE_COORDINATOR = 2


def _check_coordinator_key(context: Context, header: RequestHeader, request: Any, key: Any) -> int:
    kind = _RESOURCE_OF_KEY_TYPE.get(request.key_type)
    return 0 if kind is None or context.authorize(Operation.DESCRIBE, kind, key) else DENIAL_ERRORS[kind]


def _check_find_coordinator(context: Context, header: RequestHeader, request: Any, _: Any) -> int:
    """Only hosts may look up coordinators of share-partitions. That needs version 6; the handler
    refuses lower versions. Below version 4 a request has a single key.
    """
    if request.key_type == SHARE_COORDINATOR and header.api_version >= 6:
        return cluster(Operation.CLUSTER_ACTION).check(context, header, request, request)
    return _check_coordinator_key(context, header, request, request.key) if header.api_version < 4 else 0


# Resource types of configurations: 2 topic, 4 broker, 8 broker logger, 16 client metrics, 32 group.
_RESOURCE_OF_CONFIG_TYPE = {2: ResourceType.TOPIC, 32: ResourceType.GROUP}


def _requires_on_config(operation: Operation) -> Check:
    def check(context: Context, header: RequestHeader, request: Any, resource: Any) -> int:
        kind = _RESOURCE_OF_CONFIG_TYPE.get(resource.resource_type, ResourceType.CLUSTER)
        name = resource.resource_name if kind != ResourceType.CLUSTER else CLUSTER_NAME
        return 0 if context.authorize(operation, kind, name) else DENIAL_ERRORS[kind]

    return check


def may_schedule(context: Context, configs: Iterable[Any]) -> bool:
    """Whether the client may set schedule.to: it needs the right to write to the target, because records
    are delivered there with the broker's rights.
    """
    targets = [config.value for config in configs if config.name == "schedule.to" and config.value]
    return all(context.authorize(Operation.WRITE, ResourceType.TOPIC, target) for target in targets)


def may_create_view(context: Context, configs: Iterable[Any]) -> bool:
    """Whether the client may create a view: it needs READ on the base topic, because the view shows
    the base topic's records to other readers.
    """
    bases = [config.value for config in configs if config.name == VIEW_OF and config.value]
    return all(context.authorize(Operation.READ, ResourceType.TOPIC, base) for base in bases)


def _check_alter_configs(context: Context, header: RequestHeader, request: Any, resource: Any) -> int:
    error = _requires_on_config(Operation.ALTER_CONFIGS)(context, header, request, resource)
    if error or _RESOURCE_OF_CONFIG_TYPE.get(resource.resource_type) != ResourceType.TOPIC:
        return error
    return 0 if may_schedule(context, resource.configs) else DENIAL_ERRORS[ResourceType.TOPIC]


def _check_init_producer_id(context: Context, header: RequestHeader, request: Any, _: Any) -> int:
    if request.transactional_id is not None:
        return requires(ResourceType.TRANSACTIONAL_ID, Operation.WRITE, "transactional_id")(
            context, header, request, request
        )
    allowed = context.authorize_any(Operation.WRITE, ResourceType.TOPIC) or context.authorize(
        Operation.IDEMPOTENT_WRITE, ResourceType.CLUSTER, CLUSTER_NAME
    )
    return 0 if allowed else DENIAL_ERRORS[ResourceType.CLUSTER]


def _check_add_partitions(context: Context, header: RequestHeader, request: Any, _: Any) -> int:
    if header.api_version >= 4:  # batches, from other hosts
        return cluster(Operation.CLUSTER_ACTION).check(context, header, request, request)
    name = request.v3_and_below_transactional_id
    allowed = context.authorize(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name)
    return 0 if allowed else DENIAL_ERRORS[ResourceType.TRANSACTIONAL_ID]


def _check_write_markers(context: Context, header: RequestHeader, request: Any, _: Any) -> int:
    allowed = any(
        context.authorize(operation, ResourceType.CLUSTER, CLUSTER_NAME)
        for operation in (Operation.ALTER, Operation.CLUSTER_ACTION)
    )
    return 0 if allowed else DENIAL_ERRORS[ResourceType.CLUSTER]


NOT_LISTED = WholeRule(lambda context, header, request, _: DENIAL_ERRORS[ResourceType.CLUSTER])
OPEN: tuple[WholeRule | ElementRule, ...] = ()
BY_HANDLER = OPEN

READ, WRITE, CREATE, DELETE, ALTER, DESCRIBE = (
    Operation.READ,
    Operation.WRITE,
    Operation.CREATE,
    Operation.DELETE,
    Operation.ALTER,
    Operation.DESCRIBE,
)

SHARE_TOPICS = topics(READ, response_field="responses", attribute="topic_name")._replace(is_group_first=True)

# by API key
RIGHTS: dict[int, tuple[WholeRule | ElementRule, ...]] = {
    0: (topics(WRITE, "topic_data", "responses"),),
    1: OPEN,  # the handler refuses every request
    2: (topics(DESCRIBE),),
    3: BY_HANDLER,
    8: (group(READ), ElementRule("topics", "topics", _check_committed_topic)),
    9: BY_HANDLER,
    10: (WholeRule(_check_find_coordinator), ElementRule("coordinator_keys", "coordinators", _check_coordinator_key)),
    11: (group(READ),),
    12: (group(READ),),
    13: (group(READ),),
    14: (WholeRule(_check_sync_group),),
    15: (ElementRule("groups", "groups", requires(ResourceType.GROUP, DESCRIBE)),),
    16: BY_HANDLER,
    17: OPEN,
    18: OPEN,
    19: BY_HANDLER,
    20: BY_HANDLER,
    21: (topics(DELETE),),
    22: (WholeRule(_check_init_producer_id),),
    23: (topics(DESCRIBE, attribute="topic"),),
    24: (WholeRule(_check_add_partitions),),
    25: (transaction(WRITE), group(READ)),
    26: (transaction(WRITE),),
    27: (WholeRule(_check_write_markers),),
    28: (transaction(WRITE), group(READ), topics(READ)),
    29: (cluster(DESCRIBE),),
    30: (cluster(ALTER),),
    31: (cluster(ALTER),),
    32: (ElementRule("resources", "results", _requires_on_config(Operation.DESCRIBE_CONFIGS)),),
    33: (ElementRule("resources", "responses", _check_alter_configs),),
    34: BY_HANDLER,
    35: (cluster(DESCRIBE),),
    36: OPEN,
    37: (topics(ALTER, response_field="results"),),
    38: BY_HANDLER,
    39: BY_HANDLER,
    40: BY_HANDLER,
    41: BY_HANDLER,
    42: (ElementRule("groups_names", "results", requires(ResourceType.GROUP, DELETE)),),
    43: (cluster(ALTER),),
    44: (ElementRule("resources", "responses", _check_alter_configs),),
    45: (cluster(ALTER),),
    46: (cluster(DESCRIBE),),
    47: (group(DELETE), topics(READ)),
    48: (cluster(Operation.DESCRIBE_CONFIGS),),
    49: (cluster(Operation.ALTER_CONFIGS),),
    50: (cluster(DESCRIBE),),
    51: BY_HANDLER,
    55: (cluster(DESCRIBE),),
    57: (cluster(ALTER),),
    60: OPEN,
    61: (topics(READ),),
    64: (cluster(ALTER),),
    65: (ElementRule("transactional_ids", "transaction_states", requires(ResourceType.TRANSACTIONAL_ID, DESCRIBE)),),
    66: BY_HANDLER,
    68: (group(READ),),
    69: (ElementRule("group_ids", "groups", requires(ResourceType.GROUP, DESCRIBE)),),
    74: (cluster(Operation.DESCRIBE_CONFIGS),),
    75: BY_HANDLER,
    76: (group(READ),),
    77: (ElementRule("group_ids", "groups", requires(ResourceType.GROUP, DESCRIBE)),),
    78: OPEN,  # the handler refuses every request
    79: OPEN,
    80: (cluster(ALTER),),
    81: (cluster(ALTER),),
    88: (group(READ),),
    89: (ElementRule("group_ids", "groups", requires(ResourceType.GROUP, DESCRIBE)),),
    90: (ElementRule("groups", "groups", requires(ResourceType.GROUP, DESCRIBE, "group_id"), parts_field="topics"),),
    91: (group(READ), SHARE_TOPICS),
    92: (group(DELETE), SHARE_TOPICS),
}
