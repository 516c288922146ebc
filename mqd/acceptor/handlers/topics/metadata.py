"""Metadata 0-13 (KIP-4, KIP-204, KIP-516, KIP-700, KIP-1102): brokers, topics, leaders; creates
requested topics if the broker's configuration allows it.

The address of this broker is one that the client can reach: that of advertised.listeners, otherwise
the one that the client connected to. Workers may cache a response in which no topic is missing and
nothing has an error, and reuse it for equal requests from the same place until the metadata version
changes. They do not reuse it while this host has no lease. Responses made without a lease have
errors for the partitions that this host leads, and are therefore not cached.
"""

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.broker_state import OWNER_NONE, log
from mqd.acceptor.handlers.security.authorized import TOPIC_OPERATIONS, authorized_cluster_operations
from mqd.acceptor.handlers.topics.topic_names import missing_topic_error
from mqd.cluster.host import messages
from mqd.cluster.metadata.state import INTERNAL_TOPICS
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import MetadataRequest, MetadataResponse
from mqd.security.acl import Operation, ResourceType

CREATE_TIMEOUT_MS = 10_000
NO_ID = b"\0" * 16
# earlier versions request topics only by name, although 10 and 11 have a field for the id
_VERSION_NULL_NAMES = 12
# Errors of a topic creation after which a client should simply wait and retry.
_RETRIABLE = {ErrorCode.REQUEST_TIMED_OUT, ErrorCode.KAFKA_STORAGE_ERROR, ErrorCode.TOPIC_ALREADY_EXISTS}


async def handle(context: Context, header: RequestHeader, request: MetadataRequest) -> MetadataResponse:
    broker = context.broker
    if header.api_version < _VERSION_NULL_NAMES and any(
        requested.topic_id != NO_ID or requested.name is None for requested in request.topics or ()
    ):
        return _refused(request)
    version = broker.metadata.version
    topics = await _topics(context, header.api_version, request)
    # with an authorizer, the response depends on the client
    context.is_cacheable = (
        broker.authorizer is None
        and version == broker.metadata.version
        and not any(topic.error_code or any(partition.error_code for partition in topic.partitions) for topic in topics)
    )
    if request.include_topic_authorized_operations:
        # as in Kafka: rights apply to names, and an unknown id has no name
        for topic in topics:
            if topic.name is not None and topic.error_code != ErrorCode.TOPIC_AUTHORIZATION_FAILED:
                topic.topic_authorized_operations = context.authorized_operations(
                    ResourceType.TOPIC, topic.name, TOPIC_OPERATIONS
                )
    response = MetadataResponse(
        brokers=[
            MetadataResponse.Broker(node_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack in broker.brokers(context.origin)
        ],
        cluster_id=broker.metadata.cluster_id,
        controller_id=broker.node_id,
        topics=topics,
    )
    if request.include_cluster_authorized_operations:
        response.cluster_authorized_operations = authorized_cluster_operations(context)
    return response


def _refused(request: MetadataRequest) -> MetadataResponse:
    """The whole response, as in Kafka: even the brokers are omitted."""
    error = int(ErrorCode.INVALID_REQUEST)
    return MetadataResponse(
        cluster_id=None,
        controller_id=-1,
        topics=[
            MetadataResponse.Topic(error_code=error, name=requested.name or "", topic_id=requested.topic_id)
            for requested in request.topics or ()
        ],
    )


async def _topics(context: Context, version: int, request: MetadataRequest) -> list[MetadataResponse.Topic]:
    broker = context.broker
    if request.topics is None or (version == 0 and not request.topics):
        return [
            _topic(broker, broker.metadata.topics[name])
            for name in broker.metadata.sorted_names()
            if context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name, named_in_request=False)
        ]
    topics = []
    seen_keys: set[bytes | str | None] = set()
    for requested in request.topics:
        has_id = requested.topic_id != NO_ID
        key = requested.topic_id if has_id else requested.name
        if key in seen_keys:
            continue
        seen_keys.add(key)
        if has_id:
            topic = broker.metadata.by_id(requested.topic_id)
            if topic is None:
                topics.append(
                    MetadataResponse.Topic(error_code=int(ErrorCode.UNKNOWN_TOPIC_ID), topic_id=requested.topic_id)
                )
            elif not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, topic.name):
                # ids are not secret, but names are
                topics.append(_unauthorized(None, requested.topic_id))
            else:
                topics.append(_topic(broker, topic))
        elif requested.name is None:
            topics.append(MetadataResponse.Topic(error_code=int(ErrorCode.INVALID_REQUEST), topic_id=NO_ID))
        else:
            topics.append(await _by_name(context, requested.name, version < 4 or request.allow_auto_topic_creation))
    return topics


def _unauthorized(name: str | None, topic_id: bytes) -> MetadataResponse.Topic:
    return MetadataResponse.Topic(
        error_code=int(ErrorCode.TOPIC_AUTHORIZATION_FAILED), name=name, topic_id=topic_id, is_internal=False
    )


async def _by_name(context: Context, name: str, may_create: bool) -> MetadataResponse.Topic:
    """Whether a topic exists is shown only to clients that may describe it."""
    broker = context.broker
    if not context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name):
        return _unauthorized(name, NO_ID)
    topic = broker.metadata.topics.get(name)
    if topic is not None:
        return _topic(broker, topic)
    should_create = may_create and bool(broker.broker_value("auto.create.topics.enable"))
    if should_create and not (
        context.authorize(Operation.CREATE, ResourceType.CLUSTER, named_in_request=False)
        or context.authorize(Operation.CREATE, ResourceType.TOPIC, name)
    ):
        return _unauthorized(name, NO_ID)
    error = await _create(broker, name) if should_create else missing_topic_error(name)
    topic = broker.metadata.topics.get(name)
    if topic is not None:
        return _topic(broker, topic)
    return MetadataResponse.Topic(error_code=int(error), name=name, topic_id=NO_ID)


async def _create(broker: Broker, name: str) -> int:
    """Returns the error that the client gets if the topic does not exist afterwards. If two clients
    create a topic at the same time, the second creation is refused, and the second client finds the
    topic that the first one created.
    """
    if name in INTERNAL_TOPICS:
        coordinator = broker.coordinators.of_topic(name) if broker.coordinators is not None else None
        if coordinator is None:
            return int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        await coordinator.ensure_topic()
        return int(ErrorCode.LEADER_NOT_AVAILABLE)
    change = messages.CreateTopic(name, -1, -1, {}, {})
    response = await broker.controller.request(change, CREATE_TIMEOUT_MS)
    if response.error == 0 or response.error in _RETRIABLE:
        if response.error not in (0, ErrorCode.TOPIC_ALREADY_EXISTS):
            log.warning("topic could not be created automatically", topic=name, reason=response.message)
        return int(ErrorCode.LEADER_NOT_AVAILABLE)
    return response.error


def _topic(broker: Broker, topic: messages.TopicImage) -> MetadataResponse.Topic:
    known_count = broker.metadata.known_count(topic, broker.table.metadata_version)
    return MetadataResponse.Topic(
        name=topic.name,
        topic_id=topic.topic_id,
        is_internal=topic.internal,
        partitions=[
            _partition(broker, partition, partition.index < known_count)
            for partition in broker.metadata.visible_partitions(topic)
        ],
    )


def _partition(broker: Broker, partition: messages.PartitionImage, is_known: bool) -> MetadataResponse.Partition:
    is_available = is_known and is_served(broker, partition)
    return MetadataResponse.Partition(
        error_code=int(ErrorCode.NONE if is_available else ErrorCode.LEADER_NOT_AVAILABLE),
        partition_index=partition.index,
        leader_id=partition.leader if is_available else -1,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replicas,
        isr_nodes=partition.in_sync_replicas,
        offline_replicas=offline_replicas(broker, partition),
    )


def is_served(broker: Broker, partition: messages.PartitionImage) -> bool:
    """Whether clients may be directed to the partition's leader."""
    if partition.leader == broker.node_id:
        return broker.view(partition) is not None
    return broker.metadata.is_alive(partition.leader)


def offline_replicas(broker: Broker, partition: messages.PartitionImage) -> list[int]:
    """Replicas on fenced hosts or, as far as this host knows, in unusable log directories."""
    own_replica = [broker.node_id] if partition.owner == OWNER_NONE and broker.node_id in partition.replicas else []
    return own_replica + [
        node for node in partition.replicas if node != broker.node_id and not broker.metadata.is_alive(node)
    ]
