"""A member of a KIP-848 group, the partitions it holds, and their reconciliation with its target.

    STABLE    the member has partitions that its target does not include -> REVOKING; some of its
              new partitions still have an owner -> WAITING
    REVOKING  the member reports the release -> STABLE or WAITING, at the target's epoch
    WAITING   the partitions are released -> STABLE

Kafka's names in records: STABLE 0, UNREVOKED_PARTITIONS 1 (here REVOKING), UNRELEASED_PARTITIONS 2
(here WAITING).

A member's partitions are those assigned to it and those it still has to release. Partitions that it
keeps from one target to the next are never revoked in between: a rebalance does not interrupt
members whose partitions stay the same.
"""

from __future__ import annotations

from mqd.coordinator.group.classic.members import Timed
from mqd.coordinator.group.consumer.records import CurrentAssignment, Description, Partitions
from mqd.coordinator.group.consumer.subscriptions import ResolvedSubscription, SubscriptionKey
from mqd.coordinator.group.sets import difference, intersection, overlap, union

STABLE, REVOKING, WAITING = 0, 1, 2
LEFT_STATIC_EPOCH = -2  # a static member that left and may come back
LEAVE_EPOCH = -1
NOTHING: Partitions = {}


class Owners:
    """Maps each partition to its owner: the member that it is assigned to, or the former owner
    until it has released the partition.
    """

    def __init__(self) -> None:
        self._by_topic: dict[bytes, dict[int, str]] = {}
        self.count = 0

    def get(self, topic_id: bytes, index: int) -> str | None:
        owners = self._by_topic.get(topic_id)
        return None if owners is None else owners.get(index)

    def claim(self, member_id: str, partitions: Partitions) -> None:
        for topic_id, indexes in partitions.items():
            owners = self._by_topic.setdefault(topic_id, {})
            for index in indexes:
                assert owners.get(index, member_id) == member_id, (
                    f"U1: {topic_id.hex()}-{index} would have two owners, {owners[index]} and {member_id}"
                )
                self.count += index not in owners
                owners[index] = member_id

    def release(self, member_id: str, partitions: Partitions) -> None:
        for topic_id, indexes in partitions.items():
            owners = self._by_topic[topic_id]
            for index in indexes:
                assert owners[index] == member_id, (
                    f"U1: {member_id} releases {topic_id.hex()}-{index}, which {owners[index]} owns"
                )
                del owners[index]
                self.count -= 1
            if not owners:
                del self._by_topic[topic_id]

    def all(self) -> dict[tuple[bytes, int], str]:
        return {
            (topic_id, index): member_id
            for topic_id, owners in self._by_topic.items()
            for index, member_id in owners.items()
        }


class Member(Timed):
    """`deadline_ms` (of Timed): the end of its session. `step`: the deadline for its next step.
    `step_kind`: that step: "revoke", or in the classic protocol "join" or "sync"; "" if there is
    none. `resolved`: its entry among the group's subscriptions.
    """

    __slots__ = (
        "assigned",
        "description",
        "epoch",
        "previous_epoch",
        "resolved",
        "revoking",
        "state",
        "step",
        "step_kind",
    )

    def __init__(self, member_id: str, description: Description, current: CurrentAssignment | None = None) -> None:
        super().__init__(member_id)
        self.description = description
        self.step = Timed(member_id)
        self.step_kind = ""
        self.resolved: ResolvedSubscription | None = None
        self.epoch = self.previous_epoch = 0
        self.state = STABLE
        self.assigned: Partitions = NOTHING
        self.revoking: Partitions = NOTHING
        if current is not None:
            self.set_current(current)

    def set_current(self, current: CurrentAssignment) -> None:
        self.epoch, self.previous_epoch, self.state = current.epoch, current.previous_epoch, current.state
        self.assigned, self.revoking = current.assigned, current.revoking

    @property
    def subscription_key(self) -> SubscriptionKey:
        description = self.description
        return description.topic_names, description.topic_regex, description.authorized_as

    @property
    def topic_ids(self) -> frozenset[bytes]:
        """Ids of the topics that the member subscribes to. Only for a member of the group."""
        assert self.resolved is not None
        return self.resolved.topic_ids

    @property
    def current(self) -> CurrentAssignment:
        return CurrentAssignment(self.epoch, self.previous_epoch, self.state, self.assigned, self.revoking)

    @property
    def is_classic(self) -> bool:
        return self.description.classic is not None


# -- reconciliation --------------------------------------------------------------------------------


def next_state(
    member: Member, target: Partitions, target_epoch: int, owners: Owners, owned: Partitions | None
) -> CurrentAssignment:
    """The member's new state. `owned`: the partitions that it reports; None: its request does not
    list them. Pure.
    """
    epoch, assigned = member.epoch, member.assigned
    if member.state == REVOKING:
        if owned is None or overlap(member.revoking, owned):
            return member.current
        epoch = min(epoch + 1, target_epoch)
    elif member.state == STABLE and epoch == target_epoch and (assigned is target or assigned == target):
        return member.current
    kept = intersection(assigned, target)
    revoking = difference(assigned, kept)
    if revoking and (owned is None or overlap(revoking, owned)):
        return CurrentAssignment(epoch, _previous(member, epoch), REVOKING, kept, revoking)
    free, has_unreleased = _select_free(member.member_id, difference(target, kept), owners)
    return CurrentAssignment(
        target_epoch, _previous(member, target_epoch), WAITING if has_unreleased else STABLE, union(kept, free), NOTHING
    )


def _previous(member: Member, epoch: int) -> int:
    """The older epoch that the member may still use if it has missed the new one."""
    return member.epoch if epoch != member.epoch else member.previous_epoch


def _select_free(member_id: str, requested: Partitions, owners: Owners) -> tuple[Partitions, bool]:
    """Returns (the requested partitions that no other member owns, whether there are others)."""
    free_partitions: Partitions = {}
    has_unreleased = False
    for topic_id, indexes in requested.items():
        free = tuple(index for index in indexes if owners.get(topic_id, index) in (None, member_id))
        if free:
            free_partitions[topic_id] = free
        has_unreleased = has_unreleased or len(free) < len(indexes)
    return free_partitions, has_unreleased


def can_take_more(member: Member, target: Partitions, owners: Owners) -> bool:
    """Whether a partition that the member waits for has become free."""
    return bool(_select_free(member.member_id, difference(target, member.assigned), owners)[0])
