"""DescribeAcls, CreateAcls, DeleteAcls 1-3 (KIP-140, KIP-290): there is no authorizer, and each
request is answered as by a Kafka broker without one.
"""

from mqd.acceptor.broker import Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)

DISABLED = {"error_code": int(ErrorCode.SECURITY_DISABLED), "error_message": "No Authorizer is configured."}


async def handle(
    context: Context, header: RequestHeader, request: DescribeAclsRequest | CreateAclsRequest | DeleteAclsRequest
) -> DescribeAclsResponse | CreateAclsResponse | DeleteAclsResponse:
    if isinstance(request, CreateAclsRequest):
        return CreateAclsResponse(results=[CreateAclsResponse.AclCreationResult(**DISABLED) for _ in request.creations])
    if isinstance(request, DeleteAclsRequest):
        return DeleteAclsResponse(filter_results=[DeleteAclsResponse.FilterResult(**DISABLED) for _ in request.filters])
    return DescribeAclsResponse(**DISABLED)
