"""Asserts the invariants of core.py over the whole group. O(members + partitions)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mqd.coordinator.group.classic.members import NEVER
from mqd.coordinator.group.consumer.members import LEFT_STATIC_EPOCH, NOTHING, REVOKING, STABLE, WAITING
from mqd.coordinator.group.sets import intersection

if TYPE_CHECKING:
    from mqd.coordinator.group.consumer.core import ConsumerGroup


def check(group: ConsumerGroup) -> None:
    from mqd.coordinator.group.consumer.core import size_bytes_of

    assert not group.pending, "U9: records that were not persisted"
    _check_owners(group)
    _check_epochs(group)
    _check_target(group)
    _check_deadlines(group)
    static = {
        member.description.instance_id: member_id
        for member_id, member in group.members.items()
        if member.description.instance_id is not None
    }
    assert static == group.static_member_ids and len(static) == sum(
        member.description.instance_id is not None for member in group.members.values()
    ), "U8"
    group.subscriptions.check([member.subscription_key for member in group.members.values()])
    assert all(
        member.resolved is group.subscriptions.find(member.subscription_key) for member in group.members.values()
    ), "N1"
    votes: dict[str, int] = {}
    for member in group.members.values():
        if member.description.server_assignor is not None:
            votes[member.description.server_assignor] = votes.get(member.description.server_assignor, 0) + 1
    assert votes == group.assignor_votes, f"{votes} != {group.assignor_votes}"
    group.classic.check()
    described = sum(size_bytes_of(member_id, member.description) for member_id, member in group.members.items())
    assert described == group.described_bytes, f"U10: {described} != {group.described_bytes}"


def _check_owners(group: ConsumerGroup) -> None:
    owners: dict[tuple[bytes, int], str] = {}
    for member_id, member in group.members.items():
        for partitions in (member.assigned, member.revoking):
            for topic_id, indexes in partitions.items():
                assert indexes and list(indexes) == sorted(set(indexes)), f"U2: {indexes}"
                for index in indexes:
                    assert (topic_id, index) not in owners, (
                        f"U1: {topic_id.hex()}-{index} belongs to {owners[topic_id, index]} and {member_id}"
                    )
                    owners[topic_id, index] = member_id
    assert owners == group.owners.all() and len(owners) == group.owners.count, "U2"


def _check_epochs(group: ConsumerGroup) -> None:
    assert group.assignment_epoch <= group.epoch, f"U3: target {group.assignment_epoch}, group {group.epoch}"
    for member in group.members.values():
        assert member.epoch == LEFT_STATIC_EPOCH or 0 <= member.epoch <= group.assignment_epoch, (
            f"U3: member {member.epoch}, target {group.assignment_epoch}"
        )
        assert member.state in (STABLE, REVOKING, WAITING)
        assert bool(member.revoking) == (member.state == REVOKING), f"U5: {member.state} {member.revoking}"
        target = group.target.get(member.member_id, NOTHING)
        if group.epoch == group.assignment_epoch and member.epoch == group.epoch:
            assert member.state != STABLE or member.assigned == target, (
                f"U5: {member.member_id} holds {member.assigned}, its target is {target}"
            )
            assert not intersection(member.revoking, target), (
                f"U6: {member.member_id} has to release what its target contains"
            )


def _check_target(group: ConsumerGroup) -> None:
    assert group.target.keys() <= group.members.keys(), "U4"
    targeted: set[tuple[bytes, int]] = set()
    for partitions in group.target.values():
        for topic_id, indexes in partitions.items():
            for index in indexes:
                assert (topic_id, index) not in targeted, f"U4: {topic_id.hex()}-{index} is in two targets"
                targeted.add((topic_id, index))


def _check_deadlines(group: ConsumerGroup) -> None:
    group.deadlines.check([timed for member in group.members.values() for timed in (member, member.step)])
    for member in group.members.values():
        assert member.deadline_ms != NEVER, f"U7: {member.member_id} has no session"
        if not member.is_classic:
            assert (member.step.deadline_ms != NEVER) == (member.state == REVOKING), (
                f"U7: {member.member_id} in state {member.state} has step {member.step_kind!r}"
            )
