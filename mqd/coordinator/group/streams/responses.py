"""Describes a streams group in responses: parts of StreamsGroupHeartbeat, and StreamsGroupDescribe.
Read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.streams.members import Member
from mqd.coordinator.group.streams.records import as_structs
from mqd.coordinator.group.streams.tasks import NO_TASKS, Tasks, TaskSet, iter_tasks
from mqd.coordinator.group.streams.topology import ConfiguredTopology, InternalTopic, Topology
from mqd.protocol.messages import StreamsGroupDescribeResponse, StreamsGroupHeartbeatResponse

_Response, _Described = StreamsGroupHeartbeatResponse, StreamsGroupDescribeResponse


class Group(Protocol):
    """The part of core.StreamsGroup that is needed here; core.py imports this module."""

    group_id: str
    epoch: int
    assignment_epoch: int
    topology: Topology | None
    cluster: Cluster

    @property
    def members(self) -> Mapping[str, Member]: ...

    @property
    def target(self) -> Mapping[str, Tasks]: ...

    @property
    def state_name(self) -> str: ...


def set_tasks(response: StreamsGroupHeartbeatResponse, tasks: Tasks) -> None:
    response.active_tasks, response.standby_tasks, response.warmup_tasks = (
        as_structs(role, _Response.TaskIds) for role in tasks
    )


def endpoints(group: Group) -> list[StreamsGroupHeartbeatResponse.EndpointToPartitions]:
    """Which endpoint has which partitions, for interactive queries."""
    return [
        _Response.EndpointToPartitions(
            user_endpoint=_Response.Endpoint(*member.description.endpoint),
            active_partitions=_partitions(group, member.current.assigned.active),
            standby_partitions=_partitions(group, member.current.assigned.standby),
        )
        for member in group.members.values()
        if member.description.endpoint is not None
    ]


def _partitions(group: Group, tasks: TaskSet) -> list[StreamsGroupHeartbeatResponse.TopicPartition]:
    """The input partitions of these tasks."""
    by_topic: dict[str, list[int]] = {}
    for subtopology_id, partition in iter_tasks(tasks):
        subtopology = group.topology.find(subtopology_id) if group.topology is not None else None
        for name in subtopology.inputs if subtopology is not None else ():
            topic = group.cluster.topic(name)
            if topic is not None and partition < topic.partition_count:
                by_topic.setdefault(name, []).append(partition)
    return [
        _Response.TopicPartition(topic=name, partitions=partitions) for name, partitions in sorted(by_topic.items())
    ]


def describe_group(group: Group, configured: ConfiguredTopology) -> StreamsGroupDescribeResponse.Group:
    return _Described.Group(
        group_id=group.group_id,
        group_state=group.state_name,
        group_epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        topology=_topology(group.topology, configured) if group.topology is not None else None,
        members=[_member(group, member) for member in group.members.values()],
    )


def _topology(topology: Topology, configured: ConfiguredTopology) -> StreamsGroupDescribeResponse.Topology:
    """Lists no subtopologies while the partition counts of their topics are unknown."""
    if not configured.partition_counts and not configured.task_counts:
        return _Described.Topology(epoch=topology.epoch, subtopologies=None)
    return _Described.Topology(
        epoch=topology.epoch,
        subtopologies=[
            _Described.Subtopology(
                subtopology_id=subtopology.subtopology_id,
                source_topics=list(subtopology.source_topics),
                repartition_sink_topics=list(subtopology.repartition_sinks),
                state_changelog_topics=[_topic(topic, configured) for topic in subtopology.changelogs],
                repartition_source_topics=[_topic(topic, configured) for topic in subtopology.repartition_sources],
            )
            for subtopology in topology.subtopologies
        ],
    )


def _topic(topic: InternalTopic, configured: ConfiguredTopology) -> StreamsGroupDescribeResponse.TopicInfo:
    return _Described.TopicInfo(
        name=topic.name,
        partitions=configured.partition_counts.get(topic.name, topic.partitions),
        replication_factor=topic.replication_factor,
        topic_configs=[_Described.KeyValue(key=key, value=value) for key, value in topic.configs],
    )


def _member(group: Group, member: Member) -> StreamsGroupDescribeResponse.Member:
    description = member.description
    return _Described.Member(
        member_id=member.member_id,
        member_epoch=member.epoch,
        rack_id=description.rack_id,
        client_id=description.client_id,
        client_host=description.client_host,
        topology_epoch=description.topology_epoch,
        process_id=description.process_id,
        user_endpoint=_Described.Endpoint(*description.endpoint) if description.endpoint is not None else None,
        client_tags=[_Described.KeyValue(key=key, value=value) for key, value in description.tags],
        assignment=_assignment(member.current.assigned),
        target_assignment=_assignment(group.target.get(member.member_id, NO_TASKS)),
    )


def _assignment(tasks: Tasks) -> Any:
    return _Described.Assignment(*(as_structs(role, _Described.TaskIds) for role in tasks))
