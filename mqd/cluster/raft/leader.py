"""The leader of an epoch: serves fetches, commits records, checks that a majority follows it, and
resigns otherwise.

Invariants (check())
    D1  a replica's position is the offset that it reported as durable in this epoch, if its log
        up to there matches this log; a position never decreases
    D2  the high watermark moves to the offset up to which a majority of the newest voter set has
        durable records, and only beyond the first record of this epoch (Raft, section 5.4.2)
    D3  at most one Fetch is parked per replica; it is answered when there are new records or a
        new high watermark for it, or after fetch_wait
    D4  a leader that resigns stops using its lease first, then informs all its followers
"""

from __future__ import annotations

import zlib
from typing import Any

from mqd.cluster.raft.events import (
    NO_DEADLINE,
    BecameActive,
    ControlAppended,
    Deposed,
    Note,
    ProposalsDropped,
    Propose,
    ReadSnapshot,
    SnapshotRead,
)
from mqd.cluster.raft.lease import majority_value
from mqd.cluster.raft.messages import (
    BATCH_BYTES_MAX,
    DATA,
    SNAPSHOT_CHUNK_BYTES,
    Batch,
    BeginEpoch,
    EndEpoch,
    Fetch,
    FetchResponse,
    FetchSnapshot,
    ReplicaKey,
    SnapshotChunk,
    leader_change_batch,
    make_batch,
)
from mqd.cluster.raft.progress import QuorumView, Replica
from mqd.cluster.raft.replica import QuorumTransitions
from mqd.cluster.raft.voters import VoterChanges

# tracked voters and observers; beyond it, the observer that has been silent longest is dropped
TRACKED_REPLICAS_MAX = 4_096

# refusals after which the same proposal can succeed later
LEADERSHIP_CHANGING = "the leadership of the metadata quorum is changing"
TOO_MANY_UNCOMMITTED = "too many bytes wait to be committed"


class Leadership:
    changes_class = VoterChanges

    def __init__(self, core: QuorumTransitions, now_ns: int) -> None:
        self.core = core
        self.epoch = core.epoch
        self.began_ns = now_ns
        self.is_active = False
        self.epoch_start_offset = core.log.end_offset
        # the last earlier epoch in which a leader can have been active: an active leader has committed
        # a record of its own epoch, which this log has (I3)
        self.previous_epoch = core.log.last_epoch
        self.replicas: dict[ReplicaKey, Replica] = {}
        self.voter_changes = self.changes_class(self)
        self._exposed_offset = core.log.end_offset  # other replicas may have records below it
        self._parked: dict[ReplicaKey, tuple[Fetch, int]] = {}  # the Fetch and its time; oldest first
        self._announce_at_ns = now_ns
        self._transfer: tuple[int | None, int] | None = None  # (target, deadline)
        # since when other replicas have flushed records that this host's disk does not have: these can be
        # committed, but not applied here
        self._stalled_since_ns = NO_DEADLINE

    # -- time --------------------------------------------------------------------------------------

    @property
    def deadline_ns(self) -> int:
        settings = self.core.settings
        oldest = next(iter(self._parked.values()), None)
        return min(
            oldest[1] + settings.fetch_wait_ns if oldest is not None else NO_DEADLINE,
            self._majority_contact_ns(NO_DEADLINE - settings.check_quorum_ns) + settings.check_quorum_ns,
            self._announce_at_ns,
            self._transfer[1] if self._transfer is not None else NO_DEADLINE,
            self.voter_changes.deadline_ns,
            self._stalled_until_ns,
        )

    @property
    def _stalled_until_ns(self) -> int:
        return (
            NO_DEADLINE
            if self._stalled_since_ns == NO_DEADLINE
            else self._stalled_since_ns + self.core.settings.check_quorum_ns
        )

    def _majority_contact_ns(self, now_ns: int) -> int:
        """The latest time after which a majority of the voters, including this one, has fetched."""
        contacts = {voter.key: max(self.began_ns, self._contact_ns(voter.key)) for voter in self.core.voters}
        return majority_value(self.core.voters, {**contacts, self.core.key: now_ns}, self.began_ns)

    def _contact_ns(self, key: ReplicaKey) -> int:
        replica = self.replicas.get(key)
        return replica.last_contact_ns if replica is not None else -1

    def on_tick(self, now_ns: int) -> None:
        settings = self.core.settings
        while self._parked and next(iter(self._parked.values()))[1] + settings.fetch_wait_ns <= now_ns:
            self._respond_to(next(iter(self._parked)), now_ns)
        if now_ns >= self._announce_at_ns:
            self._announce(now_ns)
        if self.has_lost_quorum(now_ns):
            self.resign("a majority of the voters has stopped fetching", now_ns)
            return
        if now_ns >= self._stalled_until_ns:
            self.resign("its disk is too slow", now_ns)
            return
        self.voter_changes.on_tick(now_ns)
        if self._transfer is not None and now_ns >= self._transfer[1]:
            to, self._transfer = self._transfer[0], None
            if to is None:
                self.resign("handed over", now_ns)
                return
            self.core.emit(
                Note(
                    "the leadership of the metadata quorum was not transferred: the successor did not catch up",
                    (("to", str(to)),),
                )
            )
        self._maybe_transfer(now_ns)

    def has_lost_quorum(self, now_ns: int) -> bool:
        return now_ns >= self._majority_contact_ns(now_ns) + self.core.settings.check_quorum_ns

    def _announce(self, now_ns: int) -> None:
        """Sends BeginEpoch to voters that have not fetched in this epoch and may not know of it."""
        silent = [
            voter.key for voter in self.core.voters if voter.key != self.core.key and self._contact_ns(voter.key) < 0
        ]
        for key in silent:
            self.core.send(key.node_id, BeginEpoch(self.core.generation, self.epoch, self.core.key))
        self._announce_at_ns = now_ns + self.core.settings.fetch_wait_ns if silent else NO_DEADLINE

    def stamps(self) -> dict[ReplicaKey, int]:
        """For each replica, the send time of the newest response that it has accepted."""
        return {key: replica.stamp_ns for key, replica in self.replicas.items()}

    # -- the log -----------------------------------------------------------------------------------

    def begin(self, now_ns: int) -> None:
        core = self.core
        self._announce(now_ns)
        core.append((leader_change_batch(core.log.end_offset, self.epoch, core.key),))

    def refusal_of(self, proposal: Propose) -> str:
        """The reason that the proposal cannot be appended; "" = it can."""
        core = self.core
        size = sum(map(len, proposal.values))
        if not self.is_active or self._transfer is not None:
            return LEADERSHIP_CHANGING
        if proposal.base_offset is not None and proposal.base_offset != core.log.end_offset:
            return f"it was made for offset {proposal.base_offset}, but the log ends at {core.log.end_offset}"
        if not proposal.values or size > BATCH_BYTES_MAX:
            return f"the change has {size} bytes; it must have 1 to {BATCH_BYTES_MAX}"
        if core.log.bytes_after(core.high_watermark) + size > core.settings.uncommitted_bytes_max:
            return TOO_MANY_UNCOMMITTED
        return ""

    def propose(self, values: tuple[bytes, ...], now_ns: int) -> None:
        self._append(make_batch(self.core.log.end_offset, self.epoch, DATA, values), now_ns)

    def append_control(self, batch: Batch, now_ns: int) -> None:
        self.core.emit(ControlAppended(batch.next_offset))
        self._append(batch, now_ns)

    def _append(self, batch: Batch, now_ns: int) -> None:
        self.core.append((batch,))
        self._respond_all(now_ns)

    def own_position(self) -> int:
        return self.core.durable_offset

    def advance(self, now_ns: int) -> None:
        self._watch_disk(now_ns)
        core = self.core
        positions = {key: replica.position for key, replica in self.replicas.items()}
        offset = majority_value(core.voters, {**positions, core.key: self.own_position()}, -1)
        if offset <= core.high_watermark or not self.may_commit(offset):
            return
        core.commit(offset)
        self._watch_disk(now_ns)
        self._respond_all(now_ns)
        self.voter_changes.on_committed()
        if not core.is_voter and core.log.voters_offset < core.high_watermark:
            self.resign("this host is no longer a voter", now_ns)

    def _watch_disk(self, now_ns: int) -> None:
        if self.own_position() >= self.core.high_watermark:
            self._stalled_since_ns = NO_DEADLINE
        elif self._stalled_since_ns == NO_DEADLINE:
            self._stalled_since_ns = now_ns

    def may_commit(self, offset: int) -> bool:
        return offset > self.epoch_start_offset

    def on_applied(self) -> None:
        if not self.is_active and self.core.applied_offset > self.epoch_start_offset:
            self.is_active = True
            self.core.emit(BecameActive(self.epoch, self.core.log.end_offset, self.previous_epoch))

    def on_disk_refused(self, end_offset: int, reason: str, now_ns: int) -> None:
        """This host's disk has only the records below `end_offset`. Proposals that no other replica has are
        dropped as if never made; if another replica may have them, the leader resigns.
        """
        if self._exposed_offset <= end_offset and self.is_active:
            self.voter_changes.on_dropped(end_offset)
            self.core.emit(ProposalsDropped(end_offset, reason))
        else:
            self.resign(f"its disk refused a write: {reason}", now_ns)

    # -- fetches -----------------------------------------------------------------------------------

    def on_fetch(self, fetch: Fetch, now_ns: int) -> None:
        log = self.core.log
        replica = self._track(fetch.replica)
        replica.last_contact_ns = now_ns
        self.update_stamp(replica, fetch.stamp_ns, now_ns)
        parked = self._parked.get(fetch.replica)
        if parked is not None and parked[0].sequence > fetch.sequence:
            return  # a later Fetch has overtaken it
        self._parked.pop(fetch.replica, None)
        if fetch.generation == 0 or fetch.offset < log.start_offset:
            self._offer_snapshot(fetch, now_ns)
            return
        epoch_and_end = log.epoch_end(fetch.last_epoch)
        if epoch_and_end is None:
            self._offer_snapshot(fetch, now_ns)
        elif epoch_and_end[0] != fetch.last_epoch or epoch_and_end[1] < fetch.offset:
            self._respond(fetch, now_ns, diverging=epoch_and_end)
        else:
            self._on_position(replica, fetch, now_ns)

    def _on_position(self, replica: Replica, fetch: Fetch, now_ns: int) -> None:
        core = self.core
        replica.position = max(replica.position, fetch.offset)
        replica.on_fetched(fetch.offset, core.log.end_offset, now_ns)
        self._parked[fetch.replica] = (fetch, now_ns)
        self.advance(now_ns)
        if core.leading is not self:
            return
        self.voter_changes.on_fetched(replica, now_ns)
        self._maybe_transfer(now_ns)
        if core.leading is self and fetch.replica in self._parked and self._has_new_data(fetch):
            self._respond_to(fetch.replica, now_ns)

    def update_stamp(self, replica: Replica, stamp_ns: int, now_ns: int) -> None:
        """Stores the send time of the response that the replica has accepted."""
        if replica.stamp_ns < stamp_ns <= now_ns:
            replica.stamp_ns = stamp_ns

    def _track(self, key: ReplicaKey) -> Replica:
        replica = self.replicas.get(key)
        if replica is None:
            if len(self.replicas) >= TRACKED_REPLICAS_MAX:
                voter_keys = {voter.key for voter in self.core.voters}
                silent = min(
                    (tracked for tracked in self.replicas.values() if tracked.key not in voter_keys),
                    key=lambda tracked: tracked.last_contact_ns,
                )
                del self.replicas[silent.key]
                self._parked.pop(silent.key, None)
            replica = self.replicas[key] = Replica(key)
        return replica

    def _has_new_data(self, fetch: Fetch) -> bool:
        return fetch.offset < self.core.log.end_offset or fetch.high_watermark < self.core.high_watermark

    def _respond_all(self, now_ns: int) -> None:
        for key in [key for key, (fetch, _) in self._parked.items() if self._has_new_data(fetch)]:
            self._respond_to(key, now_ns)

    def _respond_to(self, key: ReplicaKey, now_ns: int) -> None:
        fetch, _ = self._parked.pop(key)
        batches = self.core.log.read(fetch.offset, self.core.log.end_offset, self.core.settings.fetch_bytes_max)
        if batches:
            self._exposed_offset = max(self._exposed_offset, batches[-1].next_offset)
        self._respond(fetch, now_ns, batches=batches)

    def _respond(self, fetch: Fetch, now_ns: int, **content: Any) -> None:
        core = self.core
        response = FetchResponse(
            core.generation,
            self.epoch,
            core.key.node_id,
            core.key,
            fetch.sequence,
            now_ns,
            core.high_watermark,
            **content,
        )
        core.send(fetch.replica.node_id, response)

    # -- snapshots ---------------------------------------------------------------------------------

    def _offer_snapshot(self, fetch: Fetch, now_ns: int) -> None:
        assert self.core.log.snapshot is not None, "a voter has a snapshot"
        self._respond(fetch, now_ns, snapshot=self.core.log.snapshot, snapshot_bytes=self.core.log.snapshot_bytes)

    def on_fetch_snapshot(self, fetch: FetchSnapshot, now_ns: int) -> None:
        replica = self._track(fetch.replica)
        replica.last_contact_ns = now_ns
        self.update_stamp(replica, fetch.stamp_ns, now_ns)
        snapshot = self.core.log.snapshot
        request = ReadSnapshot(
            fetch.replica.node_id,
            fetch.replica,
            fetch.sequence,
            self.epoch,
            fetch.snapshot_offset,
            fetch.snapshot_epoch,
            max(fetch.position, 0),
            SNAPSHOT_CHUNK_BYTES,
        )
        if snapshot is None or (snapshot.offset, snapshot.epoch) != (fetch.snapshot_offset, fetch.snapshot_epoch):
            self.on_snapshot_read(SnapshotRead(request, b""), now_ns)
        else:
            self.core.emit(request)

    def on_snapshot_read(self, event: SnapshotRead, now_ns: int) -> None:
        request, core = event.request, self.core
        chunk = SnapshotChunk(
            core.generation,
            self.epoch,
            core.key,
            request.fetch_sequence,
            now_ns,
            request.position,
            event.data,
            zlib.crc32(event.data),
        )
        core.send(request.to, chunk)

    # -- resignation ------------------------------------------------------------------------------

    def transfer(self, to: int | None, now_ns: int) -> None:
        """Refuses proposals from now on; when the successor has all records, gives up the lease."""
        others = [voter.node_id for voter in self.core.voters if voter.key != self.core.key]
        if not others or (to is not None and to not in others):
            reason = f"no other voter has the id {to}" if others else "there is no other voter"
            self.core.emit(Note("the leadership of the metadata quorum stays here", (("reason", reason),)))
            return
        self._transfer = (to, now_ns + self.core.settings.promise_ns)
        self._maybe_transfer(now_ns)

    def _maybe_transfer(self, now_ns: int) -> None:
        if self._transfer is None or self.core.high_watermark < self.core.log.end_offset:
            return
        to = self._transfer[0]
        ready = [
            key.node_id
            for key in self._successors_best_first()
            if self.replicas[key].position >= self.core.log.end_offset
        ]
        if to in ready or (to is None and ready):
            self.resign("handed over", now_ns, to if to is not None else ready[0])

    def _successors_best_first(self) -> list[ReplicaKey]:
        """The other voters that have fetched, the longest log first."""
        fetching = [
            voter.key for voter in self.core.voters if voter.key != self.core.key and voter.key in self.replicas
        ]
        return sorted(fetching, key=lambda key: (-self.replicas[key].position, key))

    def resign(self, reason: str, now_ns: int, successor: int | None = None, campaign_again: bool = False) -> None:
        core = self.core
        successors = [key.node_id for key in self._successors_best_first()]
        if successor is not None:
            successors = [successor] + [node for node in successors if node != successor]
        if campaign_again and core.may_campaign:
            successors.insert(0, core.key.node_id)
        nodes = {voter.node_id for voter in core.voters} | {key.node_id for key in self.replicas}
        core.leading = None
        core.end_epoch()
        self.voter_changes.fail(
            "This host has lost the leadership of the metadata quorum; it is not known whether the change of voters"
            " takes effect."
        )
        core.emit(Note("no longer leads the metadata quorum", (("epoch", str(self.epoch)), ("reason", reason))))
        if self.is_active:
            core.emit(Deposed(self.epoch, reason))
        for node in sorted(nodes):
            core.send(node, EndEpoch(core.generation, self.epoch, core.key, tuple(successors)))
        settings = core.settings
        core.become_unattached(
            now_ns,
            now_ns
            + (0 if campaign_again else settings.promise_ns // 2 if core.is_alone else settings.promise_ns)
            + core.random_backoff(),
        )

    # -- views -------------------------------------------------------------------------------------

    def describe(self, now_ns: int) -> QuorumView:
        core = self.core
        voter_keys = {voter.key for voter in core.voters}
        voters = [self.replicas.get(voter.key, Replica(voter.key)) for voter in core.voters]
        own_replica = Replica(core.key, core.durable_offset, 0, now_ns, now_ns)
        voter_views = tuple((own_replica if replica.key == core.key else replica).view(now_ns) for replica in voters)
        observers = tuple(
            replica.view(now_ns) for key, replica in sorted(self.replicas.items()) if key not in voter_keys
        )
        return QuorumView(core.key.node_id, self.epoch, core.high_watermark, voter_views, observers)

    def check(self) -> None:
        core = self.core
        assert self.epoch == core.epoch
        assert (
            self.epoch_start_offset < core.log.end_offset
            and core.log.epoch_before(self.epoch_start_offset + 1) == self.epoch
        )
        for key, replica in self.replicas.items():
            assert replica.key == key and replica.position <= core.log.end_offset, "D1"
        assert not self.is_active or core.applied_offset > self.epoch_start_offset, "D2"
        for key, (fetch, _) in self._parked.items():
            assert fetch.replica == key and not self._has_new_data(fetch), "D3"
