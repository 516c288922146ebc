"""What a broker's configuration says about groups. Times in milliseconds."""

from __future__ import annotations

import msgspec

GROUP_SIZE_MAX = 2**31 - 1


class ClassicSettings(msgspec.Struct, frozen=True):
    """Of the classic protocol. Names are those of the broker's properties
    (group.initial.rebalance.delay.ms ...).
    """

    initial_rebalance_delay_ms: int = 300
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = GROUP_SIZE_MAX
    # A member's first JoinGroup waits at most this long: whoever sent it may be gone, and a parked
    # request does not show that.
    new_member_join_timeout_ms: int = 300_000
    # Who was given a member id comes with it at once, or not at all: until then every rebalance
    # waits for it, and a group that has nobody else is kept for it.
    pending_timeout_ms: int = 30_000
    # A generation is one record. What does not fit is refused before it is tried: the shell could
    # not write it.
    record_bytes_max: int = (4 << 20) - 4096


class ConsumerSettings(msgspec.Struct, frozen=True):
    """Of the consumer protocol (KIP-848): group.consumer.* of the broker, and what is set on one
    group (consumer.session.timeout.ms, consumer.heartbeat.interval.ms).
    """

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    max_size: int = GROUP_SIZE_MAX
    assignors: tuple[str, ...] = ("uniform", "range")  # the first is taken where members name none
    upgrade: bool = True  # group.consumer.migration.policy: classic groups may become consumer groups
    downgrade: bool = True  # and back
