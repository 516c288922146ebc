"""Reads StreamsGroupHeartbeat requests, without the group's state."""

from __future__ import annotations

from typing import Any

from mqd.coordinator.group.consumer.requests import NAME_CHARS_MAX, SUBSCRIPTION_CHARS_MAX, Refused
from mqd.coordinator.group.streams.events import StreamsHeartbeat
from mqd.coordinator.group.streams.records import Description, tasks_of
from mqd.coordinator.group.streams.tasks import NO_TASKS, Tasks
from mqd.coordinator.group.streams.topology import InvalidTopology, Topology, parse
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import StreamsGroupHeartbeatRequest

SUBTOPOLOGIES_MAX = 10_000


def problem_of(message: StreamsGroupHeartbeatRequest) -> str | None:
    """Why the request is invalid, whatever the group's state is; None if it is not."""
    epoch = message.member_epoch
    if not message.member_id.strip():
        return "MemberId can't be empty."
    if not message.group_id.strip():
        return "GroupId can't be empty."
    if message.rack_id == "":
        return "RackId can't be empty."
    if message.instance_id is not None:
        return "Static members are not supported in streams groups."
    if epoch < -1:
        return "MemberEpoch is invalid."
    if message.task_offsets is not None:
        return "TaskOffsets are not supported yet."
    if message.task_end_offsets is not None:
        return "TaskEndOffsets are not supported yet."
    if message.warmup_tasks:
        return "WarmupTasks are not supported yet."
    if epoch == 0:
        return _problem_of_joining(message)
    if message.topology is not None:
        return "Topology can only be provided when (re-)joining."
    roles = (message.active_tasks, message.standby_tasks, message.warmup_tasks)
    if any(role is None for role in roles) and any(role is not None for role in roles):
        return "If one task-type is non-null, all must be non-null."
    return _problem_of_size(message)


def _problem_of_joining(message: StreamsGroupHeartbeatRequest) -> str | None:
    if message.rebalance_timeout_ms == -1:
        return "RebalanceTimeoutMs must be provided in first request."
    for name, role in (("Active", message.active_tasks), ("Standby", message.standby_tasks)):
        if role is None or role:
            return f"{name}Tasks must be empty when (re-)joining."
    if message.warmup_tasks is None:
        return "WarmupTasks must be empty when (re-)joining."
    if message.topology is None:
        return "Topology must be non-null when (re-)joining."
    if message.topology.epoch < 0:
        return "The epoch of the topology cannot be negative."
    if any(subtopology.source_topic_regex for subtopology in message.topology.subtopologies):
        return "Regular expressions for source topics are not supported yet."
    return _problem_of_size(message)


def _problem_of_size(message: StreamsGroupHeartbeatRequest) -> str | None:
    """Why the names do not fit into a record's strings (32,767 bytes) or a batch; None: they do.
    Each name and number adds one character, because even an empty name takes space.
    """
    texts = [message.group_id, message.member_id, message.rack_id or "", message.process_id or ""]
    for tag in message.client_tags or ():
        texts += (tag.key, tag.value)
    if message.user_endpoint is not None:
        texts.append(message.user_endpoint.host)
    number_count = 0
    if message.topology is not None:
        texts += topology_texts(message.topology)
        number_count = sum(
            1 + len(group.source_topics) + len(group.repartition_source_topics)
            for subtopology in message.topology.subtopologies
            for group in subtopology.copartition_groups
        )
    if number_count + len(texts) + sum(map(len, texts)) > SUBSCRIPTION_CHARS_MAX or any(
        len(text) > NAME_CHARS_MAX for text in texts
    ):
        return f"A name has more than {NAME_CHARS_MAX} characters, or the request more than {SUBSCRIPTION_CHARS_MAX}."
    if message.topology is not None and len(message.topology.subtopologies) > SUBTOPOLOGIES_MAX:
        return f"The topology has more than {SUBTOPOLOGIES_MAX} subtopologies."
    return None


def topology_texts(topology: StreamsGroupHeartbeatRequest.Topology) -> list[str]:
    texts = []
    for subtopology in topology.subtopologies:
        texts += [subtopology.subtopology_id, *subtopology.source_topics, *subtopology.repartition_sink_topics]
        for topic in (*subtopology.state_changelog_topics, *subtopology.repartition_source_topics):
            texts.append(topic.name)
            texts += [text for config in topic.topic_configs for text in (config.key, config.value)]
    return texts


def topic_names(message: StreamsGroupHeartbeatRequest) -> list[str]:
    """Every topic of the topology, sorted."""
    names: set[str] = set()
    for subtopology in message.topology.subtopologies if message.topology is not None else ():
        names.update(subtopology.source_topics, subtopology.repartition_sink_topics)
        names.update(
            topic.name for topic in (*subtopology.state_changelog_topics, *subtopology.repartition_source_topics)
        )
    return sorted(names)


def internal_topic_names(message: StreamsGroupHeartbeatRequest) -> list[str]:
    """Topics that the coordinator would create."""
    subtopologies = message.topology.subtopologies if message.topology is not None else ()
    return sorted(
        {
            topic.name
            for subtopology in subtopologies
            for topic in (*subtopology.state_changelog_topics, *subtopology.repartition_source_topics)
        }
    )


def owned_tasks(message: StreamsGroupHeartbeatRequest) -> Tasks | None:
    """The tasks that the member reports; None: the request does not list them. Raises Refused."""
    if message.active_tasks is None:
        return None
    try:
        return Tasks(tasks_of(message.active_tasks), tasks_of(message.standby_tasks or []), NO_TASKS.warmup)
    except ValueError as problem:
        raise Refused(ErrorCode.INVALID_REQUEST, f"The request is invalid: {problem}.") from None


def topology(message: StreamsGroupHeartbeatRequest) -> Topology | None:
    """Raises Refused."""
    if message.topology is None:
        return None
    try:
        return parse(message.topology)
    except InvalidTopology as problem:
        raise Refused(ErrorCode.STREAMS_INVALID_TOPOLOGY, str(problem)) from None


def updated_description(old: Description | None, event: StreamsHeartbeat) -> Description:
    """The member's description of itself; absent fields keep their value. Raises Refused."""
    message = event.message

    def or_old(value: Any, old_value: Any) -> Any:
        return value if value is not None else old_value

    endpoint = message.user_endpoint
    process_id = or_old(message.process_id, old.process_id if old else "")
    if old is not None and process_id != old.process_id and message.member_epoch:
        raise Refused(ErrorCode.INVALID_REQUEST, "ProcessId can only be changed by joining again.")
    tags = message.client_tags
    timeout_ms = message.rebalance_timeout_ms
    return Description(
        or_old(message.rack_id, old.rack_id if old else None),
        event.client_id,
        event.client_host,
        timeout_ms if timeout_ms != -1 else old.rebalance_timeout_ms if old else -1,
        message.topology.epoch if message.topology is not None else old.topology_epoch if old else -1,
        process_id,
        (endpoint.host, endpoint.port) if endpoint is not None else old.endpoint if old else None,
        tuple(sorted((tag.key, tag.value) for tag in tags)) if tags is not None else old.tags if old else (),
    )
