"""The native core for Python: the only module that touches cffi.

Owns nothing but the translation: one thin function or method per function of native/mqd_native.h, plain values in and out.

1. A buffer given to a class here (a mapping, a bytearray) is held as long as the object lives: the C side keeps bare pointers into it.
2. A failing call raises NativeError with the cause and the way out; bounded things that are full answer False or None where the caller is
   expected to try again (Endpoint.send, Arena.allocate).
3. numpy is imported by the one function that needs it.
4. Longer than its neighbours because it is the whole header once more; nothing here decides anything.

Concurrency: calls release the GIL. Endpoint and Arena belong to one thread; Control may be shared; Reactor's commands to one thread.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct as Layout
from typing import TYPE_CHECKING, Any

import msgspec

from mqd._native import ffi, lib

if TYPE_CHECKING:
    import numpy

WORKER_COUNT_MAX = lib.MQD_WORKER_COUNT_MAX
ENDPOINT_COUNT_MAX = lib.MQD_ENDPOINT_COUNT_MAX
PARTITION_SLOT_COUNT = lib.MQD_PARTITION_SLOT_COUNT
OWNER_NONE = lib.MQD_OWNER_NONE
TOPIC_NAME_BYTES_MAX = lib.MQD_TOPIC_NAME_BYTES_MAX
LOG_DIR_COUNT_MAX = lib.MQD_LOG_DIR_COUNT_MAX
LINK_DESCRIPTOR_COUNT = lib.MQD_LINK_DESCRIPTOR_COUNT
BATCH_HEADER_BYTES = lib.MQD_BATCH_HEADER_BYTES
HISTOGRAM_BUCKET_COUNT = 128
SLOT_NONE = 0xFFFFFFFF  # "no slot" in an event

RESPONSE_MORE = lib.MQD_RESPONSE_MORE
RESPONSE_CACHEABLE = lib.MQD_RESPONSE_CACHEABLE
RESPONSE_NONE = lib.MQD_RESPONSE_NONE
PRODUCE_CONTROL = lib.MQD_PRODUCE_CONTROL
PRODUCE_ACKS_ALL = lib.MQD_PRODUCE_ACKS_ALL
PRODUCE_ACKS_NONE = lib.MQD_PRODUCE_ACKS_NONE
PRODUCE_MARKER_BUMPED = lib.MQD_PRODUCE_MARKER_BUMPED
CHECK_TRANSACTION = lib.MQD_CHECK_TRANSACTION
CHECK_RECORDS = lib.MQD_CHECK_RECORDS
RECORD_ERROR_COUNT_MAX = lib.MQD_RECORD_ERROR_COUNT_MAX

E_LAYOUT = lib.MQD_E_LAYOUT
E_CORRUPT = lib.MQD_E_CORRUPT
E_FULL = lib.MQD_E_FULL
E_INVALID = lib.MQD_E_INVALID
E_STALE = lib.MQD_E_STALE


def _enumeration(name: str, prefix: str, last: str | None = None) -> dict[str, int]:
    """The members of a C enum, by the names of Python: without the prefix, without the closing count."""
    members = ffi.typeof(f"enum {name}").relements
    return {key.removeprefix(prefix): value for key, value in sorted(members.items(), key=lambda item: item[1]) if key != last}


DescriptorKind = IntEnum("DescriptorKind", _enumeration("mqd_descriptor_kind", "MQD_LINK_"))
ProcessState = IntEnum("ProcessState", _enumeration("mqd_process_state", "MQD_PROCESS_"))
SlotState = IntEnum("SlotState", _enumeration("mqd_slot_state", "MQD_SLOT_"))
Counter = IntEnum("Counter", _enumeration("mqd_counter", "MQD_", "MQD_COUNTER_COUNT"))  # COUNT_LOOPS ... GAUGE_SESSIONS ...
Histogram = IntEnum("Histogram", _enumeration("mqd_histogram", "MQD_TIME_", "MQD_HISTOGRAM_COUNT"))
EventKind = IntEnum("EventKind", _enumeration("mqd_event_kind", "MQD_EVENT_"))
QuotaKind = IntEnum("QuotaKind", _enumeration("mqd_quota_kind", "MQD_QUOTA_", "MQD_QUOTA_KIND_COUNT"))
Backend = IntEnum("Backend", _enumeration("mqd_backend", "MQD_BACKEND_"))


class NativeError(OSError):
    """A call into the core failed. `errno` (also `code`) is the system's errno or one of E_*; the message names the cause and the way out."""

    @property
    def code(self) -> int:
        return self.errno or 0


def _error(path: str | os.PathLike[str] | None = None) -> NativeError:
    code, message = lib.mqd_error_code(), ffi.string(lib.mqd_error_message()).decode("utf-8", "replace")
    return NativeError(code, message, os.fspath(path)) if path is not None else NativeError(code, message)


def _check(result: int, path: str | os.PathLike[str] | None = None) -> int:
    if result < 0:
        raise _error(path)
    return result


def _bytes_of(buffer: Any, writable: bool = True) -> Any:
    return ffi.from_buffer("uint8_t[]", buffer, require_writable=writable)


# -- checksums, batches, segment files ------------------------------------------------------------------------------------


class BatchHeader(msgspec.Struct, gc=False):
    """The decoded header of a record batch, magic 2; fields as in struct mqd_batch."""

    base_offset: int
    size_bytes: int
    partition_leader_epoch: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int


class ScanResult(msgspec.Struct, gc=False):
    """What a walk over one segment file found. `reason` None = valid to its end; else why the byte at `valid_bytes` is not."""

    valid_bytes: int
    batch_count: int
    record_count: int
    next_offset: int
    max_timestamp_ms: int
    last_leader_epoch: int
    reason: str | None


def abi_hash() -> int:
    """Hash of every offset and size that processes share; two processes with different hashes must not share memory."""
    return lib.mqd_abi_hash()


def control_size_bytes() -> int:
    return lib.mqd_control_size_bytes()


def links_size_bytes(endpoint_count: int) -> int:
    return lib.mqd_links_size_bytes(endpoint_count)


def links_format(buffer: Any, endpoint_count: int) -> None:
    """Keeper, once, on zeroed memory."""
    memory = _bytes_of(buffer)
    _check(lib.mqd_links_format(memory, len(memory), endpoint_count))


def crc32c(data: Any, crc: int = 0) -> int:
    memory = _bytes_of(data, writable=False)
    return lib.mqd_crc32c(crc, memory, len(memory))


def _batch_header(batch: Any) -> BatchHeader:
    return BatchHeader(*[getattr(batch, name) for name in BatchHeader.__struct_fields__])


def batch_validate(data: Any) -> tuple[int, str, BatchHeader]:
    """Is `data` exactly one sound batch? Gives (Kafka error code or 0, reason or "", header as far as it was read)."""
    memory, batch, reason = _bytes_of(data, writable=False), ffi.new("struct mqd_batch *"), ffi.new("const char **")
    error = lib.mqd_batch_validate(memory, len(memory), batch, reason)
    text = ffi.string(reason[0]).decode() if reason[0] != ffi.NULL else ""
    return error, text if error else "", _batch_header(batch)


def batch_decode(data: Any) -> BatchHeader:
    """The header alone, no CRC. Raises NativeError (E_CORRUPT) when the bytes cannot be a batch, E_INVALID below 61 bytes."""
    memory, batch = _bytes_of(data, writable=False), ffi.new("struct mqd_batch *")
    if len(memory) < BATCH_HEADER_BYTES:
        raise NativeError(E_INVALID, f"a batch header has {BATCH_HEADER_BYTES} bytes, here are {len(memory)}")
    _check(lib.mqd_batch_decode(memory, len(memory), batch))
    return _batch_header(batch)


def segment_scan(log_path: str | os.PathLike[str], base_offset: int, from_position: int = 0, check_crc: bool = True) -> ScanResult:
    """Walks the batches of one segment file. Raises NativeError when the file cannot be read; bad bytes are a result, not an error."""
    out = ffi.new("struct mqd_scan_result *")
    _check(lib.mqd_segment_scan(os.fsencode(log_path), base_offset, from_position, check_crc, out), log_path)
    reason = ffi.string(out.reason).decode() if out.reason != ffi.NULL else None
    return ScanResult(
        out.valid_bytes, out.batch_count, out.record_count, out.next_offset, out.max_timestamp_ms, out.last_leader_epoch, reason
    )


WalkStop = IntEnum("WalkStop", _enumeration("mqd_walk_stop", "MQD_WALK_"))


class RecordPlaces:
    """Where the keys and values of stored plain batches lie (struct mqd_record_place); room for `capacity` records at a time."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._out = ffi.new("struct mqd_record_place[]", capacity)
        self._walk = ffi.new("struct mqd_record_walk *")
        self._bytes = ffi.buffer(self._out)

    def walk(self, data: bytes, position: int, next_offset: int, end_offset: int) -> tuple[WalkStop, int, int, numpy.ndarray]:
        """From `position` on: (why it stopped, where, offset after the last batch taken, int64[n, 4] of key position and size, value position and size; size -1 = null)."""
        import numpy

        memory, walk = _bytes_of(data, writable=False), self._walk
        walk.position, walk.next_offset = position, next_offset
        lib.mqd_records_place(memory, len(memory), end_offset, walk, self._out, self._capacity)
        places = numpy.frombuffer(self._bytes, numpy.int32, 4 * walk.record_count).reshape(-1, 4)
        return WalkStop(walk.stop), walk.position, walk.next_offset, places


def records_unkeyed(records: Any, record_count: int, unkeyed_count_max: int) -> tuple[int, list[int]]:
    """How many of the uncompressed records have no key, and the places of the first of them. ValueError when the bytes are not that many records."""
    memory, unkeyed, reason = _bytes_of(records, writable=False), ffi.new("int32_t[]", unkeyed_count_max), ffi.new("const char **")
    count = lib.mqd_records_unkeyed(memory, len(memory), record_count, unkeyed, unkeyed_count_max, reason)
    if count < 0:
        raise ValueError(ffi.string(reason[0]).decode())
    return count, list(unkeyed[0 : min(count, unkeyed_count_max)])


# -- files that Python keeps beside the log --------------------------------------------------------------------------------


def file_replace(path: str | os.PathLike[str], data: Any) -> None:
    """Afterwards, even after a power cut, `path` holds all of `data`, or (on an error) what it held before."""
    memory = _bytes_of(data, writable=False)
    _check(lib.mqd_file_replace(os.fsencode(path), memory, len(memory)), path)


def file_open_append(path: str | os.PathLike[str], position: int) -> int:
    """Opens for appending at `position`; bytes after it are cut off. Returns a file descriptor for the calls below."""
    return _check(lib.mqd_file_open_append(os.fsencode(path), position), path)


def file_append(fd: int, data: Any, position: int) -> None:
    """Writes all of `data` at `position` or raises. Not durable before file_flush."""
    memory = _bytes_of(data, writable=False)
    _check(lib.mqd_file_append(fd, memory, len(memory), position))


def file_flush(fd: int) -> None:
    """fdatasync. A failure is final for the file: what the disk holds is unknown and asking again proves nothing."""
    _check(lib.mqd_file_flush(fd))


def file_close(fd: int) -> None:
    _check(lib.mqd_file_close(fd))


def file_unlink(path: str | os.PathLike[str]) -> None:
    _check(lib.mqd_file_unlink(os.fsencode(path)), path)


def file_rename(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    _check(lib.mqd_file_rename(os.fsencode(source), os.fsencode(target)), source)


def file_mkdir(path: str | os.PathLike[str], mode: int = 0o755) -> None:
    _check(lib.mqd_file_mkdir(os.fsencode(path), mode), path)


def file_sync_directory(path: str | os.PathLike[str]) -> None:
    _check(lib.mqd_file_sync_directory(os.fsencode(path)), path)


# -- the control segment ---------------------------------------------------------------------------------------------------

# struct mqd_partition_view, flattened; unpacking once beats seventeen attribute reads
_VIEW = Layout("@7q2I16s2iH2B2Q")


class SlotView(msgspec.Struct, frozen=True):
    """A consistent copy of a partition slot (struct mqd_partition_view, flattened). Offsets are exclusive ends."""

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
    log_dir: int
    segments_generation: int
    owner_generation: int


class Control:
    """The control segment. Control.attach(mapping) everywhere; Control.format(mapping, ...) once, in the keeper."""

    def __init__(self, buffer: Any):
        self.buffer = buffer
        self._memory = _bytes_of(buffer)
        self._view = ffi.new("struct mqd_partition_view *")
        self._view_bytes = ffi.buffer(self._view)

    @classmethod
    def format(cls, buffer: Any, worker_count: int, boot_id: bytes, generation: int, now_ms: int) -> Control:
        """`buffer`: control_size_bytes() of zeroes; boot_id: 16 bytes."""
        if len(boot_id) != 16:
            raise NativeError(E_INVALID, f"a boot id has 16 bytes, not {len(boot_id)}")
        control = cls(buffer)
        _check(lib.mqd_control_format(control._memory, len(control._memory), worker_count, boot_id, generation, now_ms))
        return control

    @classmethod
    def attach(cls, buffer: Any) -> Control:
        """Raises NativeError (E_LAYOUT) when the segment was made by a different build."""
        control = cls(buffer)
        _check(lib.mqd_control_attach(control._memory, len(control._memory)))
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

    def set_api_versions(self, version: int, body: bytes) -> None:
        """Acceptor: the ready-made ApiVersions body of one request version (0..7), at most 4080 bytes."""
        _check(lib.mqd_control_set_api_versions(self._memory, version, body, len(body)))

    def set_endpoint_state(self, endpoint: int, state: int, pid: int) -> None:
        """Keeper. DEAD bumps the generation: what the dead one lent or owed is void."""
        lib.mqd_endpoint_set_state(self._memory, endpoint, state, pid)

    def endpoint_state(self, endpoint: int) -> int:
        return lib.mqd_endpoint_state(self._memory, endpoint)

    def endpoint_generation(self, endpoint: int) -> int:
        return lib.mqd_endpoint_generation(self._memory, endpoint)

    def endpoint_pid(self, endpoint: int) -> int:
        return lib.mqd_endpoint_pid(self._memory, endpoint)

    def connection_count(self, worker: int) -> int:
        return lib.mqd_worker_connection_count(self._memory, worker)

    def assign_slot(self, slot: int, topic_id: bytes, partition_index: int, owner: int, log_dir: int, leader_epoch: int) -> None:
        if len(topic_id) != 16:
            raise NativeError(E_INVALID, f"a topic id has 16 bytes, not {len(topic_id)}")
        _check(lib.mqd_slot_assign(self._memory, slot, topic_id, partition_index, owner, log_dir, leader_epoch))

    def clear_slot(self, slot: int) -> None:
        self._slot_exists(slot)
        lib.mqd_slot_clear(self._memory, slot)

    def set_slot_state(self, slot: int, state: int) -> None:
        self._slot_exists(slot)
        lib.mqd_slot_set_state(self._memory, slot, state)

    @staticmethod
    def _slot_exists(slot: int) -> None:
        if not 0 <= slot < PARTITION_SLOT_COUNT:
            raise NativeError(E_INVALID, f"no partition slot {slot}: there are {PARTITION_SLOT_COUNT}")

    def publish_quotas(self, rules: Sequence[tuple[str, Sequence[int]]], defaults: Sequence[int], burst_ns: int) -> None:
        """Controller. By client id, and for all others: intervals by QuotaKind (ns for a unit, times 2^32; 0 = no limit). Forgives what is owed."""
        told, default = ffi.new("struct mqd_quota_rule[]", max(len(rules), 1)), ffi.new("struct mqd_quota_rule *")
        default.interval = list(defaults)
        for rule, (client_id, intervals) in zip(told, rules, strict=False):
            name = client_id.encode()
            rule.key, rule.interval = lib.mqd_quota_key(name, len(name)), list(intervals)
        _check(lib.mqd_quota_publish(self._memory, told, len(rules), default, burst_ns))

    def slot_view(self, slot: int) -> SlotView:
        _check(lib.mqd_slot_view(self._memory, slot, self._view))
        return SlotView(*_VIEW.unpack_from(self._view_bytes))

    def partition_counts(self) -> list[int]:
        """Assigned partitions of every worker; looks at all slots, some milliseconds."""
        counts, memory, view, read, free = [0] * self.worker_count, self._memory, self._view, lib.mqd_slot_view, lib.MQD_SLOT_FREE
        for slot in range(PARTITION_SLOT_COUNT):
            if read(memory, slot, view) == 0 and view.state != free and view.owner < len(counts):
                counts[view.owner] += 1
        return counts

    def stats(self, worker: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Copies of one worker's counters uint64[len(Counter)] and histograms uint64[len(Histogram), 128] (log-linear, microseconds)."""
        import numpy

        counters = numpy.zeros(lib.MQD_COUNTER_COUNT, numpy.uint64)
        histograms = numpy.zeros((lib.MQD_HISTOGRAM_COUNT, HISTOGRAM_BUCKET_COUNT), numpy.uint64)
        lib.mqd_stats_read(self._memory, worker, ffi.from_buffer("uint64_t[]", counters), ffi.from_buffer("uint64_t[]", histograms))
        return counters, histograms


class Quotas:
    """A process's view of the quotas in the control segment, for one thread."""

    def __init__(self, control: Control):
        self._control = control
        self._limits = lib.mqd_quota_limits_open()
        if self._limits == ffi.NULL:
            raise _error()

    def refresh(self) -> int:
        """Which kinds any client id is limited in, bit by QuotaKind; 0 = there are no quotas."""
        return lib.mqd_quota_refresh(self._control.pointer, self._limits)

    def charge(self, client_id: bytes, kind: int, units: int, now_ns: int) -> int:
        """For how many nanoseconds the client is to be left alone. `now_ns`: CLOCK_MONOTONIC."""
        return lib.mqd_quota_charge_client(self._control.pointer, self._limits, client_id, len(client_id), kind, units, now_ns)

    def close(self) -> None:
        if self._limits != ffi.NULL:
            lib.mqd_quota_limits_close(self._limits)
            self._limits = ffi.NULL


# -- links and arenas -----------------------------------------------------------------------------------------------------

_DESCRIPTOR = Layout("=HHIQQIiqqqQ")


class Descriptor(msgspec.Struct, gc=False):
    """64 bytes on a link; what the fields mean for each kind: struct mqd_descriptor. `generation` is stamped by the sender's endpoint."""

    kind: int = 0
    flags: int = 0
    slot: int = 0
    token: int = 0
    offset: int = 0
    size_bytes: int = 0
    error: int = 0
    a: int = 0
    b: int = 0
    c: int = 0
    generation: int = 0


assert _VIEW.size == ffi.sizeof("struct mqd_partition_view") and _DESCRIPTOR.size == ffi.sizeof("struct mqd_descriptor")


class Endpoint:
    """One process's end of its links to all others. `eventfds[i]` wakes endpoint i."""

    def __init__(self, control: Control, links_buffer: Any, index: int, endpoint_count: int, eventfds: Sequence[int]):
        if len(eventfds) != endpoint_count:
            raise NativeError(E_INVALID, f"{endpoint_count} endpoints need as many eventfds, not {len(eventfds)}")
        self.index = index
        self.endpoint_count = endpoint_count
        self._control = control
        self._links = _bytes_of(links_buffer)
        self._eventfds = ffi.new("int[]", list(eventfds))
        self._capacity = 256
        self._out = ffi.new("struct mqd_descriptor[]", self._capacity)
        self._from = ffi.new("uint32_t[]", self._capacity)
        self._out_bytes = ffi.buffer(self._out)
        self._one = ffi.new("struct mqd_descriptor *")
        self._one_bytes = ffi.buffer(self._one)
        self._endpoint = lib.mqd_endpoint_open(control.pointer, self._links, index, endpoint_count, self._eventfds)
        if self._endpoint == ffi.NULL:
            raise _error()

    def send(self, to: int, descriptor: Descriptor) -> bool:
        """False when the ring to `to` is full: keep the descriptor and try after its next wake. Visible to the peer after flush()."""
        d = descriptor
        _DESCRIPTOR.pack_into(
            self._one_bytes, 0, d.kind, d.flags, d.slot, d.token, d.offset, d.size_bytes, d.error, d.a, d.b, d.c, d.generation
        )
        if lib.mqd_endpoint_send(self._endpoint, to, self._one) == 0:
            return True
        if lib.mqd_error_code() == E_FULL:
            return False
        raise _error()

    def flush(self) -> None:
        """Publishes what was sent and wakes the sleepers once each."""
        lib.mqd_endpoint_flush(self._endpoint)

    def drain(self, max: int = 256) -> list[tuple[int, Descriptor]]:
        """Up to `max` (at most 256) descriptors that have arrived, with their senders."""
        count = _check(lib.mqd_endpoint_drain(self._endpoint, self._out, self._from, min(max, self._capacity)))
        senders, size = self._from, _DESCRIPTOR.size
        return [
            (senders[i], Descriptor(*fields)) for i, fields in enumerate(_DESCRIPTOR.iter_unpack(self._out_bytes[: count * size]))
        ]

    def free_count(self, to: int) -> int:
        return lib.mqd_endpoint_free_count(self._endpoint, to)

    def prepare_sleep(self) -> bool:
        """True when it is safe to block on the own eventfd; False when something has arrived meanwhile: drain first."""
        return _check(lib.mqd_endpoint_prepare_sleep(self._endpoint)) == 0

    def awake(self) -> None:
        lib.mqd_endpoint_awake(self._endpoint)

    def close(self) -> None:
        if self._endpoint != ffi.NULL:
            lib.mqd_endpoint_close(self._endpoint)
            self._endpoint = ffi.NULL


class Arena:
    """The process's own shared arena: runs of extents lent to peers by offset."""

    def __init__(self, buffer: Any, extent_bytes: int):
        self._memory = _bytes_of(buffer)
        self.view = memoryview(buffer).cast("B")
        self._arena = lib.mqd_arena_open(self._memory, len(self._memory), extent_bytes)
        if self._arena == ffi.NULL:
            raise _error()

    def allocate(self, size_bytes: int) -> int | None:
        """Offset of a contiguous run with one reference, or None when nothing that large is free now."""
        offset = lib.mqd_arena_allocate(self._arena, size_bytes)
        if offset >= 0:
            return offset
        if lib.mqd_error_code() == E_FULL:
            return None
        raise _error()

    def hold(self, offset: int) -> None:
        lib.mqd_arena_hold(self._arena, offset)

    def release(self, offset: int) -> bool:
        """True when this was the last reference."""
        return _check(lib.mqd_arena_release(self._arena, offset)) == 1

    @property
    def extents_used(self) -> int:
        return lib.mqd_arena_extents_used(self._arena)

    @property
    def extents_total(self) -> int:
        return lib.mqd_arena_extents_total(self._arena)

    def close(self) -> None:
        if self._arena != ffi.NULL:
            lib.mqd_arena_close(self._arena)
            self._arena = ffi.NULL


# -- partitions and the reactor --------------------------------------------------------------------------------------------

INT64_MAX = (1 << 63) - 1


def _copy_in(source: msgspec.Struct, target: Any) -> Any:
    for name in source.__struct_fields__:
        setattr(target, name, getattr(source, name))
    return target


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """struct mqd_log_options. The defaults are Kafka's topic defaults (and flush_on_ack, ours)."""

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
    producer_id_count_max: int = 10000
    producer_id_expiration_ms: int = 24 * 3600 * 1000
    log_append_time: bool = False
    flush_on_ack: bool = True
    compacted: bool = False
    readonly: bool = False
    transaction_verification: bool = True

    def native(self) -> Any:
        return _copy_in(self, ffi.new("struct mqd_log_options *"))


class Recovery(msgspec.Struct, kw_only=True):
    """struct mqd_recovery: the first five say what is trusted (log_start_offset also comes back), the rest what was found."""

    recovery_point_offset: int = -1
    trusted_end_offset: int = -1
    clean_shutdown: bool = False
    rewrite: bool = False
    log_start_offset: int = 0
    log_end_offset: int = 0
    truncated_bytes: int = 0
    scanned_bytes: int = 0
    corrupt_position: int = -1
    corrupt_segment: int = -1
    segment_count: int = 0
    last_leader_epoch: int = -1


class ProducerView(msgspec.Struct, frozen=True):
    """struct mqd_producer_view: what a partition knows of one producer id; -1 = none."""

    producer_id: int
    last_timestamp_ms: int
    transaction_first_offset: int
    last_offset: int
    last_sequence: int
    coordinator_epoch: int
    producer_epoch: int


_PRODUCER_VIEW = Layout("=qqqqiiiI")
assert _PRODUCER_VIEW.size == ffi.sizeof("struct mqd_producer_view")


def producer_views(payload: bytes) -> list[ProducerView]:
    """The payload of DESCRIBED."""
    return [ProducerView(*fields[:7]) for fields in _PRODUCER_VIEW.iter_unpack(payload)]


class Partition:
    """An open log. Whoever holds it owns it; Reactor.partition_open gives it away, the event of partition_close gives it back."""

    __slots__ = ("pointer",)

    def __init__(self, pointer: Any):
        self.pointer = pointer

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], options: LogOptions, leader_epoch: int, now_ms: int, recovery: Recovery | None = None
    ) -> Partition:
        """Opens or creates and recovers; fills `recovery`. May read the whole log: call it off the event loop."""
        recovery = recovery if recovery is not None else Recovery()
        told = _copy_in(recovery, ffi.new("struct mqd_recovery *"))
        pointer = lib.mqd_partition_open(os.fsencode(path), options.native(), leader_epoch, now_ms, told)
        if pointer == ffi.NULL:
            raise _error(path)
        for name in recovery.__struct_fields__:
            setattr(recovery, name, getattr(told, name))
        recovery.clean_shutdown, recovery.rewrite = bool(recovery.clean_shutdown), bool(recovery.rewrite)
        return cls(pointer)

    @property
    def log_end_offset(self) -> int:
        return lib.mqd_partition_log_end_offset(self._open())

    def close(self, clean: bool = True) -> None:
        """clean: writes indexes and a producer snapshot and syncs. The object is spent afterwards, also when this raises."""
        pointer, self.pointer = self._open(), ffi.NULL
        _check(lib.mqd_partition_close(pointer, clean))

    def give_away(self) -> Any:
        pointer, self.pointer = self._open(), ffi.NULL
        return pointer

    def _open(self) -> Any:
        if self.pointer == ffi.NULL:
            raise NativeError(E_INVALID, "this partition was closed or belongs to the reactor")
        return self.pointer


CompactState = IntEnum("CompactState", _enumeration("mqd_compact_state", "MQD_COMPACT_"))


class CompactOptions(msgspec.Struct, kw_only=True):
    """struct mqd_compact_options."""

    first_dirty_offset: int
    clean_count: int
    now_ms: int
    delete_retention_ms: int
    snapshot_offset: int = -1
    end_position: int = -1
    map_bytes: int = 128 << 20
    map_load_percent: int = 90
    index_interval_bytes: int = 4096


class CompactFigures(msgspec.Struct):
    """struct mqd_compact_figures."""

    read_bytes: int = 0
    written_bytes: int = 0
    records_read: int = 0
    records_kept: int = 0
    records_without_key: int = 0
    batches_read: int = 0
    batches_whole: int = 0
    batches_rebuilt: int = 0
    batches_emptied: int = 0
    batches_dropped: int = 0
    mapped_keys: int = 0
    mapped_end: int = 0
    clean_count: int = 0
    map_full: int = 0


class CompactGroup(msgspec.Struct):
    size_bytes: int
    changed: bool
    has_transactions: bool


class Compaction:
    """One compaction of a partition's sealed segments; the order of calls: native/mqd_compact_api.h. One thread at a time.

    Raises NativeError: E_CORRUPT (this log cannot be compacted), E_FULL, E_STALE (look again later), or the system's errno."""

    def __init__(self, directory: str | os.PathLike[str], bases: Sequence[int], options: CompactOptions):
        told = _copy_in(options, ffi.new("struct mqd_compact_options *"))
        told.segment_count = len(bases)
        self._work = ffi.new("struct mqd_compact_work *")
        self._compact = lib.mqd_compact_open(os.fsencode(directory), list(bases), told)
        if self._compact == ffi.NULL:
            raise _error(directory)

    def step(self, bytes_max: int) -> int:
        """CompactState. `done_bytes` tells what was read and written; after DECOMPRESS and COMPRESS, `question` is to be answered by give()."""
        return _check(lib.mqd_compact_step(self._open(), bytes_max, self._work))

    def give(self, data: bytes) -> int:
        memory = _bytes_of(data, writable=False)
        return _check(lib.mqd_compact_give(self._open(), memory, len(memory), self._work))

    @property
    def done_bytes(self) -> int:
        return self._work.done_bytes

    @property
    def question(self) -> tuple[int, bytes]:
        """(codec, data)."""
        return self._work.codec, ffi.buffer(self._work.bytes, self._work.size_bytes)[:] if self._work.size_bytes else b""

    def group_begin(self, first: int, count: int) -> None:
        """`first`: number in `bases`."""
        _check(lib.mqd_compact_group_begin(self._open(), first, count))

    def group_end(self) -> CompactGroup:
        group = ffi.new("struct mqd_compact_group *")
        _check(lib.mqd_compact_group_end(self._open(), group))
        return CompactGroup(group.size_bytes, bool(group.changed), bool(group.has_transactions))

    def figures(self) -> CompactFigures:
        figures = ffi.new("struct mqd_compact_figures *")
        lib.mqd_compact_look(self._open(), figures)
        return CompactFigures(*[getattr(figures, name) for name in CompactFigures.__struct_fields__])

    def close(self) -> None:
        """What is half written is thrown away."""
        if self._compact != ffi.NULL:
            lib.mqd_compact_close(self._compact)
            self._compact = ffi.NULL

    def _open(self) -> Any:
        if self._compact == ffi.NULL:
            raise NativeError(E_INVALID, "this compaction was closed")
        return self._compact


def compact_swap_prepare(directory: str | os.PathLike[str], base_offset: int, old_bases: Sequence[int], has_transactions: bool) -> None:
    """From here on a crash finishes the swap; before, it undoes it."""
    _check(lib.mqd_compact_swap_prepare(os.fsencode(directory), base_offset, list(old_bases), len(old_bases), has_transactions), directory)


def compact_swap_install(directory: str | os.PathLike[str], base_offset: int) -> None:
    _check(lib.mqd_compact_swap_install(os.fsencode(directory), base_offset), directory)


def compact_swap_finish(directory: str | os.PathLike[str], base_offset: int) -> None:
    _check(lib.mqd_compact_swap_finish(os.fsencode(directory), base_offset), directory)


def compact_swap_undo(directory: str | os.PathLike[str], base_offset: int) -> None:
    """Instead of install: the new files go."""
    _check(lib.mqd_compact_swap_undo(os.fsencode(directory), base_offset), directory)


class ReactorOptions(msgspec.Struct, kw_only=True):
    """struct mqd_reactor_options; `arenas` by endpoint, None = has none, the own one writable."""

    control: Control
    links: Any
    index: int  # `self` in C
    endpoint_count: int
    eventfds: Sequence[int]
    arenas: Sequence[Any]
    handoff_fd: int
    backend: int = 0  # Backend
    cpu: int = -1
    spin_us: int = 0
    connection_count_max: int = 10000
    request_bytes_max: int = 8 << 20
    heap_bytes_max: int = 64 << 20
    inflight_count_max: int = 64
    connection_idle_ms_max: int = 600_000
    fetch_bytes_max: int = 55 << 20
    session_count_max: int = 1000
    group_commit_us: int = 0
    sendfile_bytes_min: int = 8192
    read_fd_count_max: int = 512


class Event(msgspec.Struct, frozen=True):
    """struct mqd_event."""

    kind: int  # EventKind
    slot: int  # SLOT_NONE = none
    token: int
    error: int
    log_dir: int
    offset: int
    connection: int
    level: int
    partition: Partition | None
    text: str


class Reactor:
    """The native loop of one worker, on a thread of its own. Commands return at once; each is answered by one event with the same token.

    A command raises NativeError (E_FULL) when 4096 are under way."""

    def __init__(self, options: ReactorOptions):
        native = ffi.new("struct mqd_reactor_options *")
        links, eventfds = _bytes_of(options.links), ffi.new("int[]", list(options.eventfds))
        self._held: list[Any] = [options.control, links, eventfds]
        native.control, native.links, native.eventfds, native.self = options.control.pointer, links, eventfds, options.index
        for endpoint, buffer in enumerate(options.arenas):
            if buffer is not None:
                memory = _bytes_of(buffer, writable=endpoint == options.index)
                native.arenas[endpoint], native.arena_bytes[endpoint] = memory, len(memory)
                self._held.append(memory)
        for name in options.__struct_fields__:
            if name not in ("control", "links", "index", "eventfds", "arenas"):
                setattr(native, name, getattr(options, name))
        self._event = ffi.new("struct mqd_event *")
        self._reactor = lib.mqd_reactor_create(native)
        if self._reactor == ffi.NULL:
            raise _error()
        self.event_fd: int = lib.mqd_reactor_event_fd(self._reactor)  # readable when next_events() has something

    @property
    def backend(self) -> Backend:
        """The one in use."""
        return Backend(lib.mqd_reactor_backend(self._reactor))

    def start(self) -> None:
        _check(lib.mqd_reactor_start(self._reactor))

    def stop(self) -> None:
        """Stops reading, flushes, answers what it can; returns when the thread has ended."""
        _check(lib.mqd_reactor_stop(self._reactor))

    def destroy(self) -> None:
        if self._reactor != ffi.NULL:
            lib.mqd_reactor_destroy(self._reactor)
            self._reactor = ffi.NULL
            self._held.clear()

    def next_events(self, max: int = 1024) -> list[Event]:
        events, event = [], self._event
        while len(events) < max and lib.mqd_reactor_next_event(self._reactor, event) == 1:
            partition = Partition(event.partition) if event.partition != ffi.NULL else None
            text = ffi.string(event.text, 184).decode("utf-8", "replace")
            events.append(
                Event(
                    event.kind, event.slot, event.token, event.error, event.log_dir, event.offset, event.connection, event.level, partition, text
                )
            )
        return events

    def log_dir(self, token: int, log_dir: int, path: str | os.PathLike[str]) -> None:
        _check(lib.mqd_reactor_log_dir(self._reactor, token, log_dir, os.fsencode(path)))

    def log_dir_full(self, token: int, log_dir: int, full: bool) -> None:
        _check(lib.mqd_reactor_log_dir_full(self._reactor, token, log_dir, full))

    def topic_put(self, token: int, topic_id: bytes, name: str, slots: Sequence[int]) -> None:
        """`slots` by partition index."""
        _check(lib.mqd_reactor_topic_put(self._reactor, token, _topic_id(topic_id), name.encode(), list(slots), len(slots)))

    def topic_remove(self, token: int, topic_id: bytes) -> None:
        _check(lib.mqd_reactor_topic_remove(self._reactor, token, _topic_id(topic_id)))

    def partition_open(self, token: int, slot: int, log_dir: int, partition: Partition) -> None:
        """Gives the partition to the reactor; when this raises, it still belongs to the caller."""
        _check(lib.mqd_reactor_partition_open(self._reactor, token, slot, log_dir, partition._open()))
        partition.give_away()

    def partition_close(self, token: int, slot: int) -> None:
        """The event's `partition` may then be closed, its files deleted."""
        _check(lib.mqd_reactor_partition_close(self._reactor, token, slot))

    def set_options(self, token: int, slot: int, options: LogOptions) -> None:
        _check(lib.mqd_reactor_set_options(self._reactor, token, slot, options.native()))

    def advance_start(self, token: int, slot: int, offset: int) -> None:
        """offset -1 = high watermark; the event's `offset` is the new start. Unlink files only after the event."""
        _check(lib.mqd_reactor_advance_start(self._reactor, token, slot, offset))

    def roll(self, token: int, slot: int) -> None:
        _check(lib.mqd_reactor_roll(self._reactor, token, slot))

    def segments_replaced(self, token: int, slot: int, first: int, last: int) -> None:
        """Compaction made one segment, named by `first`, of those from `first` to `last`; first == last: readers look anew, no more. E_STALE: not these."""
        _check(lib.mqd_reactor_segments_replaced(self._reactor, token, slot, first, last))

    def set_leader_epoch(self, token: int, slot: int, leader_epoch: int) -> None:
        _check(lib.mqd_reactor_set_leader_epoch(self._reactor, token, slot, leader_epoch))

    def set_connection_max(self, connection_count_max: int) -> None:
        """Not a queued command: no event answers it."""
        _check(lib.mqd_reactor_set_connection_max(self._reactor, connection_count_max))

    def endpoint_died(self, token: int, endpoint: int) -> None:
        _check(lib.mqd_reactor_endpoint_died(self._reactor, token, endpoint))


def _topic_id(topic_id: bytes) -> bytes:
    if len(topic_id) != 16:
        raise NativeError(E_INVALID, f"a topic id has 16 bytes, not {len(topic_id)}")
    return topic_id
