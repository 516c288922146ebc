"""A replica, voter or observer, that fetches from a leader: it fetches the log, or a snapshot if it is
too far behind, and truncates its log if the logs diverge.

    Fetch -> response -> promise, records to the disk -> (durable) -> the next Fetch, which repeats
    the response's stamp; its offset says that all earlier records are on this disk

One request is in flight at a time; responses to other requests are ignored. While its own disk is
busy a replica does not consider its leader silent.
"""

from __future__ import annotations

import zlib

import msgspec

from mqd.cluster.raft.events import NO_DEADLINE, Note, VoteState
from mqd.cluster.raft.messages import (
    SNAPSHOT_BYTES_MAX,
    VOTERS,
    Batch,
    FetchResponse,
    FetchSnapshot,
    ReplicaKey,
    SnapshotChunk,
    SnapshotMeta,
    voters_of,
)
from mqd.cluster.raft.replica import QuorumTransitions


class Download:
    """A snapshot download, in memory: at most SNAPSHOT_BYTES_MAX."""

    def __init__(self, meta: SnapshotMeta, size_bytes: int) -> None:
        self.meta, self.size_bytes = meta, size_bytes
        self.chunks: list[bytes] = []
        self.position = 0


class Following:
    def __init__(self, core: QuorumTransitions, leader: int, now_ns: int) -> None:
        self.core = core
        self.leader = leader
        self._last_contact_ns = now_ns
        self._jitter_ns = core.random_backoff()
        self.sequence: int | None = None  # number of the request in flight
        self._request_sent_ns = now_ns
        self._pause_until_ns = self._extended_until_ns = 0
        self._stamp_ns = 0
        self._download: Download | None = None

    @property
    def deadline_ns(self) -> int:
        retry = self._request_sent_ns + self.core.settings.fetch_retry_ns if self.sequence is not None else NO_DEADLINE
        if self.sequence is None and self.is_flushed:
            retry = self._pause_until_ns
        return min(retry, self._leader_lost_ns)

    @property
    def _leader_lost_ns(self) -> int:
        return max(self._last_contact_ns + self.core.settings.promise_ns + self._jitter_ns, self._extended_until_ns)

    def extend_deadline(self, until_ns: int) -> None:
        self._extended_until_ns = until_ns

    @property
    def is_flushed(self) -> bool:
        return self.core.durable_offset == self.core.log.end_offset and not self.core.is_installing

    def on_tick(self, now_ns: int) -> None:
        if now_ns >= self._leader_lost_ns:
            if not self.is_flushed:
                self._last_contact_ns = now_ns  # restarts the timeout, without a new promise
            else:
                self.core.doubt_leader()
                self.core.campaign(now_ns)
                return
        if self.sequence is not None and now_ns >= self._request_sent_ns + self.core.settings.fetch_retry_ns:
            self.sequence = None
        self.maybe_fetch(now_ns)

    def on_writes_done(self, now_ns: int, installed: bool) -> None:
        if installed:
            self._download = None
        self._last_contact_ns = max(self._last_contact_ns, now_ns - self.core.settings.promise_ns // 2)
        self.maybe_fetch(now_ns)

    def on_disk_refused(self, now_ns: int) -> None:
        self._download = None
        self._pause(now_ns, "the disk is full")

    def _pause(self, now_ns: int, reason: str) -> None:
        self._pause_until_ns = now_ns + self.core.settings.promise_ns // 4
        self.core.emit(
            Note("fetching of the metadata log is paused", (("leader", str(self.leader)), ("reason", reason)))
        )

    def maybe_fetch(self, now_ns: int) -> None:
        if self.sequence is not None or not self.is_flushed or now_ns < self._pause_until_ns:
            return
        core, download = self.core, self._download
        if download is None:
            fetch = core.make_fetch(self._stamp_ns)
            self.sequence = fetch.sequence
            core.send(self.leader, fetch)
        else:
            meta, self.sequence = download.meta, core.next_request_sequence()
            core.send(
                self.leader,
                FetchSnapshot(
                    core.generation,
                    core.epoch,
                    core.key,
                    self.sequence,
                    meta.offset,
                    meta.epoch,
                    download.position,
                    self._stamp_ns,
                ),
            )
        self._request_sent_ns = now_ns

    # -- responses ---------------------------------------------------------------------------------

    def _on_leader_contact(self, sender: ReplicaKey, sent_ns: int, now_ns: int) -> None:
        """Gives the promise after a response: this replica votes for no other one during the time P. The
        leader may rely on the promise once the next request has repeated the response's stamp.
        """
        core = self.core
        core.promise.give(core.epoch, now_ns, core.settings.promise_ns)
        # the next process of this host must know that this one may have given a promise
        if core.vote.followed != sender:
            core.persist_vote(VoteState(core.epoch, core.vote.voted_for, sender))
        self._last_contact_ns, self._stamp_ns, self.sequence = now_ns, sent_ns, None

    def on_fetch_response(self, response: FetchResponse, now_ns: int) -> None:
        if response.sequence != self.sequence or self._download is not None:
            return
        self._on_leader_contact(response.sender, response.sent_ns, now_ns)
        if response.snapshot is not None:
            self._begin_download(response.snapshot, response.snapshot_bytes, now_ns)
        elif response.diverging is not None:
            self._truncate_to(*response.diverging, now_ns)
        else:
            self._append_fetched(response, now_ns)
        self.maybe_fetch(now_ns)

    def _truncate_to(self, epoch: int, end_offset: int, now_ns: int) -> None:
        """Truncates this log where it diverges from the leader's (KIP-595). The logs agree up to the
        smaller of both end offsets of `epoch`.
        """
        core = self.core
        own_end = core.log.epoch_end(epoch)
        offset = min(end_offset, own_end[1]) if own_end is not None else core.log.start_offset
        if offset < core.log.end_offset:
            core.truncate(core.log.batch_start(offset))
        else:
            self._pause(
                now_ns,
                f"the leader reports that the logs diverge at offset {end_offset} of epoch {epoch}; this log ends at"
                f" {core.log.end_offset}",
            )

    def _append_fetched(self, response: FetchResponse, now_ns: int) -> None:
        core = self.core
        if response.batches:
            if not self._are_sound(response.batches):
                self._pause(now_ns, "a batch is damaged or does not follow the last one")
                return
            core.append(response.batches)
        core.commit(min(response.high_watermark, core.log.end_offset))

    def _are_sound(self, batches: tuple[Batch, ...]) -> bool:
        offset, epoch = self.core.log.end_offset, self.core.log.last_epoch
        for batch in batches:
            if batch.base_offset != offset or not epoch <= batch.epoch <= self.core.epoch or not batch.is_sound:
                return False
            try:
                if batch.kind == VOTERS:
                    voters_of(batch)
            except msgspec.MsgspecError:
                return False
            offset, epoch = batch.next_offset, batch.epoch
        return True

    # -- snapshots ---------------------------------------------------------------------------------

    def _begin_download(self, meta: SnapshotMeta, size_bytes: int, now_ns: int) -> None:
        if not 0 <= size_bytes <= SNAPSHOT_BYTES_MAX or meta.offset < self.core.applied_offset:
            self._pause(now_ns, f"a snapshot of {size_bytes} bytes at offset {meta.offset} is too large or too old")
            return
        self.core.emit(
            Note(
                "fetching a snapshot",
                (("offset", str(meta.offset)), ("bytes", str(size_bytes)), ("leader", str(self.leader))),
            )
        )
        self._download = Download(meta, size_bytes)
        self._maybe_install()

    def on_snapshot_chunk(self, chunk: SnapshotChunk, now_ns: int) -> None:
        download = self._download
        if download is None or chunk.sequence != self.sequence:
            return
        self._on_leader_contact(chunk.sender, chunk.sent_ns, now_ns)
        is_sound = (
            chunk.position == download.position
            and chunk.crc == zlib.crc32(chunk.data)
            and len(chunk.data) <= download.size_bytes - download.position
        )
        if not is_sound or not chunk.data:
            self._download = None  # the snapshot is deleted or damaged: start again
            self._pause(now_ns, "the snapshot could not be fetched completely")
        else:
            download.chunks.append(chunk.data)
            download.position += len(chunk.data)
            self._maybe_install()
        self.maybe_fetch(now_ns)

    def _maybe_install(self) -> None:
        download = self._download
        if download is not None and download.position == download.size_bytes:
            self.core.install(download.meta, b"".join(download.chunks))
            download.chunks.clear()
