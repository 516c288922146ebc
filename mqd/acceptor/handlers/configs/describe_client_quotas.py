"""DescribeClientQuotas 0-1 (KIP-546): the existing quotas, filtered by entity types with an exact
name, the default, or any name; strict: no other types.
"""

from collections.abc import Callable

from mqd.acceptor.broker import Context
from mqd.cluster.host.messages import ClientQuota
from mqd.cluster.metadata.refusal import Refusal
from mqd.cluster.metadata.rules.settings import CLIENT_ID, IP, USER
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import DescribeClientQuotasRequest, DescribeClientQuotasResponse

EXACT, DEFAULT, ANY = 0, 1, 2
Matches = Callable[[str | None], bool]


async def handle(
    context: Context, header: RequestHeader, request: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    try:
        wanted = _filter(request)
    except Refusal as refusal:
        return DescribeClientQuotasResponse(error_code=refusal.error, error_message=refusal.message, entries=None)
    found = [quota for quota in context.broker.metadata.client_quotas if _fits(quota, wanted, request.strict)]
    return DescribeClientQuotasResponse(entries=[_entry(quota) for quota in found])


def _filter(request: DescribeClientQuotasRequest) -> dict[str, Matches]:
    """By entity type. Raises Refusal."""
    wanted: dict[str, Matches] = {}
    for component in request.components:
        kind = component.entity_type
        if kind in wanted:
            raise Refusal(ErrorCode.INVALID_REQUEST, f"Duplicate entity type {kind} in the filter.")
        if kind not in (USER, CLIENT_ID, IP):
            raise Refusal(
                ErrorCode.UNSUPPORTED_VERSION if kind else ErrorCode.INVALID_REQUEST,
                f"Unexpected entity type '{kind}'; user, client-id and ip are known.",
            )
        wanted[kind] = _matches(component)
    if IP in wanted and len(wanted) > 1:
        raise Refusal(ErrorCode.INVALID_REQUEST, "Invalid entity filter component combination: ip stands alone.")
    return wanted


def _matches(component: DescribeClientQuotasRequest.ComponentData) -> Matches:
    name = component.match
    if component.match_type == EXACT:
        if name is None:
            raise Refusal(ErrorCode.INVALID_REQUEST, "An exact match needs a name.")
        return lambda found: found == name
    if name is not None:
        raise Refusal(
            ErrorCode.INVALID_REQUEST, f"A match of type {component.match_type} takes no name, but got '{name}'."
        )
    if component.match_type == DEFAULT:
        return lambda found: found is None
    if component.match_type == ANY:
        return lambda found: True
    raise Refusal(
        ErrorCode.INVALID_REQUEST, f"Unexpected match type {component.match_type}: 0 is exact, 1 the default, 2 any."
    )


def _fits(quota: ClientQuota, wanted: dict[str, Matches], strict: bool) -> bool:
    entity = dict(quota.entity)
    if strict and len(entity) != len(wanted):
        return False
    return all(kind in entity and matches(entity[kind]) for kind, matches in wanted.items())


def _entry(quota: ClientQuota) -> DescribeClientQuotasResponse.EntryData:
    return DescribeClientQuotasResponse.EntryData(
        entity=[
            DescribeClientQuotasResponse.EntityData(entity_type=kind, entity_name=name) for kind, name in quota.entity
        ],
        values=[
            DescribeClientQuotasResponse.ValueData(key=key, value=value) for key, value in sorted(quota.quotas.items())
        ],
    )
