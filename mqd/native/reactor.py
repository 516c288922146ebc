"""The native loop of one worker: commands in, events out.

Mappings passed to a Reactor are held until destroy(): the C side keeps raw pointers into them.
Concurrency: commands and next_events on one thread; the loop itself runs on a thread of its own and
never takes the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from mqd.native.control import Control
from mqd.native.core import E_INVALID, NativeError, bytes_of, check, checked_topic_id, failure, ffi, lib
from mqd.native.partitions import LogOptions, Partition
from mqd.native.tls import TlsContext

SLOT_NONE = 0xFFFFFFFF  # "no slot" in an event


class EventKind(IntEnum):
    """enum mqd_event_kind."""

    NONE = lib.MQD_EVENT_NONE
    DONE = lib.MQD_EVENT_DONE
    ROLLED = lib.MQD_EVENT_ROLLED
    LOG_DIR_FAILED = lib.MQD_EVENT_LOG_DIR_FAILED
    LOG_DIR_FULL = lib.MQD_EVENT_LOG_DIR_FULL
    LOG = lib.MQD_EVENT_LOG
    PROPOSE_IN_SYNC = lib.MQD_EVENT_PROPOSE_IN_SYNC
    FETCHER_ENDED = lib.MQD_EVENT_FETCHER_ENDED
    TRUNCATED = lib.MQD_EVENT_TRUNCATED
    LOG_START = lib.MQD_EVENT_LOG_START
    RETIRED_USED = lib.MQD_EVENT_RETIRED_USED
    RELAY_REQUESTED = lib.MQD_EVENT_RELAY_REQUESTED
    RELAY_ENDED = lib.MQD_EVENT_RELAY_ENDED
    TLS_NAME = lib.MQD_EVENT_TLS_NAME
    SUBJECT_REQUESTED = lib.MQD_EVENT_SUBJECT_REQUESTED
    SUBJECT_GONE = lib.MQD_EVENT_SUBJECT_GONE
    DENIED = lib.MQD_EVENT_DENIED
    SLOW = lib.MQD_EVENT_SLOW
    RESUMED = lib.MQD_EVENT_RESUMED


class Spent(IntEnum):
    """enum mqd_spent."""

    # what a slow request has spent its time on
    QUEUE = lib.MQD_SPENT_QUEUE
    WAIT = lib.MQD_SPENT_WAIT
    DISK = lib.MQD_SPENT_DISK
    OWNER = lib.MQD_SPENT_OWNER
    REPLICAS = lib.MQD_SPENT_REPLICAS
    ACCEPTOR = lib.MQD_SPENT_ACCEPTOR
    TURN = lib.MQD_SPENT_TURN
    THROTTLE = lib.MQD_SPENT_THROTTLE


class RightsMode(IntEnum):
    """enum mqd_rights."""

    # whether the workers check the permissions of clients
    OFF = lib.MQD_RIGHTS_OFF
    ON = lib.MQD_RIGHTS_ON
    LOG_ONLY = lib.MQD_RIGHTS_LOG_ONLY


class Backend(IntEnum):
    """enum mqd_backend."""

    AUTO = lib.MQD_BACKEND_AUTO
    IO_URING = lib.MQD_BACKEND_IO_URING
    EPOLL = lib.MQD_BACKEND_EPOLL


def _topic_partitions(partitions: Sequence[tuple[int, int, int, int, int, int]]) -> Any:
    c_partitions = ffi.new("struct mqd_topic_partition[]", max(1, len(partitions)))
    for c_partition, (slot, leader, leader_epoch, redirect, retiring, leader_worker) in zip(
        c_partitions, partitions, strict=False
    ):
        c_partition.slot = slot if slot >= 0 else SLOT_NONE
        c_partition.leader, c_partition.leader_epoch = leader, leader_epoch
        c_partition.redirect, c_partition.retiring = redirect, retiring
        c_partition.leader_worker = leader_worker
    return c_partitions


class ReactorOptions(msgspec.Struct, kw_only=True):
    """struct mqd_reactor_options. `arenas`: one for each endpoint, or None; only the reactor's own
    arena must be writable.
    """

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
    large_bytes: int = 0  # reserved for large requests, at the end of this reactor's arena
    large_ms_max: int = 30_000
    heap_bytes_max: int = 64 << 20
    inflight_count_max: int = 64
    connection_idle_ms_max: int = 600_000
    fetch_bytes_max: int = 55 << 20
    session_count_max: int = 1000
    group_commit_us: int = 0
    sendfile_bytes_min: int = 8192
    read_fd_count_max: int = 512
    control_fd: int = -1
    listener_flags: Sequence[int] = ()  # MQD_LISTENER_FLAG_*, by listener id
    authentication_bytes_max: int = 524288
    authentication_ms_max: int = 10_000
    rights: int = RightsMode.OFF
    share_bytes_max: int = 64 << 20
    share_session_count_max: int = 2000
    slow_ms: int = 0
    denied_interval_ms: int = 10_000
    profile_turns: bool = False  # measure what the loop's iterations spend their time on


class FetcherOptions(msgspec.Struct, frozen=True, kw_only=True):
    """struct mqd_fetcher_options."""

    leader_node: int
    leader_worker: int
    lane: int  # enum mqd_fetcher_lane
    node_id: int  # this host
    wait_ms: int
    response_bytes_max: int  # requested; one batch may make a response larger
    response_bytes_limit: int  # the connection is closed after a larger response
    partition_bytes_max: int
    timeout_ms: int
    backoff_ms: int
    bytes_per_second_max: int = 0
    tls: bool = False  # TLS begins with the socket's next byte; this host is the TLS client


class Event(msgspec.Struct, frozen=True):
    """struct mqd_event. For some kinds a field has another meaning: see the properties."""

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
    proposal: Proposal | None = None  # PROPOSE_IN_SYNC
    slow: SlowRequest | None = None
    count: int = 0  # DENIED: denials that this event reports

    @property
    def node_id(self) -> int:
        """RELAY_REQUESTED: of the leader."""
        return self.offset

    @property
    def worker(self) -> int:
        """RELAY_REQUESTED: the leader's worker."""
        return self.log_dir

    @property
    def lane(self) -> int:
        """RELAY_REQUESTED: enum mqd_relay_lane."""
        return self.level

    @property
    def operation(self) -> int:
        """DENIED."""
        return self.level

    @property
    def resource_type(self) -> int:
        """DENIED."""
        return self.offset


class SlowRequest(msgspec.Struct, frozen=True):
    """MQD_EVENT_SLOW. `spent_us`: the times by Spent; without THROTTLE they add up to `total_us`."""

    api_key: int
    version: int
    client_id: str
    principal: str
    total_us: int
    spent_us: tuple[int, ...]
    unreported_count: int  # slow requests before this one that were not reported


class Proposal(msgspec.Struct, frozen=True):
    """struct mqd_replica_proposal: an in-sync set that the leader of the event's slot proposes."""

    sequence: int
    broker_epoch: int
    leader_epoch: int
    partition_epoch: int
    in_sync: tuple[tuple[int, int], ...]  # (node id, broker epoch with which it fetched)


def _slow_request(event: Any) -> SlowRequest:
    """Decodes a SLOW event."""
    text = bytes(ffi.buffer(event.text))
    client_id, principal = text[: event.client_id_bytes], text[event.client_id_bytes :].rstrip(b"\0")
    return SlowRequest(
        event.api_key,
        event.api_version,
        client_id.decode("utf-8", "replace"),
        principal.decode("utf-8", "replace"),
        event.total_us,
        tuple(event.spent_us[part] for part in Spent),
        event.count,
    )


class Reactor:
    """The native loop of one worker, on a thread of its own. Commands return immediately; each is
    answered by one event with the same token.

    A command raises NativeError (E_FULL) when 4096 are in flight.
    """

    def __init__(self, options: ReactorOptions):
        native = ffi.new("struct mqd_reactor_options *")
        links, eventfds = bytes_of(options.links), ffi.new("int[]", list(options.eventfds))
        self._held: list[Any] = [options.control, links, eventfds]
        native.control, native.links, native.eventfds, native.self = (
            options.control.pointer,
            links,
            eventfds,
            options.index,
        )
        for endpoint, buffer in enumerate(options.arenas):
            if buffer is not None:
                memory = bytes_of(buffer, writable=endpoint == options.index)
                native.arenas[endpoint], native.arena_bytes[endpoint] = memory, len(memory)
                self._held.append(memory)
        if len(options.listener_flags) > len(native.listener_flags):
            listener_max = len(native.listener_flags)
            raise NativeError(
                E_INVALID, f"a broker has at most {listener_max} listeners, not {len(options.listener_flags)}"
            )
        for name in options.__struct_fields__:
            if name not in ("control", "links", "index", "eventfds", "arenas"):
                setattr(native, name, getattr(options, name))
        self._event = ffi.new("struct mqd_event *")
        self._reactor = lib.mqd_reactor_create(native)
        if self._reactor == ffi.NULL:
            raise failure()
        self.event_fd: int = lib.mqd_reactor_event_fd(self._reactor)  # readable when next_events() has events

    @property
    def backend(self) -> Backend:
        """The I/O backend in use."""
        return Backend(lib.mqd_reactor_backend(self._reactor))

    def is_idle(self) -> bool:
        """Whether nothing is connected, nothing waits for a flush, and nothing has happened for a
        second. EventKind.RESUMED reports the end of this state.
        """
        return bool(lib.mqd_reactor_is_idle(self._reactor))

    def set_local_max(self, count: int, size_bytes: int) -> None:
        """Sets this worker's limits for the number of attachments through shared memory and for
        their memory; effective immediately.
        """
        check(lib.mqd_reactor_set_local_max(self._reactor, count, size_bytes))

    def start(self) -> None:
        check(lib.mqd_reactor_start(self._reactor))

    def stop(self) -> None:
        """Stops reading, flushes, and sends the responses that are ready; returns when the thread
        has ended.
        """
        check(lib.mqd_reactor_stop(self._reactor))

    def destroy(self) -> None:
        if self._reactor != ffi.NULL:
            lib.mqd_reactor_destroy(self._reactor)
            self._reactor = ffi.NULL
            self._held.clear()

    def next_events(self, count_max: int = 1024) -> list[Event]:
        events: list[Event] = []
        event = self._event
        while len(events) < count_max and lib.mqd_reactor_next_event(self._reactor, event) == 1:
            partition = Partition(event.partition) if event.partition != ffi.NULL else None
            text = ffi.string(event.text, len(event.text)).decode("utf-8", "replace")
            events.append(
                Event(
                    event.kind,
                    event.slot,
                    event.token,
                    event.error,
                    event.log_dir,
                    event.offset,
                    event.connection,
                    event.level,
                    partition,
                    text,
                    _take_proposal(event.proposal) if event.kind == EventKind.PROPOSE_IN_SYNC else None,
                    _slow_request(event) if event.kind == EventKind.SLOW else None,
                    event.count,
                )
            )
        return events

    def add_log_dir(self, token: int, log_dir: int, path: str | os.PathLike[str]) -> None:
        check(lib.mqd_reactor_add_log_dir(self._reactor, token, log_dir, os.fsencode(path)))

    def set_log_dir_full(self, token: int, log_dir: int, full: bool) -> None:
        check(lib.mqd_reactor_set_log_dir_full(self._reactor, token, log_dir, full))

    def topic_put(self, token: int, topic_id: bytes, name: str, slots: Sequence[int]) -> None:
        """`slots` by partition index."""
        check(
            lib.mqd_reactor_topic_put(
                self._reactor, token, checked_topic_id(topic_id), name.encode(), list(slots), len(slots)
            )
        )

    def topic_put_partitions(
        self, token: int, topic_id: bytes, name: str, partitions: Sequence[tuple[int, int, int, int, int, int]]
    ) -> None:
        """`partitions`, by index: (slot of this host's replica or -1, leader's node id or -1,
        leader epoch, redirect or -1, retiring, the worker of the leader's host that owns it).
        """
        c_partitions = _topic_partitions(partitions)
        check(
            lib.mqd_reactor_topic_put_partitions(
                self._reactor, token, checked_topic_id(topic_id), name.encode(), c_partitions, len(partitions)
            )
        )

    def view_put(
        self,
        token: int,
        topic_id: bytes,
        name: str,
        partitions: Sequence[tuple[int, int, int, int, int, int]],
        base: str,
        compiled_filter: bytes,
    ) -> None:
        """Adds a topic without a log: it has the records of the topic `base` that the filter
        selects. `partitions`: those of the base, as for topic_put_partitions.
        """
        check(
            lib.mqd_reactor_view_put(
                self._reactor,
                token,
                checked_topic_id(topic_id),
                name.encode(),
                _topic_partitions(partitions),
                len(partitions),
                base.encode(),
                compiled_filter,
                len(compiled_filter),
            )
        )

    def brokers_put(self, token: int, node_id: int, brokers: Sequence[tuple[int, str, int, str | None]]) -> None:
        """Sets this host's node id, and all brokers that clients may be directed to: (node id,
        host, port, rack). Texts beyond 255 bytes are truncated.
        """
        addresses = ffi.new("struct mqd_broker_address[]", max(1, len(brokers)))
        for address, (node, host, port, rack) in zip(addresses, brokers, strict=False):
            address.node_id, address.port, address.has_rack = node, port, rack is not None
            address.host, address.rack = host.encode()[:255], (rack or "").encode()[:255]
        check(lib.mqd_reactor_brokers_put(self._reactor, token, node_id, addresses, len(brokers)))

    def replica_set(self, token: int, slot: int, assignment: Any, leader_worker: int) -> None:
        """`assignment`: mqd.worker.assignments.Assignment, or an object with its fields. The
        event's `offset` is the log end.
        """
        native = ffi.new("struct mqd_replica_assignment *")
        for name in (
            "node_id",
            "broker_epoch",
            "leader",
            "leader_epoch",
            "partition_epoch",
            "min_insync",
            "lag_ms_max",
            "lag_records_max",
            "flush_on_ack",
            "acks_replicas",
            "throttled",
        ):
            setattr(native, name, getattr(assignment, name))
        native.member_count = len(assignment.members)
        if native.member_count > len(native.members):
            raise NativeError(
                E_INVALID, f"a partition has at most {len(native.members)} replicas, not {len(assignment.members)}"
            )
        for target, member in zip(native.members, assignment.members, strict=False):
            target.node_id, target.in_sync, target.eligible, target.broker_epoch, target.moving = (
                member.node_id,
                member.in_sync,
                member.eligible,
                member.broker_epoch,
                member.moving,
            )
        check(lib.mqd_reactor_replica_set(self._reactor, token, slot, native, leader_worker))

    def in_sync_response(self, token: int, slot: int, sequence: int, leader_epoch: int, error: int) -> None:
        """Passes on the controller's response to PROPOSE_IN_SYNC."""
        check(lib.mqd_reactor_in_sync_response(self._reactor, token, slot, sequence, leader_epoch, error))

    def fetcher_put(self, token: int, fd: int, options: FetcherOptions) -> None:
        """Hands over `fd`, a mutually authenticated connection with a worker of another host; the
        reactor owns it from here on, even on an error. FETCHER_ENDED comes with this token.
        """
        native = ffi.new("struct mqd_fetcher_options *")
        for name in options.__struct_fields__:
            setattr(native, name, getattr(options, name))
        check(lib.mqd_reactor_fetcher_put(self._reactor, token, fd, native))

    def fetcher_remove(self, token: int, leader_node: int, leader_worker: int, lane: int) -> None:
        check(lib.mqd_reactor_fetcher_remove(self._reactor, token, leader_node, leader_worker, lane))

    def set_fetcher_rate(self, token: int, bytes_per_second_max: int) -> None:
        """Sets the rate limit of all throttled lanes together; 0 = no limit."""
        check(lib.mqd_reactor_set_fetcher_rate(self._reactor, token, bytes_per_second_max))

    def relay_put(
        self, token: int, fd: int, leader_node: int, leader_worker: int, lane: int, timeout_ms: int, tls: bool = False
    ) -> None:
        """Hands over `fd`, a mutually authenticated connection with a worker of another host, for
        local clients' batches to partitions led there; the reactor owns it from here on, even on an
        error. RELAY_ENDED comes with this token. `tls`: as in FetcherOptions.
        """
        options = _relay_options(leader_node, leader_worker, lane, timeout_ms)
        options.tls = tls
        check(lib.mqd_reactor_relay_put(self._reactor, token, fd, options))

    def relay_refuse(self, token: int, leader_node: int, leader_worker: int, lane: int, refuse_ms: int) -> None:
        """Reports that there is no connection: waiting requests, and those that arrive within
        refuse_ms, are refused.
        """
        check(
            lib.mqd_reactor_relay_refuse(
                self._reactor, token, _relay_options(leader_node, leader_worker, lane, refuse_ms)
            )
        )

    def relay_remove(self, token: int, leader_node: int) -> None:
        check(lib.mqd_reactor_relay_remove(self._reactor, token, leader_node))

    def subject_put(self, token: int, subject: int, topics: bytes, transactional_ids: bytes, groups: bytes) -> None:
        """Sets the rights of a subject (a principal and its address), in response to
        SUBJECT_REQUESTED or because they have changed. For the tables see
        mqd/security/rights_table.py. The event's error is E_STALE if the subject is gone.
        """
        tables = ffi.new("struct mqd_rights_tables *")
        buffers = [ffi.from_buffer("uint8_t[]", table) for table in (topics, transactional_ids, groups)]
        for number, table in enumerate(buffers):
            tables.table[number], tables.size_bytes[number] = table, len(table)
        check(lib.mqd_reactor_subject_put(self._reactor, token, subject, tables))

    def revoke_mappings(self, token: int, slots: Sequence[int]) -> None:
        """Rolls the active segment of each of these slots if a local client of this worker has it
        mapped."""
        check(lib.mqd_reactor_revoke(self._reactor, token, list(slots), len(slots)))

    def topic_remove(self, token: int, topic_id: bytes) -> None:
        check(lib.mqd_reactor_topic_remove(self._reactor, token, checked_topic_id(topic_id)))

    def partition_open(self, token: int, slot: int, log_dir: int, partition: Partition) -> None:
        """Transfers the partition to the reactor; when this raises, it still belongs to the
        caller."""
        check(lib.mqd_reactor_partition_open(self._reactor, token, slot, log_dir, partition._checked_pointer()))
        partition.give_away()

    def partition_close(self, token: int, slot: int) -> None:
        """Takes a partition back from the reactor: the event's `partition` can be closed, and its
        files deleted.
        """
        check(lib.mqd_reactor_partition_close(self._reactor, token, slot))

    def set_options(self, token: int, slot: int, options: LogOptions) -> None:
        check(lib.mqd_reactor_set_log_options(self._reactor, token, slot, options.to_c_struct()))

    def advance_start(self, token: int, slot: int, offset: int) -> None:
        """Moves the log start to `offset` (-1 = the high watermark); the event's `offset` is the
        new start. Unlink files only after the event.
        """
        check(lib.mqd_reactor_advance_start(self._reactor, token, slot, offset))

    def roll(self, token: int, slot: int) -> None:
        check(lib.mqd_reactor_roll(self._reactor, token, slot))

    def segments_replaced(self, token: int, slot: int, first: int, last: int) -> None:
        """Compaction has merged the segments from `first` to `last` into one, named by `first`.
        first == last: readers only reopen that segment. E_STALE: these segments no longer exist.
        """
        check(lib.mqd_reactor_segments_replaced(self._reactor, token, slot, first, last))

    def segments_hold(self, token: int, slot: int, hold: int) -> None:
        """`hold` 1: no truncation of the log begins until a call with 0; -1: only a query. The
        event's `offset`: how many times the log has been truncated since it was opened.
        """
        check(lib.mqd_reactor_segments_hold(self._reactor, token, slot, hold))

    def set_leader_epoch(self, token: int, slot: int, leader_epoch: int) -> None:
        check(lib.mqd_reactor_set_leader_epoch(self._reactor, token, slot, leader_epoch))

    def set_connection_max(self, connection_count_max: int, broker_count_max: int) -> None:
        """Sets the connection limits of this worker and of all workers together. Not a queued
        command: no event follows."""
        check(lib.mqd_reactor_set_connection_max(self._reactor, connection_count_max, broker_count_max))

    def set_listener_tls(self, token: int, listener_id: int, context: TlsContext) -> None:
        """Sets the TLS context of the listener's new connections (LISTENER_ID_HOSTS: those between
        hosts); the reactor owns the context from here on, even on an error.
        """
        check(lib.mqd_reactor_set_listener_tls(self._reactor, token, listener_id, context.give_away()))

    def tls_principal(self, token: int, connection: int, principal: str) -> None:
        """Answers TLS_NAME for `connection`; the principal "" refuses the client."""
        check(lib.mqd_reactor_tls_principal(self._reactor, token, connection, principal.encode()))

    def endpoint_died(self, token: int, endpoint: int) -> None:
        check(lib.mqd_reactor_endpoint_died(self._reactor, token, endpoint))


def _relay_options(leader_node: int, leader_worker: int, lane: int, timeout_ms: int) -> Any:
    options = ffi.new("struct mqd_relay_options *")
    options.leader_node, options.leader_worker, options.lane, options.timeout_ms = (
        leader_node,
        leader_worker,
        lane,
        timeout_ms,
    )
    return options


def _take_proposal(proposal: Any) -> Proposal:
    try:
        in_sync = tuple((proposal.node_id[i], proposal.member_broker_epoch[i]) for i in range(proposal.member_count))
        return Proposal(
            proposal.sequence, proposal.broker_epoch, proposal.leader_epoch, proposal.partition_epoch, in_sync
        )
    finally:
        lib.mqd_proposal_free(proposal)
