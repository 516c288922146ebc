"""The records of a streams group in `__consumer_offsets` as Python values: the layer between
mqd/coordinator/group/records.py, which encodes the bytes, and the core.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mqd.coordinator.actions import KeyValue
from mqd.coordinator.group import records
from mqd.coordinator.group.consumer.records import valid_epoch
from mqd.coordinator.group.streams.tasks import Tasks, TaskSet
from mqd.coordinator.group.streams.topology import InternalTopic, InvalidTopology, Topology, parse
from mqd.coordinator.schema import key_type_of

METADATA, MEMBER, TARGET_METADATA, TARGET_MEMBER, CURRENT, TOPOLOGY = 17, 19, 20, 21, 22, 23
STANDBY_REPLICAS = "num.standby.replicas"  # among the configs of the last assignment

_GROUP, _MEMBER = records.STREAMS_GROUP_METADATA, records.STREAMS_GROUP_MEMBER_METADATA
_TARGET_EPOCH, _TARGET = (
    records.STREAMS_GROUP_TARGET_ASSIGNMENT_METADATA,
    records.STREAMS_GROUP_TARGET_ASSIGNMENT_MEMBER,
)
_CURRENT, _TOPOLOGY = records.STREAMS_GROUP_CURRENT_MEMBER_ASSIGNMENT, records.STREAMS_GROUP_TOPOLOGY
_Config, _Topology = _GROUP.value.cls.LastAssignmentConfig, _TOPOLOGY.value.cls

Epochs = dict[tuple[str, int], int]  # active task -> the epoch in which its member got it


class Metadata(msgspec.Struct, frozen=True):
    """`validated_epoch`: the topology's epoch if it was ready, otherwise -1. `standby_replicas`:
    the setting that the last assignment used; None: unknown.
    """

    epoch: int
    metadata_hash: int
    validated_epoch: int = -1
    standby_replicas: int | None = None


class Description(msgspec.Struct, frozen=True):
    """A member's description of itself."""

    rack_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    topology_epoch: int
    process_id: str
    endpoint: tuple[str, int] | None  # application.server: host, port
    tags: tuple[tuple[str, str], ...]


class CurrentAssignment(msgspec.Struct, frozen=True):
    """The tasks that a member holds. `epochs` covers all its active tasks, including those to be
    revoked.
    """

    epoch: int
    previous_epoch: int
    state: int
    assigned: Tasks
    revoking: Tasks
    epochs: Epochs


def group_record(group_id: str, metadata: Metadata) -> KeyValue:
    standby = metadata.standby_replicas
    value = _GROUP.value.cls(
        epoch=metadata.epoch,
        metadata_hash=metadata.metadata_hash,
        validated_topology_epoch=metadata.validated_epoch,
        last_assignment_configs=None if standby is None else [_Config(STANDBY_REPLICAS, str(standby))],
    )
    return _GROUP.encode_key(group_id), _GROUP.encode_value(value)


def decode_group(value: bytes) -> Metadata:
    record = _GROUP.decode_value(value)
    configs = {config.key: config.value for config in record.last_assignment_configs or ()}
    standby = configs.get(STANDBY_REPLICAS, "")
    return Metadata(
        valid_epoch(record.epoch),
        record.metadata_hash,
        record.validated_topology_epoch,
        int(standby) if standby.isascii() and standby.isdigit() else None,
    )


def member_record(group_id: str, member_id: str, member: Description) -> KeyValue:
    cls = _MEMBER.value.cls
    value = cls(
        rack_id=member.rack_id,
        client_id=member.client_id,
        client_host=member.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms,
        topology_epoch=member.topology_epoch,
        process_id=member.process_id,
        user_endpoint=None if member.endpoint is None else cls.Endpoint(*member.endpoint),
        client_tags=[cls.KeyValue(key, text) for key, text in member.tags],
    )
    return _MEMBER.encode_key(group_id, member_id), _MEMBER.encode_value(value)


def decode_member(value: bytes) -> Description:
    record = _MEMBER.decode_value(value)
    endpoint = record.user_endpoint
    return Description(
        record.rack_id,
        record.client_id,
        record.client_host,
        record.rebalance_timeout_ms,
        record.topology_epoch,
        record.process_id,
        None if endpoint is None else (endpoint.host, endpoint.port),
        tuple(sorted((tag.key, tag.value) for tag in record.client_tags)),
    )


def target_epoch_record(group_id: str, epoch: int) -> KeyValue:
    value = _TARGET_EPOCH.value.cls(assignment_epoch=epoch)
    return _TARGET_EPOCH.encode_key(group_id), _TARGET_EPOCH.encode_value(value)


def decode_target_epoch(value: bytes) -> int:
    return valid_epoch(_TARGET_EPOCH.decode_value(value).assignment_epoch)


def target_record(group_id: str, member_id: str, tasks: Tasks) -> KeyValue:
    cls = _TARGET.value.cls
    value = cls(*(as_structs(role, cls.TaskIds) for role in tasks))
    return _TARGET.encode_key(group_id, member_id), _TARGET.encode_value(value)


def decode_target(value: bytes) -> Tasks:
    record = _TARGET.decode_value(value)
    return Tasks(*map(tasks_of, (record.active_tasks, record.standby_tasks, record.warmup_tasks)))


def current_record(group_id: str, member_id: str, current: CurrentAssignment) -> KeyValue:
    cls = _CURRENT.value.cls
    value = cls(
        current.epoch,
        current.previous_epoch,
        current.state,
        _with_epochs(current.assigned.active, current.epochs),
        *(as_structs(role, cls.TaskIds) for role in current.assigned[1:]),
        _with_epochs(current.revoking.active, current.epochs),
        *(as_structs(role, cls.TaskIds) for role in current.revoking[1:]),
    )
    return _CURRENT.encode_key(group_id, member_id), _CURRENT.encode_value(value)


def decode_current(value: bytes) -> CurrentAssignment:
    record = _CURRENT.decode_value(value)
    epoch = valid_epoch(record.member_epoch)
    assigned = (record.active_tasks, record.standby_tasks, record.warmup_tasks)
    revoking = (
        record.active_tasks_pending_revocation,
        record.standby_tasks_pending_revocation,
        record.warmup_tasks_pending_revocation,
    )
    return CurrentAssignment(
        epoch,
        valid_epoch(record.previous_member_epoch),
        record.state,
        Tasks(*map(tasks_of, assigned)),
        Tasks(*map(tasks_of, revoking)),
        {
            (task_ids.subtopology_id, partition): assignment_epoch
            for task_ids in (*assigned[0], *revoking[0])
            for partition, assignment_epoch in zip(
                task_ids.partitions, task_ids.assignment_epochs or [epoch] * len(task_ids.partitions), strict=False
            )
        },
    )


def topology_record(group_id: str, topology: Topology) -> KeyValue:
    subtopologies = [
        _Topology.Subtopology(
            subtopology_id=subtopology.subtopology_id,
            source_topics=list(subtopology.source_topics),
            state_changelog_topics=[_topic(topic) for topic in subtopology.changelogs],
            repartition_sink_topics=list(subtopology.repartition_sinks),
            repartition_source_topics=[_topic(topic) for topic in subtopology.repartition_sources],
            copartition_groups=[
                _Topology.CopartitionGroup(
                    source_topics=list(group.source_topics), repartition_source_topics=list(group.repartition_sources)
                )
                for group in subtopology.copartition_groups
            ],
        )
        for subtopology in topology.subtopologies
    ]
    return _TOPOLOGY.encode_key(group_id), _TOPOLOGY.encode_value(_Topology(topology.epoch, subtopologies))


def decode_topology(value: bytes) -> Topology:
    try:
        return parse(_TOPOLOGY.decode_value(value))
    except InvalidTopology as problem:
        raise ValueError(str(problem)) from None


def _topic(topic: InternalTopic) -> Any:
    configs = [_Topology.TopicConfig(key, text) for key, text in topic.configs]
    return _Topology.TopicInfo(topic.name, topic.partitions, topic.replication_factor, configs)


def member_tombstones(group_id: str, member_id: str) -> list[KeyValue]:
    return [(record_type.encode_key(group_id, member_id), None) for record_type in (_CURRENT, _TARGET, _MEMBER)]


def group_tombstones(group_id: str) -> list[KeyValue]:
    """Tombstones for the group itself, without its members."""
    return [(record_type.encode_key(group_id), None) for record_type in (_TARGET_EPOCH, _TOPOLOGY, _GROUP)]


def decode_key(key: bytes) -> tuple[int, str]:
    """(type, member id; "" for records of the group itself). Raises ValueError."""
    kind = key_type_of(key)
    return kind, getattr(records.STREAMS_GROUP_TYPES[kind].decode_key(key), "member_id", "")


def as_structs(tasks: TaskSet, cls: type) -> list[Any]:
    return [cls(subtopology_id=name, partitions=list(partitions)) for name, partitions in tasks.items()]


def _with_epochs(tasks: TaskSet, epochs: Epochs) -> list[Any]:
    structs = as_structs(tasks, _CURRENT.value.cls.TaskIds)
    for struct in structs:
        struct.assignment_epochs = [epochs[struct.subtopology_id, partition] for partition in struct.partitions]
    return structs


def tasks_of(structs: list[Any]) -> TaskSet:
    """Raises ValueError if a task is listed twice, or a partition is below 0."""
    by_subtopology: TaskSet = {}
    for task_ids in structs:
        partitions = task_ids.partitions
        if (
            task_ids.subtopology_id in by_subtopology
            or any(partition < 0 for partition in partitions)
            or len(set(partitions)) != len(partitions)
        ):
            raise ValueError("an assignment lists a task twice, or a partition below 0")
        if partitions:
            by_subtopology[task_ids.subtopology_id] = tuple(sorted(partitions))
    return by_subtopology
