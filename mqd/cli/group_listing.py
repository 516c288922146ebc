"""Describes groups of all types in one form: consumer groups of both protocols, share groups and
streams groups. For `mqd group`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from mqd.cli import share_groups
from mqd.cli.broker_lookup import COORDINATOR_UNAVAILABLE, EARLIEST, GROUP, LATEST, Cluster, Partition
from mqd.cli.common import CliError
from mqd.cli.kafka_request import Broker, check, error_text
from mqd.coordinator.group.consumer_protocol import decode_assignment
from mqd.protocol.messages import (
    ConsumerGroupDescribeRequest,
    DescribeGroupsRequest,
    ListGroupsRequest,
    OffsetFetchRequest,
    ShareGroupDescribeRequest,
    StreamsGroupDescribeRequest,
)
from mqd.spark.offsets import GROUP_OFFSET_METADATA

STREAMS_GROUP_DESCRIBE = 89
LIST_GROUPS, DESCRIBE_GROUPS, CONSUMER_GROUP_DESCRIBE, OFFSET_FETCH = 16, 15, 69, 9
MULTI_GROUP_VERSION_MIN = 8  # OffsetFetch for several groups
TOPIC_NAMES_VERSION_MAX = 9  # OffsetFetch and OffsetCommit with topic names instead of ids
GROUP_ID_NOT_FOUND = 69
_CHUNK_SIZE = 500
SHARE, STREAMS = "share", "streams"
WITHOUT_MEMBERS = ("Empty", "Dead")


class Member(msgspec.Struct):
    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    assignment: dict[str, list[int]] | None  # None: its format is known only to the clients
    target: dict[str, list[int]] | None = None  # the target assignment; None: the member has reached it
    epoch: int | None = None


class DelayingMember(msgspec.Struct):
    """A member that delays a rebalance. Times in ms; -1: not known."""

    member_id: str
    client_id: str
    host: str
    instance_id: str | None
    waited_for: str
    waited_ms: int
    silent_ms: int


class Rebalance(msgspec.Struct):
    elapsed_ms: int
    reason: str
    held_up_by: list[DelayingMember]


class Group(msgspec.Struct):
    group: str
    type: str  # classic | consumer | share | streams
    state: str
    protocol_type: str
    protocol: str  # the assignor
    members: list[Member]
    epoch: int | None = None
    assignment_epoch: int | None = None
    rebalance: Rebalance | None = None


# -- groups from responses -------------------------------------------------------------------------


def _host(text: str) -> str:
    return text.removeprefix("/")


def _from_rebalance(rebalance: Any) -> Rebalance | None:
    if rebalance is None:
        return None
    delaying = [
        DelayingMember(
            member.member_id,
            member.client_id,
            _host(member.client_host),
            member.group_instance_id,
            member.waited_for,
            member.waited_ms,
            member.silent_ms,
        )
        for member in rebalance.held_up_by
    ]
    return Rebalance(rebalance.elapsed_ms, rebalance.reason, delaying)


def _from_classic(response: Any) -> Group:
    members = []
    for member in response.members:
        assignment: dict[str, list[int]] | None = None
        if response.protocol_type in ("consumer", ""):
            try:
                assignment = {
                    topic: list(indexes) for topic, indexes in decode_assignment(member.member_assignment).items()
                }
            except ValueError:
                assignment = None
        members.append(
            Member(member.member_id, member.client_id, _host(member.client_host), member.group_instance_id, assignment)
        )
    return Group(
        response.group_id,
        "classic",
        response.group_state,
        response.protocol_type,
        response.protocol_data,
        members,
        rebalance=_from_rebalance(response.rebalance),
    )


def _partitions_by_topic(assignment: Any) -> dict[str, list[int]]:
    return {topic.topic_name: sorted(topic.partitions) for topic in assignment.topic_partitions if topic.partitions}


def _make_member(member: Any, assignment: dict[str, list[int]], target: dict[str, list[int]]) -> Member:
    return Member(
        member.member_id,
        member.client_id,
        _host(member.client_host),
        member.instance_id,
        assignment,
        None if target == assignment else target,
        member.member_epoch,
    )


def _from_consumer(response: Any) -> Group:
    members = [
        _make_member(member, _partitions_by_topic(member.assignment), _partitions_by_topic(member.target_assignment))
        for member in response.members
    ]
    return Group(
        response.group_id,
        "consumer",
        response.group_state,
        "consumer",
        response.assignor_name,
        members,
        response.group_epoch,
        response.assignment_epoch,
        _from_rebalance(response.rebalance),
    )


def _from_share(response: Any) -> Group:
    members = [
        Member(
            member.member_id,
            member.client_id,
            _host(member.client_host),
            None,
            _partitions_by_topic(member.assignment),
            epoch=member.member_epoch,
        )
        for member in response.members
    ]
    return Group(
        response.group_id,
        SHARE,
        response.group_state,
        SHARE,
        response.assignor_name,
        members,
        response.group_epoch,
        response.assignment_epoch,
    )


def _input_topics(group: Any) -> dict[str, list[str]]:
    """Subtopology -> the topics that its tasks read."""
    subtopologies = (group.topology.subtopologies or ()) if group.topology is not None else ()
    return {
        subtopology.subtopology_id: [
            *subtopology.source_topics,
            *(topic.name for topic in subtopology.repartition_source_topics),
        ]
        for subtopology in subtopologies
    }


def _input_partitions(tasks: list[Any], topics: dict[str, list[str]]) -> dict[str, list[int]]:
    """The input partitions of active tasks, by topic."""
    partitions: dict[str, set[int]] = {}
    for task in tasks:
        for topic in topics.get(task.subtopology_id, ()):
            partitions.setdefault(topic, set()).update(task.partitions)
    return {topic: sorted(partitions[topic]) for topic in sorted(partitions)}


def _from_streams(response: Any) -> Group:
    """A member's assignment is the partitions that its active tasks read."""
    topics = _input_topics(response)
    members = [
        _make_member(
            member,
            _input_partitions(member.assignment.active_tasks, topics),
            _input_partitions(member.target_assignment.active_tasks, topics),
        )
        for member in response.members
    ]
    return Group(
        response.group_id,
        STREAMS,
        response.group_state,
        STREAMS,
        "sticky",
        members,
        response.group_epoch,
        response.assignment_epoch,
    )


# -- requests --------------------------------------------------------------------------------------


def describe(cluster: Cluster, name: str) -> Group | None:
    """Describes a group of any type. None: there is no such group."""
    if cluster.bootstrap_broker.supports(CONSUMER_GROUP_DESCRIBE):
        consumer_request = ConsumerGroupDescribeRequest(group_ids=[name], include_rebalance=True)
        response = cluster.request_coordinator(
            GROUP, name, CONSUMER_GROUP_DESCRIBE, consumer_request, lambda response: response.groups[0].error_code
        ).groups[0]
        if not response.error_code:
            return _from_consumer(response)
        if response.error_code != GROUP_ID_NOT_FOUND:
            check(f"group {name}", response.error_code, response.error_message)
    shared = share_groups.describe(cluster, name)
    if shared is not None:
        return _from_share(shared)
    streams = _describe_streams(cluster, name)
    if streams is not None:
        return _from_streams(streams)
    request = DescribeGroupsRequest(groups=[name], include_rebalance=True)
    response = cluster.request_coordinator(
        GROUP, name, DESCRIBE_GROUPS, request, lambda response: response.groups[0].error_code
    ).groups[0]
    if response.error_code == GROUP_ID_NOT_FOUND or (not response.error_code and response.group_state == "Dead"):
        return None
    check(f"group {name}", response.error_code, response.error_message)
    return _from_classic(response)


def _describe_streams(cluster: Cluster, name: str) -> Any | None:
    """The description of the group. None: there is no such streams group."""
    if not cluster.bootstrap_broker.supports(STREAMS_GROUP_DESCRIBE):
        return None
    request = StreamsGroupDescribeRequest(group_ids=[name])
    response = cluster.request_coordinator(
        GROUP, name, STREAMS_GROUP_DESCRIBE, request, lambda response: response.groups[0].error_code
    ).groups[0]
    if response.error_code in share_groups.NO_SUCH_GROUP:
        return None
    check(f"group {name}", response.error_code, response.error_message)
    return response


def must_describe(cluster: Cluster, name: str) -> Group:
    group = describe(cluster, name)
    if group is None:
        raise CliError(f"there is no group {name}; mqd group list shows all groups")
    return group


def _chunks(names: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(names), _CHUNK_SIZE):
        yield names[start : start + _CHUNK_SIZE]


def _describe_chunks(broker: Broker, names: list[str], kind: str, unavailable: dict[str, int]) -> Iterator[Group]:
    """Describes those of the named groups that exist; all are of one kind. Groups whose coordinator
    has just changed are added to `unavailable` instead, with the error code.
    """
    for chunk in _chunks(names):
        if kind == "consumer":
            consumer_request = ConsumerGroupDescribeRequest(group_ids=chunk, include_rebalance=True)
            responses = _without_errors(broker.request(CONSUMER_GROUP_DESCRIBE, consumer_request).groups, unavailable)
            yield from (_from_consumer(group) for group in responses)
        elif kind == SHARE:
            share_request = ShareGroupDescribeRequest(group_ids=chunk)
            yield from (
                _from_share(group)
                for group in _without_errors(broker.request(share_groups.DESCRIBE, share_request).groups, unavailable)
            )
        elif kind == STREAMS:
            streams_request = StreamsGroupDescribeRequest(group_ids=chunk)
            responses = _without_errors(broker.request(STREAMS_GROUP_DESCRIBE, streams_request).groups, unavailable)
            yield from (_from_streams(group) for group in responses)
        else:
            request = DescribeGroupsRequest(groups=chunk, include_rebalance=True)
            responses = _without_errors(broker.request(DESCRIBE_GROUPS, request).groups, unavailable)
            yield from (_from_classic(group) for group in responses if group.group_state != "Dead")


def _without_errors(groups: list[Any], unavailable: dict[str, int]) -> list[Any]:
    """Returns the groups that were described; adds those without a coordinator to `unavailable`."""
    unavailable |= {group.group_id: group.error_code for group in groups if group.error_code in COORDINATOR_UNAVAILABLE}
    return [group for group in groups if not group.error_code]


def matching_groups(
    cluster: Cluster, states: Iterable[str], types: Iterable[str]
) -> tuple[list[Group], dict[str, int]]:
    """Returns the groups in these states and of these types (as the broker names them,
    case-insensitive; empty: all), sorted by name; and name -> error code of the groups that could
    not be described because their coordinators were changing.
    """
    groups: list[Group] = []
    unavailable: dict[str, int] = {}
    for broker in cluster.nodes():
        response = broker.request(LIST_GROUPS, ListGroupsRequest(states_filter=list(states), types_filter=list(types)))
        check("groups", response.error_code, None)
        listed: dict[str, list[str]] = {}
        for group in response.groups:
            kind = (group.group_type or "classic").lower()
            listed.setdefault(kind if kind in ("consumer", SHARE, STREAMS) else "classic", []).append(group.group_id)
        for kind, names in listed.items():
            groups += _describe_chunks(broker, names, kind, unavailable)
    described = {group.group for group in groups}
    return sorted(groups, key=lambda group: group.group), {
        name: error for name, error in sorted(unavailable.items()) if name not in described
    }


def all_groups(cluster: Cluster) -> list[Group]:
    """All groups, sorted by name. Raises CliError if a group could not be described."""
    groups, unavailable = matching_groups(cluster, (), ())
    for name, error in unavailable.items():
        check(f"group {name}", error, None)
    return groups


def names(bootstrap: str) -> list[str]:
    with Cluster(bootstrap) as cluster:
        return listed_names(cluster)


def listed_names(cluster: Cluster) -> list[str]:
    """The names of all groups, of every type. Raises CliError while a coordinator is loading its
    groups.
    """
    group_ids = set()
    for broker in cluster.nodes():
        response = broker.request(LIST_GROUPS, ListGroupsRequest())
        check("groups", response.error_code, None)
        group_ids |= {group.group_id for group in response.groups}
    return sorted(group_ids)


class Commit(msgspec.Struct):
    """`lag`: set only for a share group; None: not known."""

    offset: int
    metadata: str
    lag: int | None = None


def positions(cluster: Cluster, name: str, is_share: bool) -> dict[Partition, Commit]:
    """Returns the committed offsets of the group; for a share group, its start offsets."""
    if not is_share:
        return commits(cluster, name)
    return {
        partition: Commit(start.offset, "", start.lag)
        for partition, start in share_groups.offsets(cluster, name).items()
    }


def commits(cluster: Cluster, name: str) -> dict[Partition, Commit]:
    """Every committed offset of the group, with its metadata."""
    request = OffsetFetchRequest(
        group_id=name, topics=None, groups=[OffsetFetchRequest.Group(group_id=name, topics=None)]
    )

    def error_of(response: Any) -> int:
        return int(response.groups[0].error_code if response.groups else response.error_code)

    response = cluster.request_coordinator(GROUP, name, OFFSET_FETCH, request, error_of, TOPIC_NAMES_VERSION_MAX)
    if error_of(response) != GROUP_ID_NOT_FOUND:
        check(f"group {name}", error_of(response), None)
    topics = response.groups[0].topics if response.groups else response.topics
    return {
        (topic.name, partition.partition_index): Commit(partition.committed_offset, partition.metadata or "")
        for topic in topics
        for partition in topic.partitions
        if not partition.error_code and partition.committed_offset >= 0
    }


def offsets_of_all_groups(cluster: Cluster) -> dict[str, tuple[str, dict[Partition, int]]]:
    """Group -> (state, committed offsets) of all groups, with batched requests to each coordinator.
    Groups whose coordinator is changing are omitted.
    """
    committed_by_group: dict[str, tuple[str, dict[Partition, int]]] = {}
    for broker in cluster.nodes():
        response = broker.request(LIST_GROUPS, ListGroupsRequest())
        check("groups", response.error_code, None)
        states = {
            group.group_id: group.group_state for group in response.groups if (group.group_type or "").lower() != SHARE
        }
        share_states = {group.group_id: group.group_state for group in response.groups if group.group_id not in states}
        request_class = OffsetFetchRequest
        for chunk in _chunks(list(states)):
            request = request_class(groups=[request_class.Group(group_id=name, topics=None) for name in chunk])
            for group in broker.request(
                OFFSET_FETCH, request, TOPIC_NAMES_VERSION_MAX, version_min=MULTI_GROUP_VERSION_MIN
            ).groups:
                if not group.error_code:
                    offsets = {
                        (topic.name, partition.partition_index): partition.committed_offset
                        for topic in group.topics
                        for partition in topic.partitions
                        if not partition.error_code and partition.committed_offset >= 0
                    }
                    committed_by_group[group.group_id] = states[group.group_id], offsets
        for chunk in _chunks(list(share_states)):
            for name, offsets in share_groups.start_offsets_of_groups(broker, chunk).items():
                committed_by_group[name] = share_states[name], offsets
    return committed_by_group


class Progress(msgspec.Struct):
    """The offsets of a group in a partition; None: not known, or there is none.
    `is_spark_progress`: the committed offset is the progress of a Spark streaming query
    (spark/offsets.py).
    """

    topic: str
    partition: int
    committed_offset: int | None
    log_start_offset: int | None
    log_end_offset: int | None
    lag: int | None
    member: Member | None
    note: str
    is_spark_progress: bool = False


def progress(cluster: Cluster, group: Group) -> list[Progress]:
    """Returns the progress in every partition for which the group has committed an offset, or that
    is assigned to a member. In a share group, a partition has no single member.
    """
    is_share = group.type == SHARE
    commits_by_partition = positions(cluster, group.group, is_share)
    offsets = {partition: commit.offset for partition, commit in commits_by_partition.items()}
    owners = {
        (topic, index): member
        for member in group.members
        for topic, indexes in (member.assignment or {}).items()
        for index in indexes
    }
    partitions = sorted(offsets.keys() | owners.keys())
    topics = cluster.topics({topic for topic, _ in partitions})
    ends, starts = cluster.offsets(partitions, LATEST), cluster.offsets(partitions, EARLIEST)
    rows = []
    for partition in partitions:
        topic, index = partition
        offset, start, end = offsets.get(partition), starts.get(partition), ends.get(partition)
        if is_share:
            lag = commits_by_partition[partition].lag if partition in commits_by_partition else None
        else:
            lag = end - offset if offset is not None and end is not None else None
        note = ""
        if index not in topics.get(topic, {}):
            note = "the topic is gone" if topic not in topics else "the partition is gone"
        elif end is None:
            note = "not served"
        elif offset is not None and start is not None and offset < start:
            note = f"the lag includes {start - offset} deleted records"
        elif offset is not None and offset > end:
            note, lag = "beyond the log's end", 0
        owner = None if is_share else owners.get(partition)
        is_spark_progress = (
            partition in commits_by_partition and commits_by_partition[partition].metadata == GROUP_OFFSET_METADATA
        )
        rows.append(Progress(topic, index, offset, start, end, lag, owner, note, is_spark_progress))
    return rows


def explain(error_code: int) -> str:
    return error_text(error_code)
