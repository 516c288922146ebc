"""DescribeAcls, CreateAcls, DeleteAcls 1-3 (KIP-140, KIP-290): the cluster's ACLs, changed by the
controller; answered when all workers of this host apply them. Without an authorizer the responses are
those of a Kafka broker without one.

As in Kafka, the number 0 (UNKNOWN) makes the whole request invalid; any other unknown number makes
only its rule or filter invalid.
"""

from typing import Any

from mqd.acceptor.broker import CloseConnection, Context
from mqd.cluster.host import messages
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)
from mqd.security.acl import (
    CLUSTER_NAME,
    AclBinding,
    AclFilter,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    contains_unknown,
    unrecognized_field,
)

DISABLED: dict[str, Any] = {
    "error_code": int(ErrorCode.SECURITY_DISABLED),
    "error_message": "No Authorizer is configured.",
}
TIMEOUT_MS = 30_000  # the requests have no timeout field


async def handle(
    context: Context, header: RequestHeader, request: DescribeAclsRequest | CreateAclsRequest | DeleteAclsRequest
) -> DescribeAclsResponse | CreateAclsResponse | DeleteAclsResponse:
    if isinstance(request, CreateAclsRequest):
        return await _create(context, request)
    if isinstance(request, DeleteAclsRequest):
        return await _delete(context, request)
    return _describe(context, request)


# -- creating --------------------------------------------------------------------------------------


async def _create(context: Context, request: CreateAclsRequest) -> CreateAclsResponse:
    bindings = [_binding(creation) for creation in request.creations]
    if any(contains_unknown(binding) for binding in bindings):
        raise CloseConnection("CreateAcls names a type, operation or permission that is not known")
    if context.broker.authorizer is None:
        return CreateAclsResponse(results=[CreateAclsResponse.AclCreationResult(**DISABLED) for _ in bindings])
    refusals = [_refusal(binding) for binding in bindings]
    valid = [binding for binding, refusal in zip(bindings, refusals, strict=True) if refusal is None]
    error, message = 0, None
    if valid:
        response = await context.change(messages.CreateAcls(valid), TIMEOUT_MS)
        error, message = response.error, response.message
    return CreateAclsResponse(
        results=[
            CreateAclsResponse.AclCreationResult(error_code=error, error_message=message)
            if refusal is None
            else CreateAclsResponse.AclCreationResult(error_code=int(ErrorCode.INVALID_REQUEST), error_message=refusal)
            for refusal in refusals
        ]
    )


def _binding(creation: CreateAclsRequest.AclCreation) -> AclBinding:
    return AclBinding(
        creation.resource_type,
        creation.resource_pattern_type,
        creation.resource_name,
        creation.principal,
        creation.host,
        creation.operation,
        creation.permission_type,
    )


def _refusal(binding: AclBinding) -> str | None:
    """Returns why the rule is invalid, in Kafka's words, or None if it is valid."""
    if field := unrecognized_field(binding):
        return f"Unknown {field}"
    if binding.resource_type == ResourceType.CLUSTER and binding.name != CLUSTER_NAME:
        return f"The only valid name for the CLUSTER resource is {CLUSTER_NAME}"
    if not binding.name:
        return "Invalid empty resource name"
    if binding.resource_type == ResourceType.ANY:
        return "Invalid resourceType ANY"
    if binding.pattern_type not in (PatternType.LITERAL, PatternType.PREFIXED):
        return f"Invalid patternType {PatternType(binding.pattern_type).name}"
    if binding.operation == Operation.ANY:
        return f"Invalid operation {Operation(binding.operation).name}"
    if binding.permission == Permission.ANY:
        return f"Invalid permissionType {Permission(binding.permission).name}"
    if ":" not in binding.principal:
        return (
            f"Could not parse principal from `{binding.principal}` (no colon is present separating the principal type"
            " from the principal name)"
        )
    return None


# -- filters ---------------------------------------------------------------------------------------


def _filter(request: DescribeAclsRequest | DeleteAclsRequest.Filter) -> AclFilter:
    return AclFilter(
        request.resource_type_filter,
        request.pattern_type_filter,
        request.resource_name_filter,
        request.principal_filter,
        request.host_filter,
        request.operation,
        request.permission_type,
    )


def _describe(context: Context, request: DescribeAclsRequest) -> DescribeAclsResponse:
    acl_filter = _filter(request)
    if contains_unknown(acl_filter):
        raise CloseConnection("DescribeAcls names a type, operation or permission that is not known")
    if context.broker.authorizer is None:
        return DescribeAclsResponse(**DISABLED)
    resources: dict[tuple[int, str, int], list[DescribeAclsResponse.AclDescription]] = {}
    for binding in sorted(context.broker.authorizer.matching(acl_filter).values()):
        resources.setdefault((binding.resource_type, binding.name, binding.pattern_type), []).append(
            DescribeAclsResponse.AclDescription(
                principal=binding.principal,
                host=binding.host,
                operation=binding.operation,
                permission_type=binding.permission,
            )
        )
    return DescribeAclsResponse(
        resources=[
            DescribeAclsResponse.Resource(
                resource_type=resource_type, resource_name=name, pattern_type=pattern_type, acls=acls
            )
            for (resource_type, name, pattern_type), acls in resources.items()
        ]
    )


async def _delete(context: Context, request: DeleteAclsRequest) -> DeleteAclsResponse:
    filters = [_filter(requested) for requested in request.filters]
    if any(contains_unknown(acl_filter) for acl_filter in filters):
        raise CloseConnection("DeleteAcls names a type, operation or permission that is not known")
    if context.broker.authorizer is None:
        return DeleteAclsResponse(filter_results=[DeleteAclsResponse.FilterResult(**DISABLED) for _ in filters])
    valid = [acl_filter for acl_filter in filters if not unrecognized_field(acl_filter)]
    response = await context.change(messages.DeleteAcls(valid), TIMEOUT_MS)
    removed = iter(response.removed_acls)
    results = []
    for acl_filter in filters:
        if field := unrecognized_field(acl_filter):
            result = DeleteAclsResponse.FilterResult(
                error_code=int(ErrorCode.INVALID_REQUEST), error_message=f"Unknown {field}"
            )
        elif response.error:
            result = DeleteAclsResponse.FilterResult(error_code=response.error, error_message=response.message)
        else:
            result = DeleteAclsResponse.FilterResult(matching_acls=[_matching(binding) for binding in next(removed)])
        results.append(result)
    return DeleteAclsResponse(filter_results=results)


def _matching(binding: AclBinding) -> DeleteAclsResponse.MatchingAcl:
    return DeleteAclsResponse.MatchingAcl(
        resource_type=binding.resource_type,
        resource_name=binding.name,
        pattern_type=binding.pattern_type,
        principal=binding.principal,
        host=binding.host,
        operation=binding.operation,
        permission_type=binding.permission,
    )
