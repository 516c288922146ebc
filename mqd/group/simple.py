"""A group without members: consumers that choose their partitions themselves and only keep their offsets here."""

from __future__ import annotations

from mqd.coordinator.actions import Action, TimerFired
from mqd.group.offsets import CommitOffsets, Offsets, OffsetsSettings
from mqd.group.records import OFFSET_COMMIT, decode_offset_key, key_type_of
from mqd.protocol.errors import ErrorCode

_VERSION_GROUP_ID_NOT_FOUND = 9  # KIP-848


class SimpleGroup:
    def __init__(self, group_id: str, settings: OffsetsSettings) -> None:
        self.offsets = Offsets(group_id, settings)

    def handle(self, event: object, now_ms: int) -> list[Action]:
        if isinstance(event, TimerFired):
            return self.offsets.on_expiration_timer(self, now_ms)[0]
        return self.offsets.handle(event, self, now_ms)

    def replay(self, key: bytes, value: bytes | None) -> None:
        if key_type_of(key) <= OFFSET_COMMIT:
            _, topic, partition = decode_offset_key(key)
            self.offsets.replay(topic, partition, value)

    def replay_pending(self, key: bytes, value: bytes | None, producer_id: int, producer_epoch: int) -> None:
        _, topic, partition = decode_offset_key(key)
        self.offsets.replay_pending(topic, partition, value, producer_id)

    def on_loaded(self, now_ms: int) -> list[Action]:
        return self.offsets.on_loaded(now_ms)

    @property
    def is_empty(self) -> bool:
        return self.offsets.is_empty

    # -- offsets.Membership ------------------------------------------------------------------------------------------------

    def commit_error(self, event: CommitOffsets) -> int:
        if event.generation < 0 and not event.member_id and event.group_instance_id is None:
            return 0
        if not self.offsets.is_empty:
            return int(ErrorCode.UNKNOWN_MEMBER_ID)
        if event.generation < 0:
            return 0
        return int(ErrorCode.GROUP_ID_NOT_FOUND if event.version >= _VERSION_GROUP_ID_NOT_FOUND and not event.is_transactional else ErrorCode.ILLEGAL_GENERATION)

    def fetch_error(self, member_id: str | None, member_epoch: int) -> int:
        return 0

    def delete_error(self) -> int:
        return 0 if not self.offsets.is_empty else int(ErrorCode.GROUP_ID_NOT_FOUND)

    def is_subscribed(self, topic: str) -> bool:
        return False

    def empty_since_ms(self) -> int | None:
        return None

    def committed(self, event: CommitOffsets, now_ms: int) -> list[Action]:
        return []

    def check(self) -> None:
        self.offsets.check()
