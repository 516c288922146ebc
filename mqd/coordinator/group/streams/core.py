"""A streams group (KIP-1071): StreamsGroupHeartbeat 0, StreamsGroupDescribe 0. Sans-I/O.

The first member supplies the topology. It is configured against the topics that exist
(topology.py); while it is not ready, the target is empty. Epochs work as in a consumer group
(consumer/core.py), but tasks in three roles are assigned, not partitions. Members move to the
target independently: each first releases what it must lose, then gets what others have released
(members.py).

Invariants (check())
    T1  a task is active on at most one member, and held by at most one member of each process,
        until it is released (tasks.Holders)
    T2  `holders` is the inverse of what members hold. A member has, for each active task that it
        holds, the epoch in which it got the task; that is at most the member epoch
    T3  member epoch <= target epoch <= group epoch
    T4  only members have a target; with a ready topology, a target of the group's epoch has each
        task once as active
    T5  a STABLE member at the target's epoch holds its target. An UNREVOKED member has tasks to
        release, any other member has none
    T6  each member has a session deadline; each UNREVOKED member also has a release deadline, which
        a heartbeat does not move
    T7  a group with members has a topology; a persisted topology never changes
    T8  a reply depends only on records persisted before it; each request has one reply
    T9  `described_bytes` and `held_count` are sums over all members
Bounds: at most group.streams.max.size members; a topology of at most
requests.SUBSCRIPTION_CHARS_MAX characters. A heartbeat that changes nothing is O(1) and persists
nothing.

Design and differences from Apache Kafka:
docs/decisions/coordinators/2026-11-27-streams-groups.md.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mqd.coordinator.actions import Action, KeyValue, Reply, Timer, TimerFired, as_persists
from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.consumer.requests import Refused
from mqd.coordinator.group.modern import ModernGroup
from mqd.coordinator.group.offsets import CommitOffsets
from mqd.coordinator.group.streams import records, requests, responses
from mqd.coordinator.group.streams.assignor import MemberSpec, TopologyShape, sticky
from mqd.coordinator.group.streams.events import StreamsDescribe, StreamsHeartbeat, StreamsHeartbeatOutcome
from mqd.coordinator.group.streams.members import STABLE, UNREVOKED, Member, next_state
from mqd.coordinator.group.streams.records import CurrentAssignment, Description, Metadata
from mqd.coordinator.group.streams.tasks import NO_TASKS, Holders, Tasks, contains, difference, iter_tasks, overlap
from mqd.coordinator.group.streams.topology import ConfiguredTopology, InvalidTopology, Topology, configure
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import StreamsGroupHeartbeatResponse

DEADLINE_TIMER, INITIAL_TIMER = "streams.deadline", "streams.initial"
TIMERS = (DEADLINE_TIMER, INITIAL_TIMER)
PROTOCOL = "streams"
STALE_TOPOLOGY, SHUTDOWN_APPLICATION, ASSIGNMENT_DELAYED = 0, 4, 5  # statuses; the others: topology.py
VERSION_MEMBER_EPOCH = 9  # the first OffsetCommit version with a member epoch
# Memory of a member and of a task that it holds, without the client's strings: measured, rounded
# up.
MEMBER_BYTES, TASK_BYTES, NAME_BYTES = 2_000, 500, 200

_Status = StreamsGroupHeartbeatResponse.Status


def size_bytes_of(member_id: str, description: Description) -> int:
    texts = [member_id, description.rack_id or "", description.client_id, description.client_host]
    texts += [description.process_id, *(text for tag in description.tags for text in tag)]
    return MEMBER_BYTES + sum(map(len, texts))


class StreamsGroup(ModernGroup):
    """One group. `handle` is the only mutator once it is loaded."""

    records: ClassVar[Any] = records
    deadline_timer: ClassVar[str] = DEADLINE_TIMER
    first_epoch: ClassVar[int] = 2  # members that wait for their first assignment have epoch 1

    def __init__(self, group_id: str, cluster: Cluster) -> None:
        super().__init__(group_id, cluster)
        self.members: dict[str, Member] = {}
        self.target: dict[str, Tasks] = {}
        self.holders = Holders()
        self.topology: Topology | None = None
        self.configured = ConfiguredTopology({}, {})
        self.validated_epoch = -1
        self.standby_replicas: int | None = None  # the setting that the last assignment used; None: unknown
        self.endpoint_epoch = 0
        self.held_count = self.topology_bytes = 0
        self.is_delayed = False  # the first assignment waits for INITIAL_TIMER
        self._configured_version: Any = None
        self._shutdown_requester: str | None = None
        self._timers: list[Action] = []

    # -- queries -----------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Approximate size in memory."""
        return self.described_bytes + self.topology_bytes + TASK_BYTES * self.held_count

    @property
    def state_name(self) -> str:
        """The state's name in ListGroups and StreamsGroupDescribe. O(members)."""
        if not self.members:
            return "Empty"
        if self.topology is None or self.validated_epoch != self.topology.epoch:
            return "NotReady"
        if self.epoch > self.assignment_epoch:
            return "Assigning"
        is_stable = all(
            member.current.state == STABLE and member.epoch == self.assignment_epoch for member in self.members.values()
        )
        return "Stable" if is_stable else "Reconciling"

    def is_subscribed(self, topic: str) -> bool:
        return (
            bool(self.members)
            and self.topology is not None
            and any(topic in subtopology.inputs for subtopology in self.topology.subtopologies)
        )

    def commit_error(self, event: CommitOffsets) -> int:
        """An older epoch is accepted for tasks that the member has had since then: a commit may be
        in flight while the member moves to a new epoch.
        """
        if event.generation < 0 and (not self.members or (event.is_transactional and not event.member_id)):
            return 0
        member = self.members.get(event.member_id)
        if member is None:
            return int(ErrorCode.UNKNOWN_MEMBER_ID)
        if not event.is_transactional and event.version < VERSION_MEMBER_EPOCH:
            return int(ErrorCode.UNSUPPORTED_VERSION)
        if event.generation == member.epoch:
            return 0
        is_accepted = event.generation < member.epoch and all(
            self._has_held_since(member, offset.topic, offset.partition, event.generation) for offset in event.offsets
        )
        return 0 if is_accepted else int(ErrorCode.STALE_MEMBER_EPOCH)

    def _has_held_since(self, member: Member, topic: str, partition: int, epoch: int) -> bool:
        subtopologies = self.topology.subtopologies if self.topology is not None else ()
        return any(
            topic in subtopology.inputs
            and member.current.epochs.get((subtopology.subtopology_id, partition), epoch + 1) <= epoch
            for subtopology in subtopologies
        )

    def fetch_error(self, member_id: str | None, member_epoch: int) -> int:
        if member_id is None and member_epoch < 0:
            return 0
        member = self.members.get(member_id or "")
        if member is None:
            return int(ErrorCode.UNKNOWN_MEMBER_ID)
        return 0 if member_epoch == member.epoch else int(ErrorCode.STALE_MEMBER_EPOCH)

    # -- events ------------------------------------------------------------------------------------

    def handle(self, event: object, now_ms: int) -> list[Action]:
        replies: list[Action] = []
        if isinstance(event, StreamsHeartbeat):
            replies.append(Reply(event.request, self._on_heartbeat(event, now_ms)))
        elif isinstance(event, StreamsDescribe):
            replies.append(Reply(event.request, responses.describe_group(self, self._described_configuration())))
        elif isinstance(event, TimerFired):
            self._on_timer(event, now_ms)
        else:
            raise TypeError(f"{type(event).__name__} is not an event of a streams group")
        return self._actions(replies)

    def _actions(self, replies: list[Action]) -> list[Action]:
        actions: list[Action] = []
        if self.pending:
            actions = as_persists(self.pending)
            self.pending = []
            self.is_persisted = True
        actions += self._timers
        self._timers = []
        return self.arm(actions + replies)

    def _on_heartbeat(self, event: StreamsHeartbeat, now_ms: int) -> StreamsHeartbeatOutcome:
        try:
            return self._leave(event) if event.message.member_epoch < 0 else self._heartbeat(event, now_ms)
        except Refused as refused:
            return refusal(refused.error, refused.message)

    def _heartbeat(self, event: StreamsHeartbeat, now_ms: int) -> StreamsHeartbeatOutcome:
        message = event.message
        existing = self._find(event)
        description = requests.updated_description(existing.description if existing is not None else None, event)
        owned = requests.owned_tasks(message)
        topology = self._check_topology(event)
        configured = self._configure(topology)
        _check_tasks(owned, existing, configured)
        # from here on nothing is refused
        self._maybe_delay_assignment(now_ms)
        self._maybe_set_topology(topology)
        member, bump = self._enroll(existing, message.member_id, description)
        self._set_configuration(configured, bump)
        if message.shutdown_application and self._shutdown_requester is None:
            self._shutdown_requester = member.member_id
        self._maybe_assign()
        old_current = member.current
        self._reconcile(member, owned, now_ms)
        settings = self.cluster.streams_settings(self.group_id)
        self.deadlines.move(member, now_ms + settings.session_timeout_ms)
        response = StreamsGroupHeartbeatResponse(
            member_id=member.member_id,
            member_epoch=member.epoch,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            status=self._statuses(member),
        )
        assigned = member.current.assigned
        if (
            message.member_epoch != member.epoch
            or old_current.assigned != assigned
            or (owned is not None and not contains(owned, assigned))  # it has missed a response
        ):
            responses.set_tasks(response, assigned)
        if old_current.assigned != assigned and description.endpoint is not None:
            self.endpoint_epoch += 1
        if message.endpoint_information_epoch != self.endpoint_epoch:
            response.partitions_by_user_endpoint = responses.endpoints(self)
        response.endpoint_information_epoch = self.endpoint_epoch
        return StreamsHeartbeatOutcome(response, configured.missing_topics)

    def _statuses(self, member: Member) -> list[StreamsGroupHeartbeatResponse.Status]:
        assert self.topology is not None
        statuses = []
        if member.description.topology_epoch < self.topology.epoch:
            statuses.append(
                _Status(
                    STALE_TOPOLOGY,
                    f"The member's topology epoch {member.description.topology_epoch} is behind the group's topology"
                    f" epoch {self.topology.epoch}.",
                )
            )
        if self.is_delayed and self.epoch > self.assignment_epoch:
            statuses.append(
                _Status(ASSIGNMENT_DELAYED, "Assignment delayed due to the configured initial rebalance delay.")
            )
        if self.configured.status is not None:
            statuses.append(_Status(*self.configured.status))
        if self._shutdown_requester is not None:
            statuses.append(
                _Status(
                    SHUTDOWN_APPLICATION,
                    f"Streams group member {self._shutdown_requester} encountered a fatal error and requested a"
                    " shutdown for the entire application.",
                )
            )
        return statuses

    # -- members -----------------------------------------------------------------------------------

    def _find(self, event: StreamsHeartbeat) -> Member | None:
        """The sender, if it is a member with a valid epoch. None: it must be created. Raises
        Refused, in which case nothing has changed.
        """
        message = event.message
        member = self.members.get(message.member_id)
        epoch = message.member_epoch
        if member is None:
            if epoch:
                raise self._unknown(message.member_id)
            max_size = self.cluster.streams_settings(self.group_id).max_size
            if len(self.members) >= max_size:
                raise Refused(
                    ErrorCode.GROUP_MAX_SIZE_REACHED,
                    f"The streams group has reached its maximum capacity of {max_size} members.",
                )
            return None
        if epoch in (0, member.epoch):
            return member
        current = member.current
        if current.previous_epoch == epoch < member.epoch:
            owned = requests.owned_tasks(message)
            if owned is not None and contains(current.assigned, owned):
                return member  # it has missed the response with the new epoch
        comparison = "greater" if epoch > member.epoch else "smaller"
        raise Refused(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"The streams group member has a {comparison} member epoch ({epoch}) than the one known by the group"
            f" coordinator ({member.epoch}). The member must abandon all its partitions and rejoin.",
        )

    def _unknown(self, member_id: str) -> Refused:
        return Refused(ErrorCode.UNKNOWN_MEMBER_ID, f"Member {member_id} is not a member of group {self.group_id}.")

    def _enroll(self, existing: Member | None, member_id: str, description: Description) -> tuple[Member, bool]:
        """Creates or updates the member. Also returns whether anything has changed: any change
        raises the group's epoch, as in Kafka.
        """
        member = existing
        if member is not None and member.description == description:
            return member, False
        if member is None:
            member = self.members[member_id] = Member(member_id, description)
        else:
            if member.process_id != description.process_id:  # joins again, from another process
                self._set_current(
                    member,
                    CurrentAssignment(member.epoch, member.current.previous_epoch, STABLE, NO_TASKS, NO_TASKS, {}),
                )
            self.described_bytes -= size_bytes_of(member_id, member.description)
        member.description = description
        self.described_bytes += size_bytes_of(member_id, description)
        self.pending.append(records.member_record(self.group_id, member_id, description))
        return member, True

    def _leave(self, event: StreamsHeartbeat) -> StreamsHeartbeatOutcome:
        message = event.message
        member = self.members.get(message.member_id)
        if member is None:
            raise self._unknown(message.member_id)
        if message.shutdown_application and self._shutdown_requester is None:
            self._shutdown_requester = member.member_id
        self._fence([member])
        return StreamsHeartbeatOutcome(
            StreamsGroupHeartbeatResponse(member_id=message.member_id, member_epoch=message.member_epoch, status=[])
        )

    def _fence(self, members: list[Member]) -> None:
        """Removes these members: their tasks are free immediately. The next heartbeat of another
        member computes the target.
        """
        for member in members:
            del self.members[member.member_id]
            self._release(member)
            self.described_bytes -= size_bytes_of(member.member_id, member.description)
            self.endpoint_epoch += member.description.endpoint is not None
            self.target.pop(member.member_id, None)
            self.deadlines.drop(member)
            self.deadlines.drop(member.release_timer)
            self.pending += records.member_tombstones(self.group_id, member.member_id)
        self.deadlines.tidy(2 * len(self.members))
        if not self.members:
            self._shutdown_requester = None
        self.refresh(bump=True)

    def _on_timer(self, event: TimerFired, now_ms: int) -> None:
        if event.name == INITIAL_TIMER:
            self.is_delayed = False
            if self.members:
                self._maybe_assign()
            return
        self._armed_ms = None
        expired_ids = {timed.member_id for timed in self.deadlines.take_expired(now_ms)}
        if fenced := [member for member_id, member in self.members.items() if member_id in expired_ids]:
            self._fence(fenced)

    def _set_current(self, member: Member, current: CurrentAssignment) -> None:
        self._release(member)
        self.held_count += current.assigned.size + current.revoking.size
        member.current = current
        for tasks in (current.assigned, current.revoking):
            self.holders.claim(member.member_id, member.process_id, tasks)
        self.pending.append(records.current_record(self.group_id, member.member_id, current))

    def _release(self, member: Member) -> None:
        for tasks in (member.current.assigned, member.current.revoking):
            self.holders.release(member.process_id, tasks)
            self.held_count -= tasks.size

    # -- topology ----------------------------------------------------------------------------------

    def _check_topology(self, event: StreamsHeartbeat) -> Topology:
        """The group's topology, or the one that its first member sends. Raises Refused."""
        sent = requests.topology(event.message)
        if self.topology is None:
            assert sent is not None, "T7: a member without a topology"
            return sent
        if sent is not None and sent.epoch >= self.topology.epoch and sent != self.topology:
            raise Refused(ErrorCode.INVALID_REQUEST, "Topology updates are not supported yet.")
        return self.topology

    def _maybe_set_topology(self, topology: Topology) -> None:
        if self.topology is None:
            self._set_topology(topology)
            self.pending.append(records.topology_record(self.group_id, topology))

    def _set_topology(self, topology: Topology) -> None:
        self.topology = topology
        self.topology_bytes = sum(NAME_BYTES + len(name) for name in topology.topic_names)
        self.subscriptions.add((topology.topic_names, None, None))

    def _configure(self, topology: Topology) -> ConfiguredTopology:
        """Raises Refused."""
        if topology is self.topology and self._configured_version == self.cluster.version:
            return self.configured
        try:
            return configure(topology, self._partition_count)
        except InvalidTopology as problem:
            raise Refused(ErrorCode.STREAMS_INVALID_TOPOLOGY, str(problem)) from None

    def _described_configuration(self) -> ConfiguredTopology:
        """The configuration for StreamsGroupDescribe. Does not change the group, because describing
        it must not affect its epoch.
        """
        try:
            return self._configure(self.topology) if self.topology is not None else self.configured
        except Refused:
            return ConfiguredTopology({}, {})

    def _partition_count(self, name: str) -> int | None:
        topic = self.cluster.topic(name)
        return topic.partition_count if topic is not None else None

    def _set_configuration(self, configured: ConfiguredTopology, bump: bool) -> None:
        assert self.topology is not None
        self.configured, self._configured_version = configured, self.cluster.version
        standby_replicas = self.cluster.streams_settings(self.group_id).standby_replicas
        validated = self.topology.epoch if configured.is_ready else -1
        bump = bump or (self.validated_epoch, self.standby_replicas) != (validated, standby_replicas)
        self.validated_epoch, self.standby_replicas = validated, standby_replicas
        self.refresh(bump)

    def group_record(self) -> KeyValue:
        metadata = Metadata(self.epoch, self.metadata_hash, self.validated_epoch, self.standby_replicas)
        return records.group_record(self.group_id, metadata)

    # -- assignment --------------------------------------------------------------------------------

    def _maybe_delay_assignment(self, now_ms: int) -> None:
        delay_ms = self.cluster.streams_settings(self.group_id).initial_rebalance_delay_ms
        if not self.members and delay_ms > 0 and not self.is_delayed:
            self.is_delayed = True
            self._timers.append(Timer(INITIAL_TIMER, now_ms + delay_ms))

    def _maybe_assign(self) -> None:
        """Computes a target for the group's epoch."""
        if self.epoch == self.assignment_epoch:
            return
        if self.is_delayed:
            self.assignment_epoch = max(self.assignment_epoch, self.first_epoch - 1)
            return
        new_target = dict.fromkeys(self.members, NO_TASKS)
        if self.configured.is_ready and self.topology is not None:
            specs = {
                member_id: MemberSpec(member.process_id, self.target.get(member_id, NO_TASKS))
                for member_id, member in self.members.items()
            }
            stateful = frozenset(
                subtopology.subtopology_id for subtopology in self.topology.subtopologies if subtopology.changelogs
            )
            shape = TopologyShape(self.configured.task_counts, stateful)
            new_target = sticky(specs, shape, self.standby_replicas or 0)
        for member_id, tasks in new_target.items():
            if tasks != self.target.get(member_id):
                self.pending.append(records.target_record(self.group_id, member_id, tasks))
        self.target = new_target
        self.assignment_epoch = self.epoch
        self.pending.append(records.target_epoch_record(self.group_id, self.epoch))

    def _reconcile(self, member: Member, owned: Tasks | None, now_ms: int) -> None:
        """Moves the member as far towards the target as possible."""
        old = member.current
        target = self.target.get(member.member_id, NO_TASKS)
        current = next_state(member, target, self.assignment_epoch, self.holders, owned)
        if current == old:
            return
        self._set_current(member, current)
        if current.state != UNREVOKED:
            self.deadlines.drop(member.release_timer)
        elif old.state != UNREVOKED or old.epoch != current.epoch:
            self._set_release_deadline(member, now_ms)

    def _set_release_deadline(self, member: Member, now_ms: int) -> None:
        self.deadlines.move(member.release_timer, now_ms + max(member.description.rebalance_timeout_ms, 0))

    # -- loading -----------------------------------------------------------------------------------

    def load_group(self, value: bytes | None) -> None:
        loaded = records.decode_group(value) if value is not None else Metadata(0, 0)
        self.epoch, self.metadata_hash = loaded.epoch, loaded.metadata_hash
        self.validated_epoch, self.standby_replicas = loaded.validated_epoch, loaded.standby_replicas

    def replay_own(self, key_type: int, value: bytes | None) -> None:
        if key_type != records.TOPOLOGY:
            return
        topology = records.decode_topology(value) if value is not None else None
        if self.topology is not None:
            self.subscriptions.remove((self.topology.topic_names, None, None))
        self.topology, self.topology_bytes = None, 0
        if topology is not None:
            self._set_topology(topology)

    def on_loaded(self, now_ms: int) -> list[Action]:
        """Members get a full session timeout, because they could not reach this coordinator before.
        Members whose state is incomplete or inconsistent because of a damaged log are fenced, and
        join again.
        """
        loading, self._loading, self._loaded_keys = self._loading, {}, set()
        session_ms = self.cluster.streams_settings(self.group_id).session_timeout_ms
        broken_ids = []
        for member_id, (description, current) in loading.items():
            if description is None or self.topology is None or not self._load_member(member_id, description, current):
                broken_ids += [member_id] if description is not None or current is not None else []
                continue
            member = self.members[member_id]
            self.deadlines.move(member, now_ms + session_ms)
            if member.current.state == UNREVOKED:
                self._set_release_deadline(member, now_ms)
        self.target = {member_id: tasks for member_id, tasks in self.target.items() if member_id in self.members}
        self.assignment_epoch = max(self.loaded_epoch(), self.first_epoch - 1 if self.epoch else 0)
        self.epoch = max(self.epoch, self.assignment_epoch)
        # above the epochs that another coordinator has sent to members, and rising with each load
        self.endpoint_epoch = now_ms // 1000 & 0x3FFFFFFF
        for member_id in broken_ids:
            self.pending += records.member_tombstones(self.group_id, member_id)
        # a target of this epoch may lack tasks if records were lost
        self.needs_new_epoch = self.needs_new_epoch or bool(broken_ids)
        return self._actions([])

    def _load_member(self, member_id: str, description: Description, current: CurrentAssignment | None) -> bool:
        """Returns False if the member's state contradicts itself or the state of other members."""
        member = Member(member_id, description)
        held = (current.assigned, current.revoking) if current is not None else ()
        if current is not None and (
            overlap(*held)
            or current.state not in (1, 2, 3)
            or (current.state == UNREVOKED) == current.revoking.is_empty
        ):
            return False
        tasks = [
            (task, role_index == 0)
            for tasks_by_role in held
            for role_index, role in enumerate(tasks_by_role)
            for task in iter_tasks(role)
        ]
        if len(tasks) != len({task for task, _ in tasks}) or not all(
            self.holders.may_take(member_id, description.process_id, task, is_active) for task, is_active in tasks
        ):
            return False
        self.members[member_id] = member
        self.described_bytes += size_bytes_of(member_id, description)
        if current is not None:
            self._set_current(member, current)
            self.pending.pop()  # the record that _set_current() added is in the log already
        return True

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        from mqd.coordinator.group.streams.invariants import check

        check(self)


def refusal(error: int, message: str | None) -> StreamsHeartbeatOutcome:
    response = StreamsGroupHeartbeatResponse(error_code=int(error), error_message=message, status=[])
    return StreamsHeartbeatOutcome(response)


def _check_tasks(owned: Tasks | None, member: Member | None, configured: ConfiguredTopology) -> None:
    """Raises Refused for tasks that do not exist, apart from those that the member still has: their
    topic may have been deleted, or created again with fewer partitions.
    """
    if owned is None or member is None or not configured.is_ready:
        return
    for role in difference(difference(owned, member.current.assigned), member.current.revoking):
        for subtopology_id, partition in iter_tasks(role):
            count = configured.task_counts.get(subtopology_id)
            if count is None:
                raise Refused(
                    ErrorCode.INVALID_REQUEST, f"Subtopology {subtopology_id} does not exist in the topology."
                )
            if partition >= count:
                raise Refused(
                    ErrorCode.INVALID_REQUEST,
                    f"Task {partition} for subtopology {subtopology_id} is invalid. Number of tasks for this"
                    f" subtopology: {count}",
                )
