"""The control segment: partition slots, processes, quotas and metrics that all processes of a
broker share.

A mapping passed to Control is held as long as the object lives: the C side keeps raw pointers into
it. Concurrency: Control may be shared by threads: each read of a slot uses a buffer that no other
read is using. Quotas belongs to one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from mqd.native.core import E_INVALID, NativeError, bytes_of, check, checked_topic_id, failure, ffi, lib

if TYPE_CHECKING:
    import numpy

WORKER_COUNT_MAX = lib.MQD_WORKER_COUNT_MAX
PARTITION_SLOT_COUNT = lib.MQD_PARTITION_SLOT_COUNT
OWNER_NONE = lib.MQD_OWNER_NONE
TOPIC_NAME_BYTES_MAX = lib.MQD_TOPIC_NAME_BYTES_MAX
LOG_DIR_COUNT_MAX = lib.MQD_LOG_DIR_COUNT_MAX
HISTOGRAM_BUCKET_COUNT = 128


class ProcessState(IntEnum):
    """enum mqd_process_state."""

    ABSENT = lib.MQD_PROCESS_ABSENT
    STARTING = lib.MQD_PROCESS_STARTING
    RUNNING = lib.MQD_PROCESS_RUNNING
    DEAD = lib.MQD_PROCESS_DEAD


class SlotState(IntEnum):
    """enum mqd_slot_state."""

    FREE = lib.MQD_SLOT_FREE
    OPENING = lib.MQD_SLOT_OPENING
    ONLINE = lib.MQD_SLOT_ONLINE
    OFFLINE = lib.MQD_SLOT_OFFLINE
    DELETING = lib.MQD_SLOT_DELETING


class SlotRole(IntEnum):
    """enum mqd_slot_role."""

    LEADS = lib.MQD_ROLE_LEADS
    FOLLOWS = lib.MQD_ROLE_FOLLOWS
    NONE = lib.MQD_ROLE_NONE


class Counter(IntEnum):
    """enum mqd_counter."""

    COUNT_LOOPS = lib.MQD_COUNT_LOOPS
    COUNT_WAKEUPS_SENT = lib.MQD_COUNT_WAKEUPS_SENT
    COUNT_BYTES_IN = lib.MQD_COUNT_BYTES_IN
    COUNT_BYTES_OUT = lib.MQD_COUNT_BYTES_OUT
    COUNT_REQUESTS_PRODUCE = lib.MQD_COUNT_REQUESTS_PRODUCE
    COUNT_REQUESTS_FETCH = lib.MQD_COUNT_REQUESTS_FETCH
    COUNT_REQUESTS_LIST_OFFSETS = lib.MQD_COUNT_REQUESTS_LIST_OFFSETS
    COUNT_REQUESTS_CACHED = lib.MQD_COUNT_REQUESTS_CACHED
    COUNT_REQUESTS_FORWARDED_CONTROL = lib.MQD_COUNT_REQUESTS_FORWARDED_CONTROL
    COUNT_BATCHES_APPENDED = lib.MQD_COUNT_BATCHES_APPENDED
    COUNT_RECORDS_APPENDED = lib.MQD_COUNT_RECORDS_APPENDED
    COUNT_BYTES_APPENDED = lib.MQD_COUNT_BYTES_APPENDED
    COUNT_BATCHES_FORWARDED = lib.MQD_COUNT_BATCHES_FORWARDED
    COUNT_BATCHES_REFUSED = lib.MQD_COUNT_BATCHES_REFUSED
    COUNT_DUPLICATES = lib.MQD_COUNT_DUPLICATES
    COUNT_FETCH_BYTES = lib.MQD_COUNT_FETCH_BYTES
    COUNT_FETCH_SENDFILE_BYTES = lib.MQD_COUNT_FETCH_SENDFILE_BYTES
    COUNT_FETCH_PARKED = lib.MQD_COUNT_FETCH_PARKED
    COUNT_FETCH_COLD = lib.MQD_COUNT_FETCH_COLD
    COUNT_SYNCS = lib.MQD_COUNT_SYNCS
    COUNT_SYNC_FAILURES = lib.MQD_COUNT_SYNC_FAILURES
    COUNT_ROLLS = lib.MQD_COUNT_ROLLS
    COUNT_CONNECTIONS_ACCEPTED = lib.MQD_COUNT_CONNECTIONS_ACCEPTED
    COUNT_CONNECTIONS_CLOSED = lib.MQD_COUNT_CONNECTIONS_CLOSED
    COUNT_CONNECTIONS_REFUSED = lib.MQD_COUNT_CONNECTIONS_REFUSED
    COUNT_PROTOCOL_ERRORS = lib.MQD_COUNT_PROTOCOL_ERRORS
    GAUGE_ARENA_EXTENTS_USED = lib.MQD_GAUGE_ARENA_EXTENTS_USED
    GAUGE_ARENA_EXTENTS_TOTAL = lib.MQD_GAUGE_ARENA_EXTENTS_TOTAL
    GAUGE_HEAP_BYTES = lib.MQD_GAUGE_HEAP_BYTES
    GAUGE_SESSIONS = lib.MQD_GAUGE_SESSIONS
    GAUGE_PRODUCERS = lib.MQD_GAUGE_PRODUCERS
    COUNT_ARENA_STALLS = lib.MQD_COUNT_ARENA_STALLS
    COUNT_LINK_STALLS = lib.MQD_COUNT_LINK_STALLS
    COUNT_THROTTLED = lib.MQD_COUNT_THROTTLED
    GAUGE_LOCAL_ATTACHMENTS = lib.MQD_GAUGE_LOCAL_ATTACHMENTS
    GAUGE_LOCAL_BYTES = lib.MQD_GAUGE_LOCAL_BYTES
    COUNT_LOCAL_ATTACHES = lib.MQD_COUNT_LOCAL_ATTACHES
    COUNT_LOCAL_REFUSED = lib.MQD_COUNT_LOCAL_REFUSED
    COUNT_LOCAL_REQUESTS = lib.MQD_COUNT_LOCAL_REQUESTS
    COUNT_LOCAL_LOOKUPS = lib.MQD_COUNT_LOCAL_LOOKUPS
    COUNT_REPLICA_BYTES = lib.MQD_COUNT_REPLICA_BYTES
    COUNT_RELAYED_BATCHES = lib.MQD_COUNT_RELAYED_BATCHES
    COUNT_RELAYED_BYTES = lib.MQD_COUNT_RELAYED_BYTES
    COUNT_RELAY_FAILURES = lib.MQD_COUNT_RELAY_FAILURES
    COUNT_BATCHES_REDIRECTED = lib.MQD_COUNT_BATCHES_REDIRECTED
    COUNT_IN_SYNC_SHRINKS = lib.MQD_COUNT_IN_SYNC_SHRINKS
    COUNT_IN_SYNC_EXPANDS = lib.MQD_COUNT_IN_SYNC_EXPANDS
    GAUGE_LARGE_REQUEST_BYTES = lib.MQD_GAUGE_LARGE_REQUEST_BYTES
    COUNT_LARGE_STALLS = lib.MQD_COUNT_LARGE_STALLS
    GAUGE_SHARE_SESSIONS = lib.MQD_GAUGE_SHARE_SESSIONS
    COUNT_RECORDS_DEDUPLICATED = lib.MQD_COUNT_RECORDS_DEDUPLICATED
    GAUGE_SYNC_OLDEST_NS = lib.MQD_GAUGE_SYNC_OLDEST_NS
    COUNT_VIEW_FILTERED_BYTES = lib.MQD_COUNT_VIEW_FILTERED_BYTES
    COUNT_VIEW_CACHE_HITS = lib.MQD_COUNT_VIEW_CACHE_HITS
    COUNT_VIEW_CACHE_EVICTIONS = lib.MQD_COUNT_VIEW_CACHE_EVICTIONS
    GAUGE_VIEW_CACHE_BYTES = lib.MQD_GAUGE_VIEW_CACHE_BYTES


class Histogram(IntEnum):
    """enum mqd_histogram."""

    PRODUCE = lib.MQD_TIME_PRODUCE
    FETCH = lib.MQD_TIME_FETCH
    LOOP = lib.MQD_TIME_LOOP
    SYNC = lib.MQD_TIME_SYNC
    CONTROL = lib.MQD_TIME_CONTROL
    LOOP_WRITE = lib.MQD_TIME_LOOP_WRITE
    LOOP_ALLOCATION = lib.MQD_TIME_LOOP_ALLOCATION
    LOOP_FLUSH = lib.MQD_TIME_LOOP_FLUSH
    LOOP_OTHER = lib.MQD_TIME_LOOP_OTHER
    LOOP_FAULT = lib.MQD_TIME_LOOP_FAULT
    LOOP_SCHEDULING = lib.MQD_TIME_LOOP_SCHEDULING


class QuotaKind(IntEnum):
    """enum mqd_quota_kind."""

    PRODUCE = lib.MQD_QUOTA_PRODUCE
    FETCH = lib.MQD_QUOTA_FETCH
    REQUEST = lib.MQD_QUOTA_REQUEST
    MUTATION = lib.MQD_QUOTA_MUTATION


class QuotaLevel(IntEnum):
    """enum mqd_quota_level."""

    USER_CLIENT = 0
    USER_ANY_CLIENT = 1
    USER = 2
    ANY_USER_CLIENT = 3
    ANY_USER_ANY_CLIENT = 4
    ANY_USER = 5
    CLIENT = 6
    ANY_CLIENT = 7


class QuotaRule(NamedTuple):
    level: QuotaLevel
    user: str  # "" unless the level names a user
    client_id: str  # "" unless the level names a client
    intervals: Sequence[int]  # by QuotaKind: ns per unit, times 2^32; 0 = no limit


def abi_hash() -> int:
    """Hash of all offsets and sizes of the shared layout; two processes with different hashes must
    not share memory.
    """
    return lib.mqd_abi_hash()


def local_abi_hash() -> int:
    """Hash of the layout that local clients and the broker share (shm/local_layout.h)."""
    return int(lib.mqd_local_abi_hash())


def control_size_bytes() -> int:
    return lib.mqd_control_size_bytes()


# struct mqd_partition_view, flattened; unpacking once beats twenty attribute reads
_VIEW = Layout("@7q2I16s2iH5B2Q")
assert _VIEW.size == ffi.sizeof("struct mqd_partition_view")
_unpack_view, _read_slot = _VIEW.unpack_from, lib.mqd_slot_view


class SlotView(msgspec.Struct, frozen=True):
    """A consistent copy of a partition slot (struct mqd_partition_view, flattened). End offsets
    and the high watermark are exclusive.
    """

    log_start_offset: int
    high_watermark: int
    log_end_offset: int
    last_stable_offset: int
    durable_offset: int
    high_watermark_segment: int
    log_end_segment: int
    high_watermark_position: int
    log_end_position: int
    topic_id: bytes
    partition_index: int
    leader_epoch: int
    owner: int
    state: int  # SlotState
    log_dir: int  # its number
    role: int  # SlotRole: of this host's replica
    # 1: the latest offset is not known yet (KIP-207): the high watermark has not reached the log
    # end with which this leader began
    latest_pending: int
    flush_on_ack: int
    segments_generation: int
    owner_generation: int


class Control:
    """The control segment. Control.attach(mapping) everywhere; Control.format(mapping, ...) once,
    in the keeper.
    """

    def __init__(self, buffer: Any):
        self.buffer = buffer
        self._memory = bytes_of(buffer)
        # unused buffers for slot_view(), as (struct mqd_partition_view *, the bytes of that
        # struct): reusing them saves a quarter of the time of a call
        self._idle_buffers: list[tuple[Any, Any]] = []

    @classmethod
    def format(cls, buffer: Any, worker_count: int, boot_id: bytes, generation: int, now_ms: int) -> Control:
        """`buffer`: control_size_bytes() of zeroes; boot_id: 16 bytes."""
        if len(boot_id) != 16:
            raise NativeError(E_INVALID, f"a boot id has 16 bytes, not {len(boot_id)}")
        control = cls(buffer)
        check(lib.mqd_control_format(control._memory, len(control._memory), worker_count, boot_id, generation, now_ms))
        return control

    @classmethod
    def attach(cls, buffer: Any) -> Control:
        """Raises NativeError (E_LAYOUT) when the segment was made by a different build."""
        control = cls(buffer)
        check(lib.mqd_control_attach(control._memory, len(control._memory)))
        return control

    @property
    def pointer(self) -> Any:
        return self._memory

    @property
    def worker_count(self) -> int:
        return lib.mqd_control_worker_count(self._memory)

    @property
    def generation(self) -> int:
        return lib.mqd_control_generation(self._memory)

    @property
    def metadata_version(self) -> int:
        return lib.mqd_control_metadata_version(self._memory)

    @metadata_version.setter
    def metadata_version(self, version: int) -> None:
        lib.mqd_control_set_metadata_version(self._memory, version)

    @property
    def log_level(self) -> int:
        """Syslog's numbers: 3 error, 4 warning, 6 info, 7 debug."""
        return lib.mqd_control_log_level(self._memory)

    @log_level.setter
    def log_level(self, level: int) -> None:
        lib.mqd_control_set_log_level(self._memory, level)

    def set_broker(self, broker_epoch: int, incarnation: int, lease_deadline_ns: int) -> None:
        lib.mqd_control_set_broker(self._memory, broker_epoch, incarnation, lease_deadline_ns)

    @property
    def broker_epoch(self) -> int:
        """The last set value; 0 in a new segment."""
        return lib.mqd_control_broker_epoch(self._memory)

    @property
    def broker_incarnation(self) -> int:
        """The last set value; 0 = none yet."""
        return lib.mqd_control_broker_incarnation(self._memory)

    @property
    def lease_deadline_ns(self) -> int:
        """The CLOCK_BOOTTIME until which this host may act as a leader; 2^63 - 1 = no limit."""
        return lib.mqd_control_lease_deadline_ns(self._memory)

    def set_api_versions(self, version: int, body: bytes) -> None:
        """Called by the acceptor. `body`: the prebuilt ApiVersions response for one request version
        (0..7), at most 4080 bytes.
        """
        check(lib.mqd_control_set_api_versions(self._memory, version, body, len(body)))

    def set_share_version(self, level: int) -> None:
        """Called by the acceptor with the current level of share.version. Workers serve ShareFetch
        and ShareAcknowledge if it is above 0.
        """
        lib.mqd_control_set_share_version(self._memory, level)

    def set_endpoint_state(self, endpoint: int, state: int, pid: int) -> None:
        """Called by the keeper. DEAD raises the generation, which invalidates all buffers lent to
        or by the dead process."""
        lib.mqd_endpoint_set_state(self._memory, endpoint, state, pid)

    def endpoint_state(self, endpoint: int) -> int:
        return lib.mqd_endpoint_state(self._memory, endpoint)

    def endpoint_generation(self, endpoint: int) -> int:
        return lib.mqd_endpoint_generation(self._memory, endpoint)

    def endpoint_pid(self, endpoint: int) -> int:
        return lib.mqd_endpoint_pid(self._memory, endpoint)

    def connection_count(self, worker: int) -> int:
        return lib.mqd_worker_connection_count(self._memory, worker)

    def assign_slot(
        self, slot: int, topic_id: bytes, partition_index: int, owner: int, log_dir: int, leader_epoch: int
    ) -> None:
        check(
            lib.mqd_slot_assign(
                self._memory, slot, checked_topic_id(topic_id), partition_index, owner, log_dir, leader_epoch
            )
        )

    def clear_slot(self, slot: int) -> None:
        self._check_slot(slot)
        lib.mqd_slot_clear(self._memory, slot)

    def set_slot_state(self, slot: int, state: int) -> None:
        self._check_slot(slot)
        lib.mqd_slot_set_state(self._memory, slot, state)

    def request_flush_notice(self, slot: int) -> None:
        """Requests one FLUSHED descriptor from the slot's owner; read the slot again after the
        call, because the flush may have ended before it.
        """
        check(lib.mqd_slot_request_flush_notice(self._memory, slot))

    @contextlib.contextmanager
    def opening(self, slot: int) -> Iterator[int]:
        """Wraps the opening of a partition, on the thread that opens it. Yields how many times
        since the broker's start a worker has aborted (a broken invariant) while it opened this
        partition.
        """
        abort_count = lib.mqd_slot_recovery_begin(self._memory, slot)
        check(abort_count)
        try:
            yield abort_count
        finally:
            lib.mqd_slot_recovery_end()

    @staticmethod
    def _check_slot(slot: int) -> None:
        if not 0 <= slot < PARTITION_SLOT_COUNT:
            raise NativeError(E_INVALID, f"no partition slot {slot}: there are {PARTITION_SLOT_COUNT}")

    def publish_quotas(self, rules: Sequence[QuotaRule], burst_ns: Sequence[int]) -> None:
        """Called by the controller. `burst_ns`: by QuotaKind. Resets the token buckets."""
        c_rules = ffi.new("struct mqd_quota_rule[]", max(len(rules), 1))
        for c_rule, rule in zip(c_rules, rules, strict=False):
            user, client_id = self._quota_key(rule.user.encode()), self._quota_key(rule.client_id.encode())
            c_rule.key = lib.mqd_quota_rule_key(rule.level, user, client_id)
            c_rule.interval, c_rule.level = list(rule.intervals), rule.level
        check(lib.mqd_quota_publish(self._memory, c_rules, len(rules), list(burst_ns)))

    def _quota_key(self, name: bytes) -> int:
        return lib.mqd_quota_key(self._memory, name, len(name))

    def slot_view(self, slot: int) -> SlotView:
        """A copy of the slot. Used in hot paths, so it makes as few calls as possible."""
        try:
            buffers = view, view_bytes = self._idle_buffers.pop()  # only this call uses it until it is put back
        except IndexError:  # the first time, or while other threads use all of them
            view = ffi.new("struct mqd_partition_view *")
            buffers = view, view_bytes = view, ffi.buffer(view)
        if _read_slot(self._memory, slot, view) < 0:
            raise failure()
        slot_view = SlotView(*_unpack_view(view_bytes))
        self._idle_buffers.append(buffers)
        return slot_view

    def slot_traffic(self, slot: int) -> tuple[int, int, int]:
        """The client traffic of this host's replica since the slot was assigned: (records in, bytes
        in, bytes out). Excludes what local clients read from the files directly.
        """
        traffic = ffi.new("struct mqd_partition_traffic *")
        check(lib.mqd_slot_traffic(self._memory, slot, traffic))
        return traffic.records_in, traffic.bytes_in, traffic.bytes_out

    def slots_in_use(self) -> tuple[dict[int, SlotView], list[int]]:
        """The contents of the used slots, and the numbers of the torn slots, whose writer died while
        it wrote them.
        """
        used: dict[int, SlotView] = {}
        torn: list[int] = []
        view = ffi.new("struct mqd_partition_view *")
        memory, view_bytes, read, free = self._memory, ffi.buffer(view), _read_slot, lib.MQD_SLOT_FREE
        for slot in self._used_slots():
            if read(memory, slot, view) < 0:
                torn.append(slot)
            elif view.state != free:
                used[slot] = SlotView(*_unpack_view(view_bytes))
        return used, torn

    def _used_slots(self) -> list[int]:
        """The slots that seem to be in use: some may turn out to be torn, or already free."""
        slots = ffi.new("uint32_t[]", PARTITION_SLOT_COUNT)
        return ffi.unpack(slots, lib.mqd_slots_list_used(self._memory, slots))

    def partition_counts(self) -> list[int]:
        """How many partitions are assigned to each worker."""
        counts, view = [0] * self.worker_count, ffi.new("struct mqd_partition_view *")
        memory, read, free = self._memory, lib.mqd_slot_view, lib.MQD_SLOT_FREE
        for slot in self._used_slots():
            if read(memory, slot, view) == 0 and view.state != free and view.owner < len(counts):
                counts[view.owner] += 1
        return counts

    def local_usage(self, worker: int) -> tuple[int, int]:
        """One worker's (number of attachments through shared memory, bytes of memory that they use)."""
        read = lib.mqd_counter_read
        return read(self._memory, worker, Counter.GAUGE_LOCAL_ATTACHMENTS), read(
            self._memory, worker, Counter.GAUGE_LOCAL_BYTES
        )

    def stats(self, worker: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Copies of one worker's counters uint64[len(Counter)] and histograms
        uint64[len(Histogram), 128] (log-linear, microseconds).
        """
        import numpy

        counters = numpy.zeros(lib.MQD_COUNTER_COUNT, numpy.uint64)
        histograms = numpy.zeros((lib.MQD_HISTOGRAM_COUNT, HISTOGRAM_BUCKET_COUNT), numpy.uint64)
        lib.mqd_stats_read(
            self._memory, worker, ffi.from_buffer("uint64_t[]", counters), ffi.from_buffer("uint64_t[]", histograms)
        )
        return counters, histograms


class Quotas:
    """A process's view of the quotas in the control segment, for one thread."""

    def __init__(self, control: Control):
        self._control = control
        self._limits = lib.mqd_quota_limits_open()
        if self._limits == ffi.NULL:
            raise failure()

    def refresh(self) -> int:
        """Reads the quotas again. Returns a mask of the kinds for which any client has a quota (bit
        number: QuotaKind); 0 = there are no quotas.
        """
        return lib.mqd_quota_refresh(self._control.pointer, self._limits)

    def charge(self, user: bytes, client_id: bytes, kind: int, units: int, now_ns: int) -> int:
        """Charges the units and returns how long the client must be throttled, in nanoseconds; with
        0 units, how long for its existing debt. `now_ns`: CLOCK_MONOTONIC.
        """
        control = self._control.pointer
        user_key = lib.mqd_quota_key(control, user, len(user))
        client_key = lib.mqd_quota_key(control, client_id, len(client_id))
        return lib.mqd_quota_charge_client(control, self._limits, user_key, client_key, kind, units, now_ns)

    def close(self) -> None:
        if self._limits != ffi.NULL:
            lib.mqd_quota_limits_close(self._limits)
            self._limits = ffi.NULL
