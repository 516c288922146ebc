"""The common part of consumer groups (KIP-848), share groups and streams groups, Kafka's "modern
groups": a group epoch that changes with members, subscriptions and topics, and a target assignment
for an epoch. All three kinds write records of the same structure.
"""

from __future__ import annotations

from typing import Any, ClassVar

from mqd.coordinator.actions import Action, KeyValue, Timer
from mqd.coordinator.group.classic.members import Deadlines
from mqd.coordinator.group.consumer.cluster import Cluster
from mqd.coordinator.group.consumer.subscriptions import Subscriptions


class ModernGroup:
    """`records`: the module that encodes this kind's records. Members have an attribute `epoch`."""

    records: ClassVar[Any]
    deadline_timer: ClassVar[str]
    first_epoch: ClassVar[int] = 1

    def __init__(self, group_id: str, cluster: Cluster) -> None:
        self.group_id = group_id
        self.cluster = cluster
        self.epoch = self.assignment_epoch = self.metadata_hash = 0
        self.members: dict[str, Any] = {}
        self.target: dict[str, Any] = {}
        self.subscriptions = Subscriptions(cluster)
        self.deadlines = Deadlines()
        self.described_bytes = 0  # size of all members' descriptions
        self.is_persisted = False
        self.pending: list[KeyValue] = []  # records of the event in progress
        self.needs_new_epoch = False  # something other than a topic change requires a new epoch
        self._armed_ms: int | None = None
        # member id -> (description, current)
        self._loading: dict[str, tuple[Any, Any]] = {}
        self._loaded_keys: set[bytes] = set()

    @property
    def is_empty(self) -> bool:
        return not self.members

    def all_tombstones(self) -> list[KeyValue]:
        """Tombstones for everything that this group has in the log."""
        tombstones: list[KeyValue] = []
        for member_id in self.members:
            tombstones += self.records.member_tombstones(self.group_id, member_id)
        if self.is_persisted:
            tombstones += self.records.group_tombstones(self.group_id)
        return tombstones

    def refresh(self, bump: bool) -> None:
        """Checks whether the topics have changed. Bumps the group epoch if they have, if other
        changes require it, or if `bump` is set.
        """
        self.resolve_subscriptions()
        if bump or self.needs_new_epoch:
            self.bump()

    def resolve_subscriptions(self) -> None:
        """Resolves the subscriptions against the current topics. If the resolved topics have changed,
        the next refresh() bumps the group epoch.
        """
        if not self.subscriptions.is_current():
            self.subscriptions.refresh()
            self.needs_new_epoch |= self.subscriptions.hash != self.metadata_hash

    def bump(self) -> None:
        self.epoch = max(self.epoch + 1, self.first_epoch)
        self.needs_new_epoch = False
        self.metadata_hash = self.subscriptions.hash
        self.pending.append(self.group_record())

    def group_record(self) -> KeyValue:
        return self.records.group_record(self.group_id, self.epoch, self.metadata_hash)

    def arm(self, actions: list[Action]) -> list[Action]:
        """Appends a Timer for the next deadline if no timer fires by then."""
        next_ms = self.deadlines.next_ms
        if next_ms is not None and (self._armed_ms is None or next_ms < self._armed_ms):
            self._armed_ms = next_ms
            actions.append(Timer(self.deadline_timer, next_ms))
        return actions

    # -- loading -----------------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> None:
        """Applies one record of the log. Raises ValueError, in which case nothing is changed."""
        records = self.records
        key_type, member_id = records.decode_key(key)
        description, current = self._loading.get(member_id, (None, None))
        if key_type == records.METADATA:
            self.load_group(value)
        elif key_type == records.TARGET_METADATA:
            self.assignment_epoch = records.decode_target_epoch(value) if value is not None else 0
        elif key_type == records.TARGET_MEMBER:
            if value is None:
                self.target.pop(member_id, None)
            else:
                self.target[member_id] = records.decode_target(value)
        elif key_type == records.MEMBER:
            self._loading[member_id] = (records.decode_member(value) if value is not None else None, current)
        elif key_type == records.CURRENT:
            self._loading[member_id] = (description, records.decode_current(value) if value is not None else None)
        else:
            self.replay_own(key_type, value)
        (self._loaded_keys.discard if value is None else self._loaded_keys.add)(key)
        self.is_persisted = bool(self._loaded_keys)

    def load_group(self, value: bytes | None) -> None:
        self.epoch, self.metadata_hash = self.records.decode_group(value) if value is not None else (0, 0)

    def replay_own(self, key_type: int, value: bytes | None) -> None:
        """Applies a record of a type that only this kind of group has."""

    def loaded_epoch(self) -> int:
        """The assignment epoch to continue from: not below the epoch of any member."""
        return max([self.assignment_epoch, *(member.epoch for member in self.members.values())])
