"""ApiVersions 0-4 (KIP-35, KIP-511, KIP-584): the APIs and versions that this broker supports.

Workers answer from prebuilt bodies in the control segment (publish), so that a client can connect
while the acceptor is down; requests that they refuse are handled here. With transaction.version 2,
clients that know it use transactions of version 2 (KIP-890): every transaction bumps the epoch, and
partitions are added by their first Produce. The supported levels are in
mqd/cluster/metadata/features.py, the current ones in the metadata (UpdateFeatures).
"""

import re
from collections.abc import Mapping

from mqd.acceptor.broker import Context
from mqd.acceptor.metadata import Metadata
from mqd.cluster.metadata.features import FEATURES, has_share_groups, has_streams_groups, levels
from mqd.native import Control
from mqd.protocol import codec
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import SUPPORTED, RequestHeader
from mqd.protocol.messages import ApiVersionsRequest, ApiVersionsResponse

BODY_VERSIONS = range(5)
UNKNOWN_VERSION_BODY = 7  # the entry that workers use if the requested version is not supported
# Before this version, clients cannot parse a minimum level of 0: a feature whose minimum is 0 is left
# out of supported_features, and appears only in finalized_features.
LEVEL_ZERO_SINCE_VERSION = 4
CLIENT_NAME_SINCE_VERSION = 3
# APIs of share groups and of streams groups: advertised only when all hosts support them
SHARE_GROUP_KEYS = frozenset({76, 77, 78, 79, 90, 91, 92})
STREAMS_GROUP_KEYS = frozenset({88, 89})
CLIENT_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?")  # KIP-511


def _response(error: int, version: int, finalized: Mapping[str, int], epoch: int) -> ApiVersionsResponse:
    """`finalized`: the feature levels in the metadata log; `epoch`: their version."""
    from mqd.acceptor.dispatch import HANDLERS

    current = levels(finalized)
    hidden = frozenset() if has_share_groups(current) else SHARE_GROUP_KEYS
    if not has_streams_groups(current):
        hidden |= STREAMS_GROUP_KEYS
    keys = [
        ApiVersionsResponse.ApiVersion(
            api_key=key, min_version=SUPPORTED[key].min_version, max_version=SUPPORTED[key].max_version
        )
        for key in sorted(HANDLERS.keys() - hidden)
    ]
    supported = [
        ApiVersionsResponse.SupportedFeature(name=feature.name, min_version=feature.first, max_version=feature.last)
        for feature in FEATURES.values()
        if feature.first or version >= LEVEL_ZERO_SINCE_VERSION
    ]
    in_force = [
        ApiVersionsResponse.FinalizedFeature(name=name, max_version_level=level, min_version_level=level)
        for name, level in current.items()
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
    if header.api_version >= CLIENT_NAME_SINCE_VERSION and not all(CLIENT_NAME.fullmatch(name) for name in names):
        return ApiVersionsResponse(error_code=int(ErrorCode.INVALID_REQUEST))
    metadata = context.broker.metadata
    return _response(ErrorCode.NONE, header.api_version, metadata.features, metadata.features_version)


def unsupported_version_response(finalized: Mapping[str, int]) -> ApiVersionsResponse:
    """The response to an ApiVersions request of an unsupported version: error 35 and the supported
    versions, in a body of version 0.
    """
    return _response(ErrorCode.UNSUPPORTED_VERSION, 0, finalized, 0)


def bodies(finalized: Mapping[str, int], epoch: int) -> dict[int, bytes]:
    """Version -> everything after the correlation id; UNKNOWN_VERSION_BODY -> the response to
    unsupported versions.
    """
    bodies_by_version = {
        version: codec.encode(_response(ErrorCode.NONE, version, finalized, epoch), version)
        for version in BODY_VERSIONS
    }
    bodies_by_version[UNKNOWN_VERSION_BODY] = codec.encode(unsupported_version_response(finalized), 0)
    return bodies_by_version


def publish(control: Control, metadata: Metadata) -> None:
    """Called at the start and after every change of a feature's level: workers answer with these
    bodies from then on.
    """
    for version, body in bodies(metadata.features, metadata.features_version).items():
        control.set_api_versions(version, body)
    control.set_share_version(int(has_share_groups(levels(metadata.features))))
