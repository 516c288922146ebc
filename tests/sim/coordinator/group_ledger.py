"""The state of groups with members according to the log of __consumer_offsets, record by record as
it is committed: the reference that coordinators, members and commits are checked against.

Whichever coordinator wrote a record, and whatever happened to it: the log order is authoritative. A
commit names its author in its metadata ("MEMBER GENERATION").

Checked at each record, or at the end of its batch
    C5  a committed offset never moves back; its committer is a member at that point of the log, at
        that member epoch or in that generation (classic: or one that is not written yet)
    C6  no two members of a group hold a partition, assigned or not yet released; a group's epoch,
        generation and each member's epoch never decrease
"""

from __future__ import annotations

from mqd.client.group.assignors import decode_assignment
from mqd.coordinator.group.classic.records import GroupRecord, decode_value
from mqd.coordinator.group.consumer import records as consumer_records
from mqd.coordinator.group.consumer.records import CurrentAssignment
from mqd.coordinator.group.records import (
    CONSUMER_GROUP_TYPES,
    GROUP_METADATA,
    OFFSET_COMMIT,
    decode_offset_key,
    decode_offset_value,
    group_of_key,
    key_type_of,
)
from tests.sim.disks import Entry
from tests.sim.kernel import Violation

Place = tuple[bytes, int]  # topic id (of classic groups: the topic's name), partition


class Ledger:
    """The log of one group."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.epoch = 0  # of the group
        self.members: dict[str, CurrentAssignment] = {}
        self._highest: dict[str, int] = {}  # member epochs, of each former member
        self.classic: GroupRecord | None = None
        self.generation = 0
        self.offsets: dict[tuple[str, int], int] = {}
        self.commits = 0

    # -- one record --------------------------------------------------------------------------------

    def take(self, key: bytes, value: bytes | None) -> None:
        kind = key_type_of(key)
        if kind <= OFFSET_COMMIT:
            self._take_offset(key, value)
        elif kind == GROUP_METADATA:
            self._take_generation(value)
        elif kind in CONSUMER_GROUP_TYPES:
            self._take_member(key, value)

    def _take_offset(self, key: bytes, value: bytes | None) -> None:
        if value is None:
            raise Violation("C5", f"{self.name}: a committed offset is deleted")
        _, topic, index = decode_offset_key(key)
        found = decode_offset_value(value)
        member_id, _, generation = found.metadata.rpartition(" ")
        self._check_committer(member_id, int(generation), f"{topic}-{index} was committed as {found.offset}")
        before = self.offsets.get((topic, index), 0)
        if found.offset < before:
            raise Violation(
                "C5",
                f"{self.name}: {topic}-{index} was committed as {before}, and then as {found.offset} by {member_id} at"
                f" {generation}",
            )
        self.offsets[topic, index] = found.offset
        self.commits += 1

    def _check_committer(self, member_id: str, generation: int, what: str) -> None:
        """A classic generation is written when its leader has sent the assignment; its members
        commit before that, for the partitions they keep.
        """
        if self.kind == "consumer":
            member = self.members.get(member_id)
            if member is None or member.epoch != generation:
                raise Violation(
                    "C5",
                    f"{self.name}: {what} by {member_id} at epoch {generation}, who is"
                    f" {'no member' if member is None else f'at {member.epoch}'} there",
                )
        elif generation < self.generation or (generation == self.generation and member_id not in self.member_ids()):
            raise Violation(
                "C5",
                f"{self.name}: {what} by {member_id} in generation {generation}; in force is {self.generation} of"
                f" {sorted(self.member_ids())}",
            )

    def _take_generation(self, value: bytes | None) -> None:
        self.classic = decode_value(value) if value is not None else None
        if self.classic is None:
            self.generation = 0
            return
        if self.classic.generation < self.generation:
            raise Violation("C6", f"{self.name}: generation {self.classic.generation} after {self.generation}")
        self.generation = self.classic.generation
        owners: dict[Place, str] = {}
        for member in self.classic.members:
            for place in decode_assignment(member.assignment):
                if owners.setdefault(place, member.member_id) != member.member_id:
                    raise Violation(
                        "C6",
                        f"{self.name}: generation {self.generation} gives {place} to {owners[place]} and to"
                        f" {member.member_id}",
                    )

    def _take_member(self, key: bytes, value: bytes | None) -> None:
        kind, member_id = consumer_records.decode_key(key)
        if kind == consumer_records.METADATA:
            epoch = consumer_records.decode_group(value)[0] if value is not None else 0
            if value is not None and epoch < self.epoch:
                raise Violation("C6", f"{self.name}: group epoch {epoch} after {self.epoch}")
            self.epoch = epoch
        elif kind == consumer_records.CURRENT and value is None:
            self.members.pop(member_id, None)
        elif kind == consumer_records.CURRENT:
            found = consumer_records.decode_current(value)
            before = self.members.get(member_id)
            if before is not None and found.epoch < before.epoch:
                raise Violation("C6", f"{self.name}: {member_id} goes back from epoch {before.epoch} to {found.epoch}")
            self.members[member_id] = found
            self._highest[member_id] = max(found.epoch, self._highest.get(member_id, 0))

    # -- derived state -----------------------------------------------------------------------------

    def highest(self, member_id: str) -> int:
        """The highest of its epochs so far."""
        return self._highest.get(member_id, -1)

    def member_ids(self) -> set[str]:
        return {member.member_id for member in self.classic.members} if self.classic is not None else set(self.members)

    def holds(self, member_id: str) -> set[Place]:
        """Partitions assigned to it or not yet released by it."""
        if self.classic is not None:
            return {
                (topic.encode(), index)
                for member in self.classic.members
                if member.member_id == member_id
                for topic, index in decode_assignment(member.assignment)
            }
        member = self.members.get(member_id)
        return _places(member.assigned) | _places(member.revoking) if member is not None else set()

    def check(self) -> None:
        """At the end of a batch."""
        owners: dict[Place, str] = {}
        for member_id, member in self.members.items():
            for place in (*_places(member.assigned), *_places(member.revoking)):
                if owners.setdefault(place, member_id) != member_id:
                    raise Violation(
                        "C6",
                        f"{self.name}: {place[0].hex()[-4:]}-{place[1]} is {owners[place]}'s and {member_id}'s at once",
                    )


def _places(partitions: dict[bytes, tuple[int, ...]]) -> set[Place]:
    return {(topic_id, index) for topic_id, indexes in partitions.items() for index in indexes}


class Ledgers:
    """The ledgers of one partition of __consumer_offsets."""

    def __init__(self, kinds: dict[str, str]) -> None:
        """By group; of those of the consumer protocol "consumer"."""
        self._kinds = kinds
        self.groups: dict[str, Ledger] = {}
        self._read = 0

    def advance(self, committed: list[Entry]) -> bool:
        """Whether there were new records."""
        if len(committed) < self._read:
            raise Violation("C5", "committed records of groups are gone")
        if len(committed) == self._read:
            return False
        touched: dict[str, None] = {}
        for entry in committed[self._read :]:
            key, value = entry.value
            name = group_of_key(key)
            touched[name] = None
            self.group(name).take(key, value)
            if not entry.left:
                for each in touched:
                    self.groups[each].check()
                touched = {}
        self._read = len(committed)
        return True

    def group(self, name: str) -> Ledger:
        if name not in self.groups:
            self.groups[name] = Ledger(name, self._kinds[name])
        return self.groups[name]
