"""Runs the quorum core: its disk, its timer, its messages. Passes committed records to the metadata
core, and that core's proposals back.

Everything runs in the loop's thread. An effect is carried out as soon as the core has returned it,
in the given order (raft/events.py explains what depends on that).
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from mqd.base import clock, logging
from mqd.cluster.metadata import core as metadata_core
from mqd.cluster.metadata.core import MetadataCore
from mqd.cluster.metadata.records import decode_record, encode_record
from mqd.cluster.raft import events
from mqd.cluster.raft.core import QuorumCore
from mqd.cluster.raft.events import NO_DEADLINE
from mqd.cluster.raft.messages import DATA, Voters
from mqd.cluster.raft.store import QuorumStore, decode_state
from mqd.controller.disk import Disk, StoreSnapshot

SNAPSHOT_RETRY_S = 60.0

log = logging.get("controller.quorum")


class Quorum:
    """`on_metadata(event)`: passes the event to the metadata core. `on_leader()`: called when the
    leader, the epoch or the voters have changed, or this host has become or ceased to be the active
    controller. `send(node_id, message)`: best effort.
    """

    def __init__(
        self,
        core: QuorumCore,
        metadata: MetadataCore,
        store: QuorumStore,
        on_metadata: Callable[[metadata_core.Event], None],
        on_leader: Callable[[], None],
        on_state_loaded: Callable[[], None],
        send: Callable[[int, msgspec.Struct], None],
        fail: Callable[[str], None],
    ) -> None:
        self.core = core
        self._metadata = metadata
        self._on_metadata, self._on_leader, self._on_state_loaded = on_metadata, on_leader, on_state_loaded
        self._send, self._fail = send, fail
        self.disk = Disk(store, self.handle, fail, lambda: core.high_watermark)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = NO_DEADLINE
        self._lease_ms = 0
        self._snapshot_requested_at = 0.0
        self._voter_changes: dict[object, Callable[[int, str], None]] = {}  # those in progress: token -> on_end
        self._change_count = 0
        self._stopped = False

    def handle(self, event: events.Event) -> None:
        if self._stopped:
            return
        try:
            for effect in self.core.handle(event, clock.boottime_ns()):
                _EFFECTS[type(effect)](self, effect)
        except Exception as error:  # a bug, or a contradiction that cannot be repaired here
            log.exception("the controller failed")
            self._stopped = True
            self._fail(f"{type(error).__name__}: {error}")
            return
        self._publish_lease()
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        """Arms the timer for the core's next deadline. A timer that fires too early is armed again."""
        deadline_ns = self.core.next_deadline_ns
        if deadline_ns >= self._timer_ns:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = deadline_ns
        self._timer = asyncio.get_running_loop().call_later(
            max(0, deadline_ns - clock.boottime_ns()) / 1e9, self._on_timer
        )

    def _on_timer(self) -> None:
        self._timer, self._timer_ns = None, NO_DEADLINE
        if clock.boottime_ns() >= self.core.next_deadline_ns:
            self.handle(events.Tick())
        # a stopped core does not move its deadline: a timer would fire again and again
        if not self._stopped:
            self._schedule_tick()

    def _publish_lease(self) -> None:
        if not self._metadata.active:
            return
        until_ns = self.core.lease_deadline_ns(clock.boottime_ns())
        until_ms = until_ns // 1_000_000 if until_ns < NO_DEADLINE else NO_DEADLINE
        if until_ms != self._lease_ms:
            self._lease_ms = until_ms
            self._on_metadata(metadata_core.LeaseChanged(until_ms))

    # -- requests of the metadata core ------------------------------------------------------------

    def propose(self, action: metadata_core.Persist) -> None:
        self.handle(
            events.Propose(
                (action.attempt, action.version),
                tuple([encode_record(record) for record in action.records]),
                action.base_offset,
            )
        )

    def change_voters(self, make_event: Callable[[object], events.Event], on_end: Callable[[int, str], None]) -> None:
        """`make_event(token)` returns an AddVoter, RemoveVoter or UpdateVoter. `on_end(error,
        message)` is called once.
        """
        self._change_count += 1
        token = self._change_count
        self._voter_changes[token] = on_end
        self.handle(make_event(token))

    # -- carrying out ------------------------------------------------------------------------------

    def _send_message(self, effect: events.Send) -> None:
        self._send(effect.to, effect.message)

    def _to_disk(
        self,
        effect: (
            events.PersistVote | events.AppendLog | events.TruncateLog | events.InstallSnapshot | events.ReadSnapshot
        ),
    ) -> None:
        self.disk.submit(effect)

    def _load_state(self, effect: events.LoadState) -> None:
        self._on_metadata(metadata_core.SnapshotInstalled(decode_state(effect.data, effect.meta.offset)))
        self._on_state_loaded()

    def _on_committed(self, effect: events.Committed) -> None:
        for batch in effect.batches:
            try:
                records = tuple([decode_record(value) for value in batch.values]) if batch.kind == DATA else ()
            except ValueError as error:
                raise RuntimeError(
                    f"cannot decode the metadata records from offset {batch.base_offset} on: {error}; start the"
                    " version of mqd that wrote them"
                ) from error
            self._on_metadata(metadata_core.Committed(records, batch.next_offset))

    def _on_became_active(self, effect: events.BecameActive) -> None:
        log.info("this host is the active controller", epoch=effect.epoch, offset=effect.next_offset)
        self._lease_ms = 0
        self._on_metadata(metadata_core.BecameActive(effect.epoch, effect.next_offset, effect.previous_epoch))
        self._publish_lease()
        self._on_leader()

    def _on_deposed(self, effect: events.Deposed) -> None:
        log.info("this host is no longer the active controller", epoch=effect.epoch, reason=effect.reason)
        self._on_metadata(metadata_core.Resigned())
        self._on_leader()

    def _on_control_appended(self, effect: events.ControlAppended) -> None:
        self._on_metadata(metadata_core.OffsetsTaken(effect.next_offset))

    def _on_refused(self, effect: events.ProposalRefused | events.ProposalsDropped) -> None:
        if isinstance(effect, events.ProposalsDropped):
            self._on_metadata(metadata_core.PersistFailed(effect.reason, kept_version=effect.offset))
        else:
            assert isinstance(effect.token, tuple)  # as propose() passed it
            attempt, version = effect.token
            self._on_metadata(metadata_core.PersistFailed(effect.reason, kept_version=version - 1, attempt=attempt))

    def _on_leader_changed(self, effect: events.LeaderChanged | events.VotersChanged) -> None:
        self._on_leader()

    def _on_voter_change_ended(self, effect: events.VoterChangeEnded) -> None:
        on_end = self._voter_changes.pop(effect.token, None)
        if on_end is not None:
            on_end(effect.error, effect.message)

    def _on_snapshot_wanted(self, effect: events.SnapshotWanted) -> None:
        self._request_snapshot()

    def _request_snapshot(self) -> None:
        state = self._metadata.committed
        if not self.disk.is_snapshot_pending:
            self._snapshot_requested_at = asyncio.get_running_loop().time()
            self.disk.submit(StoreSnapshot(self.core.snapshot_meta(state.version), state.copy()))

    def maybe_retry_snapshot(self) -> None:
        """Retries a snapshot that could not be written (no space)."""
        is_due = (
            self.core.log.size_bytes >= self.core.settings.log_bytes_max
            and self.core.log.end_offset > self.core.log.start_offset
        )
        if (
            is_due
            and not self.disk.is_snapshot_pending
            and asyncio.get_running_loop().time() - self._snapshot_requested_at >= SNAPSHOT_RETRY_S
        ):
            if self.core.log.snapshot is None or self._metadata.committed.version > self.core.log.snapshot.offset:
                self._request_snapshot()

    def _on_outdated(self, effect: events.Outdated) -> None:
        self._stopped = True
        self._fail(
            f"node {effect.sender} belongs to generation {effect.generation} of this cluster, which was forced to"
            " continue without this host: empty this host's data directory; it then joins as a new host"
        )

    def _on_note(self, effect: events.Note) -> None:
        log.info(effect.text, **dict(effect.fields))

    @property
    def voters(self) -> Voters:
        return self.core.voters

    @property
    def voters_trend(self) -> int:
        """How the newest voter set got its size: it was FOUNDED with it, has been GROWING, or has
        SHRUNK.
        """
        return self.core.log.voters_trend

    async def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        await self.disk.stop()


_EFFECTS: dict[type, Callable[[Quorum, Any], None]] = {
    events.Send: Quorum._send_message,
    events.PersistVote: Quorum._to_disk,
    events.AppendLog: Quorum._to_disk,
    events.TruncateLog: Quorum._to_disk,
    events.InstallSnapshot: Quorum._to_disk,
    events.ReadSnapshot: Quorum._to_disk,
    events.LoadState: Quorum._load_state,
    events.Committed: Quorum._on_committed,
    events.BecameActive: Quorum._on_became_active,
    events.Deposed: Quorum._on_deposed,
    events.ControlAppended: Quorum._on_control_appended,
    events.ProposalRefused: Quorum._on_refused,
    events.ProposalsDropped: Quorum._on_refused,
    events.LeaderChanged: Quorum._on_leader_changed,
    events.VotersChanged: Quorum._on_leader_changed,
    events.VoterChangeEnded: Quorum._on_voter_change_ended,
    events.SnapshotWanted: Quorum._on_snapshot_wanted,
    events.Outdated: Quorum._on_outdated,
    events.Note: Quorum._on_note,
}
