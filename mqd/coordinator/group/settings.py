"""The broker's configuration of groups. Times in milliseconds."""

from __future__ import annotations

import struct

import msgspec

from mqd.base.fifo import Fifo
from mqd.base.offset_reset import LATEST, OffsetReset

GROUP_SIZE_MAX = 2**31 - 1
PACKED = struct.Struct("=iiiBBBBqii")  # followed by the name of the FIFO header
HAS_DEAD_LETTERS, HAS_FIFO = 1, 2


class ClassicSettings(msgspec.Struct, frozen=True):
    """Settings of the classic protocol, named after the broker's properties
    (group.initial.rebalance.delay.ms ...).
    """

    initial_rebalance_delay_ms: int = 300
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = GROUP_SIZE_MAX
    # A member's first JoinGroup waits at most this long: its client may have disconnected, and a
    # parked request does not reveal that.
    new_member_join_timeout_ms: int = 300_000
    # A client that received a member id must join with it promptly. Until then every rebalance
    # waits for it, and a group without other members is kept for it.
    pending_timeout_ms: int = 30_000
    # A generation is stored as one record; a generation whose record would be larger than this is
    # refused, because the record could not be written.
    record_bytes_max: int = (4 << 20) - 4096


class ConsumerSettings(msgspec.Struct, frozen=True):
    """Settings of the consumer protocol (KIP-848): the broker's group.consumer.* and the overrides
    of a single group (consumer.session.timeout.ms, consumer.heartbeat.interval.ms).
    """

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = GROUP_SIZE_MAX
    # the first is the default for members that name no assignor
    assignors: tuple[str, ...] = ("uniform", "range")
    # group.consumer.migration.policy: whether a classic group may become a consumer group, and vice
    # versa
    may_upgrade: bool = True
    may_downgrade: bool = True


class StreamsSettings(msgspec.Struct, frozen=True):
    """Settings of streams groups (KIP-1071): the broker's group.streams.* and the overrides of a
    single group (streams.*).
    """

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = GROUP_SIZE_MAX
    standby_replicas: int = 0
    initial_rebalance_delay_ms: int = 3_000


class ShareSettings(msgspec.Struct, frozen=True):
    """Settings of share groups (KIP-932): the broker's group.share.* and the overrides of a single
    group (share.*).
    """

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = 200
    # how long the initialization of a share-partition may take before it is retried
    initialize_retry_ms: int = 30_000
    record_lock_ms: int = 30_000
    delivery_count_limit: int = 5
    record_locks_max: int = 2_000  # per share-partition
    retry_backoff_ms: int = 0
    retry_backoff_max_ms: int = 60_000
    dead_letter_topic: str = ""  # errors.deadletterqueue.topic.name; "": none
    copies_dead_records: bool = False  # errors.deadletterqueue.copy.record.enable
    fifo: Fifo = Fifo()
    read_committed: bool = False
    offset_reset: OffsetReset = OffsetReset(LATEST)

    def pack(self, start_offset: int = 0, dead_letters_allowed: bool = False) -> bytes:
        """The settings that workers need, in the format of docs/design/share-groups.md.
        `start_offset` is used only with the offset reset `by_duration`. `dead_letters_allowed`: the
        cluster's features allow dead letters.
        """
        return (
            PACKED.pack(
                self.record_lock_ms,
                self.delivery_count_limit,
                self.record_locks_max,
                self.read_committed,
                self.offset_reset.kind,
                HAS_DEAD_LETTERS * (dead_letters_allowed and bool(self.dead_letter_topic)) | HAS_FIFO * self.fifo.is_on,
                len(self.fifo.header),
                start_offset,
                self.retry_backoff_ms,
                self.retry_backoff_max_ms,
            )
            + self.fifo.header
        )
