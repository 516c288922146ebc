"""Links and arenas: how the processes of a broker pass messages and bytes to each other.

1. A full ring returns False, a full arena None: the caller keeps its message and retries after the
   peer's next wake.
2. Mappings passed to Endpoint and Arena are held as long as the object lives: the C side keeps raw
   pointers into them.

Concurrency: an Endpoint and an Arena belong to one thread each.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct as Layout
from typing import Any

import msgspec

from mqd.native.control import Control
from mqd.native.core import E_FULL, E_INVALID, NativeError, bytes_of, check, failure, ffi, lib

ENDPOINT_COUNT_MAX = lib.MQD_ENDPOINT_COUNT_MAX
LINK_DESCRIPTOR_COUNT = lib.MQD_LINK_DESCRIPTOR_COUNT

# flags of descriptors, and limits: native/native.h
RESPONSE_MORE = lib.MQD_RESPONSE_MORE
RESPONSE_CACHEABLE = lib.MQD_RESPONSE_CACHEABLE
RESPONSE_NONE = lib.MQD_RESPONSE_NONE
RESPONSE_AUTHENTICATED = lib.MQD_RESPONSE_AUTHENTICATED
RESPONSE_DISCONNECT = lib.MQD_RESPONSE_DISCONNECT
REQUEST_PRINCIPAL = lib.MQD_REQUEST_PRINCIPAL
REQUEST_RAW_TOKEN = lib.MQD_REQUEST_RAW_TOKEN
PRINCIPAL_BYTES_MAX = lib.MQD_PRINCIPAL_BYTES_MAX
PRODUCE_CONTROL = lib.MQD_PRODUCE_CONTROL
PRODUCE_ACKS_ALL = lib.MQD_PRODUCE_ACKS_ALL
PRODUCE_ACKS_NONE = lib.MQD_PRODUCE_ACKS_NONE
PRODUCE_MARKER_BUMPED = lib.MQD_PRODUCE_MARKER_BUMPED
PRODUCED_REDIRECTED = lib.MQD_PRODUCED_REDIRECTED
CHECK_TRANSACTION = lib.MQD_CHECK_TRANSACTION
CHECK_RECORDS = lib.MQD_CHECK_RECORDS
CHECK_PARSE = lib.MQD_CHECK_PARSE
CHECK_SCHEDULES = lib.MQD_CHECK_SCHEDULES
CHECKED_MORE = lib.MQD_CHECKED_MORE
RECORD_ERROR_COUNT_MAX = lib.MQD_RECORD_ERROR_COUNT_MAX


class PrincipalKind(IntEnum):
    """enum mqd_principal_kind."""

    ANONYMOUS = lib.MQD_PRINCIPAL_ANONYMOUS
    SASL = lib.MQD_PRINCIPAL_SASL
    TLS = lib.MQD_PRINCIPAL_TLS
    LOCAL = lib.MQD_PRINCIPAL_LOCAL
    TOKEN = lib.MQD_PRINCIPAL_TOKEN


class DescriptorKind(IntEnum):
    """enum mqd_descriptor_kind."""

    NONE = lib.MQD_LINK_NONE
    PRODUCE = lib.MQD_LINK_PRODUCE
    RELEASE = lib.MQD_LINK_RELEASE
    PRODUCED = lib.MQD_LINK_PRODUCED
    HW_CHANGED = lib.MQD_LINK_HW_CHANGED
    REQUEST = lib.MQD_LINK_REQUEST
    RESPONSE = lib.MQD_LINK_RESPONSE
    CLOSE = lib.MQD_LINK_CLOSE
    CACHE_DROP = lib.MQD_LINK_CACHE_DROP
    CHECK = lib.MQD_LINK_CHECK
    CHECKED = lib.MQD_LINK_CHECKED
    DESCRIBE = lib.MQD_LINK_DESCRIBE
    DESCRIBED = lib.MQD_LINK_DESCRIBED
    PARKED = lib.MQD_LINK_PARKED
    CANCEL = lib.MQD_LINK_CANCEL
    FLUSHED = lib.MQD_LINK_FLUSHED
    ROLL = lib.MQD_LINK_ROLL
    SHARE = lib.MQD_LINK_SHARE
    SHARE_RESPONSE = lib.MQD_LINK_SHARE_RESPONSE
    SHARE_STATE = lib.MQD_LINK_SHARE_STATE
    SHARE_STATE_RESPONSE = lib.MQD_LINK_SHARE_STATE_RESPONSE


_DESCRIPTOR = Layout("=HHIQQIiqqqQ")
assert _DESCRIPTOR.size == ffi.sizeof("struct mqd_descriptor")


def links_size_bytes(endpoint_count: int) -> int:
    return lib.mqd_links_size_bytes(endpoint_count)


def links_format(buffer: Any, endpoint_count: int) -> None:
    """Called once, by the keeper, on zeroed memory."""
    memory = bytes_of(buffer)
    check(lib.mqd_links_format(memory, len(memory), endpoint_count))


class Descriptor(msgspec.Struct, gc=False):
    """A message of 64 bytes on a link. struct mqd_descriptor defines what the fields mean for each
    kind. The sender's endpoint sets `generation`.
    """

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


class Endpoint:
    """One process's side of its links to all others. `eventfds[i]` wakes endpoint i."""

    def __init__(self, control: Control, links_buffer: Any, index: int, endpoint_count: int, eventfds: Sequence[int]):
        if len(eventfds) != endpoint_count:
            raise NativeError(E_INVALID, f"{endpoint_count} endpoints need as many eventfds, not {len(eventfds)}")
        self.index = index
        self.endpoint_count = endpoint_count
        self._control = control
        self._links = bytes_of(links_buffer)
        self._eventfds = ffi.new("int[]", list(eventfds))
        self._capacity = 256
        self._received = ffi.new("struct mqd_descriptor[]", self._capacity)
        self._senders = ffi.new("uint32_t[]", self._capacity)
        self._received_bytes = ffi.buffer(self._received)
        self._sent = ffi.new("struct mqd_descriptor *")
        self._sent_bytes = ffi.buffer(self._sent)
        self._endpoint = lib.mqd_endpoint_open(control.pointer, self._links, index, endpoint_count, self._eventfds)
        if self._endpoint == ffi.NULL:
            raise failure()

    def send(self, to: int, descriptor: Descriptor) -> bool:
        """Queues a descriptor; it is visible to the peer after flush(). Returns False when the ring
        to that peer is full: keep the descriptor and try again after the peer's next wake.
        """
        d = descriptor
        _DESCRIPTOR.pack_into(
            self._sent_bytes,
            0,
            d.kind,
            d.flags,
            d.slot,
            d.token,
            d.offset,
            d.size_bytes,
            d.error,
            d.a,
            d.b,
            d.c,
            d.generation,
        )
        if lib.mqd_endpoint_send(self._endpoint, to, self._sent) == 0:
            return True
        if lib.mqd_error_code() == E_FULL:
            return False
        raise failure()

    def flush(self) -> None:
        """Publishes the sent descriptors and wakes each sleeping peer once."""
        lib.mqd_endpoint_flush(self._endpoint)

    def drain(self, count_max: int = 256) -> list[tuple[int, Descriptor]]:
        """Up to `count_max` (at most 256) descriptors that have arrived, with their senders."""
        count = check(
            lib.mqd_endpoint_drain(self._endpoint, self._received, self._senders, min(count_max, self._capacity))
        )
        senders, size = self._senders, _DESCRIPTOR.size
        return [
            (senders[i], Descriptor(*fields))
            for i, fields in enumerate(_DESCRIPTOR.iter_unpack(self._received_bytes[: count * size]))
        ]

    def free_count(self, to: int) -> int:
        """How many descriptors the ring to that peer has room for."""
        return lib.mqd_endpoint_free_count(self._endpoint, to)

    def prepare_sleep(self) -> bool:
        """Prepares to block on this endpoint's eventfd. False: descriptors have already arrived;
        drain them first.
        """
        return check(lib.mqd_endpoint_prepare_sleep(self._endpoint)) == 0

    def end_sleep(self) -> None:
        lib.mqd_endpoint_end_sleep(self._endpoint)

    def close(self) -> None:
        if self._endpoint != ffi.NULL:
            lib.mqd_endpoint_close(self._endpoint)
            self._endpoint = ffi.NULL


class Arena:
    """The process's own shared arena. It lends runs of extents to peers, which address them by
    offset.
    """

    def __init__(self, buffer: Any, extent_bytes: int):
        self._memory = bytes_of(buffer)
        self.view = memoryview(buffer).cast("B")
        self._arena = lib.mqd_arena_open(self._memory, len(self._memory), extent_bytes)
        if self._arena == ffi.NULL:
            raise failure()

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a new contiguous run with one reference, or None if no run of that size is
        free now.
        """
        offset = lib.mqd_arena_allocate(self._arena, size_bytes)
        if offset >= 0:
            return offset
        if lib.mqd_error_code() == E_FULL:
            return None
        raise failure()

    def hold(self, offset: int) -> None:
        """Adds a reference to the run."""
        lib.mqd_arena_hold(self._arena, offset)

    def release(self, offset: int) -> bool:
        """Drops a reference; True when it was the last."""
        return check(lib.mqd_arena_release(self._arena, offset)) == 1

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
