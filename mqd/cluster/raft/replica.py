"""The state of a quorum replica that is common to all roles: the vote, the log, completed and pending
disk writes, the committed and delivered offsets, the outgoing messages.

raft/core.py is the replica itself and lists the invariants. This module ensures
    I1  a vote is durable before it is sent: send() holds back all messages until then
    I2  truncate() refuses to remove committed records
    I4  persist_vote() never replaces a vote with an older one
    I5  Committed is delivered only for records that are both committed and durable here
Disk writes complete in the order of their sequence numbers; `_pending_writes` has
the incomplete ones.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable

from mqd.cluster.raft import events
from mqd.cluster.raft.events import NO_DEADLINE, Effect, QuorumSettings, Stored, VoteState
from mqd.cluster.raft.lease import Promise
from mqd.cluster.raft.log_memory import MemoryLog
from mqd.cluster.raft.messages import Batch, Fetch, QuorumMessage, ReplicaKey, SnapshotMeta, Voters

OUTBOX_MAX = 10_000  # messages that wait for the vote to be durable; the oldest is dropped
_NEVER_WRITTEN = (1 << 63) - 1  # a sequence number that no write reaches
_NO_LIMIT = (1 << 63) - 1  # bytes

_DISK_EFFECTS = (events.PersistVote, events.AppendLog, events.TruncateLog, events.InstallSnapshot)


class QuorumBroken(AssertionError):
    """Two replicas have different committed records. This process cannot continue correctly, so it
    ends.
    """


def _rank(effect: Effect) -> int:
    """Sorts disk effects before all others except ControlAppended. The others may cause proposals
    immediately, and the writes of these proposals must come after those already queued.
    """
    return 0 if isinstance(effect, events.ControlAppended) else 1 if isinstance(effect, _DISK_EFFECTS) else 2


class QuorumReplica:
    def __init__(self, key: ReplicaKey, stored: Stored, settings: QuorumSettings) -> None:
        self.key, self.settings = key, settings
        self.vote = self._durable_vote = stored.vote
        self.generation = stored.snapshot.generation if stored.snapshot is not None else 0
        self.log = MemoryLog(stored.snapshot, stored.snapshot_bytes)
        for batch in stored.batches:
            if batch.base_offset >= self.log.start_offset:
                self.log.append(batch)
        self.durable_offset = self.log.end_offset
        self.applied_offset = self.log.start_offset
        self.high_watermark = max(self.applied_offset, min(stored.committed_offset, self.log.end_offset))
        self.promise = Promise()
        self.leader = -1
        self._sequence = 0  # number of the last disk effect
        self._vote_sequence = self._durable_sequence = 0
        # (sequence, kind, end offset) of each write in progress
        self._pending_writes: deque[tuple[int, str, int]] = deque()
        self._retry_vote_ns = NO_DEADLINE
        self._installing: events.InstallSnapshot | None = None
        self._outbox: deque[events.Send] = deque(maxlen=OUTBOX_MAX)
        self._effects: list[Effect] = []
        self._snapshot_requested = False

    # -- queries ----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.vote.epoch

    @property
    def voters(self) -> Voters:
        """The newest voter set in the log, which may not be committed yet."""
        return self.log.voters

    @property
    def is_voter(self) -> bool:
        return any(voter.key == self.key for voter in self.log.voters)

    @property
    def may_campaign(self) -> bool:
        """Whether this replica may be a candidate: it is a voter, or its removal is in its log but possibly
        not committed yet. Then it may be the only one that can win (Raft dissertation 4.2.2).
        """
        log = self.log
        if self.is_voter:
            return True
        return log.voters_offset >= self.high_watermark and any(
            voter.key == self.key for voter in log.voters_before(log.voters_offset)
        )

    @property
    def is_alone(self) -> bool:
        """Whether this replica is the only voter."""
        return self.is_voter and len(self.log.voters) == 1

    @property
    def next_offset(self) -> int:
        return self.log.end_offset

    def snapshot_meta(self, offset: int) -> SnapshotMeta:
        """Returns the SnapshotMeta of the state at `offset`, which must lie between the last snapshot's
        offset and the applied offset.
        """
        if not self.log.start_offset <= offset <= self.applied_offset:
            raise ValueError(
                f"no snapshot can be made at offset {offset}: the log begins at {self.log.start_offset}, and the"
                f" applied offset is {self.applied_offset}"
            )
        return SnapshotMeta(
            offset,
            self.log.epoch_before(offset),
            self.log.voters_before(offset),
            self.generation,
            self.log.trend_before(offset),
        )

    # -- effects -----------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return sorted(effects, key=_rank) if len(effects) > 1 else effects

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, to: int, message: QuorumMessage) -> None:
        """Sends a message, after the vote on which it depends is durable."""
        if to == self.key.node_id:
            return
        if self.is_vote_pending:
            self._outbox.append(events.Send(to, message))
        else:
            self.emit(events.Send(to, message))

    def _queue_write(self, kind: str, end_offset: int, make_effect: Callable[[int], Effect]) -> None:
        self._sequence += 1
        self._pending_writes.append((self._sequence, kind, end_offset))
        self.emit(make_effect(self._sequence))

    @property
    def is_vote_pending(self) -> bool:
        return self._durable_sequence < self._vote_sequence

    def persist_vote(self, vote: VoteState) -> None:
        assert (vote.epoch, vote.voted_for is not None) >= (self.vote.epoch, self.vote.voted_for is not None), "I4"
        self.vote = vote
        self._emit_vote()

    def _emit_vote(self) -> None:
        vote = self.vote
        writes = [effect for effect in self._effects if type(effect) in _DISK_EFFECTS]
        # two votes in one event need only one write
        if writes and isinstance(writes[-1], events.PersistVote):
            self._effects[self._effects.index(writes[-1])] = events.PersistVote(writes[-1].sequence, vote)
            return
        self._vote_sequence = self._sequence + 1
        self._queue_write("vote", 0, lambda sequence: events.PersistVote(sequence, vote))

    def append(self, batches: tuple[Batch, ...]) -> None:
        for batch in batches:
            self.log.append(batch)
        self._queue_write("append", self.log.end_offset, lambda sequence: events.AppendLog(sequence, batches))

    def truncate(self, offset: int) -> None:
        """Removes uncommitted records from `offset` on. Raises QuorumBroken."""
        if offset < self.high_watermark:
            raise QuorumBroken(
                f"the log of the leader of epoch {self.epoch} (node {self.leader}) diverges from this log at offset"
                f" {offset}, but all records below {self.high_watermark} are committed"
            )
        self.log.truncate(offset)
        self.durable_offset = min(self.durable_offset, offset)
        self._pending_writes = deque(
            (sequence, kind, min(end, offset) if kind == "append" else end)
            for sequence, kind, end in self._pending_writes
        )
        self._queue_write("truncate", offset, lambda sequence: events.TruncateLog(sequence, offset))

    @property
    def is_installing(self) -> bool:
        return self._installing is not None

    def install(self, meta: SnapshotMeta, data: bytes) -> None:
        """Installs a snapshot. The log stays unchanged until the snapshot is durable."""
        if meta.offset < self.applied_offset:
            raise QuorumBroken(
                f"the leader's snapshot is at offset {meta.offset}, below the applied offset {self.applied_offset}"
            )

        def make_effect(sequence: int) -> events.InstallSnapshot:
            self._installing = events.InstallSnapshot(sequence, meta, data)
            return self._installing

        self._queue_write("install", meta.offset, make_effect)

    def _finish_install(self) -> None:
        installed, self._installing = self._installing, None
        assert installed is not None
        meta = installed.meta
        self.log.reset(meta, len(installed.data))
        self.generation = meta.generation
        self.durable_offset = self.applied_offset = meta.offset
        self.high_watermark = max(self.high_watermark, meta.offset)
        self._snapshot_requested = False
        self.emit(events.LoadState(meta, installed.data))

    # -- results of disk writes -------------------------------------------------------------------

    def complete_writes(self, sequence: int) -> bool:
        """Marks the writes up to `sequence` as durable. Returns whether one of them installed a snapshot."""
        self._durable_sequence = max(self._durable_sequence, sequence)
        installed = False
        while self._pending_writes and self._pending_writes[0][0] <= sequence:
            _, kind, end_offset = self._pending_writes.popleft()
            if kind == "append":
                self.durable_offset = max(self.durable_offset, end_offset)
            elif kind == "install":
                self._finish_install()
                installed = True
        if not self.is_vote_pending:
            self._durable_vote = self.vote
            while self._outbox:
                self.emit(self._outbox.popleft())
        return installed

    def drop_refused_writes(self, now_ns: int) -> tuple[int, bool]:
        """Drops the writes that the disk refused. Returns (new end of the log, whether the files must be
        truncated there). The vote is retried later.
        """
        truncate_ends = [end for _, kind, end in self._pending_writes if kind == "truncate"]
        if any(kind == "install" for _, kind, _ in self._pending_writes):
            self._installing = None
        if any(kind == "vote" for _, kind, _ in self._pending_writes):
            self._retry_vote_ns, self._vote_sequence = now_ns + self.settings.promise_ns // 2, _NEVER_WRITTEN
        self._pending_writes.clear()
        return min([self.durable_offset, *truncate_ends]), bool(truncate_ends)

    def drop_unflushed_batches(self, end_offset: int, truncate_disk: bool) -> None:
        """Drops the batches that were only in memory, as if this process had crashed before the flush."""
        self.durable_offset = min(self.durable_offset, end_offset)
        if self.log.end_offset > end_offset:
            self.log.truncate(end_offset)
        if truncate_disk:
            self._queue_write("truncate", end_offset, lambda sequence: events.TruncateLog(sequence, end_offset))

    # -- commits ----------------------------------------------------------------------------------

    def commit(self, offset: int) -> None:
        """Commits the records below `offset`; up to there this log must equal the leader's."""
        self.high_watermark = max(self.high_watermark, offset)
        self._deliver_committed()

    def _deliver_committed(self) -> None:
        offset = min(self.high_watermark, self.durable_offset)
        if offset > self.applied_offset:
            batches = self.log.read(self.applied_offset, offset, _NO_LIMIT)
            self.applied_offset = batches[-1].next_offset if batches else self.applied_offset
            if batches:
                self.emit(events.Committed(batches))
        self.on_applied()
        if (
            self.log.snapshot is not None
            and not self._snapshot_requested
            and self.log.size_bytes > self.settings.log_bytes_max + self.settings.retained_bytes
        ):
            if self.applied_offset > self.log.snapshot.offset:
                self._snapshot_requested = True
                self.emit(events.SnapshotWanted(self.applied_offset))

    def on_applied(self) -> None:
        """Called when all committed and durable records have been delivered."""

    def check(self, check_log: bool = True) -> None:
        """Asserts the invariants. `check_log`: also those of the log, in time proportional to its length."""
        if check_log:
            self.log.check()
        assert (self._durable_vote.epoch, self._durable_vote.voted_for is not None) <= (
            self.vote.epoch,
            self.vote.voted_for is not None,
        ), "I4"
        assert self.applied_offset <= min(self.high_watermark, self.durable_offset), "I5"
        assert self.durable_offset <= self.log.end_offset
        assert not self._outbox or self.is_vote_pending, "I1"


class QuorumTransitions(QuorumReplica, abc.ABC):
    """The transitions that a role can request; QuorumCore implements them. A role can see from
    `leading` and `election` whether it is still the current role.
    """

    leading: object
    election: object

    @abc.abstractmethod
    def become_unattached(self, now_ns: int, election_deadline_ns: int) -> None: ...

    @abc.abstractmethod
    def campaign(self, now_ns: int) -> None: ...

    @abc.abstractmethod
    def become_leader(self, now_ns: int) -> None: ...

    @abc.abstractmethod
    def end_epoch(self) -> None: ...

    @abc.abstractmethod
    def doubt_leader(self) -> None: ...

    @abc.abstractmethod
    def make_fetch(self, stamp_ns: int) -> Fetch: ...

    @abc.abstractmethod
    def next_request_sequence(self) -> int: ...

    @abc.abstractmethod
    def random_backoff(self) -> int: ...
