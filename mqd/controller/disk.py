"""Carries out the quorum's disk effects: one thread, one effect after another, in order; appends
that were queued during a flush are flushed together.

Invariants
    D1  DiskDone(n) is sent only when everything up to n is durable; DiskRefused(n) when n and the
        effects queued after it have left nothing on the disk
    D2  a failed flush, or any other error that leaves the files in doubt, ends the process
        (`on_failure`)
    D3  snapshots of this host's state and reads of them use the same queue, so a file is never
        replaced under a reader
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from mqd.base import clock, logging
from mqd.cluster.metadata.state import MetadataState
from mqd.cluster.raft import events
from mqd.cluster.raft.messages import Batch, SnapshotMeta
from mqd.cluster.raft.store import FlushFailed, QuorumStore, encode_state

APPEND_BYTES_MAX = 8 << 20  # no further appends are added to a write of this size

log = logging.get("controller.disk")


class StoreSnapshot(msgspec.Struct, frozen=True):
    meta: SnapshotMeta
    state: MetadataState  # a copy: it is encoded in the thread


DiskRequest = (
    events.PersistVote
    | events.AppendLog
    | events.TruncateLog
    | events.InstallSnapshot
    | events.ReadSnapshot
    | StoreSnapshot
)


class Disk:
    """`on_event(DiskDone | DiskRefused | SnapshotStored | SnapshotRead)` is called in the loop's
    thread. `committed_offset()`: the offset known to be committed.
    """

    def __init__(
        self,
        store: QuorumStore,
        on_event: Callable[[events.Event], None],
        on_failure: Callable[[str], None],
        committed_offset: Callable[[], int],
    ) -> None:
        self._store = store
        self._on_event, self._on_failure, self._committed_offset = on_event, on_failure, committed_offset
        self._queue: deque[DiskRequest] = deque()
        self._worker_task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "metadata-log")
        self._failed = False
        self.is_snapshot_pending = False

    @property
    def is_idle(self) -> bool:
        return self._worker_task is None

    def submit(self, request: DiskRequest) -> None:
        if self._failed:
            return
        if isinstance(request, StoreSnapshot):
            self.is_snapshot_pending = True
        self._queue.append(request)
        if self._worker_task is None:
            self._worker_task = asyncio.get_running_loop().create_task(self._run_queue())

    async def _run_queue(self) -> None:
        try:
            while self._queue:
                await self._carry_out(self._queue.popleft())
        except FlushFailed as error:
            self._fail(f"a flush of the metadata log failed, so what is on disk is unknown: {error}")
        # A bug: log the traceback, then end; supervisord starts a successor, which reads what is on
        # disk.
        except Exception as error:
            log.exception("the controller failed")
            self._fail(f"{type(error).__name__}: {error}")
        finally:
            self._worker_task = None

    def _fail(self, reason: str) -> None:
        self._failed = True
        self._queue.clear()
        self._on_failure(reason)

    async def _carry_out(self, request: DiskRequest) -> None:
        run = asyncio.get_running_loop().run_in_executor
        try:
            match request:
                case events.AppendLog():
                    sequence, batches = self._gather_appends(request)
                    await run(self._thread, self._store.append, batches, clock.now_ms(), self._committed_offset())
                    self._on_event(events.DiskDone(sequence))
                case events.PersistVote():
                    await run(self._thread, self._store.write_vote, request.vote)
                    self._on_event(events.DiskDone(request.sequence))
                case events.TruncateLog():
                    await run(self._thread, self._store.truncate, request.offset)
                    self._on_event(events.DiskDone(request.sequence))
                case events.InstallSnapshot():
                    await run(self._thread, self._store.install, request.meta, request.data)
                    self._on_event(events.DiskDone(request.sequence))
                case StoreSnapshot():
                    await self._store_snapshot(request)
                case events.ReadSnapshot():
                    data = await run(
                        self._thread,
                        self._store.read_snapshot,
                        request.snapshot_offset,
                        request.snapshot_epoch,
                        request.position,
                        request.size_bytes,
                    )
                    self._on_event(events.SnapshotRead(request, data))
        except (OSError, ValueError) as error:
            self._on_refused(request, error)

    def _gather_appends(self, request: events.AppendLog) -> tuple[int, list[Batch]]:
        """Returns (sequence of the last append, batches of `request` and of the appends that follow it in the
        queue). Together they get one write and one flush.
        """
        sequence, batches = request.sequence, list(request.batches)
        size = sum(batch.size_bytes for batch in batches)
        while self._queue and isinstance(following := self._queue[0], events.AppendLog) and size < APPEND_BYTES_MAX:
            self._queue.popleft()
            sequence = following.sequence
            batches += following.batches
            size += sum(batch.size_bytes for batch in following.batches)
        return sequence, batches

    async def _store_snapshot(self, request: StoreSnapshot) -> None:
        def store() -> int:
            data = encode_state(request.state)
            self._store.store_snapshot(request.meta, data)
            return len(data)

        try:
            size_bytes = await asyncio.get_running_loop().run_in_executor(self._thread, store)
        finally:
            self.is_snapshot_pending = False
        log.info("snapshot of the metadata written", offset=request.meta.offset, size_bytes=size_bytes)
        self._on_event(events.SnapshotStored(request.meta, size_bytes))

    def _on_refused(self, request: DiskRequest, error: Exception) -> None:
        match request:
            case StoreSnapshot():
                log.warning("a snapshot of the metadata could not be written; the log continues", reason=str(error))
            case events.ReadSnapshot():
                log.warning("a snapshot of the metadata could not be read", reason=str(error))
            case _ if isinstance(error, ValueError) and not isinstance(request, events.InstallSnapshot):
                raise error  # a bug
            case _:
                log.error("the metadata log cannot be written; waiting writes are refused", reason=str(error))
                self._queue = deque(
                    waiting for waiting in self._queue if isinstance(waiting, StoreSnapshot | events.ReadSnapshot)
                )
                self._on_event(events.DiskRefused(request.sequence, str(error)))

    async def restore_reserve(self) -> None:
        if self.is_idle:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._store.restore_reserve)

    async def stop(self) -> None:
        while self._worker_task is not None:
            await self._worker_task
        self._thread.shutdown()
        self._store.close()
