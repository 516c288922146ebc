"""DescribeConfigs 1-4 (KIP-133, KIP-226, KIP-569, KIP-848): topics, this broker, its loggers,
client metrics subscriptions, and consumer groups; with synonyms and documentation on request.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.configs import broker_loggers, config_entries
from mqd.acceptor.handlers.configs.config_entries import ConfigEntry
from mqd.base.cluster_config import format_address
from mqd.cluster.metadata.rules.configs import RESOURCE_BROKER, RESOURCE_CLIENT_METRICS, RESOURCE_GROUP, RESOURCE_TOPIC
from mqd.cluster.metadata.rules.topics import Refusal, check_topic_name
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import DescribeConfigsRequest, DescribeConfigsResponse

RESOURCE_TYPES = {
    RESOURCE_TOPIC,
    RESOURCE_BROKER,
    broker_loggers.RESOURCE_BROKER_LOGGER,
    RESOURCE_CLIENT_METRICS,
    RESOURCE_GROUP,
}


async def handle(context: Context, header: RequestHeader, request: DescribeConfigsRequest) -> DescribeConfigsResponse:
    unknown = {resource.resource_type for resource in request.resources} - RESOURCE_TYPES
    refusal = _unsupported(min(unknown)) if unknown else None
    return DescribeConfigsResponse(
        results=[_resource(context, resource, request, refusal) for resource in request.resources]
    )


def _resource(
    context: Context,
    resource: DescribeConfigsRequest.Resource,
    request: DescribeConfigsRequest,
    request_refusal: Refusal | None,
) -> DescribeConfigsResponse.Result:
    """`request_refusal`: the error of the whole request. As in Kafka, one invalid resource type
    invalidates the whole request.
    """
    try:
        if request_refusal is not None:
            raise request_refusal
        entries, error, message = _entries(context, resource), 0, None
    except Refusal as refusal:
        entries, error, message = [], refusal.error, refusal.message
    return DescribeConfigsResponse.Result(
        error_code=error,
        error_message=message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
        configs=[_config(entry, request) for entry in entries],
    )


def _entries(context: Context, resource: DescribeConfigsRequest.Resource) -> list[ConfigEntry]:
    """Raises Refusal."""
    broker: Broker = context.broker
    names = set(resource.configuration_keys) if resource.configuration_keys else None  # an empty list: all
    if resource.resource_type == RESOURCE_TOPIC:
        check_topic_name(resource.resource_name)
        topic = broker.metadata.topics.get(resource.resource_name)
        if topic is None:
            raise Refusal(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{resource.resource_name}' does not exist.")
        return config_entries.topic_entries(
            broker,
            topic.config,
            min((len(partition.replicas) - len(partition.adding) for partition in topic.partitions), default=1),
            names,
        )
    if resource.resource_type == RESOURCE_BROKER:
        if resource.resource_name == "":
            return config_entries.all_brokers_entries(broker, names)
        if resource.resource_name != str(broker.node_id):
            raise Refusal(
                ErrorCode.INVALID_REQUEST,
                f"Unexpected broker id, expected {broker.node_id} or empty string, but received"
                f" {resource.resource_name}",
            )
        advertised = format_address(*broker.advertised_address(context.origin))
        listener = broker.listener_name(context.origin)
        return config_entries.broker_entries(broker, f"{listener}://{advertised}", names)
    if resource.resource_type == RESOURCE_GROUP:
        if not resource.resource_name:
            raise Refusal(ErrorCode.INVALID_REQUEST, "The name of a group must not be empty.")
        return config_entries.group_entries(
            broker, broker.metadata.group_configs.get(resource.resource_name, {}), names
        )
    if resource.resource_type == RESOURCE_CLIENT_METRICS:
        if not resource.resource_name:
            raise Refusal(ErrorCode.INVALID_REQUEST, "Client metrics subscription name must not be empty")
        return config_entries.client_metrics_entries(
            broker.metadata.client_metrics.get(resource.resource_name, {}), names
        )
    if resource.resource_type == broker_loggers.RESOURCE_BROKER_LOGGER:
        return broker_loggers.describe(broker, resource.resource_name, names)
    raise _unsupported(resource.resource_type)


def _unsupported(resource_type: int) -> Refusal:
    return Refusal(
        ErrorCode.INVALID_REQUEST,
        f"Unsupported resource type {resource_type}: topics (2), brokers (4), broker loggers (8), client metrics"
        " (16) and groups (32) have configurations.",
    )


def _config(entry: ConfigEntry, request: DescribeConfigsRequest) -> DescribeConfigsResponse.Config:
    synonyms = entry.synonyms if request.include_synonyms else []
    return DescribeConfigsResponse.Config(
        name=entry.name,
        value=entry.value,
        read_only=entry.is_read_only,
        config_source=entry.source,
        is_sensitive=entry.is_sensitive,
        synonyms=[
            DescribeConfigsResponse.Synonym(name=synonym.name, value=synonym.value, source=synonym.source)
            for synonym in synonyms
        ],
        config_type=entry.type,
        documentation=entry.documentation if request.include_documentation else None,
    )
