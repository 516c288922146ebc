"""The current state of a classic group: its state name, generation and members; the queries about
it; its encoding in the log.

The transitions are in core.py, and so are the invariants that check() asserts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from mqd.coordinator.actions import Action, Persist
from mqd.coordinator.group.classic import records
from mqd.coordinator.group.classic.members import NEVER, Member, Members
from mqd.coordinator.group.settings import ClassicSettings
from mqd.protocol.errors import ErrorCode

CONSUMER_PROTOCOL = "consumer"
# highest generation that is accepted from a record: leaves room for later ones in an int32
GENERATION_MAX = 2**31 - 2**16

# Plain integers: on a heartbeat's path, reading an enum attribute costs as much as everything else.
NONE, REBALANCE_IN_PROGRESS, UNKNOWN_MEMBER_ID = (
    int(ErrorCode.NONE),
    int(ErrorCode.REBALANCE_IN_PROGRESS),
    int(ErrorCode.UNKNOWN_MEMBER_ID),
)
ILLEGAL_GENERATION, FENCED_INSTANCE_ID = int(ErrorCode.ILLEGAL_GENERATION), int(ErrorCode.FENCED_INSTANCE_ID)


class State(StrEnum):
    """Named as in DescribeGroups and ListGroups."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


EMPTY, PREPARING, COMPLETING, STABLE = State.EMPTY, State.PREPARING_REBALANCE, State.COMPLETING_REBALANCE, State.STABLE


class DelayingMember(NamedTuple):
    """A member that delays a rebalance. `waited_for`: "join", "sync", "assignment" (the leader's
    sync) or "first join" (it received a member id and has not joined with it). `seen_ms`: time of
    its last request; -1: none since this coordinator started.
    """

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    waited_for: str
    since_ms: int
    seen_ms: int


class ClassicState:
    def __init__(self, group_id: str, settings: ClassicSettings) -> None:
        self.group_id = group_id
        self.settings = settings
        self._reset()

    def _reset(self) -> None:
        self.state = EMPTY
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol: str | None = None
        self.leader: str | None = None
        self.members = Members()
        self.pending_sync: set[str] = set()
        self.state_since_ms = -1
        self.rebalance_since_ms = -1  # when the group ceased to be Stable or Empty; -1: it is one of them
        self.rebalance_reason = ""
        self.is_persisted = False  # whether the log has a record of this group
        # when the join phase of the first rebalance after Empty ends, unless another member joins
        # before then and postpones the end
        self._initial_join_end_ms = NEVER
        self._initial_join_end_max_ms = NEVER  # the end cannot be postponed beyond this
        self._session_armed_ms: int | None = None
        # a cache: (generation, result of subscribed_topics() in that generation)
        self._subscribed: tuple[int, frozenset[str] | None] | None = None

    # -- queries ----------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """Whether the group has no members and no client that is about to join."""
        return not self.members.by_id and not self.members.pending and self.state is EMPTY

    def held_up_by(self) -> list[DelayingMember]:
        """Returns the members that a rebalance waits for: the leader first if its assignment is
        missing, then the others, longest silent first. The list is empty if the first rebalance
        only waits for more members.
        """
        delaying = [
            DelayingMember(
                pending.member_id,
                None,
                pending.client_id,
                pending.client_host,
                "first join",
                pending.since_ms,
                pending.since_ms,
            )
            for pending in self.members.pending.values()
        ]
        late_members: list[tuple[Member, str]] = []
        if self.state is PREPARING:
            late_members = [(member, "join") for member in self.members.by_id.values() if member.join_request is None]
        elif self.pending_sync:
            late_members = [
                (
                    self.members.by_id[member_id],
                    "assignment" if self.state is COMPLETING and member_id == self.leader else "sync",
                )
                for member_id in self.pending_sync
            ]
        for member, waited_for in late_members:
            delaying.append(
                DelayingMember(
                    member.member_id,
                    member.instance_id,
                    member.client_id,
                    member.client_host,
                    waited_for,
                    self.state_since_ms,
                    member.seen_ms,
                )
            )
        delaying.sort(key=lambda member: (member.waited_for != "assignment", member.seen_ms))
        return delaying if self.state in (PREPARING, COMPLETING) or self.pending_sync else []

    def subscribed_topics(self) -> frozenset[str] | None:
        """The topics that the members of this generation subscribe to; None if they cannot be known
        (another protocol type, or metadata that does not parse).
        """
        if self.protocol_type != CONSUMER_PROTOCOL:
            return None
        if not self.members.by_id:
            return frozenset()
        if self._subscribed is None or self._subscribed[0] != self.generation:
            self._subscribed = (self.generation, self._parse_subscriptions())
        return self._subscribed[1]

    def _parse_subscriptions(self) -> frozenset[str] | None:
        if self.protocol is None:
            return None
        topics: set[str] = set()
        try:
            for metadata in {member.protocols.get(self.protocol, b"") for member in self.members.by_id.values()}:
                topics.update(records.subscribed_topics(metadata))
        except ValueError:
            return None
        return frozenset(topics)

    def validate_member(self, member_id: str, instance_id: str | None) -> int:
        """0, or the error for a request that names this member."""
        if instance_id is not None:
            known_id = self.members.static_member_ids.get(instance_id)
            if known_id is None:
                return UNKNOWN_MEMBER_ID
            if known_id != member_id:
                return FENCED_INSTANCE_ID
        return NONE if member_id in self.members.by_id else UNKNOWN_MEMBER_ID

    def validate_commit(
        self, member_id: str, instance_id: str | None, generation: int, is_transactional: bool = False
    ) -> int:
        """0, or the error for an OffsetCommit, or for a TxnOffsetCommit if `is_transactional`."""
        if generation < 0 and self.state is EMPTY:
            return NONE  # an administrator, or a consumer that assigns its partitions itself
        if generation >= 0 or member_id or instance_id is not None:
            error = self.validate_member(member_id, instance_id)
            if error == NONE and generation != self.generation:
                error = ILLEGAL_GENERATION
            if error != NONE:
                return error
        elif not is_transactional and self.state is not EMPTY:
            return UNKNOWN_MEMBER_ID
        return REBALANCE_IN_PROGRESS if self.state is COMPLETING and not is_transactional else NONE

    # -- the log -----------------------------------------------------------------------------------

    def _persist(self, actions: list[Action]) -> bool:
        """Persists the generation. Returns False, and does nothing, if it does not fit into a
        record.
        """
        protocol = self.protocol
        members = tuple(
            records.MemberRecord(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.session_timeout_ms,
                member.protocols[protocol] if protocol is not None else b"",
                member.assignment,
            )
            for member in self.members.by_id.values()
        )
        value = records.GroupRecord(
            self.protocol_type or "", self.generation, protocol, self.leader, self.state_since_ms, members
        )
        encoded = records.encode_value(value)
        if len(encoded) > self.settings.record_bytes_max:
            return False
        self.is_persisted = True
        actions.append(Persist(((records.encode_key(self.group_id), encoded),)))
        return True

    def replay(self, value: bytes | None) -> None:
        """Applies one GroupMetadata record, which describes the whole group. Raises ValueError, in
        which case nothing is changed.
        """
        record = records.decode_value(value) if value is not None else None
        if record is not None and (
            len(record.members)
            and (record.protocol is None or record.leader not in {saved.member_id for saved in record.members})
        ):
            raise ValueError(
                f"GroupMetadata of {self.group_id}: there are {len(record.members)} members, but no protocol, or the"
                " leader is not one of them"
            )
        if record is not None and not 0 <= record.generation <= GENERATION_MAX:
            raise ValueError(f"GroupMetadata of {self.group_id}: generation {record.generation}")
        instances = (
            [saved.group_instance_id for saved in record.members if saved.group_instance_id is not None]
            if record is not None
            else []
        )
        if len(set(instances)) != len(instances):
            raise ValueError(f"GroupMetadata of {self.group_id}: an instance id is listed twice")
        self._reset()
        if record is None:
            return
        self.is_persisted = True
        self.generation, self.protocol_type, self.state_since_ms = (
            record.generation,
            record.protocol_type or None,
            record.state_since_ms,
        )
        if not record.members:
            return
        assert record.protocol is not None  # refused above
        self.state, self.protocol, self.leader = STABLE, record.protocol, record.leader
        for saved in record.members:
            member = Member(
                saved.member_id,
                saved.group_instance_id,
                saved.client_id,
                saved.client_host,
                saved.rebalance_timeout_ms,
                saved.session_timeout_ms,
                {record.protocol: saved.subscription},
                saved.assignment,
            )
            self.members.add(member)

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        self.members.check()
        members, state = self.members, self.state
        if state is EMPTY:
            assert not members.by_id and self.leader is None and self.protocol is None, (
                "G1: an Empty group with members, leader or protocol"
            )
        if state in (COMPLETING, STABLE):
            assert self.leader in members.by_id, "G1: the leader is not a member"
            assert self.protocol is not None and members.votes.get(self.protocol, 0) == len(members), (
                f"G1: not all support {self.protocol}"
            )
        for member in members.by_id.values():
            assert member.join_request is None or state is PREPARING, (
                f"G2: {member.member_id} waits for a join in {state}"
            )
            assert member.sync_request is None or state is COMPLETING, (
                f"G2: {member.member_id} waits for an assignment in {state}"
            )
            assert member.deadline_ms != NEVER or (member.is_waiting and not member.is_new), (
                f"G4: {member.member_id} has no deadline"
            )
        assert all(pending.deadline_ms != NEVER for pending in members.pending.values()), (
            "G4: a pending member has no deadline"
        )
        assert self.pending_sync <= members.by_id.keys() and (not self.pending_sync or state in (COMPLETING, STABLE)), (
            "G6"
        )
        assert state is not COMPLETING or self.leader in self.pending_sync, (
            "G6: the leader has synced, yet the group is not Stable"
        )
        dynamic_count = len(members) - len(members.static_member_ids)
        assert state not in (COMPLETING, STABLE) or dynamic_count <= self.settings.max_size, (
            f"G7: {dynamic_count} members"
        )
        assert (self._initial_join_end_ms == NEVER) or state is PREPARING, (
            "G5: an initial delay outside of a join phase"
        )
