"""StreamsGroupHeartbeat version 0 (KIP-1071): all communication between a member and its streams
group. Creates the internal topics that the group's topology lacks, on behalf of the client.
"""

import msgspec

from mqd.acceptor.broker import Context
from mqd.acceptor.handlers.groups.group_requests import has_streams_groups, request_group
from mqd.acceptor.handlers.topics import create_topics
from mqd.acceptor.handlers.topics.topic_names import is_valid_name
from mqd.cluster.metadata.state import INTERNAL_TOPICS
from mqd.coordinator.group.streams.core import refusal
from mqd.coordinator.group.streams.events import StreamsHeartbeat, StreamsHeartbeatOutcome
from mqd.coordinator.group.streams.requests import internal_topic_names, problem_of, topic_names
from mqd.coordinator.group.streams.topology import MISSING_INTERNAL_TOPICS, NewTopic
from mqd.coordinator.internal_topic import CoordinatorError
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    StreamsGroupHeartbeatRequest,
    StreamsGroupHeartbeatResponse,
)
from mqd.security.acl import Operation, ResourceType

CREATE_TOPICS, CREATE_TOPICS_VERSION = 19, 7
CREATE_TIMEOUT_MS = 10_000


async def handle(
    context: Context, header: RequestHeader, request: StreamsGroupHeartbeatRequest
) -> StreamsGroupHeartbeatResponse:
    error_response = _check(context, request)
    if error_response is not None:
        return error_response
    try:
        outcome = await _heartbeat(context, header, request)
        if not outcome.missing_topics:
            return outcome.response
        failures = await _create_topics(context, header, outcome.missing_topics)
        if failures:
            for status in outcome.response.status or ():
                if status.status_code == MISSING_INTERNAL_TOPICS:
                    status.status_detail += f"; {failures}"
            return outcome.response
        return await _heartbeat_again(context, header, request, outcome.response)
    except CoordinatorError as error:
        return _failed(error.error_code)


def _check(context: Context, request: StreamsGroupHeartbeatRequest) -> StreamsGroupHeartbeatResponse | None:
    """Returns the response to an invalid or unauthorized request, or None if the request is valid."""
    if not has_streams_groups(context.broker):
        return _failed(ErrorCode.UNSUPPORTED_VERSION)
    problem = problem_of(request)
    if problem is not None:
        return _failed(ErrorCode.INVALID_REQUEST, problem)
    names = topic_names(request)
    if internal := sorted(INTERNAL_TOPICS.intersection(names)):
        return _failed(
            ErrorCode.STREAMS_INVALID_TOPOLOGY,
            f"Use of Kafka internal topics {','.join(internal)} in a Kafka Streams topology is prohibited.",
        )
    if invalid := [name for name in internal_topic_names(request) if not is_valid_name(name)]:
        return _failed(
            ErrorCode.STREAMS_INVALID_TOPOLOGY, f"Internal topic names {','.join(invalid)} are not valid topic names."
        )
    if not all(context.authorize(Operation.DESCRIBE, ResourceType.TOPIC, name) for name in names):
        return _failed(ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    return None


async def _heartbeat(
    context: Context, header: RequestHeader, request: StreamsGroupHeartbeatRequest
) -> StreamsHeartbeatOutcome:
    client_id, host = header.client_id or "", f"/{context.origin.reported_ip}"
    outcome: StreamsHeartbeatOutcome = await request_group(
        context.broker, request.group_id, lambda number: StreamsHeartbeat(number, client_id, host, request)
    )
    return outcome


async def _heartbeat_again(
    context: Context, header: RequestHeader, request: StreamsGroupHeartbeatRequest, first: StreamsGroupHeartbeatResponse
) -> StreamsGroupHeartbeatResponse:
    """Called when the topics exist, so that the member gets its tasks now, not at its next heartbeat."""
    next_request = msgspec.structs.replace(request, member_epoch=first.member_epoch, topology=None)
    response = (await _heartbeat(context, header, next_request)).response
    if response.error_code:
        return first
    if response.active_tasks is None:
        response.active_tasks, response.standby_tasks = first.active_tasks, first.standby_tasks
        response.warmup_tasks = first.warmup_tasks
    return response


async def _create_topics(context: Context, header: RequestHeader, missing: tuple[NewTopic, ...]) -> str:
    """Returns why some topics could not be created, or "" if all exist now."""
    topics = [
        CreateTopicsRequest.Topic(
            name=topic.name,
            num_partitions=topic.partition_count,
            replication_factor=topic.replication_factor,
            configs=[CreateTopicsRequest.Config(name=name, value=value) for name, value in topic.configs],
        )
        for topic in missing
    ]
    creation_header = RequestHeader(CREATE_TOPICS, CREATE_TOPICS_VERSION, header.correlation_id, header.client_id)
    request = CreateTopicsRequest(topics=topics, timeout_ms=CREATE_TIMEOUT_MS)
    return _describe_failures(await create_topics.handle(context, creation_header, request))


def _describe_failures(response: CreateTopicsResponse) -> str:
    failed = [topic for topic in response.topics if topic.error_code not in (0, ErrorCode.TOPIC_ALREADY_EXISTS)]
    denied = sorted(topic.name for topic in failed if topic.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    others = [
        f"{topic.name} ({topic.error_message or error_message(topic.error_code)})"
        for topic in failed
        if topic.error_code != ErrorCode.TOPIC_AUTHORIZATION_FAILED
    ]
    sentences = [f"Unauthorized to CREATE on topics {', '.join(denied)}."] if denied else []
    if others:
        sentences.append(f"Creation failed: {', '.join(sorted(others))}.")
    return " ".join(sentences)


def _failed(error: int, message: str | None = None) -> StreamsGroupHeartbeatResponse:
    return refusal(error, message or error_message(error)).response
