"""One request of every version of the groups' APIs: (request, its error codes, whether its content
is right), for tests/compat/test_versions.py.

Cases that need a member share one stable group for each broker: every new classic group waits for
more members, so a group for each case would take long.
"""

from __future__ import annotations

import dataclasses
import struct
import uuid

from mqd.protocol.messages import (
    AlterShareGroupOffsetsRequest,
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteGroupsRequest,
    DeleteShareGroupOffsetsRequest,
    DescribeGroupsRequest,
    DescribeShareGroupOffsetsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    ShareAcknowledgeRequest,
    ShareFetchRequest,
    ShareGroupDescribeRequest,
    ShareGroupHeartbeatRequest,
    StreamsGroupDescribeRequest,
    StreamsGroupHeartbeatRequest,
    SyncGroupRequest,
)
from tests.interaction.traffic import eventually
from tests.interaction.transactional import fresh

COMMIT, FETCH, JOIN, SYNC, CONSUMER_HEARTBEAT = 8, 9, 11, 14, 68
STREAMS_HEARTBEAT = 88
SHARE_HEARTBEAT, SHARE_FETCH, DESCRIBE_SHARE_OFFSETS, ALTER_SHARE_OFFSETS = 76, 78, 90, 91
LOADING = {14, 15, 16}
MEMBER_ID_REQUIRED, INVALID_SHARE_SESSION_EPOCH = 79, 123
FIRST_MEMBER_ID_REQUIRED, FIRST_GROUPS, FIRST_TOPIC_IDS, FIRST_CLIENT_MEMBER_ID = 4, 8, 10, 1
SESSION_MS = 600_000  # no heartbeats are sent here
COMMITTED = 2


@dataclasses.dataclass(frozen=True)
class Member:
    group: str
    member_id: str
    generation: int


_stable: dict[str, Member] = {}  # by the setting's topic: one setting, one broker
_consumers: dict[str, str] = {}
_sharers: dict[str, str] = {}
_streamers: dict[str, str] = {}


def _protocols(topic: str) -> list[JoinGroupRequest.Protocol]:
    name = topic.encode()
    return [
        JoinGroupRequest.Protocol(
            name="range", metadata=struct.pack(">hih", 0, 1, len(name)) + name + struct.pack(">i", -1)
        )
    ]


def _join_request(setting, group: str, member_id: str = "") -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=SESSION_MS,
        member_id=member_id,
        protocol_type="consumer",
        protocols=_protocols(setting.topic),
    )


def _pending(setting, group: str) -> str:
    """The member id that the coordinator assigns to a member that must rejoin with it."""

    def request():
        response = setting.kafka.call(JOIN, 9, _join_request(setting, group))
        return response if response.error_code not in LOADING else None

    response = eventually(request, "a coordinator that takes members")
    assert response.error_code == MEMBER_ID_REQUIRED and response.member_id, response
    return response.member_id


def _member(setting) -> Member:
    if setting.topic not in _stable:
        group = fresh("versions-classic")
        joined = setting.kafka.call(JOIN, 9, _join_request(setting, group, _pending(setting, group)))
        assert joined.error_code == 0, joined
        member = Member(group, joined.member_id, joined.generation_id)
        synced = setting.kafka.call(SYNC, 5, _sync_request(member))
        assert (synced.error_code, synced.assignment) == (0, b"what the leader said"), synced
        _stable[setting.topic] = member
    return _stable[setting.topic]


def _sync_request(member: Member) -> SyncGroupRequest:
    assignments = [SyncGroupRequest.Assignment(member_id=member.member_id, assignment=b"what the leader said")]
    return SyncGroupRequest(
        group_id=member.group,
        generation_id=member.generation,
        member_id=member.member_id,
        protocol_type="consumer",
        protocol_name="range",
        assignments=assignments,
    )


# -- members ---------------------------------------------------------------------------------------


def _join(setting, version: int) -> JoinGroupRequest:
    group = fresh("versions-join")
    member_id = _pending(setting, group)  # also where it is not required: afterwards the coordinator has loaded
    return _join_request(setting, group, member_id if version >= FIRST_MEMBER_ID_REQUIRED else "")


def _joined(setting, version: int, response) -> bool:
    protocol = (
        (response.protocol_type, response.protocol_name) if version >= 7 else ("consumer", response.protocol_name)
    )
    return (response.generation_id, response.leader, protocol, len(response.members)) == (
        1,
        response.member_id,
        ("consumer", "range"),
        1,
    )


def _sync(setting, version: int) -> SyncGroupRequest:
    return _sync_request(_member(setting))


def _heartbeat(setting, version: int) -> HeartbeatRequest:
    member = _member(setting)
    return HeartbeatRequest(group_id=member.group, generation_id=member.generation, member_id=member.member_id)


def _leave(setting, version: int) -> LeaveGroupRequest:
    group = fresh("versions-leave")
    member_id = _pending(setting, group)
    return LeaveGroupRequest(
        group_id=group,
        member_id=member_id,
        members=[LeaveGroupRequest.MemberIdentity(member_id=member_id, reason="enough")],
    )


def _describe(setting, version: int) -> DescribeGroupsRequest:
    return DescribeGroupsRequest(groups=[_member(setting).group])


def _described(setting, version: int, response) -> bool:
    (group,) = response.groups
    return (group.group_state, group.protocol_type, group.protocol_data, [one.member_id for one in group.members]) == (
        "Stable",
        "consumer",
        "range",
        [_member(setting).member_id],
    )


def _list(setting, version: int) -> ListGroupsRequest:
    member = _member(setting)
    assert member.group
    return ListGroupsRequest(
        states_filter=["Stable"] if version >= 4 else [], types_filter=["classic"] if version >= 5 else []
    )


def _listed(setting, version: int, response) -> bool:
    found = {group.group_id: group for group in response.groups}[_member(setting).group]
    return (
        found.protocol_type == "consumer"
        and (version < 4 or found.group_state == "Stable")
        and (version < 5 or found.group_type.lower() == "classic")
    )


# -- offsets ---------------------------------------------------------------------------------------


def _commit_request(setting, group: str, version: int, **member: object) -> OffsetCommitRequest:
    partitions = [
        OffsetCommitRequest.Partition(partition_index=0, committed_offset=COMMITTED, committed_metadata="about it")
    ]
    return OffsetCommitRequest(
        group_id=group,
        topics=[OffsetCommitRequest.Topic(name=setting.topic, topic_id=setting.topic_id, partitions=partitions)],
        **member,
    )


def _of_partitions(response) -> list[int]:
    return [partition.error_code for topic in response.topics for partition in topic.partitions]


def _commit(setting, version: int) -> OffsetCommitRequest:
    member = _member(setting)
    return _commit_request(
        setting, member.group, version, generation_id_or_member_epoch=member.generation, member_id=member.member_id
    )


def _group_with_offsets(setting) -> str:
    """A group without members."""
    group = fresh("versions-offsets")

    def commit() -> bool:
        errors = _of_partitions(setting.kafka.call(COMMIT, 9, _commit_request(setting, group, 9)))
        assert errors == [0] or set(errors) <= LOADING, errors
        return errors == [0]

    eventually(commit, "a coordinator that takes offsets")
    return group


def _fetch(setting, version: int) -> OffsetFetchRequest:
    group = _group_with_offsets(setting)
    if version < FIRST_GROUPS:
        return OffsetFetchRequest(
            group_id=group, topics=[OffsetFetchRequest.Topic(name=setting.topic, partition_indexes=[0, 1])]
        )
    topics = [OffsetFetchRequest.GroupTopic(name=setting.topic, topic_id=setting.topic_id, partition_indexes=[0, 1])]
    return OffsetFetchRequest(groups=[OffsetFetchRequest.Group(group_id=group, topics=topics)], require_stable=True)


def _fetched_topics(response) -> list:
    return [*response.topics, *(topic for group in response.groups for topic in group.topics)]


def _fetched(setting, version: int, response) -> bool:
    (topic,) = _fetched_topics(response)
    named = topic.topic_id == setting.topic_id if version >= FIRST_TOPIC_IDS else topic.name == setting.topic
    return named and [(one.committed_offset, one.metadata) for one in topic.partitions] == [
        (COMMITTED, "about it"),
        (-1, ""),
    ]


def _fetch_errors(response) -> list[int]:
    groups = [group.error_code for group in response.groups]
    return [
        response.error_code,
        *groups,
        *(one.error_code for topic in _fetched_topics(response) for one in topic.partitions),
    ]


def _delete_offsets(setting, version: int) -> OffsetDeleteRequest:
    partitions = [OffsetDeleteRequest.Partition(partition_index=0)]
    return OffsetDeleteRequest(
        group_id=_group_with_offsets(setting),
        topics=[OffsetDeleteRequest.Topic(name=setting.topic, partitions=partitions)],
    )


# -- the consumer protocol -------------------------------------------------------------------------


def _consumer_heartbeat(setting, version: int) -> ConsumerGroupHeartbeatRequest:
    group = fresh("versions-consumer")
    _pending_consumer(setting)
    member_id = str(uuid.uuid4()) if version >= FIRST_CLIENT_MEMBER_ID else ""
    return ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id=member_id,
        member_epoch=0,
        rebalance_timeout_ms=SESSION_MS,
        subscribed_topic_names=[setting.topic],
        topic_partitions=[],
    )


def _pending_consumer(setting) -> str:
    """A group of one member. After joining it, this broker's coordinators accept members."""
    if setting.topic not in _consumers:
        group = fresh("versions-consumers")

        def join() -> bool:
            request = ConsumerGroupHeartbeatRequest(
                group_id=group,
                member_id=str(uuid.uuid4()),
                member_epoch=0,
                rebalance_timeout_ms=SESSION_MS,
                subscribed_topic_names=[setting.topic],
                topic_partitions=[],
            )
            response = setting.kafka.call(CONSUMER_HEARTBEAT, 1, request)
            assert response.error_code == 0 or response.error_code in LOADING, response
            return response.error_code == 0

        eventually(join, "a coordinator that takes members")
        _consumers[setting.topic] = group
    return _consumers[setting.topic]


def _beaten(setting, version: int, response) -> bool:
    got = [(topic.topic_id, sorted(topic.partitions)) for topic in response.assignment.topic_partitions]
    return (
        bool(response.member_id)
        and response.member_epoch > 0
        and response.heartbeat_interval_ms > 0
        and got == [(setting.topic_id, [0, 1])]
    )


def _describe_consumers(setting, version: int) -> ConsumerGroupDescribeRequest:
    return ConsumerGroupDescribeRequest(group_ids=[_pending_consumer(setting)])


def _described_consumers(setting, version: int, response) -> bool:
    (group,) = response.groups
    (member,) = group.members
    (topic,) = member.assignment.topic_partitions
    return (group.group_state, group.assignor_name, topic.topic_name, sorted(topic.partitions)) == (
        "Stable",
        "uniform",
        setting.topic,
        [0, 1],
    )


def _share_heartbeat(setting, version: int) -> ShareGroupHeartbeatRequest:
    return _share_beat(setting, _share_group(setting), "a member")  # again


def _share_beat(setting, group: str, member_id: str, epoch: int = 0) -> ShareGroupHeartbeatRequest:
    return ShareGroupHeartbeatRequest(
        group_id=group,
        member_id=member_id,
        member_epoch=epoch,
        subscribed_topic_names=[setting.topic] if epoch == 0 else None,
    )


def _streams_heartbeat(setting, group: str, member_id: str) -> StreamsGroupHeartbeatRequest:
    message = StreamsGroupHeartbeatRequest
    subtopology = message.Subtopology(subtopology_id="0", source_topics=[setting.topic])
    return message(
        group_id=group,
        member_id=member_id,
        rebalance_timeout_ms=10_000,
        topology=message.Topology(epoch=1, subtopologies=[subtopology]),
        active_tasks=[],
        standby_tasks=[],
        warmup_tasks=[],
        process_id="a process",
    )


def _streams_group(setting) -> str:
    """With one member."""
    if setting.topic not in _streamers:
        group = fresh("versions-streams")

        def join() -> bool:
            response = setting.kafka.call(STREAMS_HEARTBEAT, 0, _streams_heartbeat(setting, group, "a member"))
            assert response.error_code == 0 or response.error_code in LOADING, response
            return response.error_code == 0

        eventually(join, "a coordinator that takes members of streams groups")
        _streamers[setting.topic] = group
    return _streamers[setting.topic]


def _streams_described(setting, version: int, response) -> bool:
    (group,) = response.groups
    (subtopology,) = group.topology.subtopologies
    return (subtopology.source_topics, [one.process_id for one in group.members]) == ([setting.topic], ["a process"])


def _share_fetch(setting, group: str) -> ShareFetchRequest:
    """The first fetch of a session: there is nothing to acquire at the end of the log."""
    topic = ShareFetchRequest.Topic(
        topic_id=setting.topic_id, partitions=[ShareFetchRequest.Partition(partition_index=0)]
    )
    return ShareFetchRequest(
        group_id=group, member_id=fresh("member"), max_wait_ms=0, max_records=10, batch_size=10, topics=[topic]
    )


def _share_fetched(response) -> list[int]:
    return [response.error_code, *[one.error_code for topic in response.responses for one in topic.partitions]]


def _share_group(setting) -> str:
    """A group of one member whose share-partitions can be read."""
    if setting.topic not in _sharers:
        group = fresh("versions-sharers")

        def ready() -> bool:
            joined = setting.kafka.call(SHARE_HEARTBEAT, 1, _share_beat(setting, group, "a member"))
            assert joined.error_code == 0 or joined.error_code in LOADING, joined
            if joined.error_code or any(
                _share_fetched(setting.kafka.call(SHARE_FETCH, 2, _share_fetch(setting, group)))
            ):
                return False
            # the group sees later than the partition's owner that its state exists
            return bool(setting.kafka.call(DESCRIBE_SHARE_OFFSETS, 1, _describe_share_offsets(group)).groups[0].topics)

        eventually(ready, "a share group whose records can be fetched")
        _sharers[setting.topic] = group
    return _sharers[setting.topic]


def _describe_share_offsets(group: str) -> DescribeShareGroupOffsetsRequest:
    return DescribeShareGroupOffsetsRequest(
        groups=[DescribeShareGroupOffsetsRequest.Group(group_id=group, topics=None)]
    )


def _empty_share_group(setting) -> str:
    """A group without members, with a start offset; its coordinators have loaded its states."""
    group = fresh("versions-share")
    requests = [
        (SHARE_HEARTBEAT, 1, _share_beat(setting, group, "a member")),
        (SHARE_HEARTBEAT, 1, _share_beat(setting, group, "a member", -1)),
        (ALTER_SHARE_OFFSETS, 0, _alter_share_offsets(setting, group)),
    ]

    def done() -> bool:
        response = setting.kafka.call(*requests[0])
        assert response.error_code == 0 or response.error_code in LOADING, response
        if not response.error_code:
            del requests[0]
        return not requests

    eventually(done, "an empty share group")
    return group


def _alter_share_offsets(setting, group: str) -> AlterShareGroupOffsetsRequest:
    partition = AlterShareGroupOffsetsRequest.Partition(partition_index=0, start_offset=1)
    topic = AlterShareGroupOffsetsRequest.Topic(topic_name=setting.topic, partitions=[partition])
    return AlterShareGroupOffsetsRequest(group_id=group, topics=[topic])


def _delete_share_offsets(setting, version: int) -> DeleteShareGroupOffsetsRequest:
    group = _empty_share_group(setting)
    topic = DeleteShareGroupOffsetsRequest.Topic(topic_name=setting.topic)
    return DeleteShareGroupOffsetsRequest(group_id=group, topics=[topic])


CASES = {
    8: (_commit, _of_partitions, lambda s, v, r: len(r.topics) == 1),
    9: (_fetch, _fetch_errors, _fetched),
    11: (_join, lambda r: [r.error_code], _joined),
    12: (_heartbeat, lambda r: [r.error_code], lambda s, v, r: True),
    13: (
        _leave,
        lambda r: [r.error_code, *(one.error_code for one in r.members)],
        lambda s, v, r: len(r.members) == (v >= 3),
    ),
    14: (_sync, lambda r: [r.error_code], lambda s, v, r: r.assignment == b"what the leader said"),
    15: (_describe, lambda r: [group.error_code for group in r.groups], _described),
    16: (_list, lambda r: [r.error_code], _listed),
    42: (
        lambda s, v: DeleteGroupsRequest(groups_names=[_group_with_offsets(s)]),
        lambda r: [one.error_code for one in r.results],
        lambda s, v, r: len(r.results) == 1,
    ),
    47: (_delete_offsets, lambda r: [r.error_code, *_of_partitions(r)], lambda s, v, r: len(r.topics) == 1),
    68: (_consumer_heartbeat, lambda r: [r.error_code], _beaten),
    76: (_share_heartbeat, lambda r: [r.error_code], lambda s, v, r: r.member_epoch > 0 < r.heartbeat_interval_ms),
    77: (
        lambda s, v: ShareGroupDescribeRequest(group_ids=[_share_group(s)]),
        lambda r: [group.error_code for group in r.groups],
        lambda s, v, r: (r.groups[0].group_state, len(r.groups[0].members)) == ("Stable", 1),
    ),
    78: (
        lambda s, v: _share_fetch(s, _share_group(s)),
        _share_fetched,
        lambda s, v, r: r.acquisition_lock_timeout_ms > 0 and r.responses[0].topic_id == s.topic_id,
    ),
    79: (  # a session belongs to its connection, and only ShareFetch opens one
        lambda s, v: ShareAcknowledgeRequest(group_id=_share_group(s), member_id="a member", share_session_epoch=0),
        lambda r: [],
        lambda s, v, r: r.error_code == INVALID_SHARE_SESSION_EPOCH,
    ),
    88: (
        lambda s, v: _streams_heartbeat(s, _streams_group(s), "a member"),  # again
        lambda r: [r.error_code],
        lambda s, v, r: r.member_epoch > 0 < r.heartbeat_interval_ms,
    ),
    89: (
        lambda s, v: StreamsGroupDescribeRequest(group_ids=[_streams_group(s)]),
        lambda r: [group.error_code for group in r.groups],
        _streams_described,
    ),
    90: (
        lambda s, v: _describe_share_offsets(_share_group(s)),
        lambda r: [r.groups[0].error_code, *_of_partitions(r.groups[0])],
        lambda s, v, r: [topic.topic_name for topic in r.groups[0].topics] == [s.topic],
    ),
    91: (
        lambda s, v: _alter_share_offsets(s, _empty_share_group(s)),
        lambda r: [r.error_code, *[one.error_code for topic in r.responses for one in topic.partitions]],
        lambda s, v, r: r.responses[0].topic_name == s.topic,
    ),
    92: (
        _delete_share_offsets,
        lambda r: [r.error_code, *[topic.error_code for topic in r.responses]],
        lambda s, v, r: r.responses[0].topic_name == s.topic,
    ),
    69: (_describe_consumers, lambda r: [group.error_code for group in r.groups], _described_consumers),
}
