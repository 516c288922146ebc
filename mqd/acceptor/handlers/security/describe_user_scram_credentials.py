"""DescribeUserScramCredentials 0 (KIP-554). Authentication is not available yet, so no user has
credentials: a request for all users returns none; for named users, each is not found.
"""

from mqd.acceptor.broker import Context
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import RequestHeader
from mqd.protocol.messages import DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse


async def handle(
    context: Context, header: RequestHeader, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    names = [user.name for user in request.users or []]
    results = []
    for name in dict.fromkeys(names):
        error, text = ErrorCode.RESOURCE_NOT_FOUND, f"Attempt to describe a user credential that does not exist: {name}"
        if names.count(name) > 1:
            error, text = (
                ErrorCode.DUPLICATE_RESOURCE,
                f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}",
            )
        results.append(
            DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult(
                user=name, error_code=int(error), error_message=text
            )
        )
    return DescribeUserScramCredentialsResponse(results=results)
