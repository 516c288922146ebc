"""ListConfigResources 0-1 (KIP-1142): resources with a configuration. Version 0 lists only client
metrics subscriptions.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.configs.broker_loggers import RESOURCE_BROKER_LOGGER
from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER, RESOURCE_CLIENT_METRICS, RESOURCE_GROUP, RESOURCE_TOPIC
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import ListConfigResourcesRequest, ListConfigResourcesResponse

_RESOURCE_TYPES = (RESOURCE_TOPIC, RESOURCE_BROKER, RESOURCE_BROKER_LOGGER, RESOURCE_CLIENT_METRICS, RESOURCE_GROUP)


async def handle(
    context: Context, header: RequestHeader, request: ListConfigResourcesRequest
) -> ListConfigResourcesResponse:
    requested = set(request.resource_types) if header.api_version > 0 else {RESOURCE_CLIENT_METRICS}
    if not requested <= set(_RESOURCE_TYPES):
        return ListConfigResourcesResponse(error_code=int(ErrorCode.UNSUPPORTED_VERSION))
    kinds = [kind for kind in _RESOURCE_TYPES if kind in requested or not requested]
    return ListConfigResourcesResponse(
        config_resources=[
            ListConfigResourcesResponse.ConfigResource(resource_name=name, resource_type=kind)
            for kind in kinds
            for name in _names(context.broker, kind)
        ]
    )


def _names(broker: Broker, kind: int) -> list[str]:
    if kind == RESOURCE_TOPIC:
        return broker.metadata.sorted_names()
    if kind in (RESOURCE_BROKER, RESOURCE_BROKER_LOGGER):
        return [str(node_id) for node_id in sorted({*broker.metadata.brokers, broker.node_id})]
    metadata = broker.metadata
    return sorted(metadata.client_metrics if kind == RESOURCE_CLIENT_METRICS else metadata.group_configs)
