"""ApiVersions 0-4 (KIP-35, KIP-511, KIP-584): what this broker speaks.

Workers answer from ready-made bodies in the control segment (publish), so that a client can connect while the acceptor is away. No features are
finalized: transaction.version 2 would switch clients to a protocol that is not implemented.
"""

from mqd.acceptor.broker import Context
from mqd.protocol import codec
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import SUPPORTED, RequestHeader
from mqd.protocol.messages import ApiVersionsRequest, ApiVersionsResponse

BODY_VERSIONS = range(5)
UNKNOWN_VERSION_BODY = 7  # where workers look when they do not know the version asked for


def _response(error: int) -> ApiVersionsResponse:
    from mqd.acceptor.dispatch import HANDLERS

    keys = [ApiVersionsResponse.ApiVersion(api_key=key, min_version=SUPPORTED[key].min_version, max_version=SUPPORTED[key].max_version) for key in sorted(HANDLERS)]
    return ApiVersionsResponse(error_code=int(error), api_keys=keys)


async def handle(context: Context, header: RequestHeader, request: ApiVersionsRequest) -> ApiVersionsResponse:
    return _response(ErrorCode.NONE)


def unsupported() -> ApiVersionsResponse:
    """To an ApiVersions request of a version that is not spoken: error 35, and what is spoken, in a body of version 0."""
    return _response(ErrorCode.UNSUPPORTED_VERSION)


def bodies() -> dict[int, bytes]:
    """Version -> everything after the correlation id; UNKNOWN_VERSION_BODY -> the answer to versions that are not spoken."""
    found = {version: codec.encode(_response(ErrorCode.NONE), version) for version in BODY_VERSIONS}
    found[UNKNOWN_VERSION_BODY] = codec.encode(unsupported(), 0)
    return found
