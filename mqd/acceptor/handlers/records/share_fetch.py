"""ShareFetch 1-2 and ShareAcknowledge 1-2 (KIP-932). Workers answer them if the cluster has share
groups; otherwise they come here and are refused.
"""

from mqd.acceptor.broker import CloseConnection, Context
from mqd.acceptor.handlers.groups.group_requests import has_share_groups
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    ShareAcknowledgeRequest,
    ShareAcknowledgeResponse,
    ShareFetchRequest,
    ShareFetchResponse,
)


async def handle(
    context: Context, header: RequestHeader, request: ShareFetchRequest | ShareAcknowledgeRequest
) -> ShareFetchResponse | ShareAcknowledgeResponse:
    if has_share_groups(context.broker):
        # the worker has not applied the feature yet: the client reconnects
        raise CloseConnection("ShareFetch and ShareAcknowledge are answered by the workers")
    response_class = ShareFetchResponse if isinstance(request, ShareFetchRequest) else ShareAcknowledgeResponse
    error = int(ErrorCode.UNSUPPORTED_VERSION)
    return response_class(error_code=error, error_message=error_message(error))
