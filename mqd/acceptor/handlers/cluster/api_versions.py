"""ApiVersions 0-4 (KIP-35, KIP-511, KIP-584): what this broker speaks.

Workers answer from ready-made bodies in the control segment (publish), so that a client can connect
while the acceptor is away; what is refused comes here. transaction.version 2 makes clients that know it use transactions of
version 2 (KIP-890): the epoch moves with every transaction, partitions are added by their first
Produce. Which levels there are: mqd/cluster/metadata/features.py; which are in force: the metadata
(UpdateFeatures).
"""

import re
from collections.abc import Mapping

from mqd.acceptor.broker import Context
from mqd.acceptor.metadata import Metadata
from mqd.cluster.metadata.features import FEATURES, levels
from mqd.native import Control
from mqd.protocol import codec
from mqd.protocol.errors import ErrorCode
from mqd.protocol.framing import SUPPORTED, RequestHeader
from mqd.protocol.messages import ApiVersionsRequest, ApiVersionsResponse

BODY_VERSIONS = range(5)
UNKNOWN_VERSION_BODY = 7  # where workers look when they do not know the version asked for
# clients of older versions cannot read a lowest level of 0: they are not told what is supported,
# only what is in force
KNOWS_LEVEL_ZERO = 4
NAMES_CLIENT = 3
CLIENT_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?")  # KIP-511


def _response(error: int, version: int, finalized: Mapping[str, int], epoch: int) -> ApiVersionsResponse:
    """`finalized`: the levels that the metadata log names; `epoch`: their version."""
    from mqd.acceptor.dispatch import HANDLERS

    keys = [
        ApiVersionsResponse.ApiVersion(
            api_key=key, min_version=SUPPORTED[key].min_version, max_version=SUPPORTED[key].max_version
        )
        for key in sorted(HANDLERS)
    ]
    supported = [
        ApiVersionsResponse.SupportedFeature(name=feature.name, min_version=feature.first, max_version=feature.last)
        for feature in FEATURES.values()
        if feature.first or version >= KNOWS_LEVEL_ZERO
    ]
    in_force = [
        ApiVersionsResponse.FinalizedFeature(name=name, max_version_level=level, min_version_level=level)
        for name, level in levels(finalized).items()
        if level > 0
    ]
    return ApiVersionsResponse(
        error_code=int(error),
        api_keys=keys,
        supported_features=supported,
        finalized_features_epoch=max(epoch, 0),
        finalized_features=in_force,
    )


async def handle(context: Context, header: RequestHeader, request: ApiVersionsRequest) -> ApiVersionsResponse:
    names = (request.client_software_name, request.client_software_version)
    if header.api_version >= NAMES_CLIENT and not all(CLIENT_NAME.fullmatch(name) for name in names):
        return ApiVersionsResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    metadata = context.broker.metadata
    return _response(ErrorCode.NONE, header.api_version, metadata.features, metadata.features_version)


def unsupported() -> ApiVersionsResponse:
    """To an ApiVersions request of a version that is not spoken: error 35, and what is spoken, in a
    body of version 0.
    """
    return _response(ErrorCode.UNSUPPORTED_VERSION, 0, {}, 0)


def bodies(finalized: Mapping[str, int], epoch: int) -> dict[int, bytes]:
    """Version -> everything after the correlation id; UNKNOWN_VERSION_BODY -> the answer to
    versions that are not spoken.
    """
    found = {
        version: codec.encode(_response(ErrorCode.NONE, version, finalized, epoch), version)
        for version in BODY_VERSIONS
    }
    found[UNKNOWN_VERSION_BODY] = codec.encode(unsupported(), 0)
    return found


def publish(control: Control, metadata: Metadata) -> None:
    """At the start, and whenever a feature's level has changed: workers answer with this from now
    on.
    """
    for version, body in bodies(metadata.features, metadata.features_version).items():
        control.set_api_versions(version, body)
