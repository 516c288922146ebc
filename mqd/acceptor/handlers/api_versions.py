"""ApiVersions 0-4 (KIP-35, KIP-511, KIP-584): what this broker speaks.

Workers answer from ready-made bodies in the control segment (publish), so that a client can connect while the acceptor is away. transaction.version 2 makes clients
that know it use transactions of version 2 (KIP-890): the epoch moves with every transaction, partitions are added by their first Produce.
"""

from mqd.acceptor.broker import Context
from mqd.protocol import codec
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import SUPPORTED, RequestHeader
from mqd.protocol.messages import ApiVersionsRequest, ApiVersionsResponse

BODY_VERSIONS = range(5)
UNKNOWN_VERSION_BODY = 7  # where workers look when they do not know the version asked for


# Name -> (lowest, highest level that this broker could have in force, level in force).
FEATURES = {"group.version": (0, 1, 1), "transaction.version": (0, 2, 2)}
KNOWS_LEVEL_ZERO = 4  # clients of older versions cannot read a lowest level of 0: they are not told what is supported, only what is in force


def _response(error: int, version: int) -> ApiVersionsResponse:
    from mqd.acceptor.dispatch import HANDLERS

    keys = [ApiVersionsResponse.ApiVersion(api_key=key, min_version=SUPPORTED[key].min_version, max_version=SUPPORTED[key].max_version) for key in sorted(HANDLERS)]
    supported = [
        ApiVersionsResponse.SupportedFeature(name=name, min_version=lowest, max_version=highest)
        for name, (lowest, highest, _) in FEATURES.items()
        if lowest or version >= KNOWS_LEVEL_ZERO
    ]
    finalized = [ApiVersionsResponse.FinalizedFeature(name=name, max_version_level=level, min_version_level=level) for name, (_, _, level) in FEATURES.items()]
    return ApiVersionsResponse(error_code=int(error), api_keys=keys, supported_features=supported, finalized_features_epoch=0, finalized_features=finalized)


async def handle(context: Context, header: RequestHeader, request: ApiVersionsRequest) -> ApiVersionsResponse:
    return _response(ErrorCode.NONE, header.api_version)


def unsupported() -> ApiVersionsResponse:
    """To an ApiVersions request of a version that is not spoken: error 35, and what is spoken, in a body of version 0."""
    return _response(ErrorCode.UNSUPPORTED_VERSION, 0)


def bodies() -> dict[int, bytes]:
    """Version -> everything after the correlation id; UNKNOWN_VERSION_BODY -> the answer to versions that are not spoken."""
    found = {version: codec.encode(_response(ErrorCode.NONE, version), version) for version in BODY_VERSIONS}
    found[UNKNOWN_VERSION_BODY] = codec.encode(unsupported(), 0)
    return found
