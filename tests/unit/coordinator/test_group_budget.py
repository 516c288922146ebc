"""group.coordinator.memory.bytes: what is counted, what is refused, and what still works."""

from __future__ import annotations

import pytest

from mqd.coordinator.actions import TimerFired
from mqd.coordinator.group.budget import MEMBER_FRACTION, NEW_GROUP_FRACTION, GroupBudget
from mqd.coordinator.group.classic.events import Heartbeat, JoinGroup, LeaveGroup, SyncGroup
from mqd.coordinator.group.consumer.events import ConsumerHeartbeat
from mqd.coordinator.group.cores import GroupCoreFactory
from mqd.coordinator.group.group import DeleteGroup, Group
from mqd.coordinator.group.offsets import CommitOffsets, CommittedOffset, OffsetsSettings
from mqd.coordinator.group.settings import ClassicSettings
from mqd.coordinator.shard import LoadedPartition, Shard
from mqd.protocol.errors import ErrorCode
from mqd.protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    SyncGroupRequest,
)

MB = 1_000_000
LIMIT = 64 * MB
REFUSED, REJOIN = int(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), int(ErrorCode.REBALANCE_IN_PROGRESS)


class World:
    """One loaded partition, and requests as passed on by the runtime."""

    def __init__(self, loaded: LoadedPartition | None = None, budget: GroupBudget | None = None) -> None:
        self.budget = budget or GroupBudget(LIMIT)
        self.replies: dict[int, object] = {}
        self.number = 0
        settings = ClassicSettings(initial_rebalance_delay_ms=0), OffsetsSettings()
        self.cores = GroupCoreFactory(lambda name: Group(name, *settings))
        self.shard = Shard(
            self.cores,
            loaded or LoadedPartition(0),
            0,
            self.replies.__setitem__,
            lambda *_: None,
            lambda: None,
            lambda _: None,
            self.budget,
        )
        self.shard.on_loaded(0)

    def send_request(self, group: str, make) -> object:
        """The refusal, or the response once everything is written."""
        self.number += 1
        event = make(self.number)
        error = self.budget.refusal(group, self.shard.core(group), event)
        if error:
            return error
        self.shard.handle(group, event, 0)
        for timer in self.shard.timers.take_due(0):
            name = self.shard.fire(timer)
            self.shard.handle_existing(name, TimerFired(timer[1]), 0)
        while self.shard.next_unit(is_lazy_due=True) is not None:
            self.shard.finish_write()
        self.shard.check()
        return self.replies.get(self.number)

    def join(self, group: str, size: int, member_id: str = "", version: int = 3) -> object:
        protocols = [JoinGroupRequest.Protocol(name="range", metadata=bytes(size))]
        request = JoinGroupRequest(
            group_id=group,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000,
            member_id=member_id,
            protocol_type="consumer",
            protocols=protocols,
        )
        return self.send_request(
            group, lambda number: JoinGroup(number, version, "c", "/h", request, f"{group}-{number}")
        )

    def sync(self, group: str, member_id: str, generation: int, size: int) -> object:
        assignment = [SyncGroupRequest.Assignment(member_id=member_id, assignment=bytes(size))]
        request = SyncGroupRequest(
            group_id=group, generation_id=generation, member_id=member_id, assignments=assignment
        )
        return self.send_request(group, lambda number: SyncGroup(number, request))

    def heartbeat(self, group: str, member_id: str, generation: int) -> object:
        request = HeartbeatRequest(group_id=group, generation_id=generation, member_id=member_id)
        return self.send_request(group, lambda number: Heartbeat(number, request))

    def leave(self, group: str, member_id: str) -> object:
        request = LeaveGroupRequest(group_id=group, members=[LeaveGroupRequest.MemberIdentity(member_id=member_id)])
        return self.send_request(group, lambda number: LeaveGroup(number, request))

    def commit(self, group: str, *partitions: int, metadata: str = "", producer_id: int = -1) -> object:
        offsets = tuple(CommittedOffset("t", partition, 1, -1, metadata) for partition in partitions)
        return self.send_request(
            group, lambda number: CommitOffsets(number, 9, "", None, -1, offsets, -1, producer_id, 0)
        )

    def used(self) -> int:
        assert self.budget.used_bytes == sum(core.size_bytes for _, core in self.shard.items())
        return self.budget.used_bytes

    def fill(self, share: float) -> None:
        """Another group fills the budget up to this share of the limit."""
        self.commit("filler", 0)
        filler = self.shard.core("filler")
        missing = int(share * LIMIT) - self.used()
        assert missing > 0
        filler.offsets.size_bytes += missing
        self.budget.used_bytes += missing
        self.shard._entries["filler"].size_bytes += missing


def test_the_budget_is_returned_when_members_and_groups_go() -> None:
    world = World()
    joined = world.join("g", MB)
    assert joined.error_code == 0 and world.used() > MB
    member, generation = joined.member_id, joined.generation_id
    assert world.sync("g", member, generation, 2 * MB).error_code == 0 and world.used() > 3 * MB
    assert world.commit("g", 0, 1, metadata="m" * 4000).error == ErrorCode.UNKNOWN_MEMBER_ID
    world.leave("g", member)
    assert world.used() < MB
    assert world.commit("g", *range(100), metadata="m" * 4000).error == 0 and world.used() > 400_000
    assert world.commit("g", *range(100)).error == 0 and world.used() < 100_000
    assert world.send_request("g", DeleteGroup) == 0
    assert world.used() == 0
    world.join("h", MB, version=4)  # its client never uses the assigned id
    assert 0 < world.used() < 20_000


def test_a_discarded_shard_frees_its_budget() -> None:
    world = World()
    for number in range(5):
        world.join(f"g{number}", 1000)
    assert world.used() > 0
    world.shard.fail(15)
    assert world.budget.used_bytes == 0


def test_state_from_the_log_is_counted_and_never_refused() -> None:
    world = World()
    records: list[tuple[bytes, bytes | None]] = []
    persist = world.shard._persist
    world.shard._persist = lambda name, entry, action: (records.extend(action.records), persist(name, entry, action))
    for number in range(50):
        assert world.commit(f"g{number}", 0, 1, metadata="m" * 2000).error == 0
    loaded = LoadedPartition(0)
    world.cores.replay_all(loaded.cores, dict(records), lambda key, error: pytest.fail(str(error)))
    budget = GroupBudget(10_000)
    again = World(loaded, budget)
    assert budget.used_bytes == world.used() > 200_000
    again.shard.check()
    assert again.commit("g0", 2) == REFUSED
    assert again.commit("g0", 0, 1, metadata="m" * 2000).error == 0, "nothing is added"


@pytest.mark.parametrize("version", [3, 9])
def test_new_groups_are_refused_first_then_members_then_other_additions(version: int) -> None:
    world = World()
    first = world.join("old", 1000)
    assert world.sync("old", first.member_id, first.generation_id, 100).error_code == 0
    assert world.commit("simple", 0, metadata="x" * 1000).error == 0

    world.fill(NEW_GROUP_FRACTION)
    assert world.join("new", 10, version=version) == world.commit("new", 0) == REFUSED
    assert world.shard.core("new") is None
    assert world.join("old", 1000) is None, "it waits for the first one"

    world.fill(MEMBER_FRACTION)
    assert world.join("old", 1000) == REFUSED
    assert world.join("old", 2000, first.member_id) == REFUSED, "its metadata would grow"
    assert world.commit("simple", 1).error == 0

    world.fill(0.9999)
    assert world.commit("simple", *range(2, 102), metadata="x" * 1000) == REFUSED
    assert world.commit("simple", 0, metadata="y" * 1000).error == 0
    assert world.heartbeat("old", first.member_id, first.generation_id).error_code == REJOIN
    again = world.join("old", 1000, first.member_id)
    assert again.error_code == 0, "a member that joins again with what it has"
    assert world.sync("old", first.member_id, again.generation_id, 50_000) == REJOIN
    assert world.sync("old", first.member_id, again.generation_id, 100).error_code == 0
    assert world.budget.refused_count == 6


def test_members_of_the_consumer_protocol() -> None:
    world = World()

    def heartbeat(group: str, member_id: str, epoch: int, topics: list[str] | None) -> object:
        message = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id=member_id,
            member_epoch=epoch,
            subscribed_topic_names=topics,
            rebalance_timeout_ms=1000,
            topic_partitions=[],
        )
        return world.send_request(group, lambda number: ConsumerHeartbeat(number, "c", "/h", message))

    names = [f"topic-{number}" for number in range(1000)]
    assert heartbeat("g", "m", 0, names).error_code == 0
    assert world.used() > 50_000
    world.fill(MEMBER_FRACTION)
    assert heartbeat("other", "m", 0, names) == REFUSED == heartbeat("g", "n", 0, names)
    assert heartbeat("g", "m", 1, None).error_code == 0
    assert heartbeat("g", "m", 1, [*names, "x" * 200]) == REFUSED
    assert heartbeat("g", "m", 1, names[:10]).error_code == 0
    assert heartbeat("g", "m", -1, None).error_code == 0


def test_pending_offsets_are_counted_until_their_transaction_ends() -> None:
    world = World()
    world.commit("g", 0)
    before = world.used()
    assert world.commit("g", *range(10), metadata="m" * 1000, producer_id=7).error == 0
    assert world.used() > before + 10_000
    world.shard.end_transaction(7, 0, 0, False, 0, lambda error: None)
    while world.shard.next_unit(is_lazy_due=True) is not None:
        world.shard.finish_write()
    assert world.used() == before
