"""UpdateFeatures 0-2 (KIP-584, KIP-1022): changes all levels or none, even in versions 0 and 1, whose
responses have an error for each level. The change is on disk before the request is answered.
"""

from mqd.acceptor.broker import Context
from mqd.cluster.host import messages
from mqd.cluster.metadata.rules.settings import SAFE_DOWNGRADE, UPGRADE
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import UpdateFeaturesRequest, UpdateFeaturesResponse


async def handle(context: Context, header: RequestHeader, request: UpdateFeaturesRequest) -> UpdateFeaturesResponse:
    if not request.feature_updates:
        return UpdateFeaturesResponse(
            error_code=int(ErrorCode.INVALID_REQUEST), error_message="Can not provide empty FeatureUpdates."
        )
    updates = [
        messages.FeatureUpdate(update.feature, update.max_version_level, _upgrade_type(update, header.api_version))
        for update in request.feature_updates
    ]
    response = await context.broker.controller.request(
        messages.UpdateFeatures(updates), request.timeout_ms, request.validate_only
    )
    if response.error:
        return UpdateFeaturesResponse(error_code=response.error, error_message=response.message)
    results = (
        [UpdateFeaturesResponse.UpdatableFeatureResult(feature=update.feature) for update in request.feature_updates]
        if header.api_version < 2
        else []
    )
    return UpdateFeaturesResponse(results=results)


def _upgrade_type(update: UpdateFeaturesRequest.FeatureUpdateKey, version: int) -> int:
    if version > 0:
        return update.upgrade_type
    return SAFE_DOWNGRADE if update.allow_downgrade else UPGRADE
