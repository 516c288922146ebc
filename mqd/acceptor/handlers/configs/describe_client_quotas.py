"""DescribeClientQuotas 0-1 (KIP-546): the existing quotas. A filter names entity types, and for each
of them an exact name, the default, or any name. A strict filter excludes entities that also have
other types.
"""

from collections.abc import Callable

from mqd.acceptor.broker import Context
from mqd.cluster.host.messages import ClientQuota
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.settings import CLIENT_ID, IP, USER
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeClientQuotasRequest, DescribeClientQuotasResponse

EXACT, DEFAULT, ANY = 0, 1, 2
Condition = Callable[[str | None], bool]


async def handle(
    context: Context, header: RequestHeader, request: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    try:
        conditions = _conditions(request)
    except Refusal as refusal:
        return DescribeClientQuotasResponse(error_code=refusal.error, error_message=refusal.message, entries=None)
    quotas = [quota for quota in context.broker.metadata.client_quotas if _fits(quota, conditions, request.strict)]
    return DescribeClientQuotasResponse(entries=[_entry(quota) for quota in quotas])


def _conditions(request: DescribeClientQuotasRequest) -> dict[str, Condition]:
    """The conditions by entity type. Raises Refusal."""
    conditions: dict[str, Condition] = {}
    for component in request.components:
        kind = component.entity_type
        if kind in conditions:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Entity type {kind} cannot appear more than once in the filter.")
        if not kind:
            raise Refusal(ErrorCode.INVALID_REQUEST, "Invalid empty entity type.")
        if kind not in (USER, CLIENT_ID, IP):
            raise Refusal(ErrorCode.UNSUPPORTED_VERSION, f"Unsupported entity type {kind}")
        conditions[kind] = _condition(component)
    if IP in conditions and len(conditions) > 1:
        raise Refusal(
            ErrorCode.INVALID_REQUEST,
            "Invalid entity filter component combination. IP filter component should not be used with user or clientId"
            " filter component.",
        )
    return conditions


def _condition(component: DescribeClientQuotasRequest.ComponentData) -> Condition:
    name = component.match
    if component.match_type == EXACT:
        if name is None:
            raise Refusal(
                ErrorCode.INVALID_REQUEST, "Request specified MATCH_TYPE_EXACT, but set match string to null."
            )
        return lambda entity_name: entity_name == name
    if component.match_type not in (DEFAULT, ANY):
        raise Refusal(ErrorCode.INVALID_REQUEST, f"Unknown match type {component.match_type}")
    if name is not None:
        kind = "DEFAULT" if component.match_type == DEFAULT else "SPECIFIED"
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"Request specified MATCH_TYPE_{kind}, but also specified a match string."
        )
    return lambda entity_name: entity_name is None or component.match_type == ANY


def _fits(quota: ClientQuota, conditions: dict[str, Condition], strict: bool) -> bool:
    entity = dict(quota.entity)
    if strict and len(entity) != len(conditions):
        return False
    return all(kind in entity and matches(entity[kind]) for kind, matches in conditions.items())


def _entry(quota: ClientQuota) -> DescribeClientQuotasResponse.EntryData:
    return DescribeClientQuotasResponse.EntryData(
        entity=[
            DescribeClientQuotasResponse.EntityData(entity_type=kind, entity_name=name) for kind, name in quota.entity
        ],
        values=[
            DescribeClientQuotasResponse.ValueData(key=key, value=value) for key, value in sorted(quota.quotas.items())
        ],
    )
