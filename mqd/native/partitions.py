"""One partition's log while Python owns it: options, recovery, and its producers.

Concurrency: a Partition belongs to its holder, one thread at a time; Reactor.partition_open
transfers it.
"""

from __future__ import annotations

import os
from struct import Struct as Layout
from typing import Any

import msgspec

from mqd.native.core import E_INVALID, NativeError, check, copy_in, failure, ffi, lib

INT64_MAX = (1 << 63) - 1

# prefix of files beside a truncated log: MQD_TRUNCATED_PREFIX of native/log/recovery/truncation.h
TRUNCATED_PREFIX = "truncated."


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """struct mqd_log_options. The defaults are those of Kafka's topics, except flush_on_ack."""

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 24 * 3600 * 1000
    segment_jitter_ms: int = 0
    index_interval_bytes: int = 4096
    max_message_bytes: int = 1048588
    preallocate_bytes_min: int = 64 << 10
    preallocate_bytes_max: int = 32 << 20
    stripe_bytes: int = 0
    timestamp_before_max_ms: int = INT64_MAX
    timestamp_after_max_ms: int = 3600 * 1000
    flush_interval_messages: int = INT64_MAX
    flush_interval_ms: int = INT64_MAX
    queue_unflushed_bytes: int = 0
    producer_id_count_max: int = 10000
    producer_id_expiration_ms: int = 24 * 3600 * 1000
    log_append_time: bool = False
    flush_on_ack: bool = True
    compacted: bool = False
    validation: int = 0
    readonly: bool = False
    compression: int = 0
    compression_level: int = 0
    transaction_verification: bool = True
    dedup_window_ms: int = 0
    dedup_count_max: int = 3000000
    dedup_header: bytes = b""
    share_priority: int = 0

    def to_c_struct(self) -> Any:
        return copy_in(self, ffi.new("struct mqd_log_options *"))


class Recovery(msgspec.Struct, kw_only=True):
    """struct mqd_recovery: the first five are inputs that recovery trusts (log_start_offset is also
    an output), the others are results.
    """

    recovery_point_offset: int = -1
    trusted_end_offset: int = -1
    clean_shutdown: bool = False
    rewrite: bool = False  # a flush has failed: rewrite everything above the recovery point
    log_start_offset: int = 0
    log_end_offset: int = 0
    truncated_bytes: int = 0
    scanned_bytes: int = 0
    corrupt_position: int = -1
    corrupt_segment: int = -1
    missing_from: int = -1  # the first offset that is missing because a segment file is
    missing_to: int = -1  # the offset at which the log continues; see native.h
    segment_count: int = 0
    last_leader_epoch: int = -1


class ProducerView(msgspec.Struct, frozen=True):
    """struct mqd_producer_view: the state of one producer id in a partition; -1 = none."""

    producer_id: int
    last_timestamp_ms: int
    transaction_first_offset: int
    last_offset: int
    last_sequence: int
    coordinator_epoch: int
    producer_epoch: int


_PRODUCER_VIEW = Layout("=qqqqiiiI")
assert _PRODUCER_VIEW.size == ffi.sizeof("struct mqd_producer_view")


def parse_producer_views(payload: bytes) -> list[ProducerView]:
    """Parses the payload of a DESCRIBED descriptor."""
    return [ProducerView(*fields[:7]) for fields in _PRODUCER_VIEW.iter_unpack(payload)]


class Partition:
    """An open log, owned by its holder; Reactor.partition_open transfers it to the reactor, the
    event of partition_close returns it.
    """

    __slots__ = ("pointer",)

    def __init__(self, pointer: Any):
        self.pointer = pointer

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        options: LogOptions,
        leader_epoch: int,
        now_ms: int,
        recovery: Recovery | None = None,
        committed_end: int | None = None,
        has_other_replicas: bool = False,
    ) -> Partition:
        """Opens or creates the log and recovers it; fills in `recovery`. May read the whole log: do
        not call it on the event loop. `committed_end`, for a partition with several replicas:
        everything below this offset is known to be committed, and the reactor does not serve the
        partition before its first assignment. `has_other_replicas`: other hosts have replicas.
        """
        recovery = recovery if recovery is not None else Recovery()
        c_recovery = copy_in(recovery, ffi.new("struct mqd_recovery *"))
        c_recovery.has_other_replicas = has_other_replicas
        if committed_end is not None:
            c_recovery.replicated, c_recovery.high_watermark = 1, committed_end
        pointer = lib.mqd_partition_open(os.fsencode(path), options.to_c_struct(), leader_epoch, now_ms, c_recovery)
        if pointer == ffi.NULL:
            raise failure(path)
        for name in recovery.__struct_fields__:
            setattr(recovery, name, getattr(c_recovery, name))
        recovery.clean_shutdown, recovery.rewrite = bool(recovery.clean_shutdown), bool(recovery.rewrite)
        return cls(pointer)

    @property
    def log_end_offset(self) -> int:
        return lib.mqd_partition_log_end_offset(self._checked_pointer())

    def close(self, clean: bool = True) -> None:
        """`clean`: also writes indexes and a producer snapshot, and flushes. The object cannot be
        used afterwards, even if this raises.
        """
        pointer, self.pointer = self._checked_pointer(), ffi.NULL
        check(lib.mqd_partition_close(pointer, clean))

    def give_away(self) -> Any:
        """Returns the C pointer, which the caller then owns."""
        pointer, self.pointer = self._checked_pointer(), ffi.NULL
        return pointer

    def _checked_pointer(self) -> Any:
        if self.pointer == ffi.NULL:
            raise NativeError(E_INVALID, "this partition was closed or belongs to the reactor")
        return self.pointer
