"""Administrators' changes to the offsets of a share group without members: AlterShareGroupOffsets,
DeleteShareGroupOffsets, DeleteGroups. Each is recorded, then requested from the share coordinator,
whose response completes it. If the group coordinator is reloaded in between, the request is lost,
but the record shows what remains to be done: topics to be deleted are listed as `deleting`, and the
next request to delete them completes that.

Altering raises the group's epoch, which is the state epoch of the initialized share-partitions: a
leader that still holds the earlier state is fenced (FENCED_STATE_EPOCH).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from mqd.coordinator.actions import Action, Effect, KeyValue, Reply
from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.consumer.records import Partitions
from mqd.coordinator.group.sets import difference, union
from mqd.coordinator.group.share.events import AlterOffsets, DeleteOffsets, DeleteStates, StartOffsets, StatesChanged
from mqd.coordinator.group.share.records import States
from mqd.protocol.errors import ErrorCode, error_message
from mqd.protocol.messages import AlterShareGroupOffsetsResponse, DeleteShareGroupOffsetsResponse

NOTHING_TO_DELETE = "There is no offset information to delete."
_AlterResponse, _DeleteResponse = AlterShareGroupOffsetsResponse, DeleteShareGroupOffsetsResponse
UNKNOWN = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


class Group(Protocol):
    """The part of core.ShareGroup that is needed here; core.py imports this module."""

    cluster: Cluster
    states: States
    pending: list[KeyValue]
    effects: list[Effect]
    is_deleted: bool

    @property
    def is_empty(self) -> bool: ...

    @property
    def is_initializing(self) -> bool: ...

    def bump(self) -> None: ...

    def set_states(self, initializing: Partitions, initialized: Partitions, deleting: frozenset[bytes]) -> None: ...

    def initialize(self, start_offsets: StartOffsets) -> int: ...

    def next_token(self) -> int: ...

    def all_tombstones(self) -> list[KeyValue]: ...


class _Alteration(NamedTuple):
    request: int
    topics: list[AlterShareGroupOffsetsResponse.Topic]


class _Deletion(NamedTuple):
    """`topics` None: the whole group is deleted."""

    request: int
    partitions: Partitions
    topics: list[DeleteShareGroupOffsetsResponse.Topic] | None


class OffsetsAdmin:
    def __init__(self, group: Group) -> None:
        self._group = group
        self._alterations: dict[int, _Alteration] = {}  # by token
        self._deletions: dict[int, _Deletion] = {}

    @property
    def is_deleting(self) -> bool:
        return bool(self._deletions)

    def check(self) -> None:
        assert not self._alterations.keys() & self._deletions.keys(), "G6"

    # -- AlterShareGroupOffsets --------------------------------------------------------------------

    def on_alter(self, event: AlterOffsets, now_ms: int, replies: list[Action]) -> None:
        group = self._group
        error = self._error_if_unchangeable()
        if error:
            replies.append(Reply(event.request, _AlterResponse(error_code=error, error_message=error_message(error))))
            return
        topics, starts = [], {}
        for name, requested in event.offsets.items():
            topic = group.cluster.topic(name)
            if topic is None and not requested:
                continue  # as in Kafka: there is no partition to report
            count = topic.partition_count if topic is not None else 0
            valid_starts = {index: start for index, start in requested.items() if 0 <= index < count}
            if topic is not None and valid_starts:
                starts[topic.topic_id] = valid_starts
            topics.append(
                _AlterResponse.Topic(
                    topic_name=name,
                    topic_id=topic.topic_id if topic is not None else bytes(16),
                    partitions=[
                        _AlterResponse.Partition(partition_index=index)
                        if index in valid_starts
                        else _AlterResponse.Partition(
                            partition_index=index, error_code=UNKNOWN, error_message=error_message(UNKNOWN)
                        )
                        for index in requested
                    ],
                )
            )
        if not starts:
            replies.append(Reply(event.request, _AlterResponse(responses=topics)))
            return
        altered = {topic_id: tuple(sorted(valid_starts)) for topic_id, valid_starts in starts.items()}
        group.bump()
        states = group.states
        # only partitions without a state become initializing: if this fails, the other states stay
        group.set_states(
            union(states.initializing, difference(altered, states.initialized)),
            states.initialized,
            # A topic stays in `deleting` unless all its partitions are altered: the share
            # coordinator may still have states of the others, with higher epochs than those of a
            # group that is created later with this name.
            frozenset(
                topic_id
                for topic_id in states.deleting
                if topic_id not in altered or len(altered[topic_id]) < self._partition_count(topic_id)
            ),
        )
        self._alterations[group.initialize(starts)] = _Alteration(event.request, topics)

    def on_initialized(self, event: StatesChanged, replies: list[Action]) -> None:
        alteration = self._alterations.pop(event.token, None)
        if alteration is None:
            return
        for topic in alteration.topics:
            for partition in topic.partitions:
                error = event.errors.get((topic.topic_id, partition.partition_index), 0)
                if error and not partition.error_code:
                    partition.error_code, partition.error_message = error, error_message(error)
        replies.append(Reply(alteration.request, _AlterResponse(responses=alteration.topics)))

    # -- DeleteShareGroupOffsets, DeleteGroups -----------------------------------------------------

    def on_delete(self, event: DeleteOffsets, now_ms: int, replies: list[Action]) -> None:
        group, states = self._group, self._group.states
        error = self._error_if_unchangeable()
        if error:
            replies.append(Reply(event.request, _DeleteResponse(error_code=error, error_message=error_message(error))))
            return
        topics: list[DeleteShareGroupOffsetsResponse.Topic] = []
        to_delete: Partitions = {}
        for name in event.topics:
            topic = group.cluster.topic(name)
            if topic is None:
                topics.append(_failed_topic(name, error_message(UNKNOWN)))
            elif topic.topic_id in states.deleting:
                to_delete[topic.topic_id] = tuple(range(topic.partition_count))
            elif topic.topic_id in states.initialized:
                to_delete[topic.topic_id] = states.initialized[topic.topic_id]
            else:
                topics.append(_failed_topic(name, NOTHING_TO_DELETE))
        if not to_delete:
            replies.append(Reply(event.request, _DeleteResponse(responses=topics)))
            return
        group.set_states(
            states.initializing, difference(states.initialized, to_delete), states.deleting.union(to_delete)
        )
        self._delete(_Deletion(event.request, to_delete, topics))

    def on_delete_group(self, request: int, replies: list[Action]) -> None:
        group, states = self._group, self._group.states
        error = self._error_if_unchangeable()
        if error:
            replies.append(Reply(request, error))
            return
        to_delete = union(states.initialized, states.initializing)
        for topic_id in states.deleting:
            if count := self._partition_count(topic_id):
                to_delete = union(to_delete, {topic_id: tuple(range(count))})
        if not to_delete:
            self._complete_group_deletion(request, replies)
            return
        group.set_states({}, {}, states.deleting.union(to_delete))
        self._delete(_Deletion(request, to_delete, None))

    def _partition_count(self, topic_id: bytes) -> int:
        cluster = self._group.cluster
        topic = cluster.topic(cluster.topic_name(topic_id) or "")
        return topic.partition_count if topic is not None else 0

    def _delete(self, deletion: _Deletion) -> None:
        token = self._group.next_token()
        self._deletions[token] = deletion
        self._group.effects.append(DeleteStates(token, deletion.partitions))

    def on_states_deleted(self, event: StatesChanged, replies: list[Action]) -> bool:
        """Handles the outcome of a deletion. False: the token belongs to no deletion."""
        deletion = self._deletions.pop(event.token, None)
        if deletion is None:
            return False
        group = self._group
        failed = {topic_id for topic_id, _ in event.errors}
        if deletion.topics is None:
            error = _first_error(event.errors.values())
            if not error and not group.is_empty:
                error = int(ErrorCode.NON_EMPTY_GROUP)
            if error:
                replies.append(Reply(deletion.request, error))
                return True
            self._complete_group_deletion(deletion.request, replies)
            return True
        names = {topic_id: group.states.names.get(topic_id, "") for topic_id in deletion.partitions}
        states = group.states
        group.set_states(
            states.initializing, states.initialized, states.deleting.difference(deletion.partitions.keys() - failed)
        )
        for topic_id, name in names.items():
            error = _first_error(code for (failed_id, _), code in event.errors.items() if failed_id == topic_id)
            message = error_message(error) if error else None
            deletion.topics.append(
                _DeleteResponse.Topic(topic_name=name, topic_id=topic_id, error_code=error, error_message=message)
            )
        replies.append(Reply(deletion.request, _DeleteResponse(responses=deletion.topics)))
        return True

    def _complete_group_deletion(self, request: int, replies: list[Action]) -> None:
        self._group.pending += self._group.all_tombstones()
        self._group.is_deleted = True
        replies.append(Reply(request, 0))

    def _error_if_unchangeable(self) -> int:
        """Returns the error if the offsets cannot be changed now, otherwise 0. Only one change runs
        at a time: its outcome decides what the next one may do.
        """
        if not self._group.is_empty:
            return int(ErrorCode.NON_EMPTY_GROUP)
        return int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS) if self._deletions or self._group.is_initializing else 0


def _failed_topic(name: str, message: str) -> DeleteShareGroupOffsetsResponse.Topic:
    return _DeleteResponse.Topic(topic_name=name, error_code=UNKNOWN, error_message=message)


def _first_error(errors: Iterable[int]) -> int:
    return next((error for error in errors if error), 0)
