"""The acceptor's end of the links: request frames come in from the workers; responses and the
coordinators' appends go out through the acceptor's own arena.

A request's frame stays in the sending worker's arena until the response to its token has been sent;
the acceptor copies the frame when it takes the request. A response goes into this process's arena,
in pieces of at most PIECE_BYTES; the worker copies a piece and sends RELEASE with the same token
and offset. A check (mqd/acceptor/checks.py) reads its payload in the worker's arena until it is
answered. A coordinator's batch goes to the partition's owner the same way, but in one piece; its
bytes are freed by RELEASE, or by PRODUCED if that comes first.

Invariants
    K1  a piece's extent is free only after its RELEASE, or after its worker's death; a RELEASE
        without a matching piece in flight was meant for a predecessor of this process
    K2  the pieces of one response are sent in order, with nothing else of that token between them
    K3  requests of a process that has since died are not answered, and memory lent to it is
        reclaimed; its waiting JoinGroups and SyncGroups are cancelled
    K4  a request names its intended acceptor; one that was still in a ring when that acceptor died
        is not carried out: its worker sends it again, and its bytes may have been overwritten
    K5  batches to one worker are sent in order; tokens of batches have bit 63 set, those of
        requests do not
Bounds: the arena and the rings. Excess data waits here: at most one response for each request that
the workers have in flight (16384 per worker), and the in-flight limit of a coordinator in
mqd/coordinator/log.py.

Sleep protocol: drain until empty, prepare_sleep, and wait for the eventfd only if that permits it.
A worker's death is also a reason to drain (K4 of native/shm/link.c).
"""

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from mqd import native
from mqd.acceptor import client_identity, dispatch
from mqd.acceptor.broker import Broker
from mqd.acceptor.broker_state import Origin
from mqd.acceptor.checks import CheckResult as CheckResult
from mqd.acceptor.checks import Checks, Compression
from mqd.base import logging
from mqd.base.crash_on_error import crash_on_error
from mqd.base.tasks import InlineCoroutine
from mqd.native import Descriptor, DescriptorKind, ProducerView
from mqd.protocol.errors import ErrorCode, ProtocolError
from mqd.protocol.headers import MEMBER_WAIT_APIS

PIECE_BYTES = 1 << 20
EXTENT_BYTES = 4096
DRAIN_ROUNDS = 16  # per turn; then the event loop does other work
# Requests taken in one turn of the loop. Connections are accepted between turns, even if some clients
# pipeline many requests.
TURN_REQUESTS_MAX = 64
RETRY_S = 0.005
# A request not answered after one to two of these intervals is slow: its frame in the worker's
# arena is released.
PARK_S = 0.05
BATCH_TOKEN_BIT = 1 << 63
DESCRIBE_TOKEN_BIT = 1 << 62
ARCHIVE_TOKEN_BIT = 1 << 61

log = logging.get("acceptor.link")


class _Piece(msgspec.Struct):
    token: int
    data: bytes
    kind: int
    flags: int
    a: int  # a and c: see struct mqd_descriptor
    slot: int = 0
    c: int = 0
    error: int = 0
    offset: int = 0  # RELEASE: of the memory lent to this process


class _Pending(msgspec.Struct, frozen=True):
    """An unanswered request."""

    task: asyncio.Task[None] | InlineCoroutine
    worker: int
    token: int
    generation: int  # generation of the worker's process
    waits_for_members: bool


class Appends(Protocol):
    """The part of mqd/coordinator/log.py that the link calls."""

    def on_produced(self, token: int, error: int, base_offset: int, redirect: int = -1) -> bool: ...


def _compression(check: Descriptor) -> Compression | None:
    """Decodes the topic's compression from a CHECK (struct mqd_descriptor). None: the batch is not
    recompressed.
    """
    codec = check.a >> 16 & 0xFF
    level = (check.c & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)  # the low half, with its sign
    return Compression(codec - 1, level, check.c >> 32) if codec else None


class ShareStates(Protocol):
    """The part of mqd/acceptor/interbroker/share_states.py that the link calls."""

    async def respond_to_worker(self, api_key: int, body: bytes) -> bytes: ...


class Link:
    """`control`, `endpoint`, `arena_buffer`, `arenas` (by endpoint): mapped by KeeperClient."""

    def __init__(
        self,
        broker: Broker,
        control: native.Control,
        endpoint: native.Endpoint,
        eventfd: int,
        arena_buffer: mmap.mmap,
        arenas: Sequence[mmap.mmap | None],
        worker_count: int,
        observer: dispatch.Observer | None = None,
    ) -> None:
        self._broker = broker
        self._control = control
        self._endpoint = endpoint
        self._generation = control.endpoint_generation(worker_count) & 0x7FFFFFFF
        self._eventfd = eventfd
        self._arena = native.Arena(arena_buffer, EXTENT_BYTES)
        self._arena_views = [memoryview(arena).cast("B") if arena is not None else None for arena in arenas]
        self._observer = observer
        self._waiting: list[deque[_Piece]] = [deque() for _ in range(worker_count)]
        self._lent: list[set[tuple[int, int]]] = [set() for _ in range(worker_count)]  # by worker: (token, offset)
        self._lent_batches: list[dict[int, int]] = [{} for _ in range(worker_count)]  # by worker: token -> offset
        self.appends: Appends | None = None
        self.checks: Checks | None = None
        self.share_states: ShareStates | None = None
        self._share_requests: list[set[InlineCoroutine]] = [set() for _ in range(worker_count)]
        # by worker: token -> the caller's future
        self._describe_futures: list[dict[int, asyncio.Future[tuple[int, bytes]]]] = [{} for _ in range(worker_count)]
        self._describe_count = self._archive_count = 0
        self._tasks: set[asyncio.Task[None] | InlineCoroutine] = set()
        self._newer: list[_Pending] = []  # requests that arrived after the last _on_park()
        self._older: list[_Pending] = []  # requests that arrived before it
        # by worker: token -> slow request, which may be abandoned
        self._parked: list[dict[int, _Pending]] = [{} for _ in range(worker_count)]
        self._park_timer: asyncio.TimerHandle | None = None
        self._turn = broker.turn
        self._next_turn: asyncio.Handle | None = None
        self._taken_count = 0  # requests taken in this turn
        self._retry_timer: asyncio.TimerHandle | None = None
        self._is_flush_scheduled = False
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- the loop ----------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        os.set_blocking(self._eventfd, False)
        loop.add_reader(self._eventfd, self._on_wake)
        self._on_turn()

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._eventfd)
        for handle in (self._next_turn, self._retry_timer, self._park_timer):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        self._loop = None

    @property
    def arena_extents(self) -> tuple[int, int]:
        """(used, total) of the acceptor's own arena."""
        return self._arena.extents_used, self._arena.extents_total

    @property
    def request_count(self) -> int:
        return len(self._tasks)

    @crash_on_error
    def _on_wake(self) -> None:
        try:
            os.read(self._eventfd, 8)
        except BlockingIOError:
            pass
        self._endpoint.end_sleep()
        if self._next_turn is None:
            self._on_turn()

    @crash_on_error
    def _on_turn(self) -> None:
        """Drains; sleeps when there is nothing left, or runs again soon when there may be more."""
        assert self._loop is not None
        self._next_turn = None
        self._taken_count = 0
        self._turn.is_in_progress = True
        for _ in range(DRAIN_ROUNDS):
            room = TURN_REQUESTS_MAX - self._taken_count
            arrived = self._endpoint.drain(room)
            for sender, descriptor in arrived:
                self._on_descriptor(sender, descriptor)
            if len(arrived) < room or self._taken_count >= TURN_REQUESTS_MAX:
                break
        self._turn.run()
        self._turn.is_in_progress = False
        self._send_waiting()
        self._endpoint.flush()
        if not self._endpoint.prepare_sleep():
            self._next_turn = self._loop.call_soon(self._on_turn)

    def _on_descriptor(self, sender: int, descriptor: Descriptor) -> None:
        if sender >= len(self._waiting) or descriptor.generation != self._control.endpoint_generation(sender):
            return  # K3
        if descriptor.kind == DescriptorKind.REQUEST:
            if descriptor.error == self._generation:  # K4
                self._on_request(sender, descriptor)
        elif descriptor.kind == DescriptorKind.RELEASE:
            self._on_release(sender, descriptor)
        elif descriptor.kind == DescriptorKind.CHECK:
            if descriptor.error == self._generation:  # K4
                self._on_check(sender, descriptor)
        elif descriptor.kind == DescriptorKind.SHARE_STATE:
            if descriptor.error == self._generation:  # K4
                self._on_share_state(sender, descriptor)
        elif descriptor.kind == DescriptorKind.CANCEL:
            if descriptor.error == self._generation:  # K4
                self._on_cancel(sender, descriptor.token)
        elif descriptor.kind == DescriptorKind.DESCRIBED:
            self._on_described(sender, descriptor)
        elif descriptor.kind == DescriptorKind.PRODUCED:
            self._on_produced(sender, descriptor)
        elif descriptor.kind == DescriptorKind.FLUSHED:
            self._broker.flushes.notify(descriptor.slot)
        else:
            log.warning(
                "a worker sent a message that the acceptor does not handle", worker=sender, kind=descriptor.kind
            )

    def _payload(self, worker: int, descriptor: Descriptor) -> memoryview | None:
        """The bytes in the worker's arena that the descriptor names; None: they are not inside the arena."""
        view = self._arena_views[worker]
        end = descriptor.offset + descriptor.size_bytes
        if view is not None and end <= len(view):
            return view[descriptor.offset : end]
        log.error(
            "a worker named bytes outside its arena",
            worker=worker,
            kind=descriptor.kind,
            offset=descriptor.offset,
            size_bytes=descriptor.size_bytes,
        )
        return None

    # -- requests ----------------------------------------------------------------------------------

    def _on_request(self, worker: int, descriptor: Descriptor) -> None:
        payload = self._payload(worker, descriptor)
        if payload is None:
            self._put(worker, _Piece(descriptor.token, b"", DescriptorKind.CLOSE, 0, 0))
            return
        try:
            identity, frame = client_identity.split(descriptor.flags, bytes(payload))
        except ProtocolError as error:
            log.error("a worker sent an invalid principal", worker=worker, reason=str(error))
            self._put(worker, _Piece(descriptor.token, b"", DescriptorKind.CLOSE, 0, 0))
            return
        self._taken_count += 1
        assert self._loop is not None
        api_key = int.from_bytes(frame[:2], "big")
        try:
            task = self._begin(self._handle(worker, descriptor, client_identity.origin(descriptor, identity), frame))
        except Exception:
            log.exception("a request failed; its connection is closed", connection=descriptor.b, api_key=api_key)
            self._put(worker, _Piece(descriptor.token, b"", DescriptorKind.CLOSE, 0, 0))
            return
        if task.done():
            return
        waits_for_members = api_key in MEMBER_WAIT_APIS
        self._newer.append(_Pending(task, worker, descriptor.token, descriptor.generation, waits_for_members))
        if self._park_timer is None:
            self._park_timer = self._loop.call_later(PARK_S, self._on_park)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> InlineCoroutine:
        """Runs the coroutine without a task until it needs one. Passes on exceptions raised before its
        first wait.
        """
        inline = InlineCoroutine(self._turn, coroutine)
        inline.start()
        if not inline.done():
            self._track(inline)
        return inline

    def _track(self, task: asyncio.Task[None] | InlineCoroutine) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_park(self) -> None:
        """Releases the memory of slow requests in the workers' arenas: requests that wait for something
        outside this process (a JoinGroup for other members) must not hold it.
        """
        for pending in self._older:
            if pending.task.done():
                continue
            if pending.generation == self._control.endpoint_generation(pending.worker):
                self._put(pending.worker, _Piece(pending.token, b"", DescriptorKind.PARKED, 0, 0))
                if pending.waits_for_members:
                    self._parked[pending.worker][pending.token] = pending
                    pending.task.add_done_callback(partial(self._unpark, pending))
            elif pending.waits_for_members:
                pending.task.cancel()  # K3
        self._older, self._newer = self._newer, []
        assert self._loop is not None
        self._park_timer = self._loop.call_later(PARK_S, self._on_park) if self._older else None
        self._send_waiting()
        self._endpoint.flush()

    def _on_cancel(self, worker: int, token: int) -> None:
        """Cancels a JoinGroup or SyncGroup that waits for other members and whose client has gone:
        changes that it has made stay, but a response is not needed.
        """
        pending = self._parked[worker].get(token)
        if pending is not None:
            pending.task.cancel()

    def _unpark(self, pending: _Pending, _task: asyncio.Task[None] | InlineCoroutine) -> None:
        """Forgets a request that is done. A successor of its worker may have used the same token again."""
        if self._parked[pending.worker].get(pending.token) is pending:
            del self._parked[pending.worker][pending.token]

    async def _handle(self, worker: int, descriptor: Descriptor, origin: Origin, frame: bytes) -> None:
        version = self._broker.metadata.version
        outcome = await dispatch.respond(self._broker, origin, frame, descriptor.b, self._observer)
        if outcome.delay_s:
            del frame  # unauthenticated clients send up to 512 KiB, and thousands of them may wait
            await asyncio.sleep(outcome.delay_s)
        if descriptor.generation != self._control.endpoint_generation(worker):
            return  # K3
        token = descriptor.token
        if outcome.close_reason is not None:
            self._put(worker, _Piece(token, b"", DescriptorKind.CLOSE, 0, 0))
        else:
            flags = native.RESPONSE_DISCONNECT if outcome.ends_connection else 0
            body = outcome.body
            if descriptor.flags & native.REQUEST_RAW_TOKEN and body is not None:
                body = client_identity.raw_response(body)
            if outcome.authenticated_as is not None and body is not None:
                flags |= native.RESPONSE_AUTHENTICATED
                body = client_identity.authenticated_block(*outcome.authenticated_as) + body
            if outcome.is_cacheable and version == self._broker.metadata.version:
                flags |= native.RESPONSE_CACHEABLE
            if body is None:
                self._put(worker, _Piece(token, b"", DescriptorKind.RESPONSE, flags | native.RESPONSE_NONE, 0))
            else:
                self._respond(worker, token, body, flags, version)
        if not self._turn.is_in_progress:  # a turn sends waiting pieces at its end
            self._send_waiting()
            self._endpoint.flush()

    def _respond(self, worker: int, token: int, body: bytes, flags: int, version: int) -> None:
        pieces = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)] or [b""]
        for number, piece in enumerate(pieces):
            is_last = number + 1 == len(pieces)
            self._put(
                worker,
                _Piece(token, piece, DescriptorKind.RESPONSE, flags if is_last else native.RESPONSE_MORE, version),
            )

    # -- checks ------------------------------------------------------------------------------------

    def _on_check(self, worker: int, descriptor: Descriptor) -> None:
        """Starts a check of a batch or transaction. The payload is lent until CHECKED."""
        payload = self._payload(worker, descriptor)
        if payload is None or self.checks is None:
            self._put(
                worker,
                _Piece(descriptor.token, b"", DescriptorKind.CHECKED, 0, 0, error=int(ErrorCode.NOT_ENOUGH_REPLICAS)),
            )
            return
        if descriptor.flags == native.CHECK_TRANSACTION:
            check = self.checks.check_transaction(bytes(payload), descriptor.a & 0xFFFF)
        else:
            check = self.checks.check_batch(payload, descriptor.flags, _compression(descriptor))
        assert self._loop is not None
        self._track(self._loop.create_task(self._check(worker, descriptor, check)))

    async def _check(self, worker: int, descriptor: Descriptor, check: Coroutine[object, object, CheckResult]) -> None:
        try:
            error, data = await check
        except Exception:
            log.exception("a check failed; its client gets a retriable error", connection=descriptor.b)
            error, data = int(ErrorCode.NOT_ENOUGH_REPLICAS), b""
        if descriptor.generation != self._control.endpoint_generation(worker):
            return  # K3
        for at in range(0, len(data) or 1, PIECE_BYTES):
            flags = native.CHECKED_MORE if at + PIECE_BYTES < len(data) else 0
            piece = data[at : at + PIECE_BYTES]
            self._put(worker, _Piece(descriptor.token, piece, DescriptorKind.CHECKED, flags, len(data), error=error))
        self._send_waiting()
        self._endpoint.flush()

    # -- states of share groups ----------------------------------------------------------------------

    def _on_share_state(self, worker: int, descriptor: Descriptor) -> None:
        """Starts a READ or WRITE of a share-partition. The body is lent until SHARE_STATE_RESPONSE."""
        self._taken_count += 1
        body = bytes(self._payload(worker, descriptor) or b"")
        request = self._begin(self._share_state(worker, descriptor, body))
        if not request.done():
            self._share_requests[worker].add(request)
            request.add_done_callback(self._share_requests[worker].discard)

    async def _share_state(self, worker: int, descriptor: Descriptor, body: bytes) -> None:
        """An invalid body gets an empty response, which the worker treats as a definite refusal."""
        response = b""
        try:
            if self.share_states is not None:
                response = await self.share_states.respond_to_worker(descriptor.flags, body)
        except Exception:
            log.exception("a share-partition's state cannot be read or written", worker=worker, api=descriptor.flags)
        if descriptor.generation != self._control.endpoint_generation(worker):
            return  # K3
        self._put(worker, _Piece(descriptor.token, response, DescriptorKind.SHARE_STATE_RESPONSE, 0, 0))
        self._flush_soon()

    def archive(self, owner: int, slot: int, payload: bytes, owner_generation: int) -> None:
        """Sends MQD_SHARE_REQUEST_ARCHIVE to the worker that owns the slot. The outcome arrives as a
        WRITE.
        """
        self._archive_count += 1
        token = ARCHIVE_TOKEN_BIT | self._archive_count
        self._put(owner, _Piece(token, payload, DescriptorKind.SHARE, 0, 0, slot, owner_generation))
        self._flush_soon()

    # -- responses ---------------------------------------------------------------------------------

    def _put(self, worker: int, piece: _Piece) -> None:
        self._waiting[worker].append(piece)

    def _send_waiting(self) -> None:
        """Sends as many pieces as the arena and the rings have room for; the others are retried until
        there is room.
        """
        is_blocked = False
        for worker, waiting in enumerate(self._waiting):
            while waiting and self._send(worker, waiting[0]):
                waiting.popleft()
            is_blocked |= bool(waiting)
        if is_blocked and self._retry_timer is None and self._loop is not None:
            # Neither a full ring nor a full arena sends a notification when it has room again: RELEASE
            # does not wake this process.
            self._retry_timer = self._loop.call_later(RETRY_S, self._on_retry)

    def _on_retry(self) -> None:
        self._retry_timer = None
        if self._next_turn is None:
            self._on_turn()

    def _send(self, worker: int, piece: _Piece) -> bool:
        if self._endpoint.free_count(worker) == 0:
            return False
        descriptor = Descriptor(
            kind=piece.kind,
            flags=piece.flags,
            slot=piece.slot,
            token=piece.token,
            a=piece.a,
            c=piece.c,
            size_bytes=len(piece.data),
        )
        descriptor.error = piece.error
        if not piece.data:
            descriptor.offset = piece.offset
            return self._endpoint.send(worker, descriptor)
        offset = self._arena.allocate(len(piece.data))
        if offset is None:
            return False
        self._arena.view[offset : offset + len(piece.data)] = piece.data
        descriptor.offset = offset
        if not self._endpoint.send(worker, descriptor):
            self._arena.release(offset)
            return False
        if piece.kind == DescriptorKind.PRODUCE:
            self._lent_batches[worker][piece.token] = offset
        else:
            self._lent[worker].add((piece.token, offset))
        return True

    def _on_release(self, worker: int, descriptor: Descriptor) -> None:
        if descriptor.token >= BATCH_TOKEN_BIT:
            self._release_batch(worker, descriptor.token)
            return
        lent = (descriptor.token, descriptor.offset)
        if lent in self._lent[worker]:  # K1
            self._lent[worker].discard(lent)
            self._arena.release(descriptor.offset)

    def on_worker_death(self, worker: int) -> None:
        """The keeper has proof of the death: everything in flight to the worker is obsolete."""
        self._waiting[worker].clear()
        for _, offset in self._lent[worker]:
            self._arena.release(offset)
        self._lent[worker].clear()
        for offset in self._lent_batches[worker].values():
            self._arena.release(offset)
        self._lent_batches[worker].clear()
        for future in self._describe_futures[worker].values():
            if not future.done():
                future.set_result((int(ErrorCode.NOT_LEADER_OR_FOLLOWER), b""))
        self._describe_futures[worker].clear()
        for request in list(self._share_requests[worker]):
            request.cancel()  # must not be carried out after a READ of the worker's successor
        self._broker.flushes.notify_all()
        for pending in list(self._parked[worker].values()):
            if pending.generation != self._control.endpoint_generation(worker):
                pending.task.cancel()
        if self._loop is not None and self._next_turn is None:
            # The worker may have died after clearing this process's sleep flag but before waking this
            # process; then no other process would wake it.
            self._on_turn()

    # -- producers of a partition ------------------------------------------------------------------

    async def producers(self, owner: int, slot: int) -> tuple[int, list[ProducerView]]:
        """Returns an error code, and the partition's producers as the slot's owner knows them. The error
        is NOT_LEADER_OR_FOLLOWER if the owner dies, and REQUEST_TIMED_OUT if it has no space for the
        response. The caller sets a timeout.
        """
        assert self._loop is not None
        self._describe_count += 1
        token = DESCRIBE_TOKEN_BIT | self._describe_count
        future = self._describe_futures[owner][token] = self._loop.create_future()
        self._put(owner, _Piece(token, b"", DescriptorKind.DESCRIBE, 0, 0, slot))
        self._flush_soon()
        try:
            error, payload = await future
        finally:
            self._describe_futures[owner].pop(token, None)
        return error, native.parse_producer_views(payload)

    def _on_described(self, worker: int, descriptor: Descriptor) -> None:
        """The views are copied and released, even if the caller is no longer waiting for them."""
        error, payload = descriptor.error, b""
        if descriptor.size_bytes:
            lent = self._payload(worker, descriptor)
            if lent is None:
                error = int(ErrorCode.UNKNOWN_SERVER_ERROR)
            else:
                payload = bytes(lent)
            self._put(
                worker,
                _Piece(descriptor.token, b"", DescriptorKind.RELEASE, 0, 0, descriptor.slot, offset=descriptor.offset),
            )
        future = self._describe_futures[worker].get(descriptor.token)
        if future is not None and not future.done():
            future.set_result((error, payload))

    # -- coordinators' batches --------------------------------------------------------------------

    def send_batch(
        self, owner: int, token: int, slot: int, batch: bytes, flags: int, leader_epoch: int, owner_generation: int
    ) -> None:
        """Queues one record batch for the worker that owns the slot; the outcome goes to `appends`.
        Batches given in one turn of the loop are sent together.
        """
        self._put(owner, _Piece(token, batch, DescriptorKind.PRODUCE, flags, leader_epoch, slot, owner_generation))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._turn.is_in_progress and not self._is_flush_scheduled:  # a turn sends waiting pieces at its end
            self._is_flush_scheduled = True
            self._turn.call(self._on_flush)

    def _on_flush(self) -> None:
        self._is_flush_scheduled = False
        if self._loop is not None:
            self._send_waiting()
            self._endpoint.flush()

    def _on_produced(self, worker: int, descriptor: Descriptor) -> None:
        self._release_batch(worker, descriptor.token)
        if self.appends is not None:
            redirect = descriptor.size_bytes if descriptor.flags & native.PRODUCED_REDIRECTED else -1
            self.appends.on_produced(descriptor.token, descriptor.error, descriptor.a, redirect)

    def _release_batch(self, worker: int, token: int) -> None:
        offset = self._lent_batches[worker].pop(token, None)
        if offset is not None:
            self._arena.release(offset)
