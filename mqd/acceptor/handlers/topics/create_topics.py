"""CreateTopics 2-7 (KIP-4, KIP-464, KIP-525, KIP-599)."""

import asyncio
from collections import Counter

import msgspec

from mqd.acceptor.broker import Broker, Context
from mqd.acceptor.handlers.configs import config_entries
from mqd.acceptor.handlers.topics.topic_names import is_valid_name
from mqd.acceptor.rights import may_create_view, may_schedule
from mqd.acceptor.throttle import MutationQuota
from mqd.base.views import VIEW_OF
from mqd.cluster.host import messages
from mqd.cluster.metadata.state import INTERNAL_TOPICS
from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import CreateTopicsRequest, CreateTopicsResponse
from mqd.security.acl import Operation, ResourceType

PARTITIONS_MAX = 10_000  # per request, as in Kafka


async def handle(context: Context, header: RequestHeader, request: CreateTopicsRequest) -> CreateTopicsResponse:
    counts = Counter(topic.name for topic in request.topics)
    names = list(dict.fromkeys(topic.name for topic in request.topics))
    by_name = {topic.name: topic for topic in request.topics}
    may_create_any = context.authorize(Operation.CREATE, ResourceType.CLUSTER, named_in_request=False)
    denied = [
        name
        for name in names
        if counts[name] == 1
        and not (
            (may_create_any or context.authorize(Operation.CREATE, ResourceType.TOPIC, name))
            and may_schedule(context, by_name[name].configs)
            and may_create_view(context, by_name[name].configs)
        )
    ]
    if denied:
        denied_names = set(denied)
        permitted = [topic for topic in request.topics if topic.name not in denied_names]
        response = await handle(context, header, msgspec.structs.replace(request, topics=permitted))
        response.topics += [
            _refused(name, ErrorCode.TOPIC_AUTHORIZATION_FAILED, "Authorization failed.") for name in denied
        ]
        return response
    count = sum(_partition_count(context.broker, topic) for topic in request.topics if counts[topic.name] == 1)
    if count > PARTITIONS_MAX:
        text = f"{count} partitions requested; one request may create at most {PARTITIONS_MAX}: use several requests."
        refused = [_refused(topic.name, ErrorCode.POLICY_VIOLATION, text) for topic in request.topics]
        return CreateTopicsResponse(topics=refused)
    quota = MutationQuota(context, header, is_strict=header.api_version >= 6)
    results = await asyncio.gather(*(_create(context, by_name[name], counts[name], request, quota) for name in names))
    return CreateTopicsResponse(throttle_time_ms=quota.throttle_time_ms, topics=list(results))


def _partition_count(broker: Broker, topic: CreateTopicsRequest.Topic) -> int:
    if topic.assignments:
        return len(topic.assignments)
    return broker.broker_number("num.partitions") if topic.num_partitions == -1 else max(topic.num_partitions, 0)


async def _create(
    context: Context,
    topic: CreateTopicsRequest.Topic,
    occurrences: int,
    request: CreateTopicsRequest,
    quota: MutationQuota,
) -> CreateTopicsResponse.TopicResult:
    async with quota.lock:
        if quota.must_refuse():
            return _refused(topic.name, ErrorCode.THROTTLING_QUOTA_EXCEEDED, None)
        return await _create_admitted(context, topic, occurrences, request, quota)


async def _create_admitted(
    context: Context,
    topic: CreateTopicsRequest.Topic,
    occurrences: int,
    request: CreateTopicsRequest,
    quota: MutationQuota,
) -> CreateTopicsResponse.TopicResult:
    broker = context.broker
    if occurrences > 1:
        return _refused(topic.name, ErrorCode.INVALID_REQUEST, "Duplicate topic name.")
    if topic.name in INTERNAL_TOPICS and topic.name not in broker.metadata.topics:
        return _refused(
            topic.name,
            ErrorCode.INVALID_TOPIC_EXCEPTION,
            "Internal topics are created by the broker when the first client needs them.",
        )
    # The controller gets a mapping, which cannot hold two assignments of one partition. So repeated
    # assignments are refused here, but only after the errors that Kafka's controller finds first.
    passes_first_checks = topic.name not in broker.metadata.topics and is_valid_name(topic.name)
    passes_first_checks &= topic.num_partitions == -1 and topic.replication_factor == -1
    indexes = [assignment.partition_index for assignment in topic.assignments]
    if passes_first_checks and len(set(indexes)) != len(indexes):
        # Kafka validates the configuration before the assignments
        config = {config.name: config.value for config in topic.configs}
        without_assignments = messages.CreateTopic(topic.name, -1, -1, {}, config)
        response = await broker.controller.request(without_assignments, request.timeout_ms, validate_only=True)
        if response.error == ErrorCode.INVALID_CONFIG:
            return _refused(topic.name, response.error, response.message)
        return _refused(topic.name, ErrorCode.INVALID_REPLICA_ASSIGNMENT, "A partition has two assignments.")
    change = messages.CreateTopic(
        name=topic.name,
        partition_count=topic.num_partitions,
        replication_factor=topic.replication_factor,
        assignments={assignment.partition_index: assignment.broker_ids for assignment in topic.assignments},
        config={config.name: config.value for config in topic.configs},
    )
    response = await broker.controller.request(change, request.timeout_ms, request.validate_only)
    if response.error:
        return _refused(topic.name, response.error, response.message)
    created = response.topic
    assert created is not None
    base = broker.metadata.topics.get(created.config.get(VIEW_OF, ""))
    partitions = base.partitions if base is not None else created.partitions
    if not request.validate_only:
        quota.charge(len(partitions))
    if not context.authorize(Operation.DESCRIBE_CONFIGS, ResourceType.TOPIC, topic.name, named_in_request=False):
        return CreateTopicsResponse.TopicResult(
            name=topic.name,
            topic_id=created.topic_id,
            topic_config_error_code=int(ErrorCode.TOPIC_AUTHORIZATION_FAILED),
        )
    return CreateTopicsResponse.TopicResult(
        name=topic.name,
        topic_id=created.topic_id,
        num_partitions=len(partitions),
        replication_factor=len(partitions[0].replicas),
        configs=[
            CreateTopicsResponse.Config(
                name=entry.name,
                value=entry.value,
                read_only=False,
                config_source=entry.source,
                is_sensitive=entry.is_sensitive,
            )
            for entry in config_entries.topic_entries(broker, created.config, len(partitions[0].replicas))
        ],
    )


def _refused(name: str, error: int, message: str | None) -> CreateTopicsResponse.TopicResult:
    return CreateTopicsResponse.TopicResult(name=name, error_code=int(error), error_message=message)
